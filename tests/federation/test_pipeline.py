"""Rounds that are prepared while the one before runs: three exchanges in place of five, and the same sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, Protocol, plan
from cpsgd.errors import CpsgdError, StageError
from cpsgd.federation import terms as terms_module
from cpsgd.federation.answering import SessionState
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.course import Course
from cpsgd.federation.messages import Pair, Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import SecureClient, Stage

from .local import DIM, RUN, Client, carry, exchange
from .silos import Silos

NODES = list("abcd")
MORE = list("abcdef")
FULL = [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK]
SHORT = FULL[2:]
VECTORS = np.random.default_rng(3).normal(size=(6, DIM)).astype(np.float32) * 0.1

Tamper = Callable[[str, int, Stage, bytes], bytes | None]


def nothing_happens(node: str, round: int, stage: Stage, answer: bytes) -> bytes:
    return answer


class Federation:
    """A course and its clients; `asked` has the stages of each round."""

    def __init__(
        self, plan: Plan, *, clients: Mapping[str, Client] | None = None, tamper: Tamper = nothing_happens, **terms: Any
    ) -> None:
        self.nodes = MORE[: plan.protocol.clients]
        self.clients = dict(clients or {node: Client(VECTORS[i]) for i, node in enumerate(self.nodes)})
        self.course: Course[str] = Course(Terms(plan=plan, **terms), np.zeros(DIM, np.float32), run=RUN)
        self.tamper = tamper
        self.asked: list[list[Stage]] = []

    def round(self, connected: Iterable[str] | None = None) -> RoundSession[str]:
        session = self.course.begin(self.nodes if connected is None else connected)
        round = session.report.round
        self.asked.append(exchange(session, self.clients, lambda node, *what: self.tamper(node, round, *what)))
        self.course.finish(session)
        return session

    @property
    def survivors(self) -> list[int]:
        return [report.survivors if report.released else 0 for report in self.course.reports]


@pytest.fixture(scope="module")
def roomy() -> Plan:
    """Six clients of whom two may drop out: when one has, there is still one to spare."""
    return plan(6, DIM, 8.0, 1e-5, rounds=8, secure=True, dropout=0.33, colluding=1, bits=14, mechanism="binomial")


def same_noise(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, np.ndarray]]:
    """Makes encoding repeatable, and notes what was encoded in which round."""
    encoded: list[tuple[int, np.ndarray]] = []

    def encode(self: Protocol, vector: np.ndarray, round: int) -> np.ndarray:
        modulus = self.modulus or 0
        seed = int.from_bytes(vector.tobytes()[:8], "little") + round
        encoded.append((round, np.random.default_rng(seed).integers(0, modulus, self.dim).astype(np.uint32)))
        return encoded[-1][1]

    monkeypatch.setattr(Protocol, "encode_integers", encode)
    monkeypatch.setattr(terms_module, "implausible", lambda mean, bounds: None)
    return encoded


# ---------------------------------------------------------------------- what it is for


def test_from_the_second_round_on_there_are_three_exchanges_and_the_same_sums(
    small_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = same_noise(monkeypatch)
    pipelined = Federation(small_plan)
    models = []
    for _ in range(3):
        pipelined.round()
        models.append(pipelined.course.model)
    assert pipelined.asked == [FULL, SHORT, SHORT]
    assert pipelined.survivors == [4, 4, 4]
    assert [client.trained for client in pipelined.clients.values()] == [3] * 4

    model = np.zeros(DIM, np.float32)
    for round in (1, 2, 3):
        clients = {node: Client(VECTORS[i]) for i, node in enumerate(NODES)}
        session = begin_round(Terms(plan=small_plan), round, NODES, run=RUN)
        mean = carry(session, clients)
        assert mean is not None
        total = np.sum([found for number, found in encoded[-4:]], axis=0) % small_plan.protocol.modulus
        np.testing.assert_array_equal(mean, small_plan.protocol.decode_sum(total.astype(np.uint32), 4, round))
        model = model + mean
        np.testing.assert_array_equal(models[round - 1], model)


def test_signed_rounds_are_prepared_too(small_plan: Plan, tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    clients = {node: silos.client(i) for i, node in enumerate(NODES)}
    federation = Federation(small_plan, clients=clients, roster=silos.roster)
    for _ in range(3):
        federation.round()
    assert federation.asked == [FULL, SHORT, SHORT]
    assert federation.survivors == [4, 4, 4]


def test_the_last_round_prepares_none_and_rounds_without_secure_aggregation_neither(small_plan: Plan) -> None:
    federation = Federation(small_plan)
    sessions = [federation.round() for _ in range(3)]
    assert sessions[2].prepared is None
    assert all(SessionState.from_bytes(client.state).prepared == "" for client in federation.clients.values())
    plain = Federation(small_plan, clients={node: Client(secure=False) for node in NODES}, secure=False)
    for _ in range(3):
        plain.round()
    assert plain.asked == [[Stage.UPLOAD]] * 3


# ---------------------------------------------------------------------- who is there


def silent(node: str, round: int, stage: Stage) -> Tamper:
    """One answer is lost."""
    return lambda who, when, what, answer: None if (who, when, what) == (node, round, stage) else answer


@pytest.mark.parametrize("stage", FULL)
def test_dropouts_of_the_first_round(roomy: Plan, stage: Stage) -> None:
    federation = Federation(roomy, tamper=silent("c", 1, stage))
    for _ in range(3):
        federation.round()
    # It sits the second round out, which is prepared by then without it, and the third begins with it.
    lost = {Stage.CONFIRM: {"c": Stage.ADVERTISE}, Stage.UNMASK: {"c": Stage.SHARE}}.get(stage, {})
    assert federation.survivors == [6 if lost else 5, 5, 6]
    assert federation.asked == [FULL, SHORT, FULL]
    assert [report.stages for report in federation.course.reports] == [{"c": stage}, lost, {}]


@pytest.mark.parametrize("stage", SHORT)
def test_dropouts_of_a_prepared_round(roomy: Plan, stage: Stage) -> None:
    federation = Federation(roomy, tamper=silent("c", 2, stage))
    for _ in range(4):
        federation.round()
    assert federation.asked == [FULL, SHORT, SHORT, FULL]
    assert federation.survivors == [6, 5 if stage is Stage.MASK else 6, 5, 6]
    assert federation.course.reports[1].stages == {"c": stage}


def test_one_that_keeps_dropping_out_does_not_make_every_round_a_long_one(roomy: Plan) -> None:
    def never_trains(node: str, round: int, stage: Stage, answer: bytes) -> bytes | None:
        return None if (node, stage) == ("c", Stage.MASK) else answer

    federation = Federation(roomy, tamper=never_trains)
    for _ in range(8):
        federation.round()
    assert federation.survivors == [5] * 8
    # Absent three times, it rests.
    assert federation.asked == [FULL, SHORT, FULL, SHORT, FULL, SHORT, SHORT, SHORT]


@pytest.mark.parametrize("stage", FULL)
def test_without_a_node_to_spare_one_that_dropped_out_is_asked_again_at_once(small_plan: Plan, stage: Stage) -> None:
    """Three of four are needed: if another one dropped out, the round would be withheld, and its charge lost."""
    federation = Federation(small_plan, tamper=silent("c", 1, stage))
    federation.round()
    federation.round()
    assert federation.asked == [FULL, FULL]
    assert federation.survivors == [4 if stage in (Stage.CONFIRM, Stage.UNMASK) else 3, 4]


def test_a_node_that_vanishes_in_between_is_an_ordinary_dropout(small_plan: Plan) -> None:
    federation = Federation(small_plan)
    federation.round()
    session = federation.round(["d", "a", "b"])
    assert federation.asked[1] == SHORT
    assert session.report.dropped == {"c": "it has left since the round was prepared"}
    assert session.report.stages == {"c": Stage.MASK}
    assert federation.survivors == [4, 3]


def test_a_node_that_joins_is_in_the_next_round(small_plan: Plan) -> None:
    federation = Federation(small_plan)
    federation.round("abc")
    federation.round()
    federation.round()
    assert federation.asked == [FULL, FULL, SHORT]
    assert federation.survivors == [3, 4, 4]


def test_where_all_of_the_plan_have_prepared_it_nobody_else_is_waited_for(small_plan: Plan) -> None:
    federation = Federation(small_plan)
    federation.clients["e"] = Client(VECTORS[4])
    assert federation.course.awaited == 4
    for connected in ("abcd", "abcde", "abcde"):
        federation.round(connected)
    assert federation.asked == [FULL, SHORT, SHORT]
    assert federation.clients["e"].trained == 0


def test_as_many_are_awaited_as_have_prepared_the_round(small_plan: Plan) -> None:
    federation = Federation(small_plan, tamper=silent("c", 1, Stage.MASK))
    federation.round()
    assert federation.course.awaited == 3


@pytest.mark.parametrize("stage", [Stage.CONFIRM, Stage.UNMASK])
@pytest.mark.parametrize("remembers", [False, True])
def test_if_too_few_have_prepared_a_round_it_begins_from_the_beginning(
    small_plan: Plan, tmp_path: Path, stage: Stage, remembers: bool
) -> None:
    """Also for clients with a memory, which answer no stage twice, and with a roster."""

    def loses_the_second_half(node: str, round: int, what: Stage, answer: bytes) -> bytes:
        return Pair.from_bytes(answer).first if (round, what) == (1, stage) and node in "ab" else answer

    silos = Silos(tmp_path)
    clients = {node: silos.client(i) for i, node in enumerate(NODES)} if remembers else None
    roster = {"roster": silos.roster} if remembers else {}
    federation = Federation(small_plan, clients=clients, tamper=loses_the_second_half, **roster)
    for _ in range(3):
        federation.round()
    assert federation.survivors == [4, 4, 4]
    assert federation.asked == [FULL, FULL, SHORT]
    assert federation.course.reports[0].dropped == {}


def test_if_too_few_are_connected_a_prepared_round_is_given_up(small_plan: Plan) -> None:
    federation = Federation(small_plan)
    federation.clients["e"] = Client(VECTORS[4])
    federation.round()
    federation.round("abe")
    federation.round("abe")
    assert federation.asked == [FULL, FULL, SHORT]
    assert federation.survivors == [4, 3, 3]


def test_who_refuses_the_next_round_still_ends_this_one(small_plan: Plan) -> None:
    """It may not be for what the next round is to be, and says so; what it has begun it ends."""
    clients = {node: Client(VECTORS[i]) for i, node in enumerate(NODES)}
    session = begin_round(Terms(plan=small_plan), 1, NODES, run=RUN, prepares=True)
    while session.stage is not None:
        for node, request in session.requests().items():
            if session.stage is Stage.CONFIRM and node == "b":
                pair = Pair.from_bytes(request)
                other = replace(Request.from_bytes(pair.second), surviving=1)
                request = Pair(pair.first, other.to_bytes()).to_bytes()
            session.receive(node, clients[node].ask(request))
        session.close()
    assert session.report.dropped == {}
    following = session.prepared
    assert following is not None
    assert following.report.dropped["b"].startswith("RoundRefusedError: The server would release the sum of 1 of 4")
    assert following.waiting == {"a", "c", "d"}
    assert SessionState.from_bytes(clients["b"].state).prepared == ""


# ---------------------------------------------------------------------- one round does not touch the other


def test_a_round_that_is_withheld_leaves_the_next_one_as_it_is(
    small_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    federation = Federation(small_plan)
    with monkeypatch.context() as patched:
        patched.setattr(terms_module, "implausible", lambda mean, bounds: "It is too large.")
        federation.round()
    federation.round()
    assert federation.asked == [FULL, SHORT]
    assert federation.survivors == [0, 4]


@pytest.mark.parametrize("stage", FULL)
def test_a_round_that_stops_half_way_prepares_none(small_plan: Plan, stage: Stage) -> None:
    def two_are_silent(node: str, round: int, what: Stage, answer: bytes) -> bytes | None:
        return None if (round, what) == (1, stage) and node in "ab" else answer

    federation = Federation(small_plan, tamper=two_are_silent)
    federation.round()
    federation.round()
    assert federation.asked[1] == FULL
    assert federation.survivors == [0, 4]


@pytest.mark.parametrize("garbage", [b"", b"garbage", b"\xff" * 1000])
def test_garbage_for_the_next_round_costs_that_round_only(roomy: Plan, garbage: bytes) -> None:
    def sends_garbage(node: str, round: int, stage: Stage, answer: bytes) -> bytes:
        wrong = node == "c" and Pair.begins(answer) and stage is Stage.CONFIRM
        return Pair(Pair.from_bytes(answer).first, garbage).to_bytes() if wrong else answer

    federation = Federation(roomy, tamper=sends_garbage)
    for _ in range(5):
        federation.round()
    assert federation.survivors == [6, 5, 6, 5, 5]
    assert [list(report.faults) for report in federation.course.reports] == [["c"], [], ["c"], [], []]
    assert federation.course.reports[0].faults["c"].startswith("for the next round: ")
    assert federation.course.conduct.excluded == {"c"}


def test_what_others_say_of_keys_for_the_next_round_counts_also_if_it_is_given_up(small_plan: Plan) -> None:
    def accuses(node: str, round: int, stage: Stage, answer: bytes) -> bytes:
        if (round, stage) != (1, Stage.UNMASK) or node == "a":
            return answer
        client = SecureClient.restore(secrets["a"]).index
        return Pair.without(Pair.from_bytes(answer).first, f"SignatureError: Not signed by client {client}.").to_bytes()

    federation, secrets = Federation(small_plan), {}

    def notes(node: str, round: int, stage: Stage, answer: bytes) -> bytes:
        if (node, round, stage) == ("a", 1, Stage.CONFIRM):
            prepared = SessionState.from_bytes(federation.clients["a"].state).prepared
            secrets["a"] = SessionState.from_bytes(prepared.encode()).secrets
        return accuses(node, round, stage, answer)

    federation.tamper = notes
    federation.round()
    (report,) = federation.course.reports
    assert report.released
    assert set(report.accused["a"]) == {"b", "c", "d"}
    assert list(report.faults) == ["a"]
    federation.round()
    assert federation.asked[1] == FULL


@pytest.mark.parametrize("broken", [b"cpsp", b"cpsp\1\0\xff\xff\xff\xff", b"cpsp\2\0\0\0\0\0"])
def test_half_a_pair_is_refused_and_a_whole_one_may_follow(small_plan: Plan, broken: bytes) -> None:
    session = begin_round(Terms(plan=small_plan), 1, NODES, run=RUN, prepares=True)
    clients = {node: Client(VECTORS[i]) for i, node in enumerate(NODES)}
    while session.stage is not None:
        for node, request in session.requests().items():
            if Pair.begins(request):
                with pytest.raises(CpsgdError):
                    session.receive(node, broken)
            session.receive(node, clients[node].ask(request))
        session.close()
    assert session.report.faults == {}
    assert session.prepared is not None
    assert session.prepared.waiting == set(NODES)


# ---------------------------------------------------------------------- what it costs


def test_a_prepared_round_is_charged_before_masks_are_asked_for_and_not_earlier(
    small_plan: Plan, tmp_path: Path
) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.create(Budget(population="people", epsilon=8.0, delta=1e-5))
        federation = Federation(small_plan, ledger=ledger, population="people")
        first = federation.round()
        prepared = federation.course._prepared
        assert prepared is not None
        assert len(ledger.events("people")) == 1
        assert first.requests() == {}
        with pytest.raises(StageError, match="before the round is charged"):
            prepared.requests()
        session = federation.course.begin(NODES)
        assert session is prepared
        assert [entry.event.round for entry in ledger.events("people")] == [1, 2]
        assert session.requests().keys() == set(NODES)
        with pytest.raises(StageError, match="charged once"):
            prepared.charge(NODES)


def test_without_budget_a_prepared_round_is_withheld_and_nobody_is_asked(small_plan: Plan, tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.create(Budget(population="people", epsilon=5.0, delta=1e-5))
        federation = Federation(small_plan, ledger=ledger, population="people")
        federation.round()
        federation.round()
        assert federation.asked == [FULL, []]
        assert "budget" in federation.course.reports[1].reason.lower()
        assert len(ledger.events("people")) == 1
    assert [client.trained for client in federation.clients.values()] == [1] * 4


def test_a_client_checks_what_it_has_spent_when_it_uploads_not_only_when_it_advertises(
    small_plan: Plan, tmp_path: Path
) -> None:
    settings = {"cpsgd-memory": str(tmp_path / "memory")}
    limits: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "rounds": 3}
    federation = Federation(small_plan)
    federation.clients["a"] = Client(VECTORS[0], settings=settings, **limits)
    federation.round()
    other = Federation(small_plan)
    other.clients["a"] = Client(VECTORS[0], run=RUN, settings=settings, **limits)
    # Two rounds of another run, while the second of this one is prepared.
    other.course = Course(Terms(plan=small_plan), np.zeros(DIM, np.float32), run="78")
    for client in other.clients.values():
        client.run = "78"
    other.round()
    other.round()
    assert other.survivors == [4, 4]
    session = federation.round()
    assert federation.asked[1] == SHORT
    assert session.report.dropped["a"].startswith("RoundRefusedError: This client has answered 3 rounds")
    assert federation.clients["a"].trained == 1
    assert federation.survivors == [4, 3]
