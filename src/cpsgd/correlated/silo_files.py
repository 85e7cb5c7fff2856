"""The rows w that a silo takes away in later rounds, in a file beside its memory: written before a message leaves.

Privacy does not rest on this file being there: a silo without it begins anew, which costs accuracy alone
(docs/proofs/shaped-rounding.md). What privacy needs is that a silo uses its rows once in a round, and keeps them to
itself: they depend on its data. The memory sees to the first, as it does for seeds (`cpsgd.correlated.seeds`). So

* a file that is older than the memory, restored by somebody or by a disk that lost the last change, is noticed: its
  last round is not the last one that was answered. Nothing of it is used.
* A file that is *newer* than the memory shows that the memory was set back. Then a round might be answered twice, and
  every round is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager
from glob import escape
from logging import getLogger
from pathlib import Path
from typing import Protocol

import numpy as np

from cpsgd._durable import seal, unseal, write_file
from cpsgd.correlated.batons import Place
from cpsgd.correlated.draws import Points
from cpsgd.correlated.shaped import SiloState
from cpsgd.errors import DamagedFileError, RoundRefusedError

MOST_FEDERATIONS = 4
"""Number of federations whose rows are kept; the file that was written longest ago goes first."""

_KIND, _FORMAT = "rows", "cpsgd silo 1"
_log = getLogger("cpsgd")


class AnsweredRounds(Protocol):
    """The records of a locked memory about rounds that were answered."""

    def answered(self, run: str) -> list[int]:
        """Returns the rounds of a run that were answered."""


class SiloFile:
    """The rows of one silo in all its federations, a file for each."""

    def __init__(self, path: Path, lock: Callable[[], AbstractContextManager[AnsweredRounds]]) -> None:
        """Stores the path that files are named after, and the memory's lock; opens no file yet."""
        self._path, self._lock = path, lock

    def state(self, place: Place, number: int, last: bool) -> SiloState:
        """Returns the silo's state for a round that its memory has just counted.

        Args:
            place: The federation, and the engine's number of the round.
            number: The protocol's number of the round.
            last: Whether no later round follows: the file is then removed.

        Raises:
            RoundRefusedError: The memory was set back, or the file cannot be read or written.
        """
        path = self._path.with_name(f"{self._path.name}-{place.federation.hex()[:32]}")
        try:
            with self._lock() as memory:
                earlier = [each for each in memory.answered(place.run) if each < place.round]
                rows = _rows(path, place, max(earlier, default=None), number)
        except OSError:
            raise RoundRefusedError("This client cannot read the file of what it takes away.") from None

        def keep(state: SiloState) -> None:
            try:
                with self._lock():
                    if last:
                        path.unlink(missing_ok=True)
                        return
                    write_file(path, seal(_KIND, _plain(place, state.rows)), mode=0o600)
                    self._tidy()
            except OSError:
                raise RoundRefusedError("This client cannot write the file of what it takes away.") from None

        return SiloState(rows, keep)

    def _tidy(self) -> None:
        """Removes the files of federations that were used longest ago."""
        ours = f"{escape(self._path.name)}-{'[0-9a-f]' * 32}"
        files = sorted(self._path.parent.glob(ours), key=lambda each: each.stat().st_mtime)
        for old in files[:-MOST_FEDERATIONS]:
            old.unlink()


def _rows(path: Path, place: Place, answered: int | None, number: int) -> dict[int, Points]:
    """Returns the rows in a file, by round of the protocol; none if the file is missing or older than the memory."""
    try:
        head, _, body = unseal(_KIND, path.read_bytes()).partition(b"\n")
        said = json.loads(head)
        used, rounds, dim = int(said["used"]), [int(each) for each in said["rounds"]], int(said["dim"])
        rows = np.frombuffer(body, dtype="<i8").reshape(len(rounds), dim)
        if said["format"] != _FORMAT or said["federation"] != place.federation.hex():
            raise ValueError("format")
    except FileNotFoundError:
        return {}
    except (DamagedFileError, ValueError, TypeError, KeyError):
        _log.warning("The file of what this silo takes away is damaged: it begins anew.")
        return {}
    if answered is None or used > answered:
        raise RoundRefusedError(
            "This client's memory was set back: the file of what it takes away knows of a later round. Its operator "
            "restores the newest memory, or removes both."
        )
    if used < answered:
        _log.warning("The file of what this silo takes away is older than its memory: it begins anew.")
        return {}
    return {each: row.astype(np.int64) for each, row in zip(rounds, rows, strict=True) if each < number}


def _plain(place: Place, rows: dict[int, Points]) -> bytes:
    """Serializes rows: a line of JSON, then the numbers."""
    dim = len(next(iter(rows.values())))
    said = {"format": _FORMAT, "federation": place.federation.hex(), "used": place.round}
    head = json.dumps({**said, "rounds": list(rows), "dim": dim})
    return head.encode() + b"\n" + np.stack(list(rows.values())).astype("<i8").tobytes()
