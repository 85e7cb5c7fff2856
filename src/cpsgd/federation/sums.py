"""How a round's messages are added up: by secure aggregation, or in the server's sight."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from cpsgd.aggregator import Aggregator
from cpsgd.federation.messages import round_of_run
from cpsgd.federation.settings import session_identifier
from cpsgd.federation.terms import Terms
from cpsgd.secagg import SecureServer, Stage, offenders
from cpsgd.secagg.identity import as_roster

# What the frames, keys and shares of a message may take on top of the packed integers.
_OVERHEAD_BYTES = 1 << 15
_OVERHEAD_BYTES_PER_CLIENT = 1 << 10


class MaskedSum:
    """Secure aggregation: the server learns the sum of the survivors' integers and nothing else."""

    def __init__(self, terms: Terms, round: int, nodes: int, run: str, *, ahead: bool = False) -> None:
        """Invites so many clients; `ahead` while the round before is still running."""
        roster = None if terms.roster is None else as_roster(terms.roster)
        clients = nodes if roster is None else len(roster)
        parameters = terms.parameters(round, clients)
        session = None if roster is None else session_identifier(run, round, ahead=ahead)
        self._plan = terms.plan
        self._server = SecureServer(parameters, roster=roster, session=session, colluding=terms.plan.colluding)
        invitations = self._server.invite()
        self.outgoing = {client: invitations[client] for client in range(nodes)}
        self.reply_limit = parameters.upload_bytes + _OVERHEAD_BYTES + _OVERHEAD_BYTES_PER_CLIENT * clients

    @property
    def stage(self) -> Stage:
        """The stage that answers are awaited for."""
        return self._server.stage

    @property
    def survivors(self) -> int:
        """Whose messages are in the sum: how many."""
        return len(self._server.result().survivors)

    @property
    def needed(self) -> int:
        """Answers to wait for: those of a sum until all is uploaded, then of a quorum.

        With one more stage to come, so many that a quorum is left without those who may collude.
        """
        spare = {Stage.CONFIRM: self._plan.colluding, Stage.UNMASK: 0}.get(self.stage, self._plan.surviving)
        return min(self._plan.surviving, self._server.parameters.quorum + spare)

    @property
    def fewest(self) -> int:
        """Clients without whom no sum can come of it, whatever the others do."""
        return max(self._plan.surviving, self._server.parameters.quorum)

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

    def receive(self, client: int, reply: bytes) -> None:
        """Takes an answer, or raises a typed error and changes nothing."""
        self._server.receive(client, reply)

    def advance(self) -> None:
        """Ends the stage; `outgoing` is then what to send next."""
        self.outgoing = self._server.advance()

    def mean(self) -> NDArray[np.float32]:
        """The decoded mean."""
        total = self._server.result()
        protocol = self._plan.protocol
        return protocol.decode_sum(total.sums, self.survivors, round_of_run(protocol, self._server.parameters.round))


class PlainSum:
    """No secure aggregation: the server sees every noisy message."""

    def __init__(self, terms: Terms, round: int, nodes: int) -> None:
        """Waits for as many messages."""
        protocol = terms.plan.protocol
        self._aggregator = Aggregator(protocol, round_of_run(protocol, round))
        self.stage = Stage.UPLOAD
        self.outgoing = dict.fromkeys(range(nodes), b"")
        self.reply_limit = terms.plan.protocol.longest_message_bytes
        self.needed = terms.plan.surviving

    @property
    def survivors(self) -> int:
        """Whose messages are in the sum: how many."""
        return self._aggregator.count

    @property
    def offences(self) -> dict[int, str]:
        """What is wrong with a message is found when it is received."""
        return {}

    def receive(self, client: int, reply: bytes) -> None:
        """Takes an answer, or raises a typed error and changes nothing."""
        self._aggregator.add(reply)

    def advance(self) -> None:
        """Ends the stage; `outgoing` is then what to send next."""
        self.outgoing, self.stage = {}, Stage.DONE

    def mean(self) -> NDArray[np.float32]:
        """The decoded mean."""
        return self._aggregator.mean()
