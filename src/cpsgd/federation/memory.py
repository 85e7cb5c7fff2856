"""What a client remembers over runs and restarts: a file on its own machine with a line for each stage it answered.

An engine keeps a client's state for one run only, and who starts the next run is the server. A limit over all runs
therefore needs a place that is the client's own.

Nor is an engine's state a place for what may happen once only. Flower, for one, stores it after an answer has left, and
a SuperLink that fails one of its SuperNode's calls at the right time makes it run several ClientApps at once, all from
the same state. What is written here was written before the answer, under a lock.

A line has three words: the run, the round, and the digest of what was agreed to (in hexadecimal) for a round in which
something about the data left, or the name of another stage that was answered. Release 0.1.0 wrote the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path

from cpsgd.errors import CpsgdError, RoundRefusedError, StageError
from cpsgd.federation.messages import STAGES
from cpsgd.secagg import Stage

KEY = "cpsgd-memory"
"""The setting of a client that names the file: its operator says so, not the server."""


@dataclass(frozen=True)
class Answered:
    """A round that was answered.

    Attributes:
        run: The engine's name of the run.
        round: Number of the round.
        digest: Of the protocol and limits that it was accepted with, in hexadecimal.
    """

    run: str
    round: int
    digest: str


class Memory:
    """The file. Lines are only ever added; a file that cannot be read or written refuses every round."""

    def __init__(self, path: Path) -> None:
        """Opens nothing yet."""
        self._path = path

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Memory | None:
        """The memory that a client's operator has set, or None."""
        path = settings.get(KEY)
        if path is None:
            return None
        if not isinstance(path, str) or not path:
            raise RoundRefusedError(f"This client's {KEY} is not the name of a file.")
        return cls(Path(path))

    def rounds(self) -> list[Answered]:
        """The rounds answered so far."""
        with self._opened() as file:
            return _read(file)[0]

    def add(self, answered: Answered, permit: Callable[[list[Answered]], None]) -> int:
        """Writes a round down, if `permit` lets it with those before; returns how many there are then."""
        with self._opened() as file:
            before, _ = _read(file)
            permit(before)
            _write(file, f"{answered.run} {answered.round} {answered.digest}")
            return len(before) + 1

    def once(self, run: str, round: int, stage: Stage) -> None:
        """Writes down that a stage of a round will be answered, one that takes nothing from the data.

        Raises:
            StageError: It was before.
        """
        line = f"{run} {round} {stage.value}"
        with self._opened() as file:
            if line in _read(file)[1]:
                raise StageError(
                    f"This client has answered stage {stage.value!r} of round {round} of this run already."
                )
            _write(file, line)

    @contextmanager
    def _opened(self) -> Iterator[BufferedRandom]:
        """The file, locked against other processes of this client."""
        import fcntl

        try:
            with self._path.open("a+b") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                yield file
        except CpsgdError:
            raise
        except (OSError, ValueError) as error:
            # The server is told this text, so it names no path and quotes nothing.
            raise RoundRefusedError(f"This client cannot read or write its memory ({type(error).__name__}).") from None


def _write(file: BufferedRandom, line: str) -> None:
    file.write(f"{line}\n".encode())
    file.flush()
    os.fsync(file.fileno())


def _read(file: BufferedRandom) -> tuple[list[Answered], set[str]]:
    """The rounds that were answered, and the lines about other stages as they are."""
    file.seek(0)
    text = file.read().decode("ascii")
    if text and not text.endswith("\n"):
        raise ValueError("The last line is incomplete.")
    rounds: list[Answered] = []
    stages: set[str] = set()
    for line in text.split("\n")[:-1]:
        run, round, last = line.split(" ")
        if last in STAGES:
            stages.add(line)
        else:
            rounds.append(Answered(run, int(round), bytes.fromhex(last).hex()))
    return rounds, stages
