"""The paper's theorems, bounds and rules, each found by its number. No guarantee of this package rests on them.

| in the paper | here |
|---|---|
| Theorem 1, the Binomial mechanism; the lemma on the sensitivities of rounding | `theorem` |
| Theorems 2, 3 and 4, errors of the three protocols; X^max | `bounds` |
| Corollary 1, convergence of SGD | `reproduction/paper_convergence.py` |
| the choice of k and m for a number of bits | `reproduction/paper_design.py` |

Agarwal, Suresh, Yu, Kumar, McMahan: "cpSGD: Communication-efficient and differentially-private distributed SGD",
NeurIPS 2018.
"""
