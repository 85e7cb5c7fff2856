"""Boxes: the shares that a client seals for a neighbour, and the proof that a box is bad.

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

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.errors import MessageError, ShareError
from cpsgd.secagg import edwards, keys, packets, shamir

SHARES_BYTES = 2 * shamir.SHARE_BYTES
_SEALED_BYTES = SHARES_BYTES + 16  # the tag of ChaCha20-Poly1305
BOX_BYTES = _SEALED_BYTES + keys.SIGNATURE_BYTES
PROOF_BYTES = 96
_NUMBER = 32


class ChannelKey:
    """A client's private key for its boxes in one round."""

    def __init__(self, seed: bytes) -> None:
        """Takes 32 secret bytes."""
        self._signer = Ed25519PrivateKey.from_private_bytes(seed)
        self._scalar = hashlib.sha512(seed).digest()[:32]  # X25519 sets and clears the same bits as Ed25519
        self.public = keys.public_bytes(self._signer)

    def agree(self, public: bytes) -> bytes:
        """Returns the secret shared with the owner of another channel key.

        Raises:
            MessageError: The public key is not one that an honest client can have.
        """
        return agree(X25519PrivateKey.from_private_bytes(self._scalar), public)

    def seal(self, box: Route, shares: bytes) -> bytes:
        """Returns a box with shares for its receiver."""
        sealed = keys.seal(self.agree(box.receiver_key), box.context, box.sender, box.receiver, box.adverts, shares)
        return sealed + self._signer.sign(box.signed(sealed))

    def open(self, box: Route, data: bytes) -> bytes:
        """Returns the shares in a box.

        Raises:
            ShareError: There are none. If its sender signed it, the text ends with a proof of that.
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
        """Takes both clients' public keys as their adverts have them, the channel key first."""
        self.context, self.sender, self.receiver = context, sender, receiver
        self.adverts = sender_keys + receiver_keys
        self.sender_key, self.receiver_key = sender_keys[: keys.KEY_BYTES], receiver_keys[: keys.KEY_BYTES]

    @property
    def _bound(self) -> bytes:
        return self.context + packets.INDEX.pack(self.sender) + packets.INDEX.pack(self.receiver) + self.adverts

    def signed(self, sealed: bytes) -> bytes:
        """Returns the bytes that the sender signs."""
        return keys.digest(b"box", self._bound, sealed)

    def is_signed(self, data: bytes) -> bool:
        """Returns whether the sender has signed a box."""
        return keys.is_signed(self.sender_key, data[_SEALED_BYTES:], self.signed(data[:_SEALED_BYTES]))

    def read(self, shared: bytes, data: bytes) -> bytes:
        """Returns the shares in a box, by the secret of its clients.

        Raises:
            ShareError: There are none.
        """
        shares = keys.open_sealed(shared, self.context, self.sender, self.receiver, self.adverts, data[:_SEALED_BYTES])
        try:
            shamir.check(shares[: shamir.SHARE_BYTES])
            shamir.check(shares[shamir.SHARE_BYTES :])
        except ShareError:
            raise ShareError(f"What client {self.sender} sealed for client {self.receiver} are no shares.") from None
        return shares

    def challenge(self, secret: bytes, *commitments: edwards.Point) -> int:
        """Returns the number that a proof must answer."""
        parts = b"".join(map(edwards.encode, commitments))
        return int.from_bytes(keys.digest(b"box proof", self._bound, secret, parts), "little") % edwards.ORDER

    def proved_secret(self, proof: bytes) -> bytes:
        """Returns the secret of the box's clients, as its receiver has proved it.

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
        return edwards.montgomery(proof[:_NUMBER])


def agree(private: X25519PrivateKey, public: bytes) -> bytes:
    """Returns the secret shared with the owner of a channel key.

    Raises:
        MessageError: The public key is not one that an honest client can have.
    """
    return keys.agree(private, edwards.montgomery(public))


_BASE = edwards.multiply(8, edwards.BASE)
