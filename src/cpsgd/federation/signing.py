"""A client's identity and roster: files on its own machine, with which it takes part in signed rounds only.

A roster makes clients independent of what the server says about who they are. Each checks by itself that the keys it is
given are signed by people on the roster, by each of them once, for this run, this round and the number in it. Which
number the server gives to whom is then all the same. What each signs it signs once, for which it needs its memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd.errors import IdentityFileError, RoundRefusedError
from cpsgd.federation import memory
from cpsgd.secagg import Invitation, read_identity, read_roster
from cpsgd.secagg.identity import public_bytes

IDENTITY_KEY = "cpsgd-identity"
"""The setting of a client that names the file of its private key."""

ROSTER_KEY = "cpsgd-roster"
"""The setting that names the file with everybody's public keys."""


def session_identifier(run: str, round: int) -> bytes:
    """The 16 bytes that stand for one signed round of one run.

    Not the server's choice: a client's memory lets it enter a round of a run once, so what it signs belongs to one
    attempt only.
    """
    return hashlib.sha256(f"cpsgd session {run} {round}".encode()).digest()[:16]


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
        if settings.get(memory.KEY) is None:
            raise RoundRefusedError(
                f"This client has a roster and needs {memory.KEY} as well: it could be made to sign twice without."
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

    def check(self, invitation: Invitation, run: str, round: int) -> None:
        """Refuses, with a roster, what an active server could make use of.

        Raises:
            RoundRefusedError: The round is not signed, not of this run, not for everybody on the roster, or on a graph
                in which a client sees only some of the signatures.
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
            raise RoundRefusedError("The server would show this client the signatures of some of the others only.")
        if session.identifier != session_identifier(run, round):
            raise RoundRefusedError("The server's session is not that of this run and round.")
