"""`PipelinedSession`: a round that prepares the next one on the way, so that the next takes three exchanges, not five.

Of the five exchanges of secure aggregation the first two, keys and shares, have nothing to do with the data. For round
r + 1 they are made together with the last two of round r:

| exchange | of round r | of round r + 1 |
|---|---|---|
| 1 | mask | |
| 2 | confirm | advertise |
| 3 | unmask | share |

The next round is a session of its own, made `ahead`. It is not charged, knows nothing of this one, and is as strict as
any other; all that is shared are messages (`cpsgd.federation.messages.Pair`). Invited are the nodes whose updates came.
Whoever does not answer for the next round has dropped out of that, whatever it does in this one. Where too few are
left, nothing is prepared, and the next round begins from the beginning. See docs/secure-aggregation.md for why this is
as secure.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from contextlib import suppress

from cpsgd.errors import CpsgdError, WireError
from cpsgd.federation.messages import AHEAD, Pair
from cpsgd.federation.server import Node, ServerSession
from cpsgd.federation.sums import MaskedSum
from cpsgd.secagg import Stage


class PipelinedSession(ServerSession[Node]):
    """A `ServerSession` that prepares the next round on the way; engines see no difference.

    The plan's last round prepares none, nor does one whose nodes may not be in the next.

    Attributes:
        prepared: The next round at the end of this one, to be charged and gone on with; None if it is to begin from the
            beginning.
    """

    _next: PipelinedSession[Node] | None = None

    @property
    def prepared(self) -> PipelinedSession[Node] | None:
        """The next round, when this one is at its end and that one is prepared."""
        found = self._next
        return found if self.stage is None and found is not None and found.stage is Stage.MASK else None

    def can_go_on(self, present: Container[Node], spare: int = 0) -> bool:
        """Whether enough of those who prepared the round are present, and so many to spare."""
        found = self._sum
        there = sum(node in present for node in self.waiting)
        return isinstance(found, MaskedSum) and there >= found.fewest + spare

    def requests(self) -> dict[Node, bytes]:
        """The stage's request to each node, with that of the next round where it is prepared."""
        found = super().requests()
        ahead = self._next.requests() if found and self._next is not None else {}
        return {
            node: Pair(request, ahead[node]).to_bytes() if node in ahead else request for node, request in found.items()
        }

    def receive(self, node: Node, reply: bytes, metrics: Mapping[str, object] | None = None) -> None:
        """Takes a node's answer; what is wrong with its second half costs the node its part in the next round only."""
        pair = None
        if self._next is not None and Pair.begins(reply):
            with suppress(WireError):  # it is refused below, as what is no message of this stage
                pair = Pair.from_bytes(reply)
        super().receive(node, reply if pair is None else pair.first, metrics)
        if pair is not None and self._next is not None:
            self._next.take(node, pair)

    def take(self, node: Node, pair: Pair) -> None:
        """Takes the second half of an answer."""
        if pair.refused:
            self.drop(node, pair.reason)
            return
        try:
            self.receive(node, pair.second)
        except CpsgdError as error:
            self.drop(node, f"{type(error).__name__}: {error}")

    def close(self, *, early: bool = False) -> bool:
        """Ends the stage, and with it that of the next round."""
        if not super().close(early=early):
            return False
        if self._next is not None:
            self._advance(self._next)
        following = self.report.round + 1
        if self.stage is Stage.CONFIRM and following <= self._terms.plan.rounds and self._terms.apart == 1:
            left = self.waiting
            nodes = [node for node in self._nodes if node in left]
            self._next = PipelinedSession(self._terms, following, nodes, run=self._run, course=self._course, ahead=True)
        return True

    def _advance(self, following: PipelinedSession[Node]) -> None:
        """Ends the next round's stage; gives it up where it cannot go on."""
        if following.stage in AHEAD.values():
            following.close()
        # What came along with this round's messages counts also if the next round is given up.
        report, ahead = self.report, following.report
        faults, ahead.faults = ahead.faults, {}
        for node, fault in faults.items():
            report.faults.setdefault(node, f"for the next round: {fault}")
        accused, ahead.accused = ahead.accused, {}
        for node, accusers in accused.items():
            report.accused[node] = list(dict.fromkeys([*report.accused.get(node, []), *accusers]))
        if following.stage is None or (self.stage is None and following.stage is not Stage.MASK):
            self._next = None
