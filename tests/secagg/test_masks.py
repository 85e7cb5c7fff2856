from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.stats import chi2

from cpsgd.codec import pack
from cpsgd.errors import MessageError, ParameterError
from cpsgd.secagg import masks

MODULI = st.integers(1, 32).map(lambda bits: 2**bits) | st.integers(2, 2**32 - 1)
# Either side of where the words get wider, and those of whose words nearly half, or almost none, are skipped.
AWKWARD = [3, 90, 127, 129, 255, 2**15 - 1, 2**15 + 1, 2**16 + 1, 2**31 - 1, 2**31 + 1, 2**32 - 1]

KNOWN_MASK = [19, 45, 34, 42, 52, 10, 80, 3]


def keystream(key: bytes, size: int) -> bytes:
    return Cipher(algorithms.AES128(key), modes.CTR(bytes(16))).encryptor().update(bytes(size))


def size_bytes(modulus: int, dim: int) -> int:
    bits = modulus.bit_length() - 1
    return (bits * dim + 7) // 8 if modulus == 2**bits else pack.payload_bytes(dim, modulus)


@given(MODULI, st.integers(1, 70), st.integers(0, 2**32))
@example(90, 3, 0)
@example(2**15 - 1, 3, 0)
def test_bytes_and_back(modulus: int, dim: int, seed: int) -> None:
    values = np.random.default_rng(seed).integers(0, modulus, size=dim, dtype=np.uint32)
    kind = masks.Masks(modulus)
    payload = b"".join(kind.to_bytes(kind.to_words(values, dim)))
    assert len(payload) == size_bytes(modulus, dim) == kind.size_bytes(dim)
    largest = modulus - 1 if modulus & (modulus - 1) == 0 else 2 * modulus - 1
    assert kind.word.itemsize == next(size for size in (1, 2, 4, 8) if 256**size > largest)
    assert kind.mask_bytes == (kind.word.itemsize if modulus & (modulus - 1) == 0 else 4)
    np.testing.assert_array_equal(kind.from_bytes(payload, dim), values)


@given(MODULI, st.integers(1, 40), st.binary(max_size=170))
@example(3, 2, b"\xff")
def test_any_bytes_are_integers_or_refused(modulus: int, dim: int, payload: bytes) -> None:
    kind = masks.Masks(modulus)
    for tried in (payload, payload.ljust(size_bytes(modulus, dim), b"\xff")):
        try:
            words = kind.from_bytes(tried, dim)
        except MessageError:
            continue
        assert int(words.max()) < modulus
        assert b"".join(kind.to_bytes(words)) == tried


@given(MODULI.filter(lambda modulus: modulus < 2**32))
def test_values_that_do_not_fit_are_refused(modulus: int) -> None:
    kind = masks.Masks(modulus)
    kind.to_words(np.array([0, modulus - 1], np.uint32), 2)
    with pytest.raises(ParameterError, match=f"below {modulus}"):
        kind.to_words(np.array([0, modulus], np.uint32), 2)


@pytest.mark.parametrize("bits", [3, 8, 12, 16, 17, 32])
@pytest.mark.parametrize("dim", [1, 100, 70_001])
def test_masks_are_the_keystream_and_opposite_signs_cancel(bits: int, dim: int) -> None:
    random = np.random.default_rng(bits)
    values = random.integers(0, 2**bits, size=dim, dtype=np.uint32)
    kind = masks.Masks(2**bits)
    words = kind.to_words(values, dim)
    keys = [bytes([i]) * 16 for i in range(3)]
    kind.apply(words, [(keys[0], 1), (keys[1], -1), (keys[2], 1)])
    expected = values.astype(np.int64)
    for key, sign in zip(keys, (1, -1, 1), strict=True):
        stream = keystream(key, dim * words.itemsize)
        expected = expected + sign * np.frombuffer(stream, words.dtype).astype(np.int64)
    np.testing.assert_array_equal(words.astype(np.int64) % 2**bits, expected % 2**bits)
    kind.apply(words, [(keys[2], -1), (keys[0], -1), (keys[1], 1)])
    np.testing.assert_array_equal(kind.integers(words), values)


def residues(key: bytes, modulus: int, dim: int) -> np.ndarray:
    """A mask as docs/secure-aggregation.md describes it."""
    products = np.frombuffer(keystream(key, 16 * dim + 4096), "<u4").astype(np.uint64) * np.uint64(modulus)
    found = (products >> np.uint64(32))[products % 2**32 >= 2**32 % modulus].astype(np.int64)
    assert len(found) >= dim
    return found[:dim]


@pytest.mark.parametrize("modulus", AWKWARD)
@pytest.mark.parametrize("dim", [1, 100, 70_001])
def test_masks_modulo_any_number_are_as_documented_and_opposite_signs_cancel(modulus: int, dim: int) -> None:
    values = np.random.default_rng(modulus).integers(0, modulus, size=dim, dtype=np.uint32)
    kind = masks.Masks(modulus)
    words = kind.to_words(values, dim)
    keys = [bytes([i]) * 16 for i in range(3)]
    kind.apply(words, [(keys[0], 1), (keys[1], -1), (keys[2], 1)])
    expected = values.astype(np.int64)
    for key, sign in zip(keys, (1, -1, 1), strict=True):
        expected = expected + sign * residues(key, modulus, dim)
    np.testing.assert_array_equal(kind.integers(words), expected % modulus)
    kind.apply(words, [(keys[2], -1), (keys[0], -1), (keys[1], 1)])
    np.testing.assert_array_equal(kind.integers(words), values)


def test_a_word_is_skipped_just_below_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modulo 3 the words w with 3 w mod 2^32 = 0 give no integer, and those with 1 do."""

    class Words(list[int]):
        def fill(self, buffer: np.ndarray, size: int) -> np.ndarray:
            return np.array([self.pop(0) for _ in range(size // 4)], "<u4").view(np.uint8)

    least = pow(3, -1, 2**32)
    monkeypatch.setattr(masks, "Keystream", mock.Mock(side_effect=[Words([0, least, 0, 5])], buffer=np.empty))
    words = np.zeros(2, masks.Masks(3).word)
    masks.Masks(3).apply(words, [(bytes(16), 1)])
    assert words.tolist() == [3 * least >> 32, 0] == [2, 0]


@pytest.mark.parametrize("values", [[1, 2], np.ones(2), np.ones(3, np.uint32), np.ones((2, 1), np.uint32)])
def test_what_are_no_integers_of_the_round_is_refused(values: object) -> None:
    with pytest.raises(ParameterError, match="an array of 2 integers of type uint32"):
        masks.Masks(256).to_words(values, 2)  # type: ignore[arg-type]


def test_a_known_mask() -> None:
    """Pins the construction: other implementations must find the same."""
    kind = masks.Masks(90)
    words = kind.to_words(np.zeros(8, np.uint32), 8)
    kind.apply(words, [(bytes(range(16)), 1)])
    assert words.tolist() == residues(bytes(range(16)), 90, 8).tolist() == KNOWN_MASK


@pytest.mark.parametrize("word_bits", [6, 8])
def test_every_integer_has_equally_many_words(word_bits: int) -> None:
    """The rule with shorter words, where all of them can be tried."""
    for modulus in range(2, 2**word_bits):
        products = [word * modulus for word in range(2**word_bits)]
        kept = [p >> word_bits for p in products if p % 2**word_bits >= 2**word_bits % modulus]
        assert np.bincount(kept, minlength=modulus).tolist() == [2**word_bits // modulus] * modulus


@pytest.mark.parametrize("modulus", [3, 90, 2**31 + 2**29])
def test_masks_are_uniform(modulus: int) -> None:
    dim, cells = 300_000, min(modulus, 60)
    kind = masks.Masks(modulus)
    words = kind.to_words(np.zeros(dim, np.uint32), dim)
    kind.apply(words, [(bytes(16), 1)])
    assert int(words.max()) < modulus
    low, width = np.arange(cells) * modulus // cells, np.diff(np.arange(cells + 1) * modulus // cells)
    counts = np.bincount(np.searchsorted(low, kind.integers(words), side="right") - 1, minlength=cells)
    expected = dim * width / modulus
    assert float(np.sum((counts - expected) ** 2 / expected)) < chi2.isf(1e-6, cells - 1)


@pytest.mark.parametrize("modulus", [2**16, 1000])
def test_more_masks_than_are_applied_at_once(monkeypatch: pytest.MonkeyPatch, modulus: int) -> None:
    monkeypatch.setattr(masks, "_MASKS_AT_ONCE", 2)
    kind = masks.Masks(modulus)
    words, whole = np.zeros(9, kind.word), np.zeros(9, kind.word)
    applied = [(bytes([i]) * 16, 1) for i in range(5)]
    kind.apply(words, iter(applied))
    for key, sign in applied:
        kind.apply(whole, [(key, sign)])
    np.testing.assert_array_equal(words, whole)


@pytest.mark.parametrize("modulus", [2**11, 2**31 + 1, 2**32 - 1])
def test_blocks_do_not_show(monkeypatch: pytest.MonkeyPatch, modulus: int) -> None:
    kind = masks.Masks(modulus)
    whole, blocks = np.zeros(5_000, kind.word), np.zeros(5_000, kind.word)
    kind.apply(whole, [(bytes(16), -1), (bytes([1]) * 16, 1)])
    monkeypatch.setattr(masks, "_BLOCK_BYTES", 800)
    kind.apply(blocks, [(bytes(16), -1), (bytes([1]) * 16, 1)])
    np.testing.assert_array_equal(whole, blocks)


@pytest.mark.parametrize("modulus", [256, 257, 2**16])
def test_integers_are_below_the_modulus(modulus: int) -> None:
    kind = masks.Masks(modulus)
    assert kind.to_words(np.array([0, modulus - 1], np.uint32), 2).tolist() == [0, modulus - 1]
    with pytest.raises(ParameterError, match=f"below {modulus}"):
        kind.to_words(np.array([0, modulus], np.uint32), 2)


@pytest.mark.parametrize(
    ("modulus", "bits"), [(30_000, 16), (2**15 + 1, 32), (2**16, 16), (2**31 + 1, 64), (2**32, 32)]
)
def test_words_are_the_narrowest_that_hold_what_is_added(modulus: int, bits: int) -> None:
    """The sum of two integers, or for a power of two, which wraps around by itself, one."""
    assert masks.Masks(modulus).word.itemsize * 8 == bits
