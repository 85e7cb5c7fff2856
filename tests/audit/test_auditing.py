"""The audit passes the product, and says what it claims to say. Which faults it finds: test_faults.py.

All randomness is fixed, so nothing here fails by chance; with fresh randomness honest code would fail an audit
with probability at most 1e-6.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from cpsgd import Guarantee, Protocol, guarantee, plan
from cpsgd.audit import AuditReport, audit
from cpsgd.audit.auditing import FALSE_ALARM, check_size
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import Coins, LazyCoins, RoundedGaussian
from cpsgd.promise import Claim, Conditions, Promise
from cpsgd.simulation.cpu import RoundSimulator

from .faults import Integers, keyed, noise_of

auditing = sys.modules["cpsgd.audit.auditing"]

DELTA = 1e-3
PROTOCOL = Protocol.rotated_binomial(
    clients=4, dim=16, clip_norm=1.0, levels=8, trials=250, coordinate_range=0.72, rotation_seed=3
)


def with_noise(protocol: Protocol, **changes: Any) -> Protocol:
    return dataclasses.replace(protocol, mechanism=dataclasses.replace(noise_of(protocol), **changes))


def test_the_chance_of_a_false_alarm_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """One in ten parts is the attack's, and each claim has its share of that."""
    asked, prospect = set(), auditing._Lesson.prospect

    def spy(lesson: Any, rounds: int, delta: float, error: float) -> Any:
        asked.add(error)
        return prospect(lesson, rounds, delta, error)

    monkeypatch.setattr(auditing._Lesson, "prospect", spy)
    monkeypatch.setattr(auditing, "_SIMULATED", 200)
    report = audit(dataclasses.replace(PROTOCOL, dim=4), DELTA, rounds=1_000, seed=1, false_alarm=1e-4)
    assert asked == {1e-5 / len(report.claims), 1.0 - auditing.CONFIDENCE}
    assert len(report.claims) > 1


def failed(report: AuditReport) -> set[str]:
    return {check.name for check in report.checks if not check.passed}


PLANNED: dict[str, dict[str, Any]] = {
    "planned": {"clients": 4, "dim": 16, "epsilon": 2.0},
    "secure aggregation": {"clients": 4, "dim": 16, "epsilon": 2.0, "bits": 8, "secure": True},
    "one coin": {"clients": 4, "dim": 16, "epsilon": 4.0, "bits": 1, "mechanism": "coins"},
    "many coins": {"clients": 4, "dim": 16, "epsilon": 4.0, "bits": 4, "mechanism": "coins"},
    "coins, secure aggregation": {
        "clients": 4,
        "dim": 16,
        "epsilon": 4.0,
        "bits": 6,
        "secure": True,
        "mechanism": "coins",
    },
    "sampled coins": {"clients": 8, "dim": 16, "epsilon": 4.0, "bits": 0.5, "mechanism": "sampled-coins"},
    "lazy coins": {"clients": 4, "dim": 16, "epsilon": 4.0, "mechanism": "lazy-coins"},
}

PROTOCOLS = {
    "the faults' own": PROTOCOL,
    "two levels": Protocol.rotated_binomial(
        clients=20, dim=8, clip_norm=1.0, levels=2, trials=14, coordinate_range=0.2
    ),
    "no rotation": Protocol.binomial(clients=2, dim=5, clip_norm=3.0, levels=9, trials=250),
    "skewed coins": Protocol.rotated_binomial(
        clients=3, dim=12, clip_norm=1.0, levels=9, trials=300, p=0.3, coordinate_range=0.6
    ),
    "one coordinate": Protocol.binomial(clients=2, dim=1, clip_norm=1.0, levels=4, trials=200),
    "one client": Protocol.rotated_binomial(
        clients=1, dim=7, clip_norm=1.0, levels=17, trials=900, coordinate_range=0.9
    ),
    "range within the ball": Protocol.rotated_binomial(
        clients=2, dim=16, clip_norm=1.0, levels=4, trials=250, coordinate_range=0.2
    ),
    "coins within the ball": Protocol(
        clients=20, dim=8, clip_norm=1.0, mechanism=Coins(coins=3, theta=0.2, coordinate_range=0.25)
    ),
    "noise before rounding": Protocol(
        clients=3,
        dim=12,
        clip_norm=1.0,
        mechanism=RoundedGaussian(noise_deviation=1.5, step=0.4, window=34, coordinate_range=0.7),
    ),
    "lazy coins without rotation": Protocol(
        clients=4,
        dim=2,
        clip_norm=1.0,
        rotate=False,
        mechanism=LazyCoins(rate=0.5, theta=0.3, coordinate_range=1.0),
    ),
}


@cache
def protocol_of(name: str) -> Protocol:
    """Planned when a test asks for it, not when tests are collected."""
    if name in PROTOCOLS:
        return PROTOCOLS[name]
    # Rounds of single messages are played.
    return dataclasses.replace(plan(delta=DELTA, **PLANNED[name]).protocol, promise=None)


# Another has the same kind of noise and of round; test_coin_faults.py has coins, test_audit_command.py a plan.
MORE = {*PLANNED, *("two levels", "coins within the ball", "lazy coins without rotation", "range within the ball")} - {
    "secure aggregation"
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=pytest.mark.thorough if name in MORE else ()) for name in (*PROTOCOLS, *PLANNED)],
)
@pytest.mark.usefixtures("fixed_seed")
def test_the_product_passes(name: str) -> None:
    report = audit(protocol_of(name), DELTA, rounds=2_000, seed=1)
    assert failed(report) == set()
    assert report.passed
    assert 0.0 < report.lower_bound < report.claimed.epsilon
    # Limits that honest rounds never come near would find nothing.
    near = {check.name: check.statistic for check in report.checks}
    assert near["unbiased"] > 0.1
    assert near["law"] > 0.1


@pytest.mark.usefixtures("fixed_seed")
def test_the_product_passes_with_zero_out_neighbours_survivors_and_another_round() -> None:
    report = audit(PROTOCOL, DELTA, rounds=2_000, seed=1, adjacency="zero-out", surviving=3, few=2, round=12)
    assert report.passed
    assert report.claimed == guarantee(PROTOCOL, DELTA, adjacency="zero-out", surviving=3)
    assert report.surviving == 3


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.thorough) for s in range(1, 20))])
def test_honest_keystreams_pass_whatever_they_are(seed: int) -> None:
    encode, start = keyed(PROTOCOL, lambda round, message: (seed << 96) + (round << 32) + message)
    assert failed(audit(PROTOCOL, DELTA, rounds=1_000, encode=encode, start=start, seed=seed)) == set()


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["one coin", "sampled coins", "lazy coins"])
@pytest.mark.parametrize("seed", range(5))
def test_honest_coins_pass_whatever_their_keystreams(name: str, seed: int) -> None:
    encode, start = keyed(protocol_of(name), lambda round, message: (seed << 96) + (round << 32) + message)
    assert failed(audit(protocol_of(name), DELTA, rounds=1_000, encode=encode, start=start, seed=seed)) == set()


# Neighbours that are easily told apart, so that few rounds are enough.
LOUD = with_noise(PROTOCOL, levels=16)


@pytest.mark.usefixtures("fixed_seed")
def test_the_lower_bound_is_worth_something() -> None:
    report = audit(LOUD, 0.01, rounds=6_000, seed=1)
    assert report.passed
    assert report.lower_bound > 0.4 * report.claimed.epsilon
    assert report.claims[0].found > 0.3 * report.claimed.epsilon


@pytest.mark.usefixtures("fixed_seed")
def test_a_claim_that_is_too_good_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    def boasting(*arguments: Any, **options: Any) -> Guarantee:
        real = guarantee(*arguments, **options)
        return dataclasses.replace(real, claim=dataclasses.replace(real.claim, epsilon=0.25 * real.epsilon))

    monkeypatch.setattr(auditing, "guarantee", boasting)
    report = audit(LOUD, 0.01, rounds=6_000, seed=1)
    # The code is right, the claim is not: the law holds, and only the attack objects.
    assert failed(report) == {"privacy"}


class Simulated:
    """The simulator of training, which draws the noise of all clients at once."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        self.simulator = RoundSimulator(protocol, round, threads=1)

    def add(self, message: NDArray[np.float64]) -> None:
        self.simulator.add(message.astype(np.float32)[None])

    def mean(self) -> NDArray[np.float32]:
        return self.simulator.mean()


@pytest.mark.usefixtures("fixed_seed")
def test_another_server() -> None:
    protocol = protocol_of("secure aggregation")
    assert protocol.modulus is not None
    report = audit(protocol, DELTA, rounds=1_000, encode=protocol.encode_integers, start=Integers, seed=1)
    assert failed(report) == set()


@pytest.mark.usefixtures("fixed_seed")
def test_the_simulator() -> None:
    report = audit(PROTOCOL, DELTA, rounds=1_000, encode=lambda vector, _: vector, start=Simulated, seed=1)
    assert failed(report) == set()


def test_what_is_not_a_number_fails() -> None:
    class Broken(Integers):
        def mean(self) -> NDArray[np.float32]:
            return np.full(self.protocol.dim, np.nan, dtype=np.float32)

    report = audit(PROTOCOL, DELTA, rounds=1_000, encode=PROTOCOL.encode_integers, start=Broken, seed=1)
    assert "integers" in failed(report)


@pytest.mark.usefixtures("fixed_seed")
def test_the_report() -> None:
    heard: list[int] = []
    report = audit(PROTOCOL, DELTA, rounds=1_000, seed=1, progress=heard.append)
    assert sum(heard) == report.rounds == 1_000
    assert report.attacked_rounds == 600
    assert dict(report.promises).keys() == {
        "one coordinate",
        "spread",
        "one rotated coordinate",
        "corner after rotation",
    }
    data = json.loads(json.dumps(report.to_dict()))
    assert data["passed"] is True
    assert data["claimed"]["epsilon"] == guarantee(PROTOCOL, DELTA).epsilon
    assert [claim["delta"] for claim in data["claims"]] == sorted(claim["delta"] for claim in data["claims"])
    assert report.error_rates[0] == (1.0, 0.0)
    assert report.error_rates[-1] == (0.0, 1.0)


def test_the_claimed_trade_off() -> None:
    report = audit(PROTOCOL, DELTA, rounds=1_000, seed=1)
    alarms = np.linspace(0.0, 1.0, 101)
    misses = report.claimed_misses(alarms)
    assert misses[0] == 1.0 - DELTA
    assert misses[-1] == 0.0
    assert np.all(np.diff(misses) <= 0.0)
    assert np.all(misses <= 1.0 - alarms)
    # The curve is its own mirror image, as neighbours are not ordered.
    np.testing.assert_allclose(report.claimed_misses(misses[misses > 0.01]), alarms[misses > 0.01], atol=0.02)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"rounds": 999}, ParameterError, "rounds"),
        ({"few": 5}, ParameterError, "few"),
        ({"surviving": 0}, ParameterError, "surviving"),
        ({"round": -1}, ParameterError, "round"),
        ({"adjacency": "add-remove"}, ParameterError, "adjacency"),
        ({"delta": -1e-9}, ParameterError, "delta"),
        ({"rounds": 2**40}, ParameterError, "rounds times dim"),
        (
            {"protocol": Protocol.gaussian(clients=2, dim=2, clip_norm=1.0, sigma=1.0)},
            ParameterError,
            "gaussian protocol sends floats",
        ),
        ({"protocol": with_noise(PROTOCOL, trials=0)}, ConditionError, "no noise"),
        ({"protocol": dataclasses.replace(PROTOCOL, dim=4096)}, ParameterError, "2048 coordinates"),
        ({"protocol": dataclasses.replace(PROTOCOL, clients=2**20)}, ParameterError, "surviving"),
    ],
)
def test_what_cannot_be_audited(change: dict[str, Any], error: type[Exception], text: str) -> None:
    arguments: dict[str, Any] = {"protocol": PROTOCOL, "delta": DELTA, "rounds": 1_000, **change}
    run: Callable[..., AuditReport] = audit
    with pytest.raises(error, match=text):
        run(arguments.pop("protocol"), arguments.pop("delta"), **arguments)


def test_a_promise_is_neither_believed_nor_in_the_way() -> None:
    protocol = Protocol.rotated_binomial(clients=2, dim=8, clip_norm=1.0, levels=8, trials=250)
    promise = Promise(Claim(1e-3, 1e-9), Conditions.of(2))
    report = audit(dataclasses.replace(protocol, promise=promise), delta=1e-3, rounds=1_000, seed=1)
    assert report.passed
    assert report.claimed == guarantee(protocol, 1e-3)
    promising = dataclasses.replace(protocol, promise=promise)
    with pytest.raises(ParameterError, match="rounds of single messages"):
        audit(promising, delta=1e-3, rounds=1_000, encode=promising.encode)


def test_code_that_would_keep_a_promise_is_not_played() -> None:
    """An audit sends single messages in place of a run, which code that keeps the promise would refuse."""
    protocol = Protocol.rotated_binomial(clients=2, dim=8, clip_norm=1.0, levels=8, trials=250)
    promised = dataclasses.replace(protocol, promise=Promise(Claim(1.0, 1e-3), Conditions.of(2)))
    with pytest.raises(ParameterError, match="keeps the protocol's promise"):
        audit(promised, delta=1e-3, rounds=1_000, seed=1, encode=protocol.encode)


def test_false_alarms_are_rare_and_sizes_are_limited() -> None:
    assert FALSE_ALARM <= 1e-6
    protocol = Protocol.binomial(clients=2, dim=1024, clip_norm=1.0, levels=4, trials=4)
    check_size(protocol, 2, 2**17)
    with pytest.raises(ParameterError, match="rounds times dim <= 134217728"):
        check_size(protocol, 2, 2**17 + 1)
    check_size(dataclasses.replace(protocol, dim=2048), 2, 1)
    with pytest.raises(ParameterError, match="at most 2048 coordinates"):
        check_size(dataclasses.replace(protocol, dim=2049), 2, 1)


def test_the_attack_is_prepared_by_the_rounds_that_promise_most() -> None:
    """Real rounds show how code may be worse than honest; simulated ones, of which there are many, what honest is."""
    generator = np.random.default_rng(1)
    worlds = generator.random(2_000) < 0.5
    weak, strong = (auditing.Rehearsal(generator.normal(size=2_000) + gap * worlds, worlds) for gap in (0.1, 2.0))
    alone = [rehearsal.best_prospect(1_000, 1e-3, 1e-6) for rehearsal in (weak, strong)]
    assert alone[0].epsilon < 0.5 < alone[1].epsilon
    canary: Any = None
    for real, simulated in ((weak, strong), (strong, weak)):
        lesson = auditing._Lesson(canary, [], real, simulated)
        assert lesson.prospect(1_000, 1e-3, 1e-6) == alone[1]
        # The threshold is that of real rounds in any case.
        found = lesson.attacker(1_000, 1e-3, 1e-6)
        assert np.mean(found.sign * real.scores > found.threshold) == pytest.approx(alone[1].share, abs=2e-3)
