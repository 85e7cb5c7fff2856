"""Masks: pseudorandom integers modulo M, added to a client's integers, and the integers as bytes.

Every mask comes from an AES-128 keystream in counter mode under a key that is used for this mask only. A power of two
and any other modulus M differ in all but that:

* **M = 2^b.** Words of 8, 16 or 32 bits, the narrowest that hold b bits, are taken from the keystream, least
  significant byte first. Word arithmetic wraps around at a multiple of 2^b, so only the low b bits are kept at the end.
  As bytes, integers are cut into planes: the low 32, 16 or 8 bits of all of them (whichever of these b is made of, the
  widest first, each least significant byte first), then the remaining b mod 8 bits of all of them packed as in
  `codec.pack`. That takes ⌈b d/8⌉ bytes like packing them one by one, and is many times faster.
* **Any other M.** The keystream is read in words w of 32 bits. One with w M mod 2^32 >= 2^32 mod M gives
  the integer ⌊w M/2^32⌋; others give none, and are skipped. Every integer is the quotient of exactly ⌊2^32/M⌋ words
  that are not skipped (Lemire, "Fast random integer generation in an interval", 2019), so for an ideal keystream a mask
  is uniform modulo M: exactly, not nearly. Which words are skipped shows in the time this takes. It is independent of
  the mask, whose integers are uniform whatever the skipped words are. Nothing else does: no division, and no branch or
  address that depends on a client's integers. As bytes, integers are packed as in `codec.pack`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import pack
from cpsgd.errors import MessageError, ParameterError, ValueRangeError
from cpsgd.randomness import Keystream

# Sums and keystream of one block stay in the processor's cache while all masks are added to it.
_BLOCK_BYTES = 1 << 18
# A server may have a hundred thousand masks to remove; that many ciphers at once would take more memory than the sums.
_MASKS_AT_ONCE = 256


@dataclass(frozen=True)
class Masks:
    """Conversions of integers modulo M: to words, to bytes, and under masks.

    Attributes:
        modulus: M.
    """

    modulus: int

    @cached_property
    def bits(self) -> int:
        """b where M = 2^b; 0 for any other M."""
        return self.modulus.bit_length() - 1 if self.modulus.bit_count() == 1 else 0

    @cached_property
    def word(self) -> np.dtype[Any]:
        """The narrowest unsigned words that hold b bits; for any other M, the sum of two integers."""
        return _word(self.bits or (2 * self.modulus - 1).bit_length())

    @property
    def mask_bytes(self) -> int:
        """Bytes of keystream per integer, skipped ones not counted."""
        return self.word.itemsize if self.bits else 4

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

    def integers(self, words: NDArray[Any]) -> NDArray[np.uint32]:
        """Converts words to integers below M."""
        integers = words.astype(np.uint32)
        return integers & np.uint32(self.modulus - 1) if self.bits else integers

    def add(self, total: NDArray[Any], words: NDArray[Any]) -> None:
        """Adds words to a total, in place; for an M that is no power of two, words of at most M."""
        total += words
        if not self.bits:
            # Below M the difference wraps around to a large number.
            np.minimum(total, total - total.dtype.type(self.modulus), out=total)

    def apply(self, words: NDArray[Any], masks: Iterable[tuple[bytes, int]]) -> None:
        """Adds to words, in place, the mask of each key (16 bytes) with its sign, +1 or -1."""
        step = _BLOCK_BYTES // max(words.itemsize, self.mask_bytes)
        buffer = Keystream.buffer(min(step, words.size) * self.mask_bytes)
        apply = self._apply_bits if self.bits else self._apply_residues
        waiting = iter(masks)
        while streams := [(Keystream(key), sign) for key, sign in islice(waiting, _MASKS_AT_ONCE)]:
            for start in range(0, words.size, step):
                block = words[start : start + step]
                for stream, sign in streams:
                    apply(block, stream, sign, buffer)

    def _apply_bits(self, block: NDArray[Any], stream: Keystream, sign: int, buffer: NDArray[np.uint8]) -> None:
        mask = stream.fill(buffer, block.nbytes).view(block.dtype)
        (np.add if sign > 0 else np.subtract)(block, mask, out=block)

    def _apply_residues(self, block: NDArray[Any], stream: Keystream, sign: int, buffer: NDArray[np.uint8]) -> None:
        """Adds or subtracts a mask modulo a number that is no power of two, by rejection sampling."""
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

    # ------------------------------------------------------------------ bytes

    def size_bytes(self, dim: int) -> int:
        """Returns the number of bytes of `dim` integers."""
        return -(-self.bits * dim // 8) if self.bits else pack.payload_bytes(dim, self.modulus)

    def to_bytes(self, words: NDArray[Any]) -> list[bytes | memoryview]:
        """Returns the integers as bytes, in parts to be joined. A plane of all bits is a view."""
        if not self.bits:
            return [pack.forward(words.astype(np.uint32), self.modulus)]
        planes: list[bytes | memoryview] = []
        done = 0
        for width in self._planes():
            plane = words.view(_word(width))[done // width :: words.itemsize // _word(width).itemsize]
            planes.append(np.ascontiguousarray(plane).data.cast("B"))
            done += width
        if done < self.bits:
            radix = 1 << self.bits - done
            rest = (words >> words.dtype.type(done)).astype(np.uint32) & np.uint32(radix - 1)
            planes.append(pack.forward(rest, radix))
        return planes

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
            if not self.bits:
                return pack.backward(payload, dim, self.modulus).astype(self.word)
            return self._unpacked(payload, dim)
        except ValueRangeError as error:
            raise MessageError(f"The packed integers are damaged: {error}") from None

    def _unpacked(self, payload: bytes | memoryview, dim: int) -> NDArray[Any]:
        """Returns the words of a payload: planes of whole bytes, then the remaining bits."""
        kind = self.word
        words: NDArray[Any] = np.zeros(dim, kind)
        start = done = 0
        for width in self._planes():
            part = np.frombuffer(payload, _word(width), dim, start)
            words.view(part.dtype)[done // width :: kind.itemsize // part.itemsize] = part
            start, done = start + part.nbytes, done + width
        if done < self.bits:
            words |= pack.backward(payload[start:], dim, 1 << self.bits - done).astype(kind) << kind.type(done)
        return words

    def _planes(self) -> list[int]:
        """Returns the widths in bits, 32, 16 or 8, of the planes into which the whole bytes of b are split."""
        return [width for width in (32, 16, 8) if self.bits & width]


def _word(bits: int) -> np.dtype[Any]:
    """Returns the narrowest unsigned words that hold this many bits."""
    return np.dtype("<u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4" if bits <= 32 else "<u8")
