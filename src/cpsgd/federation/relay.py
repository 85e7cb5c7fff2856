"""The server's part in handing lineages on: before a round, those that leave hand their seeds to those that come.

Three exchanges with them alone (`cpsgd.federation.handover`), and none where nobody leaves or nobody comes. Who does
not answer, or answers wrongly, costs a lineage, and nothing else: whoever has no baton begins a new one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Generic

from cpsgd.errors import SenderError, StageError
from cpsgd.federation.batons import Place
from cpsgd.federation.handover import Handover, Step, read_answer
from cpsgd.federation.pipeline import PipelinedSession
from cpsgd.federation.server import Node
from cpsgd.secagg import Stage


class Relay(Generic[Node]):
    """Carries the seeds of nodes that leave to nodes that come, a lineage for each pair of them.

    Attributes:
        waiting: Nodes whose answers are awaited.
        taken: Nodes that have taken a lineage over.
        given: Nodes that may have handed their seeds on, and have none any more.
    """

    def __init__(
        self, run: str, fingerprint: bytes, bands: int, round: int, leave: Sequence[Node], come: Sequence[Node]
    ):
        """Pairs them as far as there are both."""
        self._pairs = {
            node: (other, Place(run, fingerprint, bands, round, lineage))
            for lineage, (other, node) in enumerate(zip(leave, come, strict=False))
        }
        self._step = Step.KEY
        self._bodies: dict[Node, bytes] = dict.fromkeys(self._pairs, b"")  # by the node that comes
        self._answers: dict[Node, bytes] = {}
        self._silent: set[Node] = set()
        self.taken: set[Node] = set()
        self.given: set[Node] = set()

    @property
    def over(self) -> bool:
        """Whether there is nothing more to ask."""
        return not self._bodies

    def _asked(self) -> dict[Node, tuple[Node, Handover]]:
        """Whom the open step asks what, with the node that comes."""
        found = {}
        for node, body in self._bodies.items():
            other, place = self._pairs[node]
            found[other if self._step is Step.GIVE else node] = node, Handover(self._step, place, body)
        return found

    @property
    def waiting(self) -> frozenset[Node]:
        """Nodes that have neither answered nor dropped out."""
        asked = self._asked()
        return frozenset(node for node in asked if asked[node][0] not in self._answers and node not in self._silent)

    @property
    def begun(self) -> bool:
        """Whether a node has answered the open step."""
        return bool(self._answers)

    def requests(self) -> dict[Node, bytes]:
        """The step's request to each node."""
        if self._step is Step.GIVE:
            self.given |= self._asked().keys()
        return {node: asked.to_bytes() for node, (_, asked) in self._asked().items()}

    def receive(self, node: Node, reply: bytes) -> None:
        """Takes an answer.

        Raises:
            CpsgdError: It is refused, and nothing was changed.
        """
        if node not in (asked := self._asked()):
            raise SenderError(f"Node {node} has no part in this stage.")
        comes, request = asked[node]
        if comes in self._answers:
            raise StageError(f"Node {node} has answered before.")
        self._answers[comes] = read_answer(reply, request)

    def drop(self, node: Node) -> None:
        """Waits for this node no longer."""
        self._silent.add(node)

    def close(self) -> None:
        """Ends the step; who has not answered is left out of the next one."""
        if self.over:
            raise StageError("There is no open stage to close.")
        if self._step is Step.TAKE:
            self.taken, self._bodies = set(self._answers), {}
        else:
            self._step, self._bodies = Step(self._step + 1), self._answers
        self._answers, self._silent = {}, set()


class RelayedSession(PipelinedSession[Node]):
    """A round before which lineages are handed on; engines see no difference but a stage more."""

    relay: Relay[Node] | None = None

    @property
    def stage(self) -> Stage | None:
        """What nodes are asked for, or None at the end."""
        found = super().stage
        return Stage.RELAY if found is not None and self._relaying is not None else found

    @property
    def _relaying(self) -> Relay[Node] | None:
        return None if self.relay is None or self.relay.over else self.relay

    def requests(self) -> dict[Node, bytes]:
        """The stage's request to each node; in `RELAY` also to nodes that have no part in the round."""
        return super().requests() if self._relaying is None else self._relaying.requests()

    def receive(self, node: Node, reply: bytes, metrics: Mapping[str, object] | None = None) -> None:
        """Takes a node's answer."""
        if self._relaying is None:
            super().receive(node, reply, metrics)
        else:
            self._relaying.receive(node, reply)

    def count_bytes(self, node: Node, size: int) -> None:
        """Notes how many bytes a node's reply took, those about lineages apart."""
        if self._relaying is None:
            super().count_bytes(node, size)
        else:
            self.report.relay_bytes[node] = self.report.relay_bytes.get(node, 0) + size

    def drop(self, node: Node, reason: str | None) -> None:
        """Notes why an answer is not coming; who hands nothing on is not out of the round for it."""
        if self._relaying is None:
            super().drop(node, reason)
        else:
            self._relaying.drop(node)

    @property
    def waiting(self) -> frozenset[Node]:
        """Nodes that the open stage may still hear from."""
        return super().waiting if self._relaying is None else self._relaying.waiting

    @property
    def enough(self) -> bool:
        """Whether as many have answered as are needed: of those that hand on, one, which shows how long it takes."""
        return super().enough if self._relaying is None else self._relaying.begun

    def close(self, *, early: bool = False) -> bool:
        """Ends the stage."""
        if self._relaying is None:
            return super().close(early=early)
        self._relaying.close()
        return True
