"""Releases are held to what was promised, by the accountant and not by the promise."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd import Aggregator, Protocol, guarantee, plan
from cpsgd.errors import EmptyError, GuaranteeError, ParameterError, StageError, ThresholdError
from cpsgd.mechanisms import Binomial
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy import release
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.privacy.release import check_release
from cpsgd.promise import Claim, Conditions, Promise
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer

# The planner has less to try.
CHEAP: Any = {"bits": 6, "mechanism": "binomial"}


# What `plan` chose for ε = 1 and 5,000 clients, and for ε = 4, five rounds and nine of ten clients who answer.
PLANNED = Protocol(
    clients=5000,
    dim=100,
    clip_norm=1.0,
    mechanism=Binomial(levels=17, coordinate_range=0.5060303026954595, trials=15),
    promise=Promise(Claim(1.0, 1e-6), Conditions.of(5000)),
)
SMALL = Protocol(
    clients=10,
    dim=20,
    clip_norm=1.0,
    mechanism=Binomial(levels=23, coordinate_range=0.5663972470841172, trials=4073),
    modulus=4096,
    promise=Promise(Claim(4.0, 1e-5), Conditions.of(9, rounds=5)),
)


def aggregated(protocol: Protocol, messages: int) -> Aggregator:
    aggregator = Aggregator(protocol, round=7)
    for _ in range(messages):
        aggregator.add(protocol.encode(np.zeros(protocol.dim), round=7))
    return aggregator


def test_a_plan_promises_what_was_asked_of_it() -> None:
    found = plan(clients=1000, dim=100, epsilon=1.0, delta=1e-6, dropout=0.1, colluding=3, **CHEAP)
    assert found.protocol.promise == Promise(Claim(1.0, 1e-6), Conditions.of(900, colluding=3))
    assert found.protocol.release(900) == found.guarantee
    silo = plan_examples(10, 50, 4.0, 1e-6, examples=100, rounds=3, participation="every", colluding=2, **CHEAP)
    expected = Promise(Claim(4.0, 1e-6), Conditions.of(10, colluding=2, rounds=3, examples=100))
    assert (silo.protocol.promise, silo.examples, found.examples) == (expected, 100, None)
    proved = silo.protocol.release(10)
    assert proved is not None
    assert proved.epsilon == silo.guarantee.epsilon
    assert not any(name.startswith("paper-theorem") for name, _ in proved.alternatives)
    sampled = plan(1000, 20, 2.0, 1e-6, participation="fixed-size:0.05", rounds=2, **CHEAP)
    expected = Promise(
        Claim(2.0, 1e-6),
        Conditions.of(
            1000,
            adjacency=Adjacency.REPLACE_ONE,
            rounds=2,
            participation=Participation.fixed_size(cohort=5, population=100),
        ),
    )
    assert sampled.protocol.promise == expected


@pytest.mark.parametrize(("messages", "epsilon"), [(500, "3.674"), (50, "13.99")])
def test_too_few_messages_are_refused_with_the_true_epsilon(messages: int, epsilon: str) -> None:
    aggregator = aggregated(PLANNED, messages)
    with pytest.raises(
        GuaranteeError, match=f"{messages} messages .* ε = 1 .* at least 5,000.* is {epsilon}"
    ) as refusal:
        aggregator.mean()
    error = refusal.value
    exact = guarantee(PLANNED, 1e-6, surviving=messages).epsilon
    assert (error.epsilon, error.promised, error.messages, error.surviving) == (exact, 1.0, messages, 5000)
    assert float(epsilon) >= exact
    # What the message offers is what is then released.
    assert f"accept_epsilon={epsilon}" in str(error)
    mean = aggregator.mean(accept_epsilon=float(epsilon))
    assert mean.shape == (100,)
    found = aggregator.guarantee(accept_epsilon=float(epsilon))
    assert found is not None
    assert found.epsilon == exact
    with pytest.raises(GuaranteeError, match="was accepted"):
        aggregator.mean(accept_epsilon=math.nextafter(exact, 0.0))


def test_one_message_proves_nothing() -> None:
    aggregator = aggregated(PLANNED, 1)
    with pytest.raises(GuaranteeError, match=r"1 message is in the sum.* Nothing is proved with so few") as refusal:
        aggregator.mean()
    assert refusal.value.epsilon is None
    with pytest.raises(GuaranteeError, match="2 messages are in the sum"):
        aggregated(PLANNED, 2).mean()
    # No ε that could be accepted makes a proof of it.
    with pytest.raises(GuaranteeError, match="Nothing is proved"):
        aggregator.mean(accept_epsilon=1e300)


def test_enough_messages_are_released() -> None:
    for messages in (9, 10):
        aggregator = aggregated(SMALL, messages)
        assert aggregator.mean().shape == (20,)
        found = aggregator.guarantee()
        assert found is not None
        # Of all rounds together, and as if none ended with more than the fewest.
        assert (found.epsilon, found.rounds) == (guarantee_over_rounds(SMALL, 1e-5, rounds=5, surviving=9).epsilon, 5)
    with pytest.raises(EmptyError):
        Aggregator(SMALL, 0).mean()


def test_over_rounds_every_one_may_end_with_so_few() -> None:
    with pytest.raises(GuaranteeError, match="over 5 rounds of so few") as refusal:
        aggregated(SMALL, 6).mean()
    exact = guarantee_over_rounds(SMALL, 1e-5, rounds=5, surviving=6).epsilon
    assert refusal.value.epsilon == exact > 4.0


def test_who_accepts_less_than_is_true_gets_nothing() -> None:
    with pytest.raises(GuaranteeError, match=r"0\.5 was accepted"):
        PLANNED.release(5000, accept_epsilon=0.5)
    assert PLANNED.release(5000, accept_epsilon=1.0) is not None


@pytest.mark.parametrize("accepted", [0, -1.0, math.nan, math.inf, "3", True])
def test_what_is_no_epsilon_is_not_accepted(accepted: Any) -> None:
    with pytest.raises(ParameterError, match="accept_epsilon"):
        PLANNED.release(500, accept_epsilon=accepted)


def test_without_a_promise_there_is_nothing_to_accept() -> None:
    unpromised = replace(PLANNED, promise=None)
    assert check_release(unpromised, 1) is None
    assert aggregated(unpromised, 2).guarantee() is None
    with pytest.raises(ParameterError, match="promises no ε"):
        aggregated(unpromised, 2).mean(accept_epsilon=100.0)


def test_messages_are_a_number() -> None:
    for wrong in (0, -1, 2.5, True):
        with pytest.raises(ParameterError, match="messages"):
            PLANNED.release(wrong)  # type: ignore[arg-type]


# ------------------------------------------------------------------ attacks


@pytest.mark.parametrize(
    "edited",
    [
        {"surviving": 1},
        {"surviving": 50},
        {"epsilon": 0.1},
        {"epsilon": 0.1, "surviving": 500},
        {"delta": 1e-12},
        {"rounds": 100},
        {"colluding": 4990},
    ],
)
def test_an_edited_promise_proves_nothing(edited: dict[str, Any]) -> None:
    promise = PLANNED.promise
    assert promise is not None
    lying = replace(PLANNED, promise=Promise.from_dict({**promise.to_dict(), **edited}))
    with pytest.raises(GuaranteeError):
        lying.release(lying.promise.conditions.surviving if lying.promise else 0)


def test_an_epsilon_edited_upwards_is_not_what_is_claimed() -> None:
    promise = PLANNED.promise
    assert promise is not None
    generous = replace(PLANNED, promise=Promise(Claim(100.0, 1e-6), Conditions.of(50)))
    found = generous.release(50)
    assert found is not None
    # The file says 100 and 50 messages; what is shown is the accountant's figure for 50 messages.
    assert found.epsilon == guarantee(PLANNED, 1e-6, surviving=50).epsilon


def test_a_protocol_with_less_noise_does_not_inherit_the_promise() -> None:
    mechanism: Any = PLANNED.mechanism
    weak = replace(PLANNED, mechanism=replace(mechanism, trials=1))
    with pytest.raises(GuaranteeError) as refusal:
        weak.release(5000)
    assert "plan again" in str(refusal.value)
    silent = replace(PLANNED, mechanism=replace(mechanism, trials=0))
    with pytest.raises(GuaranteeError, match="Nothing is proved"):
        silent.release(5000)
    wider = replace(PLANNED, clip_norm=50.0)
    with pytest.raises(GuaranteeError):
        wider.release(5000)


def test_a_restored_or_merged_aggregator_is_held_to_it() -> None:
    protocol = SMALL
    half, other = aggregated(protocol, 5), aggregated(protocol, 3)
    restored = Aggregator.restore(protocol, half.save())
    restored.merge(other)
    with pytest.raises(GuaranteeError):
        restored.mean()
    restored.add(protocol.encode(np.zeros(20), round=7))
    assert restored.mean().shape == (20,)


def test_a_refused_mean_leaves_the_round_as_it_was() -> None:
    aggregator = aggregated(SMALL, 8)
    before = aggregator.save()
    with pytest.raises(GuaranteeError):
        aggregator.mean()
    assert aggregator.save() == before


# ------------------------------------------------------------------ sums of integers


def test_sums_of_integers_are_held_to_it() -> None:
    protocol = SMALL
    sums = np.zeros(20, dtype=np.uint64)
    for _ in range(8):
        sums += protocol.encode_integers(np.zeros(20), round=1)
    assert protocol.modulus is not None
    sums %= np.uint64(protocol.modulus)
    with pytest.raises(GuaranteeError) as refusal:
        protocol.decode_sum(sums, 8, round=1)
    true = refusal.value.epsilon
    assert true is not None
    assert protocol.decode_sum(sums, 8, round=1, accept_epsilon=true).shape == (20,)


def test_secure_sums_are_held_to_it() -> None:
    protocol = SMALL
    # Without a number, that of the promise; what is told to clients keeps the server from revealing the sum of fewer.
    assert SecureParameters.for_protocol(protocol, round=0).surviving == 9
    with pytest.raises(GuaranteeError) as refusal:
        SecureParameters.for_protocol(protocol, round=0, surviving=7, dropout=0.3)
    true = refusal.value.epsilon
    assert true is not None
    with pytest.raises(GuaranteeError):
        SecureParameters.for_protocol(protocol, round=0, surviving=7, dropout=0.3, accept_epsilon=0.99 * true)
    accepted = SecureParameters.for_protocol(protocol, round=0, surviving=7, dropout=0.3, accept_epsilon=true)
    assert accepted.surviving == 7
    with pytest.raises(GuaranteeError):
        SecureParameters.for_protocol(protocol, round=0, clients=8)


def test_a_secure_round_of_too_few_ends_without_a_sum() -> None:
    agreed = SecureParameters.for_protocol(SMALL, round=0, dropout=0.2)
    server = SecureServer(agreed)
    clients = [SecureClient(expected=agreed) for _ in range(10)]
    for i, message in server.invite().items():
        server.receive(i, clients[i].advertise(message))
    for i, message in server.advance().items():
        server.receive(i, clients[i].share(message))
    for i, message in server.advance().items():
        if i not in (3, 4):
            server.receive(i, clients[i].mask(message, SMALL.encode_integers(np.zeros(20), round=0)))
    with pytest.raises(ThresholdError):
        server.advance()
    with pytest.raises(StageError):
        server.result()


def test_a_release_may_cost_exactly_what_is_accepted() -> None:
    true = check_release(PLANNED, 5000)
    assert true is not None
    assert check_release(PLANNED, 5000, accept_epsilon=true.epsilon) == true
    with pytest.raises(GuaranteeError):
        check_release(PLANNED, 5000, accept_epsilon=math.nextafter(true.epsilon, 0.0))


def test_a_cohort_of_fixed_size_has_no_more_messages_than_clients_were_planned() -> None:
    conditions = Conditions.of(40, participation="fixed-size:0.1", colluding=1)
    promise = Promise(Claim(100.0, 1e-6), conditions)
    sampled = replace(Protocol.gaussian(clients=60, dim=8, clip_norm=1.0, sigma=1.0), promise=promise)
    assert check_release(sampled, 60) is not None
    with pytest.raises(ParameterError, match="A cohort of fixed size"):
        check_release(sampled, 61)


def test_a_refusal_says_what_was_accepted_if_anything_was() -> None:
    assert PLANNED.promise is not None
    found = guarantee(Protocol.gaussian(clients=10, dim=2, clip_norm=1.0, sigma=5.0), 1e-6)
    plain = str(release._refusal(PLANNED.promise, 500, found, None))
    accepted = str(release._refusal(PLANNED.promise, 500, found, 1.5))
    assert "accepted" not in plain
    assert accepted.replace(", and 1.5 was accepted", "") == plain
