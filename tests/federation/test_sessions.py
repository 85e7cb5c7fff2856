"""A round's bookkeeping by itself: exchanges without cryptography, and what the round is charged and released for."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest

from cpsgd.errors import ImplausibleMeanError, SenderError, ShareError, StageError, ThresholdError, WireError
from cpsgd.federation import terms as terms_module
from cpsgd.federation.carrying import Gathering, Pace, Reply, carry
from cpsgd.federation.plausibility import Bounds
from cpsgd.federation.sessions import Exchange, RoundSession
from cpsgd.federation.terms import Settlement, Terms
from cpsgd.secagg import Stage

NODES = ("north", "south", "west")


class Scripted:
    """An exchange that takes every answer but `bad`, and fails to close while it is told to."""

    def __init__(
        self, stage: Stage, nodes: tuple[str, ...] = NODES, *, needed: int = 2, binding: bool = True, faults: str = ""
    ) -> None:
        self.stage, self.needed, self.binding = stage.value, needed, binding
        self.asked, self.faults, self.answers = nodes, faults, dict[str, bytes]()

    def requests(self) -> Mapping[str, bytes]:
        return {node: node.encode() for node in self.asked}

    def receive(self, node: str, answer: bytes) -> None:
        if answer == b"bad":
            raise WireError("It is bad.")
        self.answers[node] = answer

    def close(self) -> Mapping[str, str]:
        if len(self.answers) < self.needed:
            raise ThresholdError(f"Only client 1 and {len(self.answers)} others are left, and client 3 is not one.")
        return {self.faults: "it lied"} if self.faults else {}


class Account:
    """A settlement that notes what it is asked for."""

    def __init__(self, survivors: int = 3) -> None:
        self.calls: list[str] = []
        self.charged, self.survivors = False, survivors

    def __getattr__(self, name: str) -> Any:
        def call(*arguments: object) -> object:
            self.calls.append(name)
            self.charged |= name == "charge"
            return np.ones(2, np.float32) if name == "release" else None

        return call


def opened(*exchanges: Scripted, account: Account | None = None, colluding: int = 1) -> RoundSession[str]:
    return RoundSession(
        NODES,
        round=4,
        colluding=colluding,
        settlement=cast(Settlement, account),
        exchanges=[cast(Exchange[str], each) for each in exchanges],
    )


def answered(session: RoundSession[str], *nodes: str, metrics: Mapping[str, object] | None = None) -> None:
    for node in nodes:
        session.receive(node, b"fine", metrics)


def test_every_exchange_is_asked_answered_and_closed_in_order() -> None:
    account = Account()
    session = opened(Scripted(Stage.SHARE), Scripted(Stage.MASK), Scripted(Stage.UNMASK), account=account)
    assert (session.stage, account.calls) == (Stage.SHARE, [])
    assert session.requests() == {node: node.encode() for node in NODES}
    assert (session.waiting, session.enough) == (frozenset(NODES), False)
    answered(session, "north", "south")
    assert (session.waiting, session.enough) == ({"west"}, True)
    assert session.close()
    assert session.report.dropped == {"west": "no answer in time"}
    assert session.report.stages == {"west": Stage.SHARE}
    assert (session.stage, account.calls) == (Stage.MASK, [])
    assert set(session.requests()) == {"north", "south"}
    assert account.calls == ["ask"]
    answered(session, "north", "south")
    session.close()
    assert (session.stage, account.calls) == (Stage.UNMASK, ["ask", "reveal"])
    answered(session, "south", "north")
    with pytest.raises(StageError, match="after the last stage"):
        session.release()
    session.close()
    assert session.stage is None
    assert session.release() is not None
    assert (session.report.released, session.report.survivors) == (True, 3)
    for late in (session.release, session.close, lambda: session.receive("north", b"")):
        with pytest.raises(StageError):
            late()


def test_exchanges_outside_the_round_are_left_out_where_nobody_is_asked() -> None:
    relay, nobody = Scripted(Stage.RELAY, ("west",), needed=0, binding=False), ()
    session = opened(Scripted(Stage.RELAY, nobody, binding=False), relay, Scripted(Stage.SHARE, nobody, needed=0))
    assert (session.stage, session.waiting) == (Stage.RELAY, {"west"})
    session.count_bytes("west", 10)
    session.count_bytes("west", 5)
    session.drop("west", "silent")
    assert session.report.dropped == {}
    assert (session.waiting, session.requests()) == (frozenset(), {})
    session.close()
    assert str(session.stage) == str(Stage.SHARE)  # it is the round's own, also without requests
    session.count_bytes("west", 7)
    session.count_bytes("west", 8)
    assert (session.report.relay_bytes, session.report.upload_bytes) == ({"west": 15}, {"west": 15})
    session.close()
    assert session.stage is None
    assert opened(Scripted(Stage.RELAY, nobody, binding=False)).stage is None


def test_answers_that_are_refused() -> None:
    session = opened(Scripted(Stage.SHARE, ("north", "south"), needed=1))
    with pytest.raises(SenderError, match="no part"):
        session.receive("west", b"fine")
    for node in ("north", "south"):
        with pytest.raises(WireError):
            session.receive(node, b"bad")
    answered(session, "south")  # makes up for it
    with pytest.raises(StageError, match="answered before"):
        session.receive("south", b"again")
    session.drop("south", "too late to leave")
    session.close()
    assert session.report.faults == {"north": "WireError: It is bad."}
    assert session.report.dropped == {"north": "no answer in time"}
    session = opened(Scripted(Stage.SHARE))
    session.drop("west", "left")
    with pytest.raises(SenderError):
        session.receive("west", b"fine")


def test_a_reply_that_is_refused_drops_its_node() -> None:
    session = opened(Scripted(Stage.SHARE))
    Reply("north", b"bad", size=3).hand_to(session)
    Reply("south", reason="no time").hand_to(session)
    Reply("west", b"fine", {"loss": 1.0}, size=4).hand_to(session)
    assert session.report.dropped == {"north": "WireError: It is bad.", "south": "no time"}
    assert session.report.upload_bytes == {"north": 3, "west": 4}
    assert session.waiting == frozenset()


def test_when_a_round_is_not_waited_for_any_more() -> None:
    """By a clock that began anywhere."""
    waits = Gathering(Pace(nodes=60.0, grace=5.0), wanted=4, needed=3, began=1_000.0)
    assert not waits.over(2, 1_059.0)
    assert waits.over(2, 1_060.0)
    assert not waits.over(3, 1_010.0)
    assert not waits.over(2, 1_012.0)  # one has left: the grace period begins anew
    assert [waits.over(3, now) for now in (1_013.0, 1_017.9, 1_018.0)] == [False, False, True]
    assert Gathering(Pace(), wanted=4, needed=3, began=1_000.0).over(4, 1_001.0)
    assert carry(cast(Any, SimpleNamespace(stage=None)), cast(Any, None), Pace())


def test_a_stage_is_closed_early_where_the_round_can_go_on() -> None:
    session = opened(Scripted(Stage.SHARE, needed=2))
    answered(session, "north")
    assert not session.close(early=True)
    assert (session.stage, session.report.dropped) == (Stage.SHARE, {})
    account = Account()
    session = opened(Scripted(Stage.SHARE, needed=3, faults="west"), account=account)
    answered(session, "north")
    session.drop("south", None)
    session.drop("west", "Traceback\n  line 1\n\x07gone\n\n")
    assert session.close(early=True)  # nobody is left who could answer
    assert session.report.reason.startswith("Only client 1 (node south) and 1 others are left, and client 3 is not")
    assert session.report.dropped == {"south": "an error", "west": "gone"}
    assert account.calls == ["abandon"]
    assert session.release() is None


def test_metrics_are_finite_numbers_of_clients_that_train() -> None:
    account = Account()
    session = opened(Scripted(Stage.SHARE), Scripted(Stage.MASK), account=account)
    answered(session, *NODES, metrics={"loss": 1.0})
    session.close()
    many = {f"{number:03}": number for number in range(120)}
    session.receive("north", b"fine", {"loss": 3.0, "nan": float("nan"), "big": 10**400, "text": "x", **many})
    session.receive("south", b"fine", {"loss": 5, "inf": float("-inf"), 7: 1.0})  # type: ignore[dict-item]
    session.receive("west", b"fine")
    session.close()
    session.release()
    found = session.report.metrics
    assert len(found) == 100
    assert (found["loss"], found["098"]) == (4.0, 98.0)
    assert "099" not in found


def test_a_prepared_round_is_charged_once_and_without_those_who_left() -> None:
    account, now = Account(), opened()
    following = opened(Scripted(Stage.SHARE), Scripted(Stage.MASK), account=account)
    now.following = following
    with pytest.raises(StageError, match="when it is prepared"):
        following.charge(NODES)
    assert (following.is_prepared, now.prepared) == (False, None)
    answered(following, *NODES)
    following.close()
    assert (following.is_prepared, now.prepared) == (True, following)
    following.charge({"north", "west"})
    assert following.report.dropped == {"south": "it has left since the round was prepared"}
    assert account.calls == ["charge"]
    assert (following.is_prepared, now.prepared) == (False, None)
    with pytest.raises(StageError):
        following.charge(NODES)
    assert opened(Scripted(Stage.MASK)).is_prepared is False
    assert opened(Scripted(Stage.MASK), account=Account()).is_prepared


@pytest.mark.parametrize("colluding", [1, 2])
def test_more_accusers_than_may_lie_together_prove_a_fault(colluding: int) -> None:
    session = opened(Scripted(Stage.ADVERTISE), Scripted(Stage.MASK), colluding=colluding)
    said = "ShareError: What client 0 sealed for client 2 cannot be opened."
    session.drop("west", said)
    assert session.report.accused == {}  # nobody was sent anything yet
    session = opened(Scripted(Stage.ADVERTISE), Scripted(Stage.MASK), colluding=colluding)
    answered(session, *NODES)
    session.close()
    for node in ("west", "west", "south"):
        session.drop(node, said)
    session.drop("north", said)  # of itself: it says nothing
    assert session.report.accused == {"north": ["west", "south"]}
    assert ("north" in session.report.faults) == (colluding < 2)
    assert "client 0 (node north)" in session.report.dropped["west"]
    assert "client 2 (node west)" in session.report.dropped["west"]


# ---------------------------------------------------------------------- charge and release


class Book:
    """A ledger of the calls that it got."""

    def __init__(self, *released: bool) -> None:
        self.calls: list[tuple[str, object]] = []
        self.entries = [SimpleNamespace(released=each) for each in released]

    def find(self, population: str, *, run: str, round: int) -> object:
        self.calls.append(("find", run))
        return self.entries.pop(0) if self.entries else None

    def reserve(self, population: str, event: object) -> object:
        self.calls.append(("reserve", event))
        return SimpleNamespace(released=False)

    def release(self, entry: object, survivors: int) -> None:
        self.calls.append(("release", survivors))

    def abandon(self, entry: object, reason: str) -> None:
        self.calls.append(("abandon", reason))


def settlement(book: Book, *, one_event: bool = False, course: str = "") -> Settlement:
    terms = SimpleNamespace(
        ledger=book,
        population="people",
        engine="engine",
        surviving=3,
        protocol=None,
        memory=SimpleNamespace(one_event=one_event),
        event=lambda round, name: (round, name),
    )
    return Settlement(cast(Terms, terms), 4, "run", course)


def test_a_round_is_charged_before_it_asks_and_given_up_only_if_it_did_not() -> None:
    book = Book()
    asked, unasked = settlement(book), settlement(book)
    with pytest.raises(StageError, match="before the round is charged"):
        asked.ask()
    asked.charge()
    assert book.calls == [("find", "engine-run"), ("reserve", (4, "engine-run"))]
    book.calls.clear()
    asked.ask()
    asked.abandon()
    unasked.abandon()  # not charged
    assert book.calls == []
    unasked.charge()
    unasked.abandon()
    assert [name for name, _ in book.calls] == ["find", "reserve", "abandon"]


def test_the_entry_of_a_run_that_stopped_pays_once() -> None:
    book = Book(False)
    stopped = settlement(book)
    stopped.charge("before")
    assert book.calls == [("find", "engine-before")]
    stopped.abandon()  # the run that stopped may have asked for something
    assert len(book.calls) == 1
    for found, charged_to, name in (
        (Book(True), "before", "engine-before"),
        (Book(), "before", "engine-before"),
        (Book(False), None, "engine-run"),
    ):
        settlement(found).charge(charged_to)
        assert found.calls == [("find", name), ("reserve", (4, name))]


def test_rounds_that_are_one_event_belong_to_the_course() -> None:
    book = Book()
    settlement(book, one_event=True, course="first").charge()
    assert book.calls == [("find", "engine-first"), ("reserve", (4, "engine-first"))]
    again = Book(True)
    settlement(again, one_event=True, course="first").charge()
    assert again.calls == [("find", "engine-first"), ("find", "engine-run"), ("reserve", (4, "engine-run"))]
    apart = Book()
    settlement(apart, course="first").charge()
    assert apart.calls == [("find", "engine-run"), ("reserve", (4, "engine-run"))]


def test_a_mean_of_too_few_or_an_implausible_one_is_not_released(monkeypatch: pytest.MonkeyPatch) -> None:
    book, mean = Book(), np.ones(2, np.float32)
    monkeypatch.setattr(terms_module, "bounds", lambda protocol, survivors: Bounds(1.5, {}))
    account = settlement(book)
    account.charge()
    book.calls.clear()
    with pytest.raises(ThresholdError, match="0 clients are left, and the plan needs 3"):
        account.release()
    account.total = SimpleNamespace(survivors=2, mean=lambda: mean)
    with pytest.raises(ThresholdError, match="2 clients are left"):
        account.release()
    account.total = SimpleNamespace(survivors=3, mean=lambda: mean)
    assert account.release() is mean
    assert book.calls == [("release", 3)]
    monkeypatch.setattr(terms_module, "bounds", lambda protocol, survivors: Bounds(1.4, {}))
    with pytest.raises(ImplausibleMeanError, match=r"has norm 1\.414"):
        account.release()
    assert book.calls == [("release", 3)]


def test_whoever_dealt_shares_that_nobody_can_open_is_proved_at_fault() -> None:
    exchange = Scripted(Stage.UNMASK)
    session = opened(exchange)
    answered(session, *NODES)
    session._exchanges[0].close = mock.Mock(side_effect=ShareError("Its shares give nothing.", dealer=1))  # type: ignore[method-assign]
    assert session.close()
    assert (session.stage, session.report.proved) == (None, [NODES[1]])
    assert session.report.faults == {NODES[1]: "Its shares give nothing."}
