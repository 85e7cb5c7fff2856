"""Estimators of a round's mean, and what a run takes from a plan or contradicts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import NoPrivacy, estimators
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.learning.estimators import agreed, completed
from cpsgd.learning.option_groups import AccountOptions, ClientOptions, CohortOptions
from cpsgd.mechanisms import Binomial, Coins, Gaussian, Mechanism, SampledCoins
from cpsgd.promise import Claim, Conditions, Promise
from cpsgd.protocol import Protocol
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.simulation.device import DeviceRound
from tests.learning.training import make_trainer, spent

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


def test_a_trainer_runs_what_was_planned(triangle: ArrayDataset) -> None:
    loud = replace(promising("every", 2), mechanism=replace(PLAIN.mechanism, trials=20_000))  # type: ignore[type-var]
    trainer = make_trainer(triangle, loud, cohort=600, rounds=None)
    assert (trainer.rounds, trainer.config["participation"]) == (2, "every")
    list(trainer.run())
    found = spent(trainer)
    assert (found.rounds, str(found.participation), found.delta) == (2, "every", 1e-5)
    with pytest.raises(ParameterError, match="The plan is for 2 rounds with participation every, the run for 2 with"):
        make_trainer(triangle, loud, rounds=None, participation="once")


def test_a_trainer_without_a_plan_needs_rounds(triangle: ArrayDataset) -> None:
    with pytest.raises(ParameterError, match="Missing rounds"):
        make_trainer(triangle, NoPrivacy(1.0), cohort=600, rounds=None)


# ------------------------------------------------------------------ rounds of coins and their baselines

CLIENTS, WIDTH = 200, 3_000
REACH = 4.0 / math.sqrt(WIDTH)
KINDS: dict[str, Mechanism] = {
    "one coin": Coins(coins=1, theta=0.2, coordinate_range=REACH),
    "coins": Coins(coins=7, theta=0.1, coordinate_range=REACH),
    "sampled coins": SampledCoins(rate=0.1, theta=0.4, coordinate_range=REACH),
}
every = pytest.mark.parametrize("mechanism", KINDS.values(), ids=KINDS)


def protocol(mechanism: Mechanism) -> Protocol:
    return Protocol(clients=CLIENTS, dim=WIDTH, clip_norm=1.0, mechanism=mechanism)


@every
@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["cpu", "as on a GPU"])
def test_a_round_of_coins_estimates_the_mean(mechanism: Mechanism, device: torch.device | None) -> None:
    of = protocol(mechanism)
    vector = np.random.default_rng(1).standard_normal(WIDTH).astype(np.float32)
    vector *= 0.9 / np.linalg.norm(vector)
    rows = np.tile(vector, (CLIENTS - 50, 1))
    round_: RoundSimulator | DeviceRound
    if device is None:
        round_ = RoundSimulator(of, 3, seed=7)
        round_.add(rows)
    else:
        round_ = DeviceRound(of, 3, seed=7, device=device)
        round_.add(torch.from_numpy(rows))
    round_.add_zeros(50)
    error = np.asarray(round_.mean()) - 0.75 * vector
    # ‖error‖² is nearly a sum of 3,000 squared normals; rounding is a little below its largest, at most 4 %.
    assert 0.96 - 6 * math.sqrt(2 / WIDTH) < error @ error / round_.noise_norm() ** 2 < 1.0 + 6 * math.sqrt(2 / WIDTH)


@every
def test_coins_are_private_and_have_baselines(mechanism: Mechanism) -> None:
    of = protocol(mechanism)
    assert estimators.is_private(of)
    found = estimators.baselines_of(of, 0.5)
    gaussian, quantized = found["gaussian"], found["quantized"]
    assert isinstance(gaussian, Protocol)
    assert isinstance(quantized, Protocol)
    assert gaussian.mechanism == Gaussian(sigma=0.5)
    # The same range and as many values, with nothing kept uncertain.
    assert isinstance(quantized.mechanism, Binomial)
    assert quantized.mechanism.coordinate_range == REACH
    assert not estimators.is_private(quantized)


def test_bytes_are_those_of_messages() -> None:
    size = {name: estimators.message_bytes(protocol(mechanism), WIDTH) for name, mechanism in KINDS.items()}
    header = size["one coin"] - WIDTH // 8
    assert 0 < header < 100
    assert size["coins"] == header + 3 * WIDTH // 8
    assert size["sampled coins"] == pytest.approx(header + 0.1 * WIDTH / 8, abs=2)  # on average
