"""The table beside jax_privacy: its rows are the file's, and two implementations agree where both have a mechanism."""

from __future__ import annotations

import csv
from itertools import product

import numpy as np
import pytest

from cpsgd.correlated.weights import Correlation
from reproduction.accuracy_vs_bytes import RESULTS
from reproduction.matrix_mechanisms import SIZE, TABLE, tree_gain

with TABLE.open(encoding="utf-8") as file:
    ROWS = list(csv.DictReader(file))


def test_the_page_has_the_files_rows() -> None:
    page = (RESULTS / "README.md").read_text(encoding="utf-8")
    for row in ROWS:
        accuracy = f"{float(row['accuracy']):.2f} %" if row["accuracy"] else "–"
        figures = f"{row['passes']} | {float(row['gain']):.3g} | {float(row['kilobytes']):,.0f} | {accuracy}"
        assert f"| {row['mechanism']} | {row['trusted']} | {figures} |" in page


@pytest.mark.parametrize("passes", [1, 10])
def test_bands_of_the_inverse_square_root_have_the_gain_of_another_implementation(passes: int) -> None:
    """Ours are multiples of 2⁻¹⁴, which costs one per cent of the gain at 32 bands."""
    row = next(row for row in ROWS if row["mechanism"] == "BISR, 32 bands" and row["passes"] == str(passes))
    ours = Correlation(32, SIZE.rounds, None if passes == 1 else SIZE.rounds // passes)
    independent = 1.0 if passes == 1 else passes
    assert independent * ours.gain == pytest.approx(float(row["gain"]), rel=0.015)


@pytest.mark.parametrize("rounds", [3, 6, 7])
def test_the_tree_has_the_variances_of_least_squares(rounds: int) -> None:
    """Honaker's estimate of a node is the best of all nodes below it; prefixes add estimates of disjoint nodes."""
    height = rounds.bit_length()
    errors = np.zeros(rounds)
    for t, level in product(range(1, rounds + 1), range(height)):
        if t >> level & 1:
            leaves = 1 << level
            sums = [np.repeat(np.eye(leaves >> i), 1 << i, axis=1) for i in range(level + 1)]
            tree = np.concatenate(sums)
            whole = np.ones(leaves)
            errors[t - 1] += whole @ np.linalg.inv(tree.T @ tree) @ whole
    assert tree_gain(rounds) == pytest.approx(0.5 * (rounds + 1) / (height * errors.mean()))
