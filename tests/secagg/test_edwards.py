"""Arithmetic of points, against Ed25519 keys of `cryptography`."""

from __future__ import annotations

import hashlib

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd.errors import MessageError
from cpsgd.secagg import edwards


def test_multiples_of_the_base_are_public_keys() -> None:
    for seed in (bytes(32), bytes(range(32))):
        digest = bytearray(hashlib.sha512(seed).digest()[:32])
        digest[0] &= 248
        digest[31] = digest[31] & 127 | 64
        found = edwards.multiply(int.from_bytes(digest, "little"), edwards.BASE)
        key = Ed25519PrivateKey.from_private_bytes(seed).public_key()
        expected = edwards.decode(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))
        assert all((found[i] * expected[2] - expected[i] * found[2]) % edwards.PRIME == 0 for i in (0, 1))


def test_only_the_neutral_element_is_the_identity() -> None:
    """The point of order two has x = 0 as well, and is not the identity."""
    second = (0, edwards.PRIME - 1, 1, 0)
    assert not edwards.is_identity(second)
    assert edwards.is_identity(edwards.add(second, second))
    assert not edwards.is_identity(edwards.BASE)
    assert edwards.is_identity(edwards.multiply(edwards.ORDER, edwards.BASE))
    assert not edwards.is_identity(edwards.multiply(edwards.ORDER - 1, edwards.BASE))


@pytest.mark.parametrize(
    "data",
    [bytes(31), b"\xff" * 32, *(number.to_bytes(32, "little") for number in (2, edwards.PRIME, edwards.PRIME + 1))],
)
def test_bytes_that_are_no_point_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError, match="honest client"):
        edwards.decode(data)


@pytest.mark.parametrize("number", range(8))
def test_points_and_their_bytes(number: int) -> None:
    """Of keys with even and odd x, and with square roots of both kinds."""
    key = Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32).public_key().public_bytes_raw()
    point = edwards.decode(key)
    assert edwards.encode(point) == key
    double = edwards.add(point, point)  # Z is not 1
    assert edwards.decode(edwards.encode(double))[:2] == edwards.affine(double)
    assert edwards.is_identity(edwards.add(double, edwards.negative(double)))
    assert edwards.encode(edwards.negative(point)) == key[:31] + bytes([key[31] ^ 128])
    assert edwards.multiply(edwards.ORDER - 1, point)[0] != point[0]
    assert edwards.encode(edwards.multiply(edwards.ORDER - 1, point)) == edwards.encode(edwards.negative(point))


def test_the_order_is_that_of_rfc_8032() -> None:
    assert edwards.ORDER == 0x1000000000000000000000000000000014DEF9DEA2F79CD65812631A5CF5D3ED
    assert edwards.encode(edwards.BASE).hex() == "58" + "66" * 31
