from __future__ import annotations

import itertools
import math

import dp_accounting
import mpmath
import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.privacy import lattice_sensitivity, renyi_certificate
from cpsgd.privacy.renyi import Moments, rdp_epsilon, renyi_floor
from cpsgd.protocol import Protocol

from . import checks

# k, m and ε of the reference (27 orders from 1.25 to 256), at n = 10^4, d = 65,536, δ = 1e-9 and the paper's range.
TABLE = [
    (2, 1, 2.397, 2.271),
    (2, 6, 0.938, 0.884),
    (2, 16, 0.562, 0.530),
    (4, 64, 0.855, 0.809),
    (8, 256, 1.008, 0.951),
]


@pytest.mark.parametrize(("levels", "trials", "reference", "gaussian"), TABLE)
def test_table(levels: int, trials: int, reference: float, gaussian: float) -> None:
    protocol = Protocol.rotated_binomial(
        clients=10_000, dim=65_536, clip_norm=1.0, levels=levels, trials=trials, delta=1e-9
    )
    found = renyi_certificate(
        noise_trials=10_000 * trials,
        p=0.5,
        dim=65_536,
        sensitivity=lattice_sensitivity(protocol, "replace-one"),
        levels=levels,
        delta=1e-9,
    )
    # A finer choice of orders and no charge for the clamping bring it slightly under the reference.
    assert 0.993 * reference < found.epsilon < reference + 5e-4
    assert found.epsilon > gaussian
    assert found.tail_mass < 1e-11


def test_kappa_against_mpmath() -> None:
    assert checks.wrong_moments() == []


def test_conversion_of_a_gaussian() -> None:
    assert checks.wrong_conversions() == []


@pytest.mark.parametrize(("order", "divergence", "delta"), [(1.5, 0.3, 1e-5), (8.0, 0.5, 1e-6), (60.0, 2.0, 1e-9)])
def test_conversion_agrees_with_dp_accounting(order: float, divergence: float, delta: float) -> None:
    theirs, _ = rdp_privacy_accountant.compute_epsilon([order], [divergence], delta)
    assert rdp_epsilon(divergence, order, delta) == pytest.approx(theirs, rel=1e-9)


def test_gaussian_limit_agrees_with_dp_accounting() -> None:
    # With much noise and a step small against it, the moments are those of a Gaussian.
    moments = Moments(noise_trials=10**7, p=0.5, dim=1, sensitivity=1.0, levels=2, tail=1e-12)
    event = dp_accounting.GaussianDpEvent(math.sqrt(10**7) / 2)
    orders = [2.0, 10.0, 50.0]
    accountant = rdp_privacy_accountant.RdpAccountant(orders)
    accountant.compose(event)
    for order, rdp in zip(orders, accountant._rdp, strict=True):
        assert rdp < moments.kappa(order) < rdp * 1.001


@pytest.mark.parametrize("p", [0.5, 0.3])
def test_more_noise_a_larger_delta_and_less_distance_never_hurt(p: float) -> None:
    def epsilon(noise_trials: int = 3_000, sensitivity: float = 1.5, delta: float = 1e-6) -> float:
        return renyi_certificate(
            noise_trials=noise_trials, p=p, dim=20, sensitivity=sensitivity, levels=3, delta=delta
        ).epsilon

    # The order is searched and κ is only bounded, both to within a few 1e-5.
    def decreases(values: list[float]) -> bool:
        return all(b <= a * (1 + 5e-5) for a, b in itertools.pairwise(values))

    assert decreases([epsilon(noise_trials=n) for n in (1_000, 1_500, 3_000, 3_100, 9_000)])
    assert decreases([epsilon(delta=d) for d in (1e-10, 1e-7, 2e-7, 1e-4)])
    assert decreases([epsilon(sensitivity=s) for s in (3.0, 2.0, 1.9, 1.0, 0.5)])


def test_mirrored_noise_is_as_good() -> None:
    one, other = (
        Moments(noise_trials=800, p=p, dim=1, sensitivity=2.5, levels=5, tail=1e-6).kappa(7.0) for p in (0.2, 0.8)
    )
    assert one == pytest.approx(other, rel=1e-6)


def test_floor_is_below() -> None:
    for trials, p in [(500, 0.5), (2_000, 0.1)]:
        found = renyi_certificate(noise_trials=trials, p=p, dim=2, sensitivity=2.0, levels=3, delta=1e-6).epsilon
        floor = renyi_floor(2.0**2 / (2 * trials * p * (1 - p)), 1e-6)
        assert 0.8 * found < floor < found


def test_orders_out_of_range() -> None:
    moments = Moments(noise_trials=500, p=0.5, dim=1, sensitivity=1.0, levels=2, tail=1e-9)
    assert math.isfinite(moments.kappa(moments.largest_order))
    for order in (1.0, 1.01 * moments.largest_order, math.nan):
        with pytest.raises(ParameterError, match="order"):
            moments.kappa(order)


def test_a_tiny_distance_wants_a_large_order() -> None:
    found = renyi_certificate(noise_trials=84, p=0.3, dim=1, sensitivity=0.01, levels=5, delta=1e-5)
    assert found.epsilon < 0.05


def test_refusals() -> None:
    with pytest.raises(ConditionError, match="must stay inside"):
        renyi_certificate(noise_trials=20, p=0.5, dim=10, sensitivity=1.0, levels=2, delta=1e-9)
    with pytest.raises(ConditionError, match="what one client can change is too large"):
        renyi_certificate(noise_trials=200, p=0.5, dim=1, sensitivity=40.0, levels=41, delta=0.1)
    with pytest.raises(ConditionError, match="not attempted"):
        renyi_certificate(noise_trials=10**8, p=0.5, dim=10, sensitivity=1e3, levels=256, delta=1e-9)


def test_numpy_is_as_accurate_as_assumed() -> None:
    # Two units in the last place, over the range of likelihood ratios and powers that occurs.
    rng = np.random.default_rng(5)
    small = np.concatenate([rng.uniform(-0.9, 4.0, 300), rng.uniform(-1, 1, 300) * 10.0 ** rng.uniform(-12, -1, 300)])
    large = np.concatenate([small, rng.uniform(-600.0, 600.0, 300)])
    with mpmath.workdps(40):
        for ours, exact, points in (
            (np.log1p, mpmath.log1p, small),
            (np.expm1, mpmath.expm1, large),
            (np.exp, mpmath.exp, large),
        ):
            for x, found in zip(points, ours(points), strict=True):
                assert abs(mpmath.mpf(float(found)) / exact(mpmath.mpf(float(x))) - 1) <= 2 * 2.0**-52
