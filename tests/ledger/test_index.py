"""Long ledgers: what is read on opening, what a charge costs, and an index that is damaged, cut or left behind."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from cpsgd._plain import canonical
from cpsgd.errors import (
    BudgetExceededError,
    EntryError,
    LedgerChainError,
    LedgerError,
    LedgerFormatError,
    ParameterError,
)
from cpsgd.ledger import Budget, Ledger, RoundEvent, charging
from cpsgd.ledger import replica as replicas
from cpsgd.ledger.chain import Head
from cpsgd.ledger.index import _checks, _hash_of
from cpsgd.ledger.kinds import Account
from cpsgd.ledger.state import State
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.protocol import Protocol

from .damage import chained, cut, edit, index_of, replayed, unread
from .totals import total_of

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=100.0)
OTHER = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=200.0)
EVERY = 8


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "SNAPSHOT_EVERY", EVERY)
    monkeypatch.setattr(replicas, "_MORE_THAN_SNAPSHOT", 0)


def event(round: int, run: str = "r", protocol: Protocol = PROTOCOL, **options: object) -> RoundEvent:
    return RoundEvent(protocol, survivors=900, run=run, round=round, **options)


def fill(ledger: Ledger, first: int, last: int) -> None:
    """Rounds of three kinds, some in partitions, most of them released, with different numbers of messages."""
    for number in range(first, last):
        kinds = (
            event(number),
            event(number, protocol=OTHER),
            event(number, participation="once", partition=f"p{number % 2}"),
        )
        entry = ledger.reserve("people", kinds[number % 3])
        if number % 4:
            ledger.release(entry, 900 + 20 * (number % 5))


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ledger") / "budgets.ledger"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replicas, "SNAPSHOT_EVERY", EVERY)
        patch.setattr(replicas, "_MORE_THAN_SNAPSHOT", 0)
        ledger = Ledger(path)
        ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
        fill(ledger, 0, 30)
    return path


@pytest.fixture
def long(filled: Path, tmp_path: Path) -> Ledger:
    """Thirty rounds, and a snapshot every few records."""
    shutil.copy(index_of(filled), tmp_path)
    return Ledger(shutil.copy(filled, tmp_path))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Numbers of the records that are read."""
    found: list[object] = []
    real = State.apply

    def apply(self: State, *record: object) -> object:
        found.append(self.head.number + 1)
        return real(self, *record)  # type: ignore[arg-type]

    monkeypatch.setattr(State, "apply", apply)
    return found


def everything(ledger: Ledger) -> tuple[object, ...]:
    return ledger.total("people"), ledger.events("people"), ledger.budgets(), ledger.head


# ------------------------------------------------------------------ what is read


def test_opening_reads_the_records_since_the_last_snapshot(long: Ledger, reads: list[object]) -> None:
    records = long.verify().records
    assert records > 50
    reads.clear()
    fresh = Ledger(long.path)
    assert len(reads) <= EVERY + 2
    entry = fresh.reserve("people", event(100))
    fresh.release(entry, 950)
    assert len(reads) <= EVERY + 5
    assert fresh.rounds("people", "r") == {*range(30), 100}
    assert fresh.find("people", run="r", round=100) == fresh.events("people", last=1)[0]
    assert everything(fresh) == everything(long)


def test_a_snapshot_says_what_reading_all_records_says(long: Ledger) -> None:
    from_snapshot = Ledger(long.path)._replica.state
    whole, entries = replayed(long.path.read_bytes())
    assert from_snapshot.to_text() == whole.to_text()
    assert from_snapshot.head == whole.head
    budget = whole.budgets["people"]
    expected = total_of(budget, entries["people"])
    assert charging.spent(budget, [from_snapshot.accounts["people", 0]]) == expected
    assert entries["people"] == Ledger(long.path).events("people")
    assert Ledger(long.path).events("people", last=3) == entries["people"][-3:]
    assert Ledger(long.path).events("people", last=1000) == entries["people"]


def test_a_long_snapshot_is_made_less_often(long: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replicas, "_MORE_THAN_SNAPSHOT", 4)
    for number in range(100, 160):
        long.reserve("people", event(number))
    lines = long.path.read_bytes().splitlines()
    snapshots = [line for line in lines[-80:] if b'"kind":"snapshot"' in line]
    assert len(snapshots) >= 1
    assert sum(map(len, snapshots)) < sum(map(len, lines[-80:])) / 3
    assert Ledger(long.path).verify().totals == (long.total("people"),)


@pytest.mark.parametrize("version", [0, 1, 2, 4])
def test_states_of_earlier_releases_are_read_where_they_mean_the_same(long: Ledger, version: int) -> None:
    text = long._replica.state.to_text()
    other = text.replace('"version":3', f'"version":{version}')
    sampled = other.replace('"scheme":"every"', '"scheme":"fixed-size"').replace('"rate":1.0', '"rate":0.5')
    assert other != text
    assert sampled != other
    for each in [sampled] if version in (1, 2) else [other, sampled]:
        with pytest.raises(ParameterError, match="release"):
            State.from_text(each, Head(5, "0" * 64))
    if version in (1, 2):
        assert State.from_text(other, Head(5, "0" * 64)).to_text() == text


def test_the_text_of_a_snapshot_survives_reading_it(long: Ledger) -> None:
    text = long._replica.state.to_text()
    again = State.from_text(text, Head(5, "0" * 64))
    assert again.to_text() == text
    assert (again.head.number, again.snapshot) == (5, 5)


# ------------------------------------------------------------------ damage


def broken_row(data: bytes, row: int, column: int) -> bytes:
    changed = bytearray(data)
    changed[40 * row + 8 * column] ^= 1
    return bytes(changed)


def test_an_entry_is_closed_by_its_own_record_alone(ledger: Ledger) -> None:
    """Not by the reservation of a round that has the entry's number."""
    given_up = ledger.reserve("people", event(0))
    ledger.abandon(given_up, "nothing was shown")
    rounds = range(given_up.number, given_up.number + 2 * EVERY)
    others = [ledger.reserve("people", event(round)) for round in rounds]
    again = Ledger(ledger.path)
    with pytest.raises(EntryError, match="given up"):
        again.release(given_up, 900)
    for entry in others[:3]:
        assert again.release(entry.number, 900).released
        with pytest.raises(EntryError, match="released before"):
            Ledger(ledger.path).release(entry.number, 901)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: b"",
        lambda data: data[:-1],
        lambda data: data[:400],
        lambda data: bytes(len(data)),
        lambda data: broken_row(data, 0, 1),
        lambda data: broken_row(data, 2, 3),
        lambda data: broken_row(data, 3, 2),
        lambda data: data[:80] + data[120:],  # a row is missing
        lambda data: data[:80] + data[120:160] + data[80:120] + data[160:],
        lambda data: b"hello" * 100,
    ],
)
def test_a_damaged_index_is_thrown_away(long: Ledger, damage: Callable[[bytes], bytes], reads: list[object]) -> None:
    expected, rounds = everything(long), long.rounds("people", "r")
    whole, index = index_of(long.path).read_bytes(), index_of(long.path)
    index.write_bytes(damage(whole))
    reads.clear()
    fresh = Ledger(long.path)
    assert len(reads) <= EVERY + 2  # totals do not rest on it
    assert everything(fresh) == expected
    assert fresh.rounds("people", "r") == rounds
    assert index.read_bytes() == damage(whole)  # reading writes nothing
    fresh.reserve("people", event(200))
    assert index.read_bytes()[: len(whole)] == whole
    assert Ledger(long.path).verify().totals[0].rounds == 31
    index.write_bytes(damage(whole))
    fresh.repair()
    assert index.read_bytes()[: len(whole)] == whole


@pytest.mark.parametrize("remove", [True, False])
def test_the_index_is_only_a_cache(long: Ledger, remove: bool) -> None:
    """A ledger that is copied without it, into a folder where nothing may be made, or with one of another ledger."""
    other = Ledger(long.path.with_name("other.ledger"))
    other.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    expected = everything(long)
    if remove:
        index_of(long.path).unlink()
    else:
        index_of(long.path).write_bytes(index_of(other.path).read_bytes())
    assert everything(Ledger(long.path)) == expected
    index_of(long.path).unlink(missing_ok=True)
    index_of(long.path).mkdir()  # cannot be written
    fresh = Ledger(long.path)
    entry = fresh.reserve("people", event(100))
    assert fresh.release(entry, 950) == Ledger(long.path).find("people", run="r", round=100)


def test_a_ledger_that_has_the_name_of_an_index_stays(long: Ledger) -> None:
    other = Ledger(long.path.with_name("other.ledger"))
    other.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    whole = other.path.read_bytes()
    index_of(long.path).write_bytes(whole)
    long = Ledger(long.path)
    long.release(long.reserve("people", event(100)), 950)
    long.repair()
    assert index_of(long.path).read_bytes() == whole


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="pipes as POSIX has them")
def test_an_index_in_somebody_elses_folder(long: Ledger) -> None:
    """A pipe would be waited for, a link followed, and rows of another user's believed."""
    index, expected = index_of(long.path), everything(long)
    moved = index.rename(index.with_name("elsewhere"))
    os.mkfifo(index)
    assert everything(Ledger(long.path)) == expected
    Ledger(long.path).repair()
    index.unlink()
    index.symlink_to(moved)
    rows = moved.read_bytes()
    assert Ledger(long.path)._replica.index._sound is False
    Ledger(long.path).repair()
    assert index.is_symlink()
    assert moved.read_bytes() == rows
    index.unlink()
    shutil.copy(moved, index)
    assert Ledger(long.path)._replica.index._sound is True
    if os.geteuid() == 0:
        os.chown(index, 65534, 65534)
        assert Ledger(long.path)._replica.index._sound is False


def test_a_wrong_index_with_right_checks_is_found_by_verify(long: Ledger) -> None:
    index = long._replica.index
    forged = index._all(0)
    forged[2, 3] = 77
    index._stored, index._sound = forged, False
    index._clear()
    index.save()
    with pytest.raises(LedgerFormatError, match="cpsgd budget repair"):
        Ledger(long.path).verify()
    Ledger(long.path).repair()
    assert Ledger(long.path).verify().totals[0].rounds == 30


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_of_the_index_makes_a_released_round_one_that_never_was(long: Ledger, seed: int) -> None:
    """The same round would be accepted again, at no cost where its partition has been paid for."""
    index, generator = index_of(long.path), random.Random(seed)
    whole, log = index.read_bytes(), long.path.read_bytes()
    known = {entry.event.round: entry for entry in long.events("people") if not entry.abandoned}
    for place in generator.sample(range(len(whole)), 100):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        index.write_bytes(flipped)
        opened = Ledger(long.path)
        for round in generator.sample(list(known), 4):
            assert opened.find("people", run="r", round=round) == known[round]
        assert opened.rounds("people", "r") == frozenset(known)
        with pytest.raises(LedgerError):
            opened.reserve("people", event(generator.choice(list(known))))
    assert long.path.read_bytes() == log


def test_an_index_of_a_fork_that_lands_beside_a_running_process_gets_no_rows(ledger: Ledger) -> None:
    """With rows of ours after those of the fork, the next process would believe both and miss rounds of ours."""
    fill(ledger, 0, 3)
    fork = ledger.path.parent / "fork"
    fork.mkdir()
    for path in (ledger.path, index_of(ledger.path)):
        shutil.copy(path, fork)
    other, running = Ledger(fork / ledger.path.name), Ledger(ledger.path)
    fill(other, 50, 58)
    fill(running, 3, 11)
    shutil.copy(index_of(other.path), index_of(ledger.path))
    fill(running, 11, 20)
    fresh = Ledger(ledger.path)
    assert fresh.rounds("people", "r") == frozenset(range(20))
    assert all(fresh.find("people", run="r", round=round) is not None for round in range(20))
    assert fresh._replica.index._sound


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="links and pipes as POSIX has them")
def test_what_takes_the_place_of_an_index_while_a_process_lives_stays_as_it_is(ledger: Ledger) -> None:
    """Whole rows were cut out of such a file, even of the ledger itself, before anybody looked what it was."""
    index, other = index_of(ledger.path), ledger.path.with_name("notes")

    def replaced(by: Callable[[], object], round: int) -> None:
        ledger.repair()  # has a sound index again
        index.unlink()
        by()
        ledger.reserve("people", event(round))

    for number, notes in enumerate((b"a few words", b"x" * 95)):
        other.write_bytes(notes)
        replaced(lambda: index.symlink_to(other), 2 * number)
        assert (index.is_symlink(), other.read_bytes()) == (True, notes)
        index.unlink()
        replaced(lambda: index.hardlink_to(other), 2 * number + 1)
        assert other.read_bytes() == notes
    replaced(lambda: index.hardlink_to(ledger.path), 4)
    assert index.samefile(ledger.path)
    index.unlink()
    replaced(lambda: os.mkfifo(index), 5)
    assert index.is_fifo()
    index.unlink()
    ledger.repair()
    if os.geteuid() == 0:  # rows in somebody else's file would not be believed
        os.chown(index, 65534, 65534)
        ledger.reserve("people", event(6))
        assert index.stat().st_uid == 0
    assert Ledger(ledger.path).verify().totals[0].rounds == len(ledger.events("people")) >= 6


def test_the_row_of_a_writer_that_was_killed_is_finished(ledger: Ledger) -> None:
    fill(ledger, 0, 3)
    index = index_of(ledger.path)
    for left in (1, 39, 41):
        index.write_bytes(index.read_bytes()[:-left])
        with index.open("rb") as file:
            fill(ledger, 100 + left, 101 + left)
            assert file.read() == ledger._replica.index._all(0).tobytes()  # the others were not written again
    index.unlink()
    fill(ledger, 200, 201)
    assert index.read_bytes() == ledger._replica.index._all(0).tobytes()


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_of_the_log_changes_what_is_said(long: Ledger, seed: int) -> None:
    """It is refused, at once or by those who read the record, or changes nothing that is asked."""
    whole, generator = long.path.read_bytes(), random.Random(seed)
    index = index_of(long.path).read_bytes()
    total, events = long.total("people"), {entry.number: entry for entry in long.events("people")}
    refused = 0
    for place in generator.sample(range(len(whole)), 100):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        long.path.write_bytes(flipped)
        index_of(long.path).write_bytes(index)
        if generator.random() < 0.5:
            index_of(long.path).unlink()
        try:
            opened = Ledger(long.path)
            assert opened.total("people") == total
            one = generator.choice(list(events.values()))
            assert opened.find("people", run="r", round=one.event.round) == one
        except LedgerError:
            refused += 1
        if place != len(whole) - 1:  # the newline at the end is put back
            with pytest.raises(LedgerError):
                Ledger(long.path).verify()
    assert refused > 10


def test_an_end_that_vanished_is_missed(long: Ledger) -> None:
    cut(long.path)
    with pytest.raises(LedgerChainError, match="end of the ledger is missing"):
        Ledger(long.path)
    with pytest.raises(LedgerChainError, match="end of the ledger is missing"):
        Ledger.repair(unread(long.path))
    with pytest.raises(LedgerChainError, match="are gone"):
        long.reserve("people", event(100))
    whole = long.path.read_bytes()
    long.path.write_bytes(whole[:1_000])  # shorter than its index
    with pytest.raises(LedgerChainError, match="end of the ledger is missing"):
        Ledger(long.path)
    long.path.write_bytes(whole)
    # One that went on apart from the other is no better.
    index = index_of(long.path).read_bytes()
    index_of(long.path).unlink()
    fork = Ledger(long.path)
    fork.reserve("people", event(500))
    index_of(long.path).write_bytes(index)
    with pytest.raises(LedgerChainError, match="another copy is in its place"):
        Ledger(long.path)


def test_damage_before_the_snapshot_changes_no_total_and_is_found_by_verify(long: Ledger) -> None:
    expected = long.total("people")
    edit(long.path, b'"survivors":900', b'"survivors":990', line=2)
    assert Ledger(long.path).total("people") == expected
    for ask in (
        Ledger(long.path).verify,
        lambda: Ledger(long.path).events("people"),
        lambda: Ledger(long.path).find("people", run="r", round=0),
    ):
        with pytest.raises(LedgerChainError, match="record 2"):
            ask()
    with pytest.raises(LedgerChainError):
        Ledger(long.path).repair()


def test_damage_after_the_snapshot_is_found_on_opening(long: Ledger) -> None:
    long.reserve("people", event(300))
    edit(long.path, b"300", b"301", line=-1)
    with pytest.raises(LedgerChainError):
        Ledger(long.path)


def test_totals_cannot_be_lowered_through_the_snapshot_without_writing_the_chain_anew(long: Ledger) -> None:
    """A forged snapshot needs every later hash; then a head from before tells."""
    kept, number = long.head, long._replica.state.snapshot
    forged = replace(long._replica.state, accounts={("people", 0): Account()})
    texts = [record["body"] for record in long.export()["records"]]
    snapshot = {**json.loads(texts[number]), "state": json.loads(forged.to_text())}
    long.path.write_bytes(chained([*texts[:number], canonical(snapshot)]))
    with pytest.raises(LedgerChainError):
        Ledger(long.path)  # by the index beside it
    index_of(long.path).unlink()
    fooled = Ledger(long.path)
    assert fooled.total("people").rounds == 0
    with pytest.raises(LedgerFormatError, match="snapshot of something else"):
        fooled.verify()
    with pytest.raises(LedgerError):
        fooled.verify(kept)
    with pytest.raises(LedgerChainError, match="are gone"):
        long.total("people")  # who had it open


def test_snapshots_of_another_release_are_not_used(
    long: Ledger, reads: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = everything(long)
    monkeypatch.setattr("cpsgd.ledger.state.STATE_VERSION", 99)
    monkeypatch.setattr(replicas, "STATE_VERSION", 99)
    reads.clear()
    fresh = Ledger(long.path)
    assert len(reads) > 50
    assert everything(fresh) == expected
    assert fresh.verify().totals == (expected[0],)


# ------------------------------------------------------------------ what charges cost


def count_prices(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    real = charging._composed.__wrapped__

    def composed(*arguments: object) -> object:
        found.append(arguments)
        return real(*arguments)

    monkeypatch.setattr(charging, "_composed", composed)
    return found


def test_many_rounds_are_priced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    budget = Budget(population="people", epsilon=1.0, delta=1e-6)
    account = Account()
    monkeypatch.setattr(charging, "_PLENTY", 32)
    prices = count_prices(monkeypatch)
    for charges in range(400):
        price = charging.affordable(budget, [account], event(0))
        assert price is not None
        if charges < 31:
            assert price.rounds == 0
        if charges % 100 == 99:
            exact = guarantee_over_rounds(PROTOCOL, 1e-6, surviving={950: charges, 900: 1}).epsilon
            assert exact * (1 - 1e-9) <= price.epsilon <= 1.04 * exact
        account.reserve(event(0), price if price.rounds else None)
        account.release(event(0), 950)
    assert len(prices) < 31 + 110
    assert charging.spent(budget, [account]).epsilon <= budget.epsilon


def test_the_last_rounds_of_a_budget_are_all_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a few more rounds than there are costs nobody a round."""
    monkeypatch.setattr(charging, "_PLENTY", 4)
    protocol = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=1.0)
    one = RoundEvent(protocol, survivors=1_000)
    limit = guarantee_over_rounds(protocol, 1e-6, rounds=203).epsilon
    budget = Budget(population="people", epsilon=limit, delta=1e-6)
    account = Account()
    while (price := charging.affordable(budget, [account], one)) is not None:
        account.reserve(one, price)
    assert account.rounds == 203
    assert charging.spent(budget, [account]).epsilon <= limit


def test_another_process_need_not_prove_again_what_a_record_covers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(charging, "_PLENTY", 1)
    path = tmp_path / "budgets.ledger"
    ledger = Ledger(path)
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    for number in range(EVERY):
        ledger.reserve("people", event(number))
    prices = count_prices(monkeypatch)
    other = Ledger(path)
    entry = other.reserve("people", event(50))
    assert not prices
    assert entry.spent >= other.total("people").epsilon
    # Of another kind, it does.
    prices.clear()
    other.reserve("people", event(51, protocol=OTHER))
    assert prices
    poor = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=0.1)
    with pytest.raises(BudgetExceededError):
        other.reserve("people", event(52, protocol=poor))
    assert other.verify().overspent == ()


def test_what_a_row_says_is_pinned() -> None:
    """An index that another release wrote is read: a round would not be found by another hash."""
    assert _hash_of("people", "run") == 0x335A2FE0BA0E11F9
    assert _hash_of("people", "") != _hash_of("peopl", "e")
    assert all(_hash_of("people", str(number)) >= 256 for number in range(100))  # larger than other kinds
    rows = np.arange(10, dtype=np.uint64).reshape(2, 5)
    assert [int(check) for check in _checks(rows, 7)] == [0xB8790BB57E445269, 0x3657A32EDE7E1046]


def test_whose_index_is_believed(ledger: Ledger) -> None:
    """One of this ledger, by somebody who may write to it; nor is more than a part of it read that fits."""
    ledger.reserve("people", event(0))

    def sound() -> bool:
        return Ledger(ledger.path)._replica.index._sound

    other = Ledger(ledger.path.with_name("other.ledger"))
    other.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    index = index_of(ledger.path)
    whole = index.read_bytes()
    assert sound()
    for damaged in (index_of(other.path).read_bytes(), broken_row(whole, 1, 2)):
        index.write_bytes(damaged)
        assert not sound()
        with pytest.raises(LedgerFormatError, match="cpsgd budget repair"):
            Ledger(ledger.path).verify()
    index.unlink()
    assert not sound()
    assert Ledger(ledger.path).verify().records == 3  # one that is missing is no damage
    copy = index.with_name("copy")
    copy.write_bytes(whole)
    index.symlink_to(copy)
    assert not sound()
    index.unlink()
    index.write_bytes(whole)
    assert sound()
    with index.open("r+b") as file:
        file.truncate((1 << 26) + 40)
    assert not sound()
    index.write_bytes(whole)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        for stranger in (1, 65534):
            os.chown(index, stranger, stranger)
            assert not sound()
        os.chown(index, 0, 0)
        os.chown(ledger.path, 65534, 65534)
        assert sound()


def test_rows_are_added_to_the_file_and_not_written_again(ledger: Ledger) -> None:
    """By whoever appends, with the rows of those who could not."""
    index = index_of(ledger.path)
    entry = ledger.reserve("people", event(0))
    same = index.stat().st_ino
    for number, writer in enumerate((ledger, Ledger(ledger.path), ledger, Ledger(ledger.path)), start=1):
        index.write_bytes(index.read_bytes()[:-17])  # one writer was killed
        writer.reserve("people", event(number))
        assert index.stat().st_ino == same
        assert index.stat().st_size == 40 * Ledger(ledger.path).verify().records
    index.unlink()
    ledger.release(entry, 900)
    assert index.stat().st_size == 40 * Ledger(ledger.path).verify().records
    again = index.stat().st_ino
    ledger.reserve("people", event(9))
    assert (index.stat().st_ino, index.stat().st_size) == (again, 40 * Ledger(ledger.path).verify().records)


def test_a_longer_index_of_a_fork_is_replaced(ledger: Ledger) -> None:
    """Left there, it would say that the end of this ledger is gone."""
    ledger.reserve("people", event(0))
    fork = ledger.path.with_name("fork.ledger")
    for path in (ledger.path, index_of(ledger.path)):
        shutil.copy(path, path.with_name(path.name.replace(ledger.path.name, fork.name)))
    longer = Ledger(fork)
    for number in (1, 2, 3):
        longer.reserve("people", event(number))
    shutil.copy(index_of(fork), index_of(ledger.path))
    ledger.reserve("people", event(4))
    assert Ledger(ledger.path).rounds("people", "r") == {0, 4}


def test_which_records_reserve(ledger: Ledger) -> None:
    first = ledger.reserve("people", event(0))
    ledger.release(first, 900)
    ledger.reserve("people", RoundEvent(PROTOCOL, survivors=900))  # of no run
    again = Ledger(ledger.path)
    again.abandon(again.reserve("people", event(5)), "nothing was asked")
    again.reserve("people", RoundEvent(PROTOCOL, survivors=900))
    expected = [False, False, True, False, True, True, False, True, False]  # the last is beyond the end
    for each in (ledger, again, Ledger(ledger.path)):
        assert each.head.number == 7
        assert [each._replica.index.is_reservation(number) for number in range(9)] == expected


@pytest.mark.skipif(os.name == "nt", reason="modes as POSIX has them")
def test_an_index_may_be_read_and_written_by_those_who_may_the_ledger(ledger: Ledger) -> None:
    os.umask(umask := os.umask(0))
    for mode in (0o600, 0o640, 0o666, 0o777):
        ledger.path.chmod(mode)
        index_of(ledger.path).unlink(missing_ok=True)
        ledger.reserve("people", event(mode))
        assert index_of(ledger.path).stat().st_mode & 0o777 == mode & 0o666 & ~umask


def test_a_record_that_is_too_long_is_not_written(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for snapshots, which may be."""
    before = ledger.path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(replicas, "LONGEST_RECORD", 200)
        with pytest.raises(LedgerError, match="too long"):
            ledger.reserve("people", event(0, run="r" * 150))
    assert ledger.path.read_bytes() == before
    for number in range(2 * EVERY):
        ledger.reserve("people", event(number))
    longest = max(map(len, ledger.path.read_text().splitlines()))
    snapshots = [line for line in ledger.path.read_text().splitlines() if '"kind":"snapshot"' in line]
    assert max(map(len, snapshots)) == longest
    monkeypatch.setattr(replicas, "LONGEST_RECORD", longest - 100)
    for number in range(2 * EVERY, 4 * EVERY):
        ledger.reserve("people", event(number))


def test_states_that_contradict_themselves_are_refused(ledger: Ledger) -> None:
    """Somebody who can write the chain anew could put one into a snapshot."""
    ledger.create(Budget(population="some", epsilon=1.0, delta=1e-6, group_of="people"))
    ledger.reserve("people", event(0))
    ledger.reserve("some", event(1))
    state = ledger._replica.state
    good = json.loads(state.to_text())
    assert State.from_text(canonical(good), state.head).to_text() == state.to_text()

    def changed(name: str, change: Callable[[Any], object]) -> dict[str, object]:
        copy = json.loads(state.to_text())
        change(copy[name])
        return copy

    for wrong in (
        changed("budgets", lambda budgets: budgets[1][0].update(group_of="nobody")),
        changed("budgets", lambda budgets: budgets[1][0].update(adjacency="zero-out")),
        changed("budgets", lambda budgets: budgets[1].__setitem__(1, "")),
        changed("budgets", lambda budgets: budgets.pop()),
        changed("accounts", lambda accounts: accounts.pop()),
        changed("accounts", lambda accounts: accounts[0].__setitem__(1, 1)),
        changed("accounts", lambda accounts: accounts[0].__setitem__(1, -1)),
        changed("budgets", lambda budgets: [each[0].update(accounting="adaptive") for each in budgets]),
        changed("budgets", lambda budgets: [each[0].update(unit="example") for each in budgets]),
        {**good, "time": ""},
        {**good, "version": 9},
    ):
        with pytest.raises(ParameterError):
            State.from_text(canonical(wrong), state.head)


def test_a_record_of_a_group_of_nobody_is_refused(ledger: Ledger) -> None:
    state = ledger._replica.state
    for whole, good in (("people", True), ("nobody", False), ("group", False)):
        budget = Budget(population="group", epsilon=1.0, delta=1e-6)
        record = {"kind": "budget", "budget": {**budget.to_dict(), "group_of": whole}, "time": "t"}
        text = canonical({**record, "number": state.head.number + 1})
        other = State.from_text(state.to_text(), state.head)
        if good:
            assert other.apply(text, "ab", mock.Mock())["number"] == 2
        else:
            with pytest.raises(LedgerFormatError, match="Record 2"):
                other.apply(text, "ab", mock.Mock())
            assert other.to_text() == state.to_text()


def test_a_state_with_sampled_rounds_is_read(ledger: Ledger) -> None:
    ledger.create(Budget(population="drawn", epsilon=1.0, delta=1e-6, adjacency="zero-out"))  # type: ignore[arg-type]
    ledger.reserve("drawn", event(0, participation="poisson:0.1"))
    state = ledger._replica.state
    assert State.from_text(state.to_text(), state.head).to_text() == state.to_text()
    wrong = state.to_text().replace('"adjacency":"zero-out"', '"adjacency":"replace-one"')
    with pytest.raises(ParameterError, match="replace-one"):
        State.from_text(wrong, state.head)
    with pytest.raises(ParameterError, match="counted sampled rounds in another way"):
        State.from_text(canonical({**json.loads(state.to_text()), "version": 2}), state.head)
