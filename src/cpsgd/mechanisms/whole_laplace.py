"""Discrete Laplace noise in shares, in whole levels: for coordinates on levels, as counts and one-hot rows are.

A coordinate that is on a level loses nothing to rounding, and neighbours are whole levels apart. A loss per level that
is a fraction, 1/t = `divisor`/`spread`, then spends exactly ε: a single count has the noise of the geometric mechanism
(Ghosh, Roughgarden and Sundararajan, "Universally Utility-Maximizing Privacy Mechanisms", 2009).

No client need be believed. The grid that norms are enforced on is as coarse as the levels, and other vectors are moved
to it. So what noise is added to is whole, and within the range and the norm: `WholeLaplace.levels_apart` bounds how far
apart any two of them are. docs/proofs/pure-laplace.md has the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Self

from cpsgd import _validate
from cpsgd.codec.clip import Grid
from cpsgd.mechanisms.discrete_laplace import MAX_SHARES, MAX_SPREAD, MAX_WINDOW, DiscreteLaplace
from cpsgd.mechanisms.interface import ExpectedError, Mechanism, Search
from cpsgd.neighbours import Adjacency

# The planner's losses per level are multiples of 1/_PARTS. A larger loss than 512 is too much for floats.
_PARTS, _LARGEST_LOSS = 2**30, 512
MAX_DIVISOR = _LARGEST_LOSS * _PARTS
# What the float operations behind a squared norm, and behind a loss, may be off by.
_SQUARED, _SAFE = 1.0 + 2.0**-50, 1.0 - 1e-11


@dataclass(frozen=True, kw_only=True)
class WholeLaplace(DiscreteLaplace):
    """k levels and shares of discrete Laplace noise in whole levels, sums modulo a number.

    Attributes:
        divisor: t is spread / divisor: finer noise is drawn, and divided by this.
    """

    name = "whole-laplace"
    title = "whole levels and shares of discrete Laplace noise"
    on_levels = True

    divisor: int = field()

    def __post_init__(self) -> None:
        divisor = _validate.integer("divisor", self.divisor, low=1, high=MAX_DIVISOR)
        object.__setattr__(self, "divisor", divisor)
        super().__post_init__()
        if self.spread:
            _validate.integer("divisor", divisor, low=1, high=_LARGEST_LOSS * self.spread)

    @property
    def grid(self) -> Grid:
        """The coarsest grid that holds all levels and zero: the levels, and for an even k what is between two."""
        return Grid.of_levels(self.levels, self.coordinate_range, most_bits=1 - self.levels % 2)

    @property
    def keystream_bytes(self) -> int:
        """Four bytes for rounding, and those of the noise if there is room for any."""
        return super().keystream_bytes if self.window > self.levels else 4

    def without_noise(self) -> Mechanism:
        """Returns moving to the same levels without noise."""
        return replace(self, spread=0, divisor=1, window=self.levels)

    # ------------------------------------------------------------------ error

    @property
    def largest_rounding_variance(self) -> float:
        """Zero where every grid point is a level; with an even k, 1/4 halfway between two."""
        return 0.25 * (1 - self.levels % 2)

    def expected_rounding(self, *, dim: int, clip_norm: float, rotate: bool) -> float:
        """Returns the largest, for vectors that a rotation moves away from levels."""
        return self.largest_rounding_variance

    def predicted_error(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ExpectedError:
        """Predicts the squared error of the mean of vectors on levels: d s² v / n, that of the noise."""
        if rotate:
            return super().predicted_error(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)
        return ExpectedError(dim * self.scale**2 / clients * self.noise.variance, 0.0, 0.0)

    # ------------------------------------------------------------------ privacy

    def levels_apart(self, *, dim: int, clip_norm: float, adjacency: Adjacency) -> int:
        """Returns the most levels between two neighbours' rounded vectors, added up over the coordinates.

        An even k has no level at zero: any two vectors are d (k - 1) apart at most. For an odd k the rounded vector is
        a grid point r of whole numbers, within the range and with ‖r‖ <= R = D/s. Since |r_i| <= r_i², its sum of
        absolute values is at most R², and it is at most √d R.
        """
        last = self.levels - 1
        if last % 2:
            return dim * last
        squared = self._squared(clip_norm)
        longest = min(dim * (last // 2), squared, math.floor(math.sqrt(dim * squared) * _SQUARED))
        return longest * round(adjacency.reach)

    def norm_limit(self, clip_norm: float) -> float:
        """Returns √(⌊R²⌋ + 1/2), so that a vector on levels with norm D is left as it is.

        The squared norm of a grid point is a whole number, hence at most ⌊R²⌋ if it is below this.
        """
        return math.sqrt(self._squared(clip_norm) + 0.5)

    def _squared(self, clip_norm: float) -> int:
        """Returns ⌊R²⌋, rounded up: the largest squared norm of a grid point."""
        return math.floor((clip_norm * self.grid.unit) ** 2 * _SQUARED)

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Yields the mechanism with the levels that coordinates are on, and the noise that privacy asks for."""
        if search.levels is None or search.honest > MAX_SHARES or not search.levels[0] < search.values <= MAX_WINDOW:
            return

        def made(loss: Fraction) -> Any:
            t = {"spread": loss.denominator, "divisor": loss.numerator}
            sums = {"shares": search.honest, "window": search.values}
            return cls(levels=levels, coordinate_range=reach, **t, **sums)

        levels, reach = search.levels
        one = made(Fraction(1))
        # The scale that is needed grows as the loss does; this is the loss that fits the scale there is.
        loss = Fraction(math.floor(one.scale / search.rough_scale(one) * _SAFE * _PARTS), _PARTS)
        if loss * MAX_SPREAD >= 1 and search.fits(found := made(loss)):
            yield found

    def with_scale(self, scale: float) -> Self:
        """Returns this: the scale is that of the vectors' levels."""
        return self

    def useful_scales(self, *, dim: int, clip_norm: float, rotate: bool) -> tuple[float, float]:
        """Returns the only scale twice."""
        return self.scale, self.scale

    def quieter(self, factor: float) -> Self | None:
        """Returns None: less noise would need another scale."""
        return None

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns the levels -D, 0 and D, noise of a few levels, and room for all of it."""
        shared = super().usual(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate, delta=delta)
        return shared | {"levels": 3, "divisor": 2}
