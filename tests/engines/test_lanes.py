"""Digits that are added as parts of larger integers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.engines.allreduce import Lanes
from cpsgd.errors import ParameterError


@given(
    dim=st.integers(1, 200),
    workers=st.integers(1, 20),
    values=st.one_of(st.integers(2, 300), st.integers(2, 2**32 - 1)),
    seed=st.integers(0, 2**32 - 1),
)
def test_sums_of_lanes_are_lanes_of_sums(dim: int, workers: int, values: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    digits = rng.integers(0, values, size=(workers, dim), dtype=np.uint32)
    digits[:, rng.random(dim) < 0.5] = values - 1  # the largest sums there are
    lanes = Lanes(dim, workers * (values - 1) + 1)
    total = np.zeros(lanes.count, dtype=np.int64)
    for row in digits:
        total += lanes.forward(row)
    assert total.min() >= 0
    np.testing.assert_array_equal(lanes.backward(total), digits.astype(np.uint64).sum(axis=0))


@pytest.mark.parametrize(
    ("radix", "digits"), [(2, 63), (31, 12), (128, 9), (129, 8), (2**21, 3), (2**21 + 1, 2), (2**32, 1), (2**62, 1)]
)
def test_as_many_digits_as_fit(radix: int, digits: int) -> None:
    lanes = Lanes(1000, radix)
    assert lanes.digits == digits
    assert radix**digits <= 2**63 < radix ** (digits + 1)
    assert lanes.size_bytes == 8 * -(-1000 // digits)


def test_bad_input() -> None:
    with pytest.raises(ParameterError, match="radix"):
        Lanes(10, 1)
    with pytest.raises(ParameterError, match="radix"):
        Lanes(10, 2**63)
    with pytest.raises(ParameterError, match="dim"):
        Lanes(0, 10)
