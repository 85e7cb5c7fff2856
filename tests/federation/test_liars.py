"""As many liars as the plan allows for: they cost the others a round each at most, are named, and are out."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, plan
from cpsgd.errors import ShareError, SignatureError
from cpsgd.federation.course import Course
from cpsgd.federation.messages import Request
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import keys, shamir
from cpsgd.secagg.keys import BOX_BYTES, ChannelKey, Route

from .local import DIM, RUN, Client, exchange, honest
from .silos import Silos

ROUNDS = 6


@cache
def made(clients: int, colluding: int) -> Plan:
    """A plan that tolerates as many dropouts as liars."""
    return plan(
        clients, DIM, 50.0, 1e-5, rounds=ROUNDS, secure=True, dropout=colluding / clients, colluding=colluding, bits=16
    )


class Liar(Client):
    """A client whose copy of some function is another one."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, lie: Callable[..., Any]) -> None:
        super().__init__()
        self._patch, self._lie = patch, (owner, name, lie)

    def ask(self, request: Request | bytes) -> bytes:
        with self._patch.context() as patch:
            patch.setattr(*self._lie)
            return super().ask(request)


def run(clients: dict[str, Client], agreed: Plan, rounds: int = ROUNDS) -> Course[str]:
    course: Course[str] = Course(Terms(plan=agreed), np.zeros(DIM, np.float32), run=RUN)
    while course.round <= rounds:
        session = course.begin(list(clients))
        exchange(session, clients, honest)
        course.finish(session)
    return course


SEAL: Callable[..., bytes] = keys.seal
SPLIT = shamir.split


def garbles(*parts: Any) -> bytes:
    """Boxes for the same victims, which nobody can open."""
    return os.urandom(len(SEAL(*parts))) if parts[3] < 4 else SEAL(*parts)


def seals_no_shares(*parts: Any) -> bytes:
    return SEAL(*parts[:-1], b"\xff" * len(parts[-1])) if parts[3] < 4 else SEAL(*parts)


def does_not_sign(self: ChannelKey, box: Route, shares: bytes) -> bytes:
    return bytes(BOX_BYTES)


def deals_nonsense(secret: bytes, threshold: int, holders: Iterable[int]) -> dict[int, bytes]:
    """Shares that are well formed and give no secret."""
    return {holder: SPLIT(os.urandom(32), threshold, list(holders))[holder] for holder in holders}


def accuses_with_a_wrong_proof(self: ChannelKey, box: Route, data: bytes) -> bytes:
    raise ShareError(
        f"What client {box.sender} sealed for client {box.receiver} cannot be opened.", proof=os.urandom(96)
    )


def accuses_with_the_right_secret(self: ChannelKey, box: Route, data: bytes) -> bytes:
    raise ShareError(
        f"What client {box.sender} sealed for client {box.receiver} are no shares.", proof=self._prove(box)
    )


LIES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "garbled boxes": (keys, "seal", garbles),
    "boxes without shares": (keys, "seal", seals_no_shares),
    "boxes that are not signed": (ChannelKey, "seal", does_not_sign),
    "shares that give no secret": (shamir, "split", deals_nonsense),
    "complaints with a wrong proof": (ChannelKey, "open", accuses_with_a_wrong_proof),
    "complaints about good boxes": (ChannelKey, "open", accuses_with_the_right_secret),
}


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize(("clients", "colluding"), [(4, 1), (10, 2), pytest.param(12, 2, marks=pytest.mark.thorough)])
def test_liars_cost_a_round_each_at_most_and_are_out(
    monkeypatch: pytest.MonkeyPatch, clients: int, colluding: int, lie: str
) -> None:
    agreed = made(clients, colluding)
    members: dict[str, Client] = {f"silo {i}": Client() for i in range(clients)}
    liars = {f"silo {clients - 1 - i}" for i in range(colluding)}
    members |= {name: Liar(monkeypatch, *LIES[lie]) for name in liars}
    course = run(members, agreed)
    released = [report.released for report in course.reports]
    assert released[colluding:] == [True] * (ROUNDS - colluding)
    assert course.conduct.excluded == liars
    assert {name for report in course.reports for name in report.faults} == liars
    honest_ones = [client for name, client in members.items() if name not in liars]
    assert all(client.trained >= sum(released) for client in honest_ones)


def test_an_honest_round_blames_nobody() -> None:
    course = run({f"silo {i}": Client() for i in range(4)}, made(4, 1), rounds=2)
    assert [report.released for report in course.reports] == [True, True]
    assert not any(report.faults or report.accused or report.proved for report in course.reports)


# ---------------------------------------------------------------------- memories from a backup


def signed_round(silos: Silos, agreed: Plan, run: str, **more: Any) -> Course[str]:
    course: Course[str] = Course(Terms(plan=agreed, roster=silos.roster, **more), np.zeros(DIM, np.float32), run=run)
    clients = {f"silo {i}": silos.client(i, run=run) for i in range(4)}
    session = course.begin(list(clients))
    exchange(session, clients, honest)
    course.finish(session)
    return course


def test_a_memory_restored_from_a_backup_is_noticed_by_the_others(small_plan: Plan, tmp_path: Path) -> None:
    silos, memory = Silos(tmp_path), tmp_path / "memory-3"
    assert signed_round(silos, small_plan, "1").reports[0].released
    shutil.copy(memory, tmp_path / "backup")
    assert signed_round(silos, small_plan, "2").reports[0].released
    shutil.copy(tmp_path / "backup", memory)
    report = signed_round(silos, small_plan, "3").reports[0]
    assert not report.released
    assert list(report.faults) == ["silo 3"]
    assert "a memory that was set back" in report.faults["silo 3"]
    assert list(signed_round(silos, small_plan, "4").reports[0].faults) == ["silo 3"]


def test_a_server_notices_within_a_run(small_plan: Plan, tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    terms = Terms(plan=small_plan, roster=silos.roster)
    course: Course[str] = Course(terms, np.zeros(DIM, np.float32), run=RUN)
    course._counters[silos.public[3]] = 7
    clients = {f"silo {i}": silos.client(i) for i in range(4)}
    session = course.begin(list(clients))
    exchange(session, clients, honest)
    course.finish(session)
    report = course.reports[0]
    assert report.released
    assert report.survivors == 3
    assert SignatureError.__name__ in report.faults["silo 3"]


def all_memories(folder: Path) -> dict[Path, bytes]:
    """Every silo's memory as a backup has it."""
    return {folder / f"memory-{i}": (folder / f"memory-{i}").read_bytes() for i in range(4)}


def restore(backup: dict[Path, bytes]) -> None:
    for path, content in backup.items():
        path.write_bytes(content)


@pytest.mark.parametrize("ledger", [False, True], ids=["silos alone", "a server with a ledger"])
def test_memories_restored_together_are_as_good_as_the_servers_own_record(
    small_plan: Plan, tmp_path: Path, ledger: bool
) -> None:
    """Nobody among the silos is left who remembers. A ledger that was not set back refuses what is spent."""
    silos = Silos(tmp_path)
    with Ledger(tmp_path / "ledger") as book:
        # Two rounds cost less, and three cost more.
        book.create(Budget(population="people", epsilon=6.0, delta=1e-5))
        charged = {"ledger": book, "population": "people"} if ledger else {}
        assert signed_round(silos, small_plan, "1", **charged).reports[0].released
        backup = all_memories(tmp_path)
        assert signed_round(silos, small_plan, "2", **charged).reports[0].released
        restore(backup)
        assert signed_round(silos, small_plan, "3", **charged).reports[0].released is not ledger


def test_a_server_notices_within_a_run_that_all_memories_were_restored(small_plan: Plan, tmp_path: Path) -> None:
    silos = Silos(tmp_path)
    course: Course[str] = Course(Terms(plan=small_plan, roster=silos.roster), np.zeros(DIM, np.float32), run=RUN)
    backup: dict[Path, bytes] = {}
    clients = {f"silo {i}": silos.client(i) for i in range(4)}
    for number in range(1, 5):
        session = course.begin(list(clients))
        exchange(session, clients, honest)
        course.finish(session)
        if number == 1:
            backup = all_memories(tmp_path)
        if number == 2:
            restore(backup)  # round 3 was prepared before
    assert [report.released for report in course.reports] == [True, True, True, False]
    assert all("set back" in course.reports[3].faults[f"silo {i}"] for i in range(4))
