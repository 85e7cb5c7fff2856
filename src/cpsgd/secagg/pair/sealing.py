"""Sealed parts: HPKE (RFC 9180, base mode) for one server, bound to the task, the round, the report and the role.

X25519, HKDF-SHA256 and AES-128-GCM, by `cryptography`. What a part is bound to goes into HPKE's `info`, which every key
follows from: opened as another report, in another round or by the other server, a part is not authentic. Without that
a leader could send one client's part to the helper under many ids. The leader's part is bound to the helper's sealed
one, too: nobody who changes that has a report evaluated, whose id would be burnt. X25519 does not withstand quantum
computers.
"""

from __future__ import annotations

from typing import Literal

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from cpsgd.errors import MessageError
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.streams import digest

Role = Literal["leader", "helper"]

OVERHEAD = 48
"""Bytes by which a sealed part is longer: the client's key for this one part, and the tag."""

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_128_GCM)


def seal(public: bytes, part: bytes, shape: RoundShape, report: bytes, role: Role, *beside: bytes) -> bytes:
    """Encrypts a part for the server with this public key, bound to the context and the other bytes."""
    bound = digest(role + " part", shape, report, *beside)
    return _SUITE.encrypt(part, X25519PublicKey.from_public_bytes(public), info=bound)


def unseal(
    private: X25519PrivateKey, sealed: bytes, shape: RoundShape, report: bytes, role: Role, *beside: bytes
) -> bytes:
    """Decrypts a part that was sealed for this server, round and report, and bound to these other bytes.

    Raises:
        MessageError: The part was sealed for something else, or changed.
    """
    try:
        return _SUITE.decrypt(sealed, private, info=digest(role + " part", shape, report, *beside))
    except (InvalidTag, ValueError):
        raise MessageError("A sealed part does not open: it is damaged, or for another server or report.") from None
