"""What a message's payload holds and how payloads are summed: packed integers, or floats for the baseline.

A payload holds all coordinates, or those that the message's id chooses (`Sampled`).
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import pack, wire
from cpsgd.codec._kernels import kernels
from cpsgd.errors import ValueRangeError
from cpsgd.randomness import Keystream

Sums = NDArray[Any]
"""Sums of payloads: uint32 until they outgrow it, then uint64; float64 for floats."""

Chosen = NDArray[np.uint32] | None
"""Positions of the coordinates that a message holds; None where it holds all."""

PURPOSE = b"cpsgd sampled coordinates v1"
"""Names the expansion of a message's id; another expansion would need another name."""
_WORDS = 1 << 16
# Coordinates chosen at a time, so that their words stay in the cache.
_BLOCK = 1 << 14


class Kernel(Protocol):
    """Turns a block of prepared coordinates and its keystream into what one client sends."""

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32], /) -> None:
        """Writes the integers."""

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
        """Writes the integers, packed."""


class FloatKernel(Protocol):
    """The same for floats."""

    def floats(self, vector: NDArray[np.float32], keystream: NDArray[np.uint8], out: NDArray[np.float32], /) -> None:
        """Writes the floats."""


class Format(ABC):
    """What a payload of coordinates looks like.

    Attributes:
        radix: How many values a packed coordinate can take; 0 for floats. The header of a message says it.
        saved: The type of sums in a saved state.
        version: The version of the message format that carries it.
    """

    radix: int
    saved: str
    version = wire.VERSION

    @property
    @abstractmethod
    def bits(self) -> float:
        """Bits per coordinate, without the waste of packing; an average where it varies."""

    @property
    @abstractmethod
    def step(self) -> int:
        """Payloads are written in blocks of a multiple of so many coordinates."""

    @abstractmethod
    def payload_bytes(self, dim: int) -> int:
        """Bytes of a payload of so many coordinates."""

    def average_bytes(self, dim: int) -> int:
        """Bytes of the payload of a vector, on average and rounded up."""
        return self.payload_bytes(dim)

    def chosen(self, message_id: bytes, dim: int) -> Chosen:
        """Which of a vector's coordinates the payload of the message with this id holds: all, unless said otherwise."""
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
        """The sums of no messages."""

    @abstractmethod
    def widened(self, sums: Sums, count: int) -> Sums:
        """The sums, with room for those of `count` messages."""

    @abstractmethod
    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Adds a payload of the chosen coordinates, which was checked, to sums with room for it."""

    @abstractmethod
    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums that `count` messages cannot have.

        Raises:
            ValueRangeError: A sum is out of range.
        """


@dataclass(frozen=True)
class Integers(Format):
    """Integers below `values`, packed as digits below `radix` (`cpsgd.codec.pack`).

    Attributes:
        radix: The modulus of sums, or `values` without one.
        values: How many values a client's integer can have.
    """

    radix: int
    values: int
    saved = "<u8"

    @cached_property
    def _grouping(self) -> pack.Grouping:
        return pack.grouping(self.radix)

    @property
    def bits(self) -> float:
        """What the paper counts."""
        return math.log2(self.radix)

    @property
    def step(self) -> int:
        """Coordinates that fill whole bytes and whole groups of digits."""
        return 8 * self._grouping.digits

    def payload_bytes(self, dim: int) -> int:
        """Bytes of a payload."""
        return pack.payload_bytes(dim, self.radix)

    def write(
        self, kernel: Kernel, grid: NDArray[np.float32], keystream: NDArray[np.uint8], payload: NDArray[np.uint8]
    ) -> None:
        """Rounds, adds noise and packs in one go."""
        kernel.packed(grid, keystream, *self._grouping.arguments(grid.size), payload)

    def check(self, payload: NDArray[np.uint8], dim: int) -> None:
        """Refuses values that no honest client sends."""
        pack.check(payload, dim, self.radix, self.values)

    def empty(self, dim: int) -> Sums:
        """Zeros, in 32 bits as long as they do."""
        return np.zeros(dim, np.uint32)

    def widened(self, sums: Sums, count: int) -> Sums:
        """The sums in 64 bits, where those of `count` messages need them."""
        if sums.dtype == np.uint32 and count * (self.values - 1) >= 2**32:
            return sums.astype(np.uint64)
        return sums

    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Unpacks and adds."""
        kernels.add_packed(payload, *self._grouping.arguments(sums.size), sums)

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one."""
        if int(sums.max()) > count * (self.values - 1):
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")


@dataclass(frozen=True)
class Sampled(Integers):
    """Bits of some coordinates: those whose 16-bit word of a stream expanded from the message's id is below a limit.

    A bit means -1 or 1 and a coordinate that is left out 0. Sums are of these numbers plus 1, hence of 0, 1 and 2.

    Attributes:
        below: The limit, the share of coordinates times 2^16.
    """

    below: int
    version = wire.VARIABLE

    @property
    def bits(self) -> float:
        """One for each coordinate that is held."""
        return self.below / _WORDS

    def average_bytes(self, dim: int) -> int:
        """A last byte is half empty on average."""
        return math.ceil(dim * self.below / _WORDS / 8 + 7 / 16)

    def chosen(self, message_id: bytes, dim: int) -> NDArray[np.uint32]:
        """Expands the id: AES-128 in counter mode under the first half of SHA-256(purpose ‖ id), in 16-bit words."""
        stream = Keystream(hashlib.sha256(PURPOSE + message_id).digest()[:16])
        buffer, found = stream.buffer(2 * _BLOCK), np.empty(_BLOCK, dtype=np.uint32)
        parts = []
        for start in range(0, dim, _BLOCK):
            words = stream.fill(buffer, 2 * min(_BLOCK, dim - start))
            parts.append(found[: kernels.find_below(words, self.below, start, found)].copy())
        return np.concatenate(parts)

    def widened(self, sums: Sums, count: int) -> Sums:
        """The sums in 64 bits, where those of `count` messages need them: each adds up to 2."""
        return sums.astype(np.uint64) if sums.dtype == np.uint32 and 2 * count >= 2**32 else sums

    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Adds 1 everywhere, and a bit's 1 or -1 where there is one."""
        assert chosen is not None
        kernels.add_signs(payload, chosen, sums)

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one."""
        if int(sums.max()) > 2 * count:
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")


@dataclass(frozen=True)
class Floats(Format):
    """Numbers of float32.

    Attributes:
        limit: No honest client's float is further from zero.
        meaning: What the limit is, for messages.
    """

    limit: float
    meaning: str
    radix = 0
    saved = "<f8"

    @property
    def bits(self) -> float:
        """Those of float32."""
        return 32.0

    @property
    def step(self) -> int:
        """Any number."""
        return 1

    def payload_bytes(self, dim: int) -> int:
        """Bytes of a payload."""
        return pack.payload_bytes(dim, 0)

    def write(
        self, kernel: FloatKernel, grid: NDArray[np.float32], keystream: NDArray[np.uint8], payload: NDArray[np.uint8]
    ) -> None:
        """Adds noise."""
        kernel.floats(grid, keystream, payload.view("<f4"))

    def check(self, payload: NDArray[np.uint8], dim: int) -> None:
        """Refuses floats that no honest client sends, NaN among them."""
        if payload.size != 4 * dim:
            raise ValueRangeError(f"{dim} floats take {4 * dim} bytes, not {payload.size}.")
        inside = np.abs(payload.view("<f4")) <= self.limit
        if not inside.all():
            raise ValueRangeError(f"The float at position {int(np.argmin(inside))} is not within ±({self.meaning}).")

    def empty(self, dim: int) -> Sums:
        """Zeros."""
        return np.zeros(dim, np.float64)

    def widened(self, sums: Sums, count: int) -> Sums:
        """The sums themselves."""
        return sums

    def add(self, payload: NDArray[np.uint8], sums: Sums, chosen: Chosen = None) -> None:
        """Adds."""
        sums += payload.view("<f4")

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one, with a factor that forgives the rounding of many additions."""
        if not bool(np.all(np.abs(sums) <= count * self.limit * (1.0 + 1e-6))):
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")
