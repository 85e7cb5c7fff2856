"""Files that a client's operator sets, and no server: the client's memory, identity and roster.

**Memory.** An engine keeps a client's state for one run only, and the server starts the next run. A limit over all runs
therefore needs a file of the client's own. Nor is an engine's state a place for what may happen once only. Flower, for
one, stores it after an answer has left. A SuperLink that fails one of its SuperNode's calls at the right time makes it
run several ClientApps at once, all from the same state. The memory is written before the answer, under a lock.

It is a log of records (`cpsgd._record_log`) of three words each:

| first | second | third | |
|---|---|---|---|
| run | round | digest of the round's kind | a round in which something about the data left |
| run | round | a stage's name, after `ahead-` where it was answered before the round began | any other stage |
| run | number | `relay` | seeds of correlated noise were handed on so often |
| `#kind` | digest | a `RoundKind` in base 64 | before the kind's first round |
| `#peers` | their number | identities and counters in base 64 | the largest counter each of the roster has signed |

Lines of releases 0.1.0 and 0.2.0 have no hash; those of 0.1.0 have digests of whole plans and no kinds.

**Identity and roster.** A roster makes clients independent of what the server says about who they are. Each checks by
itself that the keys it is given are signed by people on the roster, by each of them once, for this run, this round and
the number in it. Which number the server gives to whom does not matter then. A client signs everything once, for which
it needs its memory.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd._record_log import OpenLog, RecordLog
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import CpsgdError, DamagedFileError, IdentityFileError, RoundRefusedError, StageError
from cpsgd.federation.messages import STAGES
from cpsgd.secagg import Invitation, Stage, read_identity, read_roster
from cpsgd.secagg.cohort import check_counter
from cpsgd.secagg.keys import PUBLIC_BYTES, public_bytes

# The settings that name the files of a client's memory, of its private key, and of everybody's public keys.
MEMORY_KEY = "cpsgd-memory"
IDENTITY_KEY = "cpsgd-identity"
ROSTER_KEY = "cpsgd-roster"
TASK_KEY = "cpsgd-task"

FILE_KEYS = (MEMORY_KEY, IDENTITY_KEY, ROSTER_KEY, TASK_KEY)

_KIND = "#kind"  # no run has such a name
_PEERS = "#peers"
_COUNTER = struct.Struct("<Q")
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
    """A client's memory: the file of rounds that it answered.

    Records are only ever added; a file that cannot be read or written refuses every round.
    """

    def __init__(self, path: Path) -> None:
        """Stores the path; opens no file yet."""
        self._path, self._log = path, RecordLog(path, b"cpsgd memory 1\n")

    @classmethod
    def of(cls, path: object) -> Memory:
        """Returns the memory that a client's operator has set."""
        if not isinstance(path, str) or not path:
            raise RoundRefusedError(f"This client's {MEMORY_KEY} is not the name of a file.")
        if not Path(path).is_absolute():
            # In another working directory, which a train function may change to, it would be another, empty memory.
            raise RoundRefusedError(f"This client's {MEMORY_KEY} is not a full path, which begins at the root.")
        return cls(Path(path))

    @property
    def seeds(self) -> SeedFile:
        """The file beside this one with the client's seeds of noise, protected by this file's lock."""
        return SeedFile(self._path.with_name(self._path.name + ".lineages"), self._opened)

    def rounds(self) -> list[Answered]:
        """Returns the rounds answered so far."""
        return self.history()[0]

    def history(self) -> tuple[list[Answered], Mapping[str, str]]:
        """Returns the rounds answered so far, and the kinds of rounds by their digests."""
        with self._opened() as content:
            return content.rounds, content.kinds

    def add(self, answered: Answered, permit: Callable[[list[Answered], Mapping[str, str]], None], kind: str) -> int:
        """Records a round and its kind, if `permit` accepts it after those before; returns the number of rounds."""
        with self._opened() as content:
            permit(content.rounds, content.kinds)
            lines = [f"{answered.run} {answered.round} {answered.digest}"]
            if answered.digest not in content.kinds:
                lines.insert(0, f"{_KIND} {answered.digest} {base64.b64encode(kind.encode()).decode()}")
            content.log.append(*lines)
            return len(content.rounds) + 1

    def once(self, run: str, round: int, stage: Stage, *, ahead: bool = False) -> int:
        """Records that the client will answer a stage, and returns the number of rounds that it has entered so far.

        For stages that use no data. Stages answered ahead of their round are recorded separately, since that round may
        still start from its first stage.

        Raises:
            StageError: It was answered before.
        """
        line = f"{run} {round} {_AHEAD if ahead else ''}{stage.value}"
        with self._opened() as content:
            if line in content.stages:
                raise StageError(
                    f"This client has answered stage {stage.value!r} of round {round} of this run already."
                )
            content.log.append(line)
            entered = {each for each in content.stages | {line} if each.endswith(Stage.ADVERTISE.value)}
            return len(entered)

    def meet(self, counters: Mapping[int, tuple[bytes, int]]) -> None:
        """Records the counters of other clients, by number with their identities.

        Raises:
            SignatureError: One of them is not larger than before: that client's memory was set back.
        """
        with self._opened() as content:
            for client, (identity, counter) in counters.items():
                check_counter(client, counter, content.peers.get(identity))
                content.peers[identity] = counter
            table = b"".join(identity + _COUNTER.pack(counter) for identity, counter in content.peers.items())
            content.log.append(f"{_PEERS} {len(content.peers)} {base64.b64encode(table).decode()}")

    @contextmanager
    def _opened(self) -> Iterator[_Content]:
        """Opens the records, locked against other processes of this client."""
        try:
            with self._log.opened() as log:
                yield _read(log)
        except (OSError, ValueError) as error:
            if isinstance(error, CpsgdError) and not isinstance(error, DamagedFileError):
                raise
            # The server is told this text, so it names no path and quotes nothing.
            raise RoundRefusedError(f"This client cannot read or write its memory ({type(error).__name__}).") from None


@dataclass
class _Content:
    """The records of a memory; a `Journal` of seeds that were handed on.

    Attributes:
        log: The open log.
        rounds: Rounds that were answered.
        kinds: Kinds of rounds, by digest.
        stages: Records about other stages, unparsed.
        handed: Number of times that seeds were handed on, by run.
        peers: Largest counter that each of the roster has signed, by identity.
    """

    log: OpenLog
    rounds: list[Answered] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    stages: set[str] = field(default_factory=set)
    handed: dict[str, int] = field(default_factory=dict)
    peers: dict[bytes, int] = field(default_factory=dict)

    def given(self, run: str) -> int:
        return self.handed.get(run, 0)

    def answered(self, run: str) -> list[int]:
        return [each.round for each in self.rounds if each.run == run]

    def give(self, run: str, number: int) -> None:
        self.log.append(f"{run} {number} {Stage.RELAY.value}")


def _read(log: OpenLog) -> _Content:
    """Reads the memory's records."""
    found, peers = _Content(log), ""
    for line in log.records():
        first, second, last = line.split(" ")
        if first == _KIND:
            found.kinds[bytes.fromhex(second).hex()] = base64.b64decode(last, validate=True).decode()
        elif first == _PEERS:
            peers = last  # the whole table: only the last one counts
        elif last == Stage.RELAY:
            found.handed[first] = max(found.handed.get(first, 0), int(second))
        elif last.removeprefix(_AHEAD) in STAGES:
            found.stages.add(line)
        else:
            found.rounds.append(Answered(first, int(second), bytes.fromhex(last).hex()))
    table, step = base64.b64decode(peers, validate=True), PUBLIC_BYTES + _COUNTER.size
    if len(table) % step:
        raise ValueError("peers")
    for start in range(0, len(table), step):
        end = start + PUBLIC_BYTES
        (found.peers[table[start:end]],) = _COUNTER.unpack(table[end : end + _COUNTER.size])
    return found


# ---------------------------------------------------------------------- identity and roster


def session_identifier(run: str, round: int, *, ahead: bool = False) -> bytes:
    """Returns 16 bytes that identify one signed round of a run, or its preparation.

    Not the server's choice: a client's memory lets it enter a round of a run once in either way, and upload in one of
    them, so what it signs belongs to one attempt only.
    """
    return hashlib.sha256(f"cpsgd session {run} {round}{' ahead' if ahead else ''}".encode()).digest()[:16]


_Read = TypeVar("_Read")


def _file(read: Callable[[Path], _Read], path: object) -> _Read:
    """Reads an identity or a roster; the server is told what goes wrong, so no path is named and nothing quoted."""
    try:
        return read(Path(str(path)))
    except (IdentityFileError, OSError, ValueError) as error:
        raise RoundRefusedError(
            f"This client cannot use its identity or its roster ({type(error).__name__})."
        ) from None


@dataclass(frozen=True)
class Signing:
    """The key that a client signs with, and the keys whose signatures it takes.

    Without a roster there is neither, and with a task of two servers only the key.
    """

    identity: Ed25519PrivateKey | None = field(default=None, repr=False)
    roster: frozenset[bytes] | None = field(default=None, repr=False)

    @classmethod
    def of(cls, settings: Mapping[str, object]) -> Signing:
        """Returns the key and roster that a client's operator has set.

        Raises:
            RoundRefusedError: A file is missing or cannot be used, or the identity is not on the roster, or there is no
                memory.
        """
        paths = [settings.get(key) for key in (IDENTITY_KEY, ROSTER_KEY)]
        if paths == [None, None]:
            return cls()
        if settings.get(TASK_KEY) is not None:
            # Two servers have the roster of their task, and take one report of a sender in a round.
            if paths[1] is not None:
                raise RoundRefusedError(
                    f"This client has {TASK_KEY}, whose servers know who may send: drop {ROSTER_KEY}."
                )
            return cls(_file(read_identity, paths[0]))
        if not all(isinstance(path, str) and path for path in paths):
            raise RoundRefusedError(f"This client needs both {IDENTITY_KEY} and {ROSTER_KEY}, each the name of a file.")
        if settings.get(MEMORY_KEY) is None:
            raise RoundRefusedError(
                f"This client has a roster and needs {MEMORY_KEY} as well: it could be made to sign twice without."
            )
        identity, roster = _file(read_identity, paths[0]), _file(read_roster, paths[1])
        if public_bytes(identity) not in roster:
            raise RoundRefusedError("This client's identity is not on its own roster.")
        return cls(identity, roster)


def check_signed(roster: frozenset[bytes], invitation: Invitation, run: str, round: int, *, ahead: bool) -> None:
    """Refuses, for a client with a roster, rounds that a malicious server could exploit.

    Raises:
        RoundRefusedError: The round is not for a roster, not of this run, not for everybody on the roster, or on a
            sparse graph, in the choice of which a server has a hand.
    """
    session = invitation.session
    if not session.signed:
        raise RoundRefusedError(
            "This client has a roster, and the server asks for a round without signatures: give it to the server, too."
        )
    clients, neighbours = session.parameters.clients, session.parameters.neighbours
    if clients != len(roster):
        raise RoundRefusedError(
            f"The server's round is for {clients} clients, and {len(roster)} are on this client's roster."
        )
    if neighbours != clients - 1:
        raise RoundRefusedError(
            "The server would tie this client to some of the others only, on a graph that the server has a hand in."
        )
    if session.identifier != session_identifier(run, round, ahead=ahead):
        raise RoundRefusedError("The server's session is not that of this run and round.")
