"""Rounding to k levels plus noise that is symmetric about zero, has no end, and is cut off at ±W.

The noise is sent from 0 up, moved by W. What lies beyond ±W (`noise_limit`) is never drawn; `variation` is what that
and the resolution of the table move, and the accounting adds it to δ. A subclass says which law it is.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from cpsgd import _validate
from cpsgd.codec.rounding import COINS, KEYSTREAM_BYTES, Table
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.base import Search
from cpsgd.mechanisms.lattice import Lattice
from cpsgd.mechanisms.law import Law, check_points

MAX_SIZE = 2.0**29
DEFAULT_TRUNCATION = 2.0**-120
"""What a limit that is not given costs: far less than any δ."""

# A limit that costs less than the first of these is of no use, and its table would be huge; one that costs more than
# the second is not the noise that it is called any more.
_LEAST_TRUNCATION, _MOST_TRUNCATION = 2.0**-200, 1e-6
# More noise than this is as good as Gaussian already, and slow to certify.
_MOST_NOISE = 2.5e9


@dataclass(frozen=True, kw_only=True)
class Symmetric(Lattice):
    """k levels and symmetric noise.

    Attributes:
        noise_limit: W, the largest noise either way; by default so large that it costs nothing.
    """

    fewest_values = 4
    sampler_remedy = "use a larger noise_limit, or add noise"

    noise_name: ClassVar[str]
    """What the noise is called in a line of parameters."""

    least_size: ClassVar[float]
    """The smallest v but 0."""

    size_field: ClassVar[str]
    """The field that holds v, the size of a client's noise: about its variance, in squared levels; 0 for none."""

    noise_limit: int | None = None

    @staticmethod
    @abstractmethod
    def truncation(size: float, limit: int) -> float:
        """An upper bound on P(|Z| > W)."""

    @staticmethod
    @abstractmethod
    def table(size: float, limit: int) -> Table:
        """The thresholds of the outcomes 0, ..., 2W, which mean -W, ..., W."""

    def __post_init__(self) -> None:
        super().__post_init__()
        size = _validate.finite(self.size_field, self.size) + 0.0  # which makes -0.0 zero
        if size != 0.0 and not self.least_size <= size <= MAX_SIZE:
            raise ParameterError(
                f"Expected {self.size_field} to be 0 or in [{self.least_size:g}, {MAX_SIZE:g}], got {size!r}."
            )
        object.__setattr__(self, self.size_field, size)
        limit = self.noise_limit
        if limit is None:
            limit = self.limit_of(size, DEFAULT_TRUNCATION) if size else 0
        low, high = 0, 0
        if size:
            low, high = self.limit_of(size, _MOST_TRUNCATION), self.limit_of(size, _LEAST_TRUNCATION)
        object.__setattr__(self, "noise_limit", _validate.integer("noise_limit", limit, low=low, high=high))

    @property
    def size(self) -> float:
        """The number v."""
        size: float = getattr(self, self.size_field)
        return size

    @property
    def _limit(self) -> int:
        assert self.noise_limit is not None  # set when the object was made
        return self.noise_limit

    @property
    def largest_noise(self) -> int:
        """2 W: noise is sent from 0 up."""
        return 2 * self._limit

    @property
    def noise_mean(self) -> float:
        """W."""
        return float(self._limit)

    def noise_table(self) -> Table:
        """Thresholds of the law between -W and W."""
        return self.table(self.size, self._limit) if self.size else COINS

    @property
    def noise_bytes(self) -> int:
        """One number of 128 bits."""
        return KEYSTREAM_BYTES if self.size else 0

    @property
    def variation(self) -> float:
        """The mass beyond ±W, and what rounding of the thresholds moves."""
        if not self.size:
            return 0.0
        return self.truncation(self.size, self._limit) + self.noise_table().rounding

    def without_noise(self) -> Self:
        """The same with v = 0."""
        return self._with_noise(0.0, 0)

    @property
    def is_noisy(self) -> bool:
        """Whether v > 0."""
        return self.size > 0.0

    def check_noise(self) -> None:
        """Refuses to speak of the law of no noise.

        Raises:
            ConditionError: v = 0.
        """
        if not self.size:
            raise ConditionError(
                f"{self.size_field}=0 adds no noise, so there is no privacy; choose a {self.size_field} > 0."
            )

    def _with_noise(self, size: float, limit: int) -> Self:
        changes: dict[str, Any] = {self.size_field: size, "noise_limit": limit}
        return replace(self, **changes)

    @classmethod
    def limit_of(cls, size: float, allowed: float) -> int:
        """The smallest W with a truncation of at most `allowed`."""
        low, high = 0, 1
        while cls.truncation(size, high) > allowed:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if cls.truncation(size, middle) <= allowed else (middle, high)
        return high

    # ------------------------------------------------------------------ planning

    @classmethod
    def loudest(cls, levels: int, search: Search) -> Self | None:
        """The largest v for these levels and values whose truncation the search can afford."""
        room = (search.values - levels) // 2
        affordable = min(max(0.5 * search.variation, 2.0**-100), _MOST_TRUNCATION)
        if room < 1 or cls.truncation(cls.least_size, room) > affordable:
            return None

        most = min(MAX_SIZE, max(_MOST_NOISE / search.honest, cls.least_size))
        size = cls._largest(lambda v: cls.truncation(v, room) <= affordable, most)
        limit = min(room, cls.limit_of(size, affordable))
        start = cls(levels=levels, **{cls.size_field: size}, noise_limit=limit, coordinate_range=1.0)
        if search.fits(start):
            return start
        fitting = cls._largest(lambda v: search.fits(start.quieter(v / size) or start), size)
        return start.quieter(fitting / size) or start

    @classmethod
    def _largest(cls, fits: Callable[[float], bool], most: float) -> float:
        """The largest v up to `most` that fits, within a thousandth, or else the smallest there is."""
        if fits(most):
            return most
        low, high = cls.least_size, most
        while high > 1.001 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def quieter(self, factor: float) -> Self | None:
        """The same with a smaller v, cut off where it costs as much."""
        size = self.size * min(factor, 0.99)
        if size < self.least_size:
            return None
        allowed = max(self.truncation(self.size, self._limit), _LEAST_TRUNCATION)
        return self._with_noise(size, min(self._limit, self.limit_of(size, allowed)))

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """The noise of 14 coins."""
        found = super().usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
        return {**found, cls.size_field: 3.5}

    def describe(self) -> str:
        """Levels, range and noise."""
        return (
            f"k = {self.levels:,} levels in ±{self.coordinate_range:.4g}, {self.noise_name} noise of variance "
            f"{self.size:.6g} within ±{self.noise_limit:,}"
        )


@dataclass(frozen=True)
class SymmetricLaw(Law):
    """The sum of `parts` clients' symmetric noise, of size v (`each`) and moved up by W (`limit`) each."""

    parts: int
    each: float
    limit: int

    part_name = "clients"
    lowest = -math.inf
    highest = math.inf

    @property
    def mirror(self) -> int:  # type: ignore[override]
        """Twice the centre."""
        return 2 * self.parts * self.limit

    def with_parts(self, parts: int) -> Self:
        """With another number of clients."""
        return replace(self, parts=parts)

    def half_window(self, nats: float, margin: int) -> int:
        """How far a window goes from the centre: far enough for Skellam noise, and for noise of lighter tails.

        Raises:
            ConditionError: It would have too many points.
        """
        reach = math.ceil(math.sqrt(2.0 * self.variance * nats) + 2.0 / 3.0 * nats + 2.0 + margin)
        check_points(2 * reach + 1, self)
        return reach
