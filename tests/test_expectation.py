"""`Expectation`: the sums behind the expected error, one vector at a time."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.errors import EmptyError, NonFiniteError
from cpsgd.expectation import Expectation


def test_parts_of_a_case_worked_out_by_hand() -> None:
    # Levels at -1, 0, 1; the second coordinate is clipped from 3 to 1, the others round with f(1-f) = 0.1875 and 0.25.
    protocol = Protocol.binomial(clients=2, dim=3, clip_norm=10.0, levels=3, trials=8, p=0.25, coordinate_range=1.0)
    expectation = Expectation(protocol, round=0)
    expectation.add([0.25, 3.0, 0.5])
    expectation.add([0.0, 0.0, 0.0])
    parts = expectation.error()
    assert parts.noise == pytest.approx(3 * 1.0 * 8 * 0.25 * 0.75 / 2)
    assert parts.rounding == pytest.approx((0.1875 + 0.25) / 4)
    assert parts.clipping == pytest.approx(1.0)
    np.testing.assert_allclose(expectation.mean(), [0.125, 1.5, 0.25])


def test_threads_add_up_to_the_same() -> None:
    vectors = np.random.default_rng(3).normal(size=(60, 300)) / 15
    protocol = Protocol.rotated_binomial(clients=60, dim=300, clip_norm=1.0, levels=5, trials=3, coordinate_range=0.1)
    expectation = Expectation(protocol, round=2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(expectation.add, vectors))
    assert expectation.count == 60
    alone = protocol.expected_squared_error(vectors, round=2)
    together = expectation.error()
    assert together.rounding == pytest.approx(alone.rounding, rel=1e-12)
    assert together.clipping == pytest.approx(alone.clipping, rel=1e-6)
    assert together.clipping > 0
    np.testing.assert_allclose(expectation.mean(), vectors.mean(axis=0), rtol=1e-12)


def test_a_refused_vector_leaves_no_trace() -> None:
    protocol = Protocol.binomial(clients=1, dim=2, clip_norm=1.0, levels=2, trials=1)
    expectation = Expectation(protocol, round=0)
    with pytest.raises(NonFiniteError):
        expectation.add([0.0, np.nan])
    with pytest.raises(EmptyError):
        expectation.error()
    expectation.add([0.5, 0.0])
    np.testing.assert_array_equal(expectation.mean(), [0.5, 0.0])
