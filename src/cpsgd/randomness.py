"""Two kinds of randomness, two types, never mixed.

Private randomness (`Keystream`) hides people: it is keyed from the operating system and used for one message; only the
thread that encoded it still has its last block in memory, beside the vector, until the next one. Public randomness
(`public_bits`) is known to all parties: it follows from an announced seed by a fixed construction, the same on every
platform and in every release (test vectors in `tests/data/rotation-signs.json`).
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from typing import NoReturn, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

# CTR mode encrypts a run of zeros to get the bare keystream; one shared run serves all calls.
_ZEROS = memoryview(bytes(3 << 19))
SLACK = 16
"""Bytes of room that `Keystream.fill` wants behind the data."""

# Keys are used once, so all counters may begin alike.
_FROM_ZERO = modes.CTR(bytes(16))
# GCM encrypts in counter mode, too, from block 2 on. Libraries run it on wider registers than the plain mode: a quarter
# less time on current processors, also with the tag, which nobody asks for.
_FROM_TWO = modes.GCM(bytes(12))
# GCM counts blocks in 32 bits. Well before these are spent, a private stream goes on under a new key.
_REKEYED_AFTER = 1 << 35


class Keystream:
    """A cryptographic stream of private random bytes: AES-128 in counter mode under a key used only here.

    The key is drawn when the stream is made and cannot be read, printed, copied or pickled. A new stream is made for
    every message, so that no restart can repeat one; and a stream refuses to go on in a forked child, where the parent
    would go on with the same bytes.
    """

    __slots__ = ("_encryptor", "_left", "_process")

    def __init__(self, key: bytes | None = None) -> None:
        """Starts a stream.

        `key` (16 bytes) is for streams that others derive alike (masks, coordinates that a message leaves out) and for
        tests; such a stream is AES-128 in counter mode from block 0, without end.
        """
        self._process = os.getpid()
        if key is None:
            self._start()
        else:
            self._left = math.inf
            self._encryptor = Cipher(algorithms.AES128(key), _FROM_ZERO).encryptor()

    @classmethod
    def in_gcm(cls, key: bytes) -> Self:
        """Returns the stream of AES-128-GCM, up to 2^36 bytes, which others can derive too; it is faster."""
        found = cls(key)
        found._encryptor = Cipher(algorithms.AES128(key), _FROM_TWO).encryptor()
        return found

    def _start(self) -> None:
        self._left = float(_REKEYED_AFTER)
        self._encryptor = Cipher(algorithms.AES128(os.urandom(16)), _FROM_TWO).encryptor()

    @staticmethod
    def buffer(size: int) -> NDArray[np.uint8]:
        """Returns an uninitialised buffer that `fill` can write `size` bytes to."""
        return np.empty(size + SLACK, dtype=np.uint8)

    def fill(self, buffer: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
        """Writes the next `size` bytes to a buffer made by `buffer`, and returns them as a view of it."""
        if os.getpid() != self._process:
            raise RuntimeError("A private keystream cannot be used in a forked child: its bytes would be used twice.")
        room = buffer.data
        for start in range(0, size, len(_ZEROS)):
            count = min(len(_ZEROS), size - start)
            if self._left < count:
                self._start()
            self._left -= count
            self._encryptor.update_into(_ZEROS[:count], room[start : start + count + SLACK])
        return buffer[:size]

    def take(self, size: int) -> NDArray[np.uint8]:
        """Returns the next `size` bytes as a new array."""
        return self.fill(self.buffer(size), size)

    def __reduce__(self) -> NoReturn:
        raise TypeError("A private keystream cannot be copied or pickled: its bytes must never be used twice.")


def public_bits(purpose: str, seed: int, round: int, size: int) -> NDArray[np.uint8]:
    """Returns `size` bytes of public randomness for one purpose and round, the same everywhere and for ever.

    AES-256 in counter mode from block 0 under the key SHA-256(purpose ‖ seed ‖ round), the numbers as 8 bytes, least
    significant first.
    """
    key = hashlib.sha256(purpose.encode() + struct.pack("<QQ", seed, round)).digest()
    stream = Cipher(algorithms.AES256(key), _FROM_ZERO).encryptor()
    return np.frombuffer(stream.update(bytes(size)), dtype=np.uint8)
