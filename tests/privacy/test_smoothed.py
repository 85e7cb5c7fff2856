from __future__ import annotations

import contextlib
import itertools
import math
from dataclasses import replace
from typing import Any

import mpmath
import numpy as np
import pytest

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import Array, Law, Steps
from cpsgd.privacy import curves, smoothed
from tests import known_values as known

from . import product_checks as checks


def test_walks_over_the_values_of_w() -> None:
    assert checks.wrong_growth() == []


def test_one_step_over_several_values() -> None:
    # From 1, with the rate 8, one coordinate at distance 1 ends at 9, beyond all values.
    growth = smoothed.Growth(np.array([1.0, 2.0, 3.0, 4.0]), np.array([8.0, 4.0, 2.0, 1.0]), 1.0)
    assert growth._reached_from(0, 1.0) >= 9.0
    # The last value as the start is better: 4 + 1.
    assert growth.reached(1.0) == pytest.approx(5.0)
    assert growth.affordable(5.0) == pytest.approx(1.0)
    assert growth.affordable(0.5) == 0.0


def test_averages_over_a_cell() -> None:
    assert checks.wrong_cells() == []


@pytest.mark.parametrize("w", [0.05, 1.0, 9.0])
@pytest.mark.parametrize("parts", [1, 2, 6])
def test_an_average_is_off_by_the_square_of_a_part(w: float, parts: int) -> None:
    widths, squares = w * np.array([1e-3, 0.01, 0.1]), w * np.array([0.0, 0.3, 1.0, 4.0, 20.0])
    value, bend = smoothed._average(w, widths, squares, squares, parts)

    def exact(shift: float) -> Array:
        return np.log(_j(w, widths, np.sqrt(squares + shift)) / widths[:, None])

    short = exact(0.0) - value
    # A chord is off by the square of a part; the average in place of the exponential's, by half a variance.
    allowed = ((6.0 if parts == 1 else 1.8) * (widths / (w * parts)) ** 2)[:, None]
    assert np.all(short > 0.0)
    assert np.all(short < allowed + 1e-8)
    slopes = (exact(1e-4 * w) - exact(0.0)) / (1e-4 * w)
    assert np.all(np.abs(bend - slopes) < (2.0 * widths / w / parts)[:, None] * slopes + 1e-7 / w)


def test_moments_against_quadrature() -> None:
    assert checks.wrong_moments() == []


def test_the_gaussian_side_against_quadrature() -> None:
    assert checks.wrong_averages() == []


@pytest.mark.parametrize(
    "index", [0, *(pytest.param(index, marks=pytest.mark.thorough) for index in range(1, len(checks.SINGLES)))]
)
def test_rates_with_fifty_digits(index: int) -> None:
    assert checks.wrong_rates(checks.SINGLES[index : index + 1]) == []


def test_nothing_vanishes_that_would_grow_again() -> None:
    # At c = -end the last cell contributes less than the smallest number, at c = end nearly everything.
    curve = curves.Curve(1.0, np.linspace(-1.0, 12.0, 521), np.full(521, 1e-90))
    w, end = 0.5, 12.2
    found = smoothed._moments([curve], w, end, 5)[0]
    with mpmath.workdps(30):
        exact = mpmath.quad(
            lambda x: 2e-90 * mpmath.exp(x * end / w - x * x / (2 * w) - x / 2), mpmath.linspace(-1, 12, 53)
        )
    assert exact <= found[-1] <= 1.5 * exact


def test_a_line_in_s_is_under_a_bent_line_in_x() -> None:
    for width in (1e-6, 0.1, 1.0, 5.0, 40.0):
        with mpmath.workdps(40):
            h = mpmath.mpf(width)
            most = (mpmath.log(mpmath.expm1(h) / h) - 1) / h + 1 / mpmath.expm1(h)
            u = mpmath.log(mpmath.expm1(h) / h) / h
            assert mpmath.almosteq(most, u - mpmath.expm1(u * h) / mpmath.expm1(h), rel_eps=1e-12)
            assert 0 < most <= h / 8
    assert smoothed._BENT > 1.0 / 8.0


def test_rates_fall_and_the_smallest_distances_are_fisher_information() -> None:
    families = curves.of_steps(checks.coins(0.1, 60), reach=2.0, tail=1e-12)
    fisher = max(smoothed.fisher(family) for family in families)
    growth = smoothed.growth(families, around=100.0 * fisher, tail=1e-12)
    assert np.all(np.diff(growth.rates) <= 0.0)
    assert np.all(np.diff(growth.starts) > 0.0)
    # In units of X a step moves the mean by θ; the variance of the others and of the client is at most ¼ each.
    assert 0.01 / (0.25 * 60) <= growth.rates[-1] <= 1.2 * 0.01 / ((0.25 - 0.01) * 60)


def test_pairs_too_far_apart_are_refused() -> None:
    families = curves.of_steps(checks.coins(0.45, 3), reach=2.0, tail=1e-9)
    with pytest.raises(ConditionError, match="too large against the whole"):
        smoothed.growth(families, around=1e-3, tail=1e-9)


@pytest.mark.parametrize(("row", "cell"), [(slice(None), slice(None)), (0, 3), (1, -1)])
def test_what_is_not_a_number_is_no_proof(monkeypatch: pytest.MonkeyPatch, row: Any, cell: Any) -> None:
    families = curves.of_steps(checks.coins(0.1, 50), reach=2.0, tail=1e-9)
    real = smoothed._averages

    def spoiled(w: float, widths: Array, c0: Array, c1: Array) -> tuple[Array, Array]:
        value, bend = real(w, widths, c0, c1)
        value[row, cell] = math.nan
        return value, bend

    monkeypatch.setattr(smoothed, "_averages", spoiled)
    with pytest.raises(ConditionError):
        smoothed.growth(families, around=1.0, tail=1e-9)


def _j(w: float, widths: Array, c: Array) -> Array:
    """J(c) by Gauss-Legendre quadrature, a row per width."""
    x, weights = np.polynomial.legendre.leggauss(60)
    v = w + widths[:, None, None] * (0.5 * (x + 1.0))
    density = np.sqrt(w / v) * np.exp(0.5 * (c * c)[None, :, None] * (1.0 / w - 1.0 / v) - (v - w) / 8.0)
    return 0.5 * widths[:, None] * (density @ weights)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "law", [checks.coins(0.1, 50), checks.coins(0.4, 300), checks.coins(0.02, 2000)], ids=["few", "bold", "many"]
)
def test_rates_are_enough_at_distances_between_those_that_were_looked_at(law: Steps, draft: bool) -> None:
    families = curves.of_steps(law, reach=2.0, tail=1e-9, draft=draft)
    found = smoothed.growth(families, around=30.0 * max(map(smoothed.fisher, families)), tail=1e-9, draft=draft)
    source = np.random.default_rng(5)
    closest = math.inf
    for w, rate in zip(found.starts[::3], found.rates[::3], strict=True):
        scales = np.sort(np.append(np.exp(source.uniform(math.log(1e-3), 0.0, 400)), 1.0))
        for family in families:
            each = smoothed._Curves(family)
            each.rate(w, 1e-9, rate)
            end = smoothed._WIDTHS[each._width] * math.sqrt(w)
            moments = smoothed._moments(smoothed._scaled(family.first, scales.tolist()), w, end, 81)
            room = np.log(_j(w, rate * (2.0 * scales) ** 2, np.linspace(-end, end, 81)) / moments)
            assert np.all(room > -1e-6)
            closest = min(closest, float(np.min(room)))
    # The test can fail: for some of them the rate is hardly more than enough.
    assert closest < (0.05 if draft else 0.01)


def test_drafts_are_certificates_too() -> None:
    law = checks.coins(0.1, 50)
    exact, draft = (curves.of_steps(law, reach=2.0, tail=1e-9, draft=draft) for draft in (False, True))
    budget = 4.0
    around = budget * max(map(smoothed.fisher, exact))
    fine = smoothed.growth(exact, around=around, tail=1e-9).reached(budget)
    rough = smoothed.growth(draft, around=around, tail=1e-9, draft=True).reached(budget)
    assert fine * 0.999 <= rough < 1.1 * fine


_PLAIN: dict[str, tuple[Law | Steps, float, float]] = {
    "few": (checks.coins(0.1, 50), 2.0, 30.0),
    "bold": (checks.coins(0.4, 300), 2.0, 30.0),
    "near": (checks.coins(0.3, 20), 1.0, 3.0),
    "many": (checks.coins(0.02, 2000), 2.0, 300.0),
    "lattice": (BinomialLaw(400, 0.5), 1.06, 3.0),
}


def families_of(law: Law | Steps, reach: float, draft: bool = False) -> list[curves.Family]:
    if isinstance(law, Steps):
        return curves.of_steps(law, reach=reach, tail=1e-9, draft=draft)
    return curves.of_law(law, reach=reach, tail=1e-9)


@pytest.mark.parametrize(
    ("name", "draft"),
    [*itertools.product(_PLAIN, [True]), ("few", False), ("bold", False), ("near", False), ("many", False)],
)
def test_known_growth(name: str, draft: bool) -> None:
    law, reach, budget = _PLAIN[name]
    families = families_of(law, reach, draft)
    fisher = [smoothed.fisher(family) for family in families]
    found = smoothed.growth(families, around=budget * max(fisher), tail=1e-9, draft=draft)
    values = {"fisher": fisher, "starts": found.starts, "rates": found.rates, "overshoots": found._overshoots}
    values["reached"] = [found.reached(share * budget) for share in (0.01, 0.3, 1.0, 2.0)]
    known.check("privacy/smoothed", {f"{name} {draft} {key}": value for key, value in values.items()}, rel=1e-8)


@pytest.mark.parametrize("name", _PLAIN)
def test_known_comparisons(name: str) -> None:
    law, reach, _ = _PLAIN[name]
    values: dict[str, Any] = {}
    for number, family in enumerate(families_of(law, reach)):
        each, rate = smoothed._Curves(family), 1.3 * smoothed.fisher(family)
        for w in (0.02, 1.0, 30.0):
            end = 6.0 * math.sqrt(w)
            test = smoothed._Test(each, w, np.linspace(-end, end, 31), 1e-4)
            values |= {
                f"scales {number} {w}": each.scales(w, end),
                f"smallest {number} {w}": each.smallest(w, end, 0.01 * family.first.distance),
                f"chords {number} {w}": test._largest,
                f"first {number} {w}": test._smallest,
                f"gaps {number} {w}": test._gaps(rate),
                f"wide gaps {number} {w}": test._gaps(30.0 * rate),
                f"gap {number} {w}": [test.gap(rate), *test.divided],
                f"passes {number} {w}": [test.passes(factor * rate) for factor in (0.9, 1.0, 1.2, 1.5, 3.0)],
            }
    known.check("privacy/smoothed", {f"{name} {key}": value for key, value in values.items()}, rel=1e-8, absolute=1e-9)


def test_a_family_reaches_as_far_as_its_farthest_pairs() -> None:
    near, far = (curves.of_steps(checks.coins(0.1, 50), reach=reach, tail=1e-9)[0] for reach in (1.0, 2.0))
    around = 4.0 * smoothed.fisher(near)
    assert [smoothed.growth(both, around=around, tail=1e-9).reach for both in ([near, far], [far, near])] == [2.0, 2.0]
    with pytest.raises(ConditionError, match="next to nothing"):
        smoothed.growth([near], around=smoothed._SMALLEST_W, tail=1e-9)


def test_curves_of_several_lengths_are_measured_together() -> None:
    family = curves.of_steps(checks.coins(0.1, 50), reach=2.0, tail=1e-9)[0]
    short = curves.Curve(1.0, family.first.log_ratios[5:-9], family.first.excess[5:-9])
    together = smoothed._moments([short, family.first], 1.0, 6.0, 9)
    alone = [smoothed._moments([curve], 1.0, 6.0, 9)[0] for curve in (short, family.first)]
    assert together == pytest.approx(np.array(alone), rel=1e-13)


def test_distances_may_have_any_unit() -> None:
    law, reach, budget = _PLAIN["lattice"]
    (family,) = families_of(law, reach)
    first, *others = (replace(each, distance=0.05 * each.distance) for each in (family.first, *family.others))
    wider = replace(family, first=first, others=tuple(others), reach=0.05 * reach)
    around = budget * smoothed.fisher(family)
    one, other = (smoothed.growth([each], around=around, tail=1e-9, draft=True) for each in (family, wider))
    assert other.starts == pytest.approx(one.starts, rel=1e-9)
    assert 0.0025 * other.rates == pytest.approx(one.rates, rel=1e-9)
    assert (other.reached(0.0025 * budget), other.reach) == (pytest.approx(one.reached(budget), rel=1e-9), 0.05 * reach)


@pytest.mark.parametrize("name", ["few", "lattice"])
def test_what_floating_point_cannot_hold_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    law, reach, _ = _PLAIN[name]
    family, w, tail = families_of(law, reach)[0], 0.7, 1e-9
    largest = family.others[-1] if family.others else smoothed._scaled(family.first, [reach / 2.0])[0]
    farthest, used = float(np.max(np.abs(largest.log_ratios))), smoothed._Curves(family)
    rate = used.rate(w, tail)
    end = smoothed._WIDTHS[used._width] * math.sqrt(w)
    for limit, value in (
        ("_SMALLEST_EXPONENT", 0.5 * farthest**2 / w + 1.5 * farthest - math.log(tail)),
        ("_LARGEST_EXPONENT", farthest * (end / w + 0.5)),
    ):
        for factor in (1.0 + 1e-9, 1.0 - 1e-9):
            with monkeypatch.context() as patch:
                patch.setattr(smoothed, limit, value * factor)
                with contextlib.nullcontext() if factor > 1.0 else pytest.raises(smoothed._TooRoughError):
                    assert smoothed._Curves(family).rate(w, tail) == rate
    for factor in (2.0, 0.5):
        monkeypatch.setattr(smoothed, "_LARGEST_STEP", factor * rate * largest.distance**2 / w)
        with contextlib.nullcontext() if factor > 1.0 else pytest.raises(smoothed._TooRoughError):
            assert smoothed._Curves(family).rate(w, tail) == rate


def test_the_kernel_of_small_distances_is_bounded_up_to_a_half() -> None:
    family = curves.of_steps(checks.coins(0.1, 50), reach=2.0, tail=1e-9)[0]
    each, longest = smoothed._Curves(family), float(np.max(np.abs(np.expm1(family.first.log_ratios))))
    for largest, refused in ((0.5 - 1e-9, False), (0.5 + 1e-9, True)):
        with pytest.raises(smoothed._TooRoughError) if refused else contextlib.nullcontext():
            assert each.smallest(1.0, 6.0, largest / longest * family.first.distance) > 0.0
