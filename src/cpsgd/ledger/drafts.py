"""`Draft`: what one transaction adds to a ledger."""

from __future__ import annotations

import json
from collections.abc import Mapping
from sqlite3 import Connection
from typing import Any

from cpsgd.errors import LedgerError
from cpsgd.ledger import chain, snapshots, storage
from cpsgd.ledger.chain import Head, Remembered, State
from cpsgd.ledger.events import Entry
from cpsgd.ledger.storage import Index


class Draft:
    """Records to be written, and the entries they are about.

    Attributes:
        entries: Those of the ledger.
        time: When it is written.
        records: What to write, without number and time.
        looked_up: Entries that the records are about.
        changed: Entries that were made or changed, once it is written.
    """

    def __init__(self, entries: Index | Remembered, time: str) -> None:
        """Nothing yet."""
        self.entries = entries
        self.time = time
        self.records: list[Mapping[str, Any]] = []
        self.looked_up = Remembered()
        self.changed: list[Entry] = []

    def known(self, number: int) -> Entry | None:
        """An entry that one of the records is about."""
        entry = self.entries.get(number)
        if entry is not None:
            self.looked_up.put(entry)
        return entry

    def write(self, connection: Connection, state: State, memory: Remembered | None) -> list[tuple[int, str, str]]:
        """Writes all in the open transaction, after the state's head; returns the rows.

        Where there is a `memory`, the file has no index that fits, and gets one.
        """
        rows: list[tuple[int, str, str]] = []
        head, snapshot = state.head, state.snapshot

        def append(record: Mapping[str, Any]) -> None:
            nonlocal head
            number = head.number + 1
            text = chain.canonical({**record, "number": number, "time": self.time})
            if len(text) > chain.LONGEST_RECORD:
                raise LedgerError("The record is too long for a ledger.")
            head = Head(number, chain.link(head.hash, text))
            rows.append((number, text, head.hash))
            storage.append(connection, *rows[-1])

        if memory is not None:
            storage.clear_cache(connection)
            for entry in memory.all():
                storage.index_entry(connection, entry)
        # With the index the snapshot went, if there was one.
        lost = memory is not None and (snapshot >= 0 or not self.records)
        if lost or head.number - snapshot >= snapshots.SNAPSHOT_EVERY:
            text = state.to_text()
            append({"kind": "snapshot", "version": chain.STATE_VERSION, "digest": chain.digest_of(text)})
            storage.write_snapshot(connection, text)
            snapshot = head.number
        for record in self.records:
            append(record)
            self._note(json.loads(rows[-1][1]))
        for entry in self.changed:
            storage.index_entry(connection, entry)
        storage.write_head(connection, head.number, head.hash, snapshot)
        return rows

    def _note(self, body: dict[str, Any]) -> None:
        if body["kind"] == "reserve":
            self.changed.append(chain.read_reservation(body))
        elif body["kind"] in ("release", "abandon"):
            entry = self.looked_up.get(body["entry"])
            assert entry is not None
            self.changed.append(chain.closed(entry, body))
