"""One complaint about one box: what it proves, what it reveals, and proofs that a liar could make up."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Callable

import pytest

from cpsgd.errors import MessageError, ShareError
from cpsgd.secagg import Stage, edwards
from cpsgd.secagg.keys import BOX_BYTES, PROOF_BYTES, SHARES_BYTES, ChannelKey, Route

from .rounds import Round, new_round, parameters

CONTEXT, MASKS = bytes(32), (b"\1" * 32, b"\2" * 32)


def pair() -> tuple[ChannelKey, ChannelKey, Route]:
    sender, receiver = ChannelKey(os.urandom(32)), ChannelKey(os.urandom(32))
    return sender, receiver, Route(CONTEXT, 3, 5, sender.public + MASKS[0], receiver.public + MASKS[1])


def test_a_proof_shows_the_secret_of_two_clients_and_no_other() -> None:
    sender, receiver, route = pair()
    shares = bytes(SHARES_BYTES)
    box = sender.seal(route, shares)
    assert (len(box), receiver.open(route, box)) == (BOX_BYTES, shares)
    proof = receiver._prove(route)
    assert len(proof) == PROOF_BYTES
    assert route.proved_secret(proof) == receiver.agree(sender.public) == sender.agree(receiver.public)
    for place in (0, 31, 40, 70, 95):
        with pytest.raises(ValueError, match=r"wrong|honest"):
            route.proved_secret(proof[:place] + bytes([proof[place] ^ 1]) + proof[place + 1 :])
    for other in (pair()[2], Route(CONTEXT, 4, 5, route.adverts[:64], route.adverts[64:])):
        with pytest.raises(ValueError, match="wrong"):
            other.proved_secret(proof)


def test_an_honest_client_reveals_nothing_about_a_box_that_its_neighbour_did_not_sign() -> None:
    """Else a server that changes boxes on the way would be told the secrets of honest clients."""
    sender, receiver, route = pair()
    box = sender.seal(route, bytes(SHARES_BYTES))
    for changed in (bytes(BOX_BYTES), box[:20] + bytes([box[20] ^ 1]) + box[21:], box[:-1] + bytes([box[-1] ^ 1])):
        with pytest.raises(ShareError, match="is not signed") as caught:
            receiver.open(route, changed)
        assert caught.value.proof == b""
    # Nor if the two were shown other keys of each other.
    elsewhere = Route(CONTEXT, 3, 5, sender.public + MASKS[1], receiver.public + MASKS[1])
    with pytest.raises(ShareError, match="is not signed"):
        receiver.open(route, sender.seal(elsewhere, bytes(SHARES_BYTES)))


def test_a_complaint_is_short_enough_for_an_engines_error_text() -> None:
    sender, receiver, route = pair()
    with pytest.raises(ShareError) as caught:
        receiver.open(route, sender.seal(route, b"\xff" * SHARES_BYTES))
    assert len(str(caught.value)) + len("cpsgd.errors.ShareError: ") < 300
    assert re.search(r" Proof: [A-Za-z0-9+/]{128}$", str(caught.value))


# ---------------------------------------------------------------------- proofs that are made up


def forged(route: Route, secret: edwards.Point, witness: int, done: Callable[[int], bool] = lambda _: True) -> bytes:
    """A proof with this secret, from tries until the challenge is as it should be."""
    theirs = edwards.multiply(8, edwards.decode(route.sender_key))
    for nonce in range(1, 1_000):
        commitments = [edwards.multiply(nonce, base) for base in (edwards.multiply(8, edwards.BASE), theirs)]
        challenge = route.challenge(edwards.encode(secret), *commitments)
        if done(challenge):
            response = (nonce + challenge * witness) % edwards.ORDER
            return edwards.encode(secret) + challenge.to_bytes(32, "little") + response.to_bytes(32, "little")
    raise AssertionError


def of_order_eight() -> edwards.Point:
    for y in range(2, 100):
        try:
            point = edwards.multiply(edwards.ORDER, edwards.decode(y.to_bytes(32, "little")))
        except MessageError:
            continue
        if not edwards.is_identity(edwards.multiply(4, point)):
            return point
    raise AssertionError


def fixed() -> tuple[ChannelKey, ChannelKey, Route]:
    sender, receiver = ChannelKey(bytes([1]) * 32), ChannelKey(bytes([2]) * 32)
    return sender, receiver, Route(CONTEXT, 3, 5, sender.public + MASKS[0], receiver.public + MASKS[1])


def test_a_secret_with_a_part_of_small_order_is_no_secret() -> None:
    """Both equations hold where 8 divides the challenge; with another secret a good box would look bad."""
    _, receiver, route = fixed()
    scalar = int.from_bytes(hashlib.sha512(bytes([2]) * 32).digest()[:32], "little") & ((1 << 254) - 8) | 1 << 254
    true = edwards.multiply(scalar // 8, edwards.multiply(8, edwards.decode(route.sender_key)))
    assert route.proved_secret(forged(route, true, scalar // 8)) == receiver.agree(route.sender_key)
    moved = edwards.add(true, of_order_eight())
    with pytest.raises(MessageError, match="wrong"):
        route.proved_secret(forged(route, moved, scalar // 8, lambda challenge: challenge % 8 == 0))


def test_the_neutral_element_is_no_secret() -> None:
    sender, _, route = fixed()
    empty = Route(CONTEXT, 3, 5, sender.public + MASKS[0], edwards.encode(edwards.IDENTITY) + MASKS[1])
    with pytest.raises(MessageError, match="wrong"):
        empty.proved_secret(forged(empty, edwards.IDENTITY, 0))
    with pytest.raises(MessageError, match="wrong"):
        route.proved_secret(forged(route, edwards.IDENTITY, 0))


@pytest.mark.parametrize("seed", range(6))
def test_a_proof_of_any_key_is_taken(seed: int) -> None:
    sender, receiver = ChannelKey(bytes([9]) * 32), ChannelKey(bytes([seed]) * 32)
    route = Route(CONTEXT, 3, 5, sender.public + MASKS[0], receiver.public + MASKS[1])
    assert route.proved_secret(receiver._prove(route)) == sender.agree(receiver.public)


def test_a_proof_is_written_in_one_way() -> None:
    _, receiver, route = fixed()
    proof = receiver._prove(route)
    response = int.from_bytes(proof[64:], "little") + edwards.ORDER
    with pytest.raises(MessageError, match="wrong"):
        route.proved_secret(proof[:64] + response.to_bytes(32, "little"))
    for other in (proof[:-1], proof + b"\0", b""):
        with pytest.raises(MessageError, match="96 bytes"):
            route.proved_secret(other)


def test_the_box_of_known_keys() -> None:
    """Releases open each other's boxes."""
    sender, receiver, route = fixed()
    shares = 2 * bytes(range(SHARES_BYTES // 2))
    box = sender.seal(route, shares)
    assert hashlib.sha256(box).hexdigest() == "b70bba9a11ae2863302199c88fba0c386dd388b1d24449222055dff61240534b"
    assert receiver.open(route, box) == shares


# ---------------------------------------------------------------------- judgement


def delivered() -> tuple[Round, Route, ChannelKey, ChannelKey]:
    """A round in which client 1 holds a box of client 0, with both of their keys."""
    round = new_round(parameters(4))
    round.until(Stage.SHARE)
    seeds = [client._state.channel_private for client in round.clients if client._state is not None]
    round.step()
    server = round.server
    route = Route(server._context, 0, 1, server._adverts[0].keys, server._adverts[1].keys)
    return round, route, ChannelKey(seeds[0]), ChannelKey(seeds[1])


def test_who_is_proved_to_lie() -> None:
    round, route, sender, receiver = delivered()
    server = round.server
    proof = receiver._prove(route)
    assert server.judge(1, 0, b"") is None
    found = server.judge(1, 0, proof)
    assert found is not None
    assert (found[0], "without a reason" in found[1]) == (1, True)
    found = server.judge(1, 0, bytes([proof[0] ^ 1]) + proof[1:])
    assert found is not None
    assert (found[0], "is wrong" in found[1]) == (1, True)
    for bad, said in ((sender.seal(route, b"\xff" * SHARES_BYTES), "opened"), (bytes(BOX_BYTES), "did not sign")):
        server._sealed[0][1] = bad
        found = server.judge(1, 0, proof)
        assert found is not None
        assert (found[0], said in found[1]) == (0, True)
    # Nobody but who holds the box, and no longer than it lies there.
    assert server.judge(1, 7, proof) is None
    assert server.judge(7, 0, proof) is None
    assert new_round(parameters(4)).until(Stage.SHARE).server.judge(1, 0, proof) is None
    round.step()
    assert server.judge(1, 0, proof) is None
