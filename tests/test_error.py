"""What is promised about the error, against what is measured."""

from __future__ import annotations

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol
from cpsgd.errors import ConditionError, EmptyError

pytestmark = pytest.mark.usefixtures("fixed_seed")


def measured(protocol: Protocol, vectors: np.ndarray, repeats: int, round: int = 0) -> tuple[float, np.ndarray]:
    """Mean squared error of the mean over repetitions, and the mean of the estimates."""
    truth = vectors.astype(np.float64).mean(axis=0)
    total, estimates = 0.0, np.zeros(protocol.dim)
    for _ in range(repeats):
        aggregator = Aggregator(protocol, round)
        for vector in vectors:
            aggregator.add(protocol.encode(vector, round))
        estimate = aggregator.mean().astype(np.float64)
        estimates += estimate
        total += float(np.sum((estimate - truth) ** 2))
    return total / repeats, estimates / repeats


def unit_rows(clients: int, dim: int, seed: int = 0) -> np.ndarray:
    rows = np.random.default_rng([clients, dim, seed]).standard_normal((clients, dim))
    return np.asarray(rows / np.linalg.norm(rows, axis=1, keepdims=True))


# clients, dim, levels, trials, p, rotated
SETTINGS = [
    (1, 5000, 2, 14, 0.5, True),
    (7, 3000, 3, 0, 0.5, True),
    (20, 1024, 5, 11, 0.3, True),
    (4, 2000, 16, 300, 0.5, False),
    (10, 1500, 100, 28, 0.9, False),
]


@pytest.mark.parametrize(("clients", "dim", "levels", "trials", "p", "rotated"), SETTINGS)
def test_measured_error_is_the_expected_one_and_below_the_bound(
    clients: int, dim: int, levels: int, trials: int, p: float, rotated: bool
) -> None:
    build = Protocol.rotated_binomial if rotated else Protocol.binomial
    protocol = build(clients=clients, dim=dim, clip_norm=1.0, levels=levels, trials=trials, p=p)
    vectors = unit_rows(clients, dim)
    # A squared error is a sum of `dim` independent squares, each of relative variance at most about 2 (a normal's; less
    # for the rest), so that over R repetitions its relative deviation is √(2/(R dim)): 0.0036, and 0.02 is 5.5 of them.
    error, _ = measured(protocol, vectors, repeats=-(-160_000 // dim))
    expected = protocol.expected_squared_error(vectors, 0)
    assert error == pytest.approx(expected.total, rel=0.02)
    assert expected.total <= protocol.error_bound().squared_error
    assert error <= protocol.error_bound().squared_error


def test_the_estimate_is_unbiased() -> None:
    protocol = Protocol.rotated_binomial(clients=3, dim=200, clip_norm=1.0, levels=3, trials=5, p=0.3)
    vectors, repeats = unit_rows(3, 200) * 0.9, 3000
    expected = protocol.expected_squared_error(vectors, 0)
    _, estimate = measured(protocol, vectors, repeats)
    # The mean of R estimates is off by a sum of 200 squares with mean expected/R; 1.7 times that is 5 deviations away.
    off = float(np.sum((estimate - vectors.mean(axis=0)) ** 2))
    assert off < 1.7 * expected.total / repeats
    assert expected.clipping < 1e-9


def test_clipping_is_part_of_the_expectation() -> None:
    protocol = Protocol.rotated_binomial(clients=2, dim=2000, clip_norm=1.0, levels=4, trials=3, coordinate_range=0.02)
    vectors = 3.0 * unit_rows(2, 2000)
    expected = protocol.expected_squared_error(vectors, 0)
    assert expected.clipping > 0.5
    error, _ = measured(protocol, vectors, repeats=80)
    assert error == pytest.approx(expected.total, rel=0.02)


def test_the_gaussian_protocol() -> None:
    protocol = Protocol.gaussian(clients=5, dim=4000, clip_norm=1.0, sigma=0.3)
    vectors = 2.0 * unit_rows(5, 4000)
    error, _ = measured(protocol, vectors, repeats=40)
    expected = protocol.expected_squared_error(vectors, 0)
    assert error == pytest.approx(expected.total, rel=0.02)
    assert expected.noise == protocol.error_bound().squared_error == pytest.approx(4000 * 0.09 / 5)
    # Half of every vector is clipped off.
    assert expected.clipping == pytest.approx(float(np.sum(vectors.mean(axis=0) ** 2)) / 4, rel=1e-5)


@pytest.mark.parametrize("dim", [1024, 4096])
def test_rotation_cuts_the_error_of_unit_vectors_by_the_factor_of_theory(dim: int) -> None:
    # Quantization alone, k = 2. Unrotated, X = D: every zero coordinate costs s²/4 with s = 2D, in all (d - 1) D².
    # Rotated, all coordinates are ±D/√d: each costs s² f(1-f) = X² - D²/d, in all d X² - D².
    unit = np.zeros((1, dim))
    unit[0, 17] = 1.0
    plain = Protocol.binomial(clients=1, dim=dim, clip_norm=1.0, levels=2, trials=0)
    rotated = Protocol.rotated_binomial(clients=1, dim=dim, clip_norm=1.0, levels=2, trials=0)
    # s = 2 X for two levels.
    factor = (dim - 1) / (dim * (rotated.scale / 2) ** 2 - 1)
    assert factor > 6
    repeats = 250_000 // dim
    ratio = measured(plain, unit, repeats)[0] / measured(rotated, unit, repeats)[0]
    assert ratio == pytest.approx(factor, rel=0.02)


def test_bounds_cite_their_theorems_and_say_when_they_do_not_apply() -> None:
    common = {"clients": 10, "dim": 100, "clip_norm": 1.0, "levels": 4, "trials": 8}
    plain = Protocol.binomial(**common)
    # Theorem 3 by hand: d D²/(n (k-1)²) (1 + 4 m p (1-p)) = 100/(10·9)·(1 + 8).
    assert plain.error_bound().squared_error == pytest.approx(10.0, rel=1e-6)
    assert "Theorem 3" in plain.error_bound().theorem
    rotated = Protocol.rotated_binomial(**common, delta=1e-6)
    # Theorem 4 with the constants of Theorem 3: 4 log(2nd/δ) D² (1 + 4 m p (1-p))/(n (k-1)²) + D² δ.
    by_hand = 4 * np.log(2 * 10 * 100 / 1e-6) * 9 / 90 + 1e-6
    assert rotated.error_bound().squared_error == pytest.approx(by_hand, rel=1e-6)
    likely_bad = Protocol.rotated_binomial(**{**common, "trials": 0, "levels": 1000}, delta=0.5)
    assert likely_bad.error_bound().squared_error == pytest.approx(0.5, rel=0.01)
    assert "Theorem 4" in rotated.error_bound().theorem
    with pytest.raises(ConditionError, match="coordinate_range"):
        Protocol.binomial(**common, coordinate_range=0.5).error_bound()
    with pytest.raises(ConditionError, match="coordinate_range"):
        Protocol.rotated_binomial(**common, coordinate_range=0.1).error_bound()


def test_no_vectors() -> None:
    with pytest.raises(EmptyError):
        Protocol.gaussian(clients=1, dim=3, clip_norm=1.0, sigma=1.0).expected_squared_error([], 0)


def test_the_bound_covers_the_codec_itself() -> None:
    # So fine a lattice that the margin of clipping is all the error there is.
    protocol = Protocol.binomial(clients=1000, dim=1, clip_norm=1.0, levels=65_536, trials=0)
    assert protocol.expected_squared_error([[1.0]] * 1000, 0).total <= protocol.error_bound().squared_error
