from __future__ import annotations

from collections import Counter
from contextlib import suppress
from fractions import Fraction
from itertools import combinations, product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd.errors import ShareError
from cpsgd.secagg import shamir


@given(st.binary(min_size=32, max_size=32), st.data())
def test_any_threshold_shares_give_the_secret(secret: bytes, data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=12, unique=True))
    threshold = data.draw(st.integers(1, len(holders)))
    shares = shamir.split(secret, threshold, holders)
    chosen = data.draw(st.permutations(holders))[:threshold]
    assert all(len(share) == shamir.SHARE_BYTES for share in shares.values())
    assert shamir.combine({holder: shares[holder] for holder in chosen}) == secret


def test_a_hundred_shares() -> None:
    secret = bytes(range(200, 232))
    shares = shamir.split(secret, 51, range(100))
    assert shamir.combine({holder: shares[holder] for holder in range(49, 100)}) == secret
    with suppress(ShareError):  # one short: some other number, which may be too large for a secret
        assert shamir.combine({holder: shares[holder] for holder in range(50)}) != secret


@pytest.mark.parametrize("secret", [bytes(32), b"\xff" * 32])
def test_the_ends_of_the_range(secret: bytes) -> None:
    shares = shamir.split(secret, 3, range(5))
    for chosen in combinations(range(5), 3):
        assert shamir.combine({holder: shares[holder] for holder in chosen}) == secret


def test_fewer_shares_say_nothing_over_all_polynomials_of_a_small_field() -> None:
    """For p = 7 and t = 3: whatever the secret, two shares take every pair of values once."""
    for holders in combinations(range(5), 2):
        views = []
        for secret in range(7):
            seen: Counter[tuple[bytes, ...]] = Counter()
            for coefficients in product(range(7), repeat=2):
                drawn = iter(coefficients)
                with mock.patch.multiple(shamir, PRIME=7), mock.patch("secrets.randbelow", lambda _, d=drawn: next(d)):
                    shares = shamir.split(secret.to_bytes(32, "big"), 3, range(5))
                seen[tuple(shares[holder] for holder in holders)] += 1
            views.append(seen)
        assert all(view == views[0] for view in views)
        assert set(views[0].values()) == {1}
        assert len(views[0]) == 49


def test_coefficients_are_drawn_from_the_whole_field() -> None:
    with mock.patch("secrets.randbelow", return_value=5) as drawn:
        shares = shamir.split(bytes(32), 2, [0, 1])
    drawn.assert_called_once_with(shamir.PRIME)
    assert [int.from_bytes(share, "big") for share in shares.values()] == [5, 10]


def test_interpolation_against_fractions() -> None:
    """Lagrange's formula in exact fractions, for a polynomial small enough not to be reduced."""
    with mock.patch("secrets.randbelow", side_effect=[3, 1, 4]):
        shares = shamir.split((2**200).to_bytes(32, "big"), 4, [1, 3, 4, 8, 9])
    points = {holder + 1: int.from_bytes(share, "big") for holder, share in shares.items()}
    for chosen in combinations(points, 4):
        value = Fraction(0)
        for x in chosen:
            weight = Fraction(points[x])
            for other in chosen:
                if other != x:
                    weight *= Fraction(other, other - x)
            value += weight
        assert value == 2**200
        kept = {x - 1: points[x].to_bytes(33, "big") for x in chosen}
        assert shamir.combine(kept) == (2**200).to_bytes(32, "big")


def test_the_modulus_is_prime() -> None:
    """Pocklington would be a proof; forty rounds of Miller and Rabin err with probability 4^-40."""
    p, odd, twos = shamir.PRIME, shamir.PRIME - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in range(2, 42):
        power = pow(base, odd, p)
        assert power in (1, p - 1) or any(pow(power, 2**i, p) == p - 1 for i in range(1, twos))
    assert p > 2**256


@pytest.mark.parametrize("wrong", [b"", b"\0" * 32, b"\0" * 34, b"\xff" * 33, shamir.PRIME.to_bytes(33, "big")])
def test_what_is_no_share_is_refused(wrong: bytes) -> None:
    good = shamir.split(bytes(32), 2, [0, 1])
    with pytest.raises(ShareError):
        shamir.combine({0: good[0], 1: wrong})


def test_shares_that_do_not_belong_together_are_refused_if_they_give_no_secret() -> None:
    with pytest.raises(ShareError, match="no secret"):
        shamir.combine({0: (2**256 + 1).to_bytes(33, "big")})
    with pytest.raises(ShareError, match="No shares"):
        shamir.combine({})


def spoilt(share: bytes, by: int) -> bytes:
    return ((int.from_bytes(share, "big") + by) % shamir.PRIME).to_bytes(33, "big")


@given(st.data())
def test_wrong_shares_within_the_bound_are_corrected_and_their_holders_named(data: st.DataObject) -> None:
    holders = data.draw(st.lists(st.integers(0, 2**20), min_size=1, max_size=14, unique=True))
    threshold = data.draw(st.integers(1, len(holders)))
    secret = data.draw(st.binary(min_size=32, max_size=32))
    shares = shamir.split(secret, threshold, holders)
    wrong = data.draw(st.permutations(holders))[: (len(holders) - threshold) // 2]
    changes = {holder: data.draw(st.sampled_from([1, -1, 2**256])) for holder in wrong}
    received = {**shares, **{holder: spoilt(shares[holder], by) for holder, by in changes.items()}}
    assert shamir.decode(received, threshold) == (secret, frozenset(wrong))


@pytest.mark.parametrize(("count", "threshold"), [(5, 3), (9, 5), (10, 4), (4, 4)])
def test_one_wrong_share_more_is_refused(count: int, threshold: int) -> None:
    secret, most = bytes(range(32)), (count - threshold) // 2
    shares = shamir.split(secret, threshold, range(count))
    received = {holder: spoilt(share, 7**holder) if holder <= most else share for holder, share in shares.items()}
    if most == 0 and count == threshold:
        with suppress(ShareError):  # t shares are always on some polynomial, whose secret may be too large
            assert shamir.decode(received, threshold)[0] != secret
        return
    with pytest.raises(ShareError, match=f"more than {most} are wrong"):
        shamir.decode(received, threshold)


def test_shares_of_liars_who_agree_on_another_polynomial() -> None:
    """So many liars that theirs is the nearer one: the decoder believes them, and only a commitment tells."""
    own, other = shamir.split(bytes(32), 3, range(9)), shamir.split(b"\x01" * 32, 3, range(9))
    mixed = {holder: other[holder] if holder < 6 else own[holder] for holder in range(9)}
    assert shamir.decode(mixed, 3) == (b"\x01" * 32, frozenset({6, 7, 8}))


@pytest.mark.parametrize("holders", [(0,), (3, 0), tuple(range(0, 600, 7)), (2**20, 5, 2**19), tuple(range(300))])
def test_the_fast_weights_are_lagranges(holders: tuple[int, ...]) -> None:
    points = [holder + 1 for holder in holders]
    for j, weight in enumerate(shamir._weights(holders)):
        numerator = denominator = 1
        for m, point in enumerate(points):
            if m != j:
                numerator, denominator = numerator * point, denominator * (point - points[j])
        assert weight == numerator * pow(denominator, -1, shamir.PRIME) % shamir.PRIME


@pytest.mark.parametrize(
    ("secret", "threshold", "holders"),
    [(bytes(31), 1, [0]), (bytes(32), 0, [0]), (bytes(32), 2, [0]), (bytes(32), 1, [0, 0]), (bytes(32), 1, [-1, 0])],
)
def test_what_cannot_be_dealt_is_refused(secret: bytes, threshold: int, holders: list[int]) -> None:
    with pytest.raises(ShareError):
        shamir.split(secret, threshold, holders)


def test_more_shares_than_one_block_of_rows_and_wrong_ones_among_few() -> None:
    """Weights of many holders are made in blocks; a decoder has no more room than (n - t)/2 wrong shares."""
    holders = range(0, 3 * 1100, 3)
    secret = bytes(range(32))
    shares = shamir.split(secret, 2, holders)
    assert shamir.combine(shares) == secret
    few = {holder: shares[holder] for holder in list(holders)[:4]}
    assert shamir.decode(few, 2) == (secret, frozenset())
    zero = shamir.split(bytes(32), 3, range(7))
    assert shamir.decode(zero, 3) == (bytes(32), frozenset())
    wrong = {**zero, 2: shares[3], 5: shares[6]}
    assert shamir.decode(wrong, 3) == (bytes(32), frozenset({2, 5}))


def test_one_of_two_shares_may_give_the_secret() -> None:
    secret = bytes(range(32))
    assert shamir.split(secret, 1, [0, 9]) == {0: b"\0" + secret, 9: b"\0" + secret}


def test_a_holder_of_many_wrong_shares_is_noted_256_times() -> None:
    secret = bytes(range(32))
    shares = shamir.split(secret, 1, range(4))
    recovery = shamir.Recovery(1, 1)
    for owner in range(258):
        assert recovery.secret(owner, {**shares, 2: spoilt(shares[2], 1)}, lambda found: found == secret) == secret
    assert recovery.disputed == {(owner, 2) for owner in range(256)}


def test_division_by_a_polynomial_of_higher_degree() -> None:
    assert shamir._divided([5], [1, 1]) == ([0], [5])
    assert shamir._divided([0, 0, 1], [1, 1]) == ([shamir.PRIME - 1, 1], [1])  # x² = (x - 1)(x + 1) + 1


def test_the_order_in_which_shares_are_believed() -> None:
    """First those of holders not in dispute, then what a decoder leaves, then runs, then all choices of liars."""
    secret = bytes(range(32))
    shares = shamir.split(secret, 3, range(7))
    received = {**shares, 1: spoilt(shares[1], 5), 4: spoilt(shares[4], 9)}
    recovery = shamir.Recovery(3, 2)
    first, second, *others = (set(guess) for guess in recovery._guesses(received))
    assert (first, second) == (set(range(7)), {0, 2, 3, 5, 6})
    assert others[0] == {0, 1, 2}
    assert others[-21:] == [set(range(7)) - {i, j} for i, j in combinations(range(7), 2)]
    assert recovery.secret(0, received, lambda found: found == secret) == secret
    assert recovery.disputed == {(0, 1), (0, 4)}
    # Those holders are not believed at first any more.
    assert set(next(recovery._guesses(shares))) == {0, 2, 3, 5, 6}
    assert set(next(recovery._guesses({holder: shares[holder] for holder in (0, 1, 2, 3, 4)}))) == {0, 2, 3}
    # Just enough shares are all believed, at once and no other ones.
    assert [set(guess) for guess in shamir.Recovery(3, 1)._guesses({i: shares[i] for i in range(3)})] == [{0, 1, 2}] * 2


def test_of_many_shares_runs_of_neighbouring_holders_are_tried() -> None:
    """Also where more are wrong than a decoder finds: some 32 runs, whose secret the commitment knows."""
    secret = bytes(range(32))
    shares = shamir.split(secret, 8, range(64))
    received = {holder: share if 20 <= holder < 40 else spoilt(share, holder) for holder, share in shares.items()}
    assert shamir.Recovery(8, 1).secret(0, received, lambda found: found == secret) == secret
    runs = [set(guess) for guess in shamir.Recovery(8, 1)._guesses(received) if len(guess) == 8]
    assert runs == [{(start + i) % 64 for i in range(8)} for start in range(0, 64, 3)]


def test_how_many_shares_are_tried_without_every_choice_of_liars() -> None:
    """16,384 are looked at, at most; and as many as give a secret are left."""
    for colluding, most in ((1, 128), (2, 32)):
        recovery = shamir.Recovery(3, colluding)
        assert [recovery._tries_all(count) for count in (2 + colluding, 3 + colluding, most, most + 1)] == [
            *(False, True, True, False)
        ]


def test_the_zero_polynomial_keeps_one_coefficient() -> None:
    assert [shamir._trimmed(each) for each in ([0], [0, 0], [5, 0], [0, 5, 0, 0])] == [[0], [0], [5], [0, 5]]
