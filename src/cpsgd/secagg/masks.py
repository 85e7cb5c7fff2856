"""Masks: keystreams added to b-bit integers, and the integers as bytes.

Integers travel through the masking in the narrowest words (8, 16 or 32 bits) that hold b bits. Word arithmetic wraps
around at a multiple of 2^b, so only the low b bits are kept at the end. Words are taken from an AES-128 keystream in
counter mode, least significant byte first; every key is used for one mask only.

As bytes, integers are cut into planes: the low 32, 16 or 8 bits of all of them (whichever of these b is made of, the
widest first, each least significant byte first), then the remaining b mod 8 bits of all of them packed as in
`codec.pack`. That takes ⌈b d/8⌉ bytes like packing them one by one, and is many times faster.
"""

from __future__ import annotations

from collections.abc import Iterable
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


def word(bits: int) -> np.dtype[Any]:
    """The narrowest unsigned words that hold `bits` bits."""
    return np.dtype("<u1" if bits <= 8 else "<u2" if bits <= 16 else "<u4")


def apply(values: NDArray[Any], masks: Iterable[tuple[bytes, int]]) -> None:
    """Adds to words, in place, the mask of each key (16 bytes) with its sign, +1 or -1."""
    step = _BLOCK_BYTES // values.itemsize
    buffer = Keystream.buffer(min(_BLOCK_BYTES, values.nbytes))
    waiting = iter(masks)
    while streams := [(Keystream(key), sign) for key, sign in islice(waiting, _MASKS_AT_ONCE)]:
        for start in range(0, values.size, step):
            block = values[start : start + step]
            for stream, sign in streams:
                mask = stream.fill(buffer, block.nbytes).view(values.dtype)
                (np.add if sign > 0 else np.subtract)(block, mask, out=block)


def to_words(values: NDArray[np.uint32], dim: int, bits: int) -> NDArray[Any]:
    """A client's integers as words, in a new array.

    Raises:
        ParameterError: They are not `dim` integers of type uint32 below 2^bits.
    """
    if not isinstance(values, np.ndarray) or values.dtype != np.uint32 or values.shape != (dim,):
        raise ParameterError(f"Expected values to be an array of {dim} integers of type uint32.")
    if bits < 32 and int(values.max()) >> bits:
        raise ParameterError(f"Expected values below 2^{bits}: larger ones do not fit the modulus.")
    return values.astype(word(bits))


def to_planes(words: NDArray[Any], bits: int) -> list[bytes | memoryview]:
    """The low `bits` bits of each word, packed without gaps: planes, to be joined. A plane of all bits is a view."""
    planes: list[bytes | memoryview] = []
    done = 0
    for width in _planes(bits):
        plane = words.view(word(width))[done // width :: words.itemsize * 8 // width]
        planes.append(np.ascontiguousarray(plane).data.cast("B"))
        done += width
    if done < bits:
        rest = (words >> words.dtype.type(done)).astype(np.uint32) & np.uint32((1 << bits - done) - 1)
        planes.append(pack.forward(rest, 1 << bits - done))
    return planes


def _planes(bits: int) -> list[int]:
    """The planes of whole bytes: the widths of 32, 16 and 8 that `bits` is made of."""
    return [width for width in (32, 16, 8) if bits & width]


def from_bytes(payload: bytes | memoryview, dim: int, bits: int) -> NDArray[Any]:
    """What `to_planes` packed, as words.

    Raises:
        MessageError: The length is wrong, or a bit after the last integer is set.
    """
    if len(payload) != -(-dim * bits // 8):
        raise MessageError(f"{dim} integers of {bits} bits take {-(-dim * bits // 8)} bytes, got {len(payload)}.")
    kind = word(bits)
    words: NDArray[Any] = np.zeros(dim, kind)
    start = done = 0
    for width in _planes(bits):
        part = np.frombuffer(payload, word(width), dim, start)
        words.view(word(width))[done // width :: kind.itemsize * 8 // width] = part
        start, done = start + part.nbytes, done + width
    if done < bits:
        try:
            rest = pack.backward(payload[start:], dim, 1 << bits - done)
        except ValueRangeError as error:
            raise MessageError(f"The packed integers are damaged: {error}") from None
        words |= rest.astype(kind) << kind.type(done)
    return words
