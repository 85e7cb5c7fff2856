from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, Protocol
from cpsgd.errors import (
    BatonError,
    CpsgdError,
    FingerprintError,
    InvitationError,
    ParameterError,
    RoundError,
    RoundRefusedError,
    StageError,
    TrainFunctionError,
    VectorError,
    VersionError,
    WireError,
)
from cpsgd.federation.answering import ClientSession, SessionState, call_privately
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.client_files import Answered, Memory
from cpsgd.federation.limits import Limits
from cpsgd.federation.messages import Request
from cpsgd.federation.one_message import asks_for
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, RoundEvent
from cpsgd.ledger.charging import priced
from cpsgd.ledger.kinds import Account
from cpsgd.mechanisms.memory import ClientNoise
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.secagg import Stage
from cpsgd.secagg.parameters import MAX_CLIENTS

from .correlated import correlated_plan
from .local import (
    DIM,
    RUN,
    Client,
    carry,
    opening,
    parameters,
    plain,
    with_mechanism,
    with_more_noise,
    with_protocol,
    with_run,
)

# ---------------------------------------------------------------------- what a client accepts


def test_an_honest_beginning_is_answered(small_plan: Plan) -> None:
    client = Client(epsilon=8.0, delta=1e-5, rounds=3)
    reply = client.ask(opening(small_plan))
    # The keys are in the state, and in no reply.
    assert len(client.secrets) > 64
    assert client.secrets not in reply
    assert client.trained == 0


def test_a_protocol_without_noise_is_refused_by_default(small_plan: Plan) -> None:
    silent = with_mechanism(small_plan, trials=0)
    with pytest.raises(RoundRefusedError, match="no noise"):
        Client().ask(opening(silent, secure=parameters(silent)))


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"epsilon": 4.0, "delta": 1e-5, "rounds": 3}, "costs ε = "),
        ({"epsilon": 8.0, "delta": 1e-7, "rounds": 3}, "costs ε = "),
        ({"epsilon": 8.0, "delta": 1e-5, "rounds": 3, "colluding": 2}, "costs ε = |could see more"),
        ({"rounds": 2}, "announces 3 rounds"),
        ({"min_clients": 4}, "at least 4"),
    ],
)
def test_a_client_keeps_its_own_limits(small_plan: Plan, limits: dict[str, Any], message: str) -> None:
    client = Client(**limits)
    with pytest.raises(RoundRefusedError, match=message):
        client.ask(opening(small_plan))
    assert client.state == b""


def test_a_protocol_that_cannot_tell_examples_is_refused(small_plan: Plan) -> None:
    narrow = with_mechanism(small_plan, coordinate_range=1e-3)
    with pytest.raises(RoundRefusedError, match="single examples"):
        Client(examples=5).ask(opening(narrow, secure=parameters(narrow), examples=5))


def test_numbers_that_only_a_hostile_server_announces_end_in_an_answer_or_a_refusal(small_plan: Plan) -> None:
    """What the accountant takes to compute grows with the clients; and floating point has smallest numbers."""
    crowd = with_protocol(small_plan, clients=2**32 - 1)
    with pytest.raises(RoundRefusedError, match="among 1048576 at most"):
        Client(epsilon=8.0, delta=1e-5).ask(opening(crowd, secure=parameters(small_plan)))
    coarse = with_mechanism(small_plan, coordinate_range=2.0**63)
    assert Client(epsilon=8.0, delta=1e-5).ask(opening(coarse, secure=parameters(coarse)))


@pytest.mark.parametrize(("own", "servers"), [(None, 5), (5, 0), (5, 6), (5, 2**64 - 5)])
def test_client_and_server_must_protect_the_same(small_plan: Plan, own: int | None, servers: int) -> None:
    """A silo that clips to a fifth of the sum's norm is not what a server has planned that counts on a sixth."""
    with pytest.raises(RoundRefusedError, match="what is protected"):
        Client(examples=own).ask(opening(small_plan, examples=servers))


def test_more_rounds_than_the_limit_allows_cost_too_much(small_plan: Plan) -> None:
    with pytest.raises(RoundRefusedError, match=r"costs ε = .* in 6 rounds"):
        Client(epsilon=8.0, delta=1e-5).ask(opening(small_plan, rounds=6))
    with pytest.raises(RoundRefusedError, match="announces 0 rounds"):
        Client(epsilon=8.0, delta=1e-5).ask(opening(small_plan, rounds=0))


def test_the_protocol_may_be_pinned(small_plan: Plan) -> None:
    fingerprint = small_plan.protocol.fingerprint
    Client(fingerprint=fingerprint).ask(opening(small_plan))
    other = with_protocol(small_plan, rotation_seed=1)
    with pytest.raises(FingerprintError, match="not the one"):
        Client(fingerprint=fingerprint).ask(opening(other, secure=parameters(other)))


@pytest.mark.parametrize(
    "changes",
    [{"dim": 41}, {"bits": 9}, {"modulus": 2**13 + 1}, {"fingerprint": bytes(16)}, {"surviving": 2}, {"round": 2}],
)
def test_an_invitation_that_contradicts_the_protocol_is_refused(small_plan: Plan, changes: dict[str, Any]) -> None:
    client = Client()
    with pytest.raises((InvitationError, RoundRefusedError)):
        client.ask(opening(small_plan, secure=parameters(small_plan, **changes)))
    assert client.state == b""


def test_a_threshold_that_colluding_clients_could_use_is_refused(small_plan: Plan) -> None:
    Client().ask(opening(small_plan, secure=parameters(small_plan, threshold=3)))
    with pytest.raises(RoundRefusedError, match="could see more than the sum"):
        Client(colluding=2).ask(opening(small_plan, secure=parameters(small_plan, threshold=3)))


def test_conditions_that_change_within_a_round_end_it(small_plan: Plan) -> None:
    """Who has a hand in them could have a round accounted for 50 examples, and filled with five larger ones."""
    clients = {name: Client(examples=50) for name in "abcd"}
    session = begin_round(Terms(plan=small_plan, examples=50), 1, "abcd", run=RUN)

    def change(node: str, stage: Stage, answer: bytes) -> bytes:
        if (node, stage) == ("b", Stage.SHARE):
            clients["b"].limits = Limits(examples=5)
        return answer

    assert carry(session, clients, change) is not None
    assert list(session.report.dropped) == ["b"]
    assert "have changed since the round began" in session.report.dropped["b"]
    assert [clients[name].trained for name in "abcd"] == [1, 0, 1, 1]


def test_rounds_of_another_protocol_add_up(small_plan: Plan) -> None:
    clients = {"a": Client(epsilon=8.0, delta=1e-5), **{name: Client() for name in "bcd"}}
    session = begin_round(Terms(plan=small_plan), 1, list(clients), run=RUN)
    assert carry(session, clients) is not None
    assert session.report.survivors == 4
    quieter = with_more_noise(small_plan)
    session = begin_round(Terms(plan=quieter), 2, list(clients), run=RUN)
    assert carry(session, clients) is not None
    # The limit is for both together: two more of the first kind would be the plan's three and a quieter one.
    session = begin_round(Terms(plan=small_plan), 3, list(clients), run=RUN)
    assert carry(session, clients) is not None
    with pytest.raises(RoundRefusedError, match=r"3 rounds, and one more would bring their cost to ε = .* limit is 8"):
        clients["a"].ask(opening(small_plan, round=4, secure=parameters(small_plan, round=4)))


@pytest.mark.parametrize("limits", [{"rounds": 3}, {"epsilon": 8.0, "delta": 1e-5}])
@pytest.mark.parametrize("remembered", [False, True])
def test_rounds_are_counted_over_runs(
    small_plan: Plan, limits: dict[str, Any], remembered: bool, tmp_path: Path
) -> None:
    """By the state that is handed on, or by a memory though every run begins with an empty state."""
    clients = {name: Client(**limits) for name in "abcd"}
    for run, released in (("1", [True, True]), ("2", [True, False]), ("3", [False, False])):
        for name, client in clients.items():
            client.run = run
            if remembered:
                client.settings, client.state = {"cpsgd-memory": str(tmp_path / name)}, b""
        for round, expected in enumerate(released, start=1):
            session = begin_round(Terms(plan=small_plan), round, list(clients), run=run)
            assert (carry(session, clients) is not None) == expected
    assert [client.trained for client in clients.values()] == [3] * 4


def remembering(path: Path, run: str = RUN, **options: Any) -> Client:
    """A client as it begins a new run: with nothing but what its operator has set."""
    return Client(run=run, settings={"cpsgd-memory": str(path)}, **options)


LIMITED: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "secure": False}


@pytest.mark.parametrize("limits", [{"rounds": 3}, {"epsilon": 8.0, "delta": 1e-5}])
@pytest.mark.parametrize("runs", ["1111", "1234"])
@pytest.mark.parametrize("remembered", [False, True])
def test_a_client_answers_as_many_rounds_as_it_may_and_no_more(
    small_plan: Plan, limits: dict[str, Any], runs: str, remembered: bool, tmp_path: Path
) -> None:
    """Quick, so that `make check` notices one round too many."""
    state = b""
    for round, run in enumerate(runs, start=1):
        settings = {"cpsgd-memory": str(tmp_path / "memory")} if remembered else {}
        client = Client(run=run, settings=settings, secure=False, **limits)
        client.state = b"" if remembered else state
        if round == 4:
            with pytest.raises(RoundRefusedError):
                client.ask(plain(small_plan, round=round))
        else:
            client.ask(plain(small_plan, round=round))
            state = client.state
            assert SessionState.from_bytes(state).answered == round


@pytest.mark.parametrize("remembered", [False, True])
def test_a_server_that_announces_more_when_it_was_accepted_is_refused(
    small_plan: Plan, remembered: bool, tmp_path: Path
) -> None:
    """More rounds of the same plan, a sum of fewer clients, or another plan: each is judged anew."""
    settings = {"cpsgd-memory": str(tmp_path / "memory")} if remembered else {}
    client = Client(settings=settings, **LIMITED)
    client.ask(plain(small_plan))
    silent = with_mechanism(small_plan, trials=0)
    for request, said in (
        (replace(plain(small_plan, round=2), rounds=4), "costs ε = "),
        (replace(plain(small_plan, round=2), rounds=1_000), "Nothing is proved"),
        (replace(plain(small_plan, round=2), surviving=1), "at least 2"),
        (plain(silent, round=2), "no noise"),
    ):
        with pytest.raises(RoundRefusedError, match=said):
            client.ask(request)
    assert client.trained == 1
    client.ask(plain(small_plan, round=2))


def test_a_rehearsal_costs_what_it_costs_and_no_more(small_plan: Plan, tmp_path: Path) -> None:
    """Another number of rounds, or another protocol: later plans are answered as far as the limit goes."""
    memory = tmp_path / "memory"
    remembering(memory, "1", **LIMITED).ask(plain(with_run(small_plan, rounds=1)))
    remembering(memory, "2", **LIMITED).ask(plain(with_more_noise(small_plan)))
    remembering(memory, "3", **LIMITED).ask(plain(small_plan))
    spent = remembering(memory, "4", **LIMITED)
    with pytest.raises(RoundRefusedError, match=r"3 rounds, and one more would bring their cost to ε = "):
        spent.ask(plain(small_plan))
    assert spent.trained == 0
    # Its own decision: with a larger limit it goes on, and what was spent counts.
    larger: dict[str, Any] = {**LIMITED, "epsilon": 9.5}
    remembering(memory, "5", **larger).ask(plain(small_plan))
    with pytest.raises(RoundRefusedError, match=r"4 rounds, .* limit is 9.5"):
        remembering(memory, "6", **larger).ask(plain(small_plan))
    assert memory.read_text().count("#kind") == 2


def test_a_server_that_changes_plans_meets_a_filter(small_plan: Plan, tmp_path: Path) -> None:
    quieter = with_more_noise(small_plan)
    options = {"survivors": small_plan.surviving, "colluding": 1}
    events = [RoundEvent(each.protocol, **options) for each in (small_plan, quieter)]
    # The server may have chosen the second plan by the first one's result. What plans fixed in advance would cost is
    # not enough; one or two percent more is.
    planned = priced(Budget(population="a", epsilon=8.0, delta=1e-5), [Account()], events).epsilon
    for name, epsilon, answered in (("less", planned * 1.001, False), ("enough", planned * 1.02, True)):
        limits: dict[str, Any] = {"epsilon": epsilon, "delta": 1e-5, "secure": False}
        remembering(tmp_path / name, "1", **limits).ask(plain(with_run(small_plan, rounds=1)))
        client = remembering(tmp_path / name, "2", **limits)
        if answered:
            client.ask(plain(with_run(quieter, rounds=1)))
        else:
            with pytest.raises(RoundRefusedError, match=r"one more .* chosen by results"):
                client.ask(plain(with_run(quieter, rounds=1)))
        assert client.trained == answered


def test_rounds_of_examples_count_for_whole_clients_in_full(small_plan: Plan, tmp_path: Path) -> None:
    """A client that once protected examples and now protects itself counts what those rounds cost it as a whole."""
    memory = tmp_path / "memory"
    for run in ("1", "2", "3"):
        remembering(memory, run, **LIMITED, examples=2).ask(replace(plain(small_plan), examples=2))
    with pytest.raises(RoundRefusedError, match="one more"):
        remembering(memory, "4", **LIMITED).ask(plain(small_plan))
    remembering(memory, "4", **LIMITED, examples=2).ask(replace(plain(small_plan), examples=2))


def test_plans_of_release_0_1_0_count_where_they_are_known(small_plan: Plan, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    limits = Limits(epsilon=8.0, delta=1e-5)
    digest = limits.digest(small_plan.protocol, rounds=3, surviving=small_plan.surviving).hex()
    memory.write_text(f"1 1 {digest}\n1 2 {digest}\n")
    remembering(memory, "2", **LIMITED).ask(plain(small_plan))
    with pytest.raises(RoundRefusedError, match="3 rounds, and one more"):
        remembering(memory, "3", **LIMITED).ask(plain(small_plan))
    with pytest.raises(RoundRefusedError, match=r"does not say what they cost. Begin a new memory"):
        remembering(memory, "3", **{**LIMITED, "epsilon": 9.0}).ask(plain(small_plan))


@pytest.mark.parametrize("kind", ["{", "[]", '{"protocol":"","surviving":3}'])
def test_a_damaged_kind_is_refused(small_plan: Plan, kind: str, tmp_path: Path) -> None:
    memory = tmp_path / "memory"
    memory.write_text(f"#kind {'ab' * 16} {base64.b64encode(kind.encode()).decode()}\n1 1 {'ab' * 16}\n")
    with pytest.raises(WireError, match="damaged"):
        remembering(memory, **LIMITED).ask(plain(small_plan))


def test_two_runs_that_begin_together_cannot_both_have_the_last_round(small_plan: Plan, tmp_path: Path) -> None:
    quieter = with_more_noise(small_plan)
    memory = tmp_path / "memory"
    for run in ("1", "2"):
        remembering(memory, run, **LIMITED).ask(plain(small_plan))

    class Slow(Client):
        def train(self, protocol: Protocol) -> np.ndarray:
            # While this round trains, which is after it was counted, another run asks.
            with pytest.raises(RoundRefusedError, match="3 rounds, and one more"):
                remembering(memory, "4", **LIMITED).ask(plain(quieter))
            return super().train(protocol)

    slow = Slow(run="3", settings={"cpsgd-memory": str(memory)}, **LIMITED)
    slow.ask(plain(small_plan))
    assert slow.trained == 1


def test_a_round_that_began_before_anothers_end_is_counted_after_it(small_plan: Plan, tmp_path: Path) -> None:
    """What was affordable when the round began may not be when it is to train."""
    memory = tmp_path / "memory"
    for run in ("1", "2"):
        remembering(memory, run, **LIMITED).ask(plain(small_plan))
    clients = {name: Client() for name in "abcd"}
    clients["a"] = Client(settings={"cpsgd-memory": str(memory)}, epsilon=8.0, delta=1e-5)
    session = begin_round(Terms(plan=small_plan), 1, list(clients), run=RUN)
    for stage in (Stage.ADVERTISE, Stage.SHARE):
        assert session.stage is stage
        for node, request in session.requests().items():
            session.receive(node, clients[node].ask(request))
        session.close()
    remembering(memory, "3", **LIMITED).ask(plain(small_plan))
    with pytest.raises(RoundRefusedError, match="3 rounds, and one more"):
        clients["a"].ask(session.requests()["a"])
    assert clients["a"].trained == 0


def test_a_second_round_of_a_client_is_refused_when_it_begins(small_plan: Plan, tmp_path: Path) -> None:
    once = correlated_plan(small_plan)
    early = remembering(tmp_path / "early")
    assert Memory(tmp_path / "early").add(Answered(RUN, 1, "ab" * 16), lambda *before: None, "a kind") == 1
    with pytest.raises(RoundRefusedError, match="one round of a run"):
        early.ask(opening(once, round=2, secure=replace(Terms(plan=once).parameters(2, 4), round=2)))
    assert early.trained == 0


def test_a_second_round_of_a_client_is_refused_when_it_is_counted(small_plan: Plan, tmp_path: Path) -> None:
    """The first may have been answered by another process meanwhile, from another state."""
    once = correlated_plan(small_plan)
    clients = {name: remembering(tmp_path / name) for name in "abcd"}
    session = begin_round(Terms(plan=once), 2, list(clients), run=RUN)

    def meanwhile(node: str, stage: Stage, answer: bytes) -> bytes:
        if (node, stage) == ("b", Stage.SHARE):
            Memory(tmp_path / "b").add(Answered(RUN, 1, "ab" * 16), lambda *before: None, "a kind")
        return answer

    assert carry(session, clients, meanwhile) is not None
    assert list(session.report.dropped) == ["b"]
    assert "one round of a run" in session.report.dropped["b"]
    assert [clients[name].trained for name in "abcd"] == [1, 0, 1, 1]


def test_a_round_whose_noise_cannot_be_drawn_is_refused_before_it_counts(
    small_plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: ClientNoise, round: int) -> None:
        raise BatonError("no noise")

    monkeypatch.setattr(ClientNoise, "check", refused)
    client = remembering(tmp_path / "memory", secure=False)
    with pytest.raises(BatonError):
        client.ask(plain(small_plan))
    assert (client.trained, Memory(tmp_path / "memory").rounds()) == (0, [])


def test_with_a_memory_a_lost_state_does_not_answer_a_round_twice(small_plan: Plan, tmp_path: Path) -> None:
    remembering(tmp_path / "memory", secure=False).ask(plain(small_plan))
    again = remembering(tmp_path / "memory", secure=False)
    with pytest.raises(RoundError, match="already"):
        again.ask(plain(small_plan))
    assert again.trained == 0


def test_with_a_memory_a_lost_state_does_not_answer_a_stage_twice(small_plan: Plan, tmp_path: Path) -> None:
    clients = {"a": remembering(tmp_path / "memory"), **{name: Client() for name in "bcd"}}
    session = begin_round(Terms(plan=small_plan), 1, list(clients), run=RUN)
    before: dict[Stage, tuple[bytes, bytes]] = {}
    while session.stage is not None:
        requests = session.requests()
        before[session.stage] = clients["a"].state, requests["a"]
        for node, request in requests.items():
            session.receive(node, clients[node].ask(request))
        session.close()
    assert {Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK} <= set(before)
    for state, request in before.values():
        clients["a"].state = state
        with pytest.raises((StageError, RoundError), match=r"answered stage|already"):
            clients["a"].ask(request)
    assert clients["a"].trained == 1


def test_the_digest_of_what_was_agreed_is_that_of_release_0_1_0() -> None:
    """It stands in the memories of clients; another one would lock them out."""
    limits = Limits(epsilon=8.0, delta=1e-6, rounds=30, colluding=1, examples=5)
    protocol: Any = SimpleNamespace(fingerprint=bytes(range(16)))
    assert limits.digest(protocol, rounds=30, surviving=9).hex() == "6ea065d9275c304ede91dc3080a30157"


# ---------------------------------------------------------------------- hostile requests


def in_round(small_plan: Plan) -> Client:
    client = Client()
    client.ask(opening(small_plan))
    return client


def share(plan: Plan, **changes: Any) -> Request:
    return Request(**{"stage": Stage.SHARE, "round": 1, "rounds": 3, "surviving": plan.surviving, **changes})


def test_a_client_of_two_servers_answers_nobody_else(small_plan: Plan) -> None:
    task: Any = SimpleNamespace(fingerprint=b"f" * 32, protocol=small_plan.protocol)
    session = ClientSession(Limits(), RUN, task=task, secure=False)
    begins = opening(small_plan)
    for request in (begins, plain(small_plan), share(small_plan), replace(begins, payload=asks_for(b"f" * 32))):
        with pytest.raises(RoundRefusedError, match="two servers of that task and nobody else"):
            session.answer(request.to_bytes(), lambda protocol: pytest.fail("it trained"))
    with pytest.raises(RoundRefusedError, match="has no such task"):
        session.answer(
            replace(plain(small_plan), payload=asks_for(b"g" * 32)).to_bytes(),
            lambda protocol: pytest.fail("it trained"),
        )
    assert session.state == b""


def test_a_sealed_message_is_sent_once_in_a_round_and_for_the_tasks_protocol(small_plan: Plan) -> None:
    sent: list[tuple[object, int]] = []

    def upload(values: np.ndarray, round: int, *, identity: object) -> bytes:
        sent.append((values.shape, round))
        return b"sealed"

    task: Any = SimpleNamespace(fingerprint=b"f" * 32, protocol=small_plan.protocol, upload=upload)
    session = ClientSession(Limits(), RUN, task=task)
    asked, other = (
        replace(plain(each), payload=asks_for(task.fingerprint)).to_bytes()
        for each in (small_plan, with_more_noise(small_plan))
    )
    with pytest.raises(RoundRefusedError, match="not the one of this client's task"):
        session.answer(other, lambda protocol: pytest.fail("it trained"))
    assert session.state == b""
    assert session.answer(asked, lambda protocol: np.zeros(DIM, np.float32)) == b"sealed"
    state = SessionState.from_bytes(session.state)
    assert (state.round, state.answered, sent) == (1, 1, [((DIM,), 0)])
    with pytest.raises(RoundError, match="again or too late"):
        session.answer(asked, lambda protocol: pytest.fail("it trained"))


def test_no_upload_in_sight_of_the_server_unless_allowed(small_plan: Plan) -> None:
    with pytest.raises(RoundRefusedError, match="secure=False"):
        Client().ask(opening(small_plan, stage=Stage.UPLOAD))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"protocol": "{}"}, ParameterError),
        ({"protocol": ""}, ParameterError),
        ({"protocol": "[" * 60_000}, ParameterError),
        ({"payload": b""}, WireError),
        ({"payload": b"x" * 1000}, WireError),
        ({"round": 0}, CpsgdError),
        ({"round": 2**64 - 1}, CpsgdError),
        ({"surviving": 2**64 - 1}, RoundRefusedError),
        ({"surviving": 0}, RoundRefusedError),
        ({"rounds": 2**64 - 1}, CpsgdError),
    ],
)
def test_malformed_beginnings_change_nothing(small_plan: Plan, changes: dict[str, Any], error: type[Exception]) -> None:
    client = Client(epsilon=8.0, delta=1e-5)
    with pytest.raises(error):
        client.ask(opening(small_plan, **changes))
    assert client.state == b""
    client.ask(opening(small_plan))


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK])
def test_damaged_requests_change_nothing(small_plan: Plan, stage: Stage) -> None:
    client = in_round(small_plan)
    before = client.state
    data = share(small_plan, stage=stage, payload=b"something").to_bytes()
    damaged = [data[:length] for length in range(len(data))] + [data + b"x", b"cpsf\1" + data[5:], b"cpsf\3" + data[5:]]
    for request in damaged:
        with pytest.raises(WireError):
            client.ask(request)
        assert client.state == before
    with pytest.raises(VersionError):
        client.ask(damaged[-1])
    if stage is Stage.ADVERTISE:
        wrong, words = opening(small_plan), "again or too late"
    else:
        wrong, words = share(small_plan, stage=stage, round=2), "is for round 2"
    with pytest.raises(RoundError, match=words):
        client.ask(wrong)
    assert client.state == before


def test_a_round_begins_once_and_stages_belong_to_it(small_plan: Plan) -> None:
    client = in_round(small_plan)
    before = client.state
    with pytest.raises(RoundError, match="again or too late"):
        client.ask(opening(small_plan))
    with pytest.raises(RoundError, match="is for round 2"):
        client.ask(share(small_plan, round=2))
    assert client.state == before
    with pytest.raises(RoundError, match="is for round 1"):
        Client().ask(share(small_plan))
    left = Client()
    left.state = SessionState(RUN, round=0, rounds=3).to_bytes()
    with pytest.raises(StageError, match="no part"):
        left.ask(share(small_plan, round=0))


def test_a_round_of_another_run_is_not_gone_on_with(small_plan: Plan) -> None:
    client = in_round(small_plan)
    client.run = "78"
    with pytest.raises(RoundError, match="is for round 1"):
        client.ask(share(small_plan))


def test_what_fails_once_cannot_be_asked_again(small_plan: Plan) -> None:
    client = in_round(small_plan)
    with pytest.raises(WireError):
        client.ask(share(small_plan, payload=b"nonsense"))
    assert client.secrets == b""
    with pytest.raises(StageError, match="no part"):
        client.ask(share(small_plan, payload=b"nonsense"))


def test_an_unmasked_client_has_forgotten_its_secrets(small_plan: Plan) -> None:
    clients = {name: Client() for name in "abcd"}
    session = begin_round(Terms(plan=small_plan), 1, list(clients), run=RUN)
    sent: list[dict[str, bytes]] = []
    while session.stage is not None:
        sent.append(session.requests())
        for node, request in sent[-1].items():
            session.receive(node, clients[node].ask(request))
        session.close()
    for name, client in clients.items():
        assert client.secrets == b""
        for replayed in sent:
            state = client.state
            with pytest.raises((StageError, RoundError), match=r"no part|again"):
                client.ask(replayed[name])
            assert client.state == state
        assert client.trained == 1


@pytest.mark.parametrize(
    "state",
    [
        b"{",
        b"[]",
        b"{}",
        b"\xff",
        b'{"run": "77", "secrets": "x"}',
        b'{"run": "77", "secrets": ""}x',
        b'{"run": "77", "secrets": "", "round": "1"}',
        b"[" * 10**5,
    ],
)
def test_a_damaged_state_is_refused(small_plan: Plan, state: bytes) -> None:
    client = Client()
    client.state = state
    with pytest.raises(WireError, match="saved state"):
        client.ask(opening(small_plan))
    assert client.state == state


@pytest.mark.parametrize("run", ["", "two words", "line\n", "é", "#kind"])
def test_runs_are_words(run: str) -> None:
    with pytest.raises(ParameterError, match="one word"):
        ClientSession(Limits(), run)


# ---------------------------------------------------------------------- vectors


def recorded(monkeypatch: pytest.MonkeyPatch) -> list[np.ndarray]:
    encoded = []
    original = Protocol.encode

    def encode(self: Any, vector: Any, round: int) -> bytes:
        encoded.append(vector)
        return original(self, vector, round)

    monkeypatch.setattr(Protocol, "encode", encode)
    return encoded


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_an_update_that_is_not_finite_counts_as_zero(
    small_plan: Plan, wrong: float, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encoded = recorded(monkeypatch)
    vector = np.ones(DIM, np.float32)
    vector[3] = wrong
    Client(vector, secure=False).ask(plain(small_plan))
    assert len(encoded) == 1
    assert not encoded[0].any()
    assert "The update is NaN or infinite somewhere." in caplog.text  # on this machine, and nowhere else


def test_a_vector_of_another_size_is_refused(small_plan: Plan) -> None:
    with pytest.raises(VectorError):
        Client(np.ones(DIM + 1, np.float32), secure=False).ask(plain(small_plan))


@pytest.mark.parametrize("error", [KeyError("patient 4711"), ParameterError("got 4711 patients")])
def test_errors_of_a_users_function_keep_their_text(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> None:
        raise error

    with pytest.raises(TrainFunctionError) as caught:
        call_privately(fails)
    assert "4711" not in str(caught.value)
    assert type(error).__name__ in str(caught.value)
    assert "4711" in caplog.text  # on this machine, and nowhere else
    assert call_privately(replace, SessionState("a"), run="b") == SessionState("b")


def test_a_servers_word_on_distances_does_not_count(small_plan: Plan) -> None:
    """A server that states a distance out of thin air must not make its protocol look more private than it is."""
    rounds: dict[str, Any] = {"rounds": 3, "surviving": small_plan.surviving, "colluding": 1}
    needed = guarantee_over_rounds(small_plan.protocol, 1e-5, **rounds).epsilon
    stated = {"replace_one_distance": small_plan.protocol.clip_norm, "distance_reason": "trust me"}
    claimed = with_protocol(small_plan, **stated)
    assert guarantee_over_rounds(claimed.protocol, 1e-5, **rounds).epsilon < 0.7 * needed
    limits = {"epsilon": 0.99 * needed, "delta": 1e-5, "rounds": 3}
    for offered in (small_plan, claimed):
        with pytest.raises(RoundRefusedError, match="costs ε = "):
            Client(**limits).ask(opening(offered, secure=parameters(offered)))
    # Whoever pinned this very protocol knew its reason.
    Client(**limits, fingerprint=claimed.protocol.fingerprint).ask(opening(claimed, secure=parameters(claimed)))
    Client(**{**limits, "epsilon": 1.01 * needed}).ask(opening(claimed, secure=parameters(claimed)))


def test_a_server_that_announces_too_many_clients_is_refused() -> None:
    """The time to compute a guarantee grows with their number, which is the server's word."""
    protocol = Protocol.rotated_binomial(clients=MAX_CLIENTS + 1, dim=8, clip_norm=1.0, levels=4, trials=200)
    with pytest.raises(RoundRefusedError, match="takes part among"):
        Limits(epsilon=8.0, delta=1e-6).check(protocol, rounds=1, surviving=MAX_CLIENTS)
