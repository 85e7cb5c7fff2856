"""One message to two servers: honest reports pass and add up; forged ones fail, with the probability that is proved."""

from __future__ import annotations

import hashlib
import itertools
import math
import os
import struct
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from cpsgd.codec import pack
from cpsgd.errors import MessageError, ParameterError, ValueRangeError, VectorError
from cpsgd.secagg.pair import proof, streams
from cpsgd.secagg.pair.extension import Elements, Extension, least_prime, modular_sum
from cpsgd.secagg.pair.proof import Basis, ReportParts, make_report
from cpsgd.secagg.pair.shape import RoundShape, most_levels
from cpsgd.secagg.pair.streams import Stream, digest, evaluation_point, joint_randomness

KEY = bytes(range(32))
SHAPES = [
    RoundShape.choose(prime=337, dim=1000, task=b"coins"),
    RoundShape.choose(prime=3779, dim=63, task=b"one column"),
    RoundShape.choose(prime=3779, dim=64, task=b"and one coordinate"),
    RoundShape.choose(prime=78041, dim=500, task=b"five", levels=5),
    RoundShape.choose(prime=2**31 - 1, dim=90, task=b"sixteen", levels=16),
    RoundShape(Extension(11, 2), 7, 2, 4, b"toy"),
]
shapes = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.task.decode())


def integers(shape: RoundShape, seed: int) -> Elements:
    return np.random.default_rng(seed).integers(0, shape.levels, shape.dim).astype(np.uint32)


def verdict(shape: RoundShape, report: ReportParts, key: bytes = KEY) -> bool:
    """What the servers decide together."""
    basis = Basis.of(shape, report.id, key)
    leader = proof.open_leader(shape, report.id, report.leader)
    message = proof.evaluation_message(shape, leader, basis)
    assert len(message) == shape.evaluation_bytes
    return proof.verify(shape, report.id, proof.open_helper(shape, report.id, report.helper), basis, message)


@shapes
def test_honest_reports_pass_and_shares_add_up(shape: RoundShape) -> None:
    for seed in range(3):
        values = integers(shape, seed)
        report = make_report(shape, values)
        assert (len(report.leader), len(report.helper)) == (shape.leader_bytes, 32)
        assert verdict(shape, report)
        leader = proof.open_leader(shape, report.id, report.leader)
        helper = proof.open_helper(shape, report.id, report.helper)
        assert np.array_equal(modular_sum(leader.values, helper.values, shape.field.prime), values)


def test_the_largest_values_pass() -> None:
    for shape in SHAPES:
        for value in (0, shape.levels - 1):
            assert verdict(shape, make_report(shape, np.full(shape.dim, value, dtype=np.uint32)))


def test_a_client_refuses_to_send_what_is_out_of_range() -> None:
    shape = SHAPES[0]
    for wrong in (np.full(1000, 2, np.uint32), np.zeros(999, np.uint32), np.zeros(1000, np.int64)):
        with pytest.raises(VectorError):
            make_report(shape, wrong)


def test_the_sizes_that_are_promised() -> None:
    """Uploads of 57, 80 and 110 kB for 10³, 10⁴ and 10⁵ clients, one coin, d = 51,370; 15 kB between servers."""
    for prime, most in ((337, 57_000), (3779, 80_000), (78041, 110_000)):
        shape = RoundShape.choose(prime=prime, dim=51_370, task=b"sizes")
        sealed = 2 * 48 + 200
        assert shape.leader_bytes + 32 + sealed <= most
        assert shape.evaluation_bytes <= 15_000


@pytest.mark.parametrize(("levels", "prime"), [(2, 3), (3, 3), (8, 7), (256, 257)])
def test_a_prime_without_points_for_the_proof_is_refused(levels: int, prime: int) -> None:
    with pytest.raises(ParameterError, match="points"):
        RoundShape.choose(prime=prime, dim=10, task=b"x", levels=levels)
    assert RoundShape.choose(prime=max(5, 331 if levels == 256 else 11), dim=10, task=b"x", levels=levels).nodes >= 2


# ------------------------------------------------------------------ forged reports


def forged(
    shape: RoundShape, values: Elements, *, seeds: bytes | None = None, report: bytes | None = None
) -> ReportParts:
    """What a client sends that follows the rules with values that are out of range."""
    name = os.urandom(16) if report is None else report
    seeds = os.urandom(64) if seeds is None else seeds
    helper = proof.open_helper(shape, name, seeds[32:])
    stream = Stream(shape, "leader seed", name, seeds[:32])
    blind, masks = stream.bytes(32), stream.elements(shape.columns)
    share = pack.forward(modular_sum(values, helper.values, shape.field.prime, minus=True), shape.field.prime)
    r = joint_randomness(shape, name, digest("leader", shape, name, blind, share), helper.part)
    quotient = proof.quotient_values(shape, values, shape.field.add(masks, helper.masks), r)
    sent = pack.forward(shape.field.subtract(quotient, helper.quotient).reshape(-1), shape.field.prime)
    return ReportParts(name, seeds[:32] + share + sent, seeds[32:])


@pytest.mark.parametrize("shape", SHAPES[:-1], ids=lambda shape: shape.task.decode())
def test_one_value_out_of_range_is_refused(shape: RoundShape) -> None:
    for position, value in itertools.product((0, shape.dim // 2, shape.dim - 1), (shape.levels, shape.field.prime - 1)):
        values = integers(shape, position)
        values[position] = value
        assert not verdict(shape, forged(shape, values))
    assert verdict(shape, forged(shape, integers(shape, 9)))  # the forger itself follows the rules


@shapes
def test_a_changed_byte_is_refused(shape: RoundShape) -> None:
    if shape.task == b"toy":
        return  # one change in hundreds passes there, as it may
    report = make_report(shape, integers(shape, 1))
    generator = np.random.default_rng(4)
    for place in (0, 31, 32, shape.leader_bytes - 1, *generator.integers(32, shape.leader_bytes, 30)):
        changed = bytearray(report.leader)
        changed[place] ^= 1 << int(generator.integers(8))
        try:
            assert not verdict(shape, replace(report, leader=bytes(changed))), place
        except MessageError:
            continue
    changed = bytearray(report.helper)
    changed[7] ^= 1
    assert not verdict(shape, replace(report, helper=bytes(changed)))


def test_parts_of_other_reports_tasks_and_rounds_are_refused() -> None:
    shape = SHAPES[0]
    one, other = (make_report(shape, integers(shape, seed)) for seed in (1, 2))
    assert not verdict(shape, replace(one, helper=other.helper))
    assert not verdict(shape, replace(one, leader=other.leader))
    assert not verdict(shape, replace(one, id=other.id))
    elsewhere = replace(shape, task=b"another round")
    assert not verdict(elsewhere, one)


def test_evaluations_that_a_leader_changed_are_refused() -> None:
    """A leader that adds a vector of its own to its share passes with probability at most L/|E|."""
    shape = SHAPES[0]
    report = make_report(shape, integers(shape, 3))
    basis = Basis.of(shape, report.id, KEY)
    leader = proof.open_leader(shape, report.id, report.leader)
    helper = proof.open_helper(shape, report.id, report.helper)
    added = leader.values.copy()
    added[5] = (added[5] + 1) % shape.field.prime
    message = proof.evaluation_message(shape, replace(leader, values=added), basis)
    assert not proof.verify(shape, report.id, helper, basis, message)


def test_no_hash_is_the_key_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever learned the helper's part of the joint randomness would otherwise know its share."""
    shape, keys = RoundShape.choose(prime=337, dim=20, task=b"task"), list[bytes]()
    derive = streams.digest

    def noted(*parts: object) -> bytes:
        keys.append(derive(*parts))  # type: ignore[arg-type]
        return keys[-1]

    monkeypatch.setattr(streams, "digest", noted)
    report = make_report(shape, np.ones(20, dtype=np.uint32))
    leader, helper = (
        proof.open_leader(shape, report.id, report.leader),
        proof.open_helper(shape, report.id, report.helper),
    )
    parts = {leader.part, helper.part}
    assert len(keys) >= 3
    assert not parts & set(keys)


def test_every_share_has_one_encoding() -> None:
    """Were there two for one share, hashes of both could be tried for the same integers."""
    shape = SHAPES[0]
    report = make_report(shape, integers(shape, 1))
    share = bytearray(report.leader)
    groups = pack.grouping(shape.field.prime)
    assert groups.radix**groups.digits < 1 << groups.bits  # there are words that stand for nothing
    for i in range(32, 32 + 8):
        share[i] = 0xFF
    with pytest.raises(MessageError, match="no shares"):
        proof.open_leader(shape, report.id, bytes(share))
    for wrong in (report.leader[:-1], report.leader + b"\0"):
        with pytest.raises(MessageError, match="bytes"):
            proof.open_leader(shape, report.id, wrong)
    with pytest.raises(MessageError, match="bytes"):
        proof.open_helper(shape, report.id, report.helper[:-1])
    basis = Basis.of(shape, report.id, KEY)
    helper = proof.open_helper(shape, report.id, report.helper)
    for wrong in (b"", bytes(shape.evaluation_bytes - 1), b"\xff" * shape.evaluation_bytes):
        with pytest.raises(MessageError):
            proof.verify(shape, report.id, helper, basis, wrong)


@pytest.mark.parametrize("prime", [2, 3, 337, 3779, 65537, 78041, 2**31 - 1])
def test_bytes_are_refused_or_are_the_encoding_of_what_they_hold(prime: int) -> None:
    generator = np.random.default_rng(prime)
    for count in [1, 2, 3, 5, 8, 9, 1024, 1025]:
        data = generator.bytes(pack.payload_bytes(count, prime))
        with suppress(ValueRangeError):
            assert pack.forward(pack.backward(data, count, prime), prime) == data


# ------------------------------------------------------------------ soundness, measured in a field of 49 elements

TOY = RoundShape(Extension(7, 2), 2, 2, 3, b"toy soundness")
"""One column of two coordinates, |E| = 49: 42 points t can be asked for."""


def every_point(shape: RoundShape) -> list[Elements]:
    p, degree = shape.field.prime, shape.field.degree
    return [shape.field.element(*c) for c in itertools.product(range(p), repeat=degree) if any(c[1:])]


def accepted_points(shape: RoundShape, report: ReportParts) -> int:
    """Number of points t, of all that may be drawn, at which a report passes."""
    leader = proof.open_leader(shape, report.id, report.leader)
    helper = proof.open_helper(shape, report.id, report.helper)
    found = 0
    for t in every_point(shape):
        basis = Basis.at(shape, t)
        found += proof.verify(shape, report.id, helper, basis, proof.evaluation_message(shape, leader, basis))
    return found


def best_forgery(shape: RoundShape, roots: list[Elements]) -> ReportParts:
    """Chooses q so that P - Z q, whose value at the wrong coordinate is given, vanishes at these points of E."""
    field, p = shape.field, shape.field.prime
    values = np.array([2, 1], dtype=np.uint32)  # the coordinate at the point 1 is out of range
    while True:
        name, seeds = os.urandom(16), os.urandom(64)
        helper = proof.open_helper(shape, name, seeds[32:])
        stream = Stream(shape, "leader seed", name, seeds[:32])
        blind, masks = stream.bytes(32), field.add(stream.elements(1), helper.masks)
        share = pack.forward(modular_sum(values, helper.values, p, minus=True), p)
        r = joint_randomness(shape, name, digest("leader", shape, name, blind, share), helper.part)
        if r.any():
            break

    def vanishing_at_roots(x: int) -> Elements:
        product = field.element(x - 2)  # the good coordinate is a root of P, at the point 2
        for root in roots:
            product = field.multiply(product, field.subtract(field.element(x), root))
        return product

    # P(1) = r F(2) = 2 r, so that the multiple of G is 2 r / G(1); every inverse is a power.
    inverse = field.powers_of(vanishing_at_roots(1), p**field.degree)[p**field.degree - 2 : p**field.degree - 1]
    factor = field.multiply(field.multiply(r, field.element(2)), inverse)
    honest = proof.quotient_values(shape, values, masks, r)  # P / Z at the points N, ..., though Z does not divide P
    quotient = []
    for j, vanishing in enumerate(shape.vanishing_inverses):
        excess = field.multiply(factor, vanishing_at_roots(shape.nodes + j))
        quotient.append(field.subtract(honest[j : j + 1], field.multiply(excess, field.element(vanishing))))
    sent = pack.forward(field.subtract(np.concatenate(quotient), helper.quotient).reshape(-1), p)
    return ReportParts(name, seeds[:32] + share + sent, seeds[32:])


def test_the_best_forger_passes_at_the_points_it_chose_and_nowhere_else() -> None:
    """With degree L(N-1) = 4 and one root given away, three of 42 points; the bound is four."""
    points = every_point(TOY)
    generator = np.random.default_rng(5)
    for _ in range(5):
        roots = [points[i] for i in generator.choice(len(points), 3, replace=False)]
        assert accepted_points(TOY, best_forgery(TOY, roots)) == 3


def test_rules_followed_with_a_value_out_of_range_pass_at_few_points() -> None:
    bound = TOY.levels * (TOY.nodes - 1)
    for _ in range(20):
        report = forged(TOY, np.array([3, 1], dtype=np.uint32))
        r_is_zero = accepted_points(TOY, report) == len(every_point(TOY))
        assert r_is_zero or accepted_points(TOY, report) <= bound


def test_offline_tries_for_r_succeed_once_in_as_many_as_there_are_elements() -> None:
    """A client can hash as often as it likes: each try gives r with Σ r F(x) = 0 with probability 1/|E|.

    4,000 tries, 81.6 expected; a false alarm (5 deviations) has probability 6e-7. Hashes of a fixed label decide.
    """
    tries, size = 4000, TOY.field.prime**TOY.field.degree
    zero = sum(not joint_randomness(TOY, i.to_bytes(16, "little"), bytes(32), bytes(32)).any() for i in range(tries))
    assert abs(zero - tries / size) < 5 * math.sqrt(tries / size * (1 - 1 / size))


# ------------------------------------------------------------------ zero knowledge


def test_points_are_never_in_the_prime_field_and_differ_between_reports() -> None:
    seen = set()
    for i in range(300):
        t = evaluation_point(TOY, i.to_bytes(16, "little"), KEY)
        assert t[0, 1:].any()
        seen.add(t.tobytes())
    assert len(seen) == 42  # each of them occurs; a missing one has probability below 42 (41/42)^300 = 3 %, fixed here


@pytest.mark.slow
def test_what_the_helper_sees_is_uniform_whatever_the_integers_are() -> None:
    """W(t) of two inputs, 2,000 reports each: uniform on E (χ², 48 degrees of freedom, false alarm 1e-6)."""
    limit = stats.chi2.isf(1e-6, 48)
    for values in ([0, 0], [1, 1]):
        counts = np.zeros(49)
        for i in range(2000):
            report = seeded_report(np.array(values, dtype=np.uint32), i)
            basis = Basis.of(TOY, report.id, KEY)
            leader = proof.open_leader(TOY, report.id, report.leader)
            helper = proof.open_helper(TOY, report.id, report.helper)
            seen = TOY.field.add(proof.evaluate(TOY, leader, basis), proof.evaluate(TOY, helper, basis))
            counts[seen[0, 0] + 7 * seen[0, 1]] += 1
        assert float(np.sum((counts - 2000 / 49) ** 2 / (2000 / 49))) < limit


@pytest.mark.slow
def test_what_the_leader_holds_is_uniform_whatever_the_integers_are() -> None:
    """x - h of two inputs, 2,000 reports each: uniform on pairs (χ², 48 degrees of freedom, false alarm 1e-6)."""
    limit = stats.chi2.isf(1e-6, 48)
    for values in ([0, 0], [1, 1]):
        counts = np.zeros(49)
        for i in range(2000):
            report = seeded_report(np.array(values, dtype=np.uint32), i)
            held = proof.open_leader(TOY, report.id, report.leader).values
            counts[held[0] + 7 * held[1]] += 1
        assert float(np.sum((counts - 2000 / 49) ** 2 / (2000 / 49))) < limit


def test_two_points_would_tell_the_integers() -> None:
    """Why a report is evaluated at one point, ever: from W(t) and W(t') the mask cancels."""
    field = TOY.field
    values = np.array([1, 0], dtype=np.uint32)
    report = seeded_report(values, 1)
    parts = proof.open_leader(TOY, report.id, report.leader), proof.open_helper(TOY, report.id, report.helper)
    seen = []
    for t in every_point(TOY)[:2]:
        basis = Basis.at(TOY, t)
        seen.append((basis, field.add(*(proof.evaluate(TOY, part, basis) for part in parts))[:1]))
    fitting = []
    for guess in itertools.product(range(2), repeat=2):
        column = np.array([guess], dtype=np.uint32)
        masks = []
        for basis, value in seen:
            rest = field.subtract(value, field.combine(column, basis.coordinates))
            masks.append(field.multiply(rest, field.powers_of(basis.mask, 49)[47:48]))
        if np.array_equal(masks[0], masks[1]):
            fitting.append(guess)
    assert fitting == [(1, 0)]


def seeded_report(values: Elements, number: int) -> ReportParts:
    seeds = np.random.default_rng(number).bytes(64)
    return forged(TOY, values, seeds=seeds, report=number.to_bytes(16, "little"))


@pytest.mark.parametrize("levels", [2, 3, 8])
@pytest.mark.parametrize("dim", [1, 4, 7, 9, 25, 26, 41, 49, 100, 121, 225, 529, 961, 2209, 5000, 51_370])
def test_the_number_of_nodes_sends_the_least(dim: int, levels: int) -> None:
    chosen = RoundShape.choose(prime=65_537, dim=dim, task=b"t", levels=levels)
    others = [replace(chosen, nodes=nodes) for nodes in (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)]
    assert chosen.columns + chosen.quotients == min(each.columns + each.quotients for each in others)


def test_one_integer_that_is_too_large_is_refused() -> None:
    shape = SHAPES[1]
    values = np.zeros(shape.dim, np.uint32)
    values[5] = shape.levels
    with pytest.raises(VectorError, match="below 2"):
        make_report(shape, values)


def test_a_message_of_another_length_is_refused() -> None:
    shape = SHAPES[1]
    report = make_report(shape, integers(shape, 0))
    basis = Basis.of(shape, report.id, KEY)
    message = proof.evaluation_message(shape, proof.open_leader(shape, report.id, report.leader), basis)
    helper = proof.open_helper(shape, report.id, report.helper)
    for other in (message[:-1], message + b"\0", b""):
        with pytest.raises(MessageError, match="Expected evaluations of"):
            proof.verify(shape, report.id, helper, basis, other)


def test_digests_have_every_part_with_its_length() -> None:
    shape = SHAPES[5]
    parts = (b"cpsgd pair leader", shape.context, b"r" * 16, b"ab", b"c")
    expected = hashlib.sha256(b"".join(struct.pack("<Q", len(part)) + part for part in parts)).digest()
    assert (
        digest("leader", shape, b"r" * 16, b"ab", b"c") == expected != digest("leader", shape, b"r" * 16, b"a", b"bc")
    )


def test_sizes_at_their_ends() -> None:
    field = Extension(11, 2)
    assert RoundShape(field, 2**32 - 1, 2, 2, b"t").dim == 2**32 - 1
    # A point for each node and each value of the quotient: 4 + 3 of 7, 2 + 3 of 5.
    assert RoundShape(Extension(7, 2), 5, 2, 3, b"t").quotients == 3
    assert RoundShape(Extension(5, 2), 5, 3, 2, b"t").quotients == 3
    for wrong in (
        {"dim": 2**32},
        {"dim": 0},
        {"levels": 1},
        {"nodes": 1},
        {"nodes": 6},
        {"task": b""},
    ):
        with pytest.raises(ParameterError):
            RoundShape(**{"field": field, "dim": 5, "levels": 2, "nodes": 5, "task": b"t", **wrong})
    large = Extension(2**31 - 1, 5)
    assert RoundShape(large, 5, 256, 2, b"t").levels == 256
    with pytest.raises(ParameterError, match="levels"):
        RoundShape(large, 5, 257, 2, b"t")
    with pytest.raises(ParameterError, match="at least 4"):
        RoundShape.choose(prime=3, dim=5, task=b"t")
    assert RoundShape.choose(prime=5, dim=5, task=b"t").nodes == 2
    assert RoundShape.choose(prime=5, dim=5, task=b"t", levels=3).nodes == 2
    assert (most_levels(1), most_levels(2**32 - 1)) == (256, 2)


def test_a_point_is_outside_the_base_field_and_nothing_else_is_asked_of_it() -> None:
    shape = RoundShape(Extension(11, 3), 7, 2, 4, b"toy")
    points = [evaluation_point(shape, number.to_bytes(16, "big"), KEY)[0] for number in range(300)]
    assert all(point[1:].any() for point in points)
    # Of 11^3 - 11 such points two in eleven have a zero beside a coefficient that is none.
    assert 20 < sum(not point[1:].all() for point in points) < 100


def test_a_prepared_shape_has_everything_that_a_report_needs() -> None:
    shape = proof.prepared(337, 30, b"prepared")
    assert shape == RoundShape.choose(prime=337, dim=30, task=b"prepared")
    before = dict(vars(shape)), dict(vars(shape.field))
    assert verdict(shape, make_report(shape, integers(shape, 1)))
    assert (dict(vars(shape)), dict(vars(shape.field))) == before
    assert proof.prepared(337, 30, b"prepared") is shape


def test_readers_of_a_stream_stop_at_the_same_word() -> None:
    """However many numbers they ask for at once. Of this prime a third of all words are skipped."""
    shape = RoundShape(Extension(least_prime(2**32 // 3 + 1), 2), 7, 2, 4, b"words")
    whole = Stream(shape, "test", b"report").numbers(40)
    parts = Stream(shape, "test", b"report")
    assert np.array_equal(np.concatenate([parts.numbers(count) for count in (1, 17, 5, 17)]), whole)
    assert parts.bytes(16) != Stream(shape, "test", b"report").bytes(16)


def test_the_context_is_the_hash_of_a_text_with_sorted_names() -> None:
    text = b'{"dim": 7, "levels": 2, "nodes": 4, "polynomial": [1, 0], "prime": 11, "task": "746f79", "version": 1}'
    assert SHAPES[5].context == hashlib.sha256(b"cpsgd pair context" + text).digest()
