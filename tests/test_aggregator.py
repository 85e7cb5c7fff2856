from __future__ import annotations

import hashlib
import pickle
import struct
import threading
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pack, wire
from cpsgd.codec._kernels import kernels
from cpsgd.errors import (
    ChecksumError,
    DimensionError,
    DuplicateError,
    EmptyError,
    FingerprintError,
    MagicError,
    ParameterError,
    RoundError,
    TrailingBytesError,
    TruncatedError,
    ValueRangeError,
    VersionError,
    WireError,
)
from cpsgd.mechanisms import Binomial

DIM = 100
PROTOCOL = Protocol.rotated_binomial(clients=10, dim=DIM, clip_norm=1.0, levels=3, trials=10)
GAUSSIAN = Protocol.gaussian(clients=10, dim=DIM, clip_norm=1.0, sigma=0.1)
ROUND = 4


def vectors(count: int, dim: int = DIM) -> np.ndarray:
    return np.random.default_rng([count, dim]).standard_normal((count, dim)) / dim**0.5 / 2


def filled(protocol: Protocol = PROTOCOL, count: int = 5) -> Aggregator:
    aggregator = Aggregator(protocol, ROUND)
    for vector in vectors(count):
        aggregator.add(protocol.encode(vector, ROUND))
    return aggregator


def sealed(message: bytearray | bytes) -> bytes:
    data = np.frombuffer(bytes(message), np.uint8)
    return (
        bytes(message[:60])
        + struct.pack("<I", kernels.crc32c(data[64:], kernels.crc32c(data[:60])))
        + bytes(message[64:])
    )


def edited(position: int, new: bytes, protocol: Protocol = PROTOCOL) -> bytes:
    message = bytearray(protocol.encode(vectors(1)[0], ROUND))
    message[position : position + len(new)] = new
    return sealed(message)


def with_values(values: np.ndarray, protocol: Protocol = PROTOCOL) -> bytes:
    payload = pack.forward(values.astype(np.uint32), protocol.radix)
    return sealed(protocol.encode(np.zeros(protocol.dim), ROUND)[:64] + payload)


def impossible_word() -> bytes:
    # All bits set: the groups of base 13 do not use every word.
    size = len(PROTOCOL.encode(vectors(1)[0], ROUND)) - 64
    bits = pack.grouping(PROTOCOL.radix).total_bits(DIM)
    return edited(64, (2**bits - 1).to_bytes(size, "little"))


def good() -> bytes:
    return PROTOCOL.encode(vectors(1)[0], ROUND)


def damaged() -> bytes:
    message = bytearray(good())
    message[-1] ^= 1
    return bytes(message)


REFUSALS: dict[str, tuple[Callable[[], bytes], type[WireError]]] = {
    "empty": (lambda: b"", TruncatedError),
    "truncated header": (lambda: good()[:50], TruncatedError),
    "truncated payload": (lambda: good()[:-1], TruncatedError),
    "trailing byte": (lambda: good() + b"\0", TrailingBytesError),
    "magic": (lambda: edited(0, b"nope"), MagicError),
    "version": (lambda: edited(4, b"\x02"), VersionError),
    "fingerprint": (lambda: edited(12, b"\0" * 16), FingerprintError),
    "another protocol": (
        lambda: Protocol.rotated_binomial(clients=11, dim=DIM, clip_norm=1.0, levels=3, trials=10).encode(
            vectors(1)[0], ROUND
        ),
        FingerprintError,
    ),
    "radix": (
        lambda: sealed(bytearray(edited(8, struct.pack("<I", 12)))[: 64 + pack.payload_bytes(DIM, 12)]),
        FingerprintError,
    ),
    "round": (lambda: PROTOCOL.encode(vectors(1)[0], ROUND + 1), RoundError),
    "dimension over the limit": (lambda: edited(52, struct.pack("<Q", 2**60)), DimensionError),
    "dimension of another vector": (
        lambda: sealed(bytearray(edited(52, struct.pack("<Q", 3)))[: 64 + pack.payload_bytes(3, PROTOCOL.radix)]),
        DimensionError,
    ),
    "checksum": (damaged, ChecksumError),
    "impossible word": (impossible_word, ValueRangeError),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_change_nothing(name: str) -> None:
    build, error = REFUSALS[name]
    aggregator = filled()
    before = aggregator.save()
    with pytest.raises(error):
        aggregator.add(build())
    assert aggregator.save() == before
    aggregator.add(good())
    assert aggregator.count == 6


@pytest.mark.parametrize("message", ["text", 64, [1, 2], None])
def test_a_message_is_bytes(message: Any) -> None:
    aggregator = filled()
    with pytest.raises(ParameterError, match=f"as bytes, .* got {type(message).__name__}"):
        aggregator.add(message)
    assert aggregator.count == 5


@pytest.mark.parametrize("protocol", [PROTOCOL, GAUSSIAN], ids=lambda p: p.name)
def test_a_message_counts_once(protocol: Protocol) -> None:
    aggregator = filled(protocol)
    message = protocol.encode(vectors(1)[0], ROUND)
    aggregator.add(message)
    before = aggregator.save()
    with pytest.raises(DuplicateError):
        aggregator.add(message)
    assert aggregator.save() == before


@pytest.mark.parametrize(("levels", "trials", "modulus"), [(3, 10, 64), (3, 10, 1000), (3, 4, 8), (2, 13, 16)])
def test_values_no_honest_client_sends(levels: int, trials: int, modulus: int | None) -> None:
    protocol = Protocol.rotated_binomial(
        clients=9, dim=DIM, clip_norm=1.0, levels=levels, trials=trials, modulus=modulus
    )
    aggregator = Aggregator(protocol, ROUND)
    largest = levels + trials - 1
    aggregator.add(with_values(np.full(DIM, largest), protocol))
    before = aggregator.save()
    for position in (0, 57, DIM - 1):
        values = np.zeros(DIM)
        values[position] = largest + 1
        with pytest.raises(ValueRangeError, match=f"position {position}"):
            aggregator.add(with_values(values, protocol))
    assert aggregator.save() == before


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30, 5.1, -5.1])
def test_floats_no_honest_client_sends(bad: float) -> None:
    aggregator = filled(GAUSSIAN)
    before = aggregator.save()
    with pytest.raises(ValueRangeError, match="position 7"):
        aggregator.add(edited(64 + 4 * 7, struct.pack("<f", bad), GAUSSIAN))
    assert aggregator.save() == before


def test_the_mean_is_over_the_messages_received() -> None:
    protocol = Protocol.binomial(clients=1000, dim=DIM, clip_norm=1.0, levels=2**16, trials=0)
    sent = vectors(7)
    aggregator = Aggregator(protocol, 0)
    with pytest.raises(EmptyError):
        aggregator.mean()
    for vector in sent:
        aggregator.add(protocol.encode(vector, 0))
    assert aggregator.count == 7
    np.testing.assert_allclose(aggregator.mean(), sent.mean(axis=0), atol=1e-4)


@pytest.mark.parametrize(("levels", "sent"), [(5, [[1.0, 0.0, -1.0]] * 2), (4, [[0.5, -0.5, 0.5], [1.5, 0.5, 0.5]])])
@pytest.mark.parametrize("modulus", [None, 11])
def test_vectors_on_the_levels_have_exactly_their_mean(
    levels: int, sent: list[list[float]], modulus: int | None
) -> None:
    """Levels that are one apart, no noise and no rotation: every digit is known."""
    mechanism = Binomial(levels=levels, trials=0, coordinate_range=0.5 * (levels - 1))
    protocol = Protocol(clients=2, dim=3, clip_norm=2.0, rotate=False, mechanism=mechanism, modulus=modulus)
    aggregator = Aggregator(protocol, ROUND)
    for vector in sent:
        aggregator.add(protocol.encode(np.array(vector), ROUND))
    np.testing.assert_array_equal(aggregator.mean(), np.mean(sent, axis=0))


@pytest.mark.parametrize("protocol", [PROTOCOL, GAUSSIAN], ids=lambda p: p.name)
def test_merging_equals_adding(protocol: Protocol) -> None:
    messages = [protocol.encode(vector, ROUND) for vector in vectors(9)]
    whole, left, right = (Aggregator(protocol, ROUND) for _ in range(3))
    for message in messages:
        whole.add(message)
    for message in messages[:4]:
        left.add(message)
    for message in messages[4:]:
        right.add(message)
    left.merge(right)
    assert (left.count, right.count) == (9, 5)
    np.testing.assert_allclose(left.sums, whole.sums, rtol=1e-12)
    np.testing.assert_allclose(left.mean(), whole.mean(), rtol=1e-5, atol=1e-6)
    with pytest.raises(DuplicateError):
        left.add(messages[8])


def test_merges_that_are_refused_change_nothing() -> None:
    aggregator = filled()
    before = aggregator.save()
    overlapping = Aggregator(PROTOCOL, ROUND)
    message = good()
    overlapping.add(message)
    aggregator.add(message)
    state = aggregator.save()
    for other, error in (
        (overlapping, DuplicateError),
        (aggregator, DuplicateError),
        (Aggregator(PROTOCOL, ROUND + 1), RoundError),
        (Aggregator(GAUSSIAN, ROUND), FingerprintError),
    ):
        with pytest.raises(error):
            aggregator.merge(other)
        assert aggregator.save() == state
    assert state != before


@pytest.mark.parametrize("protocol", [PROTOCOL, GAUSSIAN], ids=lambda p: p.name)
def test_save_and_restore(protocol: Protocol) -> None:
    aggregator = filled(protocol)
    message = protocol.encode(vectors(1)[0], ROUND)
    aggregator.add(message)
    again = Aggregator.restore(protocol, aggregator.save())
    assert (again.count, again.round) == (aggregator.count, aggregator.round)
    np.testing.assert_array_equal(again.mean(), aggregator.mean())
    with pytest.raises(DuplicateError):
        again.add(message)
    again.add(protocol.encode(vectors(1)[0], ROUND))
    assert again.count == aggregator.count + 1


@pytest.mark.parametrize("protocol", [PROTOCOL, GAUSSIAN])
def test_pickled(protocol: Protocol) -> None:
    aggregator = filled(protocol)
    message = protocol.encode(vectors(1)[0], ROUND)
    aggregator.add(message)
    again = pickle.loads(pickle.dumps(aggregator))
    assert (again.count, again.round) == (6, ROUND)
    np.testing.assert_array_equal(again.sums, aggregator.sums)
    with pytest.raises(DuplicateError):
        again.add(message)
    again.add(protocol.encode(vectors(1)[0], ROUND))
    assert (again.count, aggregator.count) == (7, 6)


def test_restore_notices_every_flipped_bit() -> None:
    state = filled(count=2).save()
    for position in range(len(state)):
        damaged = bytearray(state)
        damaged[position] ^= 1 << position % 8
        with pytest.raises(WireError):
            Aggregator.restore(PROTOCOL, bytes(damaged))


@pytest.mark.parametrize("size", [0, 10, 69, 70, -1])
def test_restore_notices_truncation(size: int) -> None:
    with pytest.raises(TruncatedError):
        Aggregator.restore(PROTOCOL, filled().save()[:size])


def test_restore_refuses_what_was_saved_for_others() -> None:
    state = filled().save()
    with pytest.raises(FingerprintError):
        Aggregator.restore(GAUSSIAN, state)
    with pytest.raises(TrailingBytesError):
        Aggregator.restore(PROTOCOL, state + b"\0")
    with pytest.raises(DimensionError):
        Aggregator.restore(PROTOCOL, state, max_dim=DIM - 1)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e300, 26.0])
def test_restore_refuses_floats_its_messages_cannot_have(bad: float) -> None:
    # Forged, with the digest put right: five messages reach at most 5 (1 + 40 · 0.1) = 25.
    state = filled(GAUSSIAN).save()
    body = bytearray(state[:-32])
    body[-8:] = struct.pack("<d", bad)
    with pytest.raises(ValueRangeError):
        Aggregator.restore(GAUSSIAN, bytes(body) + hashlib.sha256(body).digest())


def test_other_buffers_than_bytes() -> None:
    aggregator = Aggregator(PROTOCOL, ROUND)
    messages = [good() for _ in range(3)]
    aggregator.add(bytearray(messages[0]))
    aggregator.add(memoryview(messages[1]))
    spread = np.repeat(np.frombuffer(messages[2], np.uint8), 2)[::2]
    aggregator.add(memoryview(spread))
    assert Aggregator.restore(PROTOCOL, bytearray(aggregator.save())).count == 3


def test_a_protocol_over_the_dimension_limit_allocates_nothing() -> None:
    huge = Protocol.binomial(clients=1, dim=2**32 - 1, clip_norm=1.0, levels=2, trials=0)
    tracemalloc.start()
    try:
        with pytest.raises(DimensionError, match="max_dim"):
            Aggregator(huge, 0)
        assert tracemalloc.get_traced_memory()[1] < 50_000
    finally:
        tracemalloc.stop()


def test_sums_outgrow_32_bits_without_overflow() -> None:
    protocol = Protocol.binomial(clients=9, dim=3, clip_norm=1.0, levels=2, trials=2**31)
    aggregator = Aggregator(protocol, ROUND)
    largest = protocol.mechanism.values - 1
    assert largest == 2 + 2**31 - 1
    other = Aggregator(protocol, ROUND)
    for _ in range(2):
        aggregator.add(with_values(np.full(3, largest), protocol))
        other.add(with_values(np.full(3, largest), protocol))
    assert aggregator.sums.tolist() == [2 * largest] * 3
    aggregator.merge(other)
    assert aggregator.sums.tolist() == [4 * largest] * 3
    left, right = Aggregator(protocol, ROUND), Aggregator(protocol, ROUND)
    left.add(with_values(np.full(3, largest), protocol))
    right.add(with_values(np.full(3, largest), protocol))
    assert left.sums.dtype == np.uint32
    left.merge(right)
    assert left.sums.tolist() == [2 * largest] * 3
    assert Aggregator.restore(protocol, aggregator.save()).sums.tolist() == [4 * largest] * 3


def test_memory_does_not_grow_with_messages() -> None:
    protocol = Protocol.rotated_binomial(clients=10, dim=2**16, clip_norm=1.0, levels=2, trials=14)
    message = bytearray(protocol.encode(np.zeros(2**16), ROUND))
    aggregator = Aggregator(protocol, ROUND)
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for number in range(300):
            message[36:52] = number.to_bytes(16, "little")
            aggregator.add(sealed(message))
        grown = tracemalloc.get_traced_memory()[0] - start
    finally:
        tracemalloc.stop()
    # An id costs 16 bytes, as an object in a set about 100.
    assert grown < 300 * 150


def test_a_modulus_large_enough_changes_nothing() -> None:
    common = {"clients": 20, "dim": DIM, "clip_norm": 1.0, "levels": 5, "trials": 11}
    plain = Protocol.rotated_binomial(**common)
    modular = Protocol.rotated_binomial(**common, modulus=20 * 15 + 1)
    values = np.random.default_rng(0).integers(0, 16, (20, DIM))
    means = []
    for protocol in (plain, modular):
        aggregator = Aggregator(protocol, ROUND)
        for row in values:
            aggregator.add(with_values(row, protocol))
        means.append(aggregator.mean())
    np.testing.assert_allclose(means[0], means[1], atol=1e-6)


def test_a_modulus_from_the_concentration_of_the_sum_recovers_it() -> None:
    # The sum of 400 values up to 15 has a range of 6,001, but lies within ±8 standard deviations of its mean.
    protocol = Protocol.rotated_binomial(clients=400, dim=DIM, clip_norm=1.0, levels=2, trials=14, modulus=700)
    aggregator = Aggregator(protocol, ROUND)
    plain = Protocol.rotated_binomial(clients=400, dim=DIM, clip_norm=1.0, levels=2, trials=14)
    unwrapped = Aggregator(plain, ROUND)
    for vector in vectors(400):
        values = pack.backward(wire.read(protocol.encode(vector, ROUND)).payload, DIM, 700)
        aggregator.add(with_values(values, protocol))
        unwrapped.add(with_values(values, plain))
    assert int(aggregator.sums.min()) > 700
    np.testing.assert_allclose(aggregator.mean(), unwrapped.mean(), atol=1e-6)


def test_two_threads_lose_nothing() -> None:
    # Large enough for two additions to overlap: without the lock, sums get lost.
    dim = 2**19
    protocol = Protocol.binomial(clients=2, dim=dim, clip_norm=1.0, levels=2, trials=14)
    message = bytearray(protocol.encode(np.zeros(dim, np.float32), ROUND))
    messages = []
    for number in range(200):
        message[36:52] = number.to_bytes(16, "little")
        messages.append(sealed(message))
    together, alone = Aggregator(protocol, ROUND), Aggregator(protocol, ROUND)
    threads = [
        threading.Thread(target=lambda part=part: [together.add(m) for m in part])
        for part in (messages[::2], messages[1::2])
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in messages:
        alone.add(one)
    assert together.count == 200
    np.testing.assert_array_equal(together.sums, alone.sums)


def test_a_long_round_holds_its_memory() -> None:
    dim, count = 200_000, 1500
    protocol = Protocol.binomial(clients=count, dim=dim, clip_norm=1.0, levels=2, trials=14)
    message = bytearray(protocol.encode(np.zeros(dim, np.float32), ROUND))
    values = pack.backward(wire.read(bytes(message)).payload, dim, protocol.radix)
    aggregator = Aggregator(protocol, ROUND)
    tracemalloc.start()
    try:
        held = []
        for number in range(count):
            message[36:52] = number.to_bytes(16, "little")
            aggregator.add(sealed(message))
            if number == 100:
                tracemalloc.reset_peak()
            held.append(tracemalloc.get_traced_memory()[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # An id takes 16 bytes and its place in a set; nothing else stays, and nothing beside the message itself is made.
    assert held[-1] - held[100] < 250 * count
    assert peak - held[100] < 250 * count + 6 * len(message)
    np.testing.assert_array_equal(aggregator.sums, values.astype(np.uint64) * count)
