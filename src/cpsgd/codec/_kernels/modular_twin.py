"""The arithmetic modulo a prime in plain NumPy, value for value that of `modular.h`; not in constant time."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Elements = NDArray[np.uint32]


def modular_product(a: Elements, b: Elements, prime: int, out: Elements) -> None:
    """Writes a b mod p to `out`, for matrices of elements."""
    total = np.zeros(out.shape, dtype=np.uint64)
    for k in range(a.shape[1]):
        total += a[:, k, None].astype(np.uint64) * b[k] % prime
    np.copyto(out, total % prime, casting="unsafe")


def modular_gram(a: Elements, b: Elements, prime: int, sums: Elements) -> None:
    """Adds aᵀ b to `sums`, modulo p."""
    total = sums.astype(np.uint64)
    for left, right in zip(a, b, strict=True):
        total += left[:, None].astype(np.uint64) * right % prime
    np.copyto(sums, total % prime, casting="unsafe")


def extension_product(a: Elements, b: Elements, powers: Elements, prime: int, out: Elements) -> None:
    """Writes the products of the rows of `a` and `b`, or of its one row, as elements of F_p[X]/f.

    `powers` has X^K, ... modulo f.
    """
    count, degree = a.shape
    wide = np.zeros((count, 2 * degree - 1), dtype=np.uint64)
    for i in range(degree):
        wide[:, i : i + degree] += a[:, i, None].astype(np.uint64) * b % prime
    wide %= prime
    low = wide[:, :degree]
    for i in range(degree - 1):
        low += wide[:, degree + i, None] * powers[i] % prime
    np.copyto(out, low % prime, casting="unsafe")


def extension_powers(t: Elements, powers: Elements, prime: int, out: Elements) -> None:
    """Writes t^0, t^1, ..., one in a row."""
    out[0] = 0
    out[0, 0] = 1
    for n in range(1, len(out)):
        extension_product(out[n - 1 : n], t, powers, prime, out[n : n + 1])


def modular_polynomial(x: Elements, coefficients: Elements, prime: int, out: Elements) -> None:
    """Writes the values of a polynomial, the highest coefficient first, at all elements of `x`."""
    value = np.full(x.shape, coefficients[0], dtype=np.uint64)
    for coefficient in coefficients[1:]:
        value = (value * x + np.uint64(coefficient)) % prime
    np.copyto(out, value, casting="unsafe")


def modular_sum(a: Elements, b: Elements, minus: bool, prime: int, out: Elements) -> None:
    """Writes (a + b) mod p, or (a - b) mod p."""
    other = prime - b.astype(np.uint64) if minus else b.astype(np.uint64)
    np.copyto(out, (a + other) % prime, casting="unsafe")


def uniform_elements(words: Elements, prime: int, out: Elements) -> int:
    """Converts uniform words to uniform elements, and returns their number.

    Words from the largest multiple of p on are left out, so that all elements are equally likely.
    """
    kept = words[words < (1 << 32) // prime * prime][: out.size]
    out[: kept.size] = kept % np.uint32(prime)
    return kept.size
