"""Payloads: integers packed close to log2(radix) bits each, or floats, and sums of payloads.

Digits are taken g at a time, least significant first, as one number below radix^g, which is written in B bits. The
numbers follow each other without gaps, least significant bit first, and the last byte is filled up with zero bits. A
shorter group at the end takes as few bits as it needs. g is the smallest number of digits for which B/g is within 0.5 %
of the best that any group of at most 64 bits does. It is 1 for a power of two. B/g is less than 3 % over log2(radix)
for every radix below 2^32: the best wastes less than one bit of at least 42.

A `Format` says what a message's payload holds: all coordinates, or those that the message's id chooses (`Sampled`).
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec._kernels import kernels
from cpsgd.errors import ValueRangeError
from cpsgd.randomness import Keystream

VERSION = 1
"""Version of messages whose length follows from radix and dimension."""

VARIABLE = 2
"""Version of messages whose header has the payload's length instead of the radix. The payload is of bits: radix 2."""

Sums = NDArray[Any]
"""Sums of payloads: uint32 until they outgrow it, then uint64; float64 for floats."""

Chosen = NDArray[np.uint32] | None
"""Positions of the coordinates that a message holds; None where it holds all."""

PURPOSE = b"cpsgd sampled coordinates v1"
"""Names the expansion of a message's id; another expansion would need another name."""

_WORD_BITS = 64
_WORDS = 1 << 16
# Coordinates chosen at a time, so that their words stay in the cache.
_BLOCK = 1 << 14

# ---------------------------------------------------------------------- packing


@dataclass(frozen=True)
class Grouping:
    """A way to pack digits: `digits` digits below `radix` make one word of `bits` bits."""

    radix: int
    digits: int
    bits: int

    def last_bits(self, count: int) -> int:
        """Returns the bits of the shorter group at the end of `count` digits; 0 if there is none."""
        rest = count % self.digits
        return _bits(self.radix, rest) if rest else 0

    def total_bits(self, count: int) -> int:
        """Returns the bits of `count` digits."""
        return count // self.digits * self.bits + self.last_bits(count)

    def arguments(self, count: int) -> tuple[int, int, int, int]:
        """Returns radix, digits, bits and last bits for `count` digits: arguments of the kernels."""
        return self.radix, self.digits, self.bits, self.last_bits(count)


def _bits(radix: int, digits: int) -> int:
    return int(radix**digits - 1).bit_length()


@lru_cache(maxsize=256)
def grouping(radix: int) -> Grouping:
    """Returns the grouping that the format prescribes for this radix."""
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
    """Returns the bytes of `count` packed digits, or of `count` float32 numbers where `radix` is 0."""
    return 4 * count if radix == 0 else -(-grouping(radix).total_bits(count) // 8)


def forward(values: NDArray[np.uint32], radix: int) -> bytes:
    """Packs integers, all below `radix`."""
    if values.size and int(values.max()) >= radix:
        raise ValueRangeError(f"Cannot pack a value that is not below radix={radix}.")
    out = np.empty(payload_bytes(values.size, radix), dtype=np.uint8)
    kernels.pack(values, *grouping(radix).arguments(values.size), out)
    return out.tobytes()


def backward(payload: bytes | memoryview | NDArray[np.uint8], count: int, radix: int) -> NDArray[np.uint32]:
    """Returns the `count` integers that `forward` packed to these bytes.

    Raises:
        ValueRangeError: No integers below `radix` pack to these bytes.
    """
    data = np.frombuffer(payload, dtype=np.uint8)
    _check_size(data, count, radix)
    values = np.empty(count, dtype=np.uint32)
    kernels.unpack(data, *grouping(radix).arguments(count), values)
    if count and int(values.max()) >= radix:
        raise ValueRangeError(f"The value at position {np.argmax(values >= radix)} is not below {radix}.")
    return values


def check(payload: NDArray[np.uint8], count: int, radix: int, limit: int) -> None:
    """Refuses a payload that does not hold `count` values below `limit`.

    Raises:
        ValueRangeError: The payload has another length, a value is too large, or a bit after the last one is set.
    """
    _check_size(payload, count, radix)
    groups = grouping(radix)
    # Every pattern of bits is a value where the radix is a power of two and all of it is allowed.
    if limit == radix == 1 << groups.bits and groups.digits == 1:
        return
    position = kernels.find_out_of_range(payload, *groups.arguments(count), limit, count)
    if position < count:
        raise ValueRangeError(f"The value at position {position} is not below {limit}.")


def _check_size(payload: NDArray[np.uint8], count: int, radix: int) -> None:
    bits = grouping(radix).total_bits(count)
    if payload.size != -(-bits // 8):
        raise ValueRangeError(f"{count} values below {radix} take {-(-bits // 8)} bytes, not {payload.size}.")
    if bits % 8 and payload[-1] >> bits % 8:
        raise ValueRangeError("A padding bit after the last value is set.")


# ---------------------------------------------------------------------- formats of payloads


class RoundingKernel(Protocol):
    """Interface of kernels that round a block of grid points, with a keystream, into one client's integers."""

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32], /) -> None:
        """Rounds grid points with random bytes of the keystream, and writes the integers to `values`."""

    def packed(
        self,
        grid: NDArray[np.float32],
        keystream: NDArray[np.uint8],
        radix: int,
        digits: int,
        bits: int,
        last_bits: int,
        out: NDArray[np.uint8],
        /,
    ) -> None:
        """Rounds as `values` does, and writes the integers to `out`, packed by these numbers of a `Grouping`."""


class FloatKernel(Protocol):
    """Interface of kernels that turn a block of coordinates, with a keystream, into one client's floats."""

    def floats(self, vector: NDArray[np.float32], keystream: NDArray[np.uint8], out: NDArray[np.float32], /) -> None:
        """Turns coordinates into floats with random bytes of the keystream, and writes them to `out`."""


class Format(ABC):
    """The layout of a payload.

    Attributes:
        radix: Number of values of a packed coordinate, as the header of a message has it; 0 for floats.
        saved: The type of sums in a saved state.
        version: The version of the message format that carries it.
    """

    radix: int
    saved: str
    version = VERSION

    @property
    @abstractmethod
    def bits(self) -> float:
        """Bits per coordinate, without the waste of packing; an average where it varies."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Payloads are written in blocks of a multiple of this many coordinates."""

    @abstractmethod
    def payload_bytes(self, dim: int) -> int:
        """Returns the bytes of a payload of `dim` coordinates."""

    def average_bytes(self, dim: int) -> int:
        """Returns the bytes of the payload of a vector, on average and rounded up."""
        return self.payload_bytes(dim)

    def chosen(self, message_id: bytes, dim: int) -> Chosen:
        """Returns the coordinates that a payload holds, from the message's id; None for all."""
        return None

    @abstractmethod
    def write(
        self, kernel: Any, grid: NDArray[np.float32], keystream: NDArray[np.uint8], payload: NDArray[np.uint8]
    ) -> None:
        """Writes the payload of a block of coordinates."""

    @abstractmethod
    def check(self, payload: NDArray[np.uint8], dim: int) -> None:
        """Refuses a payload that no honest client sends.

        Raises:
            ValueRangeError: A value is out of range, or the payload is not one of `dim` coordinates.
        """

    @abstractmethod
    def empty(self, dim: int) -> Sums:
        """Returns zeros, to which messages are added."""

    @abstractmethod
    def widened(self, sums: Sums, count: int) -> Sums:
        """Returns the sums in a type that can hold the sums of `count` messages."""

    @abstractmethod
    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Adds a checked payload of the chosen coordinates to sums that have room for it."""

    @abstractmethod
    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums that `count` messages cannot have.

        Raises:
            ValueRangeError: A sum is out of range.
        """


@dataclass(frozen=True)
class Integers(Format):
    """Layout of integers below `values`, packed as digits below `radix` (`cpsgd.codec.pack`).

    Attributes:
        radix: The modulus of sums, or `values` without one.
        values: Number of values of a client's integer.
    """

    radix: int
    values: int
    saved = "<u8"

    @cached_property
    def _grouping(self) -> Grouping:
        return grouping(self.radix)

    @property
    def bits(self) -> float:
        """log2 of the radix, as the paper counts."""
        return math.log2(self.radix)

    @property
    def step(self) -> int:
        """Number of coordinates whose payload has whole groups of digits and whole bytes."""
        return 8 * self._grouping.digits

    def payload_bytes(self, dim: int) -> int:
        """Returns the bytes of a payload."""
        return payload_bytes(dim, self.radix)

    def write(
        self,
        kernel: RoundingKernel,
        grid: NDArray[np.float32],
        keystream: NDArray[np.uint8],
        payload: NDArray[np.uint8],
    ) -> None:
        """Rounds, adds noise and packs in one go."""
        kernel.packed(grid, keystream, *self._grouping.arguments(grid.size), payload)

    def check(self, payload: NDArray[np.uint8], dim: int) -> None:
        """Refuses values that no honest client sends."""
        check(payload, dim, self.radix, self.values)

    def empty(self, dim: int) -> Sums:
        """Returns zeros, in 32 bits at first."""
        return np.zeros(dim, np.uint32)

    def widened(self, sums: Sums, count: int) -> Sums:
        """Returns the sums in 64 bits where those of `count` messages need them."""
        if sums.dtype == np.uint32 and count * (self.values - 1) >= 2**32:
            return sums.astype(np.uint64)
        return sums

    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Unpacks a payload and adds it to the sums."""
        kernels.add_packed(payload, *self._grouping.arguments(sums.size), sums)

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one."""
        if int(sums.max()) > count * (self.values - 1):
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")


@dataclass(frozen=True)
class Sampled(Integers):
    """Layout with one bit for each sampled coordinate, chosen by a stream that follows from the message's id.

    A coordinate is chosen if its 16-bit word of the stream is below a limit. Its bit means -1 or 1; others count as 0.
    Sums are of these numbers plus 1, hence of 0, 1 and 2.

    Attributes:
        below: The limit, the share of coordinates times 2^16.
    """

    below: int
    version = VARIABLE

    @property
    def bits(self) -> float:
        """Average bits per coordinate: one for each chosen coordinate."""
        return self.below / _WORDS

    def average_bytes(self, dim: int) -> int:
        """Returns the average bytes of a payload; its last byte is half empty on average."""
        return math.ceil(dim * self.below / _WORDS / 8 + 7 / 16)

    def chosen(self, message_id: bytes, dim: int) -> NDArray[np.uint32]:
        """Returns the coordinates that a payload holds, those whose 16-bit word of a keystream is below a limit.

        The keystream is AES-128 in counter mode under the first half of SHA-256(purpose ‖ id).
        """
        stream = Keystream(hashlib.sha256(PURPOSE + message_id).digest()[:16])
        buffer, found = stream.buffer(2 * _BLOCK), np.empty(_BLOCK, dtype=np.uint32)
        parts = []
        for start in range(0, dim, _BLOCK):
            words = stream.fill(buffer, 2 * min(_BLOCK, dim - start))
            parts.append(found[: kernels.find_below(words, self.below, start, found)].copy())
        return np.concatenate(parts)

    def widened(self, sums: Sums, count: int) -> Sums:
        """Returns the sums in 64 bits where those of `count` messages need them: each adds up to 2."""
        return sums.astype(np.uint64) if sums.dtype == np.uint32 and 2 * count >= 2**32 else sums

    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Adds 1 to every sum, and the 1 or -1 of its bit to each chosen coordinate."""
        assert chosen is not None
        kernels.add_signs(payload, chosen, sums)

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one."""
        if int(sums.max()) > 2 * count:
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")


@dataclass(frozen=True)
class Floats(Format):
    """Layout of float32 numbers.

    Attributes:
        limit: No honest client's float is further from zero.
        meaning: The limit in words, for messages.
    """

    limit: float
    meaning: str
    radix = 0
    saved = "<f8"

    @property
    def bits(self) -> float:
        """Bits of a float32 coordinate: 32."""
        return 32.0

    @property
    def step(self) -> int:
        """1: coordinates are written one by one, so blocks may have any length."""
        return 1

    def payload_bytes(self, dim: int) -> int:
        """Returns the bytes of a payload."""
        return payload_bytes(dim, 0)

    def write(
        self, kernel: FloatKernel, grid: NDArray[np.float32], keystream: NDArray[np.uint8], payload: NDArray[np.uint8]
    ) -> None:
        """Writes the coordinates with their noise, as float32, into `payload`."""
        kernel.floats(grid, keystream, payload.view("<f4"))

    def check(self, payload: NDArray[np.uint8], dim: int) -> None:
        """Refuses floats that no honest client sends, NaN among them."""
        if payload.size != 4 * dim:
            raise ValueRangeError(f"{dim} floats take {4 * dim} bytes, not {payload.size}.")
        inside = np.abs(payload.view("<f4")) <= self.limit
        if not inside.all():
            raise ValueRangeError(f"The float at position {int(np.argmin(inside))} is not within ±({self.meaning}).")

    def empty(self, dim: int) -> Sums:
        """Returns sums of zero, one float64 per coordinate."""
        return np.zeros(dim, np.float64)

    def widened(self, sums: Sums, count: int) -> Sums:
        """Returns the sums as they are: float64 has room for any number of messages."""
        return sums

    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Adds a message's floats to `sums`, in place."""
        sums += payload.view("<f4")

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one, with a margin for rounding errors of the additions."""
        if not bool(np.all(np.abs(sums) <= count * self.limit * (1.0 + 1e-6))):
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")
