from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.errors import MessageError
from cpsgd.secagg import masks


@given(st.integers(1, 32), st.integers(1, 70), st.integers(0, 2**32))
def test_bytes_and_back(bits: int, dim: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, 2**bits, size=dim, dtype=np.uint32)
    payload = b"".join(masks.to_planes(masks.to_words(values, dim, bits), bits))
    assert len(payload) == (bits * dim + 7) // 8
    np.testing.assert_array_equal(masks.from_bytes(payload, dim, bits), values)


@given(st.integers(1, 32), st.integers(1, 40), st.binary(max_size=170))
def test_any_bytes_are_integers_or_refused(bits: int, dim: int, payload: bytes) -> None:
    for tried in (payload, payload.ljust((bits * dim + 7) // 8, b"\xff")):
        try:
            words = masks.from_bytes(tried, dim, bits)
        except MessageError:
            continue
        assert b"".join(masks.to_planes(words, bits)) == tried


@pytest.mark.parametrize("bits", [3, 8, 12, 16, 17, 32])
@pytest.mark.parametrize("dim", [1, 100, 70_001])
def test_masks_are_the_keystream_and_opposite_signs_cancel(bits: int, dim: int) -> None:
    random = np.random.default_rng(bits)
    values = random.integers(0, 2**bits, size=dim, dtype=np.uint32)
    words = masks.to_words(values, dim, bits)
    keys = [bytes([i]) * 16 for i in range(3)]
    masks.apply(words, [(keys[0], 1), (keys[1], -1), (keys[2], 1)])
    expected = values.astype(np.int64)
    for key, sign in zip(keys, (1, -1, 1), strict=True):
        stream = Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor().update(bytes(dim * words.itemsize))
        expected = expected + sign * np.frombuffer(stream, words.dtype).astype(np.int64)
    np.testing.assert_array_equal(words.astype(np.int64) % 2**bits, expected % 2**bits)
    masks.apply(words, [(keys[2], -1), (keys[0], -1), (keys[1], 1)])
    np.testing.assert_array_equal(words.astype(np.uint32) & np.uint32(2**bits - 1), values)


def test_more_masks_than_are_applied_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "_MASKS_AT_ONCE", 2)
    words, whole = np.zeros(9, "<u2"), np.zeros(9, "<u2")
    applied = [(bytes([i]) * 16, 1) for i in range(5)]
    masks.apply(words, iter(applied))
    for key, sign in applied:
        masks.apply(whole, [(key, sign)])
    np.testing.assert_array_equal(words, whole)
