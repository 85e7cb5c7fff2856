"""Uploads: what each server can open, how long they are, and who vouches for them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.errors import MessageError, SignatureError
from cpsgd.secagg.pair import upload as uploads
from cpsgd.secagg.pair.extension import modular_sum
from cpsgd.secagg.pair.proof import open_helper, open_leader
from cpsgd.secagg.pair.sealing import OVERHEAD, unseal
from cpsgd.secagg.pair.shape import RoundShape
from cpsgd.secagg.pair.upload import Upload, check_signature, make_upload, upload_bytes

SHAPE = RoundShape.choose(prime=337, dim=100, task=b"uploads")
VALUES = (np.arange(100) % 2).astype(np.uint32)
LEADER, HELPER = X25519PrivateKey.generate(), X25519PrivateKey.generate()
TOKENS = bytes(range(32)), bytes(range(100, 132))


def made(identity: Ed25519PrivateKey | None = None, tokens: tuple[bytes, bytes] | None = None) -> Upload:
    leader_key, helper_key = (key.public_key().public_bytes_raw() for key in (LEADER, HELPER))
    return make_upload(SHAPE, 7, VALUES, leader_key=leader_key, helper_key=helper_key, identity=identity, tokens=tokens)


@pytest.mark.parametrize("tokens", [None, TOKENS], ids=["open", "tokens"])
def test_each_server_opens_its_own_part_with_its_own_token(tokens: tuple[bytes, bytes] | None) -> None:
    upload = made(tokens=tokens)
    assert (upload.round, upload.sender, upload.signature) == (7, bytes(32), bytes(64))
    helper = unseal(HELPER, upload.helper, SHAPE, upload.id, "helper")
    leader = unseal(LEADER, upload.leader, SHAPE, upload.id, "leader", upload.helper)
    extra = 32 if tokens else 0
    assert (leader[:extra], helper[:extra]) == (tokens or (b"", b""))
    first = open_leader(SHAPE, upload.id, leader[extra:])
    second = open_helper(SHAPE, upload.id, helper[extra:])
    assert np.array_equal(modular_sum(first.values, second.values, 337), VALUES)
    # The leader's part goes with this helper's part alone.
    with pytest.raises(MessageError):
        unseal(LEADER, upload.leader, SHAPE, upload.id, "leader", upload.helper[::-1])
    data = upload.to_bytes()
    # 16 of the format, id, round, key, signature, a length; two sealed parts, a seed and the leader's share.
    assert len(data) == 16 + 16 + 4 + 32 + 64 + 4 + 2 * (48 + extra) + 32 + SHAPE.leader_bytes
    assert len(data) == upload_bytes(SHAPE, tokens=tokens is not None)
    assert tokens is not None or len(data) == SHAPE.upload_bytes
    assert data[uploads.ID] == upload.id
    assert Upload.from_bytes(data) == upload


def test_a_signature_is_over_the_id_and_both_parts() -> None:
    identity = Ed25519PrivateKey.generate()
    upload = made(identity)
    assert upload.sender == identity.public_key().public_bytes_raw()
    leader = unseal(LEADER, upload.leader, SHAPE, upload.id, "leader", upload.helper)
    part = open_leader(SHAPE, upload.id, leader).part
    check_signature(SHAPE, upload, part)
    stranger = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
    for wrong in (replace(upload, id=bytes(16)), replace(upload, helper=bytes(80)), replace(upload, sender=stranger)):
        with pytest.raises(SignatureError):
            check_signature(SHAPE, wrong, part)
    with pytest.raises(SignatureError):
        check_signature(SHAPE, upload, part[::-1])


def test_lengths_that_no_upload_has() -> None:
    upload = made()
    head = len(replace(upload, helper=b"", leader=b"").to_bytes())
    with pytest.raises(MessageError, match="at least"):
        Upload.from_bytes(upload.to_bytes()[: head - 1])
    with pytest.raises(MessageError, match="no upload"):
        Upload.from_bytes(b"x" + upload.to_bytes()[1:])
    for length, good in ((OVERHEAD - 1, False), (OVERHEAD, True), (OVERHEAD + 64, True), (OVERHEAD + 65, False)):
        data = replace(upload, helper=bytes(length), leader=b"").to_bytes()
        if good:
            assert Upload.from_bytes(data).helper == bytes(length)
            with pytest.raises(MessageError, match="length"):
                Upload.from_bytes(data[:-1])
        else:
            with pytest.raises(MessageError, match="length"):
                Upload.from_bytes(data)
