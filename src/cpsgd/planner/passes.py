"""`plan_passes`: how often each client of a population should take part, in how many bits, and with which noise.

With k passes cohorts are k times as large, for the same number of rounds. A client takes part k times, so the variance
of a sum's noise must be k times as large, with correlated noise a little more. The mean is over k times as many
clients, so that its variance falls by about k. The price is bytes: each pass costs a client one more download of the
model, and one more message.

All options are shown: passes, cohort, bands of correlated noise and bits, with the bytes that a client sends and
receives over all its rounds, and the noise that is left in the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from cpsgd import _validate
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.neighbours import Participation
from cpsgd.planner.correlated import AUTO, checked_bands
from cpsgd.planner.planning import Plan, plan_for
from cpsgd.planner.problem import Problem
from cpsgd.planner.requirements import Requirements
from cpsgd.planner.workloads import Workload
from cpsgd.protocol import Protocol

_PASSES = (1, 2, 5, 10, 25, 50)
_BANDS = (1, 8, 32)
# Bits of independent noise; of correlated noise all whole numbers are looked at.
_BITS = (0.1, 1.0, 2.0, 4.0)
# Of options this near to the best, the one with the fewest bytes is taken.
_NEARLY = 1.05
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class PassOption:
    """One way to run the rounds.

    Attributes:
        passes: The most rounds of one client.
        separation: The least distance of two rounds of one client.
        cohort: Clients per round.
        bands: Number of rounds that a draw of noise is in; 1 for independent noise.
        bits: Bits per coordinate.
        mechanism: Name of the mechanism.
        bytes_up: Bytes that a client sends in all its rounds, seeds that it hands on included.
        bytes_down: Bytes that a client receives in all its rounds: the model as floats, and seeds.
        squared_error: The mean over rounds of the expected squared error of the model so far, for a learning rate of 1.
    """

    passes: int
    separation: int
    cohort: int
    bands: int
    bits: float
    mechanism: str
    bytes_up: int
    bytes_down: int
    squared_error: float

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class PassesPlan:
    """The chosen plan, and all options that were looked at.

    Attributes:
        plan: The plan of the chosen option; its participation is "apart:ROUNDS", "once" or "every".
        chosen: The option that was chosen.
        options: All options, by passes, bands and bits, also those over a limit.
    """

    plan: Plan
    chosen: PassOption
    options: tuple[PassOption, ...]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain JSON values."""
        chosen, options = self.chosen.to_dict(), [option.to_dict() for option in self.options]
        return {**self.plan.to_dict(), "passes": {"chosen": chosen, "options": options}}


def schedule(population: int, rounds: int, passes: int) -> tuple[Participation, int]:
    """Returns the participation for `passes` passes over a population, and the clients per round.

    Clients come in a fixed order, again and again; two rounds of one client are at least ⌈rounds / passes⌉ apart.

    Raises:
        ParameterError: There are more passes than rounds, or fewer clients than a round needs.

    Example:
        >>> who, cohort = schedule(25_000_000, rounds=2500, passes=10)
        >>> str(who), cohort
        ('apart:250', 100000)
    """
    population = _validate.integer("population", population, low=1)
    rounds = _validate.integer("rounds", rounds, low=1)
    passes = _validate.integer("passes", passes, low=1, high=rounds)
    apart = -(-rounds // passes)
    if population < apart:
        raise ParameterError(
            f"{passes} passes of {apart} rounds need a client for each round, and there are {population}: use more "
            "passes, or fewer rounds."
        )
    who = Participation.every() if apart == 1 else Participation.apart(apart)
    return Participation.once() if apart == rounds else who, population // apart


def plan_passes(
    population: int,
    dim: int,
    epsilon: float,
    delta: float,
    *,
    rounds: int,
    passes: int | None = None,
    uplink: float | None = None,
    downlink: float | None = None,
    **others: Any,
) -> PassesPlan:
    """Chooses passes, cohort, bands and bits for a population, and returns the plan with all options.

    Args:
        population: Number of all clients.
        dim: d.
        epsilon: ε that all rounds together may cost a client.
        delta: δ of the guarantee.
        rounds: T.
        passes: Only so many passes; by default 1, 2, 5, 10, 25 and 50 are compared.
        uplink: The most bytes that a client may send over the whole training; None for no limit.
        downlink: The most bytes that a client may receive over the whole training; None for no limit.
        others: Further fields of `Requirements`. `bits` and `correlated` restrict the options to these; `workload` says
            what the noise is judged by.

    Raises:
        InfeasibleError: No option is within the limits; the message names the one with the fewest bytes.
        ParameterError: Clients or a participation are given: these are chosen here.

    Example:
        >>> found = plan_passes(25_000_000, 51_370, 2.0, 1e-9, rounds=2500, downlink=2.2e6, correlated=32)
        >>> found.chosen.passes, found.chosen.cohort, str(found.plan.participation)
        (10, 100000, 'apart:250')
    """
    if given := sorted({"clients", "participation", "max_error"} & others.keys()):
        raise ParameterError(f"Leave out {', '.join(given)}: these follow from the passes over the population.")
    required = Requirements(clients=1, dim=dim, epsilon=epsilon, delta=delta, rounds=rounds, **others)
    for name, limit in (("uplink", uplink), ("downlink", downlink)):
        if limit is not None:
            _validate.positive(name, limit)
    counts = [k for k in _PASSES if k <= rounds and population >= -(-rounds // k)] if passes is None else [passes]
    found: list[PassOption] = []
    reason: Exception | None = None
    for count in counts:
        who, cohort = schedule(population, rounds, count)
        if found and downlink is not None and _FLOAT_BYTES * dim * count > downlink:
            break  # more passes are only over the limit by more
        several = replace(required, clients=cohort, participation=who)
        for bands in _bands(required, rounds):
            try:
                found += _options(several, bands)
            except (InfeasibleError, ConditionError) as error:
                reason = reason or error
    if not found:
        raise reason or InfeasibleError(f"{population:,} clients are too few for {rounds:,} rounds.")
    chosen = _best(found, uplink, downlink)
    who, cohort = schedule(population, rounds, chosen.passes)
    final = replace(
        required,
        clients=cohort,
        participation=who,
        bits=chosen.bits,
        correlated=chosen.bands if chosen.bands > 1 else None,
        workload=required.workload if chosen.bands > 1 else None,
    )
    return PassesPlan(plan_for(final), chosen, tuple(found))


def _bands(required: Requirements, rounds: int) -> list[int]:
    """Returns the numbers of bands to compare."""
    if required.correlated in (None, AUTO):
        return [bands for bands in _BANDS if bands <= rounds]
    return [checked_bands(required.correlated, rounds)]


def _best(options: Iterable[PassOption], uplink: float | None, downlink: float | None) -> PassOption:
    """Returns the option with the least noise within the limits; of nearly as good ones, that with the fewest bytes."""

    def size(option: PassOption) -> int:
        return option.bytes_up + option.bytes_down

    within = [
        option
        for option in options
        if (uplink is None or option.bytes_up <= uplink) and (downlink is None or option.bytes_down <= downlink)
    ]
    if not within:
        least = min(options, key=size)
        raise InfeasibleError(
            f"No option is within these limits. The nearest that can be had: {least.passes} passes with {least.bits:g} "
            f"bits take uplink={least.bytes_up:,} and downlink={least.bytes_down:,} bytes per client."
        )
    least_error = min(option.squared_error for option in within)
    return min((option for option in within if option.squared_error <= _NEARLY * least_error), key=size)


def _options(required: Requirements, bands: int) -> Iterator[PassOption]:
    """Yields the options with this participation and number of bands, by bits."""
    participation = Participation.parse(required.participation)
    passes = participation.counted_rounds(required.rounds)
    apart = required.rounds if participation.scheme == "once" else participation.separation

    def option(bits: float, protocol: Protocol, error: float) -> PassOption:
        seeds = protocol.mechanism.memory.handed_bytes
        up, down = protocol.message_bytes + seeds, _FLOAT_BYTES * protocol.dim + seeds
        name = protocol.mechanism.name
        return PassOption(passes, apart, protocol.clients, bands, bits, name, passes * up, passes * down, error)

    if bands > 1:
        found = plan_for(replace(required, correlated=bands))
        for point in found.frontier:
            if point.prefix is not None and required.bits in (None, point.bits):
                protocol = replace(found.protocol, mechanism=point.mechanism, modulus=point.modulus)
                yield option(point.bits, protocol, point.prefix.squared_error)
        return
    problem = Problem.of(replace(required, correlated=None, workload=None))
    workload = Workload.of(required.workload, required.rounds)
    # With another rotation in every round, what is clipped is another part of a vector each time.
    weight = workload.variance(np.ones(1))
    for bits, design in problem.designs(0.0, _BITS if required.bits is None else (required.bits,)).items():
        yield option(bits, problem.protocol(design), design.error.total * weight)
