"""Who did what, by the nodes' names; who is invited again is in `test_course.py`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import pytest

from cpsgd import Plan
from cpsgd.errors import WireError
from cpsgd.federation.answering import SessionState
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.messages import Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.secagg import Stage, keys, shamir

from .local import RUN, Client, carry

NODES = ["north", "south", "west", "east"]


# ---------------------------------------------------------------------- faults in a round


def open_round(plan: Plan) -> tuple[RoundSession[str], dict[str, Client]]:
    clients = {name: Client() for name in NODES}
    return begin_round(Terms(plan=plan), 1, NODES, run=RUN), clients


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK])
def test_a_message_that_no_honest_client_sends_is_a_fault(small_plan: Plan, stage: Stage) -> None:
    session, clients = open_round(small_plan)

    def tamper(node: str, at: Stage, answer: bytes) -> bytes:
        return answer[:-3] if node == "west" and at is stage else answer

    assert carry(session, clients, tamper) is not None
    assert list(session.report.faults) == ["west"]
    assert "Error" in session.report.faults["west"]


def test_silence_errors_and_refusals_are_no_faults(small_plan: Plan) -> None:
    session, clients = open_round(small_plan)
    clients["west"] = Client(epsilon=1.0, delta=1e-6)
    assert carry(session, clients) is not None
    assert "limit is 1" in session.report.dropped["west"]
    assert session.report.faults == {}


def test_a_fault_that_is_made_up_for_is_none(small_plan: Plan) -> None:
    session, clients = open_round(small_plan)
    answers = {node: clients[node].ask(request) for node, request in session.requests().items()}
    for node in ("west", "east"):
        with pytest.raises(WireError):
            session.receive(node, answers[node][:-1])
    for node in ("north", "south", "west"):
        session.receive(node, answers[node])
    session.close()
    assert list(session.report.faults) == ["east"]


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (lambda seal, *parts: os.urandom(len(seal(*parts))), "cannot be opened"),
        (lambda seal, *parts: seal(*parts[:-1], b"\xff" * len(parts[-1])), "are no shares"),
    ],
)
def test_garbage_shares_are_told_by_name_and_one_accuser_proves_it(
    small_plan: Plan, monkeypatch: pytest.MonkeyPatch, bad: Callable[..., bytes], said: str
) -> None:
    """The culprit's messages look right to the server; those who cannot open them say whose they are."""
    original = keys.seal

    class Culprit(Client):
        def ask(self, request: Request | bytes) -> bytes:
            with monkeypatch.context() as patch:
                patch.setattr(keys, "seal", lambda *parts: bad(original, *parts))
                return super().ask(request)

    session, clients = open_round(small_plan)
    clients["west"] = Culprit()
    assert small_plan.colluding == 1
    carry(session, clients)
    assert not session.report.released
    victims = [node for node, reason in session.report.dropped.items() if said in reason]
    assert sorted(victims) == ["east", "north", "south"]
    assert all("(node west)" in session.report.dropped[node] for node in victims)
    assert list(session.report.faults) == ["west"]
    assert session.report.faults["west"].startswith("It signed what are no shares")
    assert session.report.proved == ["west"]
    # It costs them neither budget nor time.
    assert [clients[node].trained for node in victims] == [0, 0, 0]
    assert [SessionState.from_bytes(clients[node].state).answered for node in victims] == [0, 0, 0]


def dealing_wrong_shares(monkeypatch: pytest.MonkeyPatch, to: int) -> Client:
    """A client that deals shares of something else to so many others, well formed and encrypted as they should be."""
    original = shamir.split

    def split(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
        right, wrong = (original(each, threshold, list(holders)) for each in (secret, os.urandom(32)))
        return {**right, **{holder: wrong[holder] for holder in list(right)[:to]}}

    class Culprit(Client):
        def ask(self, request: Request | bytes) -> bytes:
            with monkeypatch.context() as patch:
                patch.setattr(shamir, "split", split)
                return super().ask(request)

    return Culprit()


def test_shares_that_do_not_give_a_secret_are_their_dealers_fault(
    small_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, clients = open_round(small_plan)
    clients["west"] = dealing_wrong_shares(monkeypatch, 3)
    assert carry(session, clients) is None
    assert "(node west)" in session.report.reason
    assert list(session.report.faults) == ["west"]
    # With nobody to spare it might be one of the three others who lies about its share.
    session, clients = open_round(small_plan)
    clients["west"] = dealing_wrong_shares(monkeypatch, 3)

    def tamper(node: str, at: Stage, answer: bytes) -> bytes | None:
        return None if node == "east" and at is Stage.UNMASK else answer

    assert carry(session, clients, tamper) is None
    assert session.report.faults == {}


def test_wrong_shares_within_the_bound_cost_nothing_and_are_told_where_they_are_proved(
    small_plan: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, clients = open_round(small_plan)
    clients["west"] = dealing_wrong_shares(monkeypatch, 1)
    assert carry(session, clients) is not None
    # The dealer or the holder: with one pair in dispute nobody can tell.
    assert session.report.faults == {}


def test_messages_too_large_for_an_honest_client_are_a_fault(small_plan: Plan) -> None:
    session, clients = open_round(small_plan)

    def tamper(node: str, at: Stage, answer: bytes) -> bytes:
        return bytes(1 << 20) if node == "west" else answer

    assert carry(session, clients, tamper) is not None
    assert list(session.report.faults) == ["west"]


def advertised(plan: Plan) -> RoundSession[str]:
    """A round in which everybody is shown the others' keys."""
    session, clients = open_round(plan)
    for node, request in session.requests().items():
        session.receive(node, clients[node].ask(request))
    session.close()
    return session


def test_few_accusers_prove_nothing(small_plan: Plan) -> None:
    session = advertised(small_plan)
    number = NODES.index("west")
    text = f"ShareError: What client {number} sealed for client 0 cannot be opened."
    session.drop("north", text)
    assert session.report.faults == {}
    assert session.report.dropped["north"] == text.replace(f"client {number}", f"client {number} (node west)").replace(
        "client 0", "client 0 (node north)"
    )
    session.drop("south", text)
    assert list(session.report.faults) == ["west"]


@pytest.mark.parametrize(
    "text", ["ShareError: client 99 lies", "KeyError: client 2", "ShareError: client 2" + "9" * 50]
)
def test_strange_accusations_are_only_text(small_plan: Plan, text: str) -> None:
    session = advertised(small_plan)
    session.drop("north", text)
    session.drop("south", text)
    assert session.report.faults == {}


def test_who_was_sent_nothing_yet_accuses_nobody(small_plan: Plan) -> None:
    """Else whoever can connect under several names could have an honest node excluded, without any part in a round."""
    session, _ = open_round(small_plan)
    for node in ("north", "south", "east"):
        session.drop(node, "SignatureError: Not signed by client 2.")
    assert session.report.faults == {}
    assert session.report.accused == {}
