"""Exact noise of a sum: its law, its grid, and the μ that is accounted for."""

from __future__ import annotations

import math
import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from threading import Event

import numpy as np
import pytest
import torch
from scipy.stats import kstest

from cpsgd.correlated.fine_draws import aliasing
from cpsgd.learning import sum_noise
from cpsgd.learning.sum_noise import POINTS, VARIATION, SumNoise, gaussian_mu
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import GRID_VARIATION, SMOOTHING


def test_noise_has_the_deviation_and_the_shape_of_a_gaussian() -> None:
    # The noise is secret: the test's own seed cannot fix it. Its false alarm rate is 1e-9 per check.
    noise = SumNoise(200_000).added(torch.zeros(200_000, dtype=torch.float64), 3.0).double().numpy()
    assert abs(noise.mean()) < 6.2 * 3.0 / math.sqrt(noise.size)
    assert abs(noise.var() / 9.0 - 1.0) < 6.2 * math.sqrt(2.0 / noise.size)
    assert kstest(noise / 3.0, "norm").pvalue > 1e-9


def test_sums_and_noise_are_integers_of_one_grid() -> None:
    sums = torch.linspace(-3e6, 3e6, 1000, dtype=torch.float64)
    found = SumNoise(1000).added(sums, POINTS).double().numpy()  # the grid's distance is 1
    assert np.array_equal(found, np.rint(found))
    # Low bits are filled: the noise is not on the coarser grid of the draw that is refined.
    assert len(np.unique(found % 512)) > 300


def test_no_draw_is_used_twice() -> None:
    noise, zero = SumNoise(50), torch.zeros(50, dtype=torch.float64)
    first, second = noise.added(zero, 1.0), noise.added(zero, 1.0)
    assert not torch.equal(first, second)


def test_threads_that_ask_at_once_get_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    # The same noise on two sums would tell their difference.
    zero, drawing, draw = torch.zeros(50, dtype=torch.float64), Event(), sum_noise._draw

    def waiting(out: np.ndarray) -> None:
        drawing.wait(20.0)
        draw(out)

    monkeypatch.setattr(sum_noise, "_draw", waiting)
    noise = SumNoise(50)
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(noise.added, zero, 1.0) for _ in range(2)]
        time.sleep(0.1)  # both wait for what is drawn
        drawing.set()
        first, second = (each.result() for each in asked)
    # One of 2,500 pairs is equal by chance in 3e-4 of all runs, two in 7e-8.
    assert np.intersect1d(first, second).size < 2


def test_threads_of_a_forked_child_begin_once(monkeypatch: pytest.MonkeyPatch) -> None:
    # Each with a lock of its own could take what the other one draws.
    noise, zero, begun = SumNoise(50), torch.zeros(50, dtype=torch.float64), []
    begin = noise._begin

    def slowly() -> None:
        begun.append(noise._process)
        time.sleep(0.1)
        begin()

    monkeypatch.setattr(noise, "_begin", slowly)
    noise._process = -1  # as a child finds it
    with ThreadPoolExecutor(2) as pool:
        asked = [pool.submit(noise.added, zero, 1.0) for _ in range(2)]
        first, second = (each.result() for each in asked)
    assert begun == [-1]
    assert np.intersect1d(first, second).size < 2


def test_a_forked_child_does_not_use_the_noise_that_its_parent_has_drawn() -> None:
    # The same noise on two sums would tell their difference.
    noise, zero = SumNoise(50), torch.zeros(50, dtype=torch.float64)
    for part in noise._next[1]:
        part.result()  # no thread works while the process is forked
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        try:
            os.write(writer, noise.added(zero, 1.0).numpy().tobytes())
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    theirs = np.frombuffer(os.read(reader, 10_000), np.float32)
    os.close(reader)
    os.close(writer)
    ours = noise.added(zero, 1.0).numpy()
    assert theirs.shape == ours.shape
    # One of 2,500 pairs is equal by chance in 3e-4 of all runs, two in 7e-8.
    assert np.intersect1d(theirs, ours).size < 2


def test_sums_that_are_far_too_large_are_cut_off() -> None:
    found = SumNoise(3).added(torch.tensor([1e300, -1e300, math.inf], dtype=torch.float64), 1.0)
    assert bool(torch.isfinite(found).all())
    assert float(found.abs().max()) <= (2.0**40 + 2.0**25) / POINTS


def test_the_accounted_mu_covers_the_division_before_rounding() -> None:
    # Just below half a point float division of large sums may round up: the two are further apart than a point more.
    assert 1e6 * (gaussian_mu(1.0, 4) - 1.0) >= 1e6 * 2.0 * (1.0 + 2.0**-12) / POINTS
    step, worst = 1.0 / POINTS, 0.0
    for number in range(2**40 - 3000, 2**40):
        for sign in (-1, 1):
            exact = (Fraction(number) + Fraction(sign, 2)) * Fraction(step)
            point = Fraction(float(exact) / step)
            worst = max(worst, float(abs(point - Fraction(float(exact)) / Fraction(step))))
    assert 0.0 < worst <= 2.0**-13


def test_the_accounted_mu_covers_rounding_to_the_grid() -> None:
    dim, multiplier, clip_norm = 10_000, 1.3, 0.5
    step = multiplier * clip_norm / POINTS
    generator = np.random.default_rng(0)
    for _ in range(200):
        one = generator.normal(size=dim)
        direction = generator.normal(size=dim)
        other = one + direction * clip_norm / np.linalg.norm(direction)
        apart = np.linalg.norm(np.rint(one / step) - np.rint(other / step)) / POINTS
        assert apart <= gaussian_mu(multiplier, dim)
    assert gaussian_mu(1.0, dim) < 1.0001
    assert VARIATION < 1e-29


def test_the_refined_draw_has_the_law_that_is_accounted_for() -> None:
    # In points of the finest grid: those of Z, made finer by 8 bits and by one.
    coarse = sum_noise._REFINED_RATIO * 256
    assert math.isclose(POINTS, math.sqrt((coarse * 512) ** 2 - 5.0), rel_tol=2e-12)
    assert coarse * 512 > POINTS
    # The fine part's deviation on a GPU is four points of the coarser grid, as the proof asks.
    assert 8 * 256 == 4 * 512
    assert math.isclose(coarse * 512, math.hypot(15 * 256 * 512, 8 * 256), rel_tol=1e-15)
    one = SMOOTHING + 4.0 * (fine_gaussian.farthest(sum_noise._REFINED_RATIO) + 1) * 2.0**-128 + GRID_VARIATION
    assert one + aliasing(coarse, 10) + aliasing(256 * coarse, 8) < VARIATION


def test_bytes_are_used_once(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = []

    class Kernel:
        def draw(self, keystream: np.ndarray, out: np.ndarray) -> None:
            assert len(keystream) == 55 * out.size
            taken.append(keystream.tobytes())
            out[:] = out.size

    monkeypatch.setattr(sum_noise, "_kernel", Kernel)
    monkeypatch.setattr(sum_noise, "_BLOCK", 20)
    out = np.zeros(50, dtype=np.int32)
    sum_noise._draw(out)
    assert out.tolist() == [20] * 40 + [10] * 10
    # Sixteen bytes that stand twice in 2,750 have a chance of 1e-32.
    everything = b"".join(taken)
    pieces = [everything[start : start + 16] for start in range(len(everything) - 15)]
    assert len(set(pieces)) == len(pieces)
