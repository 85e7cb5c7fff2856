"""The store in a real PostgreSQL, which is killed and comes back."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

from cpsgd.engines.pair.answers import combine
from cpsgd.engines.pair.leader import Leader
from cpsgd.engines.pair.parties import Collector, Sender
from cpsgd.engines.pair.store import Decided, ReportStore, Verdict
from cpsgd.errors import StoreError

from .conftest import Postgres
from .local import DIM, Pair
from .processes import servers

pytestmark = pytest.mark.slow
TASK = bytes(16)


def decided(index: int) -> Decided:
    return Decided(bytes([index]) * 16, bytes([index]) * 32, bytes(32), Verdict.ACCEPTED)


def test_a_store_keeps_what_it_recorded_through_a_crash_of_the_database(postgres: Postgres) -> None:
    url = postgres.url("crash")
    store = ReportStore(url, task=TASK, role="leader", dim=3)
    sums = np.array([1, 2, 3], dtype=np.uint32)
    store.keep(0, [(bytes([1]) * 16, b"one"), (bytes([2]) * 16, b"two")])
    store.settle(0, [decided(1)], sums)
    assert np.array_equal(store.sums(0), sums)
    postgres.kill()
    with pytest.raises(StoreError):
        store.settle(0, [decided(2)], 2 * sums)
    with pytest.raises(StoreError):
        store.sums(0)
    postgres.start()
    # It connects anew, and reads its sums again.
    assert np.array_equal(store.sums(0), sums)
    assert store.kept() == [b"two"]
    with pytest.raises(StoreError, match="Unique"):
        store.settle(0, [decided(1)], 2 * sums)
    store.settle(0, [decided(2)], 2 * sums)
    assert (store.round(0).accepted, store.kept()) == (2, [])
    assert store.senders(0, {bytes([2]) * 32, bytes([9]) * 32}) == {bytes([2]) * 32}
    store.close_round(0)
    assert (store.current(), store.reveal(0, b"answer"), store.reveal(0, b"other")) == (1, b"answer", b"answer")
    store.close()


def test_a_store_is_one_process_one_task_and_one_servers(postgres: Postgres, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.engines.pair.store._PATIENCE", 1.0)
    url = postgres.url("own")
    store = ReportStore(url, task=TASK, role="leader", dim=3)
    with pytest.raises(StoreError, match="Another process"):
        ReportStore(url, task=TASK, role="leader", dim=3)
    with pytest.raises(StoreError, match="own"):
        ReportStore(url, task=TASK, role="helper", dim=3)
    store.close()
    ReportStore(url, task=TASK, role="leader", dim=3).close()
    with pytest.raises(StoreError, match="failed"):
        ReportStore("postgresql://tester@127.0.0.1:1/none", task=TASK, role="leader", dim=3)


def test_a_round_with_both_stores_in_postgresql(postgres: Postgres, tmp_path: Path) -> None:
    pair = Pair(tmp_path, "roster")
    books = pair.leader.books
    store = ReportStore(postgres.url("round"), task=pair.task.id, role="leader", dim=DIM)
    books.store.close()
    books.store = store
    pair.leader = Leader(books)
    assert pair.send(*(pair.upload(i) for i in range(8))) == [1] * 8
    assert pair.send(pair.upload(0)) == [int(Verdict.SENT_BEFORE)]
    for each in (pair.leader.books, pair.helper.books):
        each.close(0)
    sums, count = combine(pair.task, 0, pair.leader.books.reveal(0), pair.helper.books.reveal(0))
    assert (count, sums.tolist()) == (8, [8] * DIM)
    store.close()


def test_servers_go_on_where_they_were_when_the_database_comes_back(postgres: Postgres, tmp_path: Path) -> None:
    stores = {role: postgres.url(f"process_{role}") for role in ("leader", "helper")}
    with servers(tmp_path, stores=stores) as running:
        verdicts: list[str] = []

        def send() -> None:
            with Sender(running.task) as sender:
                verdicts.append(sender.send(np.full(DIM, 0.1), 0))

        for kill in (False, True, True):
            clients = [threading.Thread(target=send) for _ in range(3)]
            for client in clients:
                client.start()
            if kill:
                time.sleep(0.02)
                postgres.kill()
                time.sleep(0.3)
                postgres.start()
            for client in clients:
                client.join(timeout=60)
        assert verdicts == ["accepted"] * 9
        with Collector(running.task, running.secrets["collector"]) as collector:
            assert collector.collect(0)[1] == 9
