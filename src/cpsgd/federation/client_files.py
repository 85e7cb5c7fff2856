"""What a client's operator sets, and no server: files on the client's machine with its memory, identity and roster.

**Memory.** An engine keeps a client's state for one run only, and who starts the next run is the server. A limit over
all runs therefore needs a place that is the client's own. Nor is an engine's state a place for what may happen once
only. Flower, for one, stores it after an answer has left, and a SuperLink that fails one of its SuperNode's calls at
the right time makes it run several ClientApps at once, all from the same state. What is written to the memory was
written before the answer, under a lock: a line for each stage that was answered. A line has three words: the run, the
round, and the digest of the round's kind (in hexadecimal) for a round in which something about the data left, or the
name of another stage that was answered, after `ahead-` where that was before the round began. Where seeds of correlated
noise were handed on, a line has the run, how often that was so far, and `relay`. What a digest stands for is said once,
before its first round: the word `#kind`, the digest, and the `RoundKind` in base 64. Release 0.1.0 wrote
the same, with digests of whole plans and no kinds.

**Identity and roster.** A roster makes clients independent of what the server says about who they are. Each checks by
itself that the keys it is given are signed by people on the roster, by each of them once, for this run, this round and
the number in it. Which number the server gives to whom is then all the same. What each signs it signs once, for which
it needs its memory.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from io import BufferedRandom
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd._durable import locked, sync_folder
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import CpsgdError, IdentityFileError, RoundRefusedError, StageError
from cpsgd.federation.messages import STAGES
from cpsgd.secagg import Invitation, Stage, read_identity, read_roster
from cpsgd.secagg.identity import public_bytes

# The settings that name the files of a client's memory, of its private key, and of everybody's public keys.
MEMORY_KEY = "cpsgd-memory"
IDENTITY_KEY = "cpsgd-identity"
ROSTER_KEY = "cpsgd-roster"

_KIND = "#kind"  # no run has such a name
_AHEAD = "ahead-"  # before the name of a stage


@dataclass(frozen=True)
class Answered:
    """A round that was answered.

    Attributes:
        run: The engine's name of the run.
        round: Number of the round.
        digest: Of the round's kind, in hexadecimal.
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
        path = settings.get(MEMORY_KEY)
        if path is None:
            return None
        if not isinstance(path, str) or not path:
            raise RoundRefusedError(f"This client's {MEMORY_KEY} is not the name of a file.")
        if not Path(path).is_absolute():
            # In another working directory, which a train function may change to, it would be another, empty memory.
            raise RoundRefusedError(f"This client's {MEMORY_KEY} is not a full path, which begins at the root.")
        return cls(Path(path))

    @property
    def lineages(self) -> SeedFile:
        """The seeds of noise that the client holds, in a file beside this one."""
        return SeedFile(self._path.with_name(self._path.name + ".lineages"), self._journal)

    @contextmanager
    def _journal(self) -> Iterator[_Handing]:
        with self._opened() as file:
            yield _Handing(file)

    def rounds(self) -> list[Answered]:
        """The rounds answered so far."""
        return self.history()[0]

    def history(self) -> tuple[list[Answered], Mapping[str, str]]:
        """The rounds answered so far, and the kinds of rounds by their digests."""
        with self._opened() as file:
            content = _read(file)
            return content.rounds, content.kinds

    def add(self, answered: Answered, permit: Callable[[list[Answered], Mapping[str, str]], None], kind: str) -> int:
        """Writes a round and its kind down, if `permit` lets it with those before; returns how many there are then."""
        with self._opened() as file:
            before = _read(file)
            permit(before.rounds, before.kinds)
            lines = [f"{answered.run} {answered.round} {answered.digest}"]
            if answered.digest not in before.kinds:
                lines.insert(0, f"{_KIND} {answered.digest} {base64.b64encode(kind.encode()).decode()}")
            _write(file, *lines)
            return len(before.rounds) + 1

    def once(self, run: str, round: int, stage: Stage, *, ahead: bool = False) -> None:
        """Writes down that a stage of a round will be answered, one that takes nothing from the data.

        What is answered ahead of a round is written down apart, for the round may begin from the beginning after all.

        Raises:
            StageError: It was before.
        """
        line = f"{run} {round} {_AHEAD if ahead else ''}{stage.value}"
        with self._opened() as file:
            if line in _read(file).stages:
                raise StageError(
                    f"This client has answered stage {stage.value!r} of round {round} of this run already."
                )
            _write(file, line)

    @contextmanager
    def _opened(self) -> Iterator[BufferedRandom]:
        """The file, locked against other processes of this client."""
        try:
            with locked(self._path), self._path.open("a+b") as file:
                if not file.seek(0, os.SEEK_END):
                    sync_folder(self._path.parent)
                yield file
        except CpsgdError:
            raise
        except (OSError, ValueError) as error:
            # The server is told this text, so it names no path and quotes nothing.
            raise RoundRefusedError(f"This client cannot read or write its memory ({type(error).__name__}).") from None


class _Handing:
    """Lines about lineages that were handed on: a `Journal`."""

    def __init__(self, file: BufferedRandom) -> None:
        self._file = file

    def given(self, run: str) -> int:
        return _read(self._file).given.get(run, 0)

    def give(self, run: str, number: int) -> None:
        _write(self._file, f"{run} {number} {Stage.RELAY.value}")


def _write(file: BufferedRandom, *lines: str) -> None:
    file.write("".join(f"{line}\n" for line in lines).encode())
    file.flush()
    os.fsync(file.fileno())


@dataclass
class _Content:
    """What a memory holds.

    Attributes:
        rounds: Those that were answered.
        kinds: Of rounds, by digest.
        stages: The lines about other stages as they are.
        given: How often seeds were handed on, by run.
    """

    rounds: list[Answered] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)
    given: dict[str, int] = field(default_factory=dict)


def _read(file: BufferedRandom) -> _Content:
    file.seek(0)
    text = file.read().decode("ascii")
    if text and not text.endswith("\n"):
        raise ValueError("The last line is incomplete.")
    found = _Content()
    for line in text.split("\n")[:-1]:
        first, second, last = line.split(" ")
        if first == _KIND:
            found.kinds[bytes.fromhex(second).hex()] = base64.b64decode(last, validate=True).decode()
        elif last == Stage.RELAY:
            found.given[first] = max(found.given.get(first, 0), int(second))
        elif last.removeprefix(_AHEAD) in STAGES:
            found.stages.add(line)
        else:
            found.rounds.append(Answered(first, int(second), bytes.fromhex(last).hex()))
    return found


# ---------------------------------------------------------------------- identity and roster


def session_identifier(run: str, round: int, *, ahead: bool = False) -> bytes:
    """The 16 bytes that stand for one signed round of one run, or for one that is prepared ahead.

    Not the server's choice: a client's memory lets it enter a round of a run once in either way, and upload in one of
    them, so what it signs belongs to one attempt only.
    """
    return hashlib.sha256(f"cpsgd session {run} {round}{' ahead' if ahead else ''}".encode()).digest()[:16]


@dataclass(frozen=True)
class Signing:
    """What a client signs with, and whose signatures it takes; nothing of either without a roster."""

    identity: Ed25519PrivateKey | None = field(default=None, repr=False)
    roster: frozenset[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Signing:
        """What a client's operator has set.

        Raises:
            RoundRefusedError: A file is missing or cannot be used, or the identity is not on the roster, or there is no
                memory.
        """
        paths = [settings.get(key) for key in (IDENTITY_KEY, ROSTER_KEY)]
        if paths == [None, None]:
            return cls()
        if not all(isinstance(path, str) and path for path in paths):
            raise RoundRefusedError(f"This client needs both {IDENTITY_KEY} and {ROSTER_KEY}, each the name of a file.")
        if settings.get(MEMORY_KEY) is None:
            raise RoundRefusedError(
                f"This client has a roster and needs {MEMORY_KEY} as well: it could be made to sign twice without."
            )
        try:
            identity, roster = read_identity(Path(str(paths[0]))), read_roster(Path(str(paths[1])))
        except (IdentityFileError, OSError, ValueError) as error:
            # The server is told this text, so it names no path and quotes nothing.
            raise RoundRefusedError(
                f"This client cannot use its identity or its roster ({type(error).__name__})."
            ) from None
        if public_bytes(identity) not in roster:
            raise RoundRefusedError("This client's identity is not on its own roster.")
        return cls(identity, roster)

    def check(self, invitation: Invitation, run: str, round: int, *, ahead: bool = False) -> None:
        """Refuses, with a roster, what an active server could make use of.

        Raises:
            RoundRefusedError: The round is not for a roster, not of this run, not for everybody on the roster, or on a
                sparse graph, in the choice of which a server has a hand.
        """
        if self.roster is None:
            return
        session = invitation.session
        if not session.signed:
            raise RoundRefusedError(
                "This client has a roster, and the server asks for a round without signatures: give it to the server, "
                "too."
            )
        clients, neighbours = session.parameters.clients, session.parameters.neighbours
        if clients != len(self.roster):
            raise RoundRefusedError(
                f"The server's round is for {clients} clients, and {len(self.roster)} are on this client's roster."
            )
        if neighbours != clients - 1:
            raise RoundRefusedError(
                "The server would tie this client to some of the others only, on a graph that the server has a hand in."
            )
        if session.identifier != session_identifier(run, round, ahead=ahead):
            raise RoundRefusedError("The server's session is not that of this run and round.")
