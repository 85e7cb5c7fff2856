"""From a vector to a message and from summed messages back to a vector: the stages that all mechanisms share.

| module | what it does |
|---|---|
| `clip` | scales a vector down to norm D, and makes sure of it on the grid |
| `rotate` | spreads every vector over all coordinates |
| `rounding` | the grid that stochastic rounding starts from, and tables to draw noise by inversion |
| `pack`, `formats` | integers to bytes, and sums of them; which coordinates a message holds |
| `wire` | frames a payload as a message |
| `pipeline` | runs them all, fused and in blocks |

`_kernels` holds the C++ code and its NumPy twin.
"""
