"""Masks: pseudorandom integers modulo M, added to a client's integers, and the integers as bytes.

Every mask comes from an AES-128 keystream in counter mode under a key that is used for this mask only. A power of two
and any other modulus M differ in all but that:

* **M = 2^b** (`Bits`). Words of 8, 16 or 32 bits, the narrowest that hold b bits, are taken from the keystream, least
  significant byte first. Word arithmetic wraps around at a multiple of 2^b, so only the low b bits are kept at the end.
  As bytes, integers are cut into planes: the low 32, 16 or 8 bits of all of them (whichever of these b is made of, the
  widest first, each least significant byte first), then the remaining b mod 8 bits of all of them packed as in
  `codec.pack`. That takes ⌈b d/8⌉ bytes like packing them one by one, and is many times faster.
* **Any other M** (`Residues`). The keystream is read in words w of 32 bits. One with w M mod 2^32 >= 2^32 mod M gives
  the integer ⌊w M/2^32⌋; others give none, and are skipped. Every integer is the quotient of exactly ⌊2^32/M⌋ words
  that are not skipped (Lemire, "Fast random integer generation in an interval", 2019), so for an ideal keystream a mask
  is uniform modulo M: exactly, not nearly. Which words are skipped shows in the time this takes. It is independent of
  the mask, whose integers are uniform whatever the skipped words are. Nothing else does: no division, and no branch or
  address that depends on a client's integers. As bytes, integers are packed as in `codec.pack`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import pack
from cpsgd.errors import MessageError, ParameterError, ValueRangeError
from cpsgd.randomness import Keystream

# Sums and keystream of one block stay in the processor's cache while all masks are added to it.
_BLOCK_BYTES = 1 << 18
# A server may have a hundred thousand masks to remove; so many ciphers at once would take more memory than the sums.
_MASKS_AT_ONCE = 256


def of(modulus: int) -> Masks:
    """Returns the masks for integers modulo this."""
    return Bits(modulus) if modulus.bit_count() == 1 else Residues(modulus)


@dataclass(frozen=True)
class Masks(ABC):
    """Integers modulo M as words of a type of its own, and as bytes.

    Attributes:
        modulus: M.
    """

    modulus: int

    @property
    @abstractmethod
    def word(self) -> np.dtype[Any]:
        """The words that integers are kept in."""

    @property
    @abstractmethod
    def mask_bytes(self) -> int:
        """Bytes of keystream per integer, skipped ones not counted."""

    def to_words(self, values: NDArray[np.uint32], dim: int) -> NDArray[Any]:
        """Returns a client's integers as words, in a new array.

        Raises:
            ParameterError: They are not `dim` integers of type uint32 below M.
        """
        if not isinstance(values, np.ndarray) or values.dtype != np.uint32 or values.shape != (dim,):
            raise ParameterError(f"Expected values to be an array of {dim} integers of type uint32.")
        if int(values.max()) >= self.modulus:
            raise ParameterError(f"Expected values below {self.modulus}: larger ones do not fit the modulus.")
        return values.astype(self.word)

    def apply(self, words: NDArray[Any], masks: Iterable[tuple[bytes, int]]) -> None:
        """Adds to words, in place, the mask of each key (16 bytes) with its sign, +1 or -1."""
        step = _BLOCK_BYTES // max(words.itemsize, self.mask_bytes)
        buffer = Keystream.buffer(min(step, words.size) * self.mask_bytes)
        waiting = iter(masks)
        while streams := [(Keystream(key), sign) for key, sign in islice(waiting, _MASKS_AT_ONCE)]:
            for start in range(0, words.size, step):
                block = words[start : start + step]
                for stream, sign in streams:
                    self._apply(block, stream, sign, buffer)

    @abstractmethod
    def _apply(self, block: NDArray[Any], stream: Keystream, sign: int, buffer: NDArray[np.uint8]) -> None:
        """Adds or subtracts the next integers of one mask."""

    @abstractmethod
    def add(self, total: NDArray[Any], words: NDArray[Any]) -> None:
        """Adds words to a total, in place."""

    @abstractmethod
    def integers(self, words: NDArray[Any]) -> NDArray[np.uint32]:
        """Returns the integers below M that words stand for."""

    @abstractmethod
    def size_bytes(self, dim: int) -> int:
        """Returns the number of bytes of `dim` integers."""

    @abstractmethod
    def to_bytes(self, words: NDArray[Any]) -> list[bytes | memoryview]:
        """Returns the integers as bytes, in parts to be joined."""

    def from_bytes(self, payload: bytes | memoryview, dim: int) -> NDArray[Any]:
        """Reads what `to_bytes` wrote, as words.

        Raises:
            MessageError: The length is wrong, an integer is not below M, or a bit after the last one is set.
        """
        if len(payload) != self.size_bytes(dim):
            raise MessageError(
                f"{dim} integers modulo {self.modulus} take {self.size_bytes(dim)} bytes, got {len(payload)}."
            )
        try:
            return self._unpacked(payload, dim)
        except ValueRangeError as error:
            raise MessageError(f"The packed integers are damaged: {error}") from None

    @abstractmethod
    def _unpacked(self, payload: bytes | memoryview, dim: int) -> NDArray[Any]:
        """Returns the words in a payload of the right length."""


class Bits(Masks):
    """Modulo 2^b."""

    @property
    def bits(self) -> int:
        """The b of 2^b."""
        return self.modulus.bit_length() - 1

    @property
    def word(self) -> np.dtype[Any]:
        """The narrowest unsigned words that hold b bits."""
        return _word(self.bits)

    @property
    def mask_bytes(self) -> int:
        """One word."""
        return self.word.itemsize

    def _apply(self, block: NDArray[Any], stream: Keystream, sign: int, buffer: NDArray[np.uint8]) -> None:
        mask = stream.fill(buffer, block.nbytes).view(block.dtype)
        (np.add if sign > 0 else np.subtract)(block, mask, out=block)

    def add(self, total: NDArray[Any], words: NDArray[Any]) -> None:
        """Adds; words wrap around."""
        total += words

    def integers(self, words: NDArray[Any]) -> NDArray[np.uint32]:
        """Returns the low b bits."""
        return words.astype(np.uint32) & np.uint32(self.modulus - 1)

    def size_bytes(self, dim: int) -> int:
        """⌈b d/8⌉."""
        return -(-self.bits * dim // 8)

    def to_bytes(self, words: NDArray[Any]) -> list[bytes | memoryview]:
        """Returns the low b bits of each word, packed without gaps, in planes. A plane of all bits is a view."""
        planes: list[bytes | memoryview] = []
        done = 0
        for width in self._planes():
            plane = words.view(_word(width))[done // width :: words.itemsize * 8 // width]
            planes.append(np.ascontiguousarray(plane).data.cast("B"))
            done += width
        if done < self.bits:
            radix = 1 << self.bits - done
            rest = (words >> words.dtype.type(done)).astype(np.uint32) & np.uint32(radix - 1)
            planes.append(pack.forward(rest, radix))
        return planes

    def _planes(self) -> list[int]:
        """Returns the planes of whole bytes: the widths of 32, 16 and 8 that b is made of."""
        return [width for width in (32, 16, 8) if self.bits & width]

    def _unpacked(self, payload: bytes | memoryview, dim: int) -> NDArray[Any]:
        kind = self.word
        words: NDArray[Any] = np.zeros(dim, kind)
        start = done = 0
        for width in self._planes():
            part = np.frombuffer(payload, _word(width), dim, start)
            words.view(_word(width))[done // width :: kind.itemsize * 8 // width] = part
            start, done = start + part.nbytes, done + width
        if done < self.bits:
            words |= pack.backward(payload[start:], dim, 1 << self.bits - done).astype(kind) << kind.type(done)
        return words


def _word(bits: int) -> np.dtype[Any]:
    """Returns the narrowest unsigned words that hold this many bits."""
    return np.dtype("<u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4" if bits <= 32 else "<u8")


class Residues(Masks):
    """Modulo an M that is no power of two."""

    @property
    def word(self) -> np.dtype[Any]:
        """The narrowest unsigned words that hold the sum of two integers."""
        return _word((2 * self.modulus - 1).bit_length())

    @property
    def mask_bytes(self) -> int:
        """Words of 32 bits."""
        return 4

    def _apply(self, block: NDArray[Any], stream: Keystream, sign: int, buffer: NDArray[np.uint8]) -> None:
        modulus, least = np.uint64(self.modulus), (1 << 32) % self.modulus
        done = 0
        # As many words are taken as integers are missing, so that none is left over for the next block.
        while done < block.size:
            taken = stream.fill(buffer, 4 * (block.size - done)).view("<u4")
            halves = np.multiply(taken, modulus, dtype="<u8").view("<u4")
            mask, low = halves[1::2], halves[::2]
            if int(low.min()) < least:
                mask = mask[low >= least]
            part = block[done : done + mask.size]
            mask = mask.astype(block.dtype)
            self.add(part, mask if sign > 0 else block.dtype.type(self.modulus) - mask)
            done += mask.size

    def add(self, total: NDArray[Any], words: NDArray[Any]) -> None:
        """Adds words of at most M, and takes off M where the sum is not below it."""
        total += words
        # Below M the difference wraps around to a large number.
        np.minimum(total, total - total.dtype.type(self.modulus), out=total)

    def integers(self, words: NDArray[Any]) -> NDArray[np.uint32]:
        """Returns the words themselves."""
        return words.astype(np.uint32)

    def size_bytes(self, dim: int) -> int:
        """As `codec.pack` says."""
        return pack.payload_bytes(dim, self.modulus)

    def to_bytes(self, words: NDArray[Any]) -> list[bytes | memoryview]:
        """Returns the words, packed."""
        return [pack.forward(words.astype(np.uint32), self.modulus)]

    def _unpacked(self, payload: bytes | memoryview, dim: int) -> NDArray[Any]:
        return pack.backward(payload, dim, self.modulus).astype(self.word)
