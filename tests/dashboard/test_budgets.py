"""A ledger as the dashboard shows it."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpsgd.dashboard import budgets
from cpsgd.errors import LedgerBusyError, LedgerError
from cpsgd.ledger import Ledger
from tests.dashboard.samples import write_ledger


def test_a_ledger_is_verified_and_summed_up(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "study.ledger", rounds=3)
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}
    (book,) = budgets.read(str(path))
    ledger = Ledger(path)
    assert (book.head, book.overspent) == (str(ledger.head), ())
    (population,) = book.populations
    assert population.total == ledger.total("patients")
    assert population.spending == tuple(entry.spent for entry in ledger.events("patients"))
    assert [each.event.round for each in population.latest] == [2, 1, 0]
    assert all(each.released and each.event.run == "spring" for each in population.latest)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


@pytest.mark.parametrize("suffix", ["-journal", "-wal"])
def test_a_journal_is_never_played_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str) -> None:
    path = write_ledger(tmp_path / "study.ledger")
    journal = tmp_path / f"study.ledger{suffix}"
    journal.write_bytes(bytes.fromhex("d9d505f920a163d7") + bytes(504))
    before = path.read_bytes(), journal.read_bytes()
    monkeypatch.setattr(budgets, "_TIMEOUT", 0.05)
    with pytest.raises(LedgerBusyError, match="Look again later"):
        list(budgets.read(str(path)))
    assert (path.read_bytes(), journal.read_bytes()) == before


def test_a_ledger_that_was_tampered_with_is_refused(tmp_path: Path) -> None:
    path = write_ledger(tmp_path / "study.ledger")
    data = path.read_bytes()
    assert b"patients" in data
    path.write_bytes(data.replace(b"patients", b"parrents"))
    with pytest.raises(LedgerError):
        list(budgets.read(str(path)))
