"""What a client remembers over runs and restarts: a file on its own machine with a line for each stage it answered.

Flower keeps a client's state for one run (or series of runs) only, and who starts the next run is the server. A limit
over all runs therefore needs a place that is the client's own.

Nor is Flower's state a place for what may happen once only. It is stored after an answer has left, and a SuperLink that
fails one of its SuperNode's calls at the right time makes it run several ClientApps at once, all from the same state.
What is written here was written before the answer, under a lock.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BufferedRandom
from pathlib import Path
from typing import get_args

from flwr.app import Context

from cpsgd.engines.flower._records import Stage
from cpsgd.errors import CpsgdError, RoundRefusedError, StageError

KEY = "cpsgd-memory"
"""Where a SuperNode's `--node-config` names the file: the node's operator says so, not the server."""


@dataclass(frozen=True)
class Answered:
    """A round that was answered.

    Attributes:
        run: Flower's number of the run.
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
    def of(cls, context: Context) -> Memory | None:
        """The memory that the SuperNode was started with, or None."""
        path = context.node_config.get(KEY)
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
        line = f"{run} {round} {stage}"
        with self._opened() as file:
            if line in _read(file)[1]:
                raise StageError(f"This client has answered stage {stage!r} of round {round} of this run already.")
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
        if last in get_args(Stage):
            stages.add(line)
        else:
            rounds.append(Answered(run, int(round), bytes.fromhex(last).hex()))
    return rounds, stages
