"""A baton: the seeds of a lineage's last rounds, sealed to the one client that goes on with them.

A lineage is a sequence of clients, one per round, whose noise cancels over rounds. Each draws noise from a fresh seed,
and takes away part of the noise that the last b - 1 of the lineage have added. For that it needs their seeds. They
travel through the server, which must not read them:

| bytes | field |
|---|---|
| 4 | magic, `cpsb` |
| 1 | version |
| 32 | X25519 public key that the sender made for this baton |
| the rest | a bit per round that is there, newest first, then b - 1 seeds of 16 bytes each; sealed |

Sealed is with ChaCha20-Poly1305 under a key from HKDF-SHA-256, to which the federation (the run and the protocol), the
lineage, the round and both public keys are bound. Both public keys serve for one baton. The length depends on b alone.

Anybody can seal a baton: that a stranger's seeds do no harm is shown in docs/proofs/seeds.md.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from cpsgd import _validate
from cpsgd.codec import wire
from cpsgd.correlated.draws import SEED_BYTES
from cpsgd.errors import BatonError, MessageError, VersionError

MAGIC = b"cpsb"
VERSION = 1
KEY_BYTES = 32
TAG_BYTES = 16

FINGERPRINT_BYTES = 16
MAX_BANDS = 1 << 12
MAX_LINEAGES = 1 << 32

Slots = tuple[bytes | None, ...]
"""Seeds by age, the newest first; None where the lineage has none."""

_LABEL = b"cpsgd baton 1\0"
_PLACE = struct.Struct("<IQI")
_HEADER_BYTES = len(MAGIC) + 1 + KEY_BYTES
# A key seals one message, so the nonce may be constant.
_NONCE = bytes(12)


@dataclass(frozen=True)
class Place:
    """The federation, round and lineage that a baton is for.

    Attributes:
        run: The engine's name of the run.
        fingerprint: The protocol's.
        bands: b, the rounds whose noise a message holds, its own included.
        round: The round in which the seeds are used next.
        lineage: The server's number of the lineage in that round.
    """

    run: str
    fingerprint: bytes
    bands: int
    round: int
    lineage: int = 0

    def __post_init__(self) -> None:
        _validate.integer("bands", self.bands, low=1, high=MAX_BANDS)
        _validate.integer("round", self.round, low=0, high=wire.MAX_ROUND)
        _validate.integer("lineage", self.lineage, low=0, high=MAX_LINEAGES - 1)
        if not isinstance(self.fingerprint, bytes) or len(self.fingerprint) != FINGERPRINT_BYTES:
            raise BatonError(f"Expected a fingerprint of {FINGERPRINT_BYTES} bytes.")

    @property
    def federation(self) -> bytes:
        """32 bytes that identify the run and the protocol: seeds are of use in one federation only."""
        return hashlib.sha256(_LABEL + self.fingerprint + self.run.encode()).digest()

    @property
    def baton_bytes(self) -> int:
        """Length of the baton in bytes."""
        return baton_bytes(self.bands)

    def bound(self, ephemeral: bytes, public: bytes) -> bytes:
        """Returns the associated data of the encryption: a baton opens only for the same data."""
        return self.federation + _PLACE.pack(self.lineage, self.round, self.bands) + ephemeral + public


def baton_bytes(bands: int) -> int:
    """Returns the length of a baton for noise with this many bands."""
    return _HEADER_BYTES + _flag_bytes(bands) + SEED_BYTES * (bands - 1) + TAG_BYTES


def seal(slots: Sequence[bytes | None], public: bytes, place: Place) -> bytes:
    """Returns the baton with these seeds for the holder of the private half of `public`.

    Raises:
        MessageError: The key is one that no honest client can have.
        BatonError: There are not b - 1 slots (b is `place.bands`), or a seed has another length.
    """
    if len(slots) != place.bands - 1 or any(seed is not None and len(seed) != SEED_BYTES for seed in slots):
        raise BatonError(f"A baton has {place.bands - 1} slots for seeds of {SEED_BYTES} bytes.")
    if len(public) != KEY_BYTES:
        raise MessageError(f"A public key has {KEY_BYTES} bytes, got {len(public)}.")
    private = X25519PrivateKey.generate()
    ephemeral = private.public_key().public_bytes_raw()
    bound = place.bound(ephemeral, public)
    flags = sum(1 << age for age, seed in enumerate(slots) if seed is not None)
    plain = flags.to_bytes(_flag_bytes(place.bands), "little") + b"".join(seed or bytes(SEED_BYTES) for seed in slots)
    cipher = _cipher(_agree(private, public), bound)
    return MAGIC + bytes([VERSION]) + ephemeral + cipher.encrypt(_NONCE, plain, bound)


def open_baton(baton: bytes, private: X25519PrivateKey, place: Place) -> Slots:
    """Returns the seeds in a baton that was sealed for this key and place.

    Raises:
        VersionError: It is of another version.
        BatonError: It is not a baton for this client, federation, lineage and round.
    """
    if not isinstance(baton, bytes) or not baton.startswith(MAGIC):
        raise BatonError("Not a baton: the first four bytes are not 'cpsb'. A new lineage begins without it.")
    if len(baton) > len(MAGIC) and baton[len(MAGIC)] != VERSION:
        raise VersionError(
            f"The baton is of version {baton[len(MAGIC)]}, and this client reads version {VERSION}: install the same "
            "release everywhere."
        )
    if len(baton) != place.baton_bytes:
        raise BatonError(f"A baton for {place.bands} bands has {place.baton_bytes} bytes, got {len(baton)}.")
    ephemeral = baton[_HEADER_BYTES - KEY_BYTES : _HEADER_BYTES]
    bound = place.bound(ephemeral, private.public_key().public_bytes_raw())
    try:
        plain = _cipher(_agree(private, ephemeral), bound).decrypt(_NONCE, baton[_HEADER_BYTES:], bound)
    except (InvalidTag, MessageError):
        raise BatonError(
            "The baton was not sealed for this client in this federation, lineage and round. A new lineage begins "
            "without it."
        ) from None
    start = _flag_bytes(place.bands)
    flags = int.from_bytes(plain[:start], "little")
    if flags >> (place.bands - 1):
        raise BatonError("The baton announces more seeds than it has slots.")
    seeds = (plain[start + SEED_BYTES * age :][:SEED_BYTES] for age in range(place.bands - 1))
    slots = tuple(seed if flags >> age & 1 else None for age, seed in enumerate(seeds))
    known = [seed for seed in slots if seed is not None]
    if len(set(known)) < len(known) or any(slots[max(0, place.round - 1) :]):
        raise BatonError("The baton holds a seed twice, or one of a round before the first: no honest client's does.")
    return slots


def _agree(private: X25519PrivateKey, public: bytes) -> bytes:
    try:
        return private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise MessageError("A public key is not one that an honest client can have.") from None


def _flag_bytes(bands: int) -> int:
    return (bands + 6) // 8


def _cipher(shared: bytes, bound: bytes) -> ChaCha20Poly1305:
    return ChaCha20Poly1305(HKDF(algorithm=SHA256(), length=32, salt=None, info=_LABEL + bound).derive(shared))
