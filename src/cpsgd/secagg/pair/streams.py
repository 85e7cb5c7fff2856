"""Seeds to elements, and hashes: the random oracle and the generator that `docs/proofs/pair.md` speaks of.

A stream is AES-256 in counter mode under the key SHA-256(purpose, context, report id, further parts), every part with
its length before it. Elements are its little-endian 32-bit words modulo p; words from the largest multiple of p on are
left out, so that elements are exactly uniform where words are.
"""

from __future__ import annotations

import hashlib
import struct

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from cpsgd.codec.rounding import kernels
from cpsgd.secagg.pair.extension import Elements
from cpsgd.secagg.pair.shape import RoundShape

SEED_BYTES = 32
ID_BYTES = 16


def digest(purpose: str, shape: RoundShape, report: bytes, *parts: bytes | memoryview) -> bytes:
    """Returns the SHA-256 of a purpose, the context, the report's id and further parts, none of them ambiguous."""
    found = hashlib.sha256()
    for part in (b"cpsgd pair " + purpose.encode(), shape.context, report, *parts):
        found.update(struct.pack("<Q", len(part)))
        found.update(part)
    return found.digest()


class Stream:
    """A stream of elements, read in order."""

    def __init__(self, shape: RoundShape, purpose: str, report: bytes, *parts: bytes) -> None:
        key = digest(purpose, shape, report, *parts)
        self._shape = shape
        self._encryptor = Cipher(algorithms.AES256(key), modes.CTR(bytes(16))).encryptor()

    def bytes(self, size: int) -> bytes:
        """Returns the next bytes."""
        return self._encryptor.update(bytes(size))

    def numbers(self, count: int) -> Elements:
        """Returns the next `count` numbers below p."""
        prime = self._shape.field.prime
        out = np.empty(count, dtype=np.uint32)
        done = 0
        while done < count:
            missing = count - done
            # Exactly as many words as are missing: every reader of the stream must stop at the same word.
            words = np.frombuffer(self._encryptor.update(bytes(4 * missing)), dtype="<u4")
            done += kernels.uniform_elements(words, prime, out[done:])
        return out

    def elements(self, count: int) -> Elements:
        """Returns the next `count` elements of E."""
        degree = self._shape.field.degree
        return self.numbers(count * degree).reshape(count, degree)


def joint_randomness(shape: RoundShape, report: bytes, leader_part: bytes, helper_part: bytes) -> Elements:
    """Returns r_1, ..., r_C, which no client knows before it has fixed both shares."""
    return Stream(shape, "joint", report, leader_part, helper_part).elements(shape.columns)


def evaluation_point(shape: RoundShape, report: bytes, verification_key: bytes) -> Elements:
    """Returns t, which no client ever knows.

    It is drawn again while it is in F_p, where a column's mask would not hide the column.
    """
    stream = Stream(shape, "point", report, verification_key)
    while True:
        found = stream.elements(1)
        if found[0, 1:].any():
            return found
