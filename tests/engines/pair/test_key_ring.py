"""Keys of a server: its own, each for some rounds, and deleted when these are closed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpsgd.engines.pair.books import Books
from cpsgd.engines.pair.key_ring import KeyRing
from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.store import ReportStore, Verdict
from cpsgd.engines.pair.task import MOST_KEYS, PairTask, Secrets, create_task, make_keys, public_keys
from cpsgd.errors import MessageError, ParameterError, StageError, StoreError
from cpsgd.secagg.pair.sealing import unseal
from cpsgd.secagg.pair.upload import Upload

from .local import DIM, Pair, protocol


def test_rounds_share_keys_in_turn_where_there_are_fewer() -> None:
    task, _ = create_task(protocol(), leader="http://a", helper="http://b", rounds=2)
    assert len({task.key(role, round) for role in ("leader", "helper") for round in range(2)}) == 4  # type: ignore[arg-type]
    fewer = replace(task, helper=replace(task.helper, keys=task.helper.keys[:1]))
    assert [fewer.key_number("helper", round) for round in range(2)] == [0, 0]
    assert len(make_keys(1000)) == MOST_KEYS
    numbers = [round * MOST_KEYS // 1000 for round in range(1000)]  # as key_number does
    assert numbers[0] == 0
    assert numbers[-1] == MOST_KEYS - 1
    assert set(np.diff(numbers)) == {0, 1}


def test_a_task_with_the_same_key_twice_or_more_keys_than_rounds_is_refused() -> None:
    task, _ = create_task(protocol(), leader="http://a", helper="http://b", rounds=2)
    with pytest.raises(ParameterError, match="twice"):
        replace(task, helper=replace(task.helper, keys=(task.helper.keys[0],) * 2))
    with pytest.raises(ParameterError, match="twice"):
        replace(task, helper=task.leader)
    for keys in ((), public_keys(make_keys(3))):
        with pytest.raises(ParameterError, match="number of keys"):
            replace(task, helper=replace(task.helper, keys=keys))


def books_of(pair: Pair, file: Path) -> Books:
    store = ReportStore(str(pair.folder / "leader.db"), task=pair.task.id, role="leader", dim=DIM)
    pair.stores.append(store)
    secrets = Secrets.read(file)
    return Books(pair.task, "leader", secrets, store, keys=KeyRing(pair.task, "leader", secrets, file))


def test_a_closed_rounds_key_is_gone_and_recorded_uploads_stay_closed(tmp_path: Path) -> None:
    pair, file = Pair(tmp_path), tmp_path / "leader.json"
    pair.secrets["leader"].write(file)
    pair.leader.books.store.close()
    recorded = pair.upload(0)
    leader = Leader(books_of(pair, file))
    [prepared] = leader.read([recorded.to_bytes()])
    assert isinstance(prepared, Prepared)
    leader.settle([prepared], pair.helper.verify(leader.evaluate([prepared])))
    before = Secrets.read(file)
    leader.books.close(0)
    leader.books.store.close()
    left = Secrets.read(file)
    assert left.private == (b"", before.private[1])
    assert oct(file.stat().st_mode & 0o777) == "0o600"
    shape = pair.task.shape(0)
    with pytest.raises(MessageError):
        unseal(KeyRing(pair.task, "leader", left).key(1), recorded.leader, shape, recorded.id, "leader")
    with pytest.raises(StageError, match="deleted"):
        KeyRing(pair.task, "leader", left).key(0)
    # A restart goes on with the next round; what was sent before hears its verdict, and others that it is closed.
    again = Leader(books_of(pair, file))
    late = pair.upload(1)
    assert again.read([recorded.to_bytes(), late.to_bytes()]) == [Verdict.ACCEPTED, Verdict.ROUND_CLOSED]
    assert isinstance(again.read([pair.upload(1, round=1).to_bytes()])[0], Prepared)
    again.books.close(1)
    assert Secrets.read(file).private == (b"", b"")


def test_a_crash_between_closing_and_deleting_is_made_up_for(tmp_path: Path) -> None:
    pair, file = Pair(tmp_path), tmp_path / "leader.json"
    pair.secrets["leader"].write(file)
    pair.leader.books.store.close_round(0)
    pair.leader.books.store.close()
    assert all(Secrets.read(file).private)
    books_of(pair, file)
    assert Secrets.read(file).private[0] == b""


def test_a_key_that_cannot_be_deleted_is_said_and_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair, file = Pair(tmp_path), tmp_path / "leader.json"
    pair.secrets["leader"].write(file)
    pair.leader.books.store.close()
    books = books_of(pair, file)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("cpsgd.engines.pair.task.write_file", full)
        with pytest.raises(StoreError, match="cannot be deleted"):
            books.close(0)
    assert all(Secrets.read(file).private)
    assert books.close(0).state == "closed"
    assert Secrets.read(file).private[0] == b""


def test_a_part_for_another_rounds_key_does_not_open(tmp_path: Path) -> None:
    """Key confusion: the round says which key, and nothing else does."""
    pair = Pair(tmp_path)
    other = pair.upload(0, round=1)
    changes: list[Callable[[Upload], Upload]] = [
        lambda right: replace(right, helper=other.helper),
        lambda right: replace(right, leader=other.leader),
        lambda right: replace(right, helper=right.leader[: len(right.helper)]),
        lambda right: replace(right, round=1),
    ]
    for change in changes:
        found = pair.read(change(pair.upload(0)))
        if isinstance(found, Prepared):
            found = Verdict(pair.helper.verify(pair.leader.evaluate([found]))[0])
        assert found in (Verdict.UNREADABLE, Verdict.ROUND_CLOSED) or isinstance(found, MessageError)


def test_keys_of_somebody_else_are_refused(tmp_path: Path) -> None:
    private = make_keys(2)
    task, secrets = create_task(
        protocol(), leader="http://a", helper="http://b", rounds=2, helper_keys=public_keys(private)
    )
    assert secrets["helper"].private == ()
    assert PairTask.from_dict(task.to_dict()) == task
    with pytest.raises(ParameterError, match="--keys"):
        KeyRing(task, "helper", secrets["helper"])
    for wrong in (private[::-1], private[:1], make_keys(2), (*private, private[0])):
        with pytest.raises(ParameterError, match="not the private keys"):
            KeyRing(task, "helper", Secrets(private=wrong))
    KeyRing(task, "helper", Secrets(private=private)).key(1)
    assert secrets["leader"].private
