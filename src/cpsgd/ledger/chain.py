r"""The chain: records in canonical JSON, each with the SHA-256 of itself and all before it.

    hash_n = SHA-256("cpsgd ledger 1\n" + hash_{n-1} + text_n),   hash_{-1} = 32 zero bytes

The log (`cpsgd._record_log`) has a line `text_n #hash_n` for each. `text_n` is JSON with sorted names, no spaces, ASCII
only and no NaN, and holds its own number. So any change, removal, insertion or exchange of records breaks the chain at
that point, unless every later hash is computed anew. Against that, and against cutting off the end, keep a head (number
and hash of the last record) where the writer of the file cannot reach it: a chain that ends differently or is too short
does not contain it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from cpsgd import _plain, _validate
from cpsgd.errors import CpsgdError, DamagedFileError, LedgerError, LedgerFormatError, ParameterError
from cpsgd.ledger.entries import Entry, RoundEvent, name
from cpsgd.ledger.kinds import LAST_OCTAVE
from cpsgd.protocol import MAX_CLIENTS

VERSION = 1
"""Format of records, as the first of them says."""
DOMAIN = b"cpsgd ledger 1\n"
"""Begins what is hashed."""


@dataclass(frozen=True)
class Head:
    """The last record: its number, from 0, and its hash. With a copy kept elsewhere, a missing end is noticed."""

    number: int = -1
    hash: str = bytes(32).hex()

    def __str__(self) -> str:
        return f"{self.number}:{self.hash}"


# ------------------------------------------------------------------ records


def read_record(number: int, text: str) -> dict[str, Any]:
    """Returns the body of the record of this number; raises `LedgerFormatError` if no ledger wrote it."""
    with refusing(number):
        body = json.loads(text)
        if not isinstance(body, dict) or _plain.canonical(body) != text:
            raise ParameterError("it is not in canonical form")
        _validate.integer("number", body.get("number"), low=number, high=number)
    return body


@contextmanager
def refusing(number: int) -> Iterator[None]:
    """Turns whatever a record that is not valid raises into a `LedgerFormatError` with its number."""
    try:
        yield
    except (LedgerError, DamagedFileError):
        raise  # says which record it is about
    except (CpsgdError, ValueError, RecursionError, OverflowError, TypeError, LookupError) as error:
        raise LedgerFormatError(f"Record {number} of the ledger is not valid: {str(error)[:500]}") from None


def read_reservation(body: dict[str, Any]) -> Entry:
    """Returns the entry that the record of a reservation makes."""
    # A proof that covers no further rounds has no `covers`, and a planned round no octave.
    optional = [field for field in ("covers", "octave") if field in body]
    check_fields(body, "population", "event", "spent", "method", "time", *optional)
    population = body["population"]
    if body["kind"] != "reserve" or not isinstance(population, str):
        raise ParameterError("it is no reservation of a population")
    event = RoundEvent.from_dict(body["event"])
    spent = _validate.non_negative("spent", body["spent"])
    method = name("method", body["method"], empty=False)
    octave = _validate.integer("octave", body["octave"], low=0, high=LAST_OCTAVE) if "octave" in body else None
    return Entry(body["number"], population, event, body["time"], spent, method, octave=octave)


def read_release(body: dict[str, Any]) -> tuple[int, int]:
    """Returns the number of the entry that a record releases, and the messages in its sum."""
    check_fields(body, "entry", "survivors", "time")
    if body["kind"] != "release":
        raise ParameterError("it is no release")
    survivors = _validate.integer("survivors", body["survivors"], low=1, high=MAX_CLIENTS)
    return _validate.integer("entry", body["entry"], low=0), survivors


def read_abandon(body: dict[str, Any]) -> int:
    """Returns the number of the entry that a record gives up."""
    check_fields(body, "entry", "reason", "time")
    name("reason", body["reason"], empty=False)
    return _validate.integer("entry", body["entry"], low=0)


def closed(entry: Entry, body: dict[str, Any]) -> Entry:
    """Returns an entry as changed by the record that releases it or gives it up."""
    number, time = body["number"], body["time"]
    if body["kind"] == "abandon":
        about, after = read_abandon(body), replace(entry, abandoned_as=number)
    else:
        about, survivors = read_release(body)
        after = replace(entry, released_at=time, released_survivors=survivors, released_as=number)
    if about != entry.number:
        raise ParameterError("it is about another entry")
    return after


def check_fields(body: dict[str, Any], *expected: str) -> None:
    """Raises `ParameterError` unless a record has these fields beside its kind and number, and a time."""
    if set(body) != {"kind", "number", *expected}:
        raise ParameterError(f"expected the fields {sorted(expected)}")
    name("time", body["time"], empty=False)
