"""`plan`: from what a person wants to a `Plan`, which holds a `Protocol` with a proved guarantee."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, partial
from typing import Any

from cpsgd import _validate
from cpsgd._display import html_table
from cpsgd._numbers import bits_of, rounded_up
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.mechanisms import ExpectedError, Mechanism
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner.correlated import PrefixNoise, check_correlated, correlated_plan
from cpsgd.planner.modulus import DEFAULT_OVERFLOW
from cpsgd.planner.nearest import too_accurate, too_few_bits
from cpsgd.planner.problem import WHOLE_BITS, Finished, Problem
from cpsgd.planner.requirements import BEST, Requirements
from cpsgd.planner.search import MAX_BITS, Considered, Design
from cpsgd.planner.two_servers import shortest_uploads
from cpsgd.privacy.guarantees import Guarantee
from cpsgd.promise import Promise
from cpsgd.protocol import Protocol
from cpsgd.run import Run

# Without a requirement on bits or error: the fewest bits that come this close to the Gaussian mechanism.
_CLOSE_TO_GAUSSIAN = 1.1


@dataclass(frozen=True)
class FrontierPoint:
    """The approximately best protocol for a number of bits per coordinate.

    A plan for exactly these bits takes more care, and has up to 4 % less error.

    The error is that of a round's mean; where noise is correlated over rounds, what counts is `prefix`, the model's.
    """

    bits: float
    mechanism: Mechanism
    modulus: int | None
    expected_squared_error: float
    ratio: float
    prefix: PrefixNoise | None = None

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values, the mechanism's parameters among them."""
        prefix = None if self.prefix is None else self.prefix.to_dict()
        return {**asdict(self), "mechanism": self.mechanism.name, **_parameters(self.mechanism), "prefix": prefix}


def _parameters(mechanism: Mechanism) -> dict[str, Any]:
    return asdict(mechanism)  # type: ignore[call-overload, no-any-return]  # every mechanism is a dataclass


@dataclass(frozen=True)
class Plan:
    """A protocol, what it promises, and what else was possible.

    Attributes:
        protocol: The parameters to run with, and the promise that releases with them are held to.
        guarantee: The proved (ε, δ) of `rounds` rounds with it, evaluated on `protocol` itself.
        bits: Bits per coordinate, rounded up to what was asked for.
        error: Expected squared error of a round's mean by cause, for vectors of norm D and `surviving` messages.
        gaussian_squared_error: Error of the Gaussian mechanism calibrated exactly for the same claim and conditions,
            with real numbers for messages; at δ = 0 that of the Laplace mechanism.
        overflow_probability: Proved bound on the probability that a round's sum wraps around the modulus (0 without).
        considered: The error that each mechanism reaches at these bits, the one that is chosen first.
        explore: Computes the frontier.
        prefix: Where noise is correlated over rounds, what is left of it in the model, beside independent noise.

    Example:
        >>> best = plan(clients=100, dim=50, epsilon=4.0, delta=1e-6, bits=8, mechanism="rounded-gaussian")
        >>> best.guarantee.epsilon <= 4.0, best.surviving, best.ratio < 1.01
        (True, 100, True)
    """

    protocol: Protocol
    guarantee: Guarantee
    bits: float
    error: ExpectedError
    gaussian_squared_error: float
    overflow_probability: float
    considered: tuple[Considered, ...]
    explore: Callable[[], tuple[FrontierPoint, ...]] = field(repr=False, compare=False)
    prefix: PrefixNoise | None = field(default=None, kw_only=True)

    @property
    def run(self) -> Run:
        """The rounds that the guarantee is about."""
        return self.guarantee.run

    @property
    def target_epsilon(self) -> float:
        """The ε asked for, which the frontier's other points keep, too; the proved one if nothing is promised."""
        promise = self.protocol.promise
        return self.guarantee.epsilon if promise is None else promise.claim.epsilon

    @property
    def reference(self) -> str:
        """Name of the noise whose error `gaussian_squared_error` is: "Gaussian", or at δ = 0 "Laplace"."""
        return "Gaussian" if self.guarantee.delta else "Laplace"

    @property
    def rounds(self) -> int:
        """Rounds that the guarantee covers."""
        return self.run.rounds

    @property
    def participation(self) -> Participation:
        """The rounds that a client may take part in."""
        return self.run.participation

    @property
    def surviving(self) -> int:
        """The fewest messages a round may end with. A round with fewer must be refused or accounted anew."""
        return self.run.surviving

    @property
    def colluding(self) -> int:
        """Clients whose noise does not count because they may tell it."""
        return self.run.colluding

    @property
    def examples(self) -> int | None:
        """The most examples of a client where one of them is protected; None where the whole client is."""
        return self.run.examples

    def __repr__(self) -> str:
        return (
            f"Plan({self.protocol.name} at {bits_of(self.bits)}, ε = {rounded_up(self.guarantee.epsilon)} at "
            f"δ = {self.guarantee.delta:g}, squared error {self.error.total:.4g}, "
            f"{self.ratio:.3f} × the {self.reference}'s)"
        )

    def _repr_html_(self) -> str:
        protocol, error, exact = self.protocol, self.error, f"the exact {self.reference} mechanism's"
        rows = [
            ("mechanism", f"{protocol.mechanism.name}: {protocol.mechanism.describe()}"),
            ("message", f"{bits_of(protocol.bits_per_coordinate)} per coordinate, {protocol.message_bytes:,} bytes"),
            ("privacy", f"ε = {rounded_up(self.guarantee.epsilon)} at δ = {self.guarantee.delta:g}"),
            ("promised", str(protocol.promise)),
            ("proved by", self.guarantee.citation),
            *([] if self.guarantee.assumption is None else [("assuming", self.guarantee.assumption)]),
            ("error", f"{error.total:.4g} expected squared error, {self.ratio:.3f} × {exact}"),
            *([] if self.prefix is None else [("over the run", str(self.prefix))]),
        ]
        return html_table(f"Plan for {protocol.clients:,} clients of {protocol.dim:,} coordinates", rows)

    @cached_property
    def frontier(self) -> tuple[FrontierPoint, ...]:
        """The best error for each number of bits, computed when it is first asked for."""
        return self.explore()

    @property
    def ratio(self) -> float:
        """Expected squared error over the Gaussian mechanism's."""
        return self.error.total / self.gaussian_squared_error

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain JSON values."""
        protocol = self.protocol
        return {
            "mechanism": protocol.mechanism.name,
            **_parameters(protocol.mechanism),
            "scale": protocol.scale,
            "modulus": protocol.modulus,
            "bits_per_coordinate": protocol.bits_per_coordinate,
            "message_bytes": protocol.message_bytes,
            "epsilon": self.guarantee.epsilon,
            "wished_epsilon": self.target_epsilon,
            "delta": self.guarantee.delta,
            "expected_squared_error": self.error.total,
            "error": asdict(self.error),
            "gaussian_squared_error": self.gaussian_squared_error,
            "ratio": self.ratio,
            "rounds": self.rounds,
            "participation": str(self.participation),
            "surviving": self.surviving,
            "colluding": self.colluding,
            "examples": self.examples,
            "overflow_probability": self.overflow_probability,
            "prefix": None if self.prefix is None else self.prefix.to_dict(),
            "guarantee": self.guarantee.to_dict(),
            "considered": [
                {**asdict(each), "ratio": each.squared_error and each.squared_error / self.gaussian_squared_error}
                for each in self.considered
            ],
            "frontier": [point.to_dict() for point in self.frontier],
            "protocol": protocol.to_dict(),
        }


def _chosen_first(design: Design) -> tuple[Considered, ...]:
    chosen = Considered(design.mechanism.name, design.error.total, proved=True)
    return (chosen, *(each for each in design.considered if each.mechanism != chosen.mechanism))


def _at(problem: Problem, bits: float) -> tuple[float, Finished] | None:
    found = problem.at(bits)
    return None if found is None else (bits, found)


def plan(
    clients: int,
    dim: int,
    epsilon: float,
    delta: float,
    clip_norm: float = 1.0,
    *,
    bits: float | None = None,
    max_error: float | None = None,
    rounds: int = 1,
    participation: str | Participation = "every",
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    dropout: float = 0.0,
    colluding: int = 0,
    secure: bool = False,
    pair: bool = False,
    server_messages: int = 0,
    rotate: bool = True,
    overflow: float = DEFAULT_OVERFLOW,
    mean_norm: float | None = None,
    mechanism: str = BEST,
    replace_one_distance: float | None = None,
    replace_one_l1_distance: float | None = None,
    distance_reason: str | None = None,
    levels: tuple[int, float] | None = None,
    correlated: int | str | None = None,
    workload: str | Sequence[float] | None = None,
) -> Plan:
    """Chooses the parameters of a mechanism (and the modulus) with the smallest expected squared error that keep ε, δ.

    For the paper's mechanism these are k, m and X. The arguments are the fields of `Requirements`, which says what each
    means.

    Returns:
        The plan. Its guarantee comes from the accounting of the returned protocol, and is at most `epsilon`.

    Raises:
        InfeasibleError: No protocol meets the requirements; the message names the nearest that can be met.

    Example:
        >>> best = plan(clients=10_000, dim=65_536, epsilon=2.0, delta=1e-9, bits=4)
        >>> best.protocol.mechanism.name, best.protocol.mechanism.coins, round(best.ratio, 2)
        ('coins', 15, 1.01)
        >>> print(str(best.guarantee).splitlines()[0])
        ε = 2 at δ = 1e-09, replace-one adjacency
        >>> run = plan(10_000, 65_536, 2.0, 1e-9, bits=12, rounds=2500, participation="once", correlated=8)
        >>> run.protocol.mechanism.name, round(run.prefix.gain, 1)
        ('correlated-gaussian', 11.7)
    """
    return plan_for(
        Requirements(
            clients=clients,
            dim=dim,
            epsilon=epsilon,
            delta=delta,
            clip_norm=clip_norm,
            bits=bits,
            max_error=max_error,
            rounds=rounds,
            participation=participation,
            adjacency=adjacency,
            dropout=dropout,
            colluding=colluding,
            secure=secure,
            pair=pair,
            server_messages=server_messages,
            rotate=rotate,
            overflow=overflow,
            mean_norm=mean_norm,
            mechanism=mechanism,
            replace_one_distance=replace_one_distance,
            replace_one_l1_distance=replace_one_l1_distance,
            distance_reason=distance_reason,
            levels=levels,
            correlated=correlated,
            workload=workload,
        )
    )


def plan_for(required: Requirements, problem: Problem | None = None) -> Plan:
    """Returns the plan for requirements; pass `problem` if single examples are protected."""
    if required.pair and required.correlated is not None:
        raise ParameterError(
            "Correlated noise needs clients that stay for the whole run; with pair=True they send once. "
            "Leave out correlated, or use secure=True."
        )
    if required.pair and Participation.parse(required.participation).secrecy is not None:
        raise ParameterError(
            f"participation={str(required.participation)!r}: ε would rest on a secret, who was drawn, and both of two "
            "servers see who sends. Plan pair=True with 'once' (a client is in one round of the task) or 'every'."
        )
    if required.correlated is not None:
        check_correlated(required)
    elif required.workload is not None:
        raise ParameterError("workload says what correlated noise is judged by: give correlated with it.")
    problem = Problem.of(required) if problem is None else problem
    found = None if required.correlated is None else correlated_plan(required, problem)
    if found is not None:
        designs, chosen = found.explore, (found.bits, found.design)
        return _assembled(problem, *chosen, lambda: [*designs(), chosen], found.judge)
    independent = best_plan(problem, bits=required.bits, max_error=required.max_error)
    if required.correlated is None:
        return independent
    without = Considered(CorrelatedGaussian.name, None, reason="leaves no less noise in the model over these rounds")
    return replace(independent, considered=(*independent.considered, without))


def best_plan(problem: Problem, *, bits: float | None = None, max_error: float | None = None) -> Plan:
    """Returns the plan for a validated problem."""
    if bits is not None and max_error is not None:
        raise ParameterError("Give bits or max_error, not both: each determines the other.")
    if bits is not None:
        bits = _validate.positive("bits", bits, high=MAX_BITS + 1e-9)
    if max_error is not None:
        max_error = _validate.positive("max_error", max_error)
    gaussian = problem.gaussian_squared_error
    enough = _CLOSE_TO_GAUSSIAN * gaussian if max_error is None else max_error
    try:
        fewest = problem.fewest_bits if problem.setting.most_values is None else partial(shortest_uploads, problem)
        found = fewest(enough) if bits is None else _at(problem, bits)
    except ConditionError as error:
        asked = "The best there is" if bits is None else f"The best that {bits_of(bits)} hold"
        raise InfeasibleError(f"{asked} cannot be accounted for; use more bits. {error}") from None
    if found is None:
        raise too_few_bits(problem, bits)
    chosen, design = found
    if max_error is not None and design.error.total > max_error:
        raise too_accurate(problem, chosen, design, max_error)

    def frontier() -> Iterable[tuple[float, Design]]:
        return (problem.designs(enough, WHOLE_BITS) | {chosen: design}).items()

    return _assembled(problem, chosen, design, frontier)


def _assembled(
    problem: Problem,
    bits: float,
    design: Finished,
    designs: Callable[[], Iterable[tuple[float, Design]]],
    judge: Callable[[Mechanism], PrefixNoise] | None = None,
) -> Plan:
    """Returns the plan with a design.

    `designs` returns the designs for all numbers of bits; `judge` returns the error of each in a run.
    """
    gaussian = problem.gaussian_squared_error

    def prefix(mechanism: Mechanism) -> PrefixNoise | None:
        return None if judge is None else judge(mechanism)

    def frontier() -> tuple[FrontierPoint, ...]:
        points = dict(designs())
        return tuple(
            FrontierPoint(
                *(b, point.mechanism, point.modulus, point.error.total, point.error.total / gaussian),
                prefix(point.mechanism),
            )
            for b, point in sorted(points.items())
        )

    # The promise is what was asked for: what was proved is at most that.
    promise = Promise(problem.target.claim, problem.conditions)
    return Plan(
        protocol=replace(design.protocol, promise=promise),
        guarantee=replace(design.guarantee, run=Run(design.protocol, problem.conditions)),
        bits=bits,
        error=design.error,
        gaussian_squared_error=gaussian,
        overflow_probability=problem.overflow_probability(design.protocol),
        considered=_chosen_first(design),
        explore=frontier,
        prefix=prefix(design.mechanism),
    )
