"""`Upload`: the bytes that a client sends to the leader, with both parts sealed, and who vouches for them.

Layout, numbers least significant first: "cpsgd pair 1" and four zero bytes, the report's id (16), the round (4), the
sender's Ed25519 key and signature (32 and 64; zeros without a roster), the length of the helper's sealed part (4), that
part, and the leader's sealed part to the end.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass, replace

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from numpy.typing import NDArray

from cpsgd.errors import MessageError, SignatureError
from cpsgd.secagg.pair.proof import make_report, open_leader
from cpsgd.secagg.pair.sealing import OVERHEAD, seal
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.streams import ID_BYTES, SEED_BYTES, digest

_MAGIC = b"cpsgd pair 1\0\0\0\0"
_HEAD = struct.Struct("<16s16sI32s64sI")
ID = slice(16, 32)
"""Where an upload has the report's id."""
NOBODY = bytes(32)
"""The sender of a report where nobody vouches for reports."""
TOKEN_BYTES = 32


@dataclass(frozen=True, repr=False)
class Upload:
    """A report as it travels.

    Attributes:
        id: The report's id.
        round: Number of the round.
        sender: The sender's public key, or `NOBODY`.
        signature: The sender's signature over the task, the id, the helper's part and the leader's share.
        helper: The helper's sealed part.
        leader: The leader's sealed part.
    """

    id: bytes
    round: int
    sender: bytes
    signature: bytes
    helper: bytes
    leader: bytes

    def to_bytes(self) -> bytes:
        """Returns the upload as it is sent."""
        head = _HEAD.pack(_MAGIC, self.id, self.round, self.sender, self.signature, len(self.helper))
        return head + self.helper + self.leader

    @classmethod
    def from_bytes(cls, data: bytes) -> Upload:
        """Reads an upload.

        Raises:
            MessageError: The bytes are not an upload.
        """
        if len(data) < _HEAD.size:
            raise MessageError(f"Expected an upload of at least {_HEAD.size} bytes, got {len(data)}.")
        magic, report, number, sender, signature, length = _HEAD.unpack_from(data)
        if magic != _MAGIC:
            raise MessageError("This is no upload of cpsgd's pair protocol, version 1.")
        if not OVERHEAD <= length <= OVERHEAD + SEED_BYTES + TOKEN_BYTES or _HEAD.size + length > len(data):
            raise MessageError("The helper's part has an impossible length.")
        end = _HEAD.size + length
        return cls(report, number, sender, signature, data[_HEAD.size : end], data[end:])


def upload_bytes(shape: RoundShape, *, tokens: bool = False) -> int:
    """Returns the exact length of every upload of a round."""
    extra = TOKEN_BYTES if tokens else 0
    return _HEAD.size + 2 * (OVERHEAD + extra) + SEED_BYTES + shape.leader_bytes


def make_upload(
    shape: RoundShape,
    round: int,
    values: NDArray[np.uint32],
    *,
    leader_key: bytes,
    helper_key: bytes,
    identity: Ed25519PrivateKey | None = None,
    tokens: tuple[bytes, bytes] | None = None,
) -> Upload:
    """Returns one client's upload for its integers.

    Args:
        shape: That of the round.
        round: Its number.
        values: The client's integers.
        leader_key: The leader's public key.
        helper_key: The helper's public key.
        identity: Signs, where there is a roster.
        tokens: A secret for each server that admits the client, where these are used; each sealed for its server, so
            that neither can use the other's.
    """
    name = os.urandom(ID_BYTES)
    report = make_report(shape, values, report=name)
    admitted = (b"", b"") if tokens is None else tokens
    helper = seal(helper_key, admitted[1] + report.helper, shape, name, "helper")
    leader = seal(leader_key, admitted[0] + report.leader, shape, name, "leader", helper)
    found = Upload(name, round, NOBODY, bytes(64), helper, leader)
    if identity is None:
        return found
    part = open_leader(shape, name, report.leader).part
    public = identity.public_key().public_bytes_raw()
    return replace(found, sender=public, signature=identity.sign(_signed(shape, found, part)))


def check_signature(shape: RoundShape, upload: Upload, part: bytes) -> None:
    """Checks the sender's signature; `part` is the hash of the leader's share.

    Raises:
        SignatureError: It is wrong, or over something else.
    """
    try:
        Ed25519PublicKey.from_public_bytes(upload.sender).verify(upload.signature, _signed(shape, upload, part))
    except (InvalidSignature, ValueError):
        raise SignatureError("The report's signature is wrong.") from None


def _signed(shape: RoundShape, upload: Upload, part: bytes) -> bytes:
    return digest("signature", shape, upload.id, upload.helper, part)
