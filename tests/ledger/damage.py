"""Ways to damage a ledger's file, and keys that sign."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd.ledger import Ledger

KEY, OTHER_KEY = (Ed25519PrivateKey.from_private_bytes(bytes([byte]) * 32) for byte in (1, 2))
PUBLIC, OTHER_PUBLIC = (key.public_key().public_bytes_raw() for key in (KEY, OTHER_KEY))


def execute(path: Path, *statements: str) -> None:
    """Runs statements on the file."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        for statement in statements:
            connection.execute(statement)


def tamper(path: Path, *statements: str) -> None:
    """The same without the triggers. Removing them is tampering, too, so they are put back."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        triggers = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'trigger'").fetchall()
    execute(path, *(f"DROP TRIGGER {name}" for name, _ in triggers), *statements, *(sql for _, sql in triggers))


def unread(path: Path) -> Ledger:
    """A ledger whose file became what it is after it was opened."""
    ledger = Ledger(path.with_suffix(".none"))
    ledger.path = ledger._replica.path = ledger._replica.store.path = path
    return ledger
