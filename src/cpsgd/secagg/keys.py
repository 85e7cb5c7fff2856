"""Keys: X25519 agreement, HKDF with everything in its `info`, and the sealing of shares.

Each derived key is bound to its purpose, to the round (through the `context`: a digest of all parameters, the session
and whether it is signed) and to the clients it is for. No key serves twice.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterable
from functools import lru_cache

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cpsgd.errors import MessageError, ParameterError, ShareError, SignatureError

_LABEL = b"cpsgd secagg 1 "
_PAIR = struct.Struct("<II")
KEY_BYTES = 32
PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
# A key seals one message, so the nonce may be constant.
_NONCE = bytes(12)


def digest(purpose: bytes, *parts: bytes) -> bytes:
    """Returns the SHA-256 of a purpose and parts, all of fixed length except perhaps the last."""
    return hashlib.sha256(_LABEL + purpose + b"\0" + b"".join(parts)).digest()


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Returns the secret two clients share.

    Raises:
        MessageError: The public key is a point of low order, which no honest client sends.
    """
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise MessageError("A public key is not one that an honest client can have.") from None


def pair_mask_key(private: X25519PrivateKey, public: bytes, context: bytes, one: int, other: int) -> bytes:
    """Returns the key of the mask between two clients, the same for both of them."""
    pair = _PAIR.pack(min(one, other), max(one, other))
    return _derive(agree(private, public), b"pair mask\0" + context + pair, 16)


def self_mask_key(seed: bytes, context: bytes, index: int) -> bytes:
    """Returns the key of a client's own mask."""
    return _derive(seed, b"self mask\0" + context + _PAIR.pack(index, index), 16)


def commitment(seed: bytes, context: bytes, index: int) -> bytes:
    """Returns a commitment to a client's seed, by which the server recognises it; it reveals nothing."""
    return digest(b"commitment", context, _PAIR.pack(index, index), seed)


def seal(shared: bytes, context: bytes, sender: int, receiver: int, adverts: bytes, plaintext: bytes) -> bytes:
    """Encrypts for a neighbour; bound to both clients' public keys, `adverts`, the sender's first."""
    cipher, bound = _channel(shared, context, sender, receiver, adverts)
    return cipher.encrypt(_NONCE, plaintext, bound)


def open_sealed(shared: bytes, context: bytes, sender: int, receiver: int, adverts: bytes, ciphertext: bytes) -> bytes:
    """Decrypts what `seal` made.

    Raises:
        ShareError: It was not sealed by this sender for this receiver in this round, or they saw other public keys.
    """
    cipher, bound = _channel(shared, context, sender, receiver, adverts)
    try:
        return cipher.decrypt(_NONCE, ciphertext, bound)
    except InvalidTag:
        raise ShareError(f"What client {sender} sealed for client {receiver} cannot be opened.") from None


def _channel(
    shared: bytes, context: bytes, sender: int, receiver: int, adverts: bytes
) -> tuple[ChaCha20Poly1305, bytes]:
    bound = context + _PAIR.pack(sender, receiver) + adverts
    return ChaCha20Poly1305(_derive(shared, b"share\0" + bound, 32)), bound


def _derive(secret: bytes, info: bytes, length: int) -> bytes:
    return HKDF(algorithm=SHA256(), length=length, salt=None, info=_LABEL + info).derive(secret)


# ---------------------------------------------------------------------- identities, rosters and signatures


def as_roster(roster: Iterable[bytes]) -> frozenset[bytes]:
    """Checks a roster and returns it as a set of raw public keys, of 32 bytes each."""
    found = frozenset(roster)
    if not found or not all(isinstance(key, bytes) and len(key) == PUBLIC_BYTES for key in found):
        raise ParameterError("Expected roster to hold Ed25519 public keys as 32 bytes each.")
    return found


@lru_cache(maxsize=4)
def roster_digest(roster: frozenset[bytes]) -> bytes:
    """Returns 32 bytes that identify the roster, independent of the order of its keys."""
    return digest(b"roster", *sorted(roster))


def public_bytes(identity: Ed25519PrivateKey) -> bytes:
    """Returns the public key by which a roster knows this identity."""
    return identity.public_key().public_bytes_raw()


def verify(public: bytes, signature: bytes, signed: bytes, client: int) -> None:
    """Checks a signature.

    Raises:
        SignatureError: It is wrong, or over something else.
    """
    if not is_signed(public, signature, signed):
        raise SignatureError(f"The signature of client {client} is wrong.")


@lru_cache(maxsize=1 << 12)
def is_signed(public: bytes, signature: bytes, signed: bytes) -> bool:
    """Returns whether a signature is right."""
    # Remembered, for clients that share a process, as in simulations, all check the same signatures.
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, signed)
    except (InvalidSignature, ValueError):
        return False
    return True
