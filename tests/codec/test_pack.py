from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.codec import pack
from cpsgd.errors import ValueRangeError


@pytest.mark.parametrize("start", range(2, 70_001, 7000))
def test_round_trip_at_every_radix(start: int) -> None:
    random = np.random.default_rng(start)
    for radix in range(start, min(start + 7000, 70_001)):
        count = int(random.integers(1, 90))
        values = random.integers(0, radix, count, dtype=np.uint32)
        values[random.integers(count)] = radix - 1
        payload = pack.forward(values, radix)
        assert len(payload) == pack.payload_bytes(count, radix)
        np.testing.assert_array_equal(pack.backward(payload, count, radix), values)


@settings(max_examples=300, deadline=None)
@given(radix=st.integers(2, 70_000), values=st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=300))
def test_round_trip(radix: int, values: list[int]) -> None:
    digits = np.array(values, dtype=np.uint32) % np.uint32(radix)
    np.testing.assert_array_equal(pack.backward(pack.forward(digits, radix), digits.size, radix), digits)


def test_size_is_within_three_percent_of_the_entropy_at_every_radix() -> None:
    def excess(radix: int) -> float:
        return pack.payload_bytes(10**6, radix) / (10**6 * math.log2(radix) / 8)

    assert max(excess(radix) for radix in range(2, 70_001)) < 1.025
    # Larger ones: around the powers of two and around where one digit less fits 64 bits.
    edges = [2**bits for bits in range(17, 32)] + [round(2 ** (64 / digits)) for digits in (2, 3)]
    assert max(excess(min(edge + offset, 2**32 - 1)) for edge in edges for offset in range(-200, 200)) < 1.03


@pytest.mark.parametrize(
    ("radix", "expected"), [(2, (1, 1)), (3, (17, 27)), (5, (3, 7)), (16, (1, 4)), (70_000, (3, 49))]
)
def test_groupings_of_the_format(radix: int, expected: tuple[int, int]) -> None:
    grouping = pack.grouping(radix)
    assert (grouping.digits, grouping.bits) == expected


def test_bytes_by_hand() -> None:
    # Base 5, three digits to 7 bits, least significant first: 1 + 2·5 + 3·25 = 86, then 4 + 0·5 = 4 in 5 bits: 86 +
    # 4·2^7.
    assert pack.forward(np.array([1, 2, 3, 4, 0], np.uint32), 5) == (86 + 4 * 128).to_bytes(2, "little")
    # Nibbles, low one first.
    assert pack.forward(np.array([1, 2, 15], np.uint32), 16) == bytes([0x21, 0x0F])


def test_packing_a_value_outside_is_refused() -> None:
    with pytest.raises(ValueRangeError):
        pack.forward(np.array([0, 16], np.uint32), 16)


@pytest.mark.parametrize("radix", [3, 5, 6, 7, 100, 1000, 70_000])
def test_a_word_no_digits_make_is_refused(radix: int) -> None:
    grouping = pack.grouping(radix)
    count = 3 * grouping.digits
    word = radix**grouping.digits  # the smallest number that is not a group of digits
    assert word < 2**grouping.bits
    for position in range(3):
        payload = np.frombuffer(
            (word << position * grouping.bits).to_bytes(pack.payload_bytes(count, radix), "little"), np.uint8
        )
        with pytest.raises(ValueRangeError, match="position"):
            pack.backward(payload, count, radix)


def test_padding_must_be_zero() -> None:
    payload = bytearray(pack.forward(np.array([1, 2, 3], np.uint32), 16))
    payload[-1] |= 0x10
    with pytest.raises(ValueRangeError, match="padding"):
        pack.backward(bytes(payload), 3, 16)


@pytest.mark.parametrize("size", [0, 1, 3])
def test_wrong_length_is_refused(size: int) -> None:
    with pytest.raises(ValueRangeError, match="bytes"):
        pack.backward(bytes(size), 3, 16)


def test_limit_below_the_radix() -> None:
    payload = np.frombuffer(pack.forward(np.array([3, 11, 4], np.uint32), 16), np.uint8)
    pack.check(payload, 3, 16, 12)
    with pytest.raises(ValueRangeError, match="position 1"):
        pack.check(payload, 3, 16, 11)
