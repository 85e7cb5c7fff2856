"""A question that is asked of everybody in one round, with the plan that answers it.

A `Planned` question is the whole protocol: `encode` runs on the clients and `aggregate` on the server. Other transports
(secure aggregation, Flower, NVFlare) carry `vector` by the protocol of `plan`, and give the mean to `result`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
from numpy.typing import ArrayLike

from cpsgd import planner
from cpsgd.aggregator import Aggregator
from cpsgd.errors import InfeasibleError, VectorError
from cpsgd.mechanisms import RoundedGaussian
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace, PolyaNoise
from cpsgd.mechanisms.whole_laplace import WholeLaplace
from cpsgd.planner import Plan
from cpsgd.planner.requirements import BEST
from cpsgd.privacy import Guarantee
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.statistics.questions import MOST_COORDINATES, Answer, Geometry, Question, Vectors

# Shorter vectors spend their time in the interpreter, where threads only wait for each other.
_THREADED_DIM = 1 << 14
# A squared error that is not worth a bit to improve.
_NEAR_LEAST = 1.005


@dataclass(frozen=True, eq=False)
class Planned(Generic[Answer]):
    """A question, and the plan of the protocol that answers it.

    Example:
        >>> from cpsgd.statistics import Mean
        >>> asked = Mean({"age": (0, 100)}).plan(clients=1000, epsilon=1.0, delta=1e-6, bits=8, mechanism="binomial")
        >>> messages = [asked.encode(age) for age in [20, 60] * 500]
        >>> found = asked.aggregate(messages)
        >>> found.names, bool(abs(found.values[0] - 40) < 3), found.epsilon <= 1.0
        (('age',), True, True)
    """

    question: Question[Answer]
    plan: Plan

    @property
    def protocol(self) -> Protocol:
        """The protocol of the round."""
        return self.plan.protocol

    def vector(self, value: object) -> Vectors:
        """Returns one client's vector, for transports that encode it themselves; see `Question.vector`."""
        return self.question.vector(value)

    def encode(self, value: object, round: int = 0) -> bytes:
        """Returns one client's message, to be sent once per round; see the question's `vector` for values."""
        return self.protocol.encode(self.vector(value), round)

    def aggregate(
        self,
        messages: Iterable[bytes],
        round: int = 0,
        *,
        confidence: float = 0.95,
        accept_epsilon: float | None = None,
    ) -> Answer:
        """Returns the answer from the clients' messages.

        Args:
            messages: One per client.
            round: The round they were encoded for.
            confidence: Of the intervals, if the answer has intervals.
            accept_epsilon: Releases fewer messages than planned if their true ε is at most this; the answer says which.

        Raises:
            GuaranteeError: There are fewer messages than the guarantee was planned for. Nothing is released.
            WireError: A message is refused.
        """
        aggregator = Aggregator(self.protocol, round, max_dim=MOST_COORDINATES)
        for message in messages:
            aggregator.add(message)
        mean = aggregator.mean(accept_epsilon=accept_epsilon)
        return self.result(mean, aggregator.count, confidence=confidence, accept_epsilon=accept_epsilon)

    def result(
        self, mean: ArrayLike, count: int, *, confidence: float = 0.95, accept_epsilon: float | None = None
    ) -> Answer:
        """Returns the answer from the private mean of `count` clients' vectors; see `aggregate`."""
        guarantee: Guarantee | None = self.plan.guarantee
        if count < self.plan.surviving or accept_epsilon is not None:
            guarantee = self.protocol.release(count, accept_epsilon=accept_epsilon)
        assert guarantee is not None  # a plan's protocol promises something
        values = np.asarray(mean, dtype=np.float64)
        if values.shape != (self.protocol.dim,) or not np.isfinite(values).all():
            raise VectorError(
                f"Expected a mean of {self.protocol.dim:,} finite numbers, got a shape of {values.shape}."
            )
        return self.question.answer(self, values, count, guarantee, confidence)

    @property
    def rate(self) -> float | None:
        """The loss per level of discrete Laplace noise; None for other noise."""
        noise = self.protocol.mechanism.noise
        return noise.rate if isinstance(noise, PolyaNoise) else None

    def shape(self, count: int) -> float:
        """Returns the shares in the sum of `count` messages, over those that make discrete Laplace noise."""
        noise = self.protocol.mechanism.noise
        return count / noise.shares if isinstance(noise, PolyaNoise) else 1.0

    def variance(self, count: int) -> float:
        """Returns the variance of a coordinate of the mean of `count` messages, at its largest.

        The rotation spreads noise and rounding evenly over the coordinates. Clipping to the range is a bias: its
        square, at the worst that the planner assumes, is spread by the rotation as well.
        """
        mechanism = self.protocol.mechanism
        rounding = 0.0 if mechanism.on_levels else mechanism.largest_rounding_variance
        spread = mechanism.scale**2 * (mechanism.noise.variance + rounding) / count
        return spread + self.plan.error.clipping / self.protocol.dim


def least_error(geometry: Geometry, clients: int, claim: Claim, requirements: Mapping[str, Any]) -> Plan:
    """Returns the plan with the smallest error: shares of discrete Laplace noise at δ = 0, or others.

    Raises:
        InfeasibleError: Neither keeps the claim.
    """
    stated = {name: value for name, value in requirements.items() if value is not None}
    named, free = stated.get("mechanism", BEST), not stated.keys() & {"bits", "max_error"}

    def plan(more: Mapping[str, Any], *, laplace: bool = False) -> Plan:
        asked = {"epsilon": claim.epsilon, "delta": claim.delta, **geometry.stated(l1=laplace), **stated, **more}
        return planner.plan(clients, **asked)

    def whole() -> Plan:
        # The protocol enforces how far apart whole vectors are: nothing is stated.
        unstated = {"replace_one_distance": None, "distance_reason": None}
        return plan(
            {"mechanism": WholeLaplace.name, "levels": geometry.levels, "rotate": False, "delta": 0.0, **unstated}
        )

    def shares() -> Plan:
        if geometry.levels is not None and named == BEST:
            with suppress(InfeasibleError):
                return whole()  # no noise in shares of levels is less
        noise = {"mechanism": DiscreteLaplace.name, "rotate": False, "delta": 0.0}
        found = [plan(noise, laplace=True)]
        # With one bit more or two, rounding adds half a percent to the error instead of a few.
        for bits in (found[0].bits + 1, found[0].bits + 2) if free else ():
            with suppress(InfeasibleError):
                found.append(plan(noise | {"bits": bits}, laplace=True))
        least = min(each.error.total for each in found)
        return next(each for each in found if each.error.total <= _NEAR_LEAST * least)

    def others() -> Plan:
        if not free or named != BEST:
            return plan({})
        try:
            return plan({"mechanism": RoundedGaussian.name})
        except InfeasibleError:
            return plan({})  # it needs deviations of a step or so, which a large ε does not have

    # Several rounds of Laplace noise cost their sum; two servers cannot prove the range of what wraps around.
    pure = named in (BEST, DiscreteLaplace.name) and not stated.get("pair")
    pure &= not claim.delta or named != BEST or stated.get("rounds", 1) == 1
    found, failures = [], []
    for way in (shares, others) if pure and claim.delta and named == BEST else (shares if pure else others,):
        try:
            found.append(way())
        except InfeasibleError as error:
            failures.append(error)
    if not found:
        raise failures[-1]
    return min(found, key=lambda each: each.bits if "max_error" in stated else each.error.total)


def simulated(protocol: Protocol, round: int = 0) -> RoundSimulator:
    """Returns a round on this machine, with two threads where vectors are long."""
    return RoundSimulator(protocol, round, threads=2 if protocol.dim >= _THREADED_DIM else 1)
