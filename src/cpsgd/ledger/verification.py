"""Reading a whole ledger again: every hash, every snapshot, the index, and heads that were kept elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from sqlite3 import Connection

from cpsgd.errors import LedgerChainError, LedgerFormatError
from cpsgd.ledger import charging, snapshots, sqlite_store
from cpsgd.ledger.chain import Head, Remembered
from cpsgd.ledger.charging import Total
from cpsgd.ledger.replica import not_contained, went_back
from cpsgd.ledger.state import State
from cpsgd.ledger.witness import Witness


@dataclass(frozen=True)
class Verification:
    """The result of `Ledger.verify` for a chain that is whole.

    Attributes:
        head: The last record. Keep it elsewhere, and a later `verify` can tell that nothing before it was changed.
        records: Number of records.
        totals: What is spent, by population, computed anew.
    """

    head: Head
    records: int
    totals: tuple[Total, ...]

    @property
    def overspent(self) -> tuple[str, ...]:
        """Populations whose rounds cost more than their budget; none, unless a release of cpsgd miscounted."""
        return tuple(total.population for total in self.totals if total.epsilon > total.limit)


class Verifier:
    """Reads all records of a ledger's file, and computes all totals anew."""

    def __init__(
        self, path: Path, head: str | Head | None, witness: Witness | None, signers: Iterable[bytes] | None
    ) -> None:
        """Takes the heads that the chain must contain, as `Ledger.verify` does.

        Raises:
            WitnessError: A line of the witness is not signed by one of the signers, where these are given.
        """
        self._path = path
        self._witness = witness
        self._wanted = None if head is None else str(head).strip().lower().rpartition(":")[2]
        self._contained = False
        lines = [] if witness is None else witness.lines()
        for line in lines if signers is not None else []:
            line.check(signers or ())
        self._unseen = {line.head for line in lines}
        self._entries = Remembered(forgets=True)
        self._state = State(entries=self._entries)

    def read(self, connection: Connection, last: Head) -> None:
        """Reads all records; among them must be the `last` one that was read before.

        Raises:
            LedgerChainError: A record was changed, removed or inserted.
            LedgerFormatError: What is kept beside the records does not follow from them.
        """
        sqlite_store.check_pages(connection)
        state, found = self._state, Head()
        for row in sqlite_store.rows_between(connection, 0):
            state.apply(*row)
            self._contained |= row[2] == self._wanted
            self._unseen.discard(state.head)
            if state.head.number == last.number:
                found = state.head
        if found != last:
            raise went_back(self._path)
        if sqlite_store.has_cache(connection) and not snapshots.fits(connection, state, self._entries):
            raise LedgerFormatError(
                f"Every record of {self._path} is as it was written, but what is kept beside them, its index or "
                "snapshot, is damaged. Make that anew with `cpsgd budget repair`."
            )

    def result(self) -> Verification:
        """Returns the result, with all totals computed anew.

        Raises:
            LedgerChainError: The chain does not contain the head.
            WitnessError: It does not contain a head that the witness has seen.
        """
        if self._wanted is not None and not self._contained:
            raise LedgerChainError(
                f"The chain of {self._path} is whole, but does not contain the head {self._wanted[:16]}…: its end was "
                "cut off, it was replaced by another copy, or it was written anew."
            )
        if self._witness is not None and self._unseen:
            raise not_contained(self._path, min(self._unseen, key=lambda each: each.number), self._witness)
        state = self._state
        spent = tuple(charging.spent(*purse) for purse in state.purses_over_time())
        return Verification(state.head, state.head.number + 1, spent)
