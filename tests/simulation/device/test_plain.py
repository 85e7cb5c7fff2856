from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import binom, chisquare

from cpsgd.codec import rotate
from cpsgd.codec.rounding import Grid
from cpsgd.simulation import device_plain as plain


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
    for changed in (
        plain.philox(6, numbers(1), numbers(2), 3),
        plain.philox(5 + 2**40, numbers(1), numbers(2), 3),
        plain.philox(5, numbers(0), numbers(2), 3),
        plain.philox(5, numbers(1), numbers(3), 3),
        plain.philox(5, numbers(1), numbers(2), 4),
    ):
        assert all(int(a) != int(b) for a, b in zip(base, changed, strict=True))


@pytest.mark.parametrize("dim", [1, 2, 3, 17, 64, 100, 1000, 4096, 5000])
def test_rotation_is_that_of_messages_bit_for_bit(dim: int) -> None:
    x = np.random.default_rng(dim).standard_normal((3, dim)).astype(np.float32)
    signs = rotate.signs(dim, 7, 11)
    rows = torch.from_numpy(np.pad(x, [(0, 0), (0, 5)]))[:, :dim]  # rows that do not follow each other
    plain.rotate(rows, torch.from_numpy(signs.copy()))
    for row, vector in zip(rows, x, strict=True):
        np.testing.assert_array_equal(row.numpy(), rotate.forward(vector, signs))
    for row, vector in zip(rows, x, strict=True):
        plain.rotate_back(row, torch.from_numpy(signs.copy()))
        np.testing.assert_array_equal(row.numpy(), rotate.backward(rotate.forward(vector, signs), signs))


def test_scaling_clips_long_rows_and_silences_broken_ones() -> None:
    rows = torch.tensor([[3.0, 4.0], [0.3, 0.4], [float("nan"), 1.0], [1.0, float("inf")], [3e16, 4e16], [3e30, 0.0]])
    plain.scale(rows, 1.0, 10.0)
    expected = torch.tensor([[6.0, 8.0], [3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [6.0, 8.0], [0.0, 0.0]])
    torch.testing.assert_close(rows, expected)


@pytest.mark.parametrize("levels", [2, 3, 2**17, 2**24])
def test_rounding_goes_to_neighbouring_levels_with_the_right_probability(levels: int) -> None:
    bits = Grid.of_levels(levels, 1.0).fraction_bits
    clients = 40_000
    places = torch.tensor([0.0, 0.25, 0.9, levels - 1.0, levels + 3.0, -2.0, 0.5])
    grid = (places - (levels - 1) / 2) * 2.0**bits
    rows = grid.repeat(clients, 1)
    sums = torch.zeros(len(grid), dtype=torch.int64)
    plain.round_and_sum([(0, rows)], sums, key=9, first=0, levels=levels, fraction_bits=bits)
    mean = sums.double() / clients
    expected = places.clamp(0.0, levels - 1.0).double()
    # Where a level is hit nothing is random; elsewhere a mean of 40,000 has deviation at most 0.0025, and 6 are wide
    # enough for a false alarm in 1e-8. Levels of 2^24 leave 8 bits between them.
    tolerance = 0.015 + 2.0**-bits + float(levels) * 2.0**-24
    np.testing.assert_allclose(mean[1:3], expected[1:3], atol=tolerance)
    assert mean[[0, 3, 4, 5]].tolist() == expected[[0, 3, 4, 5]].tolist()


def test_rounding_is_the_same_in_any_pieces() -> None:
    rows = torch.randn(50, 37, generator=torch.Generator().manual_seed(1)) * 40_000
    whole, parts = torch.zeros(37, dtype=torch.int64), torch.zeros(37, dtype=torch.int64)
    options = {"key": 5, "levels": 3, "fraction_bits": 16}
    plain.round_and_sum([(0, rows)], whole, first=0, **options)
    for start in (0, 20, 31):
        end = {0: 20, 20: 31, 31: 50}[start]
        plain.round_and_sum([(0, rows[start:end])], parts, first=start, **options)
    assert torch.equal(whole, parts)


@pytest.mark.parametrize("trials", [1, 31, 32, 33, 128, 129, 300])
def test_coins_have_the_binomial_law(trials: int) -> None:
    sums = torch.zeros(40_000, dtype=torch.int64)
    plain.add_coins(sums, key=trials, trials=trials)
    law = binom.pmf(np.arange(trials + 1), trials, 0.5)
    seen = np.bincount(sums.numpy(), minlength=trials + 1).astype(float)
    assert len(seen) == trials + 1
    # Rare outcomes together, so that chi-square's approximation holds. False alarm: 1e-7.
    common = law * len(sums) >= 10
    pooled = np.append(seen[common], seen[~common].sum()), np.append(law[common], law[~common].sum()) * len(sums)
    keep = pooled[1] > 5
    observed, expected = pooled[0][keep], pooled[1][keep]
    assert chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-7
