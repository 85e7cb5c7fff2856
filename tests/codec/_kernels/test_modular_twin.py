"""Arithmetic modulo a prime: the C++ kernels against their NumPy twin and against Python's integers.

`test_levels.py` runs this file again at every other level the processor has.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpsgd.codec._kernels import _native, modular_twin

PRIMES = [2, 3, 337, 3779, 65537, 78041, 2**30 + 3, 2**31 - 1]
primes = pytest.mark.parametrize("prime", PRIMES)
kernels = pytest.mark.parametrize("kernel", [_native, modular_twin], ids=["native", "twin"])


def elements(prime: int, *shape: int) -> np.ndarray:
    """Random elements, the largest among them often."""
    generator = np.random.default_rng([prime, *shape])
    found = generator.integers(0, prime, shape)
    return np.where(generator.random(shape) < 0.2, prime - 1, found).astype(np.uint32)


@kernels
@primes
@pytest.mark.parametrize("sizes", [(1, 1, 1), (3, 70, 5), (20, 63, 64), (5, 200, 33), (2, 3, 100)])
def test_matrices(kernel: Any, prime: int, sizes: tuple[int, int, int]) -> None:
    rows, inner, columns = sizes
    a, b = elements(prime, rows, inner), elements(prime, inner, columns)
    out = np.empty((rows, columns), np.uint32)
    kernel.modular_product(a, b, prime, out)
    assert np.array_equal(out, a.astype(object) @ b.astype(object) % prime)
    sums = elements(prime, rows, columns)
    expected = (sums.astype(object) + a.astype(object) @ b.astype(object)) % prime
    kernel.modular_gram(np.ascontiguousarray(a.T), b, prime, sums)
    assert np.array_equal(sums, expected)


@kernels
@primes
@pytest.mark.parametrize("degree", [1, 2, 11, 16, 128])
def test_extensions(kernel: Any, prime: int, degree: int) -> None:
    a, b, powers = (
        elements(prime, 9, degree),
        elements(prime, 9, degree)[::-1].copy(),
        elements(prime, degree - 1, degree),
    )
    out = np.empty_like(a)
    kernel.extension_product(a, b, powers, prime, out)
    for x, y, z in zip(a.tolist(), b.tolist(), out.tolist(), strict=True):
        wide = [0] * (2 * degree - 1)
        for i in range(degree):
            for j in range(degree):
                wide[i + j] += x[i] * y[j]
        folded = wide[:degree]
        for top, row in zip(wide[degree:], powers.tolist(), strict=True):
            folded = [low + top * c for low, c in zip(folded, row, strict=True)]
        assert z == [c % prime for c in folded]
    one, repeated = np.empty_like(a), np.ascontiguousarray(np.broadcast_to(b[:1], a.shape))
    kernel.extension_product(a, b[:1], powers, prime, one)
    kernel.extension_product(a, repeated, powers, prime, out)
    assert np.array_equal(one, out)
    found = np.empty_like(a)
    kernel.extension_powers(b[:1], powers, prime, found)
    assert found[0].tolist() == [1, *[0] * (degree - 1)]
    kernel.extension_product(found[:-1], b[:1], powers, prime, out[1:])
    assert np.array_equal(found[1:], out[1:])


@kernels
@primes
@pytest.mark.parametrize("count", [1, 7, 8, 9, 17, 63, 1000])
def test_element_by_element(kernel: Any, prime: int, count: int) -> None:
    x, y = elements(prime, count), elements(prime, count)[::-1].copy()
    out = np.empty_like(x)
    for minus in (False, True):
        kernel.modular_sum(x, y, minus, prime, out)
        assert np.array_equal(out, (x.astype(np.int64) + (-1 if minus else 1) * y.astype(np.int64)) % prime)
    for size in (1, 3, 17):
        coefficients = elements(prime, size)
        kernel.modular_polynomial(x, coefficients, prime, out)
        assert np.array_equal(out, np.polyval(coefficients.astype(object), x.astype(object)) % prime)


@kernels
@primes
@pytest.mark.parametrize("room", [1, 100, 2000])
def test_uniform_elements(kernel: Any, prime: int, room: int) -> None:
    words = np.random.default_rng(prime).integers(0, 2**32, 1500, dtype=np.uint32)
    words[:4] = 0, 2**32 - 1, 2**32 // prime * prime - 1, min(2**32 - 1, 2**32 // prime * prime)
    kept = [int(word) % prime for word in words if word < 2**32 // prime * prime][:room]
    out = np.empty(room, np.uint32)
    assert kernel.uniform_elements(words, prime, out) == len(kept)
    assert out[: len(kept)].tolist() == kept


def test_shapes_and_primes_are_checked() -> None:
    a = np.zeros((2, 3), np.uint32)
    for wrong in (
        lambda: _native.modular_product(a, a, 7, a),
        lambda: _native.modular_gram(a, a, 7, a),
        lambda: _native.extension_product(a, a, a[:1].copy(), 7, a),
        lambda: _native.extension_product(a, a[:0], a, 7, a),
        lambda: _native.extension_powers(a, a, 7, a),
        lambda: _native.extension_powers(a[:1], a[:1], 7, a),
        lambda: _native.extension_powers(a[:1], a, 7, a[:0]),
        lambda: _native.modular_sum(a[0], a[0][:2].copy(), False, 7, a[0].copy()),
        lambda: _native.uniform_elements(a[0], 1, a[0].copy()),
        lambda: _native.uniform_elements(a[0], 2**31, a[0].copy()),
        lambda: _native.modular_polynomial(a[0], a[0][:0].copy(), 7, a[0].copy()),
    ):
        with pytest.raises(ValueError, match=r"shapes|degrees|lengths|prime|coefficient"):
            wrong()
