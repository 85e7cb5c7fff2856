"""Messages that the servers add themselves: drawn once per round, and enough with any number of colluding clients."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from cpsgd import Plan, plan
from cpsgd.engines.pair.answers import combine, ledger_charge
from cpsgd.engines.pair.books import own_messages
from cpsgd.engines.pair.task import create_task
from cpsgd.errors import ParameterError, StoreError, ThresholdError
from cpsgd.ledger import Budget, Ledger
from cpsgd.privacy.guarantees import guarantee
from cpsgd.promise import Conditions
from cpsgd.run import Run

from .local import CLIENTS, DIM, Pair

OWN = 30


@lru_cache(maxsize=1)
def planned() -> Plan:
    return plan(
        clients=CLIENTS,
        dim=DIM,
        epsilon=8.0,
        delta=1e-5,
        bits=8,
        mechanism="coins",
        dropout=0.33,
        rounds=2,
        pair=True,
        server_messages=OWN,
    )


def noisy_pair(folder: Path) -> Pair:
    """Two servers that add messages of their own."""
    return Pair(folder, planned=planned().protocol, server_messages=OWN)


def test_one_client_and_one_honest_server_keep_the_guarantee() -> None:
    """The promise's ε is that of `OWN` + 1 messages, however many clients there are and collude."""
    found = planned()
    alone = guarantee(Run(found.protocol, Conditions.of(OWN + 1, rounds=2)), 1e-5)
    assert alone.epsilon == pytest.approx(found.guarantee.epsilon, rel=1e-12)
    assert alone.epsilon <= 8.0
    assert found.run.conditions.honest == OWN + 1


def test_the_mean_is_unbiased_and_its_error_as_planned(tmp_path: Path) -> None:
    """All clients of the fewest reports send the same vector; both servers add theirs."""
    found, pair, vector = planned(), noisy_pair(tmp_path), np.full(DIM, 0.9 * DIM**-0.5, np.float32)
    task, reports, turns = pair.task, pair.task.surviving, 500
    means = []
    for _ in range(turns):
        sums = own_messages(task, 0).astype(np.uint64) + own_messages(task, 0)
        for _ in range(reports):
            sums += task.protocol.encode_integers(vector, 0)
        means.append(task.decode((sums % np.uint64(task.protocol.modulus or 1)).astype(np.uint32), reports, 0))
    errors = np.asarray(means) - vector
    # 20,000 squares of nearly Gaussian errors: 5 standard errors of their mean are 5 √(2 / 20,000) = 5 %.
    expected = found.error.noise + found.error.rounding
    assert np.mean(np.sum(errors**2, axis=1)) == pytest.approx(expected, rel=0.1)
    # Means of 40 coordinates, each beyond 5.8 standard errors once in 150 million times: a false alarm in 3e-7 of runs.
    deviation = (expected / DIM / turns) ** 0.5
    assert np.abs(errors.mean(axis=0)).max() < 5.8 * deviation + (found.error.clipping / DIM) ** 0.5


def test_a_round_counts_reports_not_messages(tmp_path: Path) -> None:
    pair = noisy_pair(tmp_path)
    task = pair.task
    assert (task.clients, task.surviving) == (CLIENTS, 8)
    assert pair.send(*(pair.upload(i) for i in range(7))) == [1] * 7
    for books in (pair.leader.books, pair.helper.books):
        books.close(0)
        with pytest.raises(ThresholdError, match="8 are needed"):
            books.reveal(0)
    assert pair.send(*(pair.upload(i, round=1) for i in range(12))) == [1] * 12
    assert pair.send(pair.upload(0, round=1)) == [6]
    for books in (pair.leader.books, pair.helper.books):
        books.close(1)
    sums, count = combine(task, 1, *(books.reveal(1) for books in (pair.leader.books, pair.helper.books)))
    assert count == 12
    mean = task.decode(sums, count, 1)
    values = np.ones(DIM, dtype=np.uint32) * 12
    assert not np.array_equal(sums, values)
    assert mean.shape == (DIM,)


@pytest.mark.parametrize("role", ["leader", "helper"])
def test_noise_is_drawn_once_whatever_fails(tmp_path: Path, role: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two answers with fresh noise would show their difference, and many of them the sum without any."""
    pair = noisy_pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(9)))
    books = getattr(pair, role).books
    books.close(0)

    def full(*_: object) -> bytes:
        raise StoreError("disk full")

    with monkeypatch.context() as patched:
        patched.setattr(type(books.store), "reveal", full)
        with pytest.raises(StoreError):
            books.reveal(0)  # nothing left the server
    first = books.reveal(0)
    assert [books.reveal(0) for _ in range(3)] == [first] * 3
    pair.start()
    assert getattr(pair, role).books.reveal(0) == first
    # Of two that draw at once the store keeps one, and both show that.
    assert getattr(pair, role).books.store.reveal(0, b"another") == first


def test_both_servers_draw_their_own(tmp_path: Path) -> None:
    task = noisy_pair(tmp_path).task
    draws = [own_messages(task, 0) for _ in range(4)]
    assert len({draw.tobytes() for draw in draws}) == 4
    mechanism = task.protocol.mechanism
    assert all(int(draw.max()) <= OWN * (mechanism.values - 1) for draw in draws)
    assert not own_messages(replace(task, server_messages=0), 0).any()


def test_a_task_that_adds_other_than_planned_is_refused() -> None:
    for own in (1, OWN - 1, OWN + 4, 10_000):
        with pytest.raises(ParameterError, match="not planned"):
            create_task(planned().protocol, leader="http://a", helper="http://b", rounds=2, server_messages=own)


def test_plans_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ParameterError, match="pair=True"):
        plan(CLIENTS, DIM, 8.0, 1e-5, secure=True, server_messages=3)
    with pytest.raises(ParameterError, match="leave colluding out"):
        plan(CLIENTS, DIM, 8.0, 1e-5, pair=True, colluding=1, server_messages=3)


def test_a_ledger_pays_for_the_honest_server_alone(tmp_path: Path) -> None:
    """More reports than the fewest make a round no cheaper: all their senders may collude."""
    task = noisy_pair(tmp_path).task
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="phones", epsilon=20.0, delta=1e-4))
    charge = ledger_charge(task, ledger, "phones", "leader")
    charge(0, CLIENTS, bytes(32))
    entry = ledger.find("phones", run=f"pair-leader-{task.id.hex()}", round=0)
    assert entry is not None
    assert entry.released
    assert entry.event.survivors - entry.event.colluding == OWN + 1
