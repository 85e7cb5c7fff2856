"""A run takes rounds, participation and examples from what was planned, or contradicts it and is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import NoPrivacy, Trainer, mlp
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.learning.estimators import agreed, completed
from cpsgd.learning.option_groups import AccountOptions, ClientOptions, CohortOptions, RunOptions
from cpsgd.promise import Claim, Conditions, Promise
from cpsgd.protocol import Protocol

POPULATION = 1000
PLAIN = Protocol.rotated_binomial(clients=100, dim=15, clip_norm=1.0, levels=3, trials=200)


def promising(scheme: str = "every", rounds: int = 1, **others: Any) -> Protocol:
    conditions = Conditions.of(100, rounds=rounds, participation=scheme, **others)
    promise = Promise(Claim(8.0, 1e-5), conditions)
    return replace(PLAIN, promise=promise)


def settled(protocol: Protocol, examples: int | None = None, **cohorts: Any) -> tuple[Any, Any, Any]:
    found, clients = agreed(
        CohortOptions(cohort=100, **cohorts), ClientOptions(examples=examples), protocol, POPULATION
    )
    return found.rounds, found.participation, clients.examples


@pytest.mark.parametrize("scheme", ["once", "every", "fixed-size:0.1"])
def test_what_is_left_open_is_the_plans(scheme: str) -> None:
    assert settled(promising(scheme, 30)) == (30, scheme.split(":")[0], None)
    assert settled(promising("every", 3, examples=50)) == (3, "every", 50)
    account = completed(AccountOptions(epsilon=3.0), promising("every", 3, colluding=2))
    assert (account.epsilon, account.delta, account.adjacency, account.colluding) == (3.0, 1e-5, "replace-one", 2)


def test_one_round_is_the_same_once_and_in_every_round() -> None:
    assert settled(promising("every", 1), rounds=7) == (7, "once", None)
    assert settled(promising("every", 1), rounds=1, participation="every") == (1, "every", None)
    # Disjoint cohorts cost the same however many they are.
    assert settled(promising("once", 30), rounds=10) == (10, "once", None)


def test_without_a_promise_the_options_count() -> None:
    assert settled(PLAIN, rounds=3) == (3, None, None)
    assert settled(PLAIN, rounds=3, participation="every", examples=9) == (3, "every", 9)
    assert agreed(CohortOptions(cohort=100), ClientOptions(), NoPrivacy(1.0), POPULATION)[0].rounds is None


@pytest.mark.parametrize(
    ("protocol", "options"),
    [
        (promising("every", 30), {"participation": "once"}),
        (promising("every", 30), {"rounds": 29}),
        (promising("every", 30), {"rounds": 30, "participation": "fixed-size"}),
        (promising("fixed-size:0.1", 30), {"participation": "every"}),
        (promising("fixed-size:0.1", 30), {"participation": "poisson"}),
        (promising("fixed-size:0.1", 30), {"rounds": 20}),
        (promising("fixed-size:0.2", 30), {}),
        (promising("fixed-size:0.05", 30), {}),
        (promising("every", 3), {"examples": 5}),
        (promising("every", 3, examples=5), {"examples": 6}),
    ],
)
def test_contradictions_are_refused(protocol: Protocol, options: dict[str, Any]) -> None:
    with pytest.raises(ParameterError, match="The plan"):
        settled(protocol, **options)


def test_what_costs_more_is_refused_with_its_cost() -> None:
    # By the account, which knows how many rounds the budget buys.
    assert settled(promising("once", 30), rounds=30, participation="every") == (30, "every", None)
    assert settled(promising("every", 3), rounds=4) == (4, "every", None)


def started(data: ArrayDataset, mechanism: Any, **cohorts: Any) -> Trainer:
    return Trainer(
        mlp(4, 3, (), seed=0),
        torch.nn.functional.cross_entropy,
        data,
        mechanism,
        cohorts=CohortOptions(**{"cohort": data.size, **cohorts}),
        run=RunOptions(seed=1),
    )


def test_a_trainer_runs_what_was_planned(triangle: ArrayDataset) -> None:
    loud = replace(promising("every", 2), mechanism=replace(PLAIN.mechanism, trials=20_000))  # type: ignore[type-var]
    trainer = started(triangle, loud)
    assert (trainer.rounds, trainer.config["participation"]) == (2, "every")
    list(trainer.run())
    found = trainer.guarantee()
    assert found is not None
    assert (found.rounds, str(found.participation), found.delta) == (2, "every", 1e-5)
    with pytest.raises(ParameterError, match="The plan is for 2 rounds with participation every, the run for 2 with"):
        started(triangle, loud, cohort=100, participation="once")


def test_a_trainer_without_a_plan_needs_rounds(triangle: ArrayDataset) -> None:
    with pytest.raises(ParameterError, match="Missing rounds"):
        started(triangle, NoPrivacy(1.0))
