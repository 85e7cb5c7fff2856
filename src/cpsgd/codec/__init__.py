"""From a vector to a message and from summed messages back to a vector: the stages that all mechanisms share.

| module | what it does |
|---|---|
| `clip` | the grid that rounding starts from, and the norm of a vector on it |
| `rotate` | spreads every vector over all coordinates |
| `rounding` | the kernels that round, and tables to draw noise from by inversion |
| `pack` | payloads: integers to bytes, and sums of them |
| `wire` | frames a payload as a message |
| `pipeline`, `batch` | all stages in one go, for one vector and for many |

`_kernels` holds the C++ code and its NumPy twin.
"""
