"""The rounds: which exchanges each is made of, from top to bottom.

    plain       upload
    pair        upload, sealed for two servers
    masked      advertise, share, mask, confirm, unmask
    pipelined   advertise, share, mask, confirm + advertise, unmask + share
                                   ... then mask, confirm + advertise, unmask + share in every further round

The first two exchanges of secure aggregation, keys and shares, have nothing to do with the data. A pipelined round
makes them for the next round together with its own last two, so that the next round takes three exchanges, not five.
Messages are all that the two rounds share (`cpsgd.federation.messages.Pair`). The next round is a session of its own,
is not charged meanwhile, and is as strict as any other. Nodes whose updates came are invited. A node that does not
answer for the next round has dropped out of that one, whatever it does in this one. If too few are left, or this round
fails, nothing is prepared, and the next round begins from the beginning. docs/secure-aggregation.md says why this is
as secure.

Other exchanges may come before a round, such as those that hand seeds of noise on (`cpsgd.correlated.handover`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from cpsgd.aggregator import Aggregator
from cpsgd.errors import CpsgdError, ParameterError, ThresholdError, WireError
from cpsgd.federation.client_files import session_identifier
from cpsgd.federation.messages import OPENING, Pair, Request
from cpsgd.federation.one_message import PairSum
from cpsgd.federation.sessions import Exchange, Node, RoundSession
from cpsgd.federation.terms import Settlement, Terms
from cpsgd.secagg import SecureServer, Stage, offenders
from cpsgd.secagg.keys import as_roster

# Bytes that the frames, keys and shares of a message may take on top of the packed integers.
_OVERHEAD_BYTES = 1 << 15
_OVERHEAD_BYTES_PER_CLIENT = 1 << 10


def begin_round(
    terms: Terms,
    round: int,
    nodes: Sequence[Node],
    *,
    run: str,
    course: str = "",
    charged_to: str | None = None,
    revealing: Callable[[], None] | None = None,
    before: Iterable[Exchange[Node]] = (),
    ahead: bool = False,
    prepares: bool = False,
    counters: dict[bytes, int] | None = None,
) -> RoundSession[Node]:
    """Returns the session of a round, charged to the ledger and with its first exchange open.

    Args:
        terms: The terms of all rounds.
        round: Number of the round.
        nodes: Nodes of the round, at most as many as the plan has clients. With a roster the round is for everybody on
            it: those without a node have dropped out from the beginning. Which node is which of them does not matter,
            for they sign with their number.
        run: The engine's name of the run, the same on the clients.
        course: The run that began with the first of these rounds, if it is another one than `run`.
        charged_to: An earlier run that charged this round and stopped before `revealing` was called: it is not charged
            again.
        revealing: Called once, before anything is asked for that reveals the sum.
        before: Exchanges that come before the round's own.
        ahead: Prepares a round of secure aggregation while another one runs. It is charged later, by
            `RoundSession.charge`.
        prepares: Prepares the next round of secure aggregation meanwhile, unless this is the last one or its nodes may
            not be in the next.
        counters: Counters of the clients' memories so far, with a roster; see `SecureServer`.

    Raises:
        ParameterError: There are too many nodes, or one of them twice.

    Example:
        >>> import numpy as np
        >>> from cpsgd import plan
        >>> from cpsgd.federation import ClientSession, Limits, Terms
        >>> best = plan(clients=3, dim=5, epsilon=8.0, delta=1e-6, secure=True, colluding=1, bits=14)
        >>> server = begin_round(Terms(plan=best), 1, ["north", "south", "west"], run="r1")
        >>> states = {"north": b"", "south": b"", "west": b""}
        >>> while server.stage is not None:
        ...     for node, request in server.requests().items():
        ...         client = ClientSession(Limits(epsilon=8.0, delta=1e-6), "r1", states[node])
        ...         server.receive(node, client.answer(request, lambda protocol: np.full(5, 0.4, np.float32)))
        ...         states[node] = client.state
        ...     ended = server.close()
        >>> server.release().shape, server.report.survivors, server.report.dropped
        ((5,), 3, {})
    """
    if len(set(nodes)) != len(nodes) or len(nodes) > terms.protocol.clients:
        raise ParameterError(f"Expected at most {terms.protocol.clients} different nodes, got {len(nodes)}.")
    settlement = Settlement(terms, round, run, course)
    session = RoundSession(nodes, round=round, colluding=terms.colluding, settlement=settlement)
    total: MaskedSum[Node] | PlainSum[Node] | PairSum[Node]
    try:
        if len(nodes) < terms.surviving:
            raise ThresholdError(f"{len(nodes)} nodes are connected, and the plan needs {terms.surviving}")
        if not ahead:
            settlement.charge(charged_to, revealing)
        if terms.pair is not None:
            total = PairSum(terms.pair, terms, round, nodes, partial(_request, terms, round, Stage.UPLOAD))
        elif terms.secure:
            total = MaskedSum(terms, round, nodes, run, ahead=ahead, counters=counters)
        else:
            total = PlainSum(terms, round, nodes)
    except CpsgdError as error:
        session.withhold(error)
        return session
    settlement.total, session.fewest = total, total.fewest
    if isinstance(total, MaskedSum):
        session.judge = total.judge
    exchanges: Sequence[Exchange[Node]] = total.exchanges
    if (prepares or ahead) and terms.secure and round < terms.rounds and terms.apart == 1:
        exchanges = pipelined(
            exchanges,
            session,
            lambda left: begin_round(terms, round + 1, left, run=run, course=course, ahead=True, counters=counters),
        )
    session.run([*before, *exchanges])
    return session


# ---------------------------------------------------------------------- a plain round


class PlainSum(Generic[Node]):
    """A round without secure aggregation, of one exchange: the server sees every noisy message."""

    stage, binding = Stage.UPLOAD, True

    def __init__(self, terms: Terms, round: int, nodes: Sequence[Node]) -> None:
        """Starts with an empty sum."""
        self._aggregator = Aggregator(terms.protocol, terms.memory.number(round))
        self._longest, self.needed = terms.protocol.longest_message_bytes, terms.surviving
        self.fewest = self.needed
        self._requests = dict.fromkeys(nodes, _request(terms, round, self.stage))

    @property
    def exchanges(self) -> list[Exchange[Node]]:
        """The round's only exchange, this object itself: clients upload their messages."""
        return [self]

    def requests(self) -> Mapping[Node, bytes]:
        """Returns the same request for all nodes."""
        return self._requests

    def receive(self, node: Node, answer: bytes) -> None:
        """Adds a message to the sum."""
        _check_length(answer, self._longest)
        self._aggregator.add(answer)

    def close(self) -> Mapping[Node, str]:
        """Ends the round. Faults of a message are found when it is received."""
        return {}

    @property
    def survivors(self) -> int:
        """Number of clients whose messages are in the sum."""
        return self._aggregator.count

    def mean(self) -> NDArray[np.float32]:
        """Returns the decoded mean."""
        return self._aggregator.mean()


# ---------------------------------------------------------------------- a round of secure aggregation


class MaskedSum(Generic[Node]):
    """A round of secure aggregation: the server learns the sum of the survivors' integers and nothing else."""

    def __init__(
        self,
        terms: Terms,
        round: int,
        nodes: Sequence[Node],
        run: str,
        *,
        ahead: bool = False,
        counters: dict[bytes, int] | None = None,
    ) -> None:
        """Invites the nodes; `ahead` says that the previous round is still running."""
        roster = None if terms.roster is None else as_roster(terms.roster)
        clients = len(nodes) if roster is None else len(roster)
        parameters = terms.parameters(round, clients)
        session = None if roster is None else session_identifier(run, round, ahead=ahead)
        self.terms, self.numbers = terms, {node: client for client, node in enumerate(nodes)}
        self.server = SecureServer(
            parameters, roster=roster, session=session, colluding=terms.colluding, counters=counters
        )
        self.messages: Mapping[int, bytes] = self.server.invite()  # of the open exchange, by client
        self.fewest = max(terms.surviving, parameters.quorum)
        self.longest = parameters.upload_bytes + _OVERHEAD_BYTES + _OVERHEAD_BYTES_PER_CLIENT * clients

    @property
    def exchanges(self) -> list[Exchange[Node]]:
        """The five exchanges of the round.

        The sum needs `surviving` uploads. Then a quorum suffices; of confirmations, one that is left without those who
        may collude.
        """
        surviving, quorum = self.terms.surviving, self.server.parameters.quorum
        return [
            MaskedExchange(self, Stage.ADVERTISE, surviving),
            MaskedExchange(self, Stage.SHARE, surviving),
            MaskedExchange(self, Stage.MASK, surviving),
            MaskedExchange(self, Stage.CONFIRM, min(surviving, quorum + self.terms.colluding)),
            MaskedExchange(self, Stage.UNMASK, min(surviving, quorum)),
        ]

    @property
    def survivors(self) -> int:
        """Number of clients whose messages are in the sum."""
        return len(self.server.result().survivors)

    def judge(self, accuser: Node, accused: Node, proof: bytes) -> tuple[Node, str] | None:
        """Returns the node that a complaint proves to lie, with the reason; see `SecureServer.judge`."""
        found = self.server.judge(self.numbers[accuser], self.numbers[accused], proof)
        nodes = {client: node for node, client in self.numbers.items()}
        return None if found is None else (nodes[found[0]], found[1])

    def mean(self) -> NDArray[np.float32]:
        """Returns the decoded mean."""
        round = self.terms.memory.number(self.server.parameters.round)
        return self.terms.protocol.decode_sum(self.server.result().sums, self.survivors, round)


class MaskedExchange(Generic[Node]):
    """One stage of secure aggregation. Client i is the i-th of the nodes."""

    binding = True

    def __init__(self, total: MaskedSum[Node], stage: Stage, needed: int) -> None:
        """Creates a stage of a round; its requests exist once the exchange before it is closed."""
        self.stage, self.needed, self._total = stage, needed, total

    def requests(self) -> Mapping[Node, bytes]:
        """Returns the stage's request for each node that is left."""
        total, round = self._total, self._total.server.parameters.round
        return {
            node: _request(total.terms, round, self.stage, total.messages[client])
            for node, client in total.numbers.items()
            if client in total.messages
        }

    def receive(self, node: Node, answer: bytes) -> None:
        """Takes an answer."""
        _check_length(answer, self._total.longest)
        self._total.server.receive(self._total.numbers[node], answer)

    def close(self) -> Mapping[Node, str]:
        """Ends the stage. After the last stage, returns the nodes that dealt or revealed wrong shares."""
        total = self._total
        total.messages = total.server.advance()
        if total.server.stage is not Stage.DONE:
            return {}
        disputed = total.server.result().disputed
        wrong = offenders(disputed, most=total.terms.colluding)
        return {
            node: f"Of the shares it dealt or revealed, those with {sum(client in pair for pair in disputed)} others "
            "are wrong."
            for node, client in total.numbers.items()
            if client in wrong
        }


def _request(terms: Terms, round: int, stage: Stage, payload: bytes = b"") -> bytes:
    """Returns a stage's request to a client, as bytes."""
    return Request(
        stage=stage,
        round=round,
        rounds=terms.rounds,
        surviving=terms.surviving,
        protocol=terms.protocol_text if stage in OPENING else "",
        payload=payload,
        examples=terms.examples or 0,
    ).to_bytes()


def _check_length(answer: bytes, longest: int) -> None:
    if not isinstance(answer, bytes) or len(answer) > longest:
        size = f"{len(answer)} bytes" if isinstance(answer, bytes) else "no bytes"
        raise WireError(f"The upload has {size}; no honest one has more than {longest}.")


# ---------------------------------------------------------------------- two rounds at once


def pipelined(
    exchanges: Sequence[Exchange[Node]],
    session: RoundSession[Node],
    prepare: Callable[[list[Node]], RoundSession[Node]],
) -> list[Exchange[Node]]:
    """Zips the last two exchanges of a masked round with the first two of the next one.

    Args:
        exchanges: The five of the round.
        session: The round's session, which has the next one as `following` when it is made.
        prepare: Makes the next round's session, for the nodes whose updates came.
    """
    *first, confirm, unmask = exchanges
    zipped = zip((confirm, unmask), (Stage.ADVERTISE, Stage.SHARE), strict=True)
    return [*first, *(Both(now, stage, session, prepare) for now, stage in zipped)]


class Both(Generic[Node]):
    """An exchange of the running round combined with one that prepares the next round."""

    binding = True

    def __init__(
        self,
        now: Exchange[Node],
        ahead: Stage,
        session: RoundSession[Node],
        prepare: Callable[[list[Node]], RoundSession[Node]],
    ) -> None:
        """Takes the exchange of the round that runs, and the stage of the next one; see `pipelined`."""
        self.stage, self.needed = now.stage, now.needed
        self._now, self._stage, self._session, self._prepare = now, ahead, session, prepare

    @property
    def _following(self) -> RoundSession[Node] | None:
        """The next round's session while it is at this stage."""
        found = self._session.following
        return found if found is not None and found.stage is self._stage else None

    def requests(self) -> Mapping[Node, bytes]:
        """Returns pairs of requests, or single ones for nodes that have no part in the next round."""
        requests = self._now.requests()
        if self._stage is Stage.ADVERTISE and self._session.following is None:
            dropped = self._session.report.dropped
            self._session.following = self._prepare([node for node in requests if node not in dropped])
        ahead = {} if self._following is None else self._following.requests()
        return {
            node: Pair(request, ahead[node]).to_bytes() if node in ahead else request
            for node, request in requests.items()
        }

    def receive(self, node: Node, answer: bytes) -> None:
        """Takes an answer; if its second half is wrong, the node loses its part in the next round only."""
        pair = None
        if self._following is not None and Pair.begins(answer):
            with suppress(WireError):  # it is refused below, as no message of this stage
                pair = Pair.from_bytes(answer)
        self._now.receive(node, answer if pair is None else pair.first)
        if pair is None or self._following is None:
            return
        if pair.refused:
            self._following.drop(node, pair.reason)
            return
        try:
            self._following.receive(node, pair.second)
        except CpsgdError as error:
            self._following.drop(node, f"{type(error).__name__}: {error}")

    def close(self) -> Mapping[Node, str]:
        """Ends both exchanges. Faults and accusations in the next round's messages count in this round's report."""
        faults = self._now.close()
        if (following := self._following) is not None:
            following.close()
            report, ahead = self._session.report, following.report
            for node, accusers in ahead.accused.items():
                report.accused[node] = list(dict.fromkeys([*report.accused.get(node, []), *accusers]))
            for node, fault in ahead.faults.items():
                report.faults.setdefault(node, f"for the next round: {fault}")
            ahead.faults, ahead.accused = {}, {}
        return faults
