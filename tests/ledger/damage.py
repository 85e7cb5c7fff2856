"""Ways to damage a ledger's file, and keys that sign."""

from __future__ import annotations

import io
from collections.abc import Iterable
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd._record_log import End, OpenLog, record_line
from cpsgd.ledger import Ledger
from cpsgd.ledger.chain import DOMAIN
from cpsgd.ledger.entries import Entry
from cpsgd.ledger.index import Index
from cpsgd.ledger.lookup import Lookup, written
from cpsgd.ledger.state import State

KEY, OTHER_KEY = (Ed25519PrivateKey.from_private_bytes(bytes([byte]) * 32) for byte in (1, 2))
PUBLIC, OTHER_PUBLIC = (key.public_key().public_bytes_raw() for key in (KEY, OTHER_KEY))


def chained(texts: Iterable[str]) -> bytes:
    """A log of these records as a writer would make it, whatever they say."""
    end, lines = End(), []
    for text in texts:
        line, end = record_line(DOMAIN, text, end)
        lines.append(line)
    return b"".join(lines)


def replayed(log: bytes) -> tuple[State, dict[str, tuple[Entry, ...]]]:
    """State and entries by population that follow from all records of a log."""
    opened = OpenLog(io.BytesIO(log), DOMAIN)
    state, index = State(), Index(Path("nowhere"))
    entries = Lookup(opened, index)
    for text, end in written(opened):
        index.add(state.apply(text, end.hash, entries), end)
    return state, {population: tuple(entries.all(population)) for population in state.budgets}


def edit(path: Path, old: bytes, new: bytes, line: int) -> None:
    """Replaces bytes in one record."""
    lines = path.read_bytes().splitlines(keepends=True)
    changed = lines[line].replace(old, new, 1)
    assert changed != lines[line]
    lines[line] = changed
    path.write_bytes(b"".join(lines))


def cut(path: Path, records: int = 1) -> None:
    """Removes the last records."""
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-records]))


def index_of(path: Path) -> Path:
    """The index beside a ledger."""
    return path.with_name(path.name + ".index")


def unread(path: Path) -> Ledger:
    """A ledger whose file became what it is after it was opened."""
    ledger = Ledger(path.with_suffix(".none"))
    ledger.path = ledger._replica.path = path
    ledger._replica.forget()
    return ledger
