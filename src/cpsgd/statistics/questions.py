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
        rounding: Factor by which floating point can enlarge them; 1 where they include it already.
    """

    dim: int
    norm: float
    distance: float
    reason: str
    l1_norm: float
    l1_distance: float
    lattice: int = 0
    rounding: float = _ROUNDING

    def __post_init__(self) -> None:
        if self.dim > MOST_COORDINATES:
            raise ParameterError(
                f"Expected at most {MOST_COORDINATES:,} values, got {self.dim:,}: ask for fewer columns, bins, "
                "clusters or groups."
            )

    @classmethod
    def round(cls, dim: int, norm: float, distance: float, reason: str, *, rounding: float = _ROUNDING) -> Geometry:
        """Returns a set of which only Euclidean lengths are known; sums of absolute values are at most √d of them."""
        side = dim**0.5
        return cls(dim, norm, distance, reason, side * norm, side * distance, rounding=rounding)

    def stated(self) -> dict[str, Any]:
        """Returns the planner's arguments."""
        norm = self.norm * self.rounding
        distance = max(norm, self.distance * self.rounding)
        if distance >= 2.0 * norm:
            return {"dim": self.dim, "clip_norm": norm}
        return {"dim": self.dim, "clip_norm": norm, "replace_one_distance": distance, "distance_reason": self.reason}


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

    def plan(self, clients: int, epsilon: float, delta: float, **requirements: Any) -> Planned[Answer]:
        """Plans a round in which every client answers.

        Args:
            clients: Number of clients.
            epsilon: ε, for replacing all rows of one client.
            delta: δ.
            requirements: Others of `cpsgd.plan`: `bits`, `mechanism`, `dropout`, `colluding`, `secure`, `pair`.
                Without bits and mechanism it is noise before rounding, with the fewest bits within 10 % of the Gaussian
                mechanism's error. That is planned at once; a search through all mechanisms may take a minute.

        Raises:
            InfeasibleError: No protocol keeps (ε, δ).
        """
        from cpsgd.mechanisms import RoundedGaussian
        from cpsgd.planner import plan
        from cpsgd.statistics.planned import Planned

        clients = _validate.integer("clients", clients, low=2)
        if not requirements.keys() & {"bits", "max_error", "mechanism"}:
            requirements["mechanism"] = RoundedGaussian.name
        return Planned(self, plan(clients, epsilon=epsilon, delta=delta, **self.geometry.stated(), **requirements))
