"""What mechanisms tell a device about their rounding, against their own kernels."""

from __future__ import annotations

import numpy as np
import pytest

from cpsgd.mechanisms import Binomial, Coins, Gaussian, Mechanism, RoundedGaussian, SampledCoins, Skellam
from cpsgd.randomness import Keystream

DRAWS = 40_000

ROUNDED: dict[str, Mechanism] = {
    "binomial": Binomial(levels=5, trials=9, coordinate_range=2.0),
    "many levels": Binomial(levels=2**20, trials=1, coordinate_range=2.0),
    "skellam": Skellam(levels=4, variance=3.0, noise_limit=40, coordinate_range=2.0),
    "one coin": Coins(coins=1, theta=0.1, coordinate_range=2.0),
    "coins": Coins(coins=100, theta=0.05, coordinate_range=2.0),
    "widest coin": Coins(coins=1, theta=0.49998, coordinate_range=2.0),
    "sampled coins": SampledCoins(rate=0.05, theta=0.5, coordinate_range=2.0),
}


@pytest.mark.parametrize("mechanism", ROUNDED.values(), ids=ROUNDED)
def test_a_device_rounds_as_the_kernel_does(mechanism: Mechanism) -> None:
    rounding, grid = mechanism.device_rounding(), mechanism.grid
    part = mechanism.without_noise() if mechanism.noise.separate else mechanism
    assert rounding is not None
    assert grid is not None
    assert (rounding.limit, rounding.fraction_bits) == (grid.limit, grid.fraction_bits)
    assert rounding.largest == part.values - 1
    for point in (-rounding.limit, -rounding.limit // 3, 0, rounding.limit // 2, rounding.limit):
        keystream = Keystream(bytes(16)).take(DRAWS * part.keystream_bytes)
        values = np.empty(DRAWS, dtype=np.uint32)
        part.kernel().values(np.full(DRAWS, point, dtype=np.float32), keystream, values)
        draw = (point + rounding.offset) / 2**rounding.fraction_bits
        expected = draw * (rounding.coins or 1)
        if rounding.rate is not None:
            expected = 1.0 + rounding.rate / 2**16 * (2.0 * draw - 1.0)
        # Six deviations of a mean, and a dozen where next to none are expected, are a false alarm in 1e-8.
        assert values.mean() == pytest.approx(expected, abs=6 * float(values.std()) / DRAWS**0.5 + 12 / DRAWS)


def test_floats_are_not_rounded() -> None:
    assert Gaussian(sigma=1.0).device_rounding() is None


def test_noise_before_rounding_leaves_grid_points_as_they_are() -> None:
    mechanism = RoundedGaussian(noise_deviation=1.5, step=0.5, window=30, coordinate_range=2.0)
    rounding = mechanism.device_rounding()
    assert (rounding.limit, rounding.offset, rounding.fraction_bits) == (8192, 8192, 0)
    assert rounding.largest == 2 * 8192
