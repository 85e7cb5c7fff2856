from __future__ import annotations

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest

from cpsgd.errors import ConditionError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import Steps
from cpsgd.mechanisms.skellam import SkellamLaw
from cpsgd.privacy import curves, smoothed
from tests import known_values as known

from . import product_checks as checks
from . import product_oracle as oracle


def test_curves_lie_over_all_pairs_and_not_far() -> None:
    assert checks.wrong_curves() == []


def test_a_block_of_unknown_sides_is_covered() -> None:
    assert checks.wrong_blocks() == []


def test_blocks_cover_every_number_of_clients_at_one_end() -> None:
    assert checks.wrong_covers() == []


@pytest.mark.parametrize("law", [checks.coins(0.2, 400), checks.sampled_coins(0.3, 0.4, 400)])
def test_blocks_lie_over_every_k_in_them(law: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "_MOST_BLOCKS", 8)
    monkeypatch.setattr(curves, "_LEAST_BLOCKS", 8)
    families = curves.of_steps(law, reach=2.0, tail=1e-9)
    found = [family.first for family in families]
    s = np.exp(np.linspace(-1.0, 1.0, 81) * float(np.max(np.abs(found[0].log_ratios))))
    bound = np.max([checks.interpolated(curve, s) for curve in found], axis=0) + families[0].tail * np.minimum(1.0, s)
    for k in (0, 1, 49, 50, 51, 133, 199, 200, 350, 399):
        pair = oracle.step_pair(law.low, law.high, checks.sides(k, 399), 1.0, -1.0)
        assert np.all(checks.exact_excess(pair, s) <= bound + 1e-13)


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.01])
def test_mixtures_are_scaled_curves(scale: float) -> None:
    noise = oracle.binomial_masses(40, 0.5)
    curve = curves.of_law(BinomialLaw(40, 0.5), reach=1.0, tail=1e-9)[0].first
    (scaled,) = smoothed._scaled(curve, [scale])
    assert scaled.distance == scale
    exact = checks.exact_excess(oracle.lattice_pair(noise, scale, 0.0), np.exp(scaled.log_ratios))
    assert np.all(scaled.excess >= exact - 1e-14)
    assert scaled.excess == pytest.approx(exact, abs=1e-11)


def test_the_excess_of_a_skellam_law() -> None:
    law = SkellamLaw(5, 3.0, 1000)
    noise = oracle.skellam_masses(law.variance)
    family = curves.of_law(law, reach=2.0, tail=1e-9)[0]
    for curve in (family.first, *family.others):
        exact = checks.exact_excess(oracle.lattice_pair(noise, curve.distance, 0.0), np.exp(curve.log_ratios))
        assert np.all(curve.excess + family.tail >= exact - 1e-12)
        assert curve.excess == pytest.approx(exact, abs=1e-9)


def test_nodes_between_whole_numbers() -> None:
    found = curves._distances(3.5)
    assert {2.0, 3.0, 3.5} <= set(found)
    ratios = np.array([*found]) / np.array([1.0, *found[:-1]])
    assert np.all((ratios > 1.0) & (ratios <= curves._RATIO * 1.02))
    assert curves._distances(1.0) == []


def test_a_large_tail_leaves_a_curve() -> None:
    # Everything is under the tail, and there is a curve all the same.
    curve = curves.of_steps(checks.coins(2.0**-16, 10), reach=2.0, tail=0.1)[0].first
    assert len(curve.excess) > 20
    assert np.all(curve.excess > 0.0)


@pytest.mark.parametrize(
    ("law", "reach"),
    [
        (Steps((0.7, 0.3), (0.2, 0.8), 10), 2.0),  # no mirror images
        (Steps((0.3, 0.7), (0.7, 0.3), 10), 2.0),  # the ratio falls
        (Steps((0.6, 0.1, 0.3), (0.3, 0.1, 0.6), 10), 2.0),  # not log-concave
        (Steps((0.5, 0.0, 0.5), (0.5, 0.0, 0.5), 10), 2.0),  # with a hole
        (Steps((0.8, 0.3), (0.3, 0.8), 10), 2.0),  # more than one
        (Steps((1.2, -0.2), (-0.2, 1.2), 10), 2.0),
        (Steps((1.0,), (1.0,), 10), 2.0),
        (checks.coins(0.1, 10), 2.5),
        (checks.coins(0.1, 10), math.nan),
        (checks.coins(0.1, 1), 2.0),  # nobody else
    ],
)
def test_steps_that_the_proofs_do_not_cover_are_refused(law: Steps, reach: float) -> None:
    with pytest.raises(ConditionError):
        curves.of_steps(law, reach=reach, tail=1e-6)


def test_laws_that_end_before_their_tail_are_refused() -> None:
    with pytest.raises(ConditionError, match="More noise or a larger tail"):
        curves.of_law(BinomialLaw(20, 0.5), reach=1.0, tail=1e-9)
    with pytest.raises(ConditionError, match="33 lattice units"):
        curves.of_law(BinomialLaw(10_000, 0.5), reach=32.5, tail=1e-9)


def test_powers_lose_what_they_say() -> None:
    step = np.array([0.3, 0.7])
    for count in (1, 7, 100, 1000):
        found = curves._power(step, count, 1e-6)
        assert found.lost <= 1e-6
        exact = oracle.binomial_masses(count, 0.7)
        kept = exact[found.first : found.first + len(found.mass)]
        # SciPy's masses are within about 1e-12. Sums of trimmed laws have less than the whole law at their ends.
        assert np.all(found.mass <= kept * (1.0 + found.error + 1e-11))
        assert 1.0 - found.mass.sum() <= found.lost + 1e-12


def _numbers(families: list[curves.Family]) -> dict[str, object]:
    found: dict[str, object] = {}
    for number, family in enumerate(families):
        found[f"family {number}"] = [family.reach, family.tail, len(family.others)]
        for curve in (family.first, *family.others):
            found[f"ratios {number} {curve.distance}"] = curve.log_ratios
            found[f"excess {number} {curve.distance}"] = curve.excess
    return found


@pytest.mark.parametrize("law", [BinomialLaw(400, 0.5), BinomialLaw(900, 0.2), BinomialLaw(90, 0.5)], ids=str)
@pytest.mark.parametrize("reach", [0.6, 1.0, 2.7])
def test_known_curves_of_noise(law: BinomialLaw, reach: float) -> None:
    found = _numbers(curves.of_law(law, reach=reach, tail=1e-5))
    known.check("privacy/curves", {f"{law} {reach} {key}": value for key, value in found.items()}, rel=1e-8)


@pytest.mark.parametrize("draft", [False, True])
@pytest.mark.parametrize(
    "law",
    [checks.coins(0.3, 9), checks.coins(0.3, 8), checks.coins(0.1, 1001), checks.sampled_coins(0.3, 0.4, 700)],
    ids=["odd", "even", "many", "sampled"],
)
def test_known_curves_of_steps(law: Steps, draft: bool, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.id
    found = _numbers(curves.of_steps(law, reach=1.4, tail=0.2 if law.clients < 10 else 1e-7, draft=draft))
    known.check("privacy/curves", {f"{name} {key}": value for key, value in found.items()}, rel=1e-8)


def test_known_parts_of_curves() -> None:
    values: dict[str, object] = {
        "distances": [*curves._distances(3.3), *curves._distances(2.0), *curves._distances(1.0)]
    }
    for others in (7, 31, 32, 33, 400, 401, 4001):
        for deviation in (3.0, 60.0, 1e4):
            values[f"edges {others} {deviation}"] = curves._edges(others, deviation)
    low, high = np.array([0.5, 0.4, 0.1]), np.array([0.1, 0.4, 0.5])
    for count in (0, 1, 2, 5, 100):
        power = curves._power(high, count, 1e-6)
        values[f"power {count}"] = [*power.mass[:9], power.first, power.error, power.lost]
        mixture, lost = curves._common(low, high, count, 1e-6)
        values[f"common {count}"] = [lost, *(weight for weight, _ in mixture), *(law.mass.sum() for _, law in mixture)]
        values[f"sizes {count}"] = [len(law.mass) for _, law in mixture]
    both = curves._Power(low, 3, 0.01, 0.002).plus(curves._Power(high, 4, 0.02, 0.003), 0.3)
    values["plus"] = [*both.mass, both.first, both.error, both.lost]
    tails = curves._Tails(curves._Pair(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.4, 0.3, 0.2, 0.1]), 0.01))
    values["excess"] = tails.excess(np.linspace(-2.0, 2.0, 21))
    values["pair"] = [curves._shifted(low, 0.5, BinomialLaw(9, 0.5).window(9.0, margin=3).error).error] * 2
    known.check("privacy/curves", values, rel=1e-9)


def test_weights_of_a_mixture_allow_for_errors_of_masses(monkeypatch: pytest.MonkeyPatch) -> None:
    low, high = np.array([0.5, 0.4, 0.1]), np.array([0.1, 0.4, 0.5])
    exact = [weight for weight, _ in curves._common(low, high, 40, 1e-6)[0]]
    real = curves._power
    monkeypatch.setattr(curves, "_power", lambda *args: replace(real(*args), error=0.25))
    assert [weight for weight, _ in curves._common(low, high, 40, 1e-6)[0]] == pytest.approx(1.25 * np.array(exact))


def test_uniform_steps_are_accepted() -> None:
    # All inequalities between masses are equalities: roundings may not decide.
    for count in (2, 3, 7):
        curves._check_steps(np.full(count, 1.0 / count), np.full(count, 1.0 / count), 2.0)
    third = np.array([0.1, 0.2, 0.4, 0.2, 0.1])
    curves._check_steps(third, third, 2.0)


def test_a_little_in_common_is_used() -> None:
    mixture, _ = curves._common(np.array([1.0, 1.5e-6]), np.array([1.5e-6, 1.0]), 10**6, 1e-6)
    assert max(len(law.mass) for _, law in mixture) > 1


def test_curves_are_computed_up_to_so_many_shifts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curves, "_MOST_SHIFTS", 2)
    assert curves.of_law(BinomialLaw(400, 0.5), reach=2.0, tail=1e-3)[0].reach == 2.0
    with pytest.raises(ConditionError, match=r"3 lattice units apart \(at most 2\)"):
        curves.of_law(BinomialLaw(400, 0.5), reach=2.1, tail=1e-3)


def test_long_convolutions_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = np.arange(1.0, 12.0), np.arange(3.0, 10.0)
    monkeypatch.setattr(curves, "_LONGEST_PRODUCT", 3)
    for pair in ((first, second), (second, first), (first, second[:3]), (first, second[:4])):
        assert curves._convolved(*pair) == pytest.approx(np.convolve(*pair), rel=1e-14)


@pytest.mark.parametrize(
    ("low", "high", "reach"),
    [
        ([1.0], [1.0], 1.0),
        ([0.6, 0.4], [0.5, 0.5], 1.0),
        ([0.6, 0.3], [0.3, 0.6], 1.0),
        ([0.45, 0.1, 0.45], [0.45, 0.1, 0.45], 1.0),
        ([0.3, 0.7], [0.7, 0.3], 1.0),
        ([0.5, 0.0, 0.5], [0.5, 0.0, 0.5], 1.0),
        ([0.5, 0.0, 0.0, 0.5], [0.5, 0.0, 0.0, 0.5], 1.0),
        ([1.2, -0.2], [-0.2, 1.2], 1.0),
        ([0.7, 0.3], [0.3, 0.7], 2.1),
        ([0.7, 0.3], [0.3, 0.7], 0.0),
    ],
)
def test_steps_without_thresholds_are_refused(low: list[float], high: list[float], reach: float) -> None:
    with pytest.raises(ConditionError, match="log-concave"):
        curves._check_steps(np.array(low), np.array(high), reach)
    curves._check_steps(np.array([0.7, 0.3, 0.0]), np.array([0.0, 0.3, 0.7]), 2.0)


def test_steps_with_nothing_in_common_hide_nothing() -> None:
    for low, high, free in (([1.0, 0.0], [0.0, 1.0], 5), ([0.9, 0.1], [0.1, 0.9], 0), ([1.0, 5e-7], [0.0, 1.0], 5)):
        [(weight, law)], lost = curves._common(np.array(low), np.array(high), free, 1e-6)
        assert (weight, lost, law.first, law.error, law.lost) == (1.0, 0.0, 0, 0.0, 0.0)
        assert law.mass.tolist() == [1.0]


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_what_a_window_leaves_out_is_part_of_the_tail(p: float) -> None:
    law, tail = BinomialLaw(4000, p), 1e-3
    window = law.window(math.log(2.0 / tail) + 12.0, margin=4)
    outside = window.outside_below + window.outside_above
    assert outside > 1e-13
    found = curves.of_law(law, reach=1.0, tail=tail)[0].tail
    assert found - tail == pytest.approx(outside, rel=1e-3, abs=0.0)


def test_one_other_client_hides_something() -> None:
    assert len(curves.of_steps(checks.coins(0.1, 2), reach=1.0, tail=1e-3)) > 0
    with pytest.raises(ConditionError, match="nobody else"):
        curves.of_steps(checks.coins(0.1, 1), reach=1.0, tail=1e-3)


def test_one_step_is_trimmed_by_a_quarter_of_its_cut() -> None:
    step = np.array([0.07, 0.33, 0.6])
    assert [len(curves._power(step, 1, cut).mass) for cut in (0.69, 0.71)] == [3, 2]


def test_a_law_whose_tails_are_not_in_the_window_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BinomialLaw.window
    for share, refused in ((0.49, False), (0.51, True)):
        monkeypatch.setattr(
            BinomialLaw,
            "window",
            lambda *given, share=share, **more: replace(
                real(*given, **more), outside_below=share * 1e-3, outside_above=0.0
            ),
        )
        with pytest.raises(ConditionError, match="too heavy") if refused else contextlib.nullcontext():
            (family,) = curves.of_law(BinomialLaw(400, 0.5), reach=1.0, tail=1e-3)
            assert family.tail == pytest.approx(1.49e-3)
