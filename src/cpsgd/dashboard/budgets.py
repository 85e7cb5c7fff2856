"""A verified ledger for display, with each population's spending after every round."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cpsgd.dashboard.charts import Chart, linear, spending_chart
from cpsgd.errors import LedgerBusyError
from cpsgd.ledger import Entry, Ledger, Total

# Entries of a population that are listed, the latest ones; the chart has all.
_LISTED = 50
# Seconds to wait for another process that writes to it.
_TIMEOUT = 5.0


@dataclass(frozen=True)
class Population:
    """A budget with its total, ε after each round, and the latest rounds."""

    total: Total
    spending: tuple[float, ...]
    latest: tuple[Entry, ...]

    @property
    def chart(self) -> Chart | None:
        """ε after each round, with the limit."""
        if not self.spending:
            return None
        points = [(float(index), spent) for index, spent in enumerate(self.spending, 1)]
        rounds = linear("round on record", 0.0, float(len(points)), "{:,.0f}".format, whole=True)
        title = f"ε spent by {self.total.population} after each round, with the limit"
        return spending_chart(title, points, self.total.limit, rounds, "round {:,.0f} on record")


@dataclass(frozen=True)
class Book:
    """A ledger whose chain holds."""

    records: int
    head: str
    overspent: tuple[str, ...]
    populations: tuple[Population, ...]


def read(path: str) -> Iterator[Book]:
    """Reads and verifies a ledger; a worker job that yields once.

    Raises:
        LedgerError: The verification failed, or the file cannot be read.
    """
    _wait(Path(path))
    ledger = Ledger(Path(path), timeout=_TIMEOUT)
    verified = ledger.verify()
    yield Book(
        records=verified.records,
        head=str(verified.head),
        overspent=verified.overspent,
        populations=tuple(
            Population(total, tuple(entry.spent for entry in entries), tuple(reversed(entries[-_LISTED:])))
            for total in verified.totals
            for entries in [ledger.events(total.population)]
        ),
    )


def _wait(path: Path) -> None:
    """Waits until no process is writing the ledger.

    To read a database that has a journal is to repair it, by whatever the journal says: whoever wrote it may be
    hostile, and nothing is written here.
    """
    journals = [path.with_name(path.name + suffix) for suffix in ("-journal", "-wal", "-shm")]
    deadline = time.monotonic() + _TIMEOUT
    while any(journal.exists() or journal.is_symlink() for journal in journals):
        if time.monotonic() > deadline:
            raise LedgerBusyError(
                f"{path.name} is being written to, or was when a process died. Look again later; `cpsgd budget verify` "
                "repairs it."
            )
        time.sleep(0.02)
