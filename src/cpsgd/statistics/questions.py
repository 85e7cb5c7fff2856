"""Questions that are asked of everybody, and the sets that users' vectors are from.

Each user has one vector of a public set that the question describes (`Geometry`). Its sum over all users, with noise,
is the answer. On machines that hold a table the sum is formed by `cpsgd.statistics.partial`; between clients it is a
round of a protocol (`cpsgd.statistics.planned`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.promise import Claim

if TYPE_CHECKING:
    from cpsgd.privacy import Guarantee
    from cpsgd.statistics.planned import Planned

Vectors = NDArray[np.float32]
Matrix = NDArray[np.float64]
Answer = TypeVar("Answer")
"""Type of a question's answer."""

# Relative error that float64 in between and float32 at the end can add to a distance or a norm.
_ROUNDING = 1.0 + 2.0**-20
MOST_COORDINATES = 1 << 24
"""The most coordinates of a question."""


@dataclass(frozen=True)
class Geometry:
    """The set of a question's vectors.

    Attributes:
        dim: Number of coordinates.
        norm: The largest Euclidean norm.
        distance: The largest Euclidean distance between two vectors, and between a vector and zero.
        reason: Why the distances hold, for readers of the guarantee.
        l1_norm: The largest sum of absolute coordinates.
        l1_distance: The largest sum of absolute differences between two vectors, and between a vector and zero.
        lattice: A number that makes every vector whole if multiplied by it; 0 if there is none.
        levels: k and X, where every coordinate is one of k evenly spaced numbers from -X to X, and the norm keeps two
            such vectors no further apart than the L1 distance.
        rounding: Factor by which floating point can enlarge them; 1 where they include it already.
    """

    dim: int
    norm: float
    distance: float
    reason: str
    l1_norm: float
    l1_distance: float
    lattice: int = 0
    levels: tuple[int, float] | None = None
    rounding: float = _ROUNDING

    def __post_init__(self) -> None:
        if self.dim > MOST_COORDINATES:
            raise ParameterError(
                f"Expected at most {MOST_COORDINATES:,} values, got {self.dim:,}: ask for fewer columns, bins, "
                "clusters or groups."
            )

    @classmethod
    def round(cls, dim: int, norm: float, distance: float, reason: str, *, rounding: float = _ROUNDING) -> Geometry:
        """Returns the geometry of a set with known Euclidean lengths; L1 lengths are at most √d times as large."""
        side = dim**0.5
        return cls(dim, norm, distance, reason, side * norm, side * distance, rounding=rounding)

    def stated(self, *, l1: bool = False) -> dict[str, Any]:
        """Returns the planner's arguments; with `l1` those of noise that rests on sums of absolute differences."""
        norm = self.norm * self.rounding
        apart = {"replace_one_distance": max(norm, self.distance * self.rounding)}
        if apart["replace_one_distance"] >= 2.0 * norm:
            apart = {}
        # Where nothing more is known, the planner takes √d times the Euclidean distance.
        if l1 and self.l1_distance < self.dim**0.5 * min(self.distance, 2.0 * self.norm):
            apart["replace_one_l1_distance"] = max(norm, self.l1_distance * self.rounding)
        reason = {"distance_reason": self.reason} if apart else {}
        return {"dim": self.dim, "clip_norm": norm} | apart | reason


class Question(ABC, Generic[Answer]):
    """A question that is asked of everybody in one round."""

    @property
    @abstractmethod
    def geometry(self) -> Geometry:
        """The set that clients' vectors are from."""

    @abstractmethod
    def vector(self, value: object) -> Vectors:
        """Returns one client's vector."""

    @abstractmethod
    def answer(
        self, planned: Planned[Answer], mean: Matrix, count: int, guarantee: Guarantee, confidence: float
    ) -> Answer:
        """Returns the answer behind the private mean of `count` vectors, released with this guarantee."""

    def plan(self, clients: int, epsilon: float, delta: float = 0.0, **requirements: Any) -> Planned[Answer]:
        """Plans a round in which every client answers, with the noise that has the smaller error.

        That is discrete Laplace noise in shares, which spends no δ, or Gaussian-like noise, which is less where there
        are many values. Without `bits` it is the fewest bits near the exact mechanism's error.

        Args:
            clients: Number of clients.
            epsilon: ε, for replacing all rows of one client.
            delta: δ; 0 if not given.
            requirements: Others of `cpsgd.plan`: `bits`, `mechanism`, `dropout`, `colluding`, `secure`, `pair`. With
                `bits` alone all mechanisms are searched through, which may take a minute.

        Raises:
            InfeasibleError: No protocol keeps (ε, δ).
        """
        from cpsgd.statistics.planned import Planned, least_error

        clients = _validate.integer("clients", clients, low=2)
        return Planned(self, least_error(self.geometry, clients, Claim(epsilon, delta), requirements))
