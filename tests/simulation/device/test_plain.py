"""The plain kernels: random words, rotation, clipping, and the exact laws of their integers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.stats import binom

from cpsgd.codec import rotate
from cpsgd.mechanisms.interface import Rounding
from cpsgd.simulation import device_plain as plain

from .roundings import COIN, HALF, exact_coins, goodness_of_fit, keys_of, rounding_to

CPU = torch.device("cpu")


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def test_philox_gives_the_published_words() -> None:
    # Known answers of the authors' Random123 library for philox4x32-10.
    found = plain.philox(0xFFFFFFFFFFFFFFFF, numbers(0xFFFFFFFF), numbers(0xFFFFFFFF), 0xFFFFFFFF)
    other = plain.philox(0, numbers(0), numbers(0), 0)
    assert [int(word) for word in other] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert len({int(word) for word in found} | {int(word) for word in other}) == 8


def test_philox_depends_on_every_word() -> None:
    base = plain.philox(5, numbers(1), numbers(2), 3)
    for key, *counter in ((6, 1, 2, 3), (5 + 2**40, 1, 2, 3), (5, 0, 2, 3), (5, 1, 3, 3), (5, 1, 2, 4)):
        changed = plain.philox(key, numbers(counter[0]), numbers(counter[1]), counter[2])
        assert all(int(a) != int(b) for a, b in zip(base, changed, strict=True))


@pytest.mark.parametrize("dim", [1, 2, 3, 17, 64, 100, 1000, 4096, 5000])
def test_rotation_is_that_of_messages_bit_for_bit(dim: int) -> None:
    x = np.random.default_rng(dim).standard_normal((3, dim)).astype(np.float32)
    signs = rotate.signs(dim, 7, 11)
    rows = torch.from_numpy(np.pad(x, [(0, 0), (0, 5)]))[:, :dim]  # rows that do not follow each other
    plain.rotate(rows, torch.from_numpy(signs.copy()))
    for row, vector in zip(rows, x, strict=True):
        np.testing.assert_array_equal(row.numpy(), rotate.forward(vector, signs))
        plain.rotate_back(row, torch.from_numpy(signs.copy()))
        np.testing.assert_array_equal(row.numpy(), rotate.backward(rotate.forward(vector, signs), signs))


def test_scaling_clips_long_rows_and_silences_broken_ones() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0], [1.0, float("inf")], [3e16, 4e16], [3e30, 0.0]])
    plain.scale(rows, 1.0, 10.0)
    expected = torch.tensor([[6.0, 8.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("levels", [2, 3, 2**17, 2**24])
def test_rounding_goes_to_neighbouring_levels_with_the_right_probability(levels: int) -> None:
    rounding = rounding_to(levels)
    bits = rounding.fraction_bits
    clients, copies = 80, 500
    places = torch.tensor([0.0, 0.25, 0.9, levels - 1.0, levels + 3.0, -2.0, 0.5])
    grid = (places - (levels - 1) / 2) * 2.0**bits
    rows = grid.repeat_interleave(copies).repeat(clients, 1)
    sums = torch.zeros(copies * len(grid), dtype=torch.int64)
    plain.round_and_sum(rows, sums, keys=keys_of(CPU, 9), first=0, rounding=rounding)
    mean = sums.double().view(len(grid), copies).sum(dim=1) / (clients * copies)
    expected = places.clamp(0.0, levels - 1.0).double()
    # Where a level is hit nothing is random; elsewhere a mean of 40,000 has deviation at most 0.0025, and 6 are wide
    # enough for a false alarm in 1e-8. Levels of 2^24 leave 8 bits between them.
    tolerance = 0.015 + 2.0**-bits + float(levels) * 2.0**-24
    np.testing.assert_allclose(mean[1:3], expected[1:3], atol=tolerance)
    assert mean[[0, 3, 4, 5]].tolist() == expected[[0, 3, 4, 5]].tolist()


@pytest.mark.parametrize("rounding", [rounding_to(3), *COIN.values()], ids=["levels", *COIN])
def test_rounding_is_the_same_in_any_pieces(rounding: Rounding) -> None:
    rows = torch.randn(50, 150, generator=torch.Generator().manual_seed(1)) * 40_000
    whole, parts = torch.zeros(150, dtype=torch.int64), torch.zeros(150, dtype=torch.int64)
    plain.round_and_sum(rows, whole, keys=keys_of(CPU, 5), first=0, rounding=rounding)
    for start, end in ((0, 20), (20, 31), (31, 50)):
        plain.round_and_sum(rows[start:end], parts, keys=keys_of(CPU, 5), first=start, rounding=rounding)
    assert torch.equal(whole, parts)


def test_levels_are_rounded_as_before() -> None:
    # What the kernels give since random words are dealt out by slabs (0.2.0): a change that makes runs with a seed
    # differ from those of an earlier release should be meant.
    rows = torch.linspace(-70_000.0, 70_000.0, 9).repeat(5, 1)
    found = {}
    for levels in (2, 3, 2**24):
        sums = torch.zeros(9, dtype=torch.int64)
        plain.round_and_sum(rows, sums, keys=keys_of(CPU, 2**62 + 12345), first=7, rounding=rounding_to(levels))
        found[levels] = sums.tolist()
    assert found == {
        2: [0, 0, 0, 1, 1, 5, 5, 5, 5],
        3: [0, 1, 3, 2, 5, 7, 8, 8, 10],
        16777216: [41941670, 41942013, 41942354, 41942696, 41943036, 41943380, 41943722, 41944063, 41944405],
    }


@pytest.mark.parametrize("rounding", COIN.values(), ids=COIN)
def test_coins_have_the_odds_of_their_points(rounding: Rounding) -> None:
    # One point in many coordinates, with the exact law of a client's integer. False alarm: 1e-7 each.
    dim, clients = 20_000, 3
    for point in (0.0, -0.6 * rounding.limit, float(rounding.limit), 2.0 * rounding.limit):
        sums = torch.zeros(dim, dtype=torch.int64)
        rows = torch.full((clients, dim), point)
        plain.round_and_sum(rows, sums, keys=keys_of(CPU, 9), first=4, rounding=rounding)
        law = exact_coins(rounding, [round(point)] * clients)
        assert goodness_of_fit(sums.numpy(), law) > 1e-7


@pytest.mark.parametrize("rounding", COIN.values(), ids=COIN)
def test_no_two_coordinates_or_clients_share_their_randomness(rounding: Rounding) -> None:
    clients, dim = 100, 150
    drawn = np.empty((clients, dim), dtype=np.int64)
    for client in range(clients):
        row = torch.zeros(dim, dtype=torch.int64)
        plain.round_and_sum(torch.zeros(1, dim), row, keys=keys_of(CPU, 3), first=client, rounding=rounding)
        drawn[client] = row
    # Two that share theirs correlate fully. Of independent ones the correlation has deviation at most 1/10, and 6.5 of
    # them are a false alarm in 1e-6 for all pairs together.
    for table in (drawn, drawn.T):
        assert np.abs(np.corrcoef(table) - np.eye(len(table))).max() < 0.65
    # A client's coins that repeat each other have a larger variance than independent ones.
    law = exact_coins(rounding, [0])
    distance = np.arange(law.size) - law @ np.arange(law.size)
    variance, fourth = law @ distance**2, law @ distance**4
    assert drawn.var() == pytest.approx(variance, abs=6 * math.sqrt((fourth - variance**2) / drawn.size) + 1e-3)


def test_a_sampled_coin_may_be_certain_of_its_side_and_of_being_tossed() -> None:
    rounding = Rounding(HALF, HALF, 16, rate=1 << 16)
    for point, value in ((-40_000.0, 0), (40_000.0, 2)):
        sums = torch.zeros(70, dtype=torch.int64)
        plain.round_and_sum(torch.full((5, 70), point), sums, keys=keys_of(CPU, 1), first=0, rounding=rounding)
        assert set(sums.tolist()) == {5 * value}


@pytest.mark.parametrize("trials", [1, 31, 32, 33, 128, 129, 300])
def test_coins_have_the_binomial_law(trials: int) -> None:
    sums = torch.zeros(40_000, dtype=torch.int64)
    plain.add_coins(sums, keys=keys_of(CPU, trials), trials=trials)
    # False alarm: 1e-7.
    assert goodness_of_fit(sums.numpy(), binom.pmf(np.arange(trials + 1), trials, 0.5)) > 1e-7
