"""What a message's payload holds and how payloads are summed: packed integers, or floats for the baseline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import pack
from cpsgd.codec._kernels import kernels
from cpsgd.errors import ValueRangeError

Sums = NDArray[Any]
"""Sums of payloads: uint32 until they outgrow it, then uint64; float64 for floats."""


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
    """

    radix: int
    saved: str

    @property
    @abstractmethod
    def step(self) -> int:
        """Payloads are written in blocks of a multiple of so many coordinates."""

    @abstractmethod
    def payload_bytes(self, dim: int) -> int:
        """Bytes of a payload."""

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
    def add(self, payload: NDArray[np.uint8], sums: Sums) -> None:
        """Adds a payload that was checked to sums with room for it."""

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

    def add(self, payload: NDArray[np.uint8], sums: Sums) -> None:
        """Unpacks and adds."""
        kernels.add_packed(payload, *self._grouping.arguments(sums.size), sums)

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one."""
        if int(sums.max()) > count * (self.values - 1):
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

    def add(self, payload: NDArray[np.uint8], sums: Sums) -> None:
        """Adds."""
        sums += payload.view("<f4")

    def check_sums(self, sums: Sums, count: int) -> None:
        """Refuses sums over the largest possible one, with a factor that forgives the rounding of many additions."""
        if not bool(np.all(np.abs(sums) <= count * self.limit * (1.0 + 1e-6))):
            raise ValueRangeError("The saved state holds a sum that its messages cannot have.")
