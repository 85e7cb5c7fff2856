"""Who is whose neighbour: a circle in public random order, each client tied to the k/2 next on either side.

Everybody computes it from the announced session, so that the server cannot tell different clients different graphs. In
a complete graph (k = n - 1) the order does not matter. `cpsgd.secagg.choice` proves what k is enough.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray


def neighbours(clients: int, degree: int, session: bytes, index: int) -> tuple[int, ...]:
    """The neighbours of client `index`, in increasing order.

    Example:
        >>> neighbours(4, 3, bytes(16), 2)
        (0, 1, 3)
        >>> all(5 in neighbours(100, 10, bytes(16), j) for j in neighbours(100, 10, bytes(16), 5))
        True
    """
    if degree == clients - 1:
        return tuple(other for other in range(clients) if other != index)
    order, position = _circle(clients, session)
    steps = np.arange(1, degree // 2 + 1)
    places = int(position[index]) + np.concatenate([-steps, steps])
    return tuple(sorted(order[places % clients].tolist()))


@lru_cache(maxsize=4)
def _circle(clients: int, session: bytes) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The clients in the order of 64-bit numbers from an AES-256 keystream, and each client's place in it."""
    key = hashlib.sha256(b"cpsgd secagg 1 graph" + session).digest()
    stream = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor().update(bytes(8 * clients))
    # A stable sort, so that all agree even if two numbers were equal.
    order = np.argsort(np.frombuffer(stream, "<u8"), kind="stable")
    position = np.empty(clients, dtype=np.int64)
    position[order] = np.arange(clients)
    return order, position
