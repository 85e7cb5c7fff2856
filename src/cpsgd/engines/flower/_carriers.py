"""How a round's integers are summed: by secure aggregation, or by a server that sees every message."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from cpsgd.aggregator import Aggregator
from cpsgd.engines.flower._records import Request, Stage
from cpsgd.engines.flower._signing import session_identifier
from cpsgd.planner import Plan
from cpsgd.secagg import SecureParameters, SecureServer

# What the frames, keys and shares of a message may take on top of the packed integers.
_OVERHEAD_BYTES = 1 << 15
_OVERHEAD_BYTES_A_CLIENT = 1 << 10
_STAGES: tuple[Stage, ...] = ("advertise", "share", "mask", "unmask")
_SIGNED_STAGES: tuple[Stage, ...] = ("advertise", "share", "mask", "confirm", "unmask")


class Carrier(Interface):
    """The server's half of one round, whoever carries the messages."""

    @property
    def stage(self) -> Stage | None:
        """What clients are asked for next, or None at the end."""

    @property
    def count(self) -> int:
        """Clients that are still in the round; from the upload on, those in the sum."""

    @property
    def reply_limit(self) -> int:
        """Bytes that no honest reply exceeds."""

    def requests(self) -> dict[int, Request]:
        """The stage's request to each node."""

    def receive(self, node: int, payload: bytes) -> None:
        """Takes a node's answer; raises a `CpsgdError` and changes nothing where it is refused."""

    def advance(self) -> None:
        """Ends the stage. Whoever has not answered is out."""

    def mean(self) -> NDArray[np.float32]:
        """The mean of the updates."""


def secure_parameters(plan: Plan, round: int, clients: int, *, complete: bool) -> SecureParameters:
    """What a round of secure aggregation with so many clients agrees on; it stands the dropouts the plan stands.

    In a `complete` graph all are each other's neighbours, however many they are.

    Raises:
        ParameterError: The plan was not made for secure aggregation.
        InfeasibleError: So many dropouts and colluding clients are more than secure aggregation stands.
    """
    found = SecureParameters.for_protocol(
        plan.protocol,
        round=round,
        clients=clients,
        dropout=1.0 - plan.surviving / clients,
        colluding=plan.colluding,
        surviving=plan.surviving,
    )
    if not complete:
        return found
    return replace(found, neighbours=clients - 1, threshold=(clients + plan.colluding) // 2 + 1)


class SecureCarrier:
    """Secure aggregation: the server learns the sum of the survivors' integers and nothing else."""

    def __init__(
        self,
        plan: Plan,
        round: int,
        nodes: list[int],
        examples: int = 0,
        *,
        run: int = 0,
        roster: frozenset[bytes] | None = None,
    ) -> None:
        """Invites the nodes; node i of the list is client i.

        With a roster the round is for all who are on it: those without a node have dropped out from the beginning. Who
        has which number does not matter to them, for they sign what they say with their number.
        """
        self._plan = plan
        self._round = round
        self._nodes = nodes
        self._examples = examples
        self._stages = _STAGES if roster is None else _SIGNED_STAGES
        clients = len(nodes) if roster is None else len(roster)
        parameters = secure_parameters(plan, round, clients, complete=roster is not None)
        session = None if roster is None else session_identifier(run, round)
        self._server = SecureServer(parameters, roster=roster, session=session)
        invitations = self._server.invite()
        self._outgoing = {client: invitations[client] for client in range(len(nodes))}
        self._answered: set[int] = set()
        self._step = 0
        self.count = len(nodes)
        self.reply_limit = parameters.upload_bytes + _OVERHEAD_BYTES + _OVERHEAD_BYTES_A_CLIENT * clients

    @property
    def stage(self) -> Stage | None:
        """What clients are asked for next, or None at the end."""
        return self._stages[self._step] if self._step < len(self._stages) else None

    def requests(self) -> dict[int, Request]:
        """The stage's request to each node."""
        begins = self._step == 0
        return {
            self._nodes[client]: Request(
                stage=self._stages[self._step],
                round=self._round,
                rounds=self._plan.rounds,
                surviving=self._plan.surviving,
                protocol=self._plan.protocol.to_json() if begins else "",
                payload=payload,
                examples=self._examples,
            )
            for client, payload in self._outgoing.items()
        }

    def receive(self, node: int, payload: bytes) -> None:
        """Takes a node's answer; raises a `CpsgdError` and changes nothing where it is refused."""
        client = self._nodes.index(node)
        self._server.receive(client, payload)
        self._answered.add(client)

    def advance(self) -> None:
        """Ends the stage. Whoever has not answered is out.

        Raises:
            ThresholdError: Too few are left; nothing was revealed.
        """
        self._outgoing = self._server.advance()
        if self._step <= _STAGES.index("mask"):
            self.count = len(self._answered)
        self._answered = set()
        self._step += 1

    def mean(self) -> NDArray[np.float32]:
        """The mean of the updates."""
        total = self._server.result()
        self.count = len(total.survivors)
        return self._plan.protocol.decode_sum(total.sums, self.count, self._round)


class PlainCarrier:
    """No secure aggregation: the server sees every noisy message."""

    def __init__(self, plan: Plan, round: int, nodes: list[int], examples: int = 0) -> None:
        """Asks the nodes for their messages."""
        self._plan = plan
        self._nodes = nodes
        self._examples = examples
        self._aggregator = Aggregator(plan.protocol, round)
        self.stage: Stage | None = "upload"
        self.reply_limit = plan.protocol.message_bytes

    @property
    def count(self) -> int:
        """Messages in the sum."""
        return self._aggregator.count

    def requests(self) -> dict[int, Request]:
        """The request to each node."""
        request = Request(
            stage="upload",
            round=self._aggregator.round,
            rounds=self._plan.rounds,
            surviving=self._plan.surviving,
            protocol=self._plan.protocol.to_json(),
            examples=self._examples,
        )
        return dict.fromkeys(self._nodes, request)

    def receive(self, node: int, payload: bytes) -> None:
        """Takes a node's message; raises a `CpsgdError` and changes nothing where it is refused."""
        self._aggregator.add(payload)

    def advance(self) -> None:
        """Ends the round."""
        self.stage = None

    def mean(self) -> NDArray[np.float32]:
        """The mean of the updates."""
        return self._aggregator.mean()
