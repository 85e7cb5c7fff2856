"""Biased coins: exact odds, the error they promise, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pack, pipeline, wire
from cpsgd.codec.rounding import COINS, Rounder
from cpsgd.errors import ParameterError
from cpsgd.mechanisms import Binomial, Coins, Mechanism
from cpsgd.mechanisms.coins import MAX_COINS
from cpsgd.mechanisms.interface import Search
from cpsgd.mechanisms.law import Steps
from cpsgd.planner import modulus
from cpsgd.randomness import Keystream

# Five standard errors on both sides are 6e-7.
ERRORS = 5.0
ONE = Coins(coins=1, theta=0.125, coordinate_range=0.1)


def protocol_of(mechanism: Mechanism = ONE, **changes: Any) -> Protocol:
    shared: dict[str, Any] = {"clients": 40, "dim": 1000, "clip_norm": 1.0, "rotate": True}
    return Protocol(**{**shared, **changes}, mechanism=mechanism)


def search(fits: Callable[[Mechanism], bool] = lambda _: True, **changes: Any) -> Search:
    """A search whose rough scale is that of a Gaussian with μ = 0.5."""
    shared: dict[str, Any] = {"values": 4, "honest": 1000, "variation": 0.0, "dim": 10_000, "clip_norm": 2.0}
    given = {**shared, "rotate": True, **changes}

    def rough_scale(mechanism: Mechanism) -> float:
        return 2.0 * float(given["clip_norm"]) / 0.5 / math.sqrt(given["honest"] * mechanism.noise.variance)

    return Search(**given, rough_scale=rough_scale, fits=fits)


# ---------------------------------------------------------------------- parameters


def test_theta_is_rounded_down_to_what_sixteen_bits_can_say() -> None:
    assert Coins(coins=1, theta=0.1, coordinate_range=1.0).theta == 6553 / 2**16
    assert Coins(coins=1, theta=2.0**-16, coordinate_range=1.0).theta == 2.0**-16
    most = 0.5 - 2.0**-16
    assert Coins(coins=1, theta=most, coordinate_range=1.0).theta == most
    assert json.loads(protocol_of(Coins(coins=1, theta=0.1, coordinate_range=1.0)).to_json())["theta"] == 6553 / 2**16


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"theta": 0.0}, r"theta in \[2\^-16, 0.499985\], got theta=0.0; it is a multiple of 2\^-16"),
        ({"theta": 0.9 * 2.0**-16}, "theta in"),
        ({"theta": 0.5}, "theta in"),
        ({"theta": -0.1}, "theta in"),
        ({"theta": math.nan}, "finite theta"),
        ({"theta": "0.1"}, "theta to be a number"),
        ({"coins": 0}, r"coins in \[1, 4096\], got coins=0"),
        ({"coins": MAX_COINS + 1}, "coins in"),
        ({"coins": 1.5}, "coins to be an integer"),
        ({"coordinate_range": 0.0}, "coordinate_range in"),
        ({"coordinate_range": 1e21}, "coordinate_range in"),
        ({"coordinate_range": math.inf}, "finite coordinate_range"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        replace(ONE, **changes)


def test_what_it_is_in_numbers() -> None:
    mechanism = Coins(coins=3, theta=0.125, coordinate_range=0.2)
    assert (mechanism.values, mechanism.centre, mechanism.keystream_bytes) == (4, 1.5, 6)
    assert mechanism.scale == 0.2 / (0.125 * 3)
    assert mechanism.grid.limit == 2**13
    assert mechanism.noise.law(10) == Steps(low=(0.625, 0.375), high=(0.375, 0.625), clients=10, copies=3)
    assert mechanism.noise.variance == 3 * (0.25 - 0.125**2)
    assert mechanism.without_noise() == Binomial(levels=4, trials=0, coordinate_range=0.2)
    assert mechanism.describe() == "3 coins of bias up to 0.125 in ±0.2"
    assert protocol_of(mechanism).bits_per_coordinate == 2.0
    assert protocol_of().message_bytes == 64 + 125


# ---------------------------------------------------------------------- messages


def test_one_coin_is_rounding_to_two_levels_with_a_narrower_clip() -> None:
    random = np.random.default_rng(1)
    points = random.uniform(-20_000, 20_000, 5000).astype(np.float32)
    words = random.integers(0, 2**16, 5000, dtype=np.uint16)
    heads, levels = np.empty(5000, np.uint32), np.empty(5000, np.uint32)
    ONE.kernel().values(points, (~words).view(np.uint8), heads)
    rounder = Rounder(2, 16, 0, COINS.high, COINS.low, 0)
    clipped = np.clip(points, -ONE.grid.limit, ONE.grid.limit)
    rounder.values(clipped, words.astype(np.uint32).view(np.uint8), levels)
    np.testing.assert_array_equal(heads, levels)


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 3000),
    coins=st.integers(1, 40),
    theta=st.floats(2.0**-16, 0.49),
    modulus_=st.none() | st.integers(41, 2000),
    seed=st.integers(0, 2**32),
)
def test_a_message_holds_the_heads(dim: int, coins: int, theta: float, modulus_: int | None, seed: int) -> None:
    mechanism = Coins(coins=coins, theta=theta, coordinate_range=0.1)
    protocol = protocol_of(mechanism, dim=dim, modulus=modulus_)
    vector = np.random.default_rng(seed).standard_normal(dim)
    message = pipeline.encode(protocol, vector, 3, Keystream(bytes(16)))
    integers = pipeline.integers(protocol, vector, 3, Keystream(bytes(16)))
    parsed = wire.read(message)
    assert (parsed.version, len(message)) == (1, protocol.message_bytes)
    np.testing.assert_array_equal(pack.backward(parsed.payload, dim, protocol.radix), integers)
    assert int(integers.max()) <= coins
    aggregator = Aggregator(protocol, 3)
    aggregator.add(message)
    np.testing.assert_array_equal(aggregator.sums, integers)


def test_sums_under_a_modulus_decode_to_the_mean() -> None:
    mechanism = Coins(coins=3, theta=0.1, coordinate_range=0.2)
    shared = {"clients": 200, "dim": 256, "clip_norm": 1.0}
    smallest = modulus.smallest_modulus(mechanism, **shared)  # type: ignore[arg-type]
    assert smallest < 200 * 3  # less than what sums can be
    protocol = Protocol(**shared, mechanism=mechanism, modulus=smallest)  # type: ignore[arg-type]
    vector = np.eye(256)[3]
    sums = sum(protocol.encode_integers(vector, 5).astype(np.uint64) for _ in range(200))
    whole = protocol_of(mechanism, **shared)
    expected = whole.decode_sum(sums, 200, 5)
    np.testing.assert_array_equal(protocol.decode_sum(sums % np.uint64(smallest), 200, 5), expected)


# ---------------------------------------------------------------------- error


def test_the_error_is_exactly_what_the_formula_says() -> None:
    # Without rotation or clipping: d X²/(4 θ² n m) - Σ ‖x_i‖²/(n² m).
    mechanism = Coins(coins=3, theta=0.125, coordinate_range=1.0)
    protocol = protocol_of(mechanism, dim=50, rotate=False)
    vectors = np.random.default_rng(2).uniform(-0.1, 0.1, (40, 50))
    found = protocol.expected_squared_error(vectors, round=0)
    exact = 50 / (4 * 0.125**2 * 40 * 3) - float(np.sum(vectors**2)) / (40**2 * 3)
    assert found.noise + found.rounding == pytest.approx(exact, rel=1e-6)  # but for the grid
    assert found.clipping < 1e-8
    # Of all vectors of norm D the prediction takes those: Σ ‖x_i‖² = n D².
    predicted = mechanism.predicted_error(clients=40, dim=50, clip_norm=1.0, rotate=False)
    assert predicted.noise + predicted.rounding == pytest.approx(50 / (4 * 0.125**2 * 120) - 1 / 120, rel=1e-12)


# ---------------------------------------------------------------------- planning


@pytest.mark.parametrize("coins", [1, 3, 200])
@pytest.mark.parametrize("factor", [1e-3, 0.5, 0.999, 1.001, 7.0, 1e6])
def test_another_scale_is_met_exactly_and_the_range_hardly_moves(coins: int, factor: float) -> None:
    mechanism = Coins(coins=coins, theta=0.1, coordinate_range=0.3)
    changed = mechanism.with_scale(factor * mechanism.scale)
    assert changed.scale == pytest.approx(factor * mechanism.scale, rel=1e-14)
    if 0.21 < factor < 6000:
        step = 1 / changed.grid.limit
        assert changed.coordinate_range == pytest.approx(0.3, rel=0.51 * step)
    again = changed.with_scale(changed.scale * (1 + 1e-9)).with_scale(changed.scale)
    assert again.theta == changed.theta
    assert again.coordinate_range == pytest.approx(changed.coordinate_range, rel=1e-12)


def test_candidates_fill_the_values_at_several_ranges() -> None:
    found = list(Coins.candidates(search()))
    deviation = 2.0 / 100
    assert {mechanism.coins for mechanism in found} == {3}
    reaches = [mechanism.coordinate_range / deviation for mechanism in found]
    assert reaches == sorted(reaches)
    assert reaches[0] == pytest.approx(2.5, rel=0.01)
    assert reaches[-1] == pytest.approx(7.0, rel=0.01)
    for mechanism in found:  # at the rough scale already
        assert search().rough_scale(mechanism) == pytest.approx(mechanism.scale, rel=1e-3)


def test_candidates_without_rotation_never_clip() -> None:
    (found,) = Coins.candidates(search(rotate=False, dim=50))
    assert found.coordinate_range == pytest.approx(2.0, rel=1e-3)
    least, _ = found.useful_scales(dim=50, clip_norm=2.0, rotate=False)
    assert found.with_scale(least).coordinate_range >= 2.0 * (1 - 1e-12)


def test_candidates_have_fewer_coins_where_sums_must_fit() -> None:
    found = list(Coins.candidates(search(lambda mechanism: mechanism.values <= 18, values=256)))
    assert {mechanism.coins for mechanism in found} == {17}
    none = list(Coins.candidates(search(lambda _: False, values=256)))
    assert {mechanism.coins for mechanism in none} == {1}
    assert list(Coins.candidates(search(values=1))) == []
    most = list(Coins.candidates(search(values=2**20)))
    assert {mechanism.coins for mechanism in most} == {255}


def test_coins_that_are_hardly_private_stay_below_certainty() -> None:
    # So few clients that the rough scale asks for more than a coin can be tilted.
    for mechanism in Coins.candidates(search(honest=10**9)):
        assert 0.4 < mechanism.theta < 0.5


@pytest.mark.parametrize("dim", [1, 3, 10_000])
def test_the_usual_parameters_make_a_protocol(dim: int) -> None:
    for rotate in (True, False):
        usual = Coins.usual(clients=10, dim=dim, clip_norm=2.0, rotate=rotate, delta=1e-9)
        assert usual["coordinate_range"] <= 2.0
        protocol = protocol_of(Coins(**usual), dim=dim, clip_norm=2.0, rotate=rotate)
        assert protocol.bits_per_coordinate == 1.0


def test_the_error_counts_a_coarse_grid() -> None:
    # Two grid points on either side of zero: most coordinates of a vector vanish, and the prediction must not be less.
    mechanism = Coins(coins=1, theta=2 * 2.0**-16, coordinate_range=0.3)
    protocol = protocol_of(mechanism)
    vector = np.random.default_rng(5).standard_normal(1000)
    vector /= np.linalg.norm(vector)
    measured = protocol.expected_squared_error([vector] * 40, 0)
    predicted = mechanism.predicted_error(clients=40, dim=1000, clip_norm=1.0, rotate=True)
    assert predicted.clipping >= measured.clipping > 0.5


@pytest.mark.parametrize("coins", [1, 4])
@pytest.mark.parametrize("theta", [0.01, 0.3])
def test_clipping_is_as_bad_as_for_levels(coins: int, theta: float) -> None:
    mechanism = Coins(coins=coins, theta=theta, coordinate_range=0.06)
    lattice = Binomial(levels=2, trials=1, coordinate_range=0.06)
    shared = {"clients": 40, "dim": 1000, "clip_norm": 1.0}
    for rotate in (True, False):
        mine = mechanism.predicted_error(**shared, rotate=rotate)  # type: ignore[arg-type]
        other = lattice.predicted_error(**shared, rotate=rotate)  # type: ignore[arg-type]
        assert mine.clipping == pytest.approx(other.clipping, rel=1e-2)
