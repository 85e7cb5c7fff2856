"""Noise with a memory: rounds that take away again what earlier rounds of a run added.

| module | content |
|---|---|
| `weights` | the weights of earlier rounds' noise, and their price in sensitivity |
| `draws` | a client's noise from its seeds, on one grid of integers |
| `run_memory` | `RunMemory`: state, checks and charging of a run |
| `mechanism` | `CorrelatedGaussian` |

Nobody outside asks whether noise is correlated: a mechanism has a `memory` (`cpsgd.mechanisms.memory`), which for
independent noise is empty.
"""
