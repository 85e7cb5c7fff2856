"""Estimators of a round's mean: a protocol, planned or explicit, or one of the baselines it is compared with."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.learning.option_groups import AccountOptions, ClientOptions, CohortOptions
from cpsgd.mechanisms import Gaussian
from cpsgd.neighbours import Participation
from cpsgd.paper import bounds
from cpsgd.planner.planning import Plan
from cpsgd.promise import Promise
from cpsgd.protocol import Protocol

NO_PRIVACY, GAUSSIAN, QUANTIZED = "no privacy", "gaussian", "quantized"
"""Names of the baselines."""

# Relative difference allowed between the sampling rate of a plan and that of a run.
_SAME_RATE = 0.01


@dataclass(frozen=True)
class NoPrivacy:
    """The baseline without privacy: the mean of clipped updates in floats.

    Example:
        >>> NoPrivacy(clip_norm=0.5)
        NoPrivacy(clip_norm=0.5)
    """

    clip_norm: float

    def __post_init__(self) -> None:
        _validate.positive("clip_norm", self.clip_norm)


Estimator = Plan | Protocol | NoPrivacy
"""Forms a round's mean: a plan's protocol, an explicit protocol, or floats without noise."""


def baselines(plan: Plan) -> dict[str, Protocol | NoPrivacy]:
    """Returns the estimators that a plan is compared with, by name, all with its clip norm.

    Returns:
        "no privacy": clipped updates in floats. "gaussian": the Gaussian protocol with the noise that the same (ε, δ),
        rounds, participation, dropouts and collusion need. "quantized": the plan's levels and range without noise.

    Example:
        >>> from cpsgd.planner import plan
        >>> sorted(baselines(plan(clients=1000, dim=100, epsilon=2.0, delta=1e-6, bits=6)))
        ['gaussian', 'no privacy', 'quantized']
    """
    # The planner's error of the Gaussian mechanism is d σ² / (messages that arrive).
    sigma = math.sqrt(plan.gaussian_squared_error * plan.surviving / plan.protocol.dim) * (1.0 + 1e-9)
    return baselines_of(plan.protocol, sigma)


def baselines_of(protocol: Protocol, sigma: float) -> dict[str, Protocol | NoPrivacy]:
    """Returns the baselines of any protocol; `sigma` is the Gaussian noise per client that is as private."""
    found: dict[str, Protocol | NoPrivacy] = {
        NO_PRIVACY: NoPrivacy(protocol.clip_norm),
        GAUSSIAN: gaussian_like(protocol, sigma),
    }
    if protocol.mechanism.grid is not None:  # otherwise messages are floats
        silent = protocol.mechanism.without_noise()
        found[QUANTIZED] = replace(protocol, mechanism=silent, modulus=None, promise=None)
    return found


def gaussian_like(protocol: Protocol, sigma: float) -> Protocol:
    """Returns the Gaussian protocol for the same clients and vectors."""
    return replace(protocol, mechanism=Gaussian(sigma=sigma), rotate=False, modulus=None, rotation_seed=0, promise=None)


def at_paper_range(protocol: Protocol, delta: float) -> tuple[Protocol, float]:
    """Returns the protocol with the paper's coordinate range X, if that is wider, and the range it has then."""
    mechanism = protocol.mechanism
    reach = mechanism.grid.limit / mechanism.grid.unit if mechanism.grid is not None else math.inf
    paper = bounds.coordinate_range(
        clients=protocol.clients, dim=protocol.dim, clip_norm=protocol.clip_norm, delta=delta
    )
    if paper <= reach:
        return replace(protocol, modulus=None, promise=None), reach
    wide = mechanism.with_scale(mechanism.scale * paper / reach * (1.0 + 1e-12))
    return replace(protocol, mechanism=wide, modulus=None, promise=None), paper


def completed(account: AccountOptions, estimator: Estimator) -> AccountOptions:
    """Fills the fields that the account leaves open with those of the protocol's promise."""
    promise = promise_of(estimator)
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
    cohorts: CohortOptions, clients: ClientOptions, estimator: Estimator, population: int
) -> tuple[CohortOptions, ClientOptions]:
    """Fills the options' rounds, participation and examples, if they are open, with those of the promise.

    `Spending` refuses a run that costs more than was promised. Here a run is refused whose rounds, participation or
    unit of privacy differ from the promise, because its noise would be for something else.
    """
    if not isinstance(estimator, Estimator):
        raise ParameterError(f"Expected a Plan, a Protocol or NoPrivacy(...), got {estimator!r}.")
    promise = promise_of(estimator)
    if promise is None:
        return cohorts, clients
    terms = promise.conditions
    population = cohorts.with_canaries(population, terms.examples)
    planned, scheme = terms.participation, cohorts.participation
    rounds = terms.rounds if cohorts.rounds is None else cohorts.rounds
    if scheme is None:
        # In a single round "every" and "once" are the same.
        scheme = "once" if terms.rounds == 1 and not planned.sampled else planned.scheme
    apart = max(1, population // cohorts.cohort) if scheme == "apart" else 1
    run = Participation(scheme, planned.rate if scheme == planned.scheme else 1.0, apart)
    planned_for = f"The plan is for {terms.rounds:,} rounds with participation {planned}"
    rate = cohorts.cohort / population
    if planned.sampled and scheme == planned.scheme and not math.isclose(rate, planned.rate, rel_tol=_SAME_RATE):
        raise ParameterError(
            f"{planned_for}, and a cohort of {cohorts.cohort:,} is {rate:g} of the population: plan with "
            f"{scheme}:{rate:g}."
        )
    if planned.scheme == run.scheme == "apart" and apart < min(planned.separation, rounds):
        raise ParameterError(
            f"{planned_for}, and a cohort of {cohorts.cohort:,} out of {population:,} brings clients back after "
            f"{apart:,} rounds: use smaller cohorts, or plan with participation apart:{apart}."
        )
    sampled = planned.sampled or run.sampled
    if (sampled and scheme != planned.scheme) or run.counted_rounds(rounds) < planned.counted_rounds(terms.rounds):
        raise ParameterError(
            f"{planned_for}, the run for {rounds:,} with participation {scheme}: its noise would be wasted, or not "
            "what was planned. Leave rounds and participation out of the run's options, which are then the plan's, or "
            "plan for this run."
        )
    if clients.examples not in (None, terms.examples):
        protected = "whole clients" if terms.examples is None else f"one of {terms.examples:,} examples"
        raise ParameterError(
            f"The plan protects {protected}, and the run is for examples={clients.examples}: leave that out, or plan "
            "with plan_examples for the same number."
        )
    return replace(cohorts, rounds=rounds, participation=scheme), replace(clients, examples=terms.examples)


def promise_of(estimator: Estimator) -> Promise | None:
    """Returns the promise that the protocol carries, if any."""
    protocol = protocol_of(estimator)
    return None if protocol is None else protocol.promise


def protocol_of(estimator: Estimator) -> Protocol | None:
    """Returns the protocol of an estimator, or None for floats."""
    if isinstance(estimator, Plan):
        return estimator.protocol
    return estimator if isinstance(estimator, Protocol) else None


def clip_norm(estimator: Estimator) -> float:
    """Returns D, the bound on the norm of a client's vector."""
    return (estimator.protocol if isinstance(estimator, Plan) else estimator).clip_norm


def is_private(estimator: Estimator) -> bool:
    """Returns whether the estimator adds noise, so that there is a guarantee to account for."""
    protocol = protocol_of(estimator)
    return protocol is not None and protocol.mechanism.is_noisy


def message_bytes(estimator: Estimator, dim: int) -> int:
    """Returns the bytes that a client sends; float32 numbers without a header if there is no protocol."""
    protocol = protocol_of(estimator)
    return 4 * dim if protocol is None else protocol.message_bytes


def check_run(estimator: Estimator, rounds: int, dropout: float, participation: Participation) -> None:
    """Raises `ParameterError` if the protocol's noise does not cover a run of this kind."""
    protocol = protocol_of(estimator)
    if protocol is not None:
        protocol.mechanism.memory.check_steady(rounds, dropout, participation)


def as_data(estimator: Estimator) -> dict[str, Any]:
    """Returns plain values that tell one estimator from another."""
    protocol = protocol_of(estimator)
    return {NO_PRIVACY: {"clip_norm": clip_norm(estimator)}} if protocol is None else {"protocol": protocol.to_dict()}
