"""Sampled coins: bits of some coordinates, chosen by the message's id; hostile messages; and what is refused."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pipeline, wire
from cpsgd.codec._kernels import kernels
from cpsgd.codec.pack import Sampled
from cpsgd.errors import (
    ChecksumError,
    DimensionError,
    DuplicateError,
    FingerprintError,
    ParameterError,
    RoundError,
    TrailingBytesError,
    TruncatedError,
    ValueRangeError,
    VersionError,
    WireError,
)
from cpsgd.mechanisms import Binomial, Coins, Mechanism, SampledCoins
from cpsgd.mechanisms import sampled_coins as module
from cpsgd.mechanisms.interface import Search
from cpsgd.mechanisms.law import Steps
from cpsgd.randomness import Keystream
from cpsgd.secagg import SecureParameters

# Five standard errors on both sides are 6e-7.
ERRORS = 5.0
MECHANISM = SampledCoins(rate=0.25, theta=0.375, coordinate_range=0.1)
ROUND = 4


def protocol_of(mechanism: Mechanism = MECHANISM, **changes: Any) -> Protocol:
    shared: dict[str, Any] = {"clients": 40, "dim": 1000, "clip_norm": 1.0, "rotate": True}
    return Protocol(**{**shared, **changes}, mechanism=mechanism)


PROTOCOL = protocol_of()


def unit(dim: int = 1000, seed: int = 0) -> np.ndarray:
    vector = np.random.default_rng(seed).standard_normal(dim).astype(np.float32)
    return np.asarray(vector / np.linalg.norm(vector))


# ---------------------------------------------------------------------- parameters


def test_what_it_is_in_numbers() -> None:
    assert (MECHANISM.values, MECHANISM.centre) == (3, 1.0)
    assert MECHANISM.scale == pytest.approx(0.1 / (2 * 0.375 * 0.25), rel=1e-15)
    law = Steps(low=(0.21875, 0.75, 0.03125), high=(0.03125, 0.75, 0.21875), clients=10)
    assert MECHANISM.noise.law(10) == law
    assert MECHANISM.noise.variance == pytest.approx(0.25 - (2 * 0.25 * 0.375) ** 2, rel=1e-15)
    assert MECHANISM.without_noise() == Binomial(levels=2, trials=0, coordinate_range=0.1)
    assert MECHANISM.describe() == "1 coin of bias up to 0.375 for 0.25 of the coordinates in ±0.1"
    assert PROTOCOL.bits_per_coordinate == 0.25
    assert MECHANISM.format(1.0, None) == Sampled(radix=2, values=2, below=1 << 14)
    assert json.loads(PROTOCOL.to_json())["rate"] == 0.25


def test_theta_and_rate_are_rounded_down() -> None:
    mechanism = SampledCoins(rate=0.05, theta=0.3, coordinate_range=1.0)
    assert (mechanism.rate, mechanism.theta) == (3276 / 2**16, 19660 / 2**16)
    edge = SampledCoins(rate=2 / 3, theta=0.5, coordinate_range=1.0)
    assert (edge.rate, edge.theta) == (43690 / 2**16, 0.5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"rate": 0.0}, r"rate in \[2\^-16, 0.666667\], got rate=0.0; it is a multiple of 2\^-16"),
        ({"rate": 0.67}, "rate in"),
        ({"rate": 1.0}, "rate in"),
        ({"rate": 1e-6}, "rate in"),
        ({"rate": math.nan}, "finite rate"),
        ({"rate": None}, "rate to be a number"),
        ({"theta": 0.51}, "theta in"),
        ({"theta": 0.0}, "theta in"),
        ({"coordinate_range": -1.0}, "coordinate_range in"),
    ],
)
def test_parameters_out_of_range_are_refused(changes: dict[str, Any], match: str) -> None:
    with pytest.raises(ParameterError, match=match):
        replace(MECHANISM, **changes)


def test_what_must_not_be_published_is_said_first() -> None:
    assert module.__doc__ is not None
    assert module.__doc__.startswith("Never publish messages or their ids")


# ---------------------------------------------------------------------- secure aggregation


@pytest.mark.parametrize(
    "call",
    [
        lambda: protocol_of(modulus=2**16),
        lambda: PROTOCOL.encode_integers(unit(), ROUND),
        lambda: PROTOCOL.decode_sum(np.zeros(1000, np.uint64), 3, ROUND),
        lambda: PROTOCOL.check_integers(),
        lambda: SecureParameters.for_protocol(PROTOCOL, round=0),
        lambda: Protocol.from_dict({**PROTOCOL.to_dict(), "modulus": 1000}),
    ],
)
def test_transports_that_add_up_integers_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ParameterError, match=r"coordinates of its own choice.*common to all.*Use coins"):
        call()


# ---------------------------------------------------------------------- messages


def test_a_message_at_a_twentieth_of_a_bit_has_at_most_480_bytes_on_average() -> None:
    protocol = protocol_of(SampledCoins(rate=0.05, theta=0.5, coordinate_range=3.6 / 256), dim=65_536)
    lengths = [len(protocol.encode(np.zeros(65_536), ROUND)) for _ in range(50)]
    # The standard deviation of a length is √(d r (1 - r))/8 = 7 bytes, 1 of the mean of 50.
    assert abs(np.mean(lengths) - protocol.message_bytes) < 1 + 5
    assert protocol.message_bytes <= 474
    assert max(lengths) <= protocol.longest_message_bytes == 64 + 8192


def test_length_and_choice_follow_from_the_id_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    identity = bytes(range(16))
    monkeypatch.setattr(os, "urandom", lambda size: identity[:size])
    messages = [
        pipeline.encode(PROTOCOL, vector, ROUND, Keystream(key * 16))
        for vector in (unit(), -unit(seed=1), np.zeros(1000))
        for key in (b"a", b"b")
    ]
    assert len({len(message) for message in messages}) == 1
    assert len({message[64:] for message in messages}) == len(messages)  # the coins are their own
    chosen = PROTOCOL.format.chosen(identity, 1000)
    assert chosen is not None
    assert len(messages[0]) == 64 + -(-chosen.size // 8)


def test_choices_of_different_ids_are_independent_and_at_the_rate() -> None:
    form, dim = PROTOCOL.format, 100_000
    first, second = (np.zeros(dim, bool) for _ in range(2))
    first[form.chosen(b"1" * 16, dim)] = True
    second[form.chosen(b"2" * 16, dim)] = True
    table = np.bincount(2 * first + second, minlength=4)
    expected = np.outer([0.75, 0.25], [0.75, 0.25]).reshape(-1) * dim
    assert stats.chisquare(table, expected).pvalue > 1e-7
    # The choice is not the stream that a keystream under the id itself would give.
    words = Keystream(b"1" * 16).take(2 * dim).view("<u2")
    assert not np.array_equal(words < 2**14, first)


@settings(max_examples=60, deadline=None)
@given(
    dim=st.integers(1, 40_000),
    rate=st.floats(2.0**-16, 2 / 3),
    theta=st.floats(2.0**-16, 0.5),
    rotate=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_a_message_adds_what_its_bits_say(dim: int, rate: float, theta: float, rotate: bool, seed: int) -> None:
    protocol = protocol_of(SampledCoins(rate=rate, theta=theta, coordinate_range=0.1), dim=dim, rotate=rotate)
    vector = np.random.default_rng(seed).standard_normal(dim)
    message = protocol.encode(vector, ROUND)
    parsed = wire.read(message)
    chosen = protocol.format.chosen(parsed.message_id, dim)
    assert chosen is not None
    bits = np.unpackbits(parsed.payload, count=chosen.size, bitorder="little").astype(np.int64)
    expected = np.ones(dim, np.int64)
    expected[chosen] += 2 * bits - 1
    aggregator = Aggregator(protocol, ROUND)
    aggregator.add(message)
    np.testing.assert_array_equal(aggregator.sums, expected)
    assert parsed.version == 2


def test_the_coins_of_a_message_are_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda size: b"i" * size)
    message = pipeline.encode(PROTOCOL, unit(), ROUND, Keystream(bytes(16)))
    chosen = PROTOCOL.format.chosen(b"i" * 16, 1000)
    assert chosen is not None
    points = np.rint(np.clip(pipeline.to_grid(PROTOCOL, unit(), ROUND)[chosen], -24_576, 24_576))
    words = Keystream(bytes(16)).take(2 * chosen.size).view("<u2")
    expected = np.packbits(words < 2**15 + points, bitorder="little")
    assert message[64:] == expected.tobytes()


# ---------------------------------------------------------------------- hostile messages


def sealed(message: bytes) -> bytes:
    data = np.frombuffer(message, np.uint8)
    checksum = kernels.crc32c(data[64:], kernels.crc32c(data[:60]))
    return message[:60] + struct.pack("<I", checksum) + message[64:]


def good() -> bytes:
    """A message whose last byte has room for padding."""
    while True:
        message = PROTOCOL.encode(unit(), ROUND)
        chosen = PROTOCOL.format.chosen(wire.read(message).message_id, 1000)
        assert chosen is not None
        if chosen.size % 8:
            return message


def resized(change: int) -> bytes:
    """A message whose header and length agree on a length that its id does not have."""
    message = good()
    body = (message[64:] + bytes(8))[: len(message) - 64 + change]
    return sealed(message[:8] + struct.pack("<I", len(body)) + message[12:64] + body)


def padded() -> bytes:
    message = good()
    return sealed(message[:-1] + bytes([message[-1] | 0x80]))


def edited(position: int, new: bytes) -> bytes:
    message = good()
    return sealed(message[:position] + new + message[position + len(new) :])


def damaged() -> bytes:
    message = bytearray(good())
    message[70] ^= 1
    return bytes(message)


COINS = protocol_of(Coins(coins=1, theta=0.375, coordinate_range=0.1))
REFUSALS: dict[str, tuple[Callable[[], bytes], type[WireError]]] = {
    "empty": (lambda: b"", TruncatedError),
    "truncated": (lambda: good()[:-1], TruncatedError),
    "trailing byte": (lambda: good() + b"\0", TrailingBytesError),
    "a byte too few for the id": (lambda: resized(-1), ValueRangeError),
    "a byte too many for the id": (lambda: resized(1), ValueRangeError),
    "no payload": (lambda: resized(-(10**6)), ValueRangeError),
    "all coordinates": (
        lambda: sealed(good()[:8] + struct.pack("<I", 125) + good()[12:64] + bytes(125)),
        ValueRangeError,
    ),
    "padding": (padded, ValueRangeError),
    "version 1 of this protocol": (lambda: edited(4, b"\x01"), VersionError),
    "version 3": (lambda: edited(4, b"\x03"), VersionError),
    "coins": (lambda: COINS.encode(unit(), ROUND), VersionError),
    "fingerprint": (lambda: edited(12, b"\0" * 16), FingerprintError),
    "another rate": (
        lambda: protocol_of(replace(MECHANISM, rate=0.5)).encode(unit(), ROUND),
        FingerprintError,
    ),
    "round": (lambda: PROTOCOL.encode(unit(), ROUND + 1), RoundError),
    "dimension": (lambda: edited(52, struct.pack("<Q", 999)), DimensionError),
    "dimension over the limit": (lambda: edited(52, struct.pack("<Q", 2**60)), DimensionError),
    "checksum": (damaged, ChecksumError),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals_change_nothing(name: str) -> None:
    build, error = REFUSALS[name]
    aggregator = Aggregator(PROTOCOL, ROUND)
    aggregator.add(good())
    before = aggregator.save()
    with pytest.raises(error):
        aggregator.add(build())
    assert aggregator.save() == before
    aggregator.add(good())
    assert aggregator.count == 2


def test_a_message_counts_once_and_another_with_its_id_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    aggregator = Aggregator(PROTOCOL, ROUND)
    monkeypatch.setattr(os, "urandom", lambda size: b"i" * size)
    first, second = (pipeline.encode(PROTOCOL, unit(), ROUND, Keystream(key * 16)) for key in (b"a", b"b"))
    aggregator.add(first)
    before = aggregator.save()
    for message in (first, second):
        with pytest.raises(DuplicateError):
            aggregator.add(message)
    assert aggregator.save() == before


def test_protocols_of_version_1_refuse_messages_of_version_2() -> None:
    for protocol in (COINS, Protocol.gaussian(clients=4, dim=1000, clip_norm=1.0, sigma=1.0)):
        aggregator = Aggregator(protocol, ROUND)
        with pytest.raises(
            VersionError, match=r"version 2, and this protocol's messages have version 1.*same protocol"
        ):
            aggregator.add(good())
        assert aggregator.count == 0


def test_aggregators_merge_and_are_restored() -> None:
    messages = [PROTOCOL.encode(unit(seed=seed), ROUND) for seed in range(6)]
    whole, left, right = (Aggregator(PROTOCOL, ROUND) for _ in range(3))
    for number, message in enumerate(messages):
        whole.add(message)
        (left, right)[number % 2].add(message)
    left = Aggregator.restore(PROTOCOL, left.save())
    left.merge(right)
    np.testing.assert_array_equal(left.sums, whole.sums)
    np.testing.assert_array_equal(left.mean(), whole.mean())
    state = bytearray(whole.save())
    assert int(whole.sums.max()) <= 2 * whole.count
    with pytest.raises(WireError):
        whole.protocol.format.check_sums(np.array([2 * 6 + 1]), 6)
    with pytest.raises(ChecksumError):
        Aggregator.restore(PROTOCOL, bytes(state[:-33]) + b"\xff" + bytes(state[-32:]))


def test_sums_are_widened_when_they_could_overflow() -> None:
    form = PROTOCOL.format
    sums = form.empty(3)
    assert form.widened(sums, 2**31 - 1).dtype == np.uint32
    assert form.widened(sums, 2**31).dtype == np.uint64


# ---------------------------------------------------------------------- error


# ---------------------------------------------------------------------- planning


def search(**changes: Any) -> Search:
    shared: dict[str, Any] = {"values": 1, "honest": 10_000, "variation": 0.0, "dim": 65_536, "clip_norm": 1.0}

    def rough_scale(mechanism: Mechanism) -> float:
        return 2.0 / 0.34 / math.sqrt(10_000 * mechanism.noise.variance)

    return Search(**{**shared, "rotate": True, **changes}, rough_scale=rough_scale, fits=lambda _: True)


def test_candidates_include_as_many_coordinates_as_the_bits_allow() -> None:
    found = list(SampledCoins.candidates(search(bits=0.05)))
    assert {mechanism.rate for mechanism in found} == {3276 / 2**16}
    reaches = [mechanism.coordinate_range * 256 for mechanism in found]
    assert reaches == sorted(reaches)
    assert 2.4 < reaches[0] < 2.6
    assert {m.rate for m in SampledCoins.candidates(search(bits=3.0, values=8))} == {43690 / 2**16}
    assert {m.rate for m in SampledCoins.candidates(search())} == {43690 / 2**16}
    assert list(SampledCoins.candidates(search(bits=1e-6))) == []


def test_a_twentieth_of_a_bit_costs_a_few_percent() -> None:
    # The error of a Gaussian mechanism with this μ, and of the best candidate; frontier values are about 1.06.
    gaussian = 65_536 * (2.0 / 0.34) ** 2 / 10_000**2
    errors = [
        mechanism.predicted_error(clients=10_000, dim=65_536, clip_norm=1.0, rotate=True).total
        for mechanism in SampledCoins.candidates(search(bits=0.05))
    ]
    assert 1.02 < min(errors) / gaussian < 1.12
