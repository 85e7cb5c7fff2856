from __future__ import annotations

import dataclasses
import math
import re
from fractions import Fraction
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy.special import ndtri
from scipy.stats import binom, norm

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import Window
from cpsgd.privacy import (
    certified_epsilon,
    gaussian_certificate,
    gdp_delta,
    gdp_epsilon,
    renyi_certificate,
)
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs import certified_gaussian as certificate
from cpsgd.privacy.proofs.certified_gaussian import central_range
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from tests import known_values as known

from . import checks
from .oracle import Exact, shift_epsilon

# μ₁ √(N/4) at p = 1/2 with a total tail of 1e-14 over d = 65,536.
REFERENCE = [(10_000, 1.0994), (60_000, 1.0383), (160_000, 1.0231), (640_000, 1.0114), (10_240_000, 1.0028)]

# k, m and ε of the certificate with a tail of 1e-14, at n = 10^4, d = 65,536, δ = 1e-9 and the paper's range.
TABLE = [(2, 1, 2.512), (2, 6, 0.920), (2, 16, 0.543), (4, 64, 0.819), (8, 256, 0.956), (16, 1024, 1.025)]


def unit_mu_on(trials: int, p: float, low: int, high: int, nats: float = 80.0) -> float:
    law = BinomialLaw(trials, p).window(nats, margin=10)
    return certificate._unit_mu(law, certificate._quotients(law), low, high)


@pytest.mark.parametrize(("trials", "expected"), REFERENCE)
def test_reference_values(trials: int, expected: float) -> None:
    found = gaussian_certificate(BinomialLaw(trials, 0.5), dim=65_536, sensitivity=1.0, levels=2, tail=1e-14)
    deviation = math.sqrt(trials) / 2
    # The reference takes a range wider by two at both ends than the proof needs; on that range the digits agree, on
    # ours μ₁ is a little smaller.
    law = BinomialLaw(trials, 0.5).window(80.0)
    low, high, _ = certificate.central_range(law, 1e-14 / 65_536)
    assert unit_mu_on(trials, 0.5, low - 3, high + 3) * deviation == pytest.approx(expected, abs=5e-5)
    assert expected - 6e-4 < found.unit_mu * deviation < expected + 5e-5
    assert 0.0 < found.tail_mass <= 1e-14
    assert found.noise_multiplier * found.mu <= 1.0


@pytest.mark.parametrize(("levels", "trials", "expected"), TABLE)
def test_table(levels: int, trials: int, expected: float) -> None:
    protocol = Protocol.rotated_binomial(
        clients=10_000, dim=65_536, clip_norm=1.0, levels=levels, trials=trials, delta=1e-9
    )
    law = BinomialLaw(10_000 * trials, 0.5)
    sensitivity = checks.sensitivity(protocol)
    fixed = gaussian_certificate(law, dim=65_536, levels=levels, sensitivity=sensitivity, tail=1e-14)
    # 2.512 was found on the wider range.
    assert gdp_epsilon(fixed.mu, 1e-9 - fixed.tail_mass) == pytest.approx(expected, abs=1e-3)
    best, chosen = certified_epsilon(law, dim=65_536, levels=levels, sensitivity=sensitivity, delta=1e-9)
    assert gdp_epsilon(sensitivity / math.sqrt(2_500 * trials), 1e-9) < best <= gdp_epsilon(fixed.mu, 1e-9 - 1e-14)
    assert gdp_delta(chosen.mu, best) + chosen.tail_mass <= 1e-9


@pytest.mark.parametrize(
    ("trials", "p", "low", "high"),
    [(60, 0.5, 10, 50), (400, 0.5, 120, 280), (400, 0.1, 4, 90), (900, 0.83, 650, 820), (2_000, 0.5, 830, 1_170)],
)
def test_unit_mu_against_mpmath(trials: int, p: float, low: int, high: int) -> None:
    exact = Exact(trials, p).unit_mu(low, high)
    found = unit_mu_on(trials, p, low, high)
    assert exact <= found <= exact * (1 + 1e-9)


def test_ndtri_is_as_accurate_as_assumed() -> None:
    probabilities = np.concatenate([10.0 ** -np.arange(0.31, 290, 1.37), np.linspace(0.01, 0.5, 50)])
    with mpmath.workdps(330):
        for y, found in zip(probabilities, ndtri(probabilities), strict=True):
            # One Newton step from the answer, with ample digits, gives the exact quantile to first order.
            x = mpmath.mpf(float(found))
            step = (mpmath.ncdf(x) - mpmath.mpf(float(y))) / mpmath.npdf(x)
            assert abs(step) <= 1e-13 * abs(x) + 1e-14


@pytest.mark.parametrize(
    ("trials", "p", "delta"), [(2_000, 0.5, 1e-6), (1_000, 0.2, 1e-5), (20_000, 0.7, 1e-9), (100_000, 0.5, 1e-12)]
)
@pytest.mark.parametrize("shift", [1, 3])
def test_lies_above_the_exact_answer_in_one_dimension(trials: int, p: float, delta: float, shift: int) -> None:
    exact = shift_epsilon(trials, p, delta, shift)
    found, _ = certified_epsilon(BinomialLaw(trials, p), dim=1, sensitivity=float(shift), levels=shift + 1, delta=delta)
    assert exact < found < 1.4 * exact


def test_exact_answer_in_one_dimension() -> None:
    assert shift_epsilon(2_000, 0.5, 1e-6) == pytest.approx(0.168253, abs=5e-7)


def test_gaussian_limit() -> None:
    found = gaussian_certificate(BinomialLaw(10**10, 0.5), dim=1, sensitivity=1.0, levels=2, tail=1e-12)
    assert 1.0 < found.unit_mu * 5e4 < 1.0001


@pytest.mark.parametrize("p", [0.5, 0.21])
def test_more_noise_a_larger_tail_and_less_distance_never_hurt(p: float) -> None:
    def mu(
        noise_trials: int = 4_000, tail: float = 1e-8, sensitivity: float = 2.0, levels: int = 3, dim: int = 50
    ) -> float:
        return gaussian_certificate(
            BinomialLaw(noise_trials, p), dim=dim, sensitivity=sensitivity, levels=levels, tail=tail
        ).mu

    trials = [mu(noise_trials=n) for n in range(1_000, 40_000, 777)]
    assert trials == sorted(trials, reverse=True)
    assert [mu(tail=10.0**-i) for i in range(2, 14)] == sorted(mu(tail=10.0**-i) for i in range(2, 14))
    assert [mu(sensitivity=s / 7) for s in range(1, 40)] == sorted(mu(sensitivity=s / 7) for s in range(1, 40))
    assert [mu(levels=k) for k in range(2, 9)] == sorted(mu(levels=k) for k in range(2, 9))
    assert [mu(dim=d) for d in (1, 10, 1_000)] == sorted(mu(dim=d) for d in (1, 10, 1_000))


def test_larger_delta_never_raises_epsilon() -> None:
    found = [
        certified_epsilon(BinomialLaw(3_000, 0.4), dim=10, sensitivity=1.5, levels=4, delta=10.0 ** -(i / 3))[0]
        for i in range(9, 45)
    ]
    assert found == sorted(found)


def test_mirrored_noise_is_as_good() -> None:
    one, other = (
        gaussian_certificate(BinomialLaw(5_000, p), dim=3, levels=3, sensitivity=2.0, tail=1e-9) for p in (0.25, 0.75)
    )
    assert one.mu == pytest.approx(other.mu, rel=1e-9)


def test_too_little_noise_names_enough() -> None:
    def certify(trials: int) -> None:
        gaussian_certificate(BinomialLaw(trials, 0.3), dim=10, sensitivity=3.0, levels=8, tail=1e-9)

    with pytest.raises(ConditionError, match=r"\[0, \d+\].*N=(\d+) would do") as caught:
        certify(50)
    enough = int(str(caught.value).split("N=")[-1].split()[0])
    certify(enough)
    with pytest.raises(ConditionError):
        certify(enough - 1)


def test_range_at_the_upper_end_is_refused_too() -> None:
    with pytest.raises(ConditionError, match="No Gaussian certificate"):
        gaussian_certificate(BinomialLaw(200, 0.95), dim=10, sensitivity=1.0, levels=2, tail=1e-6)


@pytest.mark.parametrize("p", [0.9999999999999999, 1e-16, 5e-324])
@pytest.mark.parametrize("trials", [1, 1_000, 10**9, 2**52])
def test_a_coin_that_hardly_ever_lands_otherwise_is_refused(p: float, trials: int) -> None:
    law = BinomialLaw(trials, p)
    with pytest.raises(ConditionError, match="less skewed noise"):
        gaussian_certificate(law, dim=10, levels=2, sensitivity=1.0, tail=1e-9)
    with pytest.raises(ConditionError, match="must stay inside"):
        renyi_certificate(law, dim=10, levels=2, sensitivity=1.0, delta=1e-9)


@pytest.mark.parametrize("delta", [1e-300, 1e-243])
def test_a_delta_too_small_is_named(delta: float) -> None:
    with pytest.raises(ParameterError, match=r"Expected delta >= 1.05e-241 for dim=1000, got delta=1e-") as caught:
        certified_epsilon(BinomialLaw(10**4, 0.5), dim=1_000, sensitivity=1.0, levels=2, delta=delta)
    assert "tail=" not in str(caught.value)


def test_too_much_noise_is_refused() -> None:
    with pytest.raises(ConditionError, match="Account for less noise"):
        gaussian_certificate(BinomialLaw(10**14, 0.5), dim=10, sensitivity=1.0, levels=2, tail=1e-6)


def test_no_noise() -> None:
    with pytest.raises(ConditionError, match="no privacy"):
        gaussian_certificate(BinomialLaw(0, 0.5), dim=1, sensitivity=1.0, levels=2, tail=1e-9)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"p": 0.0}, {"p": 1.0}, {"dim": 0}, {"sensitivity": 0.0}, {"sensitivity": math.inf}, {"levels": 1}),
        *({"tail": 0.0}, {"tail": 1e-260}, {"tail": 1.0}, {"noise_trials": -1}),
    ],
)
def test_parameters_out_of_range(wrong: dict[str, Any]) -> None:
    settings: dict[str, Any] = {"dim": 1, "sensitivity": 1.0, "levels": 2, "tail": 0.1}
    settings.update(wrong)
    trials, p = settings.pop("noise_trials", 1000), settings.pop("p", 0.5)
    with pytest.raises(ParameterError):
        gaussian_certificate(BinomialLaw(trials, p), **settings)


@pytest.mark.parametrize(("adjacency", "distance"), [("replace-one", 2.0), ("zero-out", 1.0)])
def test_sensitivity(adjacency: str, distance: float) -> None:
    protocol = Protocol.binomial(clients=10, dim=400, clip_norm=1.0, levels=9, trials=4, coordinate_range=0.4)
    exact = distance / protocol.scale
    assert exact <= checks.sensitivity(protocol, adjacency) <= exact * (1 + 1e-15)
    # A ball larger than the cube that coordinates are clipped to: the cube's diagonal counts.
    mechanism = dataclasses.replace(checks.binomial(protocol), coordinate_range=0.01)
    narrow = dataclasses.replace(protocol, mechanism=mechanism)
    cube = 20.0 * 8.0 * distance / 2.0
    assert cube <= checks.sensitivity(narrow, adjacency) <= cube * (1 + 1e-15)
    # Floats have no lattice: the distance itself.
    assert checks.sensitivity(Protocol.gaussian(clients=10, dim=4, clip_norm=3.0, sigma=1.0), adjacency) == 3 * distance


# ---------------------------------------------------------------------- parts


def window(error: float = 0.01, outside: float = 1e-4) -> Window:
    """A law whose errors are so large that they count."""
    mass = binom.pmf(np.arange(13), 12, 0.4)
    below = np.cumsum(mass)
    return Window(-5, mass, below, mass[::-1].cumsum()[::-1] - mass, outside, 2.0 * outside, error)


@pytest.mark.parametrize("mass", [1e-5, 1e-3, 0.02, 0.3, 1.0])
def test_a_central_range_is_the_narrowest(mass: float) -> None:
    law = window()
    low, high, left_out = central_range(law, mass)
    below = [*(float(law.below[i]) * 1.01 + 1e-4 for i in range(13))]
    above = [*(float(law.above[i]) * 1.01 + 2e-4 for i in range(13))]
    # Outside of [a, b] lie P(Z <= a - 1) and P(Z > b).
    first = [a for a in range(-4, 8) if below[a - 1 + 5] <= 0.5 * mass]
    last = [b for b in range(-5, 8) if above[b + 5] <= 0.5 * mass]
    assert low == max(first, default=-5)
    assert high == min(last, default=7)
    expected = (below[low - 1 + 5] if first else 1e-4) + (above[high + 5] if last else 2e-4)
    assert left_out == pytest.approx(expected, rel=1e-12)


def test_quotients_are_upper_bounds_by_as_much_as_the_law_may_be_off() -> None:
    law = window()
    found, at = certificate._quotients(law), [0.0] * 11
    for i in range(11):
        side = [min(law.below[j], law.above[j]) * (1.0 - 0.02) for j in (i, i + 1)]
        at[i] = law.mass[i + 1] * 1.02 / min(norm.pdf(norm.ppf(min(each, 0.5))) for each in side)
    assert found[:-1] == pytest.approx(at, rel=1e-9)
    assert found[-1] == math.inf
    for low, high in ((-4, -4), (-3, 2), (-4, 6)):
        assert certificate._unit_mu(law, found, low, high) == max(found[low + 4 : high + 5])
    for low, high in ((-5, 2), (-4, 7)):
        with pytest.raises(ConditionError, match="reaches probabilities under"):
            certificate._unit_mu(law, found, low, high)


def test_the_best_share_of_tails_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    class Profile:
        def __init__(self, law: BinomialLaw, dim: int, sensitivity: float, levels: int, smallest_tail: float) -> None:
            assert smallest_tail == 1e-6 * 0.5**20

        def certificate(self, tail: float) -> certificate.GaussianCertificate:
            share = tail / 1e-6
            asked.append(share)
            if share < refused:
                raise ConditionError("too wide")
            mu = 0.3 * (1.0 + 4.0 * abs(math.log2(share) + 5.0) / 100.0)
            return certificate.GaussianCertificate(mu, mu, 0.5 * tail)

    monkeypatch.setattr(certificate, "_Profile", Profile)
    given: dict[str, Any] = {"dim": 2, "sensitivity": 1.0, "levels": 2, "delta": 1e-6}
    for refused, best in ((0.0, 5), (0.1, 3), (0.4, 1)):
        asked.clear()
        epsilon, found = certified_epsilon(BinomialLaw(100, 0.5), **given)
        assert asked == pytest.approx([0.5**i for i in range(1, 21)][: len(asked)], rel=1e-12)
        assert found.tail_mass == pytest.approx(0.5e-6 * 0.5**best, rel=1e-12, abs=0.0)
        assert epsilon == pytest.approx(gdp_epsilon(found.mu, 1e-6 - found.tail_mass), rel=1e-12)
        # The first that does not fit ends the search.
        assert len(asked) == (20 if not refused else best + 1)
    refused = 2.0
    with pytest.raises(ConditionError, match="too wide"):
        certified_epsilon(BinomialLaw(100, 0.5), **given)
    assert found.noise_multiplier == pytest.approx(1.0 / found.mu, rel=1e-12)


def test_known_certificates() -> None:
    values: dict[str, object] = {}
    for law, dim, sensitivity, levels in ((BinomialLaw(900, 0.5), 8, 3.3, 4), (BinomialLaw(2000, 0.8), 1, 1.0, 2)):
        for tail in (0.4, 1e-3, 1e-9):
            found = gaussian_certificate(law, dim=dim, sensitivity=sensitivity, levels=levels, tail=tail)
            values[f"{law} {tail}"] = [found.mu, found.unit_mu, found.tail_mass]
        nats = certificate._Profile(law, dim, sensitivity, levels, 1e-9)
        values[f"window {law}"] = [nats.window.first, nats.window.last, nats.steps]
    values["steps"] = [
        certificate.check_parameters(3, sensitivity, levels, 1e-6)
        for sensitivity, levels in ((1.0, 2), (1.1, 5), (9.0, 5), (0.3, 5))
    ]
    values["shares"] = [
        part for variance in (100.0, 1e4, 249_999.0, 250_000.0) for part in certificate._shares(variance)
    ]
    known.check("privacy/proofs/certified_gaussian", values, rel=1e-8)


@pytest.mark.parametrize(("low", "high", "fits"), [(1, 19, True), (0, 19, False), (1, 20, False)])
def test_a_range_and_its_neighbours_are_inside_the_support(low: int, high: int, fits: bool) -> None:
    assert certificate.inside(BinomialLaw(20, 0.5), low, high) == fits


def test_the_smallest_tails_that_are_computed() -> None:
    smallest = certificate.SMALLEST_MASS
    certificate.check_parameters(4, 1.0, 2, 4.0 * smallest)
    certificate.check_delta(4.0 * smallest / 0.5, 4, 0.5)
    certificate.check_delta(0.1, 1, 0.5)
    louder = BinomialLaw(200_000, 0.5)
    assert gaussian_certificate(louder, dim=4, sensitivity=1.0, levels=2, tail=4.0 * smallest).mu > 0.0
    with pytest.raises(ParameterError, match="Expected delta"):
        certified_epsilon(louder, dim=4, sensitivity=1.0, levels=2, delta=0.99 * 4.0 * smallest * 2.0**20)
    with pytest.raises(ParameterError, match="Expected tail"):
        certificate.check_parameters(4, 1.0, 2, 3.99 * smallest)
    with pytest.raises(ParameterError, match="Expected delta"):
        certificate.check_delta(3.99 * smallest / 0.5, 4, 0.5)


@pytest.mark.parametrize(
    ("trials", "p", "dim", "levels", "tail"), [(40, 0.5, 4, 9, 1e-6), (10, 0.8, 1, 2, 1e-9), (40, 0.5, 2**30, 9, 1e-6)]
)
def test_the_remedy_names_the_least_noise_that_is_enough(
    trials: int, p: float, dim: int, levels: int, tail: float
) -> None:
    def fits(many: int) -> bool:
        try:
            gaussian_certificate(BinomialLaw(many, p), dim=dim, sensitivity=5.0, levels=levels, tail=tail)
        except ConditionError:
            return False
        return True

    with pytest.raises(ConditionError) as caught:
        gaussian_certificate(BinomialLaw(trials, p), dim=dim, sensitivity=5.0, levels=levels, tail=tail)
    found = re.search(r"=(\d+) would do", str(caught.value))
    assert found is not None
    enough = int(found[1])
    assert fits(enough)
    assert not fits(enough - 1)


@pytest.mark.parametrize("mu", [0.1, 0.3, 3.0, 7.0])
def test_a_noise_multiplier_is_rounded_down(mu: float) -> None:
    found = certificate.GaussianCertificate(mu, mu, 0.0).noise_multiplier
    assert found == math.nextafter(1.0 / mu, 0.0)
    assert Fraction(found) * Fraction(mu) < 1


def test_tails_of_planned_certificates(monkeypatch: pytest.MonkeyPatch) -> None:
    proof, asked = certificate.PROOFS[0], list[float]()
    protocol = Protocol.binomial(clients=60, dim=8, clip_norm=1.0, levels=9, trials=700)
    kept = certificate.gaussian_certificate

    def noted(law: BinomialLaw, *, tail: float, **shape: Any) -> certificate.GaussianCertificate:
        asked.append(tail)
        return kept(law, tail=tail, **shape)

    monkeypatch.setattr(certificate, "gaussian_certificate", noted)
    monkeypatch.setattr(base, "sampled_mu", lambda run, claim: 0.01)
    fixed, one = Run.of(protocol, rounds=5, participation="fixed-size:0.1"), Run.of(protocol)
    rate = math.nextafter(0.1, 1.0)
    # Under fixed-size sampling tails count only in the rounds that the client is in.
    assert proof.cost(fixed, 1e-9).tail_mass <= 1e-9
    proof.cost(one, 1e-9)
    proof.cost(one, 0.9)
    assert asked == [1e-9 / rate, 1e-9, 0.5]
    asked.clear()
    scales = [proof.scale(fixed, Claim(2.0, delta)) for delta in (1e-6, 0.9)]
    assert asked == pytest.approx([0.01e-6 / 5 / rate, 0.009 / 5 / rate], rel=1e-12)
    asked.clear()
    scales += [proof.scale(Run.of(protocol, participation="fixed-size:0.01"), Claim(2.0, 0.9))]
    scales += [proof.scale(run, Claim(0.03, 1e-8)) for run in (one, Run.of(protocol, rounds=4))]
    assert asked[0] == 0.5
    known.check("privacy/proofs/certified_gaussian", {"scales": scales, "tails": asked})


@pytest.mark.parametrize(("trials", "p"), [(200, 0.9), (200, 0.1)])
def test_both_ends_of_the_range_are_widened_by_the_distance(trials: int, p: float) -> None:
    # Either end, as far as it goes, is inside; four lattice units farther it is not.
    law = BinomialLaw(trials, p)
    low, high, _ = central_range(law.window(60.0, margin=4), 1e-7)
    assert certificate.inside(law, low, high)
    assert (low - 4 < 1) or (high + 4 > trials - 1)
    with pytest.raises(ConditionError, match="must stay inside the law's support"):
        gaussian_certificate(law, dim=1, sensitivity=4.0, levels=5, tail=1e-7)
