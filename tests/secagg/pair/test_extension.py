"""The field E: axioms against plain polynomial arithmetic, and irreducible polynomials against brute force."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from cpsgd.errors import ParameterError
from cpsgd.secagg.pair.extension import (
    Extension,
    _is_irreducible,
    irreducible,
    is_prime,
    least_degree,
    least_prime,
)

FIELDS = [Extension(2, 3), Extension(3, 4), Extension(7, 2), Extension(337, 16), Extension(2**31 - 1, 5)]


def plain_product(a: list[int], b: list[int], field: Extension) -> list[int]:
    """The product by the schoolbook, reduced from the top."""
    wide = [0] * (2 * field.degree - 1)
    for (i, x), (j, y) in itertools.product(enumerate(a), enumerate(b)):
        wide[i + j] += x * y
    for top in range(len(wide) - 1, field.degree - 1, -1):
        for i, c in enumerate(field.polynomial):
            wide[top - field.degree + i] -= wide[top] * c
    return [c % field.prime for c in wide[: field.degree]]


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_products_are_those_of_polynomials_modulo_f(field: Extension) -> None:
    generator = np.random.default_rng(1)
    a, b = (generator.integers(0, field.prime, (40, field.degree)).astype(np.uint32) for _ in range(2))
    found = field.multiply(a, b)
    for x, y, z in zip(a.tolist(), b.tolist(), found.tolist(), strict=True):
        assert z == plain_product(x, y, field)
    one, c = field.element(1), generator.integers(0, field.prime, (40, field.degree)).astype(np.uint32)
    assert np.array_equal(field.multiply(a, one), a)
    assert np.array_equal(field.multiply(found, c), field.multiply(a, field.multiply(b, c)))
    assert np.array_equal(field.multiply(field.add(a, b), c), field.add(field.multiply(a, c), field.multiply(b, c)))
    assert np.array_equal(field.subtract(field.add(a, b), b), a)


@pytest.mark.parametrize("field", FIELDS, ids=str)
def test_powers(field: Extension) -> None:
    t = np.random.default_rng(2).integers(0, field.prime, (1, field.degree)).astype(np.uint32)
    expected = field.element(1)
    for found in field.powers_of(t, 13):
        assert np.array_equal(found, expected[0])
        expected = field.multiply(expected, t)


@pytest.mark.parametrize(("prime", "degree"), [(2, 2), (2, 6), (3, 3), (3, 4), (5, 4), (7, 2)])
def test_the_polynomial_is_the_first_without_a_factor(prime: int, degree: int) -> None:
    def product(a: tuple[int, ...], b: tuple[int, ...]) -> tuple[int, ...]:
        found = [0] * (len(a) + len(b) - 1)
        for (i, x), (j, y) in itertools.product(enumerate(a), enumerate(b)):
            found[i + j] = (found[i + j] + x * y) % prime
        return tuple(found)

    def monic(size: int) -> list[tuple[int, ...]]:
        return [(*lower, 1) for lower in itertools.product(range(prime), repeat=size)]

    composite = {product(a, b) for k in range(1, degree // 2 + 1) for a in monic(k) for b in monic(degree - k)}
    in_order = (tuple(reversed(digits)) for digits in itertools.product(range(prime), repeat=degree))
    first = next(lower for lower in in_order if (*lower, 1) not in composite)
    assert irreducible(prime, degree) == first
    every = list(itertools.product(range(prime), repeat=degree))
    assert [_is_irreducible(lower, prime) for lower in every] == [(*lower, 1) not in composite for lower in every]


@pytest.mark.parametrize("prime", [337, 3779, 78041, 2**31 - 1])
def test_every_element_but_zero_has_an_inverse(prime: int) -> None:
    """a^(p^K - 1) = 1, which fails for some a unless f is irreducible."""
    field = Extension(prime, least_degree(prime))
    a = np.random.default_rng(3).integers(0, prime, (4, field.degree)).astype(np.uint32)
    power, found = a, np.repeat(field.element(1), 4, axis=0)
    for bit in bin(prime**field.degree - 1)[:1:-1]:
        if bit == "1":
            found = field.multiply(found, power)
        power = field.multiply(power, power)
    assert np.array_equal(found, np.repeat(field.element(1), 4, axis=0))


def test_primes_and_degrees() -> None:
    sieve = [n for n in range(2, 2000) if all(n % k for k in range(2, n))]
    assert [n for n in range(2000) if is_prime(n)] == sieve
    assert (least_prime(2), least_prime(90), least_prime(97), least_prime(2**31 - 20)) == (2, 97, 97, 2**31 - 19)
    assert [least_degree(p) for p in (337, 3779, 78041)] == [16, 11, 8]


@pytest.mark.parametrize("wrong", [(4, 2), (1, 2), (7, 1), (7, 129), (2**31 + 11, 2)])
def test_what_is_no_field_is_refused(wrong: tuple[int, int]) -> None:
    with pytest.raises(ParameterError):
        Extension(*wrong)


def test_fields_at_their_ends() -> None:
    assert Extension(2, 2).polynomial == (1, 1)
    assert Extension(2**31 - 1, 2).prime == 2**31 - 1
    assert Extension(2, 128).degree == 128


def test_primes_and_degrees_at_their_ends() -> None:
    sieve = [n for n in range(400) if n > 1 and all(n % small for small in range(2, int(n**0.5) + 1))]
    assert [n for n in range(400) if is_prime(n)] == sieve
    # Strong pseudoprimes to some of the bases.
    assert not any(is_prime(n) for n in (2_047, 1_373_653, 25_326_001))
    assert least_prime(2**31 - 1) == 2**31 - 1
    with pytest.raises(ParameterError):
        least_prime(2**31)
    assert [least_degree(prime) for prime in (2, 3, 257, 3_779, 65_537, 2**31 - 1)] == [128, 81, 16, 11, 8, 5]


def test_known_polynomials() -> None:
    """Clients and both servers find the same one."""
    assert irreducible(337, 16) == (5, *[0] * 15)
    assert irreducible(3_779, 11) == (7, 2, *[0] * 9)
    assert irreducible(2**31 - 1, 5) == (3, 1, 0, 0, 0)
    assert irreducible(17, 3) == (3, 1, 0)
    assert irreducible(3, 2) == (1, 0)  # the first that is tried
