"""A client's files by themselves: what a memory counts and refuses, and which settings are taken for which files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from cpsgd.errors import RoundRefusedError, SignatureError, StageError
from cpsgd.federation.client_files import (
    Answered,
    Memory,
    Signing,
    session_identifier,
)
from cpsgd.secagg import Stage
from cpsgd.secagg.identity_files import create_identity, public_line, read_identity

FIRST, SECOND = Answered("1", 4, "ab" * 16), Answered("2", 1, "cd" * 16)


@pytest.fixture
def memory(tmp_path: Path) -> Memory:
    return Memory(tmp_path / "memory")


def permitted(answered: list[Answered], kinds: Mapping[str, str]) -> None:
    """Permits everything."""


def test_a_memory_counts_what_was_answered_and_knows_the_kinds(memory: Memory) -> None:
    assert memory.add(FIRST, permitted, "one kind") == 1
    assert memory.add(SECOND, permitted, "another") == 2
    assert memory.add(Answered("3", 1, FIRST.digest), permitted, "one kind") == 3
    rounds, kinds = memory.history()
    assert rounds == [FIRST, SECOND, Answered("3", 1, FIRST.digest)] == memory.rounds()
    assert kinds == {FIRST.digest: "one kind", SECOND.digest: "another"}


def test_what_is_not_permitted_is_not_recorded(memory: Memory, tmp_path: Path) -> None:
    memory.add(FIRST, permitted, "kind")
    before = (tmp_path / "memory").read_bytes()

    def refuses(answered: list[Answered], kinds: Mapping[str, str]) -> None:
        assert answered == [FIRST]
        raise RoundRefusedError("enough")

    with pytest.raises(RoundRefusedError, match="enough"):
        memory.add(SECOND, refuses, "kind")
    assert (tmp_path / "memory").read_bytes() == before


def test_stages_are_answered_once_and_rounds_that_were_entered_are_counted(memory: Memory) -> None:
    assert memory.once("r", 1, Stage.ADVERTISE) == 1
    assert memory.once("r", 1, Stage.SHARE) == 1
    assert memory.once("r", 2, Stage.ADVERTISE, ahead=True) == 2
    assert memory.once("r", 2, Stage.ADVERTISE) == 3
    assert memory.once("another", 1, Stage.ADVERTISE) == 4
    for again in ({"round": 1, "stage": Stage.SHARE}, {"round": 2, "stage": Stage.ADVERTISE, "ahead": True}):
        with pytest.raises(StageError, match="already"):
            memory.once("r", **again)  # type: ignore[arg-type]
    assert memory.rounds() == []


def test_counters_of_others_only_grow(memory: Memory) -> None:
    one, other = b"1" * 32, b"2" * 32
    memory.meet({0: (one, 5), 3: (other, 1)})
    for wrong in ({0: (one, 5)}, {0: (one, 4)}, {7: (other, 1)}):
        with pytest.raises(SignatureError, match="set back"):
            memory.meet(wrong)
    memory.meet({2: (one, 6)})
    with pytest.raises(SignatureError, match="Client 2 "):
        memory.meet({2: (other, 1)})


def test_how_often_seeds_were_handed_on_never_falls(memory: Memory, tmp_path: Path) -> None:
    with memory._opened() as content:
        for run, number in (("r", 1), ("r", 3), ("r", 2), ("s", 1)):
            content.give(run, number)
    with memory._opened() as content:
        assert [content.given(run) for run in ("r", "s", "t")] == [3, 1, 0]
        assert content.rounds == []
        assert content.stages == set()


def test_identity_roster_and_memory_come_together(tmp_path: Path) -> None:
    identity, roster = tmp_path / "identity", tmp_path / "roster"
    create_identity(identity)
    roster.write_text(public_line(read_identity(identity), "a") + "\n")
    whole: dict[str, object] = {
        "cpsgd-identity": str(identity),
        "cpsgd-roster": str(roster),
        "cpsgd-memory": str(tmp_path / "memory"),
    }
    assert len(Signing.of(whole).roster or ()) == 1
    for name, said in (("cpsgd-identity", "both"), ("cpsgd-roster", "both"), ("cpsgd-memory", "sign twice")):
        with pytest.raises(RoundRefusedError, match=said):
            Signing.of({**whole, name: None})
    for name in ("cpsgd-identity", "cpsgd-roster"):
        for wrong in ("", 5):
            with pytest.raises(RoundRefusedError, match="each the name of a file"):
                Signing.of({**whole, name: wrong})
    alone = Signing.of({"cpsgd-identity": str(identity), "cpsgd-task": "t"})
    assert (alone.identity is None, alone.roster) == (False, None)
    with pytest.raises(RoundRefusedError, match="whose servers know who may send"):
        Signing.of({**whole, "cpsgd-task": "t"})
    create_identity(tmp_path / "stranger")
    with pytest.raises(RoundRefusedError, match="not on its own roster"):
        Signing.of({**whole, "cpsgd-identity": str(tmp_path / "stranger")})


def test_a_session_stands_for_one_round_of_one_run() -> None:
    names = [("r", 1, False), ("r", 1, True), ("r", 2, False), ("s", 1, False)]
    found = {session_identifier(run, round, ahead=ahead) for run, round, ahead in names}
    assert len(found) == 4
    assert all(len(each) == 16 for each in found)
    assert session_identifier("r", 1).hex() == "0deefec4446fb61d65053b69c860c39a"
