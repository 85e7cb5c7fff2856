"""Parameters are accepted at their limits and refused beyond them; so are noise and laws of nothing."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import Any

import numpy as np
import pytest

from cpsgd import mechanisms
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import (
    Binomial,
    Coins,
    DiscreteGaussian,
    Gaussian,
    LazyCoins,
    Mechanism,
    RoundedGaussian,
    SampledCoins,
    Skellam,
    binomial,
    fine_gaussian,
    law,
    skellam,
)
from cpsgd.mechanisms.binomial import BinomialLaw, BinomialNoise
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussianLaw
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.interface import Search
from cpsgd.mechanisms.law import MAX_POINTS, Law, check_points
from cpsgd.mechanisms.noise import FairCoins
from cpsgd.mechanisms.rounded_gaussian import cut_off, reach_of, uniformity
from cpsgd.mechanisms.skellam import SkellamLaw
from cpsgd.mechanisms.sums import Deviation
from cpsgd.paper import bounds

BINOMIAL = Binomial(levels=4, trials=20, coordinate_range=0.5)
COINS = Coins(coins=3, theta=0.2, coordinate_range=0.5)
ROUNDED = RoundedGaussian(noise_deviation=1.5, step=0.25, window=45, coordinate_range=0.5)
LAPLACE = DiscreteLaplace(levels=5, spread=4, shares=8, window=1024, coordinate_range=0.5)
NEAR_HALF = 0.5 - 2.0**-16
# Sizes lie between 1e-20 and 1e20, without the ends.
ABOVE, BELOW = math.nextafter(1e-20, 1.0), math.nextafter(1e20, 1.0)


@pytest.mark.parametrize(
    ("mechanism", "name", "least", "most"),
    [
        (BINOMIAL, "trials", 0, 2**31),
        (BINOMIAL, "levels", 2, None),
        (BINOMIAL, "p", 5e-324, 1.0 - 2.0**-53),
        (BINOMIAL, "coordinate_range", ABOVE, BELOW),
        (COINS, "coins", 1, 4096),
        (COINS, "theta", 2.0**-16, NEAR_HALF),
        (COINS, "coordinate_range", ABOVE, BELOW),
        (SampledCoins(rate=0.3, theta=0.4, coordinate_range=0.5), "rate", 2.0**-16, 2.0 / 3.0),
        (SampledCoins(rate=0.3, theta=0.4, coordinate_range=0.5), "theta", 2.0**-16, 0.5),
        (LazyCoins(rate=0.3, theta=0.4, coordinate_range=0.5), "rate", 2.0**-16, 2.0 / 3.0),
        (Gaussian(sigma=1.0), "sigma", ABOVE, BELOW),
        (Skellam(levels=4, variance=5.0, coordinate_range=0.5, noise_limit=60), "noise_limit", 13, 61),
        (Skellam(levels=4, variance=5.0, coordinate_range=0.5), "variance", None, 2.0**29),
        (DiscreteGaussian(levels=4, sigma_squared=5.0, coordinate_range=0.5), "sigma_squared", None, 2.0**29),
        (ROUNDED, "noise_deviation", 0.8, 2047.0),
        (ROUNDED, "window", 5, 1 << 17),
        (replace(ROUNDED, step=1e-3, window=1 << 17), "coordinate_range", ABOVE, None),
        (LAPLACE, "spread", 0, 2**12),
        (LAPLACE, "shares", 1, 2**24),
        (LAPLACE, "window", 5, 2**32 - 1),
    ],
    ids=lambda value: value.name if hasattr(value, "name") else str(value),
)
def test_limits(mechanism: Any, name: str, least: Any, most: Any) -> None:
    own = {"noise_limit": None} if name in ("variance", "sigma_squared") else {}
    for limit, towards in ((least, -math.inf), (most, math.inf)):
        if limit is None:
            continue
        assert getattr(replace(mechanism, **{name: limit}, **own), name) == pytest.approx(limit, abs=2.0**-16)
        beyond = math.nextafter(limit, towards) if isinstance(limit, float) else limit + int(math.copysign(1, towards))
        with pytest.raises(ParameterError, match=name):
            replace(mechanism, **{name: beyond}, **own)
    with pytest.raises(ParameterError, match=name):
        replace(mechanism, **{name: "many"})


def test_ends_of_a_rounded_gaussians_range() -> None:
    # Half of the window is what there is, and 2^24 grid points.
    with pytest.raises(ParameterError, match="within the window"):
        replace(ROUNDED, coordinate_range=0.5 * 45 * 0.25)
    inside = replace(ROUNDED, coordinate_range=math.nextafter(0.5 * 45 * 0.25, 0.0))
    assert inside.coordinate_range < 0.5 * 45 * 0.25
    two = RoundedGaussian(noise_deviation=1.0, step=1.0, window=2, coordinate_range=0.5)
    with pytest.raises(ParameterError, match=r"window in \[2"):
        replace(two, window=1)
    fine = RoundedGaussian(noise_deviation=1.0, step=1.0, window=1 << 17, coordinate_range=8192.0)
    assert fine.grid.limit == 1 << 24
    with pytest.raises(ParameterError, match="grid points"):
        replace(fine, coordinate_range=8193.0)


@pytest.mark.parametrize(
    "of", [ROUNDED, replace(ROUNDED, noise_deviation=2.3), replace(ROUNDED, window=5), replace(ROUNDED, window=1 << 12)]
)
def test_the_last_cell_leaves_the_window_and_the_one_before_may_not(of: RoundedGaussian) -> None:
    """The uniform numbers take at most 3584 points back, and the coordinate as many as it has."""
    ends = [256 * cells - 3584 - int(of.grid.limit) for cells in (of.cells - 1, of.cells)]
    farthest = fine_gaussian.farthest(of._ratio)
    assert of.cells <= farthest
    assert ends[0] < of.window << (of.fraction_bits - 1)
    assert of.cells == farthest or ends[1] >= of.window << (of.fraction_bits - 1)


def test_a_grid_that_is_off_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = ROUNDED.noise.variation
    monkeypatch.setattr(fine_gaussian, "GRID_VARIATION", 1e-3)
    assert ROUNDED.noise.variation == pytest.approx(before + 1e-3, rel=1e-12)


def test_rounding_that_could_be_told_from_noise_is_no_privacy() -> None:
    noise = replace(ROUNDED, noise_deviation=0.8).noise
    assert uniformity(noise.counted_variance, 100_000) < 1.0 < uniformity(noise.counted_variance, 150_000) < 2.0
    assert noise.slack(100_000) < noise.slack(150_000) == math.inf


def test_noise_goes_down_to_the_least_there_is() -> None:
    less = replace(ROUNDED, noise_deviation=1.6).quieter(0.25)
    assert less is not None
    assert less.noise_deviation == 0.8
    assert replace(ROUNDED, noise_deviation=1.6).quieter(0.2499) is None
    for kind, name in ((Skellam, "variance"), (DiscreteGaussian, "sigma_squared")):
        loud: Any = kind(levels=2, coordinate_range=1.0, **{name: 2.0 * kind.least_size})
        assert loud.quieter(0.5).size == kind.least_size
        assert loud.quieter(0.4999) is None


@pytest.mark.parametrize("kind", [Skellam, DiscreteGaussian])
def test_a_limit_is_the_smallest_that_costs_no_more(kind: Any) -> None:
    cost = kind.noise_type.truncation(30.0, 60)
    assert [kind.noise_type.limit_of(30.0, allowed) for allowed in (cost, math.nextafter(cost, 0.0))] == [60, 61]


@pytest.mark.parametrize("kind", [Binomial, Skellam, DiscreteGaussian, DiscreteLaplace])
def test_a_few_levels_are_tried_where_even_two_are_wide_enough(kind: Any) -> None:
    search = Search(100, 50, 1e-20, 5, 1.0, True, lambda _: 1e9, lambda _: True)
    assert [each.levels for each in kind.candidates(search)] == [2, 3, 4, 5][: 3 if kind is DiscreteLaplace else 4]


def test_coins_are_tilted_by_a_grid_point_at_least() -> None:
    assert COINS.with_scale(1e9).theta == 2.0**-16
    (found,) = SampledCoins.candidates(Search(2, 50, 0.0, 1, 1.0, False, lambda _: 1.0, lambda _: True, 2.0**-16))
    assert found.rate == 2.0**-16


def test_where_no_sum_fits_the_least_noise_is_tried() -> None:
    def noise(kind: Any, most: float) -> set[Any]:
        search = Search(100, 50, 1e-20, 5, 1.0, True, lambda _: 1e-3, lambda each: each.noise.variance <= most)
        return {getattr(each, "trials", getattr(each, "rate", None)) for each in kind.candidates(search)}

    assert noise(LazyCoins, 0.0) == {2.0**-16}
    assert noise(Binomial, 0.0) == {1}
    # A quarter of the trials is the variance, and 4½ is too much.
    assert max(noise(Binomial, 4.4)) == 17


def test_shares_are_planned_for_as_many_clients_and_values_as_there_may_be() -> None:
    for shares, values, planned in (
        *((2**24, 2**32 - 1, True), (2**24 + 1, 2**32 - 1, False), (2**24, 2**32, False)),
        *((9, 3, True), (9, 2, False)),
    ):
        search = Search(values, shares, 0.0, 5, 1.0, True, lambda _: 1e9, lambda _: True)
        assert bool(list(DiscreteLaplace.candidates(search))) is planned


def test_where_nothing_is_added_there_is_no_law() -> None:
    silent: list[Mechanism] = [
        replace(BINOMIAL, trials=0),
        Skellam(levels=4, variance=0.0, coordinate_range=0.5),
        DiscreteGaussian(levels=4, sigma_squared=0.0, coordinate_range=0.5),
        replace(LAPLACE, spread=0),
    ]
    for mechanism in silent:
        assert not mechanism.is_noisy
        with pytest.raises(ConditionError, match="adds no noise"):
            mechanism.noise.law(3)
    noisy: list[Mechanism] = [ROUNDED, COINS, Gaussian(sigma=1.0)]
    for each in noisy:
        assert each.noise.law(1) is not None
        with pytest.raises(ConditionError, match="No noise arrived"):
            each.noise.law(0)
    with pytest.raises(ConditionError, match="No noise arrived"):
        BinomialLaw(0, 0.5)
    assert BinomialLaw(1, 0.5).variance == 0.25
    assert BinomialNoise(1, 0.5).law(1) == BinomialLaw(1, 0.5)


def test_windows_of_as_many_points_as_are_computed() -> None:
    few = BinomialLaw(10, 0.5)
    check_points(MAX_POINTS, few)
    with pytest.raises(ConditionError, match=f"{MAX_POINTS + 1} points; at most {2**24}"):
        check_points(MAX_POINTS + 1, few)
    # 2^52 trials with hardly any heads are computed, more are not.
    assert BinomialLaw(2**52, 2.0**-51).window(5.0).first == 0
    with pytest.raises(ConditionError, match="at most N"):
        BinomialLaw(2**52 + 1, 2.0**-51).window(5.0)
    with pytest.raises(ConditionError, match="too many clients with too little noise"):
        DiscreteGaussianLaw(10**10, 0.1, 5).window(500.0)


@pytest.mark.parametrize(
    "of",
    [BinomialLaw(1000, 0.3), BinomialLaw(1000, 0.8), SkellamLaw(3, 40.0, 9), DiscreteGaussianLaw(3, 40.0, 9)],
    ids=str,
)
def test_points_are_counted_to_the_last(of: Law, monkeypatch: pytest.MonkeyPatch) -> None:
    points = len(of.window(9.0, 2).mass)
    monkeypatch.setattr(law, "MAX_POINTS", points)
    assert len(of.window(9.0, 2).mass) == points
    monkeypatch.setattr(law, "MAX_POINTS", points - 1)
    with pytest.raises(ConditionError, match="would need"):
        of.window(9.0, 2)


def test_a_window_ends_where_masses_fall() -> None:
    half = np.full(3, 0.5)
    found = law.window_of_ratios(7, half, half, 0.5, math.nextafter(1.0, 0.0))
    assert found.first == 4
    # The masses are 1, ½, ¼, ⅛ either way, and beyond the lower end as much as at it.
    assert found.mass.sum() == pytest.approx(1.0, rel=1e-15)
    assert found.outside_below == pytest.approx(0.125 / 2.75, rel=1e-5)
    assert found.outside_below >= 0.125 / 2.75
    for ratio in (1.0, 1.5):
        with pytest.raises(ValueError, match="past its mode"):
            law.window_of_ratios(7, half, half, 0.5, ratio)


def test_which_noise_is_counted_coins() -> None:
    assert [binomial.uses_coins(trials, 0.5) for trials in (0, 1, 256, 257)] == [True, True, True, False]
    assert [binomial.uses_coins(trials, 0.3) for trials in (0, 1)] == [True, False]
    assert BinomialNoise(2**21, 0.5).on_device(2) == FairCoins(2**22)
    assert BinomialNoise(2**21 + 1, 0.5).on_device(2) is None
    assert BinomialNoise(5, 0.3).on_device(2) is None
    # A sum of 2^31 coins is one draw, of more it is two.
    assert [BinomialNoise(2**31, 0.5)._parts(count) for count in (0, 1, 2)] == [[], [2**31], [2**31] * 2]
    assert BinomialNoise(1, 0.3)._parts(2**31 + 1) == [2**31, 1]
    assert BinomialNoise(2**31 - 1, 0.5)._parts(2) == [2**31, 2**31 - 2]


def test_no_more_noise_is_planned_than_is_certified() -> None:
    for honest, values, trials in ((10**7, 10**6, 1000), (10**11, 10**6, 1), (10, 300, 298)):
        search = Search(values, honest, 1e-20, 5, 1.0, True, lambda _: 1.0, lambda _: True)
        assert Binomial.loudest(2, search).trials == trials
    # A draw costs 15 √m 2^-127. With next to nothing left for it only counted coins will do.
    for variation, trials in ((15.0 * 100.5 * 2.0**-127, 10_100), (0.0, 256)):
        search = Search(10**6, 10, variation, 5, 1.0, True, lambda _: 1.0, lambda _: True)
        assert Binomial.loudest(2, search).trials == trials


@pytest.mark.parametrize(("rotate", "name"), [(True, "rotated_error"), (False, "rounding_error")])
def test_error_bounds_are_the_papers(rotate: bool, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}
    monkeypatch.setattr(bounds, name, lambda **given: (asked.update(given) or 1.5, "a theorem"))
    found = BINOMIAL.error_bound(clients=9, dim=4, clip_norm=1.0, rotate=rotate)
    assert (found.squared_error, found.theorem) == (1.5, "a theorem")
    assert asked == {
        **{"clients": 9, "dim": 4, "clip_norm": 1.0, "coordinate_range": 0.5, "levels": 4, "noise_variance": 5.0},
        "grid_step": BINOMIAL.scale / BINOMIAL.grid.unit / BINOMIAL.scale,
    }


def test_fields_of_files_are_not_made_up() -> None:
    fields = BINOMIAL.to_fields(1.0)
    for change in ({"p": None}, {"sigma": 1.0}, {"more": 1}):
        with pytest.raises(ParameterError):
            Binomial.of_fields({**fields, **change}, 1.0)
    with pytest.raises(ParameterError, match="Missing"):
        Binomial.of_fields({name: value for name, value in fields.items() if name != "trials"}, 1.0)
    given = Gaussian(sigma=2.0).to_fields(1.5)
    for change in ({"levels": 2}, {"coordinate_range": 1.4}, {"trials": 1}, {"p": 0.4}, {"more": 1}):
        with pytest.raises(ParameterError):
            Gaussian.of_fields({**given, **change}, 1.5)


def test_mechanisms_of_other_rooms_have_their_names_here() -> None:
    assert mechanisms.CorrelatedGaussian.name == "correlated-gaussian"
    with pytest.raises(AttributeError, match=r"module 'cpsgd\.mechanisms' has no attribute 'Nothing'"):
        _ = mechanisms.Nothing


def test_numbers_of_other_types_become_plain_ones() -> None:
    whole, real = np.int64, np.float32
    made: list[Any] = [
        Binomial(levels=whole(4), trials=whole(20), p=real(0.5), coordinate_range=whole(1)),
        Coins(coins=whole(3), theta=real(0.25), coordinate_range=whole(1)),
        SampledCoins(rate=real(0.25), theta=real(0.25), coordinate_range=whole(1)),
        Skellam(levels=whole(4), variance=whole(5), coordinate_range=whole(1), noise_limit=whole(40)),
        RoundedGaussian(noise_deviation=whole(2), step=whole(1), window=whole(45), coordinate_range=whole(1)),
        DiscreteLaplace(levels=whole(5), spread=whole(4), shares=whole(8), window=whole(99), coordinate_range=whole(1)),
        Gaussian(sigma=whole(2)),
    ]
    for mechanism in made:
        for field in fields(mechanism):
            assert type(getattr(mechanism, field.name)) in (int, float), f"{mechanism.name}: {field.name}"


def test_bounds_end_where_they_say() -> None:
    bound = Deviation(0.0, lambda slope: slope, 2.0)
    assert [bound.at(2.0), bound.at(math.nextafter(2.0, 3.0))] == [2.0, math.inf]
    noise = LAPLACE.noise
    assert noise.cumulant((1.0 - 1e-9) / 4) == math.inf > noise.cumulant(math.nextafter((1.0 - 1e-9) / 4, 0.0))


def test_what_is_cached_cannot_be_changed() -> None:
    for found in skellam._ratios(9.0, 7)[:2]:
        assert not found.flags.writeable


def test_tails_are_probabilities_and_reaches_their_inverses() -> None:
    assert [cut_off(deviations) for deviations in (-1.0, 0.0, 0.5)] == [1.0, 1.0, 1.0]
    assert cut_off(3.0) == pytest.approx(2.0 * math.exp(-4.5), rel=1e-11)
    assert [reach_of(probability) for probability in (2.0, 1.0, cut_off(3.0))] == pytest.approx(
        [0.0, math.sqrt(2.0 * math.log(2.0)), 3.0]
    )
    assert skellam.truncation(1e6, 0) == 1.0
