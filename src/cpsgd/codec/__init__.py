"""The pipeline from a vector to a message and from summed messages back to a vector, one module a stage.

| stage | forward | backward |
|---|---|---|
| `clip` | scale down to norm D, express in grid units | back to the vector's units |
| `rotate` | spread every vector over all coordinates | the inverse rotation |
| `quantize` | stochastic rounding to k levels | level to coordinate |
| `noise` | add Binomial(m, p) | subtract its mean |
| `pack` | integers to bytes | bytes to integers |

`pipeline` runs them fused and in blocks, `wire` frames the result as a message. `_kernels` holds the C++ code and its
NumPy twin.
"""
