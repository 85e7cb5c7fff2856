"""Wrong shares at the end of a round: they cost nothing within the bound, and whose they are comes out."""

from __future__ import annotations

import time

import numpy as np
import pytest

from cpsgd.errors import ParameterError, ShareError
from cpsgd.secagg import Stage, offenders, packets, shamir
from cpsgd.secagg.packets import Kind
from cpsgd.secagg.shamir import Recovery

from .rounds import Round, new_round, parameters


def lie(current: Round, client: int, answer: bytes, by: int = 1) -> bytes:
    """An answer to the last request in which every share is wrong."""
    body = answer[packets.HEADER_BYTES :]
    shares = [int.from_bytes(body[i : i + 33], "big") for i in range(0, len(body), 33)]
    wrong = b"".join(((share + by) % shamir.PRIME).to_bytes(33, "big") for share in shares)
    return current.server._session.write(Kind.REVELATION, client, wrong)


@pytest.mark.parametrize(("neighbours", "threshold"), [(10, 6), (8, 6)])
@pytest.mark.parametrize("same", [False, True])
def test_lies_within_the_bound_cost_nothing_and_are_pinned_on_the_liars(
    neighbours: int, threshold: int, same: bool
) -> None:
    current = new_round(parameters(11, neighbours=neighbours, threshold=threshold)).until(Stage.MASK)
    current.step(frozenset({4}))
    current.until(Stage.UNMASK)
    near = current.server._neighbours
    liars = (0, 2) if neighbours == 10 else (0,)
    for client in current.waiting:
        answer = current.answer(client)
        by = 1 if same else 7**client + 1
        current.server.receive(client, lie(current, client, answer, by) if client in liars else answer)
    current.server.advance()
    found = current.server.result()
    np.testing.assert_array_equal(found.sums, current.expected(found.survivors))
    expected = {(owner, liar) for liar in liars for owner in (*near[liar], liar)}
    assert set(found.disputed) == expected
    assert offenders(found.disputed, most=len(liars)) == set(liars)


def test_a_dealer_of_wrong_shares_is_found_as_well() -> None:
    current = new_round(parameters(11)).until(Stage.SHARE)
    genuine = shamir.split

    def wrongly(secret: bytes, threshold: int, holders: list[int]) -> dict[int, bytes]:
        other = genuine(bytes(32), threshold, holders)
        return {**genuine(secret, threshold, holders), 1: other[1], 2: other[2]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shamir, "split", wrongly)
        answer = current.answer(5)
    current.server.receive(5, answer)
    current.step(frozenset({5}))
    found = current.finish()
    assert found.disputed == ((5, 1), (5, 2))
    assert offenders(found.disputed, most=1) == {5}
    np.testing.assert_array_equal(found.sums, current.expected(tuple(range(11))))


def test_who_lied_once_is_not_believed_again() -> None:
    """Which makes later secrets as cheap as without liars: nothing is decoded twice."""
    recovery = Recovery(threshold=4)
    decoded = 0
    genuine = shamir.decode

    def counted(shares: dict[int, bytes], threshold: int) -> tuple[bytes, frozenset[int]]:
        nonlocal decoded
        decoded += 1
        return genuine(shares, threshold)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shamir, "decode", counted)
        for owner in range(6):
            secret = bytes([owner]) * 32
            shares = shamir.split(secret, 4, range(9))
            received = {**shares, 3: shamir.split(secret, 4, range(9))[3]}
            assert recovery.secret(owner, received, secret.__eq__) == secret
    assert decoded == 1
    assert recovery.disputed == {(owner, 3) for owner in range(6)}


def test_too_many_lies_end_the_round_without_a_sum() -> None:
    current = new_round(parameters(7)).until(Stage.UNMASK)
    for client in current.waiting:
        answer = current.answer(client)
        current.server.receive(client, lie(current, client, answer, 7**client) if client < 5 else answer)
    with pytest.raises(ShareError, match="too many of them are wrong"):
        current.server.advance()


def test_offenders_are_those_who_cannot_be_honest() -> None:
    assert offenders([], most=1) == frozenset()
    assert offenders([(0, 1)], most=1) == frozenset()
    assert offenders([(0, 1), (0, 2)], most=1) == {0}
    assert offenders([(0, 1), (0, 2), (1, 2)], most=2) == frozenset()
    # Its own share of its own seed nobody else has dealt or revealed.
    assert offenders([(4, 4)], most=3) == {4}
    with pytest.raises(ParameterError, match="most"):
        offenders([], most=0)


@pytest.mark.parametrize("liars", [20, 60])
def test_many_liars_do_not_keep_the_server_busy(liars: int) -> None:
    """Among a hundred who are all neighbours; the processor time of a quarter of its secrets, in ten seconds."""
    recovery, holders = Recovery(threshold=51), range(100)
    start = time.process_time()
    for owner in range(25):
        secret = bytes([owner]) * 32
        shares = shamir.split(secret, 51, holders)
        wrong = {holder: shamir.split(secret, 51, holders)[holder] for holder in range(0, liars)}
        if liars <= 24:
            assert recovery.secret(owner, {**shares, **wrong}, secret.__eq__) == secret
        else:
            with pytest.raises(ShareError):
                recovery.secret(owner, {**shares, **wrong}, secret.__eq__)
    assert time.process_time() - start < 10.0
    assert {holder for _, holder in recovery.disputed} == (set(range(liars)) if liars <= 24 else set())


def test_nobody_can_pin_a_fault_on_an_honest_client() -> None:
    """One client deals another a wrong share, and reveals a wrong share of it: they are in dispute twice."""
    liar, victim = 5, 2
    current = new_round(parameters(11)).until(Stage.SHARE)
    genuine = shamir.split

    def wrongly(secret: bytes, threshold: int, holders: list[int]) -> dict[int, bytes]:
        return {**genuine(secret, threshold, holders), victim: genuine(bytes(32), threshold, holders)[victim]}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shamir, "split", wrongly)
        answer = current.answer(liar)
    current.server.receive(liar, answer)
    current.step(frozenset({liar}))
    current.until(Stage.UNMASK)
    for client in current.waiting:
        answer = current.answer(client)
        if client == liar:
            start = packets.HEADER_BYTES + 33 * victim
            body = answer[packets.HEADER_BYTES : start] + bytes(33) + answer[start + 33 :]
            answer = current.server._session.write(Kind.REVELATION, client, body)
        current.server.receive(client, answer)
    current.server.advance()
    found = current.server.result()
    assert found.disputed == ((victim, liar), (liar, victim))
    assert offenders(found.disputed, most=1) == frozenset()


def share(value: int) -> bytes:
    return (value % shamir.PRIME).to_bytes(33, "big")


@pytest.mark.parametrize(("holders", "threshold"), [(5, 4), (12, 8)])
def test_liars_whose_errors_cancel_do_not_make_others_look_like_liars(holders: int, threshold: int) -> None:
    """One deals the victim a wrong share, so that it is asked last; then two lie so that secrets come out right."""
    liars, victim = (0, 1), 2
    recovery = Recovery(threshold, colluding=2)
    others = tuple(holder for holder in range(holders) if holder != victim)
    weights = dict(zip(others, shamir._weights(others), strict=True))
    for owner in range(holders):
        secret = bytes([owner]) * 32
        shares = shamir.split(secret, threshold, range(holders))
        if owner == liars[0]:
            shares[victim] = share(1)
        elif owner not in liars:
            for liar, other in (liars, liars[::-1]):
                error = weights[other] if liar == liars[0] else -weights[other]
                shares[liar] = share(int.from_bytes(shares[liar], "big") + error)
        assert recovery.secret(owner, shares, secret.__eq__) == secret
    assert offenders(recovery.disputed, most=2) == frozenset()
    assert all(set(pair) & set(liars) for pair in recovery.disputed)


def test_one_lie_about_an_honest_clients_secret_is_not_its_fault() -> None:
    """With one share to spare it can be found only if each is left out once, which many clients would take too long."""
    holders, threshold, secret = 200, 199, bytes(range(32))
    shares = {**shamir.split(secret, threshold, range(holders)), 10: share(7)}
    with pytest.raises(ShareError) as caught:
        Recovery(threshold).secret(3, shares, secret.__eq__)
    assert caught.value.dealer is None


@pytest.mark.parametrize(
    ("holders", "colluding", "proved"),
    [(8, 1, True), (7, 1, False), (8, 2, False), (9, 2, True), (10, 2, True), (11, 2, True)],
)
def test_a_dealer_is_at_fault_if_nobody_else_can_be(holders: int, colluding: int, proved: bool) -> None:
    secret = bytes(range(32))
    shares = shamir.split(secret, 7, range(holders))
    with pytest.raises(ShareError) as caught:
        Recovery(7, colluding).secret(3, shares, lambda found: False)
    assert caught.value.dealer == (3 if proved else None)


def test_shares_of_one_polynomial_are_consistent() -> None:
    shares = shamir.split(bytes(range(32)), 4, [0, 2, 3, 5, 8, 9])
    assert shamir.consistent(shares, 4)
    assert shamir.consistent(shares, 5)
    assert not shamir.consistent(shares, 3)
    assert not shamir.consistent({**shares, 5: share(1)}, 5)  # one share more than give the secret
    assert not shamir.consistent({**shares, 5: share(1)}, 4)
    assert shamir.consistent({**shares, 5: share(1)}, 6)
