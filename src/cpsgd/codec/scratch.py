"""Where vectors are rotated: memory that lies well for the processor, and that a thread keeps from call to call.

Rows of the transform begin on a cache line, so that none is read or written twice. Large arrays are fresh pages of the
operating system each time, which costs as much as a pass of the transform.
"""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray

_LINE = 64
_FLOAT = 4
LARGEST_KEPT = 1 << 24
"""Floats that a thread keeps at most; longer vectors take new memory in each call."""


class _Kept(threading.local):
    floats: NDArray[np.float32] | None = None


_kept = _Kept()


def floats(size: int) -> NDArray[np.float32]:
    """So many uninitialised float32 numbers that begin on a cache line."""
    memory = np.empty(size + _LINE // _FLOAT, dtype=np.float32)
    start = -memory.ctypes.data % _LINE // _FLOAT
    return memory[start : start + size]


def take(size: int) -> NDArray[np.float32]:
    """The same from the calling thread's memory, for one call: to be given back at its end."""
    # Taken, not shared: a call inside the call, by a signal's handler for one, finds none and gets its own.
    kept, _kept.floats = _kept.floats, None
    return kept if kept is not None and kept.size == size else floats(size)


def give_back(taken: NDArray[np.float32]) -> None:
    """Keeps what `take` gave for the thread's next call."""
    if taken.size <= LARGEST_KEPT:
        _kept.floats = taken
