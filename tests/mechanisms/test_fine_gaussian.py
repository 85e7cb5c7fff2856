"""The sampler of fine Gaussian noise against the discrete Gaussian itself, with hundreds of digits."""

from __future__ import annotations

import itertools
import math
from decimal import Decimal, localcontext

import numpy as np
import pytest

from cpsgd.codec.rounding import CELL_BITS, UNIFORMS, WORKING_BITS
from cpsgd.correlated import fine_draws
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import CELL, LEAST_RATIO, SMOOTHING

DIGITS = 120
LAWS = [(LEAST_RATIO, UNIFORMS), (fine_draws.LEAST_RATIO, fine_draws.UNIFORMS)]


def masses_of_draws(weights: list[int], uniforms: int, cell: int) -> list[int]:
    """The law of a H + U_1 + ... + U_m in exact integers, from that of H, in units of the weights' over a^m."""
    found = [0] * ((len(weights) - 1) * cell + 1)
    found[::cell] = weights
    for _ in range(uniforms):
        sums = [0, *itertools.accumulate([*found, *[0] * (cell - 1)])]
        found = [above - sums[max(0, i + 1 - cell)] for i, above in enumerate(sums[1:])]
    return found


def total_variation(ratio: float, uniforms: int = UNIFORMS, drawn_for: int | None = None) -> float:
    """Between what is drawn and N_Z(0, a²r²), by adding up all outcomes; H may be that for other uniform numbers."""
    half = fine_gaussian._weights(ratio, drawn_for or uniforms)
    drawn = masses_of_draws([*half[:0:-1], *half], uniforms, CELL)
    # The first point of the upper half: zero, or one half where there is an odd number of odd means.
    middle, first = len(drawn) // 2, 0.5 * (1 - len(drawn) % 2)
    with localcontext() as context:
        context.prec = DIGITS
        power = (Decimal(-1) / (2 * (Decimal(ratio) * CELL) ** 2)).exp()
        square, gauss = power * power, [power ** Decimal(first * first)]
        power **= 1 + int(2 * first)
        for _ in range(len(drawn) - middle - 1):
            gauss.append(gauss[-1] * power)
            power *= square
        own = [Decimal(1) if first else Decimal("0.5"), *[Decimal(1)] * (len(gauss) - 1)]
        total = 2 * sum(share * mass for share, mass in zip(own, gauss, strict=True))
        unit = Decimal(2) ** WORKING_BITS * Decimal(CELL) ** uniforms
        apart = [
            share * abs(mass / total - drawn[middle + i] / unit)
            for i, (share, mass) in enumerate(zip(own, gauss, strict=True))
        ]
        # What lies further out than any draw is missing from both sums: the draws' part was never kept.
        return float(sum(apart)) + 2.0**-125


@pytest.mark.parametrize(("ratio", "uniforms"), LAWS)
def test_draws_are_as_close_to_the_gaussian_as_said(ratio: float, uniforms: int) -> None:
    assert total_variation(ratio, uniforms) <= SMOOTHING


@pytest.mark.parametrize(("ratio", "uniforms"), LAWS)
def test_the_bound_on_the_distance_holds_for_every_ratio(ratio: float, uniforms: int) -> None:
    # In every cell of t all factors at their worst end; 2 signs of k and of t; 1/a from frequencies to t.
    ends = np.linspace(0.0, 0.5, 4001)
    near, far = ends[:-1], ends[1:]
    top = uniforms * np.log(np.sin(math.pi * far / CELL)) - 2.0 * (math.pi * ratio * near) ** 2
    logs = [
        np.logaddexp.reduce(top - uniforms * np.log(np.sin(math.pi * (k - far) / CELL)))
        for k in range(1, CELL // 2 + 1)
    ]
    error = 4.0 * math.exp(np.logaddexp.reduce(logs)) * (0.5 / 4000) / CELL
    # The error of a mass falls with the ratio, and the points that matter grow with it, to twice as many.
    points = 2 * 14 * 2 * ratio * CELL + 1
    assert points * error + 2.0 * math.exp(-0.5 * 14.0**2) < SMOOTHING


def test_two_uniform_numbers_fewer_are_noticed() -> None:
    # The weights are those for 28 uniform numbers; a variance of two cells in 768 is missing.
    assert total_variation(LEAST_RATIO, UNIFORMS - 2, UNIFORMS) > 1e-4


@pytest.mark.parametrize(
    ("ratio", "uniforms"), [*LAWS, *((ratio, UNIFORMS) for ratio in (9.7, 12.0, 15.99)), (127.9, 15)]
)
def test_the_weights_are_a_law(ratio: float, uniforms: int) -> None:
    half = fine_gaussian._weights(ratio, uniforms)
    assert all(weight > 0 for weight in half)
    assert all(first > second for first, second in itertools.pairwise(half))
    total = half[0] + 2 * sum(half[1:])
    assert 0 <= (1 << WORKING_BITS) - total < 1 << (WORKING_BITS - 130)
    variance = 2.0 * sum(h * h * (weight / 2**WORKING_BITS) for h, weight in enumerate(half))
    assert variance == pytest.approx(ratio**2 - uniforms * (1.0 - 4.0**-CELL_BITS) / 12.0, rel=1e-12)


@pytest.mark.parametrize("ratio", [64.0, 101.3])
def test_magnitudes_have_the_law_of_both_signs(ratio: float) -> None:
    first, *others = fine_gaussian._weights(ratio, 15)
    table, total = fine_gaussian.magnitudes(ratio, 15), first + 2 * sum(others)
    assert len(table.high) == len(others) == fine_gaussian.farthest(ratio) < 1 << 11
    reached = first
    for high, low, weight in zip(table.high, table.low, others, strict=True):
        assert int(high) << 64 | int(low) == min((reached << 128) // total, 2**128 - 1)
        reached += 2 * weight


def test_what_a_shorter_table_leaves_out_goes_to_its_ends() -> None:
    whole = fine_gaussian.table(LEAST_RATIO, fine_gaussian.farthest(LEAST_RATIO))
    short = fine_gaussian.table(LEAST_RATIO, 40)
    assert len(short.high) == 80
    cut = len(whole.high) // 2 - 40
    assert np.array_equal(short.high, whole.high[cut:-cut])


def test_a_discrete_gaussian_is_a_rounding_of_a_continuous_one() -> None:
    # N(0, v - c) and then N_Z with parameter c around it, for a small c where the distance shows.
    variance, points = 30.0, np.arange(-60, 61)
    for part, bound in ((0.3, 2.2 * math.exp(-2.0 * math.pi**2 * 0.3)), (1.2, 1e-9)):
        places = np.arange(-60.0, 60.0, 1.0 / 64)
        density = np.exp(-0.5 * places**2 / (variance - part))
        kernel = np.exp(-0.5 * (points - places[:, None]) ** 2 / part)
        kernel /= kernel.sum(axis=1, keepdims=True)
        law = density @ kernel
        gauss = np.exp(-0.5 * points**2 / variance)
        distance = 0.5 * np.abs(law / law.sum() - gauss / gauss.sum()).sum()
        assert distance <= bound
    # Five squared points.
    assert fine_gaussian.GRID_VARIANCE == 5.0
    assert fine_gaussian.GRID_VARIATION / math.exp(-10.0 * math.pi**2) == pytest.approx(2.2, rel=1e-9)
