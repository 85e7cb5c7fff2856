"""`Plan`: what the planner hands over."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from cpsgd.mechanisms import ExpectedError, Mechanism
from cpsgd.privacy.guarantees import Guarantee
from cpsgd.privacy.participation import Participation
from cpsgd.protocol import Protocol


@dataclass(frozen=True)
class FrontierPoint:
    """The best that can be done with a number of bits per coordinate."""

    bits: float
    mechanism: Mechanism
    modulus: int | None
    expected_squared_error: float
    ratio: float

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, the mechanism's parameters among them."""
        return {**asdict(self), "mechanism": self.mechanism.name, **_parameters(self.mechanism)}


def _parameters(mechanism: Mechanism) -> dict[str, Any]:
    return asdict(mechanism)  # type: ignore[call-overload, no-any-return]  # every mechanism is a dataclass


@dataclass(frozen=True)
class Plan:
    """A protocol, what it promises, and what else was possible.

    Attributes:
        protocol: The parameters to run with.
        guarantee: The proved (ε, δ) of `rounds` rounds with it, evaluated on `protocol` itself.
        wished_epsilon: The ε asked for; the frontier's other points keep it, too.
        bits: Bits per coordinate, rounded up to what was asked for.
        error: Expected squared error of a round's mean by cause, for vectors of norm D and `surviving` messages.
        gaussian_squared_error: Error of the Gaussian mechanism calibrated exactly for the same (ε, δ), rounds,
            participation, dropouts and collusion, with real numbers for messages.
        rounds: Rounds the guarantee covers.
        participation: Who may take part in which round.
        surviving: The fewest messages a round may end with. A round with fewer must be refused or accounted anew.
        colluding: Clients whose noise does not count because they may tell it.
        overflow_probability: Proved bound on the probability that a round's sum wraps around the modulus (0 without).
        explore: Computes the frontier.
    """

    protocol: Protocol
    guarantee: Guarantee
    wished_epsilon: float
    bits: float
    error: ExpectedError
    gaussian_squared_error: float
    rounds: int
    participation: Participation
    surviving: int
    colluding: int
    overflow_probability: float
    explore: Callable[[], tuple[FrontierPoint, ...]] = field(repr=False, compare=False)

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The best error for each number of bits, computed when it is first asked for."""
        return self.explore()

    @property
    def ratio(self) -> float:
        """Expected squared error over the Gaussian mechanism's."""
        return self.error.total / self.gaussian_squared_error

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        protocol = self.protocol
        return {
            "mechanism": protocol.mechanism.name,
            **_parameters(protocol.mechanism),
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
            "frontier": [point.to_dict() for point in self.frontier],
            "protocol": protocol.to_dict(),
        }
