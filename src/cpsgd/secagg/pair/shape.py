"""`RoundShape`: the public numbers of a round of two servers, and the fixed matrices that follow from them.

| docs/proofs/pair.md | here | meaning |
|---|---|---|
| p, K | `field.prime`, `field.degree` | shares are modulo p, proofs in the field with p^K elements |
| d | `dim` | coordinates of a message |
| L | `levels` | a coordinate is one of 0, ..., L-1 |
| N | `nodes` | a column holds N-1 coordinates, at the points 1, ..., N-1; its mask is at 0 |
| C | `columns` | ⌈d / (N-1)⌉; coordinates beyond d are zero and not sent |
| Q | `quotients` | (L-1)(N-1)+1 values of the quotient q, at the points N, ..., N+Q-1 |
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from cpsgd import _validate
from cpsgd.codec import pack
from cpsgd.errors import ParameterError
from cpsgd.secagg.pair.extension import Elements, Extension, least_degree

MOST_LEVELS = 256
MAX_DIM = 2**32 - 1
# A client's proof takes about 0.9 ns times d L^3: with this many of them about a second.
_MOST_STEPS = 2**30
ENVELOPE_BYTES = 264
"""Bytes of an upload beside the leader's part: the head, the helper's seed, and what sealing adds to both."""
_VERSION = 1
# Columns that a client works on at once: the values of a polynomial at all points then stay in the cache.
CHUNK = 512


@dataclass(frozen=True)
class RoundShape:
    """The sizes and the field that all reports of a round share.

    Attributes:
        field: E, and in it F_p.
        dim: d.
        levels: L.
        nodes: N.
        task: Names the task, its round and both servers; all of it is bound into every proof.

    Example:
        >>> shape = RoundShape.choose(prime=3779, dim=51_370, task=b"example")
        >>> shape.field.degree, shape.columns, shape.leader_bytes, shape.evaluation_bytes
        (11, 816, 78143, 13513)
    """

    field: Extension
    dim: int
    levels: int
    nodes: int
    task: bytes

    def __post_init__(self) -> None:
        _validate.integer("dim", self.dim, low=1, high=MAX_DIM)
        _validate.integer("levels", self.levels, low=2, high=MOST_LEVELS)
        _validate.integer("nodes", self.nodes, low=2)
        if self.nodes + self.quotients > self.field.prime:
            raise ParameterError(
                f"Expected nodes + quotients of at most prime={self.field.prime}, got {self.nodes} + {self.quotients}: "
                "there must be a point for each. Use fewer nodes, or a larger prime."
            )
        if not isinstance(self.task, bytes) or not self.task:
            raise ParameterError("Expected task to be bytes that name the task.")

    @classmethod
    def choose(cls, *, prime: int, dim: int, task: bytes, levels: int = 2) -> RoundShape:
        """Returns the shape with the number of nodes that sends the least, all servers together.

        A report has d + Q K elements; the leader sends C K to the helper.
        """
        degree = least_degree(prime)
        most = (prime + levels - 2) // levels
        # Beyond 64 nodes a client's matrices outgrow the cache and little is gained.
        choices = [n for n in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64) if n <= most]
        if not choices:
            raise ParameterError(
                f"Expected a prime of at least {levels + 2}, got prime={prime}: there are no points for a proof."
            )

        def cost(nodes: int) -> int:
            return (levels - 1) * (nodes - 1) + math.ceil(dim / (nodes - 1))

        return cls(Extension(prime, degree), dim, levels, min(choices, key=cost), task)

    # ------------------------------------------------------------------ sizes

    @property
    def columns(self) -> int:
        """C, the number of columns: each holds `nodes` - 1 coordinates."""
        return math.ceil(self.dim / (self.nodes - 1))

    @property
    def quotients(self) -> int:
        """Q, the number of values of q that a report holds."""
        return (self.levels - 1) * (self.nodes - 1) + 1

    def packed_bytes(self, count: int) -> int:
        """Bytes of `count` packed numbers below p."""
        return pack.payload_bytes(count, self.field.prime)

    @property
    def leader_bytes(self) -> int:
        """Bytes of the leader's part of a report, before it is sealed."""
        return 32 + self.packed_bytes(self.dim) + self.packed_bytes(self.quotients * self.field.degree)

    @property
    def upload_bytes(self) -> int:
        """Bytes of an upload without tokens, both sealed parts and all that is around them."""
        return ENVELOPE_BYTES + self.leader_bytes

    @property
    def evaluation_bytes(self) -> int:
        """Bytes that the leader sends to the helper for a report, beside the helper's sealed part."""
        return 32 + self.packed_bytes((self.columns + 1) * self.field.degree)

    @cached_property
    def context(self) -> bytes:
        """32 bytes that identify all of the above: SHA-256 of their canonical JSON."""
        fields = {
            "version": _VERSION,
            "prime": self.field.prime,
            "polynomial": list(self.field.polynomial),
            "dim": self.dim,
            "levels": self.levels,
            "nodes": self.nodes,
            "task": self.task.hex(),
        }
        return hashlib.sha256(b"cpsgd pair context" + json.dumps(fields, sort_keys=True).encode()).digest()

    def in_columns(self, values: Elements) -> Elements:
        """Returns d numbers as C rows of N-1, filled up with zeros."""
        padded = np.zeros(self.columns * (self.nodes - 1), dtype=np.uint32)
        padded[: self.dim] = values
        return padded.reshape(self.columns, self.nodes - 1)

    # ------------------------------------------------------------------ matrices

    @cached_property
    def to_points(self) -> Elements:
        """An N × Q matrix: values of a polynomial at 0, ..., N-1 to its values at N, ..., N+Q-1."""
        p, n = self.field.prime, self.nodes
        weights = _barycentric(range(n), p)
        found = np.empty((n, self.quotients), dtype=np.uint32)
        for j in range(self.quotients):
            point = n + j
            whole = 1
            for k in range(n):
                whole = whole * (point - k) % p
            found[:, j] = [whole * weights[k] * pow(point - k, -1, p) % p for k in range(n)]
        return found

    @cached_property
    def vanishing_inverses(self) -> list[int]:
        """1 / Z at the points N, ..., N+Q-1, where Z(X) is the product of X - k over k = 1, ..., N-1."""
        p, n, found = self.field.prime, self.nodes, []
        for j in range(self.quotients):
            product = 1
            for k in range(1, n):
                product = product * (n + j - k) % p
            found.append(pow(product, -1, p))
        return found

    @cached_property
    def node_polynomials(self) -> Elements:
        """Coefficients of the N Lagrange polynomials at the points 0, ..., N-1, one per row."""
        return _lagrange(range(self.nodes), self.field.prime)

    @cached_property
    def quotient_polynomials(self) -> Elements:
        """Coefficients of the Q Lagrange polynomials at the points N, ..., N+Q-1, one in a row."""
        return _lagrange(range(self.nodes, self.nodes + self.quotients), self.field.prime)

    @cached_property
    def vanishing(self) -> Elements:
        """Coefficients of Z, the lowest first, as one row."""
        return np.array([_product(range(1, self.nodes), self.field.prime)], dtype=np.uint32)

    @cached_property
    def taylor(self) -> list[Elements]:
        """Coefficients, the highest first, of G_0, ..., G_L with F(a + y) = Σ_e G_e(a) y^e.

        F(z) = z (z-1) ... (z-L+1) is zero at the levels alone.
        """
        p = self.field.prime
        falling = _product(range(self.levels), p)
        found = []
        for e in range(self.levels + 1):
            lowest_first = [falling[m] * math.comb(m, e) % p for m in range(e, self.levels + 1)]
            found.append(np.array(lowest_first[::-1], dtype=np.uint32))
        return found


def most_levels(dim: int) -> int:
    """Returns the most levels for which a client makes its proof within about a second.

    Example:
        >>> most_levels(40), most_levels(51_370), most_levels(2**20)
        (256, 27, 10)
    """
    return max(2, min(MOST_LEVELS, int((_MOST_STEPS / dim) ** (1 / 3))))


def _product(points: range, prime: int) -> list[int]:
    """Returns the coefficients of the product of X - k over the points, the lowest first."""
    found = [1]
    for k in points:
        found = [(low - k * c) % prime for low, c in zip([0, *found], [*found, 0], strict=True)]
    return found


def _barycentric(points: range, prime: int) -> list[int]:
    """Returns the barycentric weights 1 / Π (k - i), i the other points, of consecutive points k."""
    n, factorial = len(points), [1]
    for i in range(1, n):
        factorial.append(factorial[-1] * i % prime)
    return [pow((-1) ** (n - 1 - k) * factorial[k] * factorial[n - 1 - k], -1, prime) for k in range(n)]


def _lagrange(points: range, prime: int) -> Elements:
    """Returns the coefficients, lowest first, of the polynomials that are 1 at one point and 0 at the others."""
    whole, weights = _product(points, prime), _barycentric(points, prime)
    found = np.empty((len(points), len(points)), dtype=np.uint32)
    for row, (k, weight) in enumerate(zip(points, weights, strict=True)):
        # Synthetic division of the whole product by X - k.
        quotient, carry = [0] * len(points), 0
        for m in range(len(points), 0, -1):
            carry = (whole[m] + carry * k) % prime
            quotient[m - 1] = carry
        found[row] = [c * weight % prime for c in quotient]
    return found
