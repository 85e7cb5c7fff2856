"""Identities: long-lived Ed25519 keys, known to all from a roster, that sign what a server could otherwise forge."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from cpsgd.errors import ParameterError, SignatureError
from cpsgd.secagg import keys

PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64


def as_roster(roster: Iterable[bytes]) -> frozenset[bytes]:
    """The roster as a set of raw public keys, of 32 bytes each."""
    found = frozenset(roster)
    if not found or not all(isinstance(key, bytes) and len(key) == PUBLIC_BYTES for key in found):
        raise ParameterError("Expected roster to hold Ed25519 public keys as 32 bytes each.")
    return found


@lru_cache(maxsize=4)
def roster_digest(roster: frozenset[bytes]) -> bytes:
    """32 bytes that stand for the roster, whatever order its keys were read in."""
    return keys.digest(b"roster", *sorted(roster))


def public_bytes(identity: Ed25519PrivateKey) -> bytes:
    """The public key by which a roster knows this identity."""
    return identity.public_key().public_bytes_raw()


def verify(public: bytes, signature: bytes, signed: bytes, client: int) -> None:
    """Checks a signature.

    Raises:
        SignatureError: It is wrong, or over something else.
    """
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        raise SignatureError(f"The signature of client {client} is wrong.") from None
