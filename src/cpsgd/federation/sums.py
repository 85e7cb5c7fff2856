"""How a round's sum is made: by secure aggregation, or in the server's sight."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd.aggregator import Aggregator
from cpsgd.errors import CpsgdError, ShareError
from cpsgd.federation.settings import session_identifier
from cpsgd.secagg import SecureServer, Stage, offenders
from cpsgd.secagg.identity import as_roster

if TYPE_CHECKING:
    from cpsgd.federation.server import Terms

# What the frames, keys and shares of a message may take on top of the packed integers.
_OVERHEAD_BYTES = 1 << 15
_OVERHEAD_BYTES_PER_CLIENT = 1 << 10
CLIENT = re.compile(r"\b([Cc]lient) (\d{1,9})\b")
"""A client's number in a message of secure aggregation."""


class SecureSum:
    """Secure aggregation: the server learns the sum of the survivors' integers and nothing else."""

    def __init__(self, terms: Terms, round: int, nodes: int, run: str, ahead: bool = False) -> None:
        """Invites so many clients; `ahead` while another round runs."""
        roster = None if terms.roster is None else as_roster(terms.roster)
        clients = nodes if roster is None else len(roster)
        parameters = terms.parameters(round, clients)
        session = None if roster is None else session_identifier(run, round, ahead=ahead)
        self.needed = max(parameters.surviving, parameters.quorum)
        self._plan, self._server = terms.plan, SecureServer(parameters, roster=roster, session=session)
        invitations = self._server.invite()
        self.outgoing = {client: invitations[client] for client in range(nodes)}
        self.reply_limit = parameters.upload_bytes + _OVERHEAD_BYTES + _OVERHEAD_BYTES_PER_CLIENT * clients

    @property
    def stage(self) -> Stage:
        """What the clients are asked for."""
        return self._server.stage

    @property
    def survivors(self) -> int:
        """Clients whose updates are in the sum."""
        return len(self._server.result().survivors)

    @property
    def offences(self) -> dict[int, str]:
        """Clients whose messages prove that they are at fault, found at the end of the stage, and in which way."""
        if self.stage is not Stage.DONE:
            return {}
        disputed = self._server.result().disputed
        return {
            client: f"Of the shares it dealt or revealed, those with {sum(client in pair for pair in disputed)} others "
            "are wrong."
            for client in offenders(disputed, most=self._plan.colluding)
        }

    def dealer_at_fault(self, error: CpsgdError, holders: int) -> int | None:
        """Who dealt shares of which so many holders cannot make the secret, if as few as planned can lie about theirs.

        So many wrong shares are found and left out: half of those beyond the threshold, or one of them.
        """
        found = CLIENT.search(str(error))
        parameters, colluding = self._server.parameters, self._plan.colluding
        complete = parameters.neighbours == parameters.clients - 1
        spare = holders - parameters.threshold
        if not isinstance(error, ShareError) or found is None or not complete or spare < min(2, colluding) * colluding:
            return None
        return int(found[2])

    def receive(self, client: int, reply: bytes) -> None:
        """Takes a client's answer, or raises and changes nothing."""
        self._server.receive(client, reply)

    def advance(self) -> None:
        """Ends the stage, or raises and changes nothing."""
        self.outgoing = self._server.advance()

    def mean(self) -> NDArray[np.float32]:
        """The mean of the updates."""
        total = self._server.result()
        return self._plan.protocol.decode_sum(total.sums, self.survivors, self._server.parameters.round)


class PlainSum:
    """No secure aggregation: the server sees every noisy message."""

    def __init__(self, terms: Terms, round: int, nodes: int) -> None:
        """Waits for as many messages."""
        self._aggregator = Aggregator(terms.plan.protocol, round)
        self.stage = Stage.UPLOAD
        self.outgoing = dict.fromkeys(range(nodes), b"")
        self.reply_limit = terms.plan.protocol.longest_message_bytes

    @property
    def survivors(self) -> int:
        """Clients whose updates are in the sum."""
        return self._aggregator.count

    @property
    def offences(self) -> dict[int, str]:
        """What is wrong with a message is found when it is received."""
        return {}

    def dealer_at_fault(self, error: CpsgdError, holders: int) -> int | None:
        """There are no shares."""
        return None

    def receive(self, client: int, reply: bytes) -> None:
        """Takes a client's answer, or raises and changes nothing."""
        self._aggregator.add(reply)

    def advance(self) -> None:
        """Ends the stage, or raises and changes nothing."""
        self.outgoing, self.stage = {}, Stage.DONE

    def mean(self) -> NDArray[np.float32]:
        """The mean of the updates."""
        return self._aggregator.mean()
