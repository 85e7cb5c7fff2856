"""Where vectors are rotated: memory that lies well for the processor, and that a thread keeps from call to call.

Rows of the transform begin on a cache line, so that none is read or written twice. Large arrays are fresh pages of the
operating system each time, which costs as much as a pass of the transform. Each thread keeps one array per type: the
vector's numbers, and the keystream that makes noise of them.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import NDArray

_LINE = 64
_FLOAT = np.dtype(np.float32)
LARGEST_KEPT = 1 << 24
"""Numbers of a type that a thread keeps at most; longer vectors take new memory in each call."""


class _Kept(threading.local):
    def __init__(self) -> None:
        self.arrays: dict[np.dtype[Any], NDArray[Any]] = {}


_kept = _Kept()


def floats(size: int) -> NDArray[np.float32]:
    """So many uninitialised float32 numbers that begin on a cache line."""
    return _new(size, _FLOAT)


def _new(size: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    memory = np.empty(size + _LINE // dtype.itemsize, dtype=dtype)
    start = -memory.ctypes.data % _LINE // dtype.itemsize
    return memory[start : start + size]


def take(size: int, dtype: np.dtype[Any] = _FLOAT) -> NDArray[Any]:
    """The same from the calling thread's memory, for one call: to be given back at its end."""
    # Taken, not shared: a call inside the call, by a signal's handler for one, finds none and gets its own.
    kept = _kept.arrays.pop(dtype, None)
    return kept if kept is not None and kept.size == size else _new(size, dtype)


def give_back(taken: NDArray[Any]) -> None:
    """Keeps what `take` gave for the thread's next call."""
    if taken.size <= LARGEST_KEPT:
        _kept.arrays[taken.dtype] = taken
