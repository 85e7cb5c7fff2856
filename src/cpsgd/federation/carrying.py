"""`carry`: takes a round's messages to the nodes and back, over any transport, and ends each stage in time.

Neither a round nor a stage waits for everybody, and neither waits for ever:

* **A round begins** when as many nodes are connected as the plan has clients, or when enough of them (`plan.surviving`)
  have been there for the grace period.
* **A stage ends** when all have answered, or at the deadline. It also ends when enough have answered (`plan.surviving`;
  after the uploads, a quorum), the round can go on with them, and the others have had their time: the grace period, or
  as long again as the first ones took if that is longer.

To invite more than are needed, plan for more: `plan(clients=13, dropout=0.3)` invites 13 and needs 9. As soon as nine
have answered, the others are waited for no longer than the grace period.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Generic, Protocol

from cpsgd import _validate
from cpsgd.errors import CpsgdError
from cpsgd.federation.sessions import Node, RoundSession


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Waiting times in seconds.

    Attributes:
        nodes: For enough nodes to connect; then the round is withheld, and nothing is charged.
        stage: For a stage's answers.
        grace: For the others when enough are there.
    """

    nodes: float = 300.0
    stage: float = 600.0
    grace: float = 10.0

    def __post_init__(self) -> None:
        for name in ("nodes", "stage"):
            _validate.positive(name, getattr(self, name))
        _validate.non_negative("grace", self.grace)


@dataclass
class Gathering:
    """Decides when a round may begin. Poll it with the time of a monotonic clock."""

    pace: Pace
    wanted: int
    needed: int
    began: float
    _enough_since: float | None = None

    def over(self, connected: int, now: float) -> bool:
        """Returns whether to stop waiting: all nodes are there, enough were for the grace period, or time is up."""
        if connected < self.needed:
            self._enough_since = None
        elif self._enough_since is None:
            self._enough_since = now
        patient = self._enough_since is not None and now - self._enough_since >= self.pace.grace
        return connected >= self.wanted or patient or now - self.began >= self.pace.nodes


@dataclass
class StageClock(Generic[Node]):
    """Ends the open stage of a session in time. Poll it with the time of a monotonic clock."""

    pace: Pace
    session: RoundSession[Node]
    began: float
    _enough_at: float | None = field(default=None)

    def end(self, now: float) -> bool:
        """Closes the stage if it is time to; returns whether it is closed."""
        if not self.session.waiting or now - self.began >= self.pace.stage:
            return self.session.close()
        if self._enough_at is None and self.session.enough:
            self._enough_at = now
        if self._enough_at is None:
            return False
        patience = max(self.pace.grace, self._enough_at - self.began)
        return now - self._enough_at >= patience and self.session.close(early=True)


@dataclass(frozen=True)
class Reply(Generic[Node]):
    """A node's reply, or why there is none.

    Attributes:
        node: The node that it is from.
        answer: Bytes for the session.
        metrics: Metrics beside them.
        size: Bytes that the reply took on the way, 0 if unknown.
        reason: Why there is no answer; None if there is one.
    """

    node: Node
    answer: bytes = b""
    metrics: Mapping[str, object] = field(default_factory=dict)
    size: int = 0
    reason: str | None = None

    def hand_to(self, session: RoundSession[Node]) -> None:
        """Hands the reply to a session, and drops the node if the session refuses it."""
        if self.size:
            session.count_bytes(self.node, self.size)
        if self.reason is not None:
            session.drop(self.node, self.reason)
            return
        try:
            session.receive(self.node, self.answer, self.metrics)
        except CpsgdError as error:
            session.drop(self.node, f"{type(error).__name__}: {error}")


class Transport(Protocol[Node]):
    """The interface by which a stage uses an engine."""

    def send(self, session: RoundSession[Node]) -> None:
        """Sends the open stage's requests; drops nodes that they cannot be sent to."""

    def replies(self, waiting: frozenset[Node]) -> Iterable[Reply[Node]]:
        """Returns the replies that have come since, after a short wait if there are none."""

    def end_stage(self) -> None:
        """Stops waiting for replies."""

    @property
    def aborted(self) -> bool:
        """Whether the engine ends the round."""


def carry(session: RoundSession[Node], transport: Transport[Node], pace: Pace) -> bool:
    """Carries a round's messages until no stage is left; returns False if the engine ended it before."""
    while session.stage is not None:
        transport.send(session)
        clock, ended = StageClock(pace, session, time.monotonic()), False
        while not ended and not transport.aborted:
            for reply in transport.replies(session.waiting):
                reply.hand_to(session)
            ended = clock.end(time.monotonic())
        transport.end_stage()
        if not ended:
            return False
    return True
