"""Rounding to k levels plus noise that is symmetric about zero, has no end, and is cut off at ±W.

The noise is sent from 0 up, moved by W (`noise_limit`). Nothing beyond ±W is drawn. `variation` bounds the effect of
that and of the table's resolution, and the accounting adds it to δ. A subclass brings the law.
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
from cpsgd.mechanisms.interface import Search
from cpsgd.mechanisms.lattice import IntegerNoise, Lattice
from cpsgd.mechanisms.law import Law, check_points

MAX_SIZE = 2.0**29
DEFAULT_TRUNCATION = 2.0**-120
"""The truncation of a limit that is not given: far less than any δ."""

# A limit that costs less than the first of these is of no use, and its table would be huge; one that costs more than
# the second is not the noise that it is called any more.
_LEAST_TRUNCATION, _MOST_TRUNCATION = 2.0**-200, 1e-6
# More noise than this is as good as Gaussian already, and slow to certify.
_MOST_NOISE = 2.5e9


@dataclass(frozen=True)
class SymmetricNoise(IntegerNoise):
    """Symmetric noise of size v, about its variance in squared levels, moved up by W.

    Attributes:
        size: v; 0 for no noise.
        limit: W.
    """

    size: float
    limit: int

    size_name: ClassVar[str]
    """The name of v as a parameter."""

    @staticmethod
    @abstractmethod
    def truncation(size: float, limit: int) -> float:
        """Returns an upper bound on P(|Z| > W)."""

    @staticmethod
    @abstractmethod
    def thresholds(size: float, limit: int) -> Table:
        """Returns the thresholds of the outcomes 0, ..., 2W, which mean -W, ..., W."""

    @abstractmethod
    def sum_law(self, honest: int) -> Law:
        """Returns the law of the summed noise of `honest` clients, moved up by W each."""

    def law(self, honest: int) -> Law:
        """Returns the law of a sum.

        Raises:
            ConditionError: v = 0.
        """
        if not self.size:
            name = self.size_name
            raise ConditionError(f"{name}=0 adds no noise, so there is no privacy; choose a {name} > 0.")
        return self.sum_law(honest)

    @property
    def largest(self) -> int:
        """Largest value of a client's noise after the shift by W: 2 W."""
        return 2 * self.limit

    @property
    def mean(self) -> float:
        """Mean of a client's noise after the shift by W: W."""
        return float(self.limit)

    def table(self) -> Table:
        """Returns the thresholds of the law between -W and W."""
        return self.thresholds(self.size, self.limit) if self.size else COINS

    @property
    def keystream_bytes(self) -> int:
        """One number of 128 bits."""
        return KEYSTREAM_BYTES if self.size else 0

    @property
    def variation(self) -> float:
        """Total variation of a draw, from the tails beyond ±W and the rounding of thresholds."""
        if not self.size:
            return 0.0
        return self.truncation(self.size, self.limit) + self.table().rounding

    @classmethod
    def limit_of(cls, size: float, allowed: float) -> int:
        """Returns the smallest W with a truncation of at most `allowed`."""
        low, high = 0, 1
        while cls.truncation(size, high) > allowed:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if cls.truncation(size, middle) <= allowed else (middle, high)
        return high


@dataclass(frozen=True, kw_only=True)
class Symmetric(Lattice):
    """k levels and symmetric noise.

    Attributes:
        noise_limit: W, the largest noise either way; by default so large that it costs nothing.
    """

    fewest_values = 4
    sampler_remedy = "use a larger noise_limit, or add noise"

    noise_type: ClassVar[type[SymmetricNoise]]
    """The noise; its `size_name` is the field that holds v."""

    least_size: ClassVar[float]
    """The smallest v but 0."""

    noise_limit: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        name, kind = self.noise_type.size_name, self.noise_type
        size = _validate.finite(name, self.size) + 0.0  # which makes -0.0 zero
        if size != 0.0 and not self.least_size <= size <= MAX_SIZE:
            raise ParameterError(f"Expected {name} to be 0 or in [{self.least_size:g}, {MAX_SIZE:g}], got {size!r}.")
        object.__setattr__(self, name, size)
        limit = self.noise_limit
        if limit is None:
            limit = kind.limit_of(size, DEFAULT_TRUNCATION) if size else 0
        smallest, largest = 0, 0
        if size:
            # The less a limit cuts off, the larger it is: so the most truncation gives the smallest limit.
            smallest, largest = kind.limit_of(size, _MOST_TRUNCATION), kind.limit_of(size, _LEAST_TRUNCATION)
        object.__setattr__(self, "noise_limit", _validate.integer("noise_limit", limit, low=smallest, high=largest))

    @property
    def size(self) -> float:
        """v, the size of a client's noise."""
        size: float = getattr(self, self.noise_type.size_name)
        return size

    @property
    def noise(self) -> SymmetricNoise:
        """The noise of size v within ±W."""
        assert self.noise_limit is not None  # set when the object was made
        return self.noise_type(self.size, self.noise_limit)

    def without_noise(self) -> Self:
        """Returns a copy with v = 0: rounding alone."""
        return self._with_noise(0.0, 0)

    def _with_noise(self, size: float, limit: int) -> Self:
        changes: dict[str, Any] = {self.noise_type.size_name: size, "noise_limit": limit}
        return replace(self, **changes)

    # ------------------------------------------------------------------ planning

    @classmethod
    def loudest(cls, levels: int, search: Search) -> Self | None:
        """Returns the largest v for these levels and values whose truncation the search can afford."""
        room, kind = (search.values - levels) // 2, cls.noise_type
        affordable = min(max(0.5 * search.variation, 2.0**-100), _MOST_TRUNCATION)
        if room < 1 or kind.truncation(cls.least_size, room) > affordable:
            return None

        most = min(MAX_SIZE, max(_MOST_NOISE / search.honest, cls.least_size))
        size = cls._largest(lambda v: kind.truncation(v, room) <= affordable, most)
        limit = min(room, kind.limit_of(size, affordable))
        start = cls(levels=levels, **{kind.size_name: size}, noise_limit=limit, coordinate_range=1.0)
        if search.fits(start):
            return start
        fitting = cls._largest(lambda v: search.fits(start.quieter(v / size) or start), size)
        return start.quieter(fitting / size) or start

    @classmethod
    def _largest(cls, fits: Callable[[float], bool], most: float) -> float:
        """Returns the largest v up to `most` that fits, within a thousandth; if none fits, the smallest allowed v."""
        if fits(most):
            return most
        low, high = cls.least_size, most
        while high > 1.001 * low:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if fits(middle) else (low, middle)
        return low

    def quieter(self, factor: float) -> Self | None:
        """Returns a copy with a smaller v, and a smaller W if cutting off there costs about as much as before."""
        size, noise = self.size * min(factor, 0.99), self.noise
        if size < self.least_size:
            return None
        allowed = max(noise.truncation(self.size, noise.limit), _LEAST_TRUNCATION)
        return self._with_noise(size, min(noise.limit, noise.limit_of(size, allowed)))

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns parameters with the noise variance of 14 fair coins."""
        found = super().usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
        return {**found, cls.noise_type.size_name: 3.5}


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
        """Twice the centre: z and mirror - z are equally likely."""
        return 2 * self.parts * self.limit

    def with_parts(self, parts: int) -> Self:
        """Returns the law of another number of clients."""
        return replace(self, parts=parts)

    def half_window(self, nats: float, margin: int) -> int:
        """Returns the reach of a window from the centre: enough for Skellam noise, and for lighter tails.

        Raises:
            ConditionError: It would have too many points.
        """
        reach = math.ceil(math.sqrt(2.0 * self.variance * nats) + 2.0 / 3.0 * nats + 2.0 + margin)
        check_points(2 * reach + 1, self)
        return reach
