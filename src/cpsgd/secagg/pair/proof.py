"""One message to two servers: shares of a vector of small integers, with a proof that every one of them is in range.

A client's integers stand in C columns, W_c is the polynomial through a column and a random mask, and P = Σ_c r_c F(W_c)
with F(z) = z (z-1) ... (z-L+1) vanishes at the points of all coordinates exactly if each is one of 0, ..., L-1 (but for
the chance of r). The client sends q = P / Z, and the servers check Σ_c r_c F(W_c(t)) = Z(t) q(t) at a point t that it
does not know, from shares of W_c(t) and q(t). docs/proofs/pair.md has the proofs; after Boneh, Boyle, Corrigan-Gibbs,
Gilboa, Ishai, "Zero-Knowledge Proofs on Secret-Shared Data via Fully Linear PCPs", CRYPTO 2019.

Everything here is a function of bytes: who may call it how often is for `engines/pair` to see to.
"""

from __future__ import annotations

import hmac
import os
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec import pack
from cpsgd.codec.rounding import kernels
from cpsgd.errors import MessageError, ValueRangeError, VectorError
from cpsgd.secagg.pair.extension import Elements, modular_product, modular_sum
from cpsgd.secagg.pair.shape import CHUNK, RoundShape
from cpsgd.secagg.pair.streams import ID_BYTES, SEED_BYTES, Stream, digest, evaluation_point, joint_randomness


@dataclass(frozen=True, repr=False)
class ReportParts:
    """One client's message, before its parts are sealed for the servers.

    Attributes:
        id: 16 random bytes that no other report has.
        leader: The leader's part: its seed, x - h, and its share of q.
        helper: The helper's part: the seed that h and its other shares follow from.
    """

    id: bytes
    leader: bytes
    helper: bytes


@dataclass(frozen=True, repr=False)
class Share:
    """A server's part of a report: its hash for the joint randomness, and its shares of x, the masks and q."""

    part: bytes
    values: Elements
    masks: Elements
    quotient: Elements


# ------------------------------------------------------------------ the client


def make_report(shape: RoundShape, values: NDArray[np.uint32], *, report: bytes | None = None) -> ReportParts:
    """Returns the message of a client for its integers; send it once, and the same bytes again if nothing is heard.

    Raises:
        VectorError: There are not d integers, or one is not below L.

    Example:
        >>> shape = RoundShape.choose(prime=337, dim=1000, task=b"example")
        >>> report = make_report(shape, np.ones(1000, dtype=np.uint32))
        >>> len(report.leader), len(report.helper)
        (1620, 32)
    """
    if values.shape != (shape.dim,) or values.dtype != np.uint32:
        raise VectorError(f"Expected {shape.dim} integers of uint32, got {values.dtype} of shape {values.shape}.")
    if int(values.max()) >= shape.levels:
        raise VectorError(f"Expected integers below {shape.levels}.")
    name = os.urandom(ID_BYTES) if report is None else report
    seeds = os.urandom(2 * SEED_BYTES)
    leader_seed, helper_seed = seeds[:SEED_BYTES], seeds[SEED_BYTES:]
    helper = open_helper(shape, name, helper_seed)
    blind, leader_masks = _leader_stream(shape, name, leader_seed)
    share = pack.forward(modular_sum(values, helper.values, shape.field.prime, minus=True), shape.field.prime)
    part = digest("leader", shape, name, blind, share)
    r = joint_randomness(shape, name, part, helper.part)
    masks = shape.field.add(leader_masks, helper.masks)
    quotient = quotient_values(shape, values, masks, r)
    sent = pack.forward(shape.field.subtract(quotient, helper.quotient).ravel(), shape.field.prime)
    return ReportParts(name, leader_seed + share + sent, helper_seed)


def quotient_values(shape: RoundShape, values: Elements, masks: Elements, r: Elements) -> Elements:
    """Returns q at the points N, ..., N+Q-1, one element in a row.

    With A_c the polynomial through a column and zero at the point 0, and M the one that is 1 there and 0 at the others,
    W_c = A_c + s_c M and F(W_c) = Σ_e G_e(A_c) s_c^e M^e: numbers below p times C elements of E for each e.
    """
    field, p = shape.field, shape.field.prime
    columns = shape.in_columns(values)
    to_points = np.ascontiguousarray(shape.to_points[1:])
    sums = np.zeros((shape.levels + 1, field.degree, shape.quotients), dtype=np.uint32)
    for start in range(0, shape.columns, CHUNK):
        at_points = modular_product(columns[start : start + CHUNK], to_points, p)
        weights, scratch = r[start : start + CHUNK], np.empty_like(at_points)
        for e, coefficients in enumerate(shape.taylor):
            kernels.modular_polynomial(at_points.ravel(), coefficients, p, scratch.ravel())
            kernels.modular_gram(np.ascontiguousarray(weights), scratch, p, sums[e])
            if e < shape.levels:
                weights = field.multiply(weights, masks[start : start + CHUNK])
    # M^e / Z at each point; a few thousand numbers, of public values.
    factors, mask_values = [], [int(value) for value in shape.to_points[0]]
    powers = list(shape.vanishing_inverses)
    for _ in range(shape.levels + 1):
        factors.append(powers)
        powers = [power * value % p for power, value in zip(powers, mask_values, strict=True)]
    scaled = sums.astype(np.uint64) * np.array(factors, dtype=np.uint64)[:, None, :] % p
    return np.ascontiguousarray((scaled.sum(axis=0) % p).astype(np.uint32).T)


# ------------------------------------------------------------------ the servers


def open_leader(shape: RoundShape, report: bytes, message: bytes) -> Share:
    """Reads the leader's part.

    Raises:
        MessageError: It has another length, or a number that is not below p: every share has one encoding only.
    """
    if len(message) != shape.leader_bytes:
        raise MessageError(f"Expected a leader's part of {shape.leader_bytes} bytes, got {len(message)}.")
    p, size = shape.field.prime, shape.packed_bytes(shape.dim)
    seed, share, sent = message[:SEED_BYTES], message[SEED_BYTES : SEED_BYTES + size], message[SEED_BYTES + size :]
    try:
        values = pack.backward(share, shape.dim, p)
        quotient = pack.backward(sent, shape.quotients * shape.field.degree, p)
    except ValueRangeError as error:
        raise MessageError(f"The leader's part holds no shares: {error}") from None
    blind, masks = _leader_stream(shape, report, seed)
    return Share(
        digest("leader", shape, report, blind, share),
        values,
        masks,
        quotient.reshape(shape.quotients, shape.field.degree),
    )


def open_helper(shape: RoundShape, report: bytes, seed: bytes) -> Share:
    """Derives the helper's shares from its seed.

    Raises:
        MessageError: The seed does not have 32 bytes.
    """
    if len(seed) != SEED_BYTES:
        raise MessageError(f"Expected a helper's part of {SEED_BYTES} bytes, got {len(seed)}.")
    # Not the purpose of the hash below: the key of this stream must not be a value that is shown to anybody.
    stream = Stream(shape, "helper seed", report, seed)
    values = stream.numbers(shape.dim)
    masks, quotient = stream.elements(shape.columns), stream.elements(shape.quotients)
    return Share(digest("helper", shape, report, seed), values, masks, quotient)


def evaluate(shape: RoundShape, share: Share, basis: Basis) -> Elements:
    """Returns a server's shares of W_1(t), ..., W_C(t) and, in the last row, of q(t)."""
    field = shape.field
    columns = modular_product(shape.in_columns(share.values), basis.coordinates, field.prime)
    columns = field.add(columns, field.multiply(share.masks, basis.mask))
    quotient = field.total(field.multiply(share.quotient, basis.quotients))
    return np.concatenate([columns, quotient])


def evaluation_message(shape: RoundShape, share: Share, basis: Basis) -> bytes:
    """Returns the leader's message to the helper: the hash of its share, and its evaluations."""
    return share.part + pack.forward(evaluate(shape, share, basis).ravel(), shape.field.prime)


def verify(shape: RoundShape, report: bytes, share: Share, basis: Basis, message: bytes) -> bool:
    """Returns whether the report's integers are in range, as the helper decides it from the leader's message.

    Raises:
        MessageError: The message has another length, or a number that is not below p.
    """
    field = shape.field
    if len(message) != shape.evaluation_bytes:
        raise MessageError(f"Expected evaluations of {shape.evaluation_bytes} bytes, got {len(message)}.")
    try:
        numbers = pack.backward(message[32:], (shape.columns + 1) * field.degree, field.prime)
    except ValueRangeError as error:
        raise MessageError(f"The message holds no evaluations: {error}") from None
    total = field.add(numbers.reshape(shape.columns + 1, field.degree), evaluate(shape, share, basis))
    columns, quotient = total[:-1], total[-1:]
    r = joint_randomness(shape, report, message[:32], share.part)
    product = columns
    for level in range(1, shape.levels):
        shifted = field.subtract(columns, np.ascontiguousarray(np.broadcast_to(field.element(level), columns.shape)))
        product = field.multiply(product, shifted)
    left = field.total(field.multiply(r, product))
    right = field.multiply(basis.vanishing, quotient)
    return hmac.compare_digest(left.tobytes(), right.tobytes())


@dataclass(frozen=True, repr=False)
class Basis:
    """Values at the point t: of the Lagrange polynomials of nodes and quotient points, and of Z."""

    mask: Elements
    coordinates: Elements
    quotients: Elements
    vanishing: Elements

    @classmethod
    def at(cls, shape: RoundShape, t: Elements) -> Basis:
        """Evaluates the fixed polynomials at t."""
        powers = shape.field.powers_of(t, max(shape.nodes, shape.quotients))
        nodes = shape.field.combine(shape.node_polynomials, powers[: shape.nodes])
        quotients = shape.field.combine(shape.quotient_polynomials, powers[: shape.quotients])
        vanishing = shape.field.combine(shape.vanishing, powers[: shape.nodes])
        return cls(nodes[:1], np.ascontiguousarray(nodes[1:]), quotients, vanishing)

    @classmethod
    def of(cls, shape: RoundShape, report: bytes, verification_key: bytes) -> Basis:
        """Returns the one point at which this report is ever evaluated."""
        return cls.at(shape, evaluation_point(shape, report, verification_key))


@lru_cache(maxsize=8)
def prepared(prime: int, dim: int, task: bytes, levels: int = 2) -> RoundShape:
    """Returns a shape whose matrices are computed once, before the first report."""
    shape = RoundShape.choose(prime=prime, dim=dim, task=task, levels=levels)
    _ = shape.to_points, shape.vanishing_inverses, shape.node_polynomials, shape.quotient_polynomials
    _ = shape.vanishing, shape.taylor, shape.context
    shape.field.multiply(shape.field.element(1), shape.field.element(1))
    return shape


def _leader_stream(shape: RoundShape, report: bytes, seed: bytes) -> tuple[bytes, Elements]:
    """Returns the blind and the leader's shares of the masks."""
    stream = Stream(shape, "leader seed", report, seed)
    return stream.bytes(32), stream.elements(shape.columns)
