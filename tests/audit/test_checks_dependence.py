"""Noise that is used twice is found, wherever it comes back."""

from __future__ import annotations

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.audit import checks
from cpsgd.audit.checks import Played
from cpsgd.audit.sum_law import SumLaw

FALSE_ALARM = 1e-6


def law(dim: int) -> SumLaw:
    protocol = Protocol.binomial(clients=1, dim=dim, clip_norm=1.0, levels=4, trials=100)
    return SumLaw(protocol, [(np.full(dim, 1.0), 1)])


def honest(rounds: int, dim: int = 16, seed: int = 1) -> np.ndarray:
    return 1.0 + np.random.default_rng(seed).binomial(100, 0.5, size=(rounds, dim))


def batch(exact: np.ndarray) -> Played:
    return Played("test", law(exact.shape[1]), 0.0, exact, np.arange(len(exact)))


def uniform(exact: np.ndarray) -> np.ndarray:
    played = batch(exact)
    return played.law.uniform(played.sums, np.random.default_rng(2))


def test_dependent_coordinates_are_found() -> None:
    exact = honest(1_000)
    assert checks.coordinates(uniform(exact), FALSE_ALARM).passed
    exact[:, 6] = exact[:, 1]
    assert not checks.coordinates(uniform(exact), FALSE_ALARM).passed
    assert checks.coordinates(uniform(exact)[:, :1], FALSE_ALARM).limit is None


def test_rounds_are_put_in_order() -> None:
    first = Played("a", law(16), 0.0, honest(2), np.array([0, 3]))
    second = Played("b", law(16), 0.0, honest(2), np.array([1, 2]))
    ordered = checks.in_order([first, second], [np.array([[0.0], [3.0]]), np.array([[1.0], [2.0]])])
    assert ordered.ravel().tolist() == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("dim", [1, 2, 16])
@pytest.mark.parametrize("distance", [1, 2, 333])
def test_noise_that_comes_back_at_a_fixed_distance_is_found(dim: int, distance: int) -> None:
    exact = honest(2_000, dim)
    assert checks.rounds(uniform(exact), FALSE_ALARM).passed
    again = np.arange(2_000) // distance % 2 == 1
    exact[again] = exact[np.flatnonzero(again) - distance]
    assert not checks.rounds(uniform(exact), FALSE_ALARM).passed
    mirrored = exact.copy()
    mirrored[again] = 102.0 - mirrored[again]
    assert not checks.rounds(uniform(mirrored), FALSE_ALARM).passed


def test_noise_that_comes_back_in_other_coordinates_is_found() -> None:
    exact = honest(1_000)
    exact[1:, :8] = exact[:-1, 8:]
    assert checks.coordinates(uniform(exact), FALSE_ALARM).passed
    assert not checks.rounds(uniform(exact), FALSE_ALARM).passed


def test_noise_of_the_same_size_is_found_though_its_sign_is_fresh() -> None:
    exact = honest(2_000)
    signs = np.random.default_rng(5).choice([-1.0, 1.0], size=(2_000, 16))
    later = exact.copy()
    later[1::2] = 51.0 + signs[1::2] * np.abs(exact[::2] - 51.0)
    assert checks.coordinates(uniform(later), FALSE_ALARM).passed
    assert not checks.rounds(uniform(later), FALSE_ALARM).passed
    beside = exact.copy()
    beside[:, 6] = 51.0 + signs[:, 6] * np.abs(exact[:, 1] - 51.0)
    assert not checks.coordinates(uniform(beside), FALSE_ALARM).passed


def test_the_end_is_not_compared_with_the_beginning() -> None:
    exact = honest(500)
    exact[-1] = exact[0]
    assert checks.rounds(uniform(exact), FALSE_ALARM).passed


@pytest.mark.parametrize("again", [4, 5, 200, 290])
def test_one_round_that_comes_back_is_found_however_late(again: int) -> None:
    exact = honest(300)
    assert checks.repeats([batch(exact)], FALSE_ALARM).statistic == 0.0
    exact[again] = exact[3]
    assert not checks.repeats([batch(exact)], FALSE_ALARM).passed


@pytest.mark.parametrize(("dim", "keys"), [(1, 100), (2, 1_000), (3, 10_000)])
def test_few_keys_are_found_though_honest_rounds_repeat_too(dim: int, keys: int) -> None:
    exact = honest(4_000, dim)
    assert len(np.unique(exact, axis=0)) < 4_000
    assert checks.repeats([batch(exact)], FALSE_ALARM).passed
    reused = honest(keys, dim, seed=2)[np.random.default_rng(3).integers(keys, size=4_000)]
    assert not checks.repeats([batch(reused)], FALSE_ALARM).passed
    # The same, spread over several vectors.
    halves = [batch(reused[:2_000]), batch(reused[2_000:])]
    assert not checks.repeats(halves, FALSE_ALARM).passed


def test_sums_that_cannot_be_repeat_too() -> None:
    exact = honest(300)
    exact[[10, 40]] = 1e6
    assert not checks.repeats([batch(exact)], FALSE_ALARM).passed


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_false_alarms_of_repeats_are_as_rare_as_stated(dim: int) -> None:
    # With a true rate of 0.1, more than 65 of 300 have probability below 1e-9.
    played = [batch(honest(200, dim, seed)) for seed in range(300)]
    assert sum(not checks.repeats([one], 0.1).passed for one in played) <= 65
