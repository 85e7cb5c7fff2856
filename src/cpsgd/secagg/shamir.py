"""Shamir's secret sharing of 32-byte secrets: any t shares give the secret, fewer say nothing about it.

The secret is the constant term of a polynomial of degree t - 1 over the integers modulo p = 2^256 + 297, the smallest
prime that leaves room for every 32-byte string; the other coefficients are uniform. The share of the holder with number
x is the value at x + 1. (Shamir, "How to share a secret", 1979.)

Written here because the maintained alternative, pycryptodome's `Crypto.Protocol.SecretSharing`, works bit by bit in
Python: of 100 shares with threshold 51 it deals out 16 bytes in 45 ms and puts them together in 62 ms, where this
module takes 0.9 and 0.2 ms for 32 bytes. It also takes a share at x = 0, where the value is the secret itself.
Python's integers do not run in constant time: docs/threat-model.md.

`Recovery` puts the secrets of a round together, also if some shares are wrong, and says whose they were. A wrong share
was either dealt or revealed wrongly, and nobody can see which. But of each such pair of clients at least one does not
follow the protocol; so a client in many pairs is to blame, if not many are (`offenders`).
"""

from __future__ import annotations

import math
import operator
import secrets
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import accumulate, combinations

import numpy as np

from cpsgd import _validate
from cpsgd.errors import ShareError

PRIME = 2**256 + 297
SECRET_BYTES = 32
SHARE_BYTES = 33
_ROWS_AT_ONCE = 256
# Many liars among many clients must not keep the server busy: a client in this many disputes needs no more of them.
_ENOUGH_PAIRS = 256
_RUNS = 32
_MOST_TRIED = 1 << 14  # shares that are looked at for one secret


def split(secret: bytes, threshold: int, holders: Sequence[int]) -> dict[int, bytes]:
    """Returns one share for each holder (distinct numbers from 0), any `threshold` of which give the secret.

    Example:
        >>> shares = split(bytes(range(32)), 2, [0, 4, 7])
        >>> combine({7: shares[7], 0: shares[0]}) == bytes(range(32))
        True
    """
    if len(secret) != SECRET_BYTES:
        raise ShareError(f"A secret has {SECRET_BYTES} bytes.")
    if not 1 <= threshold <= len(set(holders)) == len(holders) or min(holders) < 0:
        raise ShareError(f"Cannot deal shares with threshold {threshold} to {len(holders)} holders.")
    # From the highest power down, as Horner's rule takes them.
    coefficients = [secrets.randbelow(PRIME) for _ in range(threshold - 1)] + [int.from_bytes(secret, "big")]
    shares = {}
    for holder in holders:
        value = 0
        for coefficient in coefficients:
            value = (value * (holder + 1) + coefficient) % PRIME
        shares[holder] = value.to_bytes(SHARE_BYTES, "big")
    return shares


def check(share: bytes) -> None:
    """Refuses bytes that are no share.

    Raises:
        ShareError: They are not a number below p.
    """
    _number(share)


def combine(shares: Mapping[int, bytes]) -> bytes:
    """Returns the secret of which these are shares, by holder: at least `threshold`, and none of them wrong.

    Raises:
        ShareError: They give no 32-byte secret. (Wrong shares may give a wrong one: compare it with a commitment.)
    """
    if not shares:
        raise ShareError("No shares, no secret.")
    values = [_number(share) for share in shares.values()]
    return _secret(sum(map(operator.mul, _weights(tuple(shares)), values)) % PRIME)


def consistent(shares: Mapping[int, bytes], threshold: int) -> bool:
    """Returns whether all shares lie on one polynomial of degree below `threshold`; errs once in 2^200 times.

    With weights 1/prod(x_i - x_j) the values of every polynomial of degree below m - 1 add up to 0. The one of the
    shares is multiplied by (x - a)^(m - threshold - 1), a random: if it is of a higher degree, few a make the sum 0.
    """
    holders = tuple(shares)
    degree, point = len(holders) - threshold - 1, secrets.randbelow(PRIME)
    if degree < 0:
        return True
    total = sum(
        weight * (holder + 1) * pow(holder + 1 - point, degree, PRIME) * int.from_bytes(shares[holder], "big")
        for holder, weight in zip(holders, _weights(holders), strict=True)
    )
    return total % PRIME == 0


def decode(shares: Mapping[int, bytes], threshold: int) -> tuple[bytes, frozenset[int]]:
    """Returns the secret, and the holders of wrong shares: of m shares up to (m - threshold) / 2 may be wrong.

    Shares are a codeword of Reed and Solomon. Gao's decoder ("A new algorithm for decoding Reed-Solomon codes", 2003)
    divides as Euclid did, from the polynomial that is zero at all points and the one through all shares, down to one
    that is the quotient's multiple.

    Raises:
        ShareError: More shares are wrong than that, or they give no 32-byte secret.

    Example:
        >>> shares = split(bytes(range(32)), 2, [0, 4, 7, 9])
        >>> decode({**shares, 4: shares[7]}, 2) == (bytes(range(32)), frozenset({4}))
        True
    """
    values = {holder: int.from_bytes(share, "big") for holder, share in shares.items()}
    zeros, through = _interpolated(values)
    previous, current = zeros, through
    before, factor = [0], [1]
    while 2 * (len(current) - 1) >= len(shares) + threshold:
        quotient, rest = _divided(previous, current)
        previous, current = current, rest
        before, factor = factor, _minus_product(before, quotient, factor)
    found, rest = _divided(current, factor)
    if not any(rest) and len(found) <= threshold:
        # Wrong shares are at roots of `factor`, whose degree is at most (n - t)/2.
        wrong = frozenset(holder for holder, value in values.items() if _value(found, holder + 1) != value)
        return _secret(found[0]), wrong
    raise ShareError(
        f"Of {len(shares)} shares more than {(len(shares) - threshold) // 2} are wrong: they give no secret."
    )


def _number(share: bytes) -> int:
    value = int.from_bytes(share, "big")
    if len(share) != SHARE_BYTES or value >= PRIME:
        raise ShareError("A share is not a number modulo p.")
    return value


def _secret(value: int) -> bytes:
    if value >> 256:
        raise ShareError("The shares do not belong together: they give no secret.")
    return value.to_bytes(SECRET_BYTES, "big")


@lru_cache(maxsize=1024)
def _weights(holders: tuple[int, ...]) -> tuple[int, ...]:
    """Returns Lagrange's weights at 0: product over the others of x_m / (x_m - x_j).

    The denominators are products of small numbers, x_j in place of the difference to itself. NumPy multiplies as many
    of them as 62 bits hold, Python the rest; all are inverted at once.
    """
    points = np.array(holders, dtype=np.int64) + 1
    at_once = 62 // int(points.max()).bit_length()
    denominators: list[int] = []
    for start in range(0, points.size, _ROWS_AT_ONCE):
        rows = points[start : start + _ROWS_AT_ONCE]
        factors = np.ones((rows.size, -(-points.size // at_once) * at_once), dtype=np.int64)
        np.subtract(points, rows[:, None], out=factors[:, : points.size])
        own = np.arange(rows.size)
        factors[own, start + own] = rows
        products = factors.reshape(rows.size, -1, at_once).prod(axis=2)
        denominators += [math.prod(row) % PRIME for row in products.tolist()]
    numerator = math.prod(points.tolist()) % PRIME
    return tuple(numerator * inverse % PRIME for inverse in _inverses(denominators))


def _inverses(numbers: list[int]) -> list[int]:
    """Returns the inverses of all numbers modulo p, by a single inversion (Montgomery 1987)."""
    products = list(accumulate(numbers, lambda one, other: one * other % PRIME))
    inverse = pow(products[-1], -1, PRIME)
    found = [0] * len(numbers)
    for i in range(len(numbers) - 1, 0, -1):
        found[i] = inverse * products[i - 1] % PRIME
        inverse = inverse * numbers[i] % PRIME
    found[0] = inverse
    return found


# ---------------------------------------------------------------------- polynomials: coefficients from the constant up


def _interpolated(values: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """Returns two polynomials: one that is zero at all holders' points, and the interpolant of these values."""
    points = [holder + 1 for holder in values]
    zeros = [1]
    for point in points:
        zeros = [(low - point * high) % PRIME for low, high in zip([0, *zeros], [*zeros, 0], strict=True)]
    slopes = [_value([i * c % PRIME for i, c in enumerate(zeros)][1:], point) for point in points]
    through = [0] * len(points)
    for point, value, inverse in zip(points, values.values(), _inverses(slopes), strict=True):
        weight, carry = value * inverse % PRIME, 0
        for i in range(len(points), 0, -1):  # zeros / (x - point), by Horner's rule
            carry = (zeros[i] + carry * point) % PRIME
            through[i - 1] = (through[i - 1] + weight * carry) % PRIME
    return zeros, _trimmed(through)


def _divided(dividend: list[int], divisor: list[int]) -> tuple[list[int], list[int]]:
    """Returns the quotient and the remainder. The divisor's highest coefficient must not be 0."""
    rest, inverse = list(dividend), pow(divisor[-1], -1, PRIME)
    quotient = [0] * max(1, len(dividend) - len(divisor) + 1)
    for shift in range(len(dividend) - len(divisor), -1, -1):
        factor = quotient[shift] = rest[shift + len(divisor) - 1] * inverse % PRIME
        for i, coefficient in enumerate(divisor):
            rest[shift + i] = (rest[shift + i] - factor * coefficient) % PRIME
    return quotient, _trimmed(rest)


def _minus_product(first: list[int], one: list[int], other: list[int]) -> list[int]:
    """Returns the polynomial `first` - `one` · `other`."""
    difference = first + [0] * max(0, len(one) + len(other) - 1 - len(first))
    for i, factor in enumerate(one):
        for j, coefficient in enumerate(other):
            difference[i + j] = (difference[i + j] - factor * coefficient) % PRIME
    return _trimmed(difference)


def _trimmed(coefficients: list[int]) -> list[int]:
    """Returns the polynomial without leading zero coefficients; the zero polynomial keeps one."""
    end = len(coefficients)
    while end > 1 and not coefficients[end - 1]:
        end -= 1
    return coefficients[:end]


def _value(coefficients: list[int], point: int) -> int:
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * point + coefficient) % PRIME
    return value


# ---------------------------------------------------------------------- secrets of a round, some shares being wrong


class Recovery:
    """The secrets of one round.

    Attributes:
        disputed: Owner and holder of each share that was found to be wrong; at most 256 of one holder.
    """

    def __init__(self, threshold: int, colluding: int = 1) -> None:
        """Starts without recovered secrets.

        Args:
            threshold: Shares that give a secret.
            colluding: Number of holders that may lie together. Nobody is blamed for what these could make up.
        """
        self.disputed: set[tuple[int, int]] = set()
        self._threshold, self._colluding = threshold, colluding
        self._pairs: Counter[int] = Counter()  # of each holder

    def secret(self, owner: int, shares: Mapping[int, bytes], fits: Callable[[bytes], bool]) -> bytes:
        """Returns the secret of `owner` from its shares by holder; `fits` tests a candidate secret.

        Raises:
            ShareError: Too many shares are wrong; with a `dealer` if more than colluding holders can have made wrong.
        """
        for right in self._guesses(shares):
            found = _combined(right)
            if found is not None and fits(found):
                self._note(owner, shares, right, found)
                return found
        spare, lies = len(shares) - self._threshold, self._colluding
        # These lies are always found: half as many as are to spare, or all, where every choice of liars is tried.
        dealt_wrongly = spare >= 2 * lies or self._tries_all(len(shares))
        raise ShareError(
            f"The shares of a secret of client {owner} do not give it: too many of them are wrong.",
            dealer=owner if dealt_wrongly else None,
        )

    def _note(self, owner: int, shares: Mapping[int, bytes], right: Mapping[int, bytes], secret: bytes) -> None:
        """Records which other shares are wrong: those that do not give the secret together with right ones.

        Liars among the latter can make their errors cancel, so that the secret comes out and the others look wrong.
        They cannot if all lie on one polynomial: it then agrees with the true one in t values, namely the secret and
        t - 1 shares that are right for any set of liars.
        """
        if shares.keys() == right.keys() or len(right) < self._threshold + self._colluding - 1:
            return
        if not consistent(right, self._threshold):
            return
        others = {holder: right[holder] for holder in sorted(right)[: self._threshold - 1]}
        for holder in shares.keys() - right.keys():
            if self._pairs[holder] < _ENOUGH_PAIRS and _combined({**others, holder: shares[holder]}) != secret:
                self.disputed.add((owner, holder))
                self._pairs[holder] += 1

    def _guesses(self, shares: Mapping[int, bytes]) -> Iterator[dict[int, bytes]]:
        """Yields sets of shares that may all be right, the likeliest first."""
        trusted = {holder: share for holder, share in shares.items() if holder not in self._pairs}
        if len(trusted) >= self._threshold:
            yield trusted
        with suppress(ShareError):
            _, wrong = decode(shares, self._threshold)
            yield {holder: share for holder, share in shares.items() if holder not in wrong}
        # More may be wrong than a decoder can find, but the commitment tells whether some of the others are right.
        holders = sorted(shares)
        for start in range(0, len(holders) if len(holders) > self._threshold else 0, 1 + len(holders) // _RUNS):
            yield {holder: shares[holder] for holder in (holders[start:] + holders[:start])[: self._threshold]}
        if self._tries_all(len(holders)):
            for wrong_ones in combinations(holders, self._colluding):
                yield {holder: shares[holder] for holder in holders if holder not in wrong_ones}

    def _tries_all(self, count: int) -> bool:
        """Returns whether every choice of colluding holders can be left out of this many shares."""
        enough = count - self._colluding >= self._threshold
        return enough and count * math.comb(count, self._colluding) <= _MOST_TRIED


def offenders(disputed: Iterable[tuple[int, int]], most: int) -> frozenset[int]:
    """Returns the clients that certainly broke the protocol, if at most `most` clients did.

    An honest client is in dispute only with such clients, hence with at most `most` others, and never with itself.

    Example:
        >>> sorted(offenders([(0, 5), (1, 5), (2, 5), (2, 3), (3, 2)], most=2))
        [5]
    """
    most = _validate.integer("most", most, low=1)
    # Two clients may be in two disputes, each as the owner of one secret: that is one other client for either.
    pairs = {frozenset(pair) for pair in disputed}
    counts = Counter(client for pair in pairs for client in pair)
    return frozenset(client for client, count in counts.items() if count > most or {client} in pairs)


def _combined(shares: Mapping[int, bytes]) -> bytes | None:
    try:
        return combine(shares)
    except ShareError:
        return None
