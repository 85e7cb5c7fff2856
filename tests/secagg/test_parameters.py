from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cpsgd import Protocol, Run
from cpsgd.codec import pack, wire
from cpsgd.errors import GuaranteeError, InfeasibleError, MessageError, ParameterError
from cpsgd.privacy.guarantees import guarantee
from cpsgd.promise import Claim, Conditions, Promise
from cpsgd.secagg import SecureParameters, risk

from .rounds import FINGERPRINT, parameters


@pytest.mark.parametrize(
    "wrong",
    [
        {"clients": 1},
        {"clients": 2**20 + 1},
        {"dim": 0},
        {"dim": 2**28 + 1},
        {"bits": 0},
        {"bits": 33},
        {"modulus": 128},
        {"modulus": 257},
        {"modulus": 200.0},
        {"neighbours": 0},
        {"neighbours": 10},
        {"neighbours": 5},
        {"threshold": 5},
        {"threshold": 11},
        {"quorum": 5},
        {"quorum": 11},
        {"quorum": -1},
        {"threshold": 5, "neighbours": 8},
        {"round": -1},
        {"surviving": 1},
        {"surviving": 11},
        {"fingerprint": b"short"},
        {"fingerprint": "0123456789abcdef"},
        {"bits": 8.0},
        {"dim": True},
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object]) -> None:
    good = {"clients": 10, "dim": 3, "bits": 8, "neighbours": 9, "threshold": 6, "round": 0, "surviving": 2}
    with pytest.raises(ParameterError, match=next(iter(wrong))):
        SecureParameters(**{"fingerprint": FINGERPRINT, **good, **wrong})


def test_numbers_of_numpy_become_pythons() -> None:
    numbers = {"clients": 10, "dim": 3, "bits": 8, "neighbours": 9, "threshold": 6, "round": 0, "surviving": 2}
    found = SecureParameters(fingerprint=FINGERPRINT, **{name: np.int64(value) for name, value in numbers.items()})
    assert {name: type(getattr(found, name)) for name in numbers} == dict.fromkeys(numbers, int)


@given(
    st.integers(2, 2**20),
    st.integers(1, 2**28),
    st.integers(1, 32),
    st.integers(0, 2**64 - 1),
    st.binary(min_size=16, max_size=16),
)
def test_bytes_and_back(clients: int, dim: int, bits: int, round_: int, fingerprint: bytes) -> None:
    complete = SecureParameters(
        clients=clients,
        dim=dim,
        bits=bits,
        neighbours=clients - 1,
        threshold=clients,
        fingerprint=fingerprint,
        round=round_,
        surviving=clients,
    )
    assert SecureParameters.from_bytes(complete.to_bytes()) == complete
    assert len(complete.to_bytes()) == 49
    assert complete.upload_bytes == (bits * dim + 7) // 8


@given(st.integers(2, 2**32 - 1), st.integers(1, 2**28))
def test_any_modulus_to_bytes_and_back(modulus: int, dim: int) -> None:
    found = parameters(5, modulus=modulus, dim=dim)
    assert SecureParameters.from_bytes(found.to_bytes()) == found
    assert found.masks.modulus == modulus
    power = modulus.bit_count() == 1
    assert (found.modulus is None, found.version, len(found.to_bytes())) == (
        power,
        5 if power else 6,
        49 if power else 53,
    )
    assert found.upload_bytes == (-(-found.bits * dim // 8) if power else pack.payload_bytes(dim, modulus))
    assert found.upload_bytes <= -(-found.bits * dim // 8)


def test_a_power_of_two_has_one_way_to_be_written() -> None:
    assert parameters(5, bits=8, modulus=256) == parameters(5, bits=8)
    with pytest.raises(MessageError, match="power of two"):
        SecureParameters.from_bytes(parameters(5, bits=8).to_bytes() + (256).to_bytes(4, "little"))
    with pytest.raises(MessageError, match="modulus"):
        SecureParameters.from_bytes(parameters(5, bits=8).to_bytes() + (257).to_bytes(4, "little"))


@given(st.binary(min_size=49, max_size=49) | st.binary(max_size=60))
def test_any_bytes_are_parameters_or_refused(data: bytes) -> None:
    try:
        found = SecureParameters.from_bytes(data)
    except MessageError:
        return
    assert found.to_bytes() == data


def test_a_quorum_is_the_threshold_on_a_complete_graph_alone() -> None:
    assert [parameters(6, threshold=threshold).quorum for threshold in (4, 5, 6)] == [4, 5, 6]
    assert parameters(6, neighbours=4, threshold=5).quorum == 4
    assert parameters(6, neighbours=4, threshold=5, surviving=5).quorum == 5


def test_a_threshold_is_at_most_all_shares() -> None:
    assert parameters(5, threshold=5).threshold == 5
    assert parameters(20, neighbours=4, threshold=5).threshold == 5
    for clients, neighbours in ((5, 4), (20, 4)):
        with pytest.raises(ParameterError, match="threshold"):
            parameters(clients, neighbours=neighbours, threshold=6)


def test_a_threshold_of_half_the_shares_or_less_is_never_accepted() -> None:
    for clients in range(2, 12):
        with pytest.raises(ParameterError, match="threshold"):
            parameters(clients, threshold=clients // 2)


def test_on_a_sparse_graph_no_stretch_of_the_circle_can_be_unmasked_alone_and_all_who_count_have_signed() -> None:
    for neighbours in (2, 4, 8, 18):
        with pytest.raises(ParameterError, match="threshold"):
            parameters(20, neighbours=neighbours, threshold=neighbours // 2 + 1)
        assert parameters(20, neighbours=neighbours, threshold=neighbours // 2 + 2).quorum == 11
    assert parameters(20, neighbours=8, surviving=16).quorum == 16
    assert parameters(20, surviving=16).quorum == 11
    for neighbours, least in ((8, 16), (19, 11)):
        with pytest.raises(ParameterError, match="quorum"):
            parameters(20, neighbours=neighbours, surviving=16, quorum=least - 1)


@pytest.mark.parametrize(("clients", "colluding"), [(10, 0), (10, 3), (200, 0), (200, 30), (1000, 1)])
def test_the_chosen_quorum_leaves_room_for_one_set_of_survivors_only(clients: int, colluding: int) -> None:
    chosen = SecureParameters.choose(clients, 1, 8, fingerprint=FINGERPRINT, round=0, colluding=colluding)
    assert 2 * chosen.quorum > clients + colluding
    assert chosen.quorum <= clients - clients // 10
    assert risk(chosen, colluding=colluding).insecurity <= 1e-9
    loose = replace(chosen, surviving=2, quorum=clients // 2 + 1)
    if colluding > 1:
        assert risk(loose, colluding=colluding).insecurity == 1.0


def test_dropouts_that_leave_no_quorum_are_refused() -> None:
    for clients in (10, 200):
        with pytest.raises(InfeasibleError, match="may collude"):
            SecureParameters.choose(clients, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=0.5)


def protocol(modulus: int | None, clients: int = 20) -> Protocol:
    return Protocol.rotated_binomial(clients=clients, dim=30, clip_norm=1.0, levels=4, trials=12, modulus=modulus)


def test_for_a_protocol() -> None:
    made = protocol(2**11)
    found = SecureParameters.for_protocol(made, round=3, dropout=0.2, colluding=2)
    assert (found.clients, found.dim, found.bits, found.round, found.surviving) == (20, 30, 11, 3, 16)
    assert found.fingerprint == made.fingerprint
    assert (found.neighbours, found.threshold) == (19, 12)
    assert SecureParameters.for_protocol(made, round=3, clients=15, surviving=12).surviving == 12


@pytest.mark.parametrize("modulus", [1000, 2**10 + 1, 2**11 - 1])
def test_for_a_protocol_whose_modulus_is_no_power_of_two(modulus: int) -> None:
    made = protocol(modulus)
    found = SecureParameters.for_protocol(made, round=3)
    assert (found.modulus, found.bits) == (modulus, (modulus - 1).bit_length())
    assert found.upload_bytes == pack.payload_bytes(30, modulus) == made.message_bytes - wire.HEADER_BYTES


def test_a_protocol_without_a_modulus_is_refused() -> None:
    with pytest.raises(ParameterError, match="modulus"):
        SecureParameters.for_protocol(protocol(None), round=0)


def test_more_clients_than_the_modulus_was_planned_for_are_refused() -> None:
    with pytest.raises(ParameterError, match="could overflow"):
        SecureParameters.for_protocol(protocol(2**11), round=0, clients=21)


def test_two_clients_are_enough() -> None:
    found = SecureParameters.choose(2, 3, 8, fingerprint=FINGERPRINT, round=0, dropout=0.0)
    assert (found.clients, found.neighbours, found.threshold, found.surviving, found.quorum) == (2, 1, 2, 2, 2)


@pytest.mark.parametrize("failure", [0.0, 1.0, -0.5, 2.0])
def test_a_failure_is_neither_sure_nor_impossible(failure: float) -> None:
    with pytest.raises(ParameterError, match="failure"):
        SecureParameters.choose(100, 1, 8, fingerprint=FINGERPRINT, round=0, failure=failure)


def test_of_fewer_clients_than_were_promised_all_must_survive() -> None:
    """Their sum does not keep the promise; it may be accepted with the ε that is true."""
    made = protocol(2**11)
    needed = guarantee(Run.of(made, surviving=18), 1e-6).epsilon
    made = replace(made, promise=Promise(Claim(1.001 * needed, 1e-6), Conditions.of(18)))
    assert SecureParameters.for_protocol(made, round=0).surviving == 18
    with pytest.raises(GuaranteeError, match="promise"):
        SecureParameters.for_protocol(made, round=0, clients=15)
    assert SecureParameters.for_protocol(made, round=0, clients=15, accept_epsilon=1.5 * needed).surviving == 15


def test_too_many_dropouts_and_colluding_clients_are_refused_with_what_can_be_had() -> None:
    with pytest.raises(InfeasibleError, match="At most 3 may collude"):
        SecureParameters.choose(10, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=0.3, colluding=4)
    assert SecureParameters.choose(10, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=0.3, colluding=3).threshold == 7
    with pytest.raises(ParameterError, match="dropout"):
        SecureParameters.choose(10, 1, 8, fingerprint=FINGERPRINT, round=0, dropout=1.0)
