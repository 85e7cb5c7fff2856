"""How a round's mean is formed: by a protocol, planned or explicit, or by one of the baselines it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.options import AccountOptions, ClientOptions, CohortOptions
from cpsgd.mechanisms import Gaussian
from cpsgd.neighbours import Participation
from cpsgd.paper import bounds
from cpsgd.planner.planning import Plan
from cpsgd.promise import Promise
from cpsgd.protocol import Protocol
from cpsgd.simulation.correlated import Slots, SummedLineages
from cpsgd.simulation.cpu import FloatMean, RoundSimulator
from cpsgd.simulation.device import DeviceFloatMean, DeviceRound
from cpsgd.simulation.device_correlated import DeviceLineages

NO_PRIVACY, GAUSSIAN, QUANTIZED = "no privacy", "gaussian", "quantized"
"""Names of the baselines."""

# A plan's rate and a run's are the same if they differ by less: data sets are not as round as plans.
_SAME_RATE = 0.01


@dataclass(frozen=True)
class NoPrivacy:
    """The baseline without privacy: the mean of clipped updates in floats."""

    clip_norm: float

    def __post_init__(self) -> None:
        _validate.positive("clip_norm", self.clip_norm)


Mechanism = Plan | Protocol | NoPrivacy
Simulator = RoundSimulator | FloatMean | DeviceRound | DeviceFloatMean
"""What takes a round's updates and yields their mean."""


def baselines(plan: Plan) -> dict[str, Protocol | NoPrivacy]:
    """What a plan is compared with, all with its clip norm.

    Returns:
        "no privacy": clipped updates in floats. "gaussian": the Gaussian protocol with the noise that the same (ε, δ),
        rounds, participation, dropouts and collusion need. "quantized": the plan's levels and range without noise.

    Example:
        >>> from cpsgd.planner import plan
        >>> found = baselines(plan(clients=1000, dim=100, epsilon=2.0, delta=1e-6, bits=6))
        >>> sorted(found), found["quantized"].mechanism.is_noisy
        (['gaussian', 'no privacy', 'quantized'], False)
    """
    # The planner's error of the Gaussian mechanism is d σ² / (messages that arrive).
    sigma = math.sqrt(plan.gaussian_squared_error * plan.surviving / plan.protocol.dim) * (1.0 + 1e-9)
    return baselines_of(plan.protocol, sigma)


def baselines_of(protocol: Protocol, sigma: float) -> dict[str, Protocol | NoPrivacy]:
    """As `baselines`, for any protocol and the Gaussian noise σ per client that is as private."""
    found: dict[str, Protocol | NoPrivacy] = {
        NO_PRIVACY: NoPrivacy(protocol.clip_norm),
        GAUSSIAN: gaussian_like(protocol, sigma),
    }
    if protocol.mechanism.grid is not None:  # floats are not rounded
        silent = protocol.mechanism.without_noise()
        found[QUANTIZED] = replace(protocol, mechanism=silent, modulus=None, promise=None)
    return found


def gaussian_like(protocol: Protocol, sigma: float) -> Protocol:
    """The Gaussian protocol for the same clients and vectors."""
    return replace(protocol, mechanism=Gaussian(sigma=sigma), rotate=False, modulus=None, rotation_seed=0, promise=None)


def at_paper_range(protocol: Protocol, delta: float) -> tuple[Protocol, float]:
    """The same levels and noise over the paper's range of coordinates, where that is wider; and that range X."""
    mechanism = protocol.mechanism
    reach = mechanism.grid.limit / mechanism.grid.unit if mechanism.grid is not None else math.inf
    paper = bounds.coordinate_range(
        clients=protocol.clients, dim=protocol.dim, clip_norm=protocol.clip_norm, delta=delta
    )
    if paper <= reach:
        return replace(protocol, modulus=None, promise=None), reach
    wide = mechanism.with_scale(mechanism.scale * paper / reach * (1.0 + 1e-12))
    return replace(protocol, mechanism=wide, modulus=None, promise=None), paper


def completed(account: AccountOptions, mechanism: Mechanism) -> AccountOptions:
    """The account with what was promised where it leaves that open."""
    promise = promise_of(mechanism)
    if promise is None:
        return account
    claim, terms = promise.claim, promise.conditions
    promised: dict[str, Any] = {
        "epsilon": claim.epsilon,
        "delta": claim.delta,
        "adjacency": terms.adjacency,
        "colluding": terms.colluding,
    }
    return replace(account, **{name: value for name, value in promised.items() if getattr(account, name) is None})


def agreed(
    cohorts: CohortOptions, clients: ClientOptions, mechanism: Mechanism, population: int
) -> tuple[CohortOptions, ClientOptions]:
    """The options with the promise's rounds, participation and examples where they leave them open.

    A run that costs more than was promised is refused with its cost, by `Spending`. One that is something else is
    refused here: the noise would be for rounds that are never run, or for another unit.

    Raises:
        ParameterError: They contradict what was promised.
    """
    promise = promise_of(mechanism)
    if promise is None:
        return cohorts, clients
    terms = promise.conditions
    planned, scheme = terms.participation, cohorts.participation
    rounds = terms.rounds if cohorts.rounds is None else cohorts.rounds
    if scheme is None:
        # In one round it is the same whether somebody takes part in every round or once.
        scheme = "once" if terms.rounds == 1 and not planned.sampled else planned.scheme
    run = Participation(scheme, planned.rate if scheme == planned.scheme else 1.0)
    told = f"The plan is for {terms.rounds:,} rounds with participation {planned}"
    rate = cohorts.cohort / population
    if planned.sampled and scheme == planned.scheme and not math.isclose(rate, planned.rate, rel_tol=_SAME_RATE):
        raise ParameterError(
            f"{told}, and a cohort of {cohorts.cohort:,} is {rate:g} of the population: plan with {scheme}:{rate:g}."
        )
    sampled = planned.sampled or run.sampled
    if (sampled and scheme != planned.scheme) or run.counted_rounds(rounds) < planned.counted_rounds(terms.rounds):
        raise ParameterError(
            f"{told}, the run for {rounds:,} with participation {scheme}: its noise would be wasted, or not what was "
            "planned. Leave rounds and participation out of the run's options, which are then the plan's, or plan "
            "for this run."
        )
    if clients.examples not in (None, terms.examples):
        protected = "whole clients" if terms.examples is None else f"one of {terms.examples:,} examples"
        raise ParameterError(
            f"The plan protects {protected}, and the run is for examples={clients.examples}: leave that out, or plan "
            "with plan_examples for the same number."
        )
    return replace(cohorts, rounds=rounds, participation=scheme), replace(clients, examples=terms.examples)


def promise_of(mechanism: Mechanism) -> Promise | None:
    """What was promised with the protocol, if anything was."""
    protocol = protocol_of(mechanism)
    return None if protocol is None else protocol.promise


def protocol_of(mechanism: Mechanism) -> Protocol | None:
    """The protocol that runs, or None for floats."""
    if isinstance(mechanism, Plan):
        return mechanism.protocol
    return mechanism if isinstance(mechanism, Protocol) else None


def clip_norm(mechanism: Mechanism) -> float:
    """D, the bound on the norm of what a client sends."""
    return (mechanism.protocol if isinstance(mechanism, Plan) else mechanism).clip_norm


def is_private(mechanism: Mechanism) -> bool:
    """Whether there is noise to account for."""
    protocol = protocol_of(mechanism)
    return protocol is not None and protocol.mechanism.is_noisy


def message_bytes(mechanism: Mechanism, dim: int) -> int:
    """Bytes a client sends; float32 numbers without a header where there is no protocol."""
    protocol = protocol_of(mechanism)
    return 4 * dim if protocol is None else protocol.message_bytes


def check_run(mechanism: Mechanism, rounds: int, dropout: float) -> None:
    """Refuses a run that a protocol with correlated noise is not for.

    Raises:
        ParameterError: It has more rounds, or clients drop out.
    """
    protocol = protocol_of(mechanism)
    correlation = None if protocol is None else protocol.mechanism.correlation
    if correlation is None:
        return
    if rounds > correlation.rounds:
        raise ParameterError(
            f"The protocol's noise is correlated over a run of {correlation.rounds:,} rounds, and rounds={rounds:,} "
            "are to be run: plan with so many rounds."
        )
    if dropout > 0.0:
        raise ParameterError(
            f"dropout={dropout:g}: where noise is correlated over rounds, lineages break when clients drop out, and "
            "that is not simulated. Use dropout=0, or independent noise."
        )


def slots_of(mechanism: Mechanism, seed: int | None) -> Slots | None:
    """The keys of a run's correlated noise; None where rounds are independent."""
    protocol = protocol_of(mechanism)
    if protocol is None or protocol.mechanism.correlation is None:
        return None
    return Slots(protocol.mechanism, seed)


def lineages_of(
    mechanism: Mechanism, slots: Slots, clients: int, dim: int, device: torch.device | None
) -> SummedLineages | DeviceLineages:
    """A run's correlated noise, for rounds of so many clients: on a device, or without one by the CPU."""
    protocol = protocol_of(mechanism)
    assert protocol is not None
    if device is None:
        return SummedLineages(protocol.mechanism, slots, clients, dim)
    return DeviceLineages(protocol.mechanism, slots, clients, dim, device)


def start_round(
    mechanism: Mechanism,
    dim: int,
    round: int,
    seed: int | None,
    device: torch.device | None,
    lineages: SummedLineages | DeviceLineages | None = None,
    first: int = 0,
) -> Simulator:
    """What takes a round's updates and yields their mean: on a device, or without one by the CPU's own kernels.

    Clients are numbered from `first` on.
    """
    protocol, norm = protocol_of(mechanism), clip_norm(mechanism)
    if protocol is None:
        return FloatMean(dim, norm) if device is None else DeviceFloatMean(dim, norm, device)
    if device is None:
        # Without the promise: a run's own account knows how many messages each of its rounds had.
        summed = lineages if isinstance(lineages, SummedLineages) else None
        return RoundSimulator(replace(protocol, promise=None), round, seed=seed, lineages=summed, first=first)
    found = DeviceRound(protocol, round, seed=seed, device=device, first=first)
    found.lineages = lineages if isinstance(lineages, DeviceLineages) else None
    return found


def as_data(mechanism: Mechanism) -> dict[str, Any]:
    """Plain values that tell one mechanism from another."""
    protocol = protocol_of(mechanism)
    return {NO_PRIVACY: {"clip_norm": clip_norm(mechanism)}} if protocol is None else {"protocol": protocol.to_dict()}
