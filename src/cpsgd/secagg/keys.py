"""Keys: X25519 agreement, HKDF with everything in its `info`, signatures, and the boxes that shares are sealed in.

Each derived key is bound to its purpose, to the round (through the `context`: a digest of all parameters, the session
and whether it is signed) and to the clients it is for. No key serves twice.

A box is a ciphertext under the Diffie-Hellman secret S of two channel keys, and a signature over it. A channel key is
an Ed25519 key whose scalar serves for X25519 as well (Thormarker, "On using the same key pair for Ed25519 and an X25519
based KEM", 2021), so the sender signs with the channel key itself.

**The complaint.** A client that finds no shares in a signed box reveals S, as a point, and proves with the
non-interactive proof of Chaum and Pedersen (1992) that S is its own scalar times the sender's key. Whoever holds the
box then opens it. Either it is bad, and its sender is named; or it is good, or the proof is wrong, and the accuser is.

**Nothing leaks.** S opens the two boxes between these clients and nothing else. One of the two lies and knows S: the
signature under its channel key proves that it knows the scalar. (Without, it could choose a multiple of a third
client's key and learn from S what those two share.) The signature also keeps a server from changing a box on the way:
an honest client does not complain with S about what its neighbour has not signed, for the keys that both of them saw.
Every scalar is a multiple of 8, so points of small order in a key do not matter; S itself must have none.
"""

from __future__ import annotations

import hashlib
import secrets
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
from cpsgd.secagg import edwards, shamir

_LABEL = b"cpsgd secagg 1 "
_PAIR = struct.Struct("<II")
KEY_BYTES = 32
PUBLIC_BYTES = 32
SIGNATURE_BYTES = 64
SHARES_BYTES = 2 * shamir.SHARE_BYTES
_SEALED_BYTES = SHARES_BYTES + 16  # the tag of ChaCha20-Poly1305
BOX_BYTES = _SEALED_BYTES + SIGNATURE_BYTES
PROOF_BYTES = 96
_NUMBER = 32
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
    """Encrypts for a neighbour, bound to `adverts`: both clients' public keys, the sender's first."""
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


# ---------------------------------------------------------------------- boxes


class ChannelKey:
    """A client's private key of one round. It encrypts shares for neighbours in signed boxes, and opens theirs."""

    def __init__(self, seed: bytes) -> None:
        """Makes the key from a secret seed of 32 bytes."""
        self._signer = Ed25519PrivateKey.from_private_bytes(seed)
        self._scalar = hashlib.sha512(seed).digest()[:32]  # X25519 sets and clears the same bits as Ed25519
        self.public = public_bytes(self._signer)

    def agree(self, public: bytes) -> bytes:
        """Returns the secret shared with the owner of another channel key.

        Raises:
            MessageError: The public key is not one that an honest client can have.
        """
        return agree_on_channel(X25519PrivateKey.from_private_bytes(self._scalar), public)

    def seal(self, box: Route, shares: bytes) -> bytes:
        """Encrypts shares for the box's receiver, and returns them with the sender's signature."""
        sealed = seal(self.agree(box.receiver_key), box.context, box.sender, box.receiver, box.adverts, shares)
        return sealed + self._signer.sign(box.signed(sealed))

    def open(self, box: Route, data: bytes) -> bytes:
        """Checks the signature of a box, and returns the shares in it.

        Raises:
            ShareError: It is not signed, or it is signed without valid shares. For the second case there is a `proof`.
        """
        if not box.is_signed(data):
            raise ShareError(f"What client {box.sender} sealed for client {box.receiver} is not signed.")
        try:
            return box.read(self.agree(box.sender_key), data)
        except ShareError as error:
            raise ShareError(str(error), proof=self._prove(box)) from None

    def _prove(self, box: Route) -> bytes:
        """Returns the secret shared with the box's sender, and a proof that it belongs to their public keys.

        The proof is that of Chaum and Pedersen: one private number turns the base point into the receiver's public key,
        and the sender's public key into the secret.
        """
        scalar = int.from_bytes(self._scalar, "little") & ((1 << 254) - 8) | 1 << 254
        witness, theirs = scalar // 8, edwards.multiply(8, edwards.decode(box.sender_key))
        secret = edwards.encode(edwards.multiply(witness, theirs))
        nonce = secrets.randbelow(edwards.ORDER)
        commitments = [edwards.multiply(nonce, base) for base in (_BASE, theirs)]
        challenge = box.challenge(secret, *commitments)
        response = (nonce + challenge * witness) % edwards.ORDER
        return secret + challenge.to_bytes(_NUMBER, "little") + response.to_bytes(_NUMBER, "little")


class Route:
    """The round, the clients and the public keys that a box is bound to."""

    def __init__(self, context: bytes, sender: int, receiver: int, sender_keys: bytes, receiver_keys: bytes) -> None:
        """Takes the public keys of each client, as in its advert: the channel key first."""
        self.context, self.sender, self.receiver = context, sender, receiver
        self.adverts = sender_keys + receiver_keys
        self.sender_key, self.receiver_key = sender_keys[:KEY_BYTES], receiver_keys[:KEY_BYTES]

    @property
    def _bound(self) -> bytes:
        return self.context + _PAIR.pack(self.sender, self.receiver) + self.adverts

    def signed(self, sealed: bytes) -> bytes:
        """Returns the bytes that the sender signs."""
        return digest(b"box", self._bound, sealed)

    def is_signed(self, data: bytes) -> bool:
        """Returns whether the sender has signed a box."""
        return is_signed(self.sender_key, data[_SEALED_BYTES:], self.signed(data[:_SEALED_BYTES]))

    def read(self, shared: bytes, data: bytes) -> bytes:
        """Decrypts a box with the secret that its two clients share, and returns the shares in it.

        Raises:
            ShareError: It cannot be decrypted, or holds no valid shares.
        """
        shares = open_sealed(shared, self.context, self.sender, self.receiver, self.adverts, data[:_SEALED_BYTES])
        try:
            shamir.check(shares[: shamir.SHARE_BYTES])
            shamir.check(shares[shamir.SHARE_BYTES :])
        except ShareError:
            raise ShareError(f"What client {self.sender} sealed for client {self.receiver} are no shares.") from None
        return shares

    def challenge(self, secret: bytes, *commitments: edwards.Point) -> int:
        """Returns the challenge of a proof: a hash of the box's keys, the secret and the commitments."""
        parts = b"".join(map(edwards.encode, commitments))
        return int.from_bytes(digest(b"box proof", self._bound, secret, parts), "little") % edwards.ORDER

    def proved_secret(self, proof: bytes) -> bytes:
        """Checks a proof of the box's receiver, and returns the secret in it that both clients share.

        Raises:
            MessageError: The proof is wrong.
        """
        if len(proof) != PROOF_BYTES:
            raise MessageError(f"A proof has {PROOF_BYTES} bytes, got {len(proof)}.")
        secret = edwards.decode(proof[:_NUMBER])
        challenge, response = (int.from_bytes(proof[i : i + _NUMBER], "little") for i in (_NUMBER, 2 * _NUMBER))
        theirs = edwards.multiply(8, edwards.decode(self.sender_key))
        own = edwards.decode(self.receiver_key)
        commitments = [
            edwards.add(edwards.multiply(response, base), edwards.negative(edwards.multiply(challenge, image)))
            for base, image in ((_BASE, own), (theirs, secret))
        ]
        if (
            edwards.is_identity(secret)
            or not edwards.is_identity(edwards.multiply(edwards.ORDER, secret))
            or response >= edwards.ORDER
            or self.challenge(proof[:_NUMBER], *commitments) != challenge
        ):
            raise MessageError("The proof of a client's secret is wrong.")
        return montgomery(proof[:_NUMBER])


def agree_on_channel(private: X25519PrivateKey, public: bytes) -> bytes:
    """Returns the secret shared with the owner of a channel key.

    Raises:
        MessageError: The public key is not one that an honest client can have.
    """
    return agree(private, montgomery(public))


def montgomery(data: bytes) -> bytes:
    """Returns the X25519 public key of the point that 32 bytes encode, without checking the encoding.

    Raises:
        MessageError: It has none: the neutral element.
    """
    y = (int.from_bytes(data, "little") & ((1 << 255) - 1)) % edwards.PRIME
    if y == 1:
        raise MessageError("A public key is not one that an honest client can have.")
    return ((1 + y) * pow(1 - y, -1, edwards.PRIME) % edwards.PRIME).to_bytes(32, "little")


_BASE = edwards.multiply(8, edwards.BASE)
