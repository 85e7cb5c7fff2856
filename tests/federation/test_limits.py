"""A client's limits: each condition by itself, at its boundary; and what a history of rounds costs."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cpsgd import Protocol, Run
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.errors import FingerprintError, ParameterError, RoundRefusedError, WireError
from cpsgd.federation.client_files import Signing
from cpsgd.federation.limits import Limits, RoundKind, check_affordable, open_client_files
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.neighbours import Participation
from cpsgd.privacy.guarantees import guarantee
from cpsgd.promise import Claim, Conditions, Promise
from cpsgd.secagg import SecureParameters
from cpsgd.secagg.parameters import MAX_CLIENTS

DELTA = 1e-5
PROTOCOL = Protocol.binomial(clients=10, dim=2, clip_norm=1.0, levels=16, trials=4_000, modulus=2**16)
# The same integers for vectors twice as long.
TWICE = replace(PROTOCOL, clip_norm=2.0, mechanism=PROTOCOL.mechanism.with_scale(2 * PROTOCOL.mechanism.scale))
NEAR = replace(PROTOCOL, replace_one_distance=1.0, distance_reason="rows are one-hot")
ROUNDS: dict[str, int] = {"rounds": 3, "surviving": 8}


@cache
def cost(protocol: Protocol = PROTOCOL, rounds: int = 3, surviving: int = 8, **options: Any) -> float:
    """ε of rounds among which one client colludes, by the accountant itself."""
    return guarantee(Run.of(protocol, rounds=rounds, surviving=surviving, colluding=1, **options), DELTA).epsilon


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilon": 1.0}, "together"),
        ({"delta": DELTA}, "together"),
        ({"epsilon": 0.0, "delta": DELTA}, "epsilon"),
        ({"epsilon": 1.0, "delta": 1.0}, "delta"),
        ({"epsilon": 1.0, "delta": -1e-9}, "delta"),
        ({"rounds": 0}, "rounds"),
        ({"examples": 0}, "examples"),
        ({"disjoint": True}, "give examples"),
        ({"rate": 0.5, "adjacency": "zero-out"}, "give examples"),
        ({"examples": 5, "rate": 0.5, "adjacency": "zero-out", "disjoint": True}, "not disjoint"),
        ({"examples": 5, "rate": 0.5}, "zero-out"),
        ({"colluding": 0}, "colluding"),
        ({"min_clients": 1}, "min_clients"),
        ({"adjacency": "add-remove"}, "adjacency"),
    ],
)
def test_limits_that_mean_nothing(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        Limits(**options)


def test_the_least_that_limits_may_be() -> None:
    least = Limits(epsilon=1e-9, delta=0.0, rounds=1, examples=1, colluding=1, min_clients=2)
    assert (least.adjacency, least.sampling) == ("replace-one", Participation.every())
    drawn = Limits(examples=1, rate=0.5, adjacency="zero-out")
    assert drawn.sampling == Participation.poisson(0.5)


@pytest.mark.parametrize(
    ("limits", "changes", "said"),
    [
        ({"min_clients": 9}, {}, "at least 9"),
        ({"min_clients": 8}, {}, None),
        ({}, {"surviving": 11}, "sum of 11 of 10"),
        ({}, {"surviving": 10}, None),
        ({}, {"surviving": 1}, "at least 2"),
        ({"rounds": 2}, {}, "announces 3 rounds; this client answers 2"),
        ({"rounds": 3}, {}, None),
        ({}, {"rounds": 0}, "announces 0 rounds; this client answers some"),
        ({}, {"rounds": 1}, None),
    ],
)
def test_numbers_of_clients_and_rounds(limits: dict[str, Any], changes: dict[str, int], said: str | None) -> None:
    if said is None:
        Limits(**limits).check(PROTOCOL, **{**ROUNDS, **changes})
    else:
        with pytest.raises(RoundRefusedError, match=said):
            Limits(**limits).check(PROTOCOL, **{**ROUNDS, **changes})


def test_noise_that_is_correlated_over_fewer_rounds_is_refused() -> None:
    mechanism = ShapedGaussian(
        noise_deviation=3.0, step=0.1, window=80, coordinate_range=0.5, bands=4, run_length=20, separation=1
    )
    protocol = Protocol(clients=4, dim=5, clip_norm=1.0, mechanism=mechanism, rotate=False)
    Limits().check(protocol, rounds=20, surviving=4)
    with pytest.raises(RoundRefusedError, match="correlated over 20"):
        Limits().check(protocol, rounds=21, surviving=4)


def test_what_all_rounds_cost_may_be_the_limit_and_no_more() -> None:
    Limits(epsilon=cost(), delta=DELTA).check(PROTOCOL, **ROUNDS)
    for limits, rounds in (
        (Limits(epsilon=cost() * 0.9999, delta=DELTA), ROUNDS),
        (Limits(epsilon=cost(), delta=DELTA * 0.99), ROUNDS),
        (Limits(epsilon=cost(), delta=DELTA, colluding=2), ROUNDS),
        (Limits(epsilon=cost(), delta=DELTA), {"rounds": 4, "surviving": 8}),
        (Limits(epsilon=cost(), delta=DELTA), {"rounds": 3, "surviving": 7}),
    ):
        with pytest.raises(RoundRefusedError, match="costs ε = "):
            limits.check(PROTOCOL, **rounds)
    Limits(epsilon=0.8 * cost(), delta=DELTA, adjacency="zero-out").check(PROTOCOL, **ROUNDS)


def test_examples_of_a_client_cost_less() -> None:
    epsilon = cost(examples=5)
    assert epsilon < 0.5 * cost()
    Limits(epsilon=epsilon, delta=DELTA, examples=5).check(PROTOCOL, **ROUNDS)
    with pytest.raises(RoundRefusedError, match="costs ε = "):
        Limits(epsilon=0.9999 * epsilon, delta=DELTA, examples=5).check(PROTOCOL, **ROUNDS)


def test_protocols_that_no_client_answers() -> None:
    limits = Limits()
    silent = Protocol.binomial(clients=10, dim=2, clip_norm=1.0, levels=64, trials=0, modulus=2**16)
    with pytest.raises(RoundRefusedError, match="no noise"):
        limits.check(silent, **ROUNDS)
    with pytest.raises(RoundRefusedError, match="sends floats"):
        limits.check(Protocol.gaussian(clients=10, dim=2, clip_norm=1.0, sigma=1.0), **ROUNDS)
    most = replace(PROTOCOL, clients=MAX_CLIENTS, modulus=None)
    limits.check(most, **ROUNDS)
    with pytest.raises(RoundRefusedError, match="among 1048576 at most"):
        limits.check(replace(most, clients=MAX_CLIENTS + 1), **ROUNDS)


def test_the_fingerprint_of_the_one_protocol() -> None:
    pinned = Limits(fingerprint=NEAR.fingerprint)
    pinned.check(NEAR, **ROUNDS)
    with pytest.raises(FingerprintError):
        pinned.check(PROTOCOL, **ROUNDS)
    # Only then is the distance that it states taken for true.
    assert pinned.believed(NEAR) == NEAR
    assert Limits().believed(NEAR) == PROTOCOL


def agreed(limits: Limits, **changes: Any) -> SecureParameters:
    proposed = SecureParameters.choose(
        **{"clients": 10, "dim": 2, "bits": 16, "fingerprint": PROTOCOL.fingerprint, "round": 4, **changes}
    )
    return limits.check_secure(PROTOCOL, proposed, round=4, surviving=8)


def test_the_clients_own_numbers_make_the_parameters_of_secure_aggregation() -> None:
    """Whatever the server says: the graph and the threshold alone are its choice."""
    own = agreed(Limits(), colluding=1)
    assert (own.dim, own.bits, own.modulus, own.round, own.surviving) == (2, 16, None, 4, 8)
    assert agreed(Limits(), colluding=1, dim=7, bits=20, round=9, fingerprint=bytes(16)) == own
    odd = replace(PROTOCOL, modulus=2**16 + 1)
    proposed = SecureParameters.choose(10, 2, 17, fingerprint=bytes(16), round=1, modulus=2**16 + 1, colluding=1)
    found = Limits().check_secure(odd, proposed, round=1, surviving=8)
    assert (found.bits, found.modulus) == (17, 2**16 + 1)


def test_a_graph_that_colluding_clients_see_through_is_refused() -> None:
    assert agreed(Limits(colluding=1), colluding=1).threshold == 6
    with pytest.raises(RoundRefusedError, match="3 colluding clients could see more"):
        agreed(Limits(colluding=3))
    # As many as all of them, or more than there are.
    with pytest.raises(RoundRefusedError, match="could see more"):
        agreed(Limits(colluding=50), colluding=1)
    with pytest.raises(RoundRefusedError, match="does not fit secure aggregation"):
        agreed(Limits(), clients=11)
    agreed(Limits(), clients=9, colluding=1)
    with pytest.raises(RoundRefusedError, match="does not fit secure aggregation"):
        Limits().check_secure(replace(PROTOCOL, modulus=None), agreed(Limits(), colluding=1), round=4, surviving=8)


# ---------------------------------------------------------------------- all rounds together


def kind_of(limits: Limits, protocol: Protocol = PROTOCOL) -> RoundKind:
    return RoundKind.of(limits, protocol, 8)


def refused(limits: Limits, before: dict[RoundKind, int], kind: RoundKind, rounds: int = 1) -> bool:
    try:
        check_affordable(limits, before, kind, rounds)
    except RoundRefusedError as error:
        return f"answered {sum(before.values())} rounds" in str(error)
    return False


def test_rounds_of_one_kind_cost_what_they_cost_together() -> None:
    limits = Limits(epsilon=cost(rounds=3), delta=DELTA)
    kind = kind_of(limits)
    assert not refused(limits, {}, kind)
    assert not refused(limits, {kind: 2}, kind)
    assert refused(limits, {kind: 3}, kind)
    # What is announced was found acceptable: its rounds are not computed again, and the next one is.
    assert not refused(limits, {kind: 4}, kind, rounds=5)
    assert refused(limits, {kind: 5}, kind, rounds=5)
    assert not refused(Limits(), {kind: 1_000}, kind)


def test_rounds_of_two_kinds_meet_a_filter() -> None:
    limits = Limits(epsilon=1.0, delta=DELTA)
    first, second = kind_of(limits), kind_of(limits, TWICE)
    ample, tight = (replace(limits, epsilon=factor * cost(rounds=2)) for factor in (1.05, 1.0))
    assert not refused(ample, {first: 1}, second)
    assert refused(tight, {first: 1}, second)  # the same cost, fixed in advance, would be just enough
    assert refused(ample, {first: 2}, second)
    assert refused(ample, {first: 1, second: 1}, second)
    assert not refused(tight, {first: 1}, first, rounds=1)
    with pytest.raises(RoundRefusedError, match="may have been chosen by results"):
        check_affordable(tight, {first: 1}, second, 1)


def test_a_client_that_protects_itself_counts_rounds_for_examples_in_full() -> None:
    whole, own = Limits(epsilon=cost(rounds=2), delta=DELTA), Limits(epsilon=1.0, delta=DELTA, examples=5)
    kind = kind_of(own)
    assert (kind.examples, kind_of(whole).examples) == (5, 0)
    assert refused(whole, {kind: 2}, kind_of(whole))
    cheap = replace(own, epsilon=1.2 * cost(rounds=3, examples=5))
    assert not refused(cheap, {kind: 2}, kind)
    assert refused(cheap, {kind: 5}, kind)


def test_rounds_of_drawn_examples_cost_less_and_a_whole_client_as_much_as_any() -> None:
    own = Limits(epsilon=1.0, delta=DELTA, examples=5, rate=0.1, adjacency="zero-out")
    kind = kind_of(own)
    drawn = cost(rounds=6, examples=5, participation=Participation.poisson(0.1), adjacency="zero-out")
    every = cost(rounds=6, examples=5, adjacency="zero-out")
    assert drawn < 0.5 * every
    assert not refused(replace(own, epsilon=1.01 * drawn), {kind: 5}, kind)
    assert refused(replace(own, epsilon=0.99 * drawn), {kind: 5}, kind)
    # As a whole it was in every one of them, whatever it drew.
    whole = Limits(epsilon=0.9 * cost(rounds=4, adjacency="zero-out"), delta=DELTA, adjacency="zero-out")
    assert refused(whole, {kind: 3}, kind_of(whole))
    assert not refused(replace(whole, epsilon=1.2 * whole.epsilon), {kind: 3}, kind_of(whole))  # type: ignore[operator]


def test_pure_rounds_of_two_kinds_add_up() -> None:
    """However they were chosen; a filter with δ = 0 there is none."""
    first, second = (
        Protocol(
            clients=10,
            dim=2,
            clip_norm=1.0,
            mechanism=DiscreteLaplace(levels=5, coordinate_range=1.0, spread=spread, shares=7, window=2**16),
            modulus=2**16,
        )
        for spread in (40, 80)
    )
    each = [guarantee(Run.of(protocol, surviving=8, colluding=1), 0.0).epsilon for protocol in (first, second)]
    limits = Limits(epsilon=sum(each) * (1.0 + 1e-9), delta=0.0)
    one, other = kind_of(limits, first), kind_of(limits, second)
    assert not refused(limits, {one: 1}, other)
    assert refused(limits, {one: 1, other: 1}, other)
    assert refused(replace(limits, epsilon=0.999 * sum(each)), {one: 1}, other)


def test_a_plan_for_examples_that_are_drawn_otherwise_is_refused() -> None:
    """One of both would be wrong about what is protected."""
    drawn = Conditions.of(8, rounds=3, participation="poisson:0.5", adjacency="zero-out", colluding=1, examples=5)
    planned = replace(PROTOCOL, promise=Promise(Claim(8.0, DELTA), drawn))
    Limits(examples=5, rate=0.5, adjacency="zero-out").check(planned, **ROUNDS)
    for limits in (Limits(examples=5, rate=0.25, adjacency="zero-out"), Limits(examples=5, adjacency="zero-out")):
        with pytest.raises(RoundRefusedError, match=r"drawn with probability 0\.5"):
            limits.check(planned, **ROUNDS)


def test_the_text_of_a_kind() -> None:
    kind = RoundKind.of(Limits(), PROTOCOL, 8)
    assert kind.rate == 1.0
    assert '"rate"' not in kind.to_text()
    drawn = RoundKind.of(Limits(examples=5, rate=0.25, adjacency="zero-out"), PROTOCOL, 8)
    assert '"rate":0.25' in drawn.to_text()
    for each in (kind, drawn):
        assert RoundKind.from_text(each.to_text()) == each
        assert each.digest == hashlib.sha256(b"cpsgd round kind v1 " + each.to_text().encode()).hexdigest()[:32]
        assert len(each.digest) == 32
    for text in ("", "[]", "{}", '{"protocol":1}'):
        with pytest.raises(WireError, match="damaged"):
            RoundKind.from_text(text)
    limits = Limits(rounds=7)
    said = f"cpsgd limits v1 {limits!r} {PROTOCOL.fingerprint.hex()} 3 8"
    assert limits.digest(PROTOCOL, **ROUNDS) == hashlib.sha256(said.encode()).digest()[:16]


def test_files_that_are_required(tmp_path: Path) -> None:
    assert open_client_files({}) == (None, Signing())
    with pytest.raises(RoundRefusedError, match="requires a memory"):
        open_client_files({}, require_memory=True)
    with pytest.raises(RoundRefusedError, match="requires a roster"):
        open_client_files({"cpsgd-memory": str(tmp_path / "m")}, require_memory=True, require_roster=True)
    found, _ = open_client_files({"cpsgd-memory": str(tmp_path / "m")}, require_memory=True)
    assert found is not None
    for wrong in ("", 5, "memory"):
        with pytest.raises(RoundRefusedError, match="cpsgd-memory"):
            open_client_files({"cpsgd-memory": wrong})
    with pytest.raises(RoundRefusedError, match="mean 'cpsgd-roster'"):
        open_client_files({"cpsgd_roster": "/file"})
