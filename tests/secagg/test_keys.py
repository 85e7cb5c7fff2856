"""Key separation: whatever differs, the key differs."""

from __future__ import annotations

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.errors import MessageError, ParameterError, ShareError
from cpsgd.secagg import keys
from cpsgd.secagg.packets import Session

from .rounds import parameters

ALICE, BOB = (X25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in (1, 2))
ALICE_PUBLIC, BOB_PUBLIC = (key.public_key().public_bytes_raw() for key in (ALICE, BOB))


def context(**changes: object) -> bytes:
    session = {"identifier": bytes(16), "signed": False}
    session |= {name: changes.pop(name) for name in tuple(session) if name in changes}
    return Session(parameters=parameters(4, **changes), **session).context


def test_the_context_stands_for_everything() -> None:
    everything: list[dict[str, object]] = [
        {},
        {"round": 8},
        {"bits": 9},
        {"modulus": 200},
        {"modulus": 201},
        {"dim": 6},
        {"surviving": 3},
        {"threshold": 4},
        {"quorum": 4},
    ]
    everything += [{"identifier": bytes([1]) * 16}, {"signed": True}]
    assert len({context(**changes) for changes in everything}) == len(everything)


def test_two_clients_derive_the_same_mask_and_nothing_else_does() -> None:
    key = keys.pair_mask_key(ALICE, BOB_PUBLIC, context(), 0, 1)
    assert key == keys.pair_mask_key(BOB, ALICE_PUBLIC, context(), 1, 0)
    shared = keys.agree(ALICE, BOB_PUBLIC)
    others = [
        keys.pair_mask_key(ALICE, BOB_PUBLIC, context(round=8), 0, 1),
        keys.pair_mask_key(ALICE, BOB_PUBLIC, context(), 0, 2),
        keys.self_mask_key(shared, context(), 0),
        keys.self_mask_key(shared, context(), 1),
        shared[:16],
    ]
    assert len({key, *others}) == 1 + len(others)
    assert keys.commitment(shared, context(), 0) != keys.commitment(shared, context(), 1)


def test_a_sealed_share_opens_only_where_it_belongs() -> None:
    shared, adverts = keys.agree(ALICE, BOB_PUBLIC), ALICE_PUBLIC + BOB_PUBLIC
    sealed = keys.seal(shared, context(), 0, 1, adverts, b"a share")
    assert keys.open_sealed(shared, context(), 0, 1, adverts, sealed) == b"a share"
    wrong = [
        (shared, context(round=8), 0, 1, adverts),
        (shared, context(), 1, 0, adverts),
        (shared, context(), 0, 2, adverts),
        (shared, context(), 0, 1, BOB_PUBLIC + ALICE_PUBLIC),
        (bytes(32), context(), 0, 1, adverts),
    ]
    for arguments in wrong:
        with pytest.raises(ShareError, match="cannot be opened"):
            keys.open_sealed(*arguments, sealed)


def test_the_derivations_are_fixed() -> None:
    """Clients of different releases must derive the same masks."""
    assert keys.pair_mask_key(ALICE, BOB_PUBLIC, context(), 0, 1).hex() == "0a73fc53b620189346ea8a5621c3544c"
    assert keys.self_mask_key(bytes(32), context(), 3).hex() == "05341122f782cf3c1deffbeb622e80ce"
    assert keys.commitment(bytes(32), context(), 3).hex()[:32] == "ca8153f8d81a844c69e46187d360bb15"
    sealed = keys.seal(bytes(32), context(), 0, 1, bytes(128), b"a share")
    assert sealed.hex() == "29296be7a3eb53d0b86e5edb2fc6f2df185f85a1dbc385"


def test_a_point_of_low_order_is_refused() -> None:
    with pytest.raises(MessageError, match="honest"):
        keys.agree(ALICE, bytes(32))


@pytest.mark.parametrize("roster", [[], [bytes(32), bytes(31)], [bytes(32), "0" * 32]])
def test_a_roster_is_of_public_keys_only(roster: list[bytes]) -> None:
    assert keys.as_roster([bytes(32), b"1" * 32]) == {bytes(32), b"1" * 32}
    with pytest.raises(ParameterError, match="32 bytes each"):
        keys.as_roster(roster)
