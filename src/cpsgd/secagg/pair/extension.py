"""`Extension`: the field E = F_p[X]/f that proofs are computed in.

Elements are rows of K numbers below p, the coefficient of X^0 first. f is the first irreducible polynomial in a fixed
order, so that everybody finds the same one. Irreducibility is decided by Rabin's test (Rabin, "Probabilistic Algorithms
in Finite Fields", SIAM J. Comput. 9(2), 1980): f of degree K divides X^(p^K) - X, and shares no factor with
X^(p^(K/q)) - X for any prime q that divides K.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.rounding import kernels
from cpsgd.errors import ParameterError

Elements = NDArray[np.uint32]

LARGEST_PRIME = 2**31 - 1
LARGEST_DEGREE = 128
_BASES = (2, 3, 5, 7)
SECURITY_BITS = 128
"""The number of elements of E is at least 2 to this power, unless a test asks for less."""


def is_prime(number: int) -> bool:
    """Returns whether the number is a prime, by a test that is exact below 3,215,031,751.

    Miller and Rabin with the bases 2, 3, 5 and 7: Jaeschke, "On strong pseudoprimes to several bases",
    Math. Comp. 61 (1993).

    Example:
        >>> [number for number in range(330, 350) if is_prime(number)]
        [331, 337, 347, 349]
    """
    if number < 2 or any(number % small == 0 for small in _BASES):
        return number in _BASES
    odd, twos = number - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in _BASES:
        powers = [pow(base, odd << i, number) for i in range(twos)]
        if powers[0] != 1 and number - 1 not in powers:
            return False
    return True


@lru_cache(maxsize=4096)
def least_prime(modulus: int) -> int:
    """Returns the least prime that is at least `modulus`.

    Example:
        >>> [least_prime(modulus) for modulus in (336, 3_772, 78_032)]
        [337, 3779, 78041]
    """
    number = _validate.integer("modulus", modulus, low=2, high=LARGEST_PRIME)
    while not is_prime(number):
        number += 1
    return number


def least_degree(prime: int) -> int:
    """Returns the least K with p^K >= 2^128."""
    degree = 1
    while prime**degree < 2**SECURITY_BITS:
        degree += 1
    return degree


@dataclass(frozen=True)
class Extension:
    """The field with p^K elements.

    Attributes:
        prime: p.
        degree: K.

    Example:
        >>> field = Extension(337, 2)
        >>> field.polynomial  # X² + 5: -5 is no square modulo 337
        (5, 0)
        >>> x = field.element(3, 1)
        >>> field.multiply(x, x)
        array([[4, 6]], dtype=uint32)
    """

    prime: int
    degree: int

    def __post_init__(self) -> None:
        _validate.integer("prime", self.prime, low=2, high=LARGEST_PRIME)
        _validate.integer("degree", self.degree, low=2, high=LARGEST_DEGREE)
        if not is_prime(self.prime):
            raise ParameterError(f"Expected prime to be a prime number, got prime={self.prime}.")

    @cached_property
    def polynomial(self) -> tuple[int, ...]:
        """The coefficients of X^0, ..., X^(K-1) of f, whose leading coefficient is 1."""
        return irreducible(self.prime, self.degree)

    @cached_property
    def _powers(self) -> Elements:
        """X^K, ..., X^(2K-2) modulo f."""
        rows, power = [], [(-c) % self.prime for c in self.polynomial]
        for _ in range(self.degree - 1):
            rows.append(power)
            power = _shift(power, self.polynomial, self.prime)
        return np.array(rows, dtype=np.uint32)

    def element(self, *coefficients: int) -> Elements:
        """Returns one element, from the coefficients of X^0, X^1, ...; further ones are zero."""
        found = np.zeros((1, self.degree), dtype=np.uint32)
        found[0, : len(coefficients)] = [c % self.prime for c in coefficients]
        return found

    def multiply(self, a: Elements, b: Elements) -> Elements:
        """Returns the products of the rows of `a` and `b`; a single row of `b` is multiplied with all of `a`."""
        out = np.empty(a.shape, dtype=np.uint32)
        kernels.extension_product(np.ascontiguousarray(a), np.ascontiguousarray(b), self._powers, self.prime, out)
        return out

    def powers_of(self, t: Elements, count: int) -> Elements:
        """Returns t^0, ..., t^(count-1) as rows."""
        out = np.empty((count, self.degree), dtype=np.uint32)
        kernels.extension_powers(t, self._powers, self.prime, out)
        return out

    def add(self, a: Elements, b: Elements) -> Elements:
        """Returns a + b, element by element."""
        return modular_sum(a, b, self.prime)

    def subtract(self, a: Elements, b: Elements) -> Elements:
        """Returns a - b, element by element."""
        return modular_sum(a, b, self.prime, minus=True)

    def combine(self, matrix: Elements, elements: Elements) -> Elements:
        """Returns the product of a matrix over F_p with a column of elements of E."""
        return modular_product(matrix, elements, self.prime)

    def total(self, elements: Elements) -> Elements:
        """Returns the sum of all rows, as one row."""
        return self.combine(np.ones((1, len(elements)), dtype=np.uint32), elements)


def modular_product(a: Elements, b: Elements, prime: int) -> Elements:
    """Returns the product of two matrices modulo p."""
    out = np.empty((a.shape[0], b.shape[1]), dtype=np.uint32)
    kernels.modular_product(np.ascontiguousarray(a), np.ascontiguousarray(b), prime, out)
    return out


def modular_sum(a: Elements, b: Elements, prime: int, *, minus: bool = False) -> Elements:
    """Returns a + b modulo p, or a - b."""
    out = np.empty(a.shape, dtype=np.uint32)
    kernels.modular_sum(a.ravel(), b.ravel(), minus, prime, out.ravel())
    return out


@lru_cache(maxsize=64)
def irreducible(prime: int, degree: int) -> tuple[int, ...]:
    """Returns the lower coefficients of the first irreducible X^K + ..., counting from X^0 up.

    Coefficients are below 16, the first that are tried X^K + c_0, then X^K + c_1 X + c_0, and so on. About one in K is
    irreducible.
    """
    number, base = 1, min(prime, 16)
    while True:
        lower, rest = [], number
        for _ in range(degree):
            rest, digit = divmod(rest, base)
            lower.append(digit)
        if lower[0] and _is_irreducible(tuple(lower), prime):
            return tuple(lower)
        number += 1


def _is_irreducible(lower: tuple[int, ...], prime: int) -> bool:
    """Returns whether f = X^K + lower is irreducible over the integers modulo `prime`, by Rabin's test."""
    degree = len(lower)
    divisors = [q for q in range(2, degree + 1) if degree % q == 0 and is_prime(q)]
    checked = {degree // q for q in divisors}
    x = [0, 1, *[0] * (degree - 2)]
    power = x
    for step in range(1, degree + 1):
        power = _to_the(power, prime, lower, prime)  # X^(p^step) modulo f
        difference = [(a - b) % prime for a, b in zip(power, x, strict=True)]
        if step in checked and len(_gcd([*lower, 1], difference, prime)) > 1:
            return False
    return power == x


def _shift(element: list[int], lower: tuple[int, ...], prime: int) -> list[int]:
    """Returns X times an element, modulo f."""
    top = element[-1]
    return [(low - top * c) % prime for low, c in zip([0, *element[:-1]], lower, strict=True)]


def _times(a: list[int], b: list[int], lower: tuple[int, ...], prime: int) -> list[int]:
    found = [0] * len(a)
    for factor in reversed(b):
        found = [(s + factor * c) % prime for s, c in zip(_shift(found, lower, prime), a, strict=True)]
    return found


def _to_the(base: list[int], exponent: int, lower: tuple[int, ...], prime: int) -> list[int]:
    found = [1, *[0] * (len(base) - 1)]
    for bit in bin(exponent)[2:]:
        found = _times(found, found, lower, prime)
        if bit == "1":
            found = _times(found, base, lower, prime)
    return found


def _gcd(a: list[int], b: list[int], prime: int) -> list[int]:
    """Returns the greatest common divisor of two polynomials, lowest coefficient first."""

    def trimmed(p: list[int]) -> list[int]:
        while p and p[-1] == 0:
            p = p[:-1]
        return p

    a, b = trimmed(a), trimmed(b)
    while b:
        inverse = pow(b[-1], -1, prime)
        rest = a
        while len(rest) >= len(b):
            factor, shift = rest[-1] * inverse % prime, len(rest) - len(b)
            rest = [(c - factor * (b[i - shift] if i >= shift else 0)) % prime for i, c in enumerate(rest)]
            rest = trimmed(rest)
        a, b = b, rest
    return a
