"""Whole rounds by bytes alone, and what a server's session refuses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, plan
from cpsgd.errors import (
    CpsgdError,
    InfeasibleError,
    LedgerStorageError,
    ParameterError,
    RoundError,
    SenderError,
    StageError,
    WireError,
)
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.messages import Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import Invitation, Stage, cohort
from cpsgd.secagg.cohort import Cohort
from cpsgd.secagg.packets import Kind

from .local import DIM, RUN, Client, carry, honest, with_run
from .silos import CLIENTS, VECTORS, Silos

PLAIN = [Stage.UPLOAD]
SECURE = [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK]
SIGNED = [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK]
WAYS = [("plain", stage) for stage in PLAIN]
WAYS += [("secure", stage) for stage in SECURE]
WAYS += [("signed", stage) for stage in SIGNED]
NODES = [f"node-{i}" for i in range(CLIENTS)]


class Federation:
    """Four clients, and what their server holds rounds to."""

    def __init__(self, small_plan: Plan, folder: Path, way: str, **terms: Any) -> None:
        silos = Silos(folder)
        signed, secure = way == "signed", way != "plain"
        self.terms = Terms(plan=small_plan, secure=secure, roster=silos.roster if signed else None, **terms)
        self.clients = {
            f"node-{i}": silos.client(i) if signed else Client(VECTORS[i], secure=secure) for i in range(CLIENTS)
        }

    def open(self, round: int = 1) -> RoundSession[str]:
        return begin_round(self.terms, round, list(self.clients), run=RUN)


def close_to(found: np.ndarray | None, expected: np.ndarray, plan: Plan) -> bool:
    """Whether the error is what noise makes it: sums of 40 coordinates exceed 9 times their mean with P < 1e-60."""
    assert found is not None
    return bool(0.0 < np.sum((found - expected) ** 2) < 9 * plan.error.total)


@pytest.mark.parametrize(("way", "stages"), [("plain", PLAIN), ("secure", SECURE), ("signed", SIGNED)])
def test_rounds_give_the_mean(small_plan: Plan, tmp_path: Path, way: str, stages: list[Stage]) -> None:
    federation = Federation(small_plan, tmp_path, way)
    for round in (1, 2, 3):
        session = federation.open(round)
        seen: dict[Stage, int] = {}

        def count(node: str, stage: Stage, answer: bytes, seen: dict[Stage, int] = seen) -> bytes:
            seen[stage] = seen.get(stage, 0) + 1
            return answer

        mean = carry(session, federation.clients, count)
        assert close_to(mean, VECTORS[:CLIENTS].mean(axis=0), small_plan)
        assert seen == dict.fromkeys(stages, CLIENTS)
        report = session.report
        assert (report.released, report.reason, report.survivors, report.dropped) == (True, "", CLIENTS, {})
    assert [client.trained for client in federation.clients.values()] == [3] * CLIENTS


@pytest.mark.parametrize("way", ["plain", "secure"])
def test_sums_are_those_of_the_protocol(
    small_plan: Plan, tmp_path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the server decodes is the sum of exactly the integers that the protocol made on the clients."""
    protocol, made = small_plan.protocol, []
    original = type(protocol).encode_integers

    def recorded(self: Any, vector: Any, round: int) -> Any:
        made.append(original(self, vector, round))
        return made[-1]

    monkeypatch.setattr(type(protocol), "encode_integers", recorded)
    federation = Federation(small_plan, tmp_path, way)
    mean = carry(federation.open(), federation.clients)
    assert protocol.modulus is not None
    if way == "secure":
        sums = np.sum(made, axis=0, dtype=np.uint64) % np.uint64(protocol.modulus)
        np.testing.assert_array_equal(mean, protocol.decode_sum(sums, CLIENTS, round=1))
    else:
        assert not made


@pytest.mark.parametrize("way", ["secure", "signed"])
@pytest.mark.parametrize("silent", [Stage.SHARE, Stage.MASK, Stage.UNMASK])
def test_sums_modulo_a_number_that_is_no_power_of_two(
    tmp_path: Path, way: str, silent: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole rounds of a plan for a fraction of a bit, one client falling silent, and the integers of the others."""
    odd = plan(4, DIM, 8.0, 1e-5, rounds=3, secure=True, dropout=0.25, colluding=1, bits=12.4, mechanism="binomial")
    protocol, made = odd.protocol, {}
    assert protocol.modulus is not None
    assert protocol.modulus.bit_count() > 1
    original = type(protocol).encode_integers

    def recorded(self: Any, vector: Any, round: int) -> Any:
        found = made[np.asarray(vector).tobytes()] = original(self, vector, round)
        return found

    def tamper(node: str, stage: Stage, answer: bytes) -> bytes | None:
        return None if (node, stage) == ("node-2", silent) else answer

    monkeypatch.setattr(type(protocol), "encode_integers", recorded)
    federation = Federation(odd, tmp_path, way)
    session = federation.open()
    mean = carry(session, federation.clients, tamper)
    # Who falls silent after the upload has contributed.
    left = [i for i in range(CLIENTS) if i != 2 or silent is Stage.UNMASK]
    assert session.report.survivors == len(left)
    total = sum(made[VECTORS[i].tobytes()].astype(np.uint64) for i in left)
    np.testing.assert_array_equal(mean, protocol.decode_sum(total % np.uint64(protocol.modulus), len(left), round=1))
    assert close_to(mean, VECTORS[left].mean(axis=0), odd)


def garbage(answer: bytes) -> bytes:
    return np.random.default_rng(0).bytes(200)


@pytest.mark.parametrize(("way", "stage"), WAYS)
@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda answer: None, "no answer in time"),
        (garbage, "Error: "),
        (lambda answer: answer[:-1], "Error: "),
        (lambda answer: answer + b"x", "Error: "),
        (lambda answer: bytes(10**6), "WireError: The upload has 1000000 bytes; no honest one"),
        (lambda answer: b"", "Error: "),
    ],
)
def test_one_bad_node_does_not_stop_the_others(
    small_plan: Plan,
    tmp_path: Path,
    way: str,
    stage: Stage,
    damage: Callable[[bytes], bytes | None],
    reason: str,
) -> None:
    federation = Federation(small_plan, tmp_path, way)
    session = federation.open()
    mean = carry(
        session,
        federation.clients,
        lambda node, asked, answer: damage(answer) if (node, asked) == ("node-2", stage) else answer,
    )
    report = session.report
    # Who has uploaded is in the sum, whatever it says afterwards.
    kept = [0, 1, 2, 3] if stage in (Stage.CONFIRM, Stage.UNMASK) else [0, 1, 3]
    assert close_to(mean, VECTORS[kept].mean(axis=0), small_plan)
    assert (report.released, report.survivors) == (True, len(kept))
    assert report.stages == {"node-2": stage}
    assert list(report.dropped) == ["node-2"]
    assert reason in report.dropped["node-2"]


@pytest.mark.parametrize(("way", "stage"), WAYS)
def test_a_round_with_too_few_survivors_is_withheld(small_plan: Plan, tmp_path: Path, way: str, stage: Stage) -> None:
    federation = Federation(small_plan, tmp_path, way)
    session = federation.open()
    asked = []

    def silent(node: str, now: Stage, answer: bytes) -> bytes | None:
        asked.append(now)
        return None if now is stage and node in ("node-0", "node-3") else answer

    assert carry(session, federation.clients, silent) is None
    report = session.report
    assert not report.released
    assert report.reason
    assert report.stages == {"node-0": stage, "node-3": stage}
    if stage is not Stage.UNMASK:
        assert Stage.UNMASK not in asked
    assert session.stage is None
    assert session.requests() == {}
    assert session.release() is None
    # The next round is not touched by it.
    assert carry(federation.open(2), federation.clients) is not None


def test_a_client_is_absent_from_the_beginning(small_plan: Plan, tmp_path: Path) -> None:
    for way in ("plain", "secure", "signed"):
        (tmp_path / way).mkdir()
        federation = Federation(small_plan, tmp_path / way, way)
        del federation.clients["node-1"]
        mean = carry(federation.open(), federation.clients)
        assert close_to(mean, VECTORS[[0, 2, 3]].mean(axis=0), small_plan)


def test_too_few_nodes_are_asked_for_nothing(small_plan: Plan, tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget") as ledger:
        ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5))
        terms = Terms(plan=small_plan, ledger=ledger, population="people")
        session = begin_round(terms, 1, ["a", "b"], run=RUN)
        assert (session.stage, session.requests(), session.release()) == (None, {}, None)
        assert "2 nodes" in session.report.reason
        assert not ledger.events("people")


def test_who_has_too_few_neighbours_left_is_noted() -> None:
    """On a sparse graph a client may have answered and still be of no use."""
    large = plan(300, 1, 8.0, 1e-5, secure=True, dropout=0.2, colluding=1, bits=14, mechanism="binomial")
    terms = Terms(plan=large)
    parameters = terms.parameters(1, 300)
    clients = {str(i): Client() for i in range(300)}
    session = begin_round(terms, 1, list(clients), run=RUN)
    requests = session.requests()
    session_of_all = Invitation.read(Request.from_bytes(requests["0"]).payload).session
    for node, request in requests.items():
        session.receive(node, clients[node].ask(request))
    session.close()
    requests = session.requests()
    body = session_of_all.read(Request.from_bytes(requests["0"]).payload, Kind.KEYS, 0)
    everybody, _ = Cohort.read(body, 300)
    circle, place = cohort._circle(300, everybody.graph_seed(session_of_all))
    # The next on either side and the farthest; nobody else misses so many, also when this client is gone.
    half, missing = parameters.neighbours // 2, parameters.neighbours - parameters.threshold + 2
    left = (missing - 2) // 2
    steps = [-1, 1, *range(-half, -half + left), *range(half - (missing - 2 - left) + 1, half + 1)]
    silent = {str(circle[(place[17] + step) % 300]) for step in steps}
    for node, request in requests.items():
        if node not in silent:
            session.receive(node, clients[node].ask(request))
    session.close()
    report = session.report
    assert report.dropped["17"] == "too few of its neighbours are left"
    assert {node for node, reason in report.dropped.items() if reason == "no answer in time"} == silent
    assert set(report.stages.values()) == {Stage.SHARE}
    assert set(session.requests()) == set(clients) - set(report.dropped)


# ---------------------------------------------------------------------- hostile answers


def answers_to(session: RoundSession[str], federation: Federation) -> dict[str, bytes]:
    return {node: federation.clients[node].ask(request) for node, request in session.requests().items()}


@pytest.mark.parametrize(("way", "stage"), WAYS)
def test_refused_answers_change_nothing(small_plan: Plan, tmp_path: Path, way: str, stage: Stage) -> None:
    """Truncated, of another node, of another round, of another stage, repeated: then the right one is still taken."""
    federation = Federation(small_plan, tmp_path, way)
    session, earlier = federation.open(2), federation.open(1)
    past: dict[str, bytes] = {}
    while (now := earlier.stage) is not None:
        answers = answers_to(earlier, federation)
        past |= {node: answer for node, answer in answers.items() if now is stage}
        for node, answer in answers.items():
            earlier.receive(node, answer)
        earlier.close()
    assert earlier.release() is not None
    previous: dict[str, bytes] = {}
    while (now := session.stage) is not None:
        answers = answers_to(session, federation)
        if now is stage:
            hostile: list[Any] = [answers["node-0"][:cut] for cut in (0, 1, 20, len(answers["node-0"]) - 1)]
            hostile += [answers["node-0"] + b"\0", past["node-0"], *previous.values(), None, "text"]
            if way != "plain":
                # Without secure aggregation a message is nobody's; who sent it is for the engine to know.
                hostile.append(answers["node-1"])
            for wrong in hostile:
                with pytest.raises(CpsgdError):
                    session.receive("node-0", wrong)
            with pytest.raises(RoundError):
                session.receive("node-0", past["node-0"])
            with pytest.raises(SenderError, match="no part"):
                session.receive("stranger", answers["node-0"])
            assert session.report.dropped == {}
        for node, answer in answers.items():
            session.receive(node, answer)
            with pytest.raises(StageError, match="answered before"):
                session.receive(node, answer)
        previous = answers
        session.close()
    mean = session.release()
    assert close_to(mean, VECTORS[:CLIENTS].mean(axis=0), small_plan)
    assert (session.report.survivors, session.report.dropped) == (CLIENTS, {})


def test_a_dropped_node_is_not_heard_again(small_plan: Plan, tmp_path: Path) -> None:
    federation = Federation(small_plan, tmp_path, "secure")
    session = federation.open()
    answers = answers_to(session, federation)
    session.drop("node-1", "Traceback\n  secret line\nValueError: \x1b[31mred\n\n")
    session.drop("node-1", "a second reason")
    assert session.report.dropped == {"node-1": "ValueError: [31mred"}
    assert session.report.stages == {"node-1": Stage.ADVERTISE}
    with pytest.raises(SenderError, match="no part"):
        session.receive("node-1", answers["node-1"])
    session.drop("node-2", "")
    assert session.report.dropped["node-2"] == "an error"
    session.receive("node-3", answers["node-3"])
    session.drop("node-3", "too late to be dropped")
    assert set(session.report.dropped) == {"node-1", "node-2"}


def test_the_order_is_kept(small_plan: Plan, tmp_path: Path) -> None:
    federation = Federation(small_plan, tmp_path, "plain")
    session = federation.open()
    with pytest.raises(StageError, match="after the last stage"):
        session.release()
    answers = answers_to(session, federation)
    for node, answer in answers.items():
        session.receive(node, answer)
    session.close()
    with pytest.raises(StageError, match="no open stage"):
        session.receive("node-0", answers["node-0"])
    with pytest.raises(StageError, match="no open stage"):
        session.close()
    assert session.release() is not None
    with pytest.raises(StageError, match="released once"):
        session.release()


def test_of_metrics_finite_numbers_are_kept_and_only_where_clients_train(small_plan: Plan, tmp_path: Path) -> None:
    federation = Federation(small_plan, tmp_path, "secure")
    session = federation.open()
    while (stage := session.stage) is not None:
        for number, (node, answer) in enumerate(answers_to(session, federation).items()):
            hostile: dict[Any, Any] = {
                "bad": float("nan"),
                "list": [1.0],
                "text": "1",
                "huge": 10**400,
                "large": 1.7e308,
                3: 1.0,
                None: 1.0,
                **{f"m{i}": 1.0 for i in range(1000)},
            }
            sent: dict[Any, Any] = {"loss": number, "large": 1.7e308, **(hostile if number == 0 else {})}
            session.receive(node, answer, sent if stage is Stage.MASK else {"early": 1.0})
        session.close()
    assert session.report.metrics == {}
    assert session.release() is not None
    assert session.report.metrics["loss"] == 1.5
    assert session.report.metrics["large"] == 1.7e308
    assert not {"bad", "list", "text", "huge", "early", 3, None} & set(session.report.metrics)
    assert len(session.report.metrics) <= 100


def test_requests_say_what_clients_must_know(small_plan: Plan, tmp_path: Path) -> None:
    federation = Federation(small_plan, tmp_path, "secure", examples=7)
    session = federation.open(5)
    for data in session.requests().values():
        request = Request.from_bytes(data)
        assert (request.stage, request.round, request.rounds) == (Stage.ADVERTISE, 5, small_plan.rounds)
        assert (request.surviving, request.examples) == (small_plan.surviving, 7)
        assert request.protocol == small_plan.protocol.to_json()


# ---------------------------------------------------------------------- the ledger


def test_the_ledger_is_charged_before_anything_is_asked_and_released_before_the_mean(
    small_plan: Plan, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "budget") as ledger:
        ledger.create(Budget(population="people", epsilon=0.75 * small_plan.guarantee.epsilon, delta=1e-5))
        federation = Federation(small_plan, tmp_path, "secure", ledger=ledger, population="people", engine="bytes")
        released = []
        for round in (1, 2, 3):
            session = federation.open(round)
            if session.stage is not None:
                assert not ledger.events("people")[-1].released
                assert ledger.events("people")[-1].event.run == f"bytes-{RUN}"
            released.append(carry(session, federation.clients) is not None)
            assert all(entry.released for entry in ledger.events("people"))
        assert released[0]
        assert not released[2]
        assert "budget" in session.report.reason
        assert len(ledger.events("people")) == sum(released)
        assert [client.trained for client in federation.clients.values()] == [sum(released)] * CLIENTS
        ledger.verify()


def test_a_withheld_round_stays_charged_and_a_round_is_charged_once(small_plan: Plan, tmp_path: Path) -> None:
    with Ledger(tmp_path / "budget") as ledger:
        ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5))
        federation = Federation(small_plan, tmp_path, "plain", ledger=ledger, population="people")
        carry(federation.open(), federation.clients, lambda node, stage, answer: None)
        (entry,) = ledger.events("people")
        assert not entry.released
        assert ledger.total("people").epsilon > 0.0
        again = federation.open()
        assert again.stage is None
        assert "reserved before" in again.report.reason


@pytest.fixture
def people(tmp_path: Path) -> Ledger:
    """A ledger with enough for several rounds."""
    ledger = Ledger(tmp_path / "budget")
    ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5))
    return ledger


def silent_at(stage: Stage) -> Callable[[str, Stage, bytes], bytes | None]:
    return lambda node, now, answer: None if now is stage else answer


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE])
def test_a_round_withheld_before_data_is_asked_for_costs_nothing(
    small_plan: Plan, tmp_path: Path, people: Ledger, stage: Stage
) -> None:
    federation = Federation(small_plan, tmp_path, "secure", ledger=people, population="people")
    session = federation.open()
    assert people.total("people").rounds == 1
    assert carry(session, federation.clients, silent_at(stage)) is None
    (entry,) = people.events("people")
    assert (entry.abandoned, entry.released) == (True, False)
    assert (people.total("people").rounds, people.total("people").epsilon) == (0, 0.0)
    assert [client.trained for client in federation.clients.values()] == [0] * CLIENTS
    # It may be run again, with clients that have not heard of it, and is charged then.
    assert carry(federation.open(), unaware(), honest) is not None
    assert [each.released for each in people.events("people")] == [False, True]
    assert people.total("people").rounds == people.verify().totals[0].rounds == 1


def test_a_round_stays_charged_once_data_was_asked_for(small_plan: Plan, tmp_path: Path, people: Ledger) -> None:
    federation = Federation(small_plan, tmp_path, "secure", ledger=people, population="people")
    # Their uploads may be anywhere.
    assert carry(federation.open(), federation.clients, silent_at(Stage.MASK)) is None
    # Nobody was sent the request of the second round, but somebody may have it.
    session = begin_round(Terms(plan=small_plan, secure=False, ledger=people, population="people"), 2, NODES, run=RUN)
    assert session.requests().keys() == set(NODES)
    session.close()
    assert [entry.abandoned for entry in people.events("people")] == [False, False]
    assert people.total("people").rounds == 2


def test_a_charge_of_an_earlier_run_is_not_given_up(small_plan: Plan, tmp_path: Path, people: Ledger) -> None:
    federation = Federation(small_plan, tmp_path, "secure", ledger=people, population="people")
    federation.open()  # and the server stops, nobody knows where
    for ahead in (False, True):
        session = begin_round(federation.terms, 1, NODES, run="other", charged_to=None if ahead else RUN, ahead=ahead)
        if ahead:
            exchange_keys(session, unaware())
            session.charge((), charged_to=RUN)
            session.close()
        else:
            carry(session, unaware(), silent_at(Stage.ADVERTISE))
        assert session.report.reason
        (entry,) = people.events("people")
        assert not entry.abandoned


def test_a_prepared_round_that_everybody_has_left_costs_nothing(
    small_plan: Plan, tmp_path: Path, people: Ledger
) -> None:
    federation = Federation(small_plan, tmp_path, "secure", ledger=people, population="people")
    session = begin_round(federation.terms, 1, NODES, run=RUN, ahead=True)
    exchange_keys(session, federation.clients)
    session.charge(())
    assert people.total("people").rounds == 1
    session.close()
    assert session.release() is None
    assert people.total("people").rounds == 0


def test_a_charge_that_cannot_be_given_up_stays(
    small_plan: Plan, tmp_path: Path, people: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise LedgerStorageError("the disk is full")

    federation = Federation(small_plan, tmp_path, "secure", ledger=people, population="people")
    session = federation.open()
    monkeypatch.setattr(Ledger, "abandon", full)
    assert carry(session, federation.clients, silent_at(Stage.ADVERTISE)) is None
    assert "disk" not in session.report.reason
    assert people.total("people").rounds == 1


def unaware() -> dict[str, Client]:
    """Clients of secure aggregation that have heard of no round."""
    return {node: Client(vector, secure=True) for node, vector in zip(NODES, VECTORS, strict=False)}


def exchange_keys(session: RoundSession[str], clients: Mapping[str, Client]) -> None:
    """Brings a prepared round to where it is charged."""
    while session.stage is not Stage.MASK:
        for node, request in session.requests().items():
            session.receive(node, clients[node].ask(request))
        session.close()


def test_without_the_ledgers_leave_there_is_no_mean(small_plan: Plan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "budget")
    ledger.create(Budget(population="people", epsilon=20.0, delta=1e-5))
    federation = Federation(small_plan, tmp_path, "plain", ledger=ledger, population="people")
    session = federation.open()
    for node, answer in answers_to(session, federation).items():
        session.receive(node, answer)
    session.close()
    # Somebody else has released the entry.
    ledger.release(ledger.events("people")[0], survivors=CLIENTS)
    assert session.release() is None
    assert "released before" in session.report.reason


# ---------------------------------------------------------------------- terms


def test_bad_terms(small_plan: Plan, tmp_path: Path) -> None:
    with pytest.raises(ParameterError, match="together"):
        Terms(plan=small_plan, population="people")
    with pytest.raises(ParameterError, match="with a modulus, got none"):
        Terms(plan=replace(small_plan, protocol=replace(small_plan.protocol, modulus=None)))
    with pytest.raises(ParameterError, match="participation"):
        Terms(plan=plan(4, DIM, 8.0, 1e-5, rounds=3, secure=True, participation="once", colluding=1, bits=14))
    with pytest.raises(InfeasibleError, match="may drop out"):
        Terms(plan=with_run(small_plan, surviving=2))
    with pytest.raises(ParameterError, match="examples"):
        Terms(plan=small_plan, examples=0)
    with pytest.raises(ParameterError, match="plan with rounds=4"):
        Terms(plan=small_plan).check_rounds(4)
    public = Silos(tmp_path).public
    with pytest.raises(ParameterError, match="3 are"):
        Terms(plan=small_plan, roster=public[:3])
    with pytest.raises(ParameterError, match="secure=False"):
        Terms(plan=small_plan, roster=public[:4], secure=False)
    with pytest.raises(ParameterError, match="32 bytes"):
        Terms(plan=small_plan, roster=[b"short"] * 4)


@pytest.mark.parametrize("nodes", [["a"] * 4, list("abcde")])
def test_bad_nodes(small_plan: Plan, nodes: list[str]) -> None:
    with pytest.raises(ParameterError, match="at most 4 different nodes"):
        begin_round(Terms(plan=small_plan), 1, nodes, run=RUN)


def test_an_upload_of_another_size_is_refused(small_plan: Plan, tmp_path: Path) -> None:
    federation = Federation(small_plan, tmp_path, "plain")
    session = federation.open()
    with pytest.raises(WireError, match="no honest one"):
        session.receive("node-0", bytes(small_plan.protocol.message_bytes + 1))
