"""`Plan`: what the planner hands over."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from cpsgd.error import ExpectedError
from cpsgd.privacy.guarantee import Guarantee
from cpsgd.privacy.participation import Participation
from cpsgd.protocol import Protocol


@dataclass(frozen=True)
class FrontierPoint:
    """The best that can be done with a number of bits a coordinate."""

    bits: float
    levels: int
    trials: int
    coordinate_range: float
    modulus: int | None
    expected_squared_error: float
    ratio: float


@dataclass(frozen=True)
class Plan:
    """A protocol, what it promises, and what else was possible.

    Attributes:
        protocol: The parameters to run with.
        guarantee: The proved (ε, δ) of `rounds` rounds with it, evaluated on `protocol` itself.
        wished_epsilon: The ε asked for; the frontier's other points keep it, too.
        bits: Bits a coordinate takes, rounded up to what was asked for.
        error: Expected squared error of a round's mean by cause, for vectors of norm D and `surviving` messages.
        gaussian_squared_error: Error of the Gaussian mechanism calibrated exactly for the same (ε, δ), rounds,
            participation, dropouts and collusion, with real numbers for messages.
        frontier: The best error for each number of bits.
        rounds: Rounds the guarantee covers.
        participation: Who may take part in which round.
        surviving: The fewest messages a round may end with. A round with fewer must be refused or accounted anew.
        colluding: Clients whose noise does not count because they may tell it.
        overflow_probability: Proved bound on the probability that a round's sum wraps around the modulus (0 without).
    """

    protocol: Protocol
    guarantee: Guarantee
    wished_epsilon: float
    bits: float
    error: ExpectedError
    gaussian_squared_error: float
    frontier: tuple[FrontierPoint, ...]
    rounds: int
    participation: Participation
    surviving: int
    colluding: int
    overflow_probability: float

    @property
    def ratio(self) -> float:
        """Expected squared error over the Gaussian mechanism's."""
        return self.error.total / self.gaussian_squared_error

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        protocol = self.protocol
        return {
            "levels": protocol.levels,
            "trials": protocol.trials,
            "p": protocol.p,
            "coordinate_range": protocol.coordinate_range,
            "scale": protocol.scale,
            "modulus": protocol.modulus,
            "bits_per_coordinate": protocol.bits_per_coordinate,
            "message_bytes": protocol.message_bytes,
            "epsilon": self.guarantee.epsilon,
            "wished_epsilon": self.wished_epsilon,
            "delta": self.guarantee.delta,
            "expected_squared_error": self.error.total,
            "error": asdict(self.error),
            "gaussian_squared_error": self.gaussian_squared_error,
            "ratio": self.ratio,
            "rounds": self.rounds,
            "participation": str(self.participation),
            "surviving": self.surviving,
            "colluding": self.colluding,
            "overflow_probability": self.overflow_probability,
            "guarantee": self.guarantee.to_dict(),
            "frontier": [asdict(point) for point in self.frontier],
            "protocol": protocol.to_dict(),
        }
