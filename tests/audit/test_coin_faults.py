"""The audit fails code that gets coins wrong, with its default number of rounds or fewer. All randomness is fixed.

What is closest to chance gets the default number, and what is close half of it; how close, docs/auditing.md says.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from functools import cache
from typing import Any

import pytest

from cpsgd import Protocol, plan
from cpsgd.audit import AuditReport, audit

from . import coin_faults, faults

DELTA = 1e-3
DEFAULT = int(inspect.signature(audit).parameters["rounds"].default)
MANY, FEW = DEFAULT // 2, 2_500

PLANS: dict[str, dict[str, Any]] = {
    "one coin": {"mechanism": "coins", "bits": 1},
    "many coins": {"mechanism": "coins", "bits": 4},
    "sampled coins": {"mechanism": "sampled-coins", "bits": 0.25},
    "lazy coins": {"mechanism": "lazy-coins"},
}

# How each fault is found, and in how many rounds. Others may notice as well.
Found = tuple[faults.Fault, int, set[str]]
EVERYWHERE: dict[str, Found] = {
    "biased coins": (coin_faults.biased_coins, MANY, {"unbiased"}),
    "θ too large": (coin_faults.larger_theta, MANY, {"unbiased"}),
    "clip not enforced": (coin_faults.loose_clip, MANY, {"unbiased"}),
    "wrong centre": (coin_faults.wrong_centre, FEW, {"unbiased", "law"}),
    "noise-free coordinate": (coin_faults.noise_free_coordinate, FEW, {"unbiased", "law"}),
    "deterministic rounding": (coin_faults.deterministic_rounding, FEW, {"unbiased", "spread", "law"}),
    "keystream of all clients": (faults.one_keystream_for_all_clients, FEW, {"spread", "tails"}),
    "keystream of all rounds": (faults.one_keystream_for_all_rounds, FEW, {"unbiased", "law"}),
    "keystream of two rounds": (faults.one_keystream_for_two_rounds, MANY, {"rounds"}),
}
ONLY: dict[str, dict[str, Found]] = {
    "one coin": {},
    "many coins": {"one word for all coins": (coin_faults.one_word_for_all_coins, FEW, {"spread", "law", "tails"})},
    "sampled coins": {
        "biased coins": (coin_faults.biased_coins, DEFAULT, {"unbiased"}),
        "pattern of all clients": (coin_faults.one_pattern_for_all_clients, FEW, {"spread", "law", "tails"}),
        "pattern of all rounds": (coin_faults.one_pattern_for_all_rounds, FEW, {"spread", "law", "rounds"}),
        "pattern of two rounds": (coin_faults.one_pattern_for_two_rounds, FEW, {"rounds"}),
        "pattern of another client, a round before": (
            coin_faults.pattern_of_another_client_in_the_round_before,
            FEW,
            {"rounds"},
        ),
    },
    "lazy coins": {
        "choice of all clients": (coin_faults.one_choice_for_all_clients, FEW, {"spread", "law", "tails"}),
        "choice of all rounds": (coin_faults.one_choice_for_all_rounds, FEW, {"spread", "law"}),
        "choice of two rounds": (coin_faults.one_choice_for_two_rounds, MANY, {"rounds"}),
    },
}
# One of every kind of fault, and some for every kind of coins; the others repeat them.
USUAL = {
    ("one coin", "keystream of all rounds"),
    ("many coins", "one word for all coins"),
    ("sampled coins", "pattern of two rounds"),
    ("lazy coins", "keystream of all rounds"),
}
ALL = [
    pytest.param(kind, name, marks=() if (kind, name) in USUAL else pytest.mark.thorough)
    for kind, own in ONLY.items()
    for name in (EVERYWHERE | own)
]


@cache
def protocol_of(kind: str) -> Protocol:
    """The command's default: four clients, sixteen coordinates, ε = 2."""
    return replace(plan(clients=4, dim=16, epsilon=2.0, delta=DELTA, **PLANS[kind]).protocol, promise=None)


def played(kind: str, fault: faults.Fault, rounds: int) -> AuditReport:
    encode, start = fault(protocol_of(kind))
    return audit(protocol_of(kind), DELTA, rounds=rounds, encode=encode, start=start, seed=2)


@pytest.mark.parametrize(("kind", "name"), ALL)
@pytest.mark.usefixtures("fixed_seed")
def test_a_fault_is_found(kind: str, name: str) -> None:
    fault, rounds, expected = (EVERYWHERE | ONLY[kind])[name]
    report = played(kind, fault, rounds)
    assert not report.passed
    assert expected <= {check.name for check in report.checks if not check.passed}


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.usefixtures("fixed_seed")
def test_the_product_passes(kind: str) -> None:
    report = audit(protocol_of(kind), DELTA, rounds=2_000, seed=1)
    assert [check.name for check in report.checks if not check.passed] == []
    assert report.passed
    assert 0.0 < report.lower_bound < report.claimed.epsilon
    near = {check.name: check.statistic for check in report.checks}
    assert near["unbiased"] > 0.1
    assert near["law"] > 0.1


@pytest.mark.parametrize(
    "kind", ["one coin", *(pytest.param(kind, marks=pytest.mark.thorough) for kind in ("sampled coins", "lazy coins"))]
)
def test_honest_coins_pass_with_other_keystreams(kind: str) -> None:
    encode, start = faults.keyed(protocol_of(kind), lambda round, message: (round << 32) + message)
    report = audit(protocol_of(kind), DELTA, rounds=1_000, encode=encode, start=start, seed=0)
    assert [check.name for check in report.checks if not check.passed] == []


@pytest.mark.parametrize(
    ("kind", "fault"),
    [
        pytest.param("one coin", coin_faults.moved(lambda points: points), marks=pytest.mark.thorough),
        pytest.param("sampled coins", coin_faults.moved(lambda points: points), marks=pytest.mark.thorough),
        pytest.param("sampled coins", coin_faults.honest_patterns, marks=pytest.mark.thorough),
        pytest.param("lazy coins", coin_faults.honest_choice, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.usefixtures("fixed_seed")
def test_the_same_code_without_its_fault_passes(kind: str, fault: faults.Fault) -> None:
    assert [check.name for check in played(kind, fault, DEFAULT).checks if not check.passed] == []
