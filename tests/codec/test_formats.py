"""What payloads may hold and how they are summed, whatever a hostile client sends."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd import Protocol
from cpsgd.codec import pack
from cpsgd.codec.pack import Floats, Format, Integers, Sampled
from cpsgd.errors import ValueRangeError

PLAIN, MODULAR = Integers(radix=13, values=13), Integers(radix=1000, values=13)
SAMPLED = Sampled(radix=2, values=2, below=2**14)
FLOATS = Floats(limit=41.0, meaning="D + 40 σ")


def packed(form: Integers, values: list[int]) -> np.ndarray:
    return np.frombuffer(pack.forward(np.array(values, np.uint32), form.radix), np.uint8)


def floats(*values: float) -> np.ndarray:
    return np.array(values, "<f4").view(np.uint8)


def test_formats_of_the_protocols() -> None:
    common = {"clients": 3, "dim": 10, "clip_norm": 2.0}
    assert Protocol.binomial(**common, levels=3, trials=10).format == PLAIN
    assert Protocol.rotated_binomial(**common, levels=3, trials=10, modulus=1000).format == MODULAR
    gaussian = Protocol.gaussian(**common, sigma=0.5).format
    assert gaussian == Floats(limit=2.0 + 40 * 0.5, meaning="D + 40 σ")
    assert (gaussian.radix, gaussian.step, gaussian.payload_bytes(10)) == (0, 1, 40)


@pytest.mark.parametrize("form", [PLAIN, MODULAR, Integers(2, 2), Integers(70_000, 12)])
def test_blocks_of_integers_fill_whole_bytes(form: Integers) -> None:
    # So that payloads of blocks can be written one after another.
    for blocks in (1, 2, 7):
        assert form.payload_bytes(blocks * form.step) == blocks * form.payload_bytes(form.step)
        rest = form.payload_bytes(blocks * form.step + 3)
        assert rest == blocks * form.payload_bytes(form.step) + form.payload_bytes(3)


@pytest.mark.parametrize("form", [PLAIN, MODULAR])
def test_integers_up_to_the_largest_are_accepted(form: Integers) -> None:
    form.check(packed(form, [0, 12, 5, 12, 0]), 5)


def test_integers_beyond_the_values_are_refused_by_position() -> None:
    # Below the modulus, hence packed without complaint, but more than any client's integer.
    with pytest.raises(ValueRangeError, match="position 2 is not below 13"):
        MODULAR.check(packed(MODULAR, [0, 1, 13, 2, 999]), 5)


@pytest.mark.parametrize("form", [PLAIN, MODULAR])
@pytest.mark.parametrize("change", [-1, 1, 5])
def test_integers_of_another_length_are_refused(form: Integers, change: int) -> None:
    payload = np.zeros(form.payload_bytes(100) + change, np.uint8)
    with pytest.raises(ValueRangeError, match="bytes"):
        form.check(payload, 100)


def test_a_word_that_no_integers_make_is_refused() -> None:
    groups = pack.grouping(13)
    word = 13**groups.digits  # fits the bits of a group, but is no group of digits below 13
    assert word < 2**groups.bits
    payload = np.frombuffer(word.to_bytes(PLAIN.payload_bytes(groups.digits), "little"), np.uint8)
    with pytest.raises(ValueRangeError, match=f"position {groups.digits - 1} is not below 13"):
        PLAIN.check(payload, groups.digits)


def test_bits_behind_the_last_integer_are_refused() -> None:
    assert 5 * math.log2(13) < 19 < 8 * PLAIN.payload_bytes(5)
    payload = packed(PLAIN, [1, 2, 3, 4, 5]).copy()
    payload[-1] |= 0x80
    with pytest.raises(ValueRangeError, match="padding"):
        PLAIN.check(payload, 5)


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(min_size=1, max_size=60), dim=st.integers(1, 100), modular=st.booleans())
def test_any_bytes_are_refused_or_add_up_within_bounds(payload: bytes, dim: int, modular: bool) -> None:
    form = MODULAR if modular else PLAIN
    data = np.frombuffer(payload, np.uint8)
    try:
        form.check(data, dim)
    except ValueRangeError:
        return
    sums = form.empty(dim)
    form.add(data, sums)
    form.check_sums(sums, 1)


@settings(max_examples=300, deadline=None)
@given(payload=st.binary(max_size=20), identity=st.binary(min_size=16, max_size=16), dim=st.integers(1, 500))
def test_any_bytes_of_chosen_coordinates_are_refused_or_add_up_within_bounds(
    payload: bytes, identity: bytes, dim: int
) -> None:
    data = np.frombuffer(payload, np.uint8)
    chosen = SAMPLED.chosen(identity, dim)
    bits = np.unpackbits(data, bitorder="little")
    sound = data.size == -(-chosen.size // 8) and not bits[chosen.size :].any()
    try:
        SAMPLED.check(data, chosen.size)
    except ValueRangeError:
        assert not sound
        return
    assert sound
    sums = SAMPLED.empty(dim)
    SAMPLED.add(data, sums, chosen)
    SAMPLED.check_sums(sums, 1)
    assert int(np.sum(sums.astype(np.int64) - 1)) == 2 * int(bits.sum()) - chosen.size
    assert np.all(np.delete(sums, chosen) == 1)


@pytest.mark.parametrize("dim", [1, 2, 2**14 - 1, 2**14, 2**14 + 1, 50_000])
def test_chosen_coordinates_are_ascending_and_those_of_a_longer_vector(dim: int) -> None:
    chosen, longer = (SAMPLED.chosen(b"0123456789abcdef", size) for size in (dim, 60_000))
    assert np.all(np.diff(chosen.astype(np.int64)) > 0)
    np.testing.assert_array_equal(chosen, longer[longer < dim])


def test_bytes_of_chosen_coordinates() -> None:
    assert (SAMPLED.bits, SAMPLED.version, PLAIN.version, FLOATS.version) == (0.25, 2, 1, 1)
    assert (PLAIN.bits, FLOATS.bits) == (math.log2(13), 32.0)
    assert SAMPLED.payload_bytes(1000) == 125  # of so many bits
    sizes = [SAMPLED.payload_bytes(SAMPLED.chosen(bytes([i] * 16), 1000).size) for i in range(200)]
    # The standard deviation of one is √(1000 · 3/16)/8 = 1.7 bytes.
    assert abs(np.mean(sizes) - SAMPLED.average_bytes(1000)) < 1.0 + 5 * 1.8 / math.sqrt(200)
    assert PLAIN.average_bytes(100) == PLAIN.payload_bytes(100)
    assert PLAIN.chosen(bytes(16), 100) is None


@settings(max_examples=200, deadline=None)
@given(payload=st.binary(min_size=0, max_size=60), dim=st.integers(1, 16))
def test_any_bytes_are_refused_or_are_floats_within_bounds(payload: bytes, dim: int) -> None:
    data = np.frombuffer(payload, np.uint8)
    try:
        FLOATS.check(data, dim)
    except ValueRangeError:
        return
    sums = FLOATS.empty(dim)
    FLOATS.add(data, sums)
    assert np.isfinite(sums).all()
    FLOATS.check_sums(sums, 1)


@pytest.mark.parametrize("form", [PLAIN, MODULAR])
def test_integers_add_up(form: Integers) -> None:
    sums = form.empty(3)
    assert sums.dtype == np.uint32
    for values in ([1, 2, 12], [0, 7, 12], [12, 0, 12]):
        form.add(packed(form, values), sums)
    assert sums.tolist() == [13, 9, 36]
    form.check_sums(sums, 3)
    with pytest.raises(ValueRangeError, match="cannot have"):
        form.check_sums(sums, 2)


def test_sums_are_widened_when_they_could_overflow() -> None:
    form = Integers(radix=2**31, values=2**31)
    sums = form.empty(2)
    largest = packed(form, [2**31 - 1, 1])
    for count in range(1, 6):
        sums = form.widened(sums, count)
        # Two of 2^31 - 1 still fit, three do not.
        assert sums.dtype == (np.uint32 if count <= 2 else np.uint64)
        form.add(largest, sums)
    assert sums.tolist() == [5 * (2**31 - 1), 5]
    form.check_sums(sums, 5)
    with pytest.raises(ValueRangeError):
        form.check_sums(sums, 4)


def test_sums_at_the_edge_of_32_bits() -> None:
    form = Integers(radix=2**16, values=2**16)
    sums = form.empty(1)
    count = 2**16 + 1  # (2^16 + 1)(2^16 - 1) = 2^32 - 1
    assert form.widened(sums, count) is sums
    assert form.widened(sums, count + 1).dtype == np.uint64
    wide = sums.astype(np.uint64)
    assert form.widened(wide, 1) is wide


def test_floats_within_the_limit_are_accepted_and_add_up_in_double_precision() -> None:
    FLOATS.check(floats(0.0, 41.0, -41.0, 1e-45, -0.0), 5)
    sums = FLOATS.empty(2)
    assert sums.dtype == np.float64
    assert FLOATS.widened(sums, 2**40) is sums
    for _ in range(3):
        FLOATS.add(floats(0.1, 1.0), sums)
    assert sums.tolist() == [3 * float(np.float32(0.1)), 3.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 41.00001, -42.0, 3e38])
@pytest.mark.parametrize("position", [0, 2])
def test_floats_that_nobody_sends_are_refused_by_position(bad: float, position: int) -> None:
    values = [1.0, -1.0, 0.5]
    values[position] = bad
    with pytest.raises(ValueRangeError, match=rf"position {position} is not within ±\(D \+ 40 σ\)"):
        FLOATS.check(floats(*values), 3)


@pytest.mark.parametrize("size", [0, 1, 5, 8, 11, 13, 16])
def test_floats_of_another_length_are_refused(size: int) -> None:
    with pytest.raises(ValueRangeError, match=f"12 bytes, not {size}"):
        FLOATS.check(np.zeros(size, np.uint8), 3)


def test_sums_of_floats_are_bounded_by_their_number() -> None:
    FLOATS.check_sums(np.array([82.0, -82.0]), 2)
    FLOATS.check_sums(np.array([82.0 * (1.0 + 1e-7)]), 2)  # what many additions may round
    for wrong in (82.001, -90.0, math.nan, math.inf):
        with pytest.raises(ValueRangeError, match="cannot have"):
            FLOATS.check_sums(np.array([0.0, wrong]), 2)


@pytest.mark.parametrize("form", [PLAIN, FLOATS])
def test_a_saved_state_has_a_type_that_holds_the_sums(form: Format) -> None:
    sums = form.empty(4)
    saved = np.dtype(form.saved)
    assert saved.itemsize == 8
    assert np.can_cast(sums.dtype, saved)
