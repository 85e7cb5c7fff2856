"""Adverts: the public keys a client announces for one round, signed if there is a roster."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd.errors import MessageError, SignatureError
from cpsgd.secagg import identity, keys
from cpsgd.secagg.wire import Session

_INDEX = struct.Struct("<I")
_KEYS_BYTES = 2 * keys.KEY_BYTES


@dataclass(frozen=True)
class Advert:
    """What is public about a client in one round.

    Attributes:
        keys: The X25519 public keys: 32 bytes for the channels to its neighbours, 32 for its masks.
        identity: The Ed25519 public key of who the client is; empty without a roster.
        signature: By that identity, over all of this, the client's number, the session and the roster; empty without a
            roster.
    """

    keys: bytes
    identity: bytes = b""
    signature: bytes = b""

    @property
    def channel_key(self) -> bytes:
        """The public key shares are sealed for."""
        return self.keys[: keys.KEY_BYTES]

    @property
    def mask_key(self) -> bytes:
        """The public key masks are agreed on with."""
        return self.keys[keys.KEY_BYTES :]

    def to_bytes(self) -> bytes:
        """64 bytes, or 160 with a signature."""
        return self.keys + self.identity + self.signature

    @staticmethod
    def size(signed: bool) -> int:
        """Bytes of an advert."""
        return _KEYS_BYTES + (identity.PUBLIC_BYTES + identity.SIGNATURE_BYTES if signed else 0)

    @classmethod
    def from_bytes(cls, data: bytes, signed: bool) -> Advert:
        """What `to_bytes` wrote, unchecked but for its length.

        Raises:
            MessageError: The length is wrong.
        """
        if len(data) != cls.size(signed):
            raise MessageError(f"An advert takes {cls.size(signed)} bytes, got {len(data)}.")
        end = _KEYS_BYTES + (identity.PUBLIC_BYTES if signed else 0)
        return cls(data[:_KEYS_BYTES], data[_KEYS_BYTES:end], data[end:])

    @classmethod
    def make(
        cls,
        session: Session,
        client: int,
        public_keys: bytes,
        signer: Ed25519PrivateKey | None,
        roster: frozenset[bytes] | None,
    ) -> Advert:
        """The advert of a client, signed if there are a signer and a roster."""
        if signer is None or roster is None:
            return cls(public_keys)
        signature = signer.sign(_signed(session, client, public_keys, roster))
        return cls(public_keys, identity.public_bytes(signer), signature)

    def check(self, session: Session, client: int, roster: frozenset[bytes] | None) -> None:
        """Refuses an advert that is not by somebody on the roster, with the same roster, for this number and session.

        Raises:
            SignatureError: It is not. (Without a roster nothing is checked.)
        """
        if roster is None:
            return
        if self.identity not in roster:
            raise SignatureError(f"Client {client} is nobody on the roster.")
        try:
            identity.verify(self.identity, self.signature, _signed(session, client, self.keys, roster), client)
        except SignatureError:
            raise SignatureError(
                f"The signature of client {client} is wrong, or its roster is not the same as here."
            ) from None


def _signed(session: Session, client: int, public_keys: bytes, roster: frozenset[bytes]) -> bytes:
    """What an advert signs. With the roster in it, all who accept each other have the same one."""
    parts = session.context, _INDEX.pack(client), public_keys, identity.roster_digest(roster)
    return keys.digest(b"advert", *parts)
