"""Long ledgers: what is read on opening, what a charge costs, and caches that are damaged, cut or left behind."""

from __future__ import annotations

import os
import random
import shutil
import signal
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from cpsgd._plain import canonical
from cpsgd.errors import BudgetExceededError, LedgerChainError, LedgerError, LedgerFormatError
from cpsgd.ledger import Budget, Ledger, RoundEvent, charging, snapshots, sqlite_store
from cpsgd.ledger.chain import Head, link
from cpsgd.ledger.kinds import Account
from cpsgd.ledger.state import STATE_VERSION, State, digest_of
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.protocol import Protocol

from .damage import tamper, unread

PROTOCOL = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=100.0)
OTHER = Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=200.0)
EVERY = 8


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "SNAPSHOT_EVERY", EVERY)


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
        patch.setattr(snapshots, "SNAPSHOT_EVERY", EVERY)
        ledger = Ledger(path)
        ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
        fill(ledger, 0, 30)
    return path


@pytest.fixture
def long(filled: Path, tmp_path: Path) -> Ledger:
    """Thirty rounds, and a snapshot every few records."""
    return Ledger(shutil.copy(filled, tmp_path))


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Numbers of the records that are read."""
    found: list[object] = []
    real = State.apply

    def apply(self: State, number: object, *rest: object, **options: object) -> None:
        found.append(number)
        real(self, number, *rest, **options)  # type: ignore[arg-type]

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
    with long._replica.store.reading() as connection:
        whole, entries = snapshots.read(connection, whole=True)
    assert entries is not None
    assert from_snapshot.to_text() == whole.to_text()
    assert from_snapshot.head == whole.head
    budget = whole.budgets["people"]
    expected = charging.total(budget, entries.all("people"))
    assert charging.spent(budget, [from_snapshot.accounts["people", 0]]) == expected
    assert tuple(entries.all("people")) == Ledger(long.path).events("people")
    assert Ledger(long.path).events("people", last=3) == tuple(entries.all("people", 3))


def test_the_text_of_a_snapshot_survives_reading_it(long: Ledger) -> None:
    text = long._replica.state.to_text()
    again = State.from_text(text, Head(5, "0" * 64))
    assert again.to_text() == text
    assert (again.head.number, again.snapshot) == (5, 5)


# ------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE snapshot SET body = replace(body, '\"rounds\":', '\"rounds\": ')",
        "UPDATE snapshot SET body = substr(body, 1, 100)",
        "UPDATE snapshot SET body = CAST(x'ff7b7d' AS TEXT)",
        "DELETE FROM snapshot",
        "DELETE FROM head",
        "UPDATE head SET snapshot = 5",
        "UPDATE head SET snapshot = 10000",
        "UPDATE head SET snapshot = 'x'",
        "DELETE FROM entries WHERE number = 2",
        "UPDATE entries SET closed = NULL",
        "UPDATE entries SET round = round + 1",
    ],
)
def test_a_damaged_cache_is_not_believed(long: Ledger, statement: str, reads: list[object]) -> None:
    expected = everything(long)
    kept = str(long.head)
    tamper(long.path, statement)
    reads.clear()
    fresh = Ledger(long.path)
    if "entries" not in statement:
        # Nothing is begun from it: all records are read, and the next one that is written makes it anew.
        assert len(reads) >= long.head.number
        assert everything(fresh) == expected
        fresh.reserve("people", event(200))
        reads.clear()
        assert Ledger(long.path).verify(kept).totals[0].rounds == 31
        reads.clear()
        Ledger(long.path)
        assert len(reads) <= EVERY + 2
        return
    # Totals do not rest on the index, and `verify` finds what is wrong with it.
    assert fresh.total("people") == expected[0]
    with pytest.raises(LedgerFormatError, match="cpsgd budget repair"):
        fresh.verify()
    head = fresh.repair()
    assert head.number == int(kept.split(":")[0]) + 1
    assert Ledger(long.path).verify(kept).records == head.number + 1
    assert everything(Ledger(long.path))[:3] == expected[:3]


def test_rows_of_the_index_are_checked_against_the_records(long: Ledger) -> None:
    tamper(long.path, "UPDATE entries SET round = 77 WHERE number = 2")
    assert Ledger(long.path).find("people", run="r", round=77) is None  # as it was
    for ask in (
        lambda: Ledger(long.path).find("people", run="r", round=0),
        lambda: Ledger(long.path).rounds("people", "r"),
        lambda: Ledger(long.path).release(2, 950),
    ):
        with pytest.raises(LedgerFormatError, match="repair"):
            ask()
    tamper(long.path, "UPDATE entries SET round = 0, closed = 5 WHERE number = 2")
    with pytest.raises(LedgerError):
        Ledger(long.path).events("people")


def pages_beside_the_records(path: Path) -> list[range]:
    """The bytes of the index, its sums and the head."""
    with closing(sqlite3.connect(path)) as connection:
        (size,) = connection.execute("PRAGMA page_size").fetchone()
        rows = connection.execute("SELECT tbl_name, rootpage FROM sqlite_master WHERE rootpage > 0").fetchall()
    return [range((page - 1) * size, page * size) for table, page in rows if table not in ("records", "snapshot")]


@pytest.mark.parametrize("seed", range(2))
def test_no_flipped_bit_makes_a_released_round_one_that_never_was(long: Ledger, seed: int) -> None:
    """The same round would be accepted again, at no cost where its partition has been paid for."""
    whole, generator = long.path.read_bytes(), random.Random(seed)
    known = {entry.event.round: entry for entry in long.events("people") if not entry.abandoned}
    places = [place for page in pages_beside_the_records(long.path) for place in page if whole[place]]
    damage = 0
    for place in generator.sample(places, 120):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << generator.randrange(8)
        long.path.write_bytes(flipped)
        try:
            opened = Ledger(long.path)
            for round in generator.sample(list(known), 8):
                assert opened.find("people", run="r", round=round) == known[round]
        except LedgerError:
            damage += 1
        one = generator.choice(list(known))
        with pytest.raises(LedgerError):
            Ledger(long.path).reserve("people", event(one))
        try:
            assert Ledger(long.path).rounds("people", "r") == frozenset(known)
        except LedgerError:
            continue
    assert damage > 0
    long.path.write_bytes(whole)
    assert Ledger(long.path).verify().records == long.head.number + 1


def test_an_end_that_vanished_is_missed(long: Ledger) -> None:
    last = long.head.number
    tamper(long.path, f"DELETE FROM records WHERE number = {last}")
    with pytest.raises(LedgerChainError, match="end of the ledger is missing"):
        Ledger(long.path)
    with pytest.raises(LedgerChainError):
        Ledger.repair(unread(long.path))


def test_damage_before_the_snapshot_changes_no_total_and_is_found_by_verify(long: Ledger) -> None:
    expected = long.total("people")
    tamper(
        long.path, """UPDATE records SET body = replace(body, '"survivors":900', '"survivors":990') WHERE number = 2"""
    )
    assert Ledger(long.path).total("people") == expected
    for ask in (Ledger(long.path).verify, lambda: Ledger(long.path).events("people")):
        with pytest.raises(LedgerChainError, match="record 2"):
            ask()
    with pytest.raises(LedgerChainError):
        Ledger(long.path).repair()


def test_damage_after_the_snapshot_is_found_on_opening(long: Ledger) -> None:
    long.reserve("people", event(300))
    tamper(long.path, f"UPDATE records SET body = replace(body, '300', '301') WHERE number = {long.head.number}")
    with pytest.raises(LedgerChainError):
        Ledger(long.path)


def test_totals_cannot_be_lowered_through_the_snapshot_without_writing_the_chain_anew(long: Ledger) -> None:
    """A forged text needs a forged record, and every later hash; then a head from before tells."""
    kept, number = long.head, long._replica.state.snapshot
    state = long._replica.state
    forged = replace(state, accounts={("people", 0): Account()})
    text = forged.to_text()
    tamper(long.path, "DELETE FROM snapshot", f"INSERT INTO snapshot VALUES (0, '{text}')")
    assert Ledger(long.path).total("people").rounds == 30  # not believed
    # With the record, and all after it, written anew:
    with closing(sqlite3.connect(long.path)) as connection:
        (previous,) = connection.execute("SELECT hash FROM records WHERE number = ?", (number - 1,)).fetchone()
    record = canonical(
        {
            "kind": "snapshot",
            "version": STATE_VERSION,
            "digest": digest_of(text),
            "number": number,
            "time": "2026-01-01",
        }
    )
    tamper(
        long.path,
        f"DELETE FROM records WHERE number >= {number}",
        f"INSERT INTO records VALUES ({number}, '{record}', '{link(previous, record)}')",
        f"UPDATE head SET number = {number}, hash = '{link(previous, record)}', snapshot = {number}",
    )
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
    monkeypatch.setattr("cpsgd.ledger.state.STATE_VERSION", 3)
    monkeypatch.setattr(snapshots, "STATE_VERSION", 3)
    reads.clear()
    fresh = Ledger(long.path)
    assert len(reads) > 50
    assert everything(fresh) == expected
    assert fresh.verify().totals == (expected[0],)


# ------------------------------------------------------------------ files of the first schema


def as_first_schema(path: Path) -> None:
    """The file as the release before would have it: without snapshots, and nothing beside the records."""
    ledger = Ledger(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(snapshots, "SNAPSHOT_EVERY", 1 << 30)
        ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
        fill(ledger, 0, 12)
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for table in ("entries", "buckets", "snapshot", "head"):
            connection.execute(f"DROP TABLE {table}")
        connection.execute("PRAGMA user_version = 1")


def test_files_of_the_first_schema_are_read_and_go_on(tmp_path: Path) -> None:
    path = tmp_path / "old.ledger"
    as_first_schema(path)
    before = path.read_bytes()
    ledger = Ledger(path)
    kept = ledger.head
    assert ledger.total("people").rounds == len(ledger.events("people")) == 12
    assert ledger.find("people", run="r", round=3) == ledger.events("people")[3]
    assert ledger.rounds("people", "r") == frozenset(range(12))
    assert ledger.verify(kept).records == kept.number + 1
    assert path.read_bytes() == before  # reading changes nothing
    expected = ledger.events("people")
    ledger.reserve("people", event(50))
    with closing(sqlite3.connect(path)) as connection:
        assert connection.execute("PRAGMA user_version").fetchone() == (3,)
    again = Ledger(path)
    assert again.events("people")[:-1] == expected
    assert again.verify(kept).totals == (ledger.total("people"),)
    assert again._replica._memory is None


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


# ------------------------------------------------------------------ killed at every statement


def killed_at(path: Path, statement: int, work: Callable[[Ledger], object]) -> bool:
    """Runs `work` in a process that kills itself before a statement of its transactions; whether it came to that."""
    ledger = Ledger(path)
    child = os.fork()
    if child == 0:
        seen = 0
        connect = sqlite_store.Store._connect

        def traced(self: sqlite_store.Store, mode: str) -> sqlite3.Connection:
            connection = connect(self, mode)

            def count(sql: str) -> None:
                nonlocal seen
                if sql.startswith(("INSERT", "DELETE", "DROP", "COMMIT", "CREATE", "PRAGMA user_version =")):
                    seen += 1
                    if seen == statement:
                        os.kill(os.getpid(), signal.SIGKILL)

            connection.set_trace_callback(count)
            return connection

        sqlite_store.Store._connect = traced  # type: ignore[method-assign]
        try:
            work(ledger)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


@pytest.mark.parametrize("old", [False, True], ids=["with a snapshot", "a file of the first schema"])
def test_killed_at_every_statement_of_a_charge(filled: Path, tmp_path: Path, old: bool) -> None:
    start = tmp_path / "start.ledger"
    if old:
        as_first_schema(start)
    else:
        shutil.copy(filled, start)
        ledger = Ledger(start)
        while ledger.head.number - ledger._replica.state.snapshot < EVERY:
            ledger.reserve("people", event(1_000 + ledger.head.number))
    before = everything(Ledger(start))
    path = tmp_path / "budgets.ledger"

    def work(ledger: Ledger) -> None:
        ledger.release(ledger.reserve("people", event(2_000)), 950)

    statement, seen = 1, set()
    while True:
        shutil.copy(start, path)
        killed = killed_at(path, statement, work)
        ledger = Ledger(path)
        ledger.verify(str(before[3]))
        entries = ledger.events("people")
        rounds = len(before[1])  # type: ignore[arg-type]
        assert entries[:rounds] == before[1]
        assert len(entries) - rounds <= 1
        seen.add((len(entries) - rounds, bool(entries[-1].released and len(entries) > rounds)))
        # And it goes on.
        ledger.reserve("people", event(3_000))
        assert Ledger(path).verify().totals[0].rounds == len(entries) + 1
        if not killed:
            assert entries[-1].released
            break
        statement += 1
    assert statement > 6
    assert seen == {(0, False), (1, False), (1, True)}
