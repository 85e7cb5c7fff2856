"""The window of a Binomial law against 50 digits, and the bounds that it states about itself."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import window_of_ratios


class Exact:
    """Binomial(N, p) by its definition: P(Z = z), P(Z <= z) and P(Z > z) for every z."""

    def __init__(self, trials: int, p: float) -> None:
        with mpmath.workdps(50):
            odds = mpmath.mpf(p) / (1 - mpmath.mpf(p))
            self.mass = [(1 - mpmath.mpf(p)) ** trials]
            for j in range(trials):
                self.mass.append(self.mass[-1] * odds * (trials - j) / (j + 1))
            self.below = running(self.mass)
            self.above = [mpmath.mpf(0), *running(self.mass[:0:-1])][::-1]


def running(masses: list[mpmath.mpf]) -> list[mpmath.mpf]:
    """Sums of the first one, two, ... masses."""
    sums = [mpmath.mpf(0)]
    for mass in masses:
        sums.append(sums[-1] + mass)
    return sums[1:]


@pytest.mark.parametrize(("trials", "p"), [(1, 0.5), (7, 0.9), (200, 0.5), (1500, 0.03), (1500, 0.7), (3000, 1e-4)])
@pytest.mark.parametrize("nats", [3.0, 40.0, 500.0])
def test_bounds_hold(trials: int, p: float, nats: float) -> None:
    law, exact = BinomialLaw(trials, p).window(nats), Exact(trials, p)
    r = law.error
    assert r < 1e-10 or nats == 3.0
    for i, z in enumerate(range(law.first, law.last + 1)):
        assert law.mass[i] * (1 - r) <= exact.mass[z] <= law.mass[i] * (1 + r)
        assert law.below[i] * (1 - r) <= exact.below[z] <= law.below[i] * (1 + r) + law.outside_below
        assert law.above[i] * (1 - r) <= exact.above[z] <= law.above[i] * (1 + r) + law.outside_above
    before = exact.below[law.first - 1] if law.first else 0
    assert before <= law.outside_below
    assert exact.above[law.last] <= law.outside_above
    assert law.outside_below + law.outside_above < 2.0 * 2.718 ** -min(nats, 600.0)


def test_large_trials_against_the_normal_limit() -> None:
    law = BinomialLaw(10**8, 0.5).window(60.0)
    assert law.error < 1e-9
    assert law.mass[5 * 10**7 - law.first] == pytest.approx(0.3989422804014327 / 5000, rel=1e-8)
    assert law.below[5 * 10**7 - 1 - law.first] + 0.5 * law.mass[5 * 10**7 - law.first] == pytest.approx(0.5, rel=1e-9)


@pytest.mark.parametrize(
    ("trials", "p"), [(2, 0.75), (999, 0.75), (999, 0.99), (999, 1 - 2.0**-40), (2**40, 1 - 2.0**-40)]
)
def test_mirrored(trials: int, p: float) -> None:
    # Failures of this law are successes of the other one, and 1 - p is exact.
    law, other = BinomialLaw(trials, p).window(30.0), BinomialLaw(trials, 1 - p).window(30.0)
    assert (law.first, law.last) == (trials - other.last, trials - other.first)
    assert (law.mass == other.mass[::-1]).all()
    assert (law.above[:-1] == other.below[-2::-1]).all()
    assert (law.below[:-1] == other.above[-2::-1]).all()
    assert (law.outside_below, law.outside_above) == (other.outside_above, other.outside_below)


def test_many_trials_near_one_are_a_poisson_law() -> None:
    # N - Z is nearly Poisson with mean N 2^-52 = 1: errors of one trial would be as large as the mean.
    law = BinomialLaw(2**52, 1 - 2.0**-52).window(30.0)
    assert law.last == 2**52
    for failures in range(8):
        expected = math.exp(-1) / math.factorial(failures)
        assert law.mass[-1 - failures] == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("p", [1e-15, 0.5, 1 - 2.0**-53])
def test_too_many_trials_are_refused(p: float) -> None:
    with pytest.raises(ConditionError, match=r"at most N=2\^52"):
        BinomialLaw(2**52 + 1, p).window(30.0)


def test_too_many_points_are_refused() -> None:
    with pytest.raises(ConditionError, match="Account for less noise"):
        BinomialLaw(10**14, 0.5).window(60.0)


def test_no_trials_and_other_parameters_out_of_range_are_refused() -> None:
    with pytest.raises(ConditionError, match="no privacy"):
        BinomialLaw(0, 0.5)
    with pytest.raises(ParameterError, match="noise_trials"):
        BinomialLaw(-1, 0.5)
    for p in (0.0, 1.0, math.nan):
        with pytest.raises(ParameterError, match="p"):
            BinomialLaw(10, p)


@pytest.mark.parametrize(("trials", "p"), [(60, 0.5), (60, 0.2), (300, 0.9)])
@pytest.mark.parametrize("direction", [1, -1])
def test_steps_are_ratios_of_neighbouring_masses(trials: int, p: float, direction: int) -> None:
    exact, points = Exact(trials, p), np.arange(1.0, trials)
    steps, units = BinomialLaw(trials, p).step(points, direction)
    for i, step, unit in zip(map(int, points), steps, units, strict=True):
        ratio = exact.mass[i - direction] / exact.mass[i]
        assert abs(1 + mpmath.mpf(step) - ratio) <= unit * mpmath.mpf(2) ** -53 * ratio


@pytest.mark.parametrize(("trials", "p"), [(60, 0.5), (61, 0.5), (60, 0.2)])
def test_a_law_says_of_itself_what_the_certificates_rest_on(trials: int, p: float) -> None:
    law, exact = BinomialLaw(trials, p), Exact(trials, p)
    mean = mpmath.fsum(z * mass for z, mass in enumerate(exact.mass))
    assert law.variance == pytest.approx(float(mpmath.fsum((z - mean) ** 2 * m for z, m in enumerate(exact.mass))))
    assert (law.lowest, law.highest, law.parts) == (0, trials, trials)
    symmetric = all(abs(a - b) <= 1e-40 for a, b in zip(exact.mass, exact.mass[::-1], strict=True))
    assert law.mirror == (trials if symmetric else None)
    assert law.with_parts(7) == BinomialLaw(7, p)
    assert str(law) == f"Binomial({trials}, {p})"


# ------------------------------------------------------------------ any law, from its ratios


@pytest.mark.parametrize("ratio", [0.3, 0.9])
@pytest.mark.parametrize("points", [5, 40, 900, 12_000])
def test_a_two_sided_geometric_law_from_its_ratios(ratio: float, points: int) -> None:
    # P(Z = z) = (1-r)/(1+r) r^|z|: masses and tails in closed form, and infinitely much of both outside.
    ratios = np.full(points, ratio)
    law = window_of_ratios(7, ratios, ratios, ratio, ratio)
    # Masses below 1e-290 of the mode's are left out.
    kept = min(points, math.floor(-290 / math.log10(ratio)))
    assert (law.first, law.last) == (7 - kept, 7 + kept)
    r = law.error
    with mpmath.workdps(50):
        q = mpmath.mpf(ratio)
        for i, z in enumerate(range(law.first - 7, law.last - 6)):
            mass = (1 - q) / (1 + q) * q ** abs(z)
            tail = q ** (z + 1 if z >= 0 else -z) / (1 + q)  # P(Z > z) on the right, P(Z <= z) on the left
            below, above = (1 - tail, tail) if z >= 0 else (tail, 1 - tail)
            assert law.mass[i] * (1 - r) <= mass <= law.mass[i] * (1 + r)
            assert law.above[i] * (1 - r) <= above <= law.above[i] * (1 + r) + law.outside_above
            assert law.below[i] * (1 - r) <= below <= law.below[i] * (1 + r) + law.outside_below
        outside = q ** (kept + 1) / (1 + q)
        assert outside <= law.outside_above <= outside / (1 - 2 * outside) * (1 + 1e-5)
        assert law.outside_below == law.outside_above


def test_a_window_that_ends_before_its_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="does not reach past its mode"):
        window_of_ratios(0, np.array([0.5]), np.array([1.5]), 0.5, 1.2)
