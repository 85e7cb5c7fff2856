from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import ConditionError, CpsgdError, ParameterError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.coins import Coins
from cpsgd.mechanisms.law import Law, Steps
from cpsgd.mechanisms.skellam import SkellamLaw
from cpsgd.neighbours import Participation
from cpsgd.privacy import gaussian
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs import certified_smooth as products
from cpsgd.privacy.proofs.argument import Proved
from cpsgd.privacy.proofs.certified_gaussian import GaussianCertificate
from cpsgd.privacy.proofs.certified_smooth import smoothed_certificate, smoothed_epsilon, smoothed_sensitivity
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from tests import known_values as known

from . import product_checks as checks
from . import product_oracle as oracle

# ---------------------------------------------------------------------- the truth, by enumeration


def test_many_coins_and_many_rounds_of_two_clients() -> None:
    assert checks.wrong_repetitions() == []


@pytest.mark.parametrize("share", [0, *(pytest.param(share, marks=pytest.mark.thorough) for share in range(1, 4))])
def test_products_by_enumeration(share: int) -> None:
    assert checks.wrong_products(checks.few_products()[share::4]) == []


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 12), *(pytest.param(seed, 75, marks=pytest.mark.thorough) for seed in range(4))]
)
def test_random_products_by_enumeration(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Also where there is next to nothing to smooth, which is refused otherwise to save time.
    monkeypatch.setattr(products, "_FEWEST", 0.0)
    wrong, accepted = checks.wrong_random_products(checks.random_products(count, seed))
    assert wrong == []
    assert accepted > count * 40 / 75


def test_tails_are_charged_for_every_coordinate_copy_and_round() -> None:
    assert checks.wrong_tails() == []


def test_a_second_round_that_looks_at_the_first() -> None:
    # In the second round the distance is spent on one coordinate or on two, whichever the first outcome suggests.
    law, reach = checks.coins(0.3, 12), 2.0
    one = oracle.step_pair(law.low, law.high, checks.sides(0, 11), -1.0, 1.0)
    few = oracle.step_pair(law.low, law.high, checks.sides(11, 11), 1.0, -0.6)
    rest = oracle.step_pair(law.low, law.high, checks.sides(5, 11), -1.0, 0.2)
    none = oracle.step_pair(law.low, law.high, checks.sides(5, 11), 0.0, 0.0)
    found = smoothed_certificate(law, dim=2, sensitivity=reach, reach=reach, tail=1e-9, rounds=2)
    assert found.mu <= found.unit_mu * reach <= found.mu * (1.0 + 1e-14)
    for gamma in np.exp(np.linspace(-5.0, 5.0, 21)):
        for swap in (False, True):
            exact = 0.0
            for i, (a, b) in enumerate(zip(*(one[::-1] if swap else one), strict=True)):
                second = [one, none] if i % 2 else [few, rest]
                second = [pair[::-1] for pair in second] if swap else second
                exact += a * float(oracle.divergences(second, np.array([gamma * b / a]))[0])
            allowed = float(oracle.gaussian_divergences(found.mu, np.array([gamma]))[0])
            assert exact <= allowed + found.tail_mass * min(1.0, gamma) + 1e-13


@pytest.mark.parametrize("rate", [0.9, 0.3, 0.01])
def test_poisson_sampling_of_coins(rate: float) -> None:
    # Zero-out: with the client's zero vector in both laws, its own in one of them with the probability `rate`.
    law, t = checks.coins(0.4, 15), 1.0
    pairs = [oracle.step_pair(law.low, law.high, checks.sides(k, 14), t, 0.0) for k in (14, 0)]
    found = smoothed_certificate(law, dim=2, sensitivity=math.sqrt(2.0) * (1 + 1e-12), reach=1.0, tail=1e-9)
    first = np.outer(pairs[0][0], pairs[1][0]).ravel()
    zero = np.outer(pairs[0][1], pairs[1][1]).ravel()
    sampled = (1.0 - rate) * zero + rate * first
    grid = np.linspace(-40.0, 40.0, 400_001)
    width = grid[1] - grid[0]
    density = np.exp(-0.5 * grid**2) / math.sqrt(2.0 * math.pi) * width
    moved = (1.0 - rate) * density + rate * density * np.exp(found.mu * grid - 0.5 * found.mu**2)
    for gamma in np.exp(np.linspace(-1.0, 1.0, 41) * found.mu * 4.0):
        for exact, allowed in (
            (np.maximum(sampled - gamma * zero, 0.0).sum(), np.maximum(moved - gamma * density, 0.0).sum()),
            (np.maximum(zero - gamma * sampled, 0.0).sum(), np.maximum(density - gamma * moved, 0.0).sum()),
        ):
            assert exact <= allowed + rate * found.tail_mass + 1e-9


# ---------------------------------------------------------------------- figures

LARGE = {"dim": 65_536, "sensitivity": 19.8177, "reach": 1.0, "delta": 1e-9}


@pytest.mark.parametrize(("coins", "most"), [(1, 2.29), (6, 0.890), (16, 0.533)])
def test_figures_of_the_paper_setting(coins: int, most: float) -> None:
    law = BinomialLaw(10_000 * coins, 0.5)
    epsilon, certificate = smoothed_epsilon(law, **LARGE)
    assert epsilon <= most
    # No certificate of this kind can be better than a Gaussian of the same variance.
    assert epsilon >= gaussian.gdp_epsilon(LARGE["sensitivity"] / math.sqrt(law.variance), LARGE["delta"])
    assert 0.0 < certificate.tail_mass < 0.5 * LARGE["delta"]


def test_never_below_the_exact_composition_of_one_direction() -> None:
    # Exact composition of 392 coordinates at distance 1, one order, gives 2.273 as a lower bound.
    assert smoothed_epsilon(BinomialLaw(10_000, 0.5), **LARGE)[0] >= 2.273


def test_many_rounds_of_few_coins() -> None:
    epsilon, _ = smoothed_epsilon(BinomialLaw(64, 0.5), dim=1, sensitivity=2.0, reach=2.0, delta=1e-5, rounds=40)
    # The truth is 17.94.
    assert 17.94 <= epsilon <= 20.5


@pytest.mark.parametrize(
    ("copies", "reach", "theta", "epsilon"), [(1, 3.3, 0.1096, 1.987), (1, 3.6, 0.1196, 1.996), (3, 3.6, 0.0704, 1.996)]
)
def test_coins(copies: int, reach: float, theta: float, epsilon: float) -> None:
    law = checks.coins(math.floor(theta * 65_536) / 65_536, 10_000, copies)
    found, certificate = smoothed_epsilon(law, dim=65_536, sensitivity=2.0 * 256.0 / reach, reach=2.0, delta=1e-9)
    assert found == pytest.approx(epsilon, rel=2e-3)
    # To first order, from the variance that is there whatever the others hold.
    least = 2.0 * 256.0 / reach * law.high[1] - 2.0 * 256.0 / reach * 0.5
    assert certificate.mu >= least * math.sqrt(copies / (10_000 * 0.25))


def test_fewer_bits_than_coordinates() -> None:
    found, _ = smoothed_epsilon(
        checks.sampled_coins(0.05, 0.5, 10_000), dim=65_536, sensitivity=2.0 * 256.0 / 4.0, reach=2.0, delta=1e-9
    )
    assert 1.5 < found < 1.8


# ---------------------------------------------------------------------- what must rise and what must not


def test_rounds_up_to_a_power_of_two_share_their_rates() -> None:
    law = checks.coins(0.1, 500)
    found = [
        smoothed_certificate(law, dim=400, sensitivity=10.0, reach=2.0, tail=1e-8, rounds=rounds)
        for rounds in (5, 6, 8)
    ]
    assert found[0].mu < found[1].mu < found[2].mu
    assert found[0].tail_mass < found[1].tail_mass < found[2].tail_mass
    # A round is a round: eight of them cost √8 times one, or less, as the start is paid for once.
    single = smoothed_certificate(law, dim=400, sensitivity=10.0, reach=2.0, tail=1e-9)
    assert found[-1].mu <= single.mu * math.sqrt(8.0) * 1.001


def test_copies_are_coordinates() -> None:
    four = smoothed_certificate(checks.coins(0.1, 500, 4), dim=100, sensitivity=10.0, reach=2.0, tail=1e-8)
    one = smoothed_certificate(checks.coins(0.1, 500), dim=400, sensitivity=20.0, reach=2.0, tail=1e-8)
    assert four.mu == one.mu
    assert four.tail_mass == one.tail_mass


def test_zero_out_is_half_of_replace_one() -> None:
    law = checks.coins(0.1, 5_000)
    replaced = smoothed_certificate(law, dim=1_000, sensitivity=40.0, reach=2.0, tail=1e-9)
    zeroed = smoothed_certificate(law, dim=1_000, sensitivity=20.0, reach=1.0, tail=1e-9)
    assert 0.5 * replaced.mu * 0.99 <= zeroed.mu <= 0.5 * replaced.mu * 1.005


@pytest.mark.parametrize("make", [lambda n: checks.coins(0.2, n), lambda n: BinomialLaw(n, 0.4)])
def test_more_clients_hide_more(make: Callable[[int], Law | Steps]) -> None:
    found = [
        smoothed_certificate(make(n), dim=50, sensitivity=5.0, reach=1.0, tail=1e-6).mu for n in (100, 150, 400, 1_600)
    ]
    assert found == sorted(found, reverse=True)


def test_the_sensitivity_that_a_mu_allows() -> None:
    law = BinomialLaw(2_000, 0.5)
    for rounds in (1, 3):
        allowed = smoothed_sensitivity(law, dim=500, reach=1.0, mu=0.5, tail=1e-9, rounds=rounds)
        found = smoothed_certificate(law, dim=500, sensitivity=allowed, reach=1.0, tail=1e-9, rounds=rounds)
        assert found.mu == pytest.approx(0.5, rel=1e-3)


# ---------------------------------------------------------------------- the ends of the world

_SIXTEENTH = 2.0**-16


_ENDS = [(0.3, 1), (1e-30, 1), (1e-120, 3), (1e-10, 10**5)]


@pytest.mark.parametrize(
    "law",
    [
        checks.coins(_SIXTEENTH, 2),
        checks.coins(0.5 - _SIXTEENTH, 2),
        checks.coins(0.5 - _SIXTEENTH, 50),
        checks.sampled_coins(2.0 / 3.0, 0.5, 3),
        BinomialLaw(1, 0.5),
        BinomialLaw(1_000, 0.001),
        BinomialLaw(100_000, 0.999),
        SkellamLaw(2, 1e-3, 100),
    ],
    ids=str,
)
@pytest.mark.parametrize(("tail", "rounds"), _ENDS)
def test_right_or_refused(law: Law | Steps, tail: float, rounds: int) -> None:
    check_right_or_refused(law, tail, rounds)


@pytest.mark.parametrize(
    ("tail", "rounds"), [_ENDS[2], *(pytest.param(*_ENDS[i], marks=pytest.mark.thorough) for i in (0, 1, 3))]
)
def test_messages_of_next_to_nothing_are_right_or_refused(tail: float, rounds: int) -> None:
    check_right_or_refused(checks.sampled_coins(_SIXTEENTH, 0.5, 1_000), tail, rounds)


def check_right_or_refused(law: Law | Steps, tail: float, rounds: int) -> None:
    try:
        found = smoothed_certificate(law, dim=1_000, sensitivity=4.0, reach=1.0, tail=tail, rounds=rounds)
    except ConditionError:
        return
    assert math.isfinite(found.mu)
    assert 0.0 < found.tail_mass < 1.01 * tail
    if isinstance(law, Law):
        assert found.mu > 4.0 * math.sqrt(rounds / law.variance) * (1.0 - tail)
    else:
        # The means of two neighbours and the largest standard deviation.
        steps = np.arange(len(law.low))
        apart, variance = float(steps @ (np.array(law.high) - np.array(law.low))), float((steps - 1.0) ** 2 @ law.low)
        assert found.mu > (4.0 * apart / 2.0) * math.sqrt(rounds / (law.clients * variance)) * (1.0 - math.sqrt(tail))


@pytest.mark.parametrize(
    "changes",
    [{"dim": 0}, {"sensitivity": 0.0}, {"sensitivity": math.nan}, {"tail": 0.0}, {"tail": 1e-260}, {"rounds": 0}],
)
def test_parameters_out_of_range(changes: dict[str, float]) -> None:
    with pytest.raises(CpsgdError):
        smoothed_certificate(
            checks.coins(0.1, 50), **{"dim": 10, "sensitivity": 2.0, "reach": 2.0, "tail": 1e-6, "rounds": 1, **changes}
        )


def test_next_to_nothing_to_smooth() -> None:
    with pytest.raises(ConditionError, match="next to nothing to smooth"):
        smoothed_certificate(BinomialLaw(100, 0.5), dim=1, sensitivity=1.0, reach=1.0, tail=1e-6)


# ---------------------------------------------------------------------- searches, where certificates are known

STEPS = Protocol(
    clients=40,
    dim=30,
    clip_norm=1.0,
    mechanism=Coins(coins=2, theta=0.1, coordinate_range=0.3),
)
CLAIM = Claim(1.5, 1e-6)


@dataclass(frozen=True)
class Known:
    """Certificates whose μ is that of a Gaussian, times a factor; refused at scales that are too small."""

    excess: float = 1.01
    refused: float = 0.0
    bend: float = 0.0
    least: float = 0.0

    def install(self, monkeypatch: pytest.MonkeyPatch, asked: list[float]) -> None:
        def certificate(run: Run, tail: float, rounds: int = 1, draft: bool = False) -> GaussianCertificate:
            scale = run.protocol.mechanism.scale
            asked.append(-scale if draft else scale)
            if scale < self.refused:
                raise ConditionError("not smooth")
            ideal = base.distance(run) * math.sqrt(rounds) / products._deviation(run, scale)
            mu = max(self.least, ideal * (self.excess + (0.02 if draft else 0.0) + self.bend * ideal))
            return GaussianCertificate(mu, mu, 0.5 * tail)

        products._drafted.cache_clear()
        monkeypatch.setattr(products, "_certificate", certificate)


@pytest.mark.parametrize(
    "known_as",
    [Known(), Known(1.5), Known(1.01, 2.0), Known(1.003, 0.95), Known(1.0, 0.0, 2.0), Known(0.7)],
    ids=str,
)
def test_known_searches_for_scales(known_as: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, values = products.PROOFS[0], dict[str, object]()
    for name, rounds, draft, wanted in (
        ("one", 1, False, 0.0),
        ("draft", 1, True, 0.0),
        ("several", 7, False, 0.0),
        ("wanted", 1, False, 4.0),
        ("wanted in vain", 7, False, 1.0),
    ):
        run, asked = Run.of(STEPS, rounds=rounds), list[float]()
        known_as.install(monkeypatch, asked)
        allowed = products._Allowed.of(run, CLAIM)
        assert (allowed.rounds, allowed.tail) == (rounds, 0.003e-6)
        assert allowed.mu == gdp_mu(1.5, 1e-6 * (1.0 - 1.01 * 0.003))
        found = proof.scale(run, CLAIM, draft=draft, wanted=wanted)
        values |= {name: found, f"{name}, asked": asked}
        mu = allowed.reached(run, found, draft)[1]
        assert mu <= allowed.mu
        if wanted < found and known_as.refused < 0.9 * found:
            assert mu >= (0.98 if draft else 0.99) * allowed.mu
        values[f"{name}, might"] = proof.might_keep(run, CLAIM)
    known.check("privacy/proofs/certified_smooth", {f"{known_as} {key}": value for key, value in values.items()})


def test_searches_without_an_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for at in (Known(refused=1e9), Known(least=0.36)):
        asked: list[float] = []
        at.install(monkeypatch, asked)
        with pytest.raises(ConditionError, match="not smooth" if at.refused else "No scale of coins was found"):
            products.PROOFS[0].scale(Run.of(STEPS), CLAIM, draft=True)
        known.check("privacy/proofs/certified_smooth", {f"in vain {at}": asked})
        assert products.PROOFS[0].might_keep(Run.of(STEPS), CLAIM) == bool(at.refused)


def test_what_a_sampled_claim_asks_of_certificates() -> None:
    run = Run.of(STEPS, rounds=5, participation="fixed-size:0.1")
    allowed = products._Allowed.of(run, CLAIM)
    assert allowed.rounds == 1
    assert allowed.tail == pytest.approx(0.01 * 1e-6 / 5 / math.nextafter(0.1, 1.0), rel=1e-12, abs=0.0)
    assert allowed.mu == base.sampled_mu(run, CLAIM)


@pytest.mark.parametrize("factor", [0.5, 1.0, 1.7, 40.0])
def test_the_scale_at_which_noise_is_so_many_times_louder(factor: float) -> None:
    run = Run.of(STEPS)
    found = products._quieter(run, 1.3, factor)
    assert products._deviation(run, found) / products._deviation(run, 1.3) == pytest.approx(factor, rel=2e-4)
    known.check("privacy/proofs/certified_smooth", {f"quieter {factor}": found})


@pytest.mark.parametrize("failures", range(7))
def test_budgets_are_doubled_where_there_is_too_little_to_smooth(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, ...]] = []

    def growth(*given: object) -> object:
        asked.append(given)
        if len(asked) <= failures:
            raise ConditionError("next to nothing")
        return asked

    monkeypatch.setattr(products, "_growth", growth)
    law = checks.coins(0.1, 50)
    with contextlib.nullcontext() if failures < 5 else pytest.raises(ConditionError, match="next to nothing"):
        found: Any = products._first_growth(law, 2.0, 1e-9, 3.0, True)
        assert found is asked
    assert asked == [(law, 2.0, 1e-9, 3.0 * 2.0**i, True) for i in range(min(failures, 4) + 1)]


def test_the_first_share_of_tails_that_will_do_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    law, given = checks.coins(0.1, 50), {"dim": 3, "sensitivity": 2.0, "reach": 2.0}
    asked: list[float] = []

    def certificate(law: object, *, tail: float, rounds: int, **more: float) -> GaussianCertificate:
        assert more == given
        asked.append(tail)
        if len(asked) <= failures:
            raise ConditionError(f"failure {len(asked)}")
        return GaussianCertificate(0.3, 0.3, 0.5 * tail)

    monkeypatch.setattr(products, "smoothed_certificate", certificate)
    for failures, share in enumerate(products.SHARES):
        asked.clear()
        epsilon = products.smoothed_epsilon(law, **given, delta=1e-5, rounds=2)[0]
        assert asked == pytest.approx([each * 1e-5 for each in products.SHARES[: failures + 1]])
        assert epsilon == pytest.approx(gdp_epsilon(0.3, 1e-5 * (1.0 - 0.5 * share)), rel=1e-12)
    failures = 3
    asked.clear()
    with pytest.raises(ConditionError, match="failure 3"):
        products.smoothed_epsilon(law, **given, delta=1e-5, rounds=2)


def test_known_products() -> None:
    values: dict[str, object] = {}
    law, coins = BinomialLaw(900, 0.5), checks.coins(0.1, 20, copies=2)
    for name, each, rounds in (("law", law, 3), ("coins", coins, 3)):
        found = smoothed_certificate(each, dim=9, sensitivity=1.7, reach=1.0, tail=1e-5, rounds=rounds, draft=True)
        values[name] = [found.mu, found.unit_mu, found.tail_mass]
    for reach, rounds in ((0.4, 3), (1.0, 3), (3.0, 7)):
        found_most = smoothed_sensitivity(law, dim=50, reach=reach, mu=0.2, tail=1e-6, rounds=rounds, draft=True)
        values[f"sensitivity {reach}"] = found_most
    known.check("privacy/proofs/certified_smooth", values, rel=1e-8)


def test_next_to_nothing_is_less_than_three_coordinates(monkeypatch: pytest.MonkeyPatch) -> None:
    def went_on(*_: object) -> None:
        raise ConditionError("went on")

    monkeypatch.setattr(products, "_families", went_on)
    law = BinomialLaw(900, 0.5)
    given: dict[str, Any] = {"reach": 1.0, "tail": 1e-6, "draft": True}
    for dim, rounds, reason in ((2, 1, "next to nothing"), (3, 1, "went on"), (1, 3, "went on")):
        with pytest.raises(ConditionError, match=reason):
            smoothed_certificate(law, dim=dim, rounds=rounds, sensitivity=2.0, **given)
        with pytest.raises(ConditionError, match=reason):
            smoothed_sensitivity(law, dim=dim, rounds=rounds, mu=0.2, **given)
    # A Gaussian of the same variance must allow three coordinates at their largest distance.
    for share, reason in ((1.001, "went on"), (0.999, "next to nothing")):
        with pytest.raises(ConditionError, match=reason):
            smoothed_sensitivity(law, dim=50, mu=share * math.sqrt(3.0 / law.variance), **given)
    for tail, reason in ((7.99e-250, "for a tail of"), (8.01e-250, "went on")):
        with pytest.raises(ConditionError, match=reason):
            smoothed_certificate(law, dim=4, sensitivity=2.0, reach=1.0, tail=tail, rounds=1)
        with pytest.raises(ConditionError, match=reason):
            smoothed_sensitivity(law, dim=4, mu=0.2, reach=1.0, tail=tail)


def test_a_certificate_says_what_it_has_spent(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies and rounds are coordinates, each with its tail; growth is asked for up to a power of two of rounds."""
    asked: list[tuple[object, ...]] = []

    def first_growth(*given: object) -> object:
        asked.append(given)
        return SimpleNamespace(reached=lambda budget: 0.01 * budget)

    monkeypatch.setattr(products, "_families", lambda *_: [SimpleNamespace(tail=3e-9)])
    monkeypatch.setattr(products, "_first_growth", first_growth)
    for law, copies in ((BinomialLaw(900, 0.5), 1), (checks.coins(0.1, 50, copies=2), 2)):
        found = smoothed_certificate(law, dim=7, sensitivity=1.5, reach=2.0, tail=1e-4, rounds=5)
        each = 1e-4 / (2.0 * 7 * copies * 8)
        assert asked.pop() == (law, 1.5, pytest.approx(each), pytest.approx(1.5**2 * copies * 8), False)
        assert found.mu == pytest.approx(math.sqrt(0.01 * 1.5**2 * copies * 5))
        assert found.unit_mu == pytest.approx(found.mu / 1.5)
        assert found.tail_mass == pytest.approx(7 * copies * 5 * (3e-9 + each), rel=1e-9, abs=0.0)


def test_independent_copies_are_more_coordinates() -> None:
    law = checks.coins(0.1, 60)
    three = smoothed_certificate(replace(law, copies=3), dim=40, sensitivity=2.0, reach=1.0, tail=1e-5, draft=True)
    one = smoothed_certificate(law, dim=120, sensitivity=2.0 * math.sqrt(3.0), reach=1.0, tail=1e-5, draft=True)
    assert (three.mu, three.tail_mass) == (pytest.approx(one.mu, rel=1e-9), pytest.approx(one.tail_mass, rel=1e-12))


@pytest.mark.parametrize("wrong", [{"dim": 0}, {"sensitivity": 0.0}, {"tail": 0.0}, {"tail": 1.0}, {"rounds": 0}])
def test_parameters_out_of_range_are_refused_by_name(wrong: dict[str, Any]) -> None:
    given: dict[str, Any] = {"dim": 9, "sensitivity": 1.0, "reach": 1.0, "tail": 1e-6, **wrong}
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        smoothed_certificate(BinomialLaw(400, 0.5), **given)


def test_no_certificate_is_below_a_gaussian_of_equal_variance(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(Protocol.binomial(clients=60, dim=8, clip_norm=1.0, levels=9, trials=700), rounds=5)
    law = base.law_of(run)
    assert isinstance(law, BinomialLaw)
    mu, asked = base.sensitivity(run) * math.sqrt(5 / law.variance), list[float]()

    def with_sampler(run: Run, delta: float, prove: object, *, least: float) -> tuple[float, float]:
        asked.append(least)
        return 1.0, 0.0

    monkeypatch.setattr(base, "with_sampler", with_sampler)
    floor = gdp_epsilon(mu, 1e-6) * 1.002
    with pytest.raises(ConditionError, match="could not come below"):
        products.PROOFS[0].epsilon(run, 1e-6, below=floor * (1.0 - 1e-9))
    assert products.PROOFS[0].epsilon(run, 1e-6, below=floor * (1.0 + 1e-9)).epsilon == 1.0
    assert asked == [pytest.approx(gdp_epsilon(0.999 * mu, 1e-6), rel=1e-9)]


def test_tails_of_rounds_that_a_client_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[float, int]] = []

    def certificate(run: Run, tail: float, rounds: int = 1, draft: bool = False) -> GaussianCertificate:
        asked.append((tail, rounds))
        return GaussianCertificate(0.5, 0.1, 0.3 * tail)

    monkeypatch.setattr(products, "_certificate", certificate)
    sampled, whole = Run.of(STEPS, rounds=6, participation="fixed-size:0.01"), Run.of(STEPS, rounds=6)
    for cost, run, tail, found, rounds, each in (
        (products.PROOFS[0].cost, sampled, 1e-6, 1e-4, 1, 0.5),
        (products.PROOFS[0].cost, sampled, 0.9, 0.5, 1, 0.5),
        (products.PROOFS[0].joint_cost, whole, 1e-6, 8e-6, 6, 0.5 / math.sqrt(6.0)),
        (products.PROOFS[0].joint_cost, whole, 0.9, 0.5, 6, 0.5 / math.sqrt(6.0)),
    ):
        spent = cost(run, tail)
        assert asked.pop() == (pytest.approx(found, rel=1e-12, abs=0.0), rounds)
        assert (spent.mu, spent.count) == (pytest.approx(each, rel=1e-12), rounds)
        counted = 0.01 if run is sampled else 1.0 / 6.0
        assert spent.tail_mass == pytest.approx(0.3 * found * counted, rel=1e-12, abs=0.0)


def test_which_rounds_are_sampled_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, noisy = products.PROOFS[0], Protocol.binomial(clients=60, dim=8, clip_norm=1.0, levels=9, trials=700)
    for way in ("_sampled_epsilon", "_joint_epsilon"):
        monkeypatch.setattr(products.Smoothed, way, lambda *_, way=way: way)
    for protocol, participation, way in (
        (STEPS, "every", "_joint_epsilon"),
        (STEPS, "once", "_joint_epsilon"),
        (STEPS, "fixed-size:0.1", "_sampled_epsilon"),
        (noisy, "fixed-size:0.1", "_joint_epsilon"),
    ):
        run = Run.of(protocol, rounds=3, participation=participation)
        assert proof.epsilon(run, 1e-6) == way  # type: ignore[comparison-overlap]
    with pytest.raises(ConditionError, match="knows of no sampling"):
        proof.scale(Run.of(noisy, rounds=3, participation="fixed-size:0.1"), CLAIM)


@pytest.mark.parametrize(("rate", "shares"), [(0.1, [base.SAMPLED_TAIL_SHARE]), (1.0, base.TAIL_SHARES)])
def test_shares_for_tails_of_sampled_rounds(rate: float, shares: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    def composed(run: Run, delta: float, proof: object, shares: object) -> tuple[float, float]:
        asked.append(shares)
        return 1.5, 1e-9

    def joint(self: object, run: Run, delta: float, below: float) -> Proved:
        assert below == 1.5
        if len(asked) > 1:
            raise ConditionError("not below")
        return Proved(1.4, 0.0, "together")

    monkeypatch.setattr(base, "composed", composed)
    monkeypatch.setattr(products.Smoothed, "_joint_epsilon", joint)
    run = Run.of(STEPS, rounds=3, participation=Participation("fixed-size", rate))
    assert [products.PROOFS[0]._sampled_epsilon(run, 1e-6).epsilon for _ in range(2)] == [1.4, 1.5]
    assert asked == [shares, shares]


def test_scales_next_to_the_ideal_one_are_not_improved(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(Protocol.binomial(clients=60, dim=8, clip_norm=1.0, levels=9, trials=700), rounds=5)
    asked: list[dict[str, Any]] = []

    def sensitivity(law: object, **given: Any) -> float:
        asked.append(given)
        if len(asked) < 3:
            raise ConditionError("went on")
        return 0.25

    monkeypatch.setattr(products, "smoothed_sensitivity", sensitivity)
    least = base.ideal_scale(run, CLAIM) / 0.998
    with pytest.raises(ConditionError, match="as small as can be"):
        products.PROOFS[0].scale(run, CLAIM, known=least * (1.0 - 1e-9))
    assert asked == []
    assert products.PROOFS[0].scale(run, CLAIM, known=least * (1.0 + 1e-9)) == base.scale_for(run, 0.25)
    for given, share in zip(asked, products.SHARES, strict=True):
        assert given["tail"] == pytest.approx(share * 1e-6, rel=1e-12, abs=0.0)
        assert given["mu"] == gdp_mu(1.5, 1e-6 * (1.0 - 1.01 * share))
        assert (given["rounds"], given["dim"], given["draft"]) == (5, 8, False)
    asked.clear()
    monkeypatch.setattr(products, "SHARES", products.SHARES[:2])
    with pytest.raises(ConditionError, match="went on"):
        products.PROOFS[0].scale(run, CLAIM)
