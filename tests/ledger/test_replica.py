"""A ledger keeps up with its file, and reads all of it again: threads, processes, heads from before."""

from __future__ import annotations

import os
import threading

import pytest

from cpsgd.errors import LedgerChainError, LedgerFormatError
from cpsgd.ledger import Ledger, RoundEvent
from cpsgd.ledger import replica as replicas
from cpsgd.protocol import Protocol

from .damage import chained, index_of

EVENT = RoundEvent(Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=1), survivors=900)
CHEAP = RoundEvent(Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=100.0), survivors=900)


def test_an_object_notices_that_the_file_went_back_in_time(ledger: Ledger) -> None:
    old = ledger.path.read_bytes()
    kept = ledger.head
    ledger.reserve("people", EVENT)
    ledger.path.write_bytes(old)
    with pytest.raises(LedgerChainError, match="are gone"):
        ledger.reserve("people", EVENT)
    with pytest.raises(LedgerChainError, match="are gone"):
        ledger.total("people")
    with pytest.raises(LedgerChainError, match="are gone"):
        ledger.verify()
    # Who opens it afresh knows by the index beside it.
    with pytest.raises(LedgerChainError, match=r"end of the ledger is missing.*remove .*budgets\.ledger\.index"):
        Ledger(ledger.path)
    # In another place only a head from before can tell.
    index_of(ledger.path).unlink()
    assert Ledger(ledger.path).verify(kept).records == 2


def test_threads_may_share_a_ledger(ledger: Ledger) -> None:
    rich = Protocol.binomial(clients=1_000, dim=10, clip_norm=1.0, levels=2, trials=10_000)
    errors: list[Exception] = []

    def work(name: str) -> None:
        try:
            for number in range(5):
                event = RoundEvent(rich, survivors=1_000, run=name, round=number)
                ledger.release(ledger.reserve("people", event), 1_000)
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(str(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    total = ledger.total("people")
    assert (total.rounds, total.unreleased) == (20, 0)
    assert ledger.verify().records == 42


def test_a_ledger_works_in_a_forked_process(ledger: Ledger) -> None:
    entry = ledger.reserve("people", EVENT)
    child = os.fork()
    if child == 0:
        try:
            ledger.release(entry, 900)
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    assert ledger.events("people")[0].released


def test_verify_and_heads(ledger: Ledger) -> None:
    first = ledger.head
    entry = ledger.reserve("people", EVENT)
    ledger.release(entry, 900)
    found = ledger.verify()
    assert (found.records, found.head, found.overspent) == (4, ledger.head, ())
    assert found.totals == (ledger.total("people"),)
    for head in (first, str(first), first.hash, f" {first.hash.upper()}\n", ledger.head):
        assert ledger.verify(head).records == 4
    with pytest.raises(LedgerChainError, match="does not contain the head"):
        ledger.verify("0" * 64)


@pytest.mark.parametrize("more", [0, 2])
def test_when_a_snapshot_is_due(ledger: Ledger, monkeypatch: pytest.MonkeyPatch, more: int) -> None:
    """After so many records, and so many times its own text; for whoever opens the file in between as well."""
    monkeypatch.setattr(replicas, "SNAPSHOT_EVERY", 4)
    monkeypatch.setattr(replicas, "_MORE_THAN_SNAPSHOT", more)
    for number in range(20):
        if number in (7, 8, 15):
            ledger = Ledger(ledger.path)
        ledger.reserve("people", CHEAP)
    lines = ledger.path.read_bytes().splitlines(keepends=True)
    last, place, length, size = -1, 0, 0, 0
    for number, line in enumerate(lines):
        due = number - 1 - last >= 4 and size - place >= more * length
        assert (b'"kind":"snapshot"' in line) == due, number
        size += len(line)
        if due:
            last, place, length = number, size, len(line)
    assert last > 10


def test_a_snapshot_that_does_not_count_the_records_before_it_is_refused(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replicas, "SNAPSHOT_EVERY", 4)
    for _ in range(4):
        ledger.reserve("people", CHEAP)
    texts = [record["body"] for record in ledger.export()["records"]]
    assert '"kind":"snapshot"' in texts[4]
    index_of(ledger.path).unlink()
    for wrong in ([*texts[:2], *texts[3:]], [*texts[:2], texts[2], *texts[2:]]):
        ledger.path.write_bytes(chained(wrong))
        with pytest.raises(LedgerChainError, match="not as many as its last snapshot says"):
            Ledger(ledger.path)
    ledger.path.write_bytes(chained([*texts[:3], "{}", *texts[4:]]))
    with pytest.raises(LedgerFormatError, match="Record 3 "):
        Ledger(ledger.path)
