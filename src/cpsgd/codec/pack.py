"""Integers below a radix to bytes, close to log2(radix) bits each.

Digits are taken g at a time, least significant first, as one number below radix^g, which is written in B bits; the
numbers follow each other without gaps, least significant bit first, and the last byte is filled up with zero bits. What
remains at the end is a shorter group in as few bits as it needs. g is the smallest number of digits for which B/g is
within 0.5 % of the best that any group of at most 64 bits does: 1 for a power of two, and less than 3 % over
log2(radix) for every radix below 2^32 (the best wastes less than one bit of at least 42).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels
from cpsgd.errors import ValueRangeError

_WORD_BITS = 64


@dataclass(frozen=True)
class Grouping:
    """`digits` digits below `radix` make one word of `bits` bits."""

    radix: int
    digits: int
    bits: int

    def last_bits(self, count: int) -> int:
        """Bits of the shorter group at the end of `count` digits; 0 if there is none."""
        rest = count % self.digits
        return _bits(self.radix, rest) if rest else 0

    def total_bits(self, count: int) -> int:
        """Bits of `count` digits."""
        return count // self.digits * self.bits + self.last_bits(count)

    def arguments(self, count: int) -> tuple[int, int, int, int]:
        """The grouping of `count` digits as the kernels take it."""
        return self.radix, self.digits, self.bits, self.last_bits(count)


def _bits(radix: int, digits: int) -> int:
    return int(radix**digits - 1).bit_length()


@lru_cache(maxsize=256)
def grouping(radix: int) -> Grouping:
    """The grouping the format prescribes for this radix."""
    choices = []
    for digits in range(1, _WORD_BITS + 1):
        bits = _bits(radix, digits)
        if bits > _WORD_BITS:
            break
        choices.append(Grouping(radix, digits, bits))
    best = min(choices, key=lambda choice: choice.bits / choice.digits)
    # Compared in integers, so that every implementation of the format chooses alike.
    return next(c for c in choices if 200 * c.bits * best.digits <= 201 * best.bits * c.digits)


def payload_bytes(count: int, radix: int) -> int:
    """Bytes of `count` packed digits, or of `count` float32 numbers where `radix` is 0."""
    return 4 * count if radix == 0 else -(-grouping(radix).total_bits(count) // 8)


def forward(values: NDArray[np.uint32], radix: int) -> bytes:
    """Packs integers, all below `radix`."""
    if values.size and int(values.max()) >= radix:
        raise ValueRangeError(f"Cannot pack a value that is not below radix={radix}.")
    out = np.empty(payload_bytes(values.size, radix), dtype=np.uint8)
    kernels.pack(values, *grouping(radix).arguments(values.size), out)
    return out.tobytes()


def backward(payload: bytes | memoryview | NDArray[np.uint8], count: int, radix: int) -> NDArray[np.uint32]:
    """The `count` integers that `forward` packed to these bytes.

    Raises:
        ValueRangeError: No integers below `radix` pack to these bytes.
    """
    data = np.frombuffer(payload, dtype=np.uint8)
    check(data, count, radix, radix)
    values = np.empty(count, dtype=np.uint32)
    kernels.unpack(data, *grouping(radix).arguments(count), values)
    return values


def check(payload: NDArray[np.uint8], count: int, radix: int, limit: int) -> None:
    """Refuses a payload that does not hold `count` values below `limit`.

    Raises:
        ValueRangeError: The payload has another length, a value is too large, or a bit after the last one is set.
    """
    groups = grouping(radix)
    bits = groups.total_bits(count)
    if payload.size != -(-bits // 8):
        raise ValueRangeError(f"{count} values below {radix} take {-(-bits // 8)} bytes, not {payload.size}.")
    if bits % 8 and payload[-1] >> bits % 8:
        raise ValueRangeError("A padding bit after the last value is set.")
    # Every pattern of bits is a value where the radix is a power of two and all of it is allowed.
    if limit == radix == 1 << groups.bits and groups.digits == 1:
        return
    position = kernels.find_out_of_range(payload, *groups.arguments(count), limit, count)
    if position < count:
        raise ValueRangeError(f"The value at position {position} is not below {limit}.")
