"""Batons: who can open one, and what becomes of bytes that are something else."""

from __future__ import annotations

import os
from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.codec.wire import MAX_ROUND
from cpsgd.correlated import batons
from cpsgd.correlated.batons import MAX_BANDS, Place, open_baton, seal
from cpsgd.errors import BatonError, CpsgdError, MessageError, ParameterError, VersionError

PLACE = Place("77", bytes(range(16)), bands=4, round=9, lineage=2)
SLOTS = (b"a" * 16, None, b"c" * 16)
KEY = X25519PrivateKey.generate()
PUBLIC = KEY.public_key().public_bytes_raw()


def test_the_successor_reads_what_was_sealed_for_it() -> None:
    baton = seal(SLOTS, PUBLIC, PLACE)
    assert open_baton(baton, KEY, PLACE) == SLOTS
    assert len(baton) == PLACE.baton_bytes == 4 + 1 + 32 + 1 + 3 * 16 + 16


@pytest.mark.parametrize("bands", [1, 2, 8, 9, 10, 32])
def test_the_length_says_nothing_about_the_lineage(bands: int) -> None:
    place = replace(PLACE, bands=bands, round=bands)
    for slots in ((None,) * (bands - 1), tuple(bytes([age]) * 16 for age in range(bands - 1))):
        baton = seal(slots, PUBLIC, place)
        assert len(baton) == place.baton_bytes
        assert open_baton(baton, KEY, place) == slots


def test_two_batons_of_the_same_seeds_have_nothing_in_common() -> None:
    one, other = (seal(SLOTS, PUBLIC, PLACE) for _ in range(2))
    alike = np.frombuffer(one, np.uint8)[5:] == np.frombuffer(other, np.uint8)[5:]
    assert alike.sum() < 10
    assert all(seed not in one for seed in SLOTS if seed)


@pytest.mark.parametrize(
    "elsewhere",
    [
        replace(PLACE, run="78"),
        replace(PLACE, fingerprint=bytes(16)),
        replace(PLACE, round=10),
        replace(PLACE, lineage=3),
        replace(PLACE, bands=5),
    ],
    ids=["another run", "another protocol", "another round", "another lineage", "other bands"],
)
def test_a_baton_opens_in_its_place_only(elsewhere: Place) -> None:
    with pytest.raises(BatonError):
        open_baton(seal(SLOTS, PUBLIC, PLACE), KEY, elsewhere)


def test_a_baton_opens_for_its_successor_only() -> None:
    with pytest.raises(BatonError, match="not sealed for this client"):
        open_baton(seal(SLOTS, PUBLIC, PLACE), X25519PrivateKey.generate(), PLACE)


@pytest.mark.parametrize(("flags", "opens"), [(0b0, True), (0b111, True), (0b1000, False), (0xFF, False)])
def test_a_baton_has_no_more_seeds_than_slots(flags: int, opens: bool) -> None:
    """Sealed as the format says, by somebody who writes the flags anew."""
    private = X25519PrivateKey.generate()
    ephemeral = private.public_key().public_bytes_raw()
    bound = PLACE.bound(ephemeral, PUBLIC)
    plain = bytes([flags]) + bytes(range(48))
    cipher = batons._cipher(private.exchange(KEY.public_key()), bound)
    baton = b"cpsb\x01" + ephemeral + cipher.encrypt(bytes(12), plain, bound)
    if opens:
        assert open_baton(baton, KEY, PLACE) == tuple(plain[i : i + 16] if flags else None for i in (1, 17, 33))
    else:
        with pytest.raises(BatonError, match="more seeds than it has slots"):
            open_baton(baton, KEY, PLACE)


def test_every_changed_bit_is_found() -> None:
    baton = seal(SLOTS, PUBLIC, PLACE)
    for place in range(8 * len(baton)):
        damaged = bytearray(baton)
        damaged[place // 8] ^= 1 << place % 8
        with pytest.raises((BatonError, VersionError)):
            open_baton(bytes(damaged), KEY, PLACE)


def test_anything_else_is_refused() -> None:
    baton = seal(SLOTS, PUBLIC, PLACE)
    rng = np.random.default_rng(2)
    cases = [baton[:length] for length in range(len(baton))] + [baton + b"\0", b"", bytes(len(baton))]
    cases += [rng.bytes(int(rng.integers(200))) for _ in range(200)]
    cases += [baton[:5] + rng.bytes(len(baton) - 5) for _ in range(200)]
    for case in cases:
        with pytest.raises(CpsgdError):
            open_baton(case, KEY, PLACE)
    with pytest.raises(BatonError):
        open_baton("cpsb", KEY, PLACE)  # type: ignore[arg-type]
    with pytest.raises(VersionError, match="version 2"):
        open_baton(baton[:4] + b"\2" + baton[5:], KEY, PLACE)


def test_keys_of_low_order_are_refused() -> None:
    for public in (bytes(32), b"\1" + bytes(31)):
        with pytest.raises(MessageError):
            seal(SLOTS, public, PLACE)
        baton = bytearray(seal(SLOTS, PUBLIC, PLACE))
        baton[5:37] = public
        with pytest.raises(BatonError):
            open_baton(bytes(baton), KEY, PLACE)
    with pytest.raises(MessageError, match="32 bytes"):
        seal(SLOTS, PUBLIC[:-1], PLACE)


def test_no_honest_baton_holds_a_seed_twice_or_one_from_before_the_run() -> None:
    for slots, round in (((bytes(16), bytes(16), None), 9), ((b"a" * 16, b"b" * 16, None), 2)):
        place = replace(PLACE, round=round)
        with pytest.raises(BatonError, match="no honest client's does"):
            open_baton(seal(slots, PUBLIC, place), KEY, place)


def test_seeds_of_another_number_or_length_are_refused() -> None:
    for slots in (SLOTS[:2], (*SLOTS, None), (b"a" * 15, None, None)):
        with pytest.raises(BatonError, match="3 slots"):
            seal(slots, PUBLIC, PLACE)
    with pytest.raises(ParameterError, match="bands"):
        replace(PLACE, bands=MAX_BANDS + 1)
    with pytest.raises(BatonError, match="fingerprint"):
        replace(PLACE, fingerprint=os.urandom(15))


def test_the_ends_of_a_place() -> None:
    for name, least, most in (("bands", 1, 1 << 12), ("round", 0, MAX_ROUND), ("lineage", 0, (1 << 32) - 1)):
        for number in (least, most):
            assert getattr(replace(PLACE, **{name: number}), name) == number
        for number in (least - 1, most + 1):
            with pytest.raises(ParameterError, match=name):
                replace(PLACE, **{name: number})
    # A bit for each of b - 1 seeds, in whole bytes.
    assert [replace(PLACE, bands=bands).baton_bytes for bands in (1, 2, 9, 10)] == [
        *(37 + 16, 37 + 1 + 16 + 16, 37 + 1 + 8 * 16 + 16, 37 + 2 + 9 * 16 + 16)
    ]


def test_a_baton_of_another_length_is_named_as_such() -> None:
    baton = seal(SLOTS, PUBLIC, PLACE)
    with pytest.raises(BatonError, match=f"has {PLACE.baton_bytes} bytes, got {PLACE.baton_bytes + 1}"):
        open_baton(baton + b"\0", KEY, PLACE)


@pytest.mark.parametrize(("round", "known"), [(0, 0), (1, 0), (2, 1), (3, 2), (4, 3)])
def test_seeds_are_of_rounds_from_the_first_on(round: int, known: int) -> None:
    place = replace(PLACE, round=round)
    for count in range(4):
        slots = (b"a" * 16, b"b" * 16, b"c" * 16)[:count] + (None,) * (3 - count)
        if count <= known:
            assert open_baton(seal(slots, PUBLIC, place), KEY, place) == slots
        else:
            with pytest.raises(BatonError, match="before the first"):
                open_baton(seal(slots, PUBLIC, place), KEY, place)
