"""Noise with a memory: rounds that take away again what earlier rounds of a run added.

| module | content |
|---|---|
| `weights` | the weights of earlier rounds' noise, and their price in sensitivity |
| `draws`, `fine_draws` | a client's noise from its seeds, on one grid of integers, or on a finer one |
| `run_memory` | `RunMemory`: state, checks and charging of a run, also in a federation |
| `mechanism` | `CorrelatedGaussian` |
| `run_sums`, `device_sums` | the noise of a run's sums, for simulations |
| `batons`, `seeds`, `handover` | seeds that clients keep and hand on |

Nobody outside asks whether noise is correlated: a mechanism has a `memory` (`cpsgd.mechanisms.memory`), which for
independent noise is empty.
"""
