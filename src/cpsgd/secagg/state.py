"""What a client remembers between messages, and the same as bytes. All of it is secret."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field

from cpsgd.errors import MessageError, SecureVersionError
from cpsgd.secagg import keys, shamir, wire
from cpsgd.secagg.wire import Advert, Invitation, Stage

_MAGIC = b"cpsk"
_VERSION = 2
_HEAD = struct.Struct("<4sBB")
_LENGTH = struct.Struct("<I")
_DIGEST_BYTES = 32
_STAGES = tuple(stage for stage in Stage if stage is not Stage.UPLOAD)
_SECTIONS = 10
PAIR_BYTES = 2 * shamir.SHARE_BYTES


@dataclass(repr=False)
class ClientState:
    """Everything a client must remember. Secrets are forgotten as soon as no later stage needs them.

    Attributes:
        stage: What the client does next.
        invitation: What it agreed to; None before.
        channel_private: X25519 private key of the channels, until the shares are delivered.
        mask_private: X25519 private key of the masks, until the upload.
        signing_private: Ed25519 private key that was made for the round, until the survivors are signed; with a roster
            there is none.
        seed: Of its own mask, until the upload.
        own_share: Its share of its own seed.
        adverts: Of itself and the neighbours it was told of, until the upload.
        cohort: All who take part, as bytes.
        received: Of each neighbour: a share of its seed, then a share of its mask key.
        survivors: The set of survivors it signed, as bytes.
    """

    stage: Stage = Stage.ADVERTISE
    invitation: Invitation | None = None
    channel_private: bytes = b""
    mask_private: bytes = b""
    signing_private: bytes = b""
    seed: bytes = b""
    own_share: bytes = b""
    adverts: dict[int, Advert] = field(default_factory=dict)
    cohort: bytes = b""
    received: dict[int, bytes] = field(default_factory=dict)
    survivors: bytes = b""

    def to_bytes(self) -> bytes:
        """All of it, readable by whoever holds the bytes."""
        sections = [
            self.invitation.write() if self.invitation else b"",
            self.channel_private,
            self.mask_private,
            self.signing_private,
            self.seed,
            self.own_share,
            wire.write_entries({client: advert.to_bytes() for client, advert in self.adverts.items()}),
            self.cohort,
            wire.write_entries(self.received),
            self.survivors,
        ]
        body = _HEAD.pack(_MAGIC, _VERSION, _STAGES.index(self.stage))
        body += b"".join(_LENGTH.pack(len(section)) + section for section in sections)
        return body + hashlib.sha256(body).digest()

    @classmethod
    def from_bytes(cls, data: bytes) -> ClientState:
        """What `to_bytes` wrote.

        Raises:
            SecureAggregationError: The bytes are damaged.
        """
        sections, stage = _sections(data)
        invitation = Invitation.read(sections[0]) if sections[0] else None
        if (invitation is None) != (stage is Stage.ADVERTISE):
            raise MessageError("The saved state contradicts itself.")
        if any(len(secret) not in (0, keys.KEY_BYTES) for secret in sections[1:5]):
            raise MessageError("The saved state holds a key of the wrong length.")
        if len(sections[5]) not in (0, shamir.SHARE_BYTES):
            raise MessageError("The saved state holds a share of the wrong length.")
        most = invitation.session.parameters.neighbours + 1 if invitation else 0
        adverts = wire.read_entries(sections[6], wire.ADVERT_BYTES, most)
        return cls(
            stage=stage,
            invitation=invitation,
            channel_private=sections[1],
            mask_private=sections[2],
            signing_private=sections[3],
            seed=sections[4],
            own_share=sections[5],
            adverts={client: Advert.from_bytes(entry) for client, entry in adverts.items()},
            cohort=sections[7],
            received=wire.read_entries(sections[8], PAIR_BYTES, most),
            survivors=sections[9],
        )


def _sections(data: bytes) -> tuple[list[bytes], Stage]:
    if not isinstance(data, bytes) or len(data) < _HEAD.size + _DIGEST_BYTES:
        raise MessageError("Not the saved state of a client: too short.")
    magic, version, stage = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise MessageError("Not the saved state of a client: the first four bytes are not 'cpsk'.")
    if version != _VERSION:
        raise SecureVersionError(
            f"The saved state has version {version}; this release reads {_VERSION}. A round is ended with the release "
            "it was begun with: leave this one, and take part in the next."
        )
    body = memoryview(data)[:-_DIGEST_BYTES]
    if hashlib.sha256(body).digest() != data[-_DIGEST_BYTES:]:
        raise MessageError("The digest does not match: the saved state was damaged.")
    sections: list[bytes] = []
    start = _HEAD.size
    while start + _LENGTH.size <= len(body):
        (length,) = _LENGTH.unpack_from(body, start)
        sections.append(bytes(body[start + _LENGTH.size : start + _LENGTH.size + length]))
        start += _LENGTH.size + length
    if start != len(body) or len(sections) != _SECTIONS or not 0 < stage < len(_STAGES):
        raise MessageError("The saved state is malformed.")
    return sections, _STAGES[stage]
