"""What the audit computes of fixed data, as it was: statistics of every check, laws, attacks and vectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol, guarantee
from cpsgd.audit import all_cases, auditing, bound, checks, exact_checks, one_run, playing, surveys
from cpsgd.audit.auditing import Claim
from cpsgd.audit.cases import Case
from cpsgd.audit.checks import Played
from cpsgd.audit.sum_law import LikelihoodRatio, SumLaw
from cpsgd.codec import pipeline
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Binomial, Coins, RoundedGaussian, SampledCoins, Skellam
from cpsgd.neighbours import Adjacency
from cpsgd.randomness import Keystream
from tests import known_values as known

DIM = 5
PROTOCOL = Protocol(clients=6, dim=DIM, clip_norm=1.0, mechanism=Coins(coins=3, theta=0.3, coordinate_range=0.8))
POINTS = np.array([0.0, 0.3, 0.5, 0.9, 0.9])
OTHER = Protocol(
    clients=6, dim=DIM, clip_norm=1.0, mechanism=Skellam(levels=3, variance=2.0, coordinate_range=0.8, noise_limit=40)
)
LAWS = [
    SumLaw(PROTOCOL, [(POINTS, 6)]),
    SumLaw(PROTOCOL, [(POINTS, 1), (np.full(DIM, 0.5), 5)]),
    SumLaw(OTHER, [(np.full(DIM, 0.2), 2)]),
]


def faultless(sums: np.ndarray) -> np.ndarray:
    return sums


def shifted(sums: np.ndarray) -> np.ndarray:
    return sums + np.array([0, 3, 0, 0, 0])


def all_shifted(sums: np.ndarray) -> np.ndarray:
    return sums + 1


def even(sums: np.ndarray) -> np.ndarray:
    return sums // 2 * 2


def narrow(sums: np.ndarray) -> np.ndarray:
    middle = sums.mean(axis=0).round().astype(int)
    return middle + (sums - middle) // 2


def repeated(sums: np.ndarray) -> np.ndarray:
    return np.concatenate([sums[: len(sums) // 2]] * 2)


def alike(sums: np.ndarray) -> np.ndarray:
    return sums[:, :1] + 0 * sums


def wide(sums: np.ndarray) -> np.ndarray:
    middle = sums.mean(axis=0).round().astype(int)
    return middle + 3 * (sums - middle)


def outwards(sums: np.ndarray) -> np.ndarray:
    return sums + np.sign(sums.mean(axis=0) - sums.mean()).astype(int)


FAULTS = [outwards, faultless, shifted, all_shifted, even, narrow, repeated, alike, wide]


def played(fault: Any, slack: float, laws: Sequence[SumLaw] = LAWS) -> tuple[list[Played], list[np.ndarray]]:
    generator, batches, start = np.random.default_rng(5), [], 0
    for law, rounds in zip(laws, (40, 24, 30), strict=False):
        sums = fault(law.sample(rounds, generator))
        batches.append(Played("test", law, slack, sums + 0.01, start + 2 * np.arange(rounds)))
        start = 1 - start
    return batches, [each.law.uniform(each.sums, generator) for each in batches]


@pytest.mark.parametrize("slack", [0.0, 1e-3])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_known_statistics(fault: Any, slack: float) -> None:
    batches, uniforms = played(fault, slack)
    ordered = checks.in_order(batches[:2], uniforms[:2])
    found = [
        *checks.of_law(batches, uniforms, 1e-6),
        *(checks.quiet(ordered, 1e-6), checks.coordinates(ordered, 1e-6), checks.rounds(ordered, 1e-6)),
        *(checks.repeats(batches, 1e-6), exact_checks.variance(batches, 1e-6)),
    ]
    values: dict[str, Any] = {f"{fault.__name__} {slack} {each.name}": each.statistic for each in found}
    values[f"{fault.__name__} {slack} passed"] = [each.passed for each in found]
    values[f"{fault.__name__} {slack} limits"] = [each.limit for each in found]
    for number, batch in enumerate(batches):
        # Alone, so that no other one is worse.
        one, numbers = [batch], [uniforms[number]]
        values[f"{fault.__name__} {slack} alone {number}"] = [
            each.statistic for each in (*checks.of_law(one, numbers, 1e-3), exact_checks.variance(one, 1e-3))
        ]
        group = checks._Group.of(batch)
        values[f"{fault.__name__} {slack} matches {number}"] = [group.matches(digit) for digit in range(3)]
    known.check("audit/checks", values)


def test_what_a_check_allows_itself() -> None:
    assert [checks.Check("", "", statistic, 1.0).passed for statistic in (0.9, 1.0, 1.1)] == [True, True, False]
    ends = np.array([[np.nan, np.inf, -np.inf, 1e300, 0.4]])
    assert Played("", LAWS[0], 0.0, ends, np.arange(1)).sums.tolist() == [[2**52, 2**52, -(2**52), 2**52, 0]]
    # No distribution function moves by more than 1, however little noise there is.
    certain = Protocol(clients=1, dim=1, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.49, coordinate_range=1.0))
    law = SumLaw(certain, [(np.array([1.0]), 1)])
    assert law.narrowing * law.mass.max() > 1.5
    assert Played("", law, 0.125, np.zeros((1, 1)), np.arange(1)).blur == 0.125
    lattice, halves = (Played("", LAWS[0], 0.0, np.full((2, DIM), gap), np.arange(2)) for gap in (1.0, 0.3))
    assert [checks.integers(pair).statistic for pair in ([lattice, halves], [halves, lattice])] == [0.3, 0.3]
    alone = checks.coordinates(np.full((9, 1), 0.3), 1e-6)
    assert (alone.statistic, alone.limit) == (0.0, None)


def test_known_correlations() -> None:
    walk = np.random.default_rng(7).random(61)
    for later in (1, 2, 7, 59):
        # Each number is half of another one: correlated at this distance alone.
        numbers = (0.5 * walk + 0.5 * np.roll(walk, later))[:60].reshape(20, 3)
        found = [checks.rounds(numbers, 1e-6).statistic, checks.coordinates(numbers, 1e-6).statistic]
        known.check("audit/checks", {f"correlated {later}": [*found, checks.quiet(numbers, 1e-6).statistic]})


def test_known_laws() -> None:
    values: dict[str, Any] = {}
    for number, law in enumerate(LAWS):
        values[f"law {number}"] = [*law.first, *law.mean, *law.variance, law.largest, law.narrowing]
        values[f"masses {number}"] = law.mass
        values[f"pull {number}"] = [*law.outward, *law.pull]
        values[f"coincidence {number}"] = [law.coincidence(2), law.coincidence(3)]
        values[f"remainders {number}"] = np.hstack([law.remainders(2), law.remainders(3)])
        values[f"tails {number}"] = law.tail_ends(checks._TAILS[:6])
        sums = law.sample(9, np.random.default_rng(1))
        values[f"probability {number}"] = law.probability(sums)
        values[f"uniform {number}"] = law.uniform(np.concatenate([sums, sums + 9, sums - 9]), np.random.default_rng(2))
        for other in LAWS:
            values[f"ratio {number} {other.count}"] = LikelihoodRatio(law, other).score(
                np.concatenate([sums, sums * 9])
            )
    for delta in (0.0, 1e-3, 0.1, 0.6):
        values[f"pair {delta}"] = [exact_checks.pair_epsilon(LAWS[0], LAWS[1], delta)]
    known.check("audit/sum_law", values, rel=1e-8)


def test_known_bounds_of_attacks() -> None:
    values: dict[str, Any] = {}
    for right, wrong in ((900, 100), (30, 0), (3, 3), (0, 7), (400, 390)):
        for delta in (1e-9, 1e-2, 0.3):
            values[f"bound {right} {wrong} {delta}"] = bound.epsilon_lower_bound(right, wrong, 10_000, delta, 0.05)
    generator = np.random.default_rng(3)
    worlds = generator.random(500) < 0.5
    for sign in (1.0, -1.0):
        scores = generator.normal(size=500) + sign * 1.5 * worlds
        rehearsal = bound.Rehearsal(scores, worlds)
        for rounds in (100, 500, 100_000):
            best = rehearsal.best_prospect(rounds, 1e-3, 1e-6)
            values[f"prospect {sign} {rounds}"] = [best.epsilon, best.sign, best.share]
        values[f"answers {sign}"] = np.array(rehearsal._answers)
        attacker = bound.Attacker.answering(scores, 1, 0.2)
        values[f"attacker {sign}"] = [attacker.threshold, *attacker.counts(scores, worlds)]
        values[f"proved {sign}"] = attacker.lower_bound(scores, worlds, 1e-3, 0.05)
        values[f"rates {sign}"] = auditing._error_rates(scores, worlds)
        for count in (8, 50, 500):
            report = one_run.audit_scores(scores[:count], worlds[:count], claimed=1.0, delta=1e-6)
            values[f"one run {sign} {count}"] = [report.epsilon, report.canaries, report.guesses, report.right]
    for canaries, guesses, right in ((1000, 100, 95), (8, 8, 8), (100, 100, 51), (5000, 400, 0), (10**6, 4000, 3000)):
        for delta in (0.0, 1e-6, 1e-3):
            values[f"p {canaries} {right} {delta}"] = [
                *(one_run.p_value(canaries, guesses, right, epsilon, delta) for epsilon in (0.0, 1.0, 4.0) if right),
                one_run.lower_bound(canaries, guesses, right, delta, 0.05),
            ]
    known.check("audit/bound", values, rel=1e-8)


MECHANISMS = [
    Binomial(levels=4, trials=14, coordinate_range=0.5),
    Skellam(levels=33, variance=5.0, coordinate_range=0.5),
    SampledCoins(rate=0.3, theta=0.2, coordinate_range=0.5),
    RoundedGaussian(noise_deviation=1.5, step=0.25, window=45, coordinate_range=0.5),
]


@pytest.mark.parametrize("mechanism", MECHANISMS, ids=lambda mechanism: mechanism.name)
@pytest.mark.parametrize("rotate", [True, False])
def test_known_vectors(mechanism: Any, rotate: bool) -> None:
    values: dict[str, Any] = {}
    name = f"{mechanism.name} {rotate}"
    stated: list[dict[str, Any]] = [{}, {"replace_one_distance": 1.3, "distance_reason": "made so"}]
    if not rotate:
        stated.append({"replace_one_l1_distance": 1.6, "distance_reason": "made so"})
    for number, more in enumerate(stated):
        protocol = Protocol(clients=6, dim=13, clip_norm=1.0, mechanism=mechanism, rotate=rotate, **more)
        lattice = playing.RoundLattice(protocol, 2)
        for adjacency in Adjacency:
            for canary in playing.canaries_of(lattice, adjacency):
                values[f"{name} {number} {adjacency} {canary.name}"] = [*canary.zero[:5], *canary.one[:5]]
        if number:
            continue
        values |= {f"{name} {key}": vector for key, vector in playing.peculiar(lattice).items()}
        values[f"{name} too long"] = playing.too_long(lattice)
        values[f"{name} rounded"] = playing.rounded(lattice, 0.11)
        values[f"{name} numbers"] = [lattice.step, lattice.middle(1), lattice.middle(5), lattice.slack(5)]
        for key, vector in playing.peculiar(lattice).items():
            values[f"{name} points {key}"] = lattice.points(vector)
        values[f"{name} sums"] = lattice.sums(np.linspace(-1.0, 1.0, 13, dtype=np.float32)[None], 4)
    known.check("audit/playing", values, rel=1e-7, absolute=1e-12)


class Honest:
    """The product's two halves with keystreams that are the same in every run."""

    def __init__(self, protocol: Protocol) -> None:
        self.protocol, self.sent = protocol, 0

    def encode(self, vector: Any, round: int) -> Any:
        self.sent += 1
        return pipeline.integers(self.protocol, vector, round, Keystream(self.sent.to_bytes(16, "little")))

    def start(self, _: Protocol, round: int) -> Any:
        messages: list[Any] = []

        def mean() -> Any:
            return self.protocol.decode_sum(np.sum(messages, axis=0, dtype=np.uint64), len(messages), round)

        return SimpleNamespace(add=messages.append, mean=mean)


QUIET = Protocol(clients=3, dim=4, clip_norm=1.0, mechanism=Binomial(levels=5, trials=256, coordinate_range=0.7))


def test_known_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "_DELTAS", (0.003, 0.3))
    monkeypatch.setattr(auditing, "_MAX_SIMULATED_NUMBERS", 4000)
    code, done = Honest(QUIET), list[int]()
    report = auditing.audit(
        QUIET,
        1e-2,
        rounds=1003,
        surviving=2,
        round=5,
        encode=code.encode,
        start=code.start,
        seed=3,
        progress=done.append,
    )
    values = {
        "claims": [number for claim in report.claims for number in (claim.delta, claim.claimed, claim.found)],
        "proved": [report.lower_bound, report.confidence, report.false_alarm],
        "promises": [promise for _, promise in report.promises],
        "rounds": [report.rounds, report.attacked_rounds, report.surviving, code.sent, sum(done), len(done)],
        "rates": report.error_rates,
        "checks": [each.statistic for each in report.checks],
        "misses": report.claimed_misses(np.linspace(0.0, 1.0, 12)),
        "canary": len(report.canary),
    }
    known.check("audit/auditing", values)
    assert report.passed
    failed = replace(report, checks=(replace(report.checks[0], statistic=1.0), *report.checks[1:]))
    assert not failed.passed


def test_the_canary_that_promises_most_is_attacked(monkeypatch: pytest.MonkeyPatch) -> None:
    explore, names = auditing._explore, list[str]()
    worlds = np.arange(2_000) % 2 == 0

    def explored(player: Any, canary: Any, count: int, rounds: int) -> Any:
        names.append(canary.name)
        told = bound.Rehearsal(np.where(worlds, 1.0, 0.0), worlds)
        lesson = explore(player, canary, count, rounds)
        return replace(lesson, simulated=told) if len(names) == 2 else lesson

    monkeypatch.setattr(auditing, "_DELTAS", ())
    monkeypatch.setattr(auditing, "_MAX_SIMULATED_NUMBERS", 4000)
    monkeypatch.setattr(auditing, "_explore", explored)
    code = Honest(QUIET)
    report = auditing.audit(QUIET, 1e-2, rounds=1000, surviving=1, encode=code.encode, start=code.start, seed=3)
    assert len(names) > 2
    assert report.canary == names[1]
    assert report.passed


def test_known_survey() -> None:
    case = Case("counted coins", QUIET)
    code = Honest(QUIET)
    law = surveys.law_checked(
        case, rounds=80, surviving=2, share=1e-6, made=lambda _: (code.encode, code.start), seed=4
    )
    values: dict[str, Any] = {f"law {each.name}": [each.statistic, each.limit] for each in law.checks}
    values["rounds"] = [law.rounds, *law.numbers, code.sent]
    for each in all_cases():
        values[f"digest {each.name} {each.claimed}"] = int(surveys.digest_of(each)[:12], 16)
    known.check("audit/surveys", values)


def test_what_an_audit_says_of_claims(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auditing, "_DELTAS", (0.003, 0.1, 0.3))
    claims = [Claim(1e-3, 2.0, found) for found in (0.0, 1.5, 0.5)]
    assert auditing._excess(claims) == -0.5
    assert auditing._excess(claims[:1]) == -2.0
    assert auditing._excess([replace(claims[0], claimed=3.0), claims[0]]) == -3.0
    assert auditing._excess([Claim(1e-3, 2.0, 0.7)]) == pytest.approx(-1.3)
    claimed = guarantee(QUIET, 0.1, surviving=2)
    stated = auditing._claims(QUIET, claimed, 2)
    assert [delta for delta, _ in stated] == [0.1, 0.3]
    assert stated[0][1] >= stated[1][1]
    # What is proved at a smaller δ holds at a larger one.
    little = replace(claimed, claim=replace(claimed.claim, delta=0.05, epsilon=1e-3))
    assert max(epsilon for _, epsilon in auditing._claims(QUIET, little, 2)) == 1e-3


def test_sizes_that_are_audited() -> None:
    def made(dim: int, clients: int = 2, levels: int = 5) -> Protocol:
        mechanism = Binomial(levels=levels, trials=256, coordinate_range=0.7)
        return Protocol(clients=clients, dim=dim, clip_norm=1.0, mechanism=mechanism)

    auditing.check_size(made(2048), 2, 1 << 16)
    for dim, rounds, said in ((2049, 1, "at most 2048"), (2048, (1 << 16) + 1, "rounds times dim")):
        with pytest.raises(ParameterError, match=said):
            auditing.check_size(made(dim), 2, rounds)
    with pytest.raises(ParameterError, match="floats"):
        auditing.check_size(Protocol.gaussian(clients=2, dim=2, clip_norm=1.0, sigma=1.0), 2, 1)
    # n (k - 1)/2 + 8 √(n (m/4 + 1/4)) is at most 2^17.
    most = max(n for n in range(50_000, 60_000) if 2.0 * n + 8.0 * math.sqrt(n * 64.25) <= 2.0**17)
    auditing.check_size(made(2, most), most, 1)
    with pytest.raises(ParameterError, match="released mean"):
        auditing.check_size(made(2, most), most + 1, 1)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"rounds": 999}, "rounds"),
        ({"few": 0}, "few"),
        ({"few": 4}, "few"),
        ({"round": -1}, "round"),
        ({"surviving": 0}, "surviving"),
    ],
)
def test_what_an_audit_refuses(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        auditing.audit(QUIET, 1e-2, **{"rounds": 1000, **change})


def test_the_least_that_an_audit_takes() -> None:
    assert auditing.FALSE_ALARM == 1e-6
    # One message in round 0 will do: what is refused is what comes after.
    with pytest.raises(ParameterError, match="adjacency"):
        auditing.audit(QUIET, 1e-2, rounds=1000, surviving=1, few=1, round=0, adjacency="nobody")


def test_what_proves_nothing() -> None:
    assert bound.epsilon_lower_bound(0.0, 0.0, 100, 0.0, 1e-6) == 0.0
    assert bound.epsilon_lower_bound(0.001, 10.0, 100, 0.0, 1e-6) == 0.0
    assert bound.epsilon_lower_bound(1e-4, 10.0, 100, 0.0, 1e-6) == 0.0
    assert bound.epsilon_lower_bound(1.0, 0.0, 100, 0.0, 1e-6) == 0.0


def test_vectors_in_the_middle_push_nowhere() -> None:
    """Coins at even odds: no weights show whether such vectors are too long, and nothing is divided by them."""
    law = SumLaw(PROTOCOL, [(np.full(DIM, 0.5), 6)])
    assert np.all(law.pull == 0.0)
    for more, passed in ((0, True), (1, False)):
        batch = Played("", law, 0.0, law.sample(400, np.random.default_rng(2)) + more, np.arange(400))
        check = checks.unbiased([batch], 1e-6)
        assert (math.isfinite(check.statistic), check.passed) == (True, passed)
