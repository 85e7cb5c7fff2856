"""`PairSum`: a round whose one exchange is a sealed message to two servers; and what it needs of both and of a client.

The federation's server is the leader (`cpsgd.engines.pair.in_federation.PairLeader`), the helper stands outside of it.
Clients take the task, with both servers' keys, from their operator's file and never from the server.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import MessageError, SenderError, ThresholdError
from cpsgd.protocol import Protocol as PlannedProtocol
from cpsgd.secagg import Stage

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    from cpsgd.federation.terms import Terms

Node = TypeVar("Node", bound=Hashable)
_MAGIC = b"cpsgd pair 1"
# Reports that the helper is asked about at once.
_BATCH = 32


def asks_for(task: bytes) -> bytes:
    """Returns the payload of a request for a message to the two servers of a task."""
    return _MAGIC + task


def asks_for_one(payload: bytes) -> bool:
    """Returns whether a request's payload asks for a message to two servers, of any task."""
    return payload.startswith(_MAGIC)


class ClientTask(Protocol):
    """Interface of a two-server task on a client."""

    @property
    def fingerprint(self) -> bytes:
        """32 bytes that identify the task."""

    @property
    def protocol(self) -> PlannedProtocol:
        """The task's protocol."""

    def upload(self, values: NDArray[np.uint32], round: int, *, identity: Ed25519PrivateKey | None) -> bytes:
        """Returns the sealed message of a client for its integers."""


class PairServers(Protocol):
    """Interface of both servers for the federation's server, which is the leader; the helper runs elsewhere."""

    @property
    def task(self) -> ClientTask:
        """The task: protocol, rounds and both servers."""

    @property
    def rounds(self) -> int:
        """Rounds of the task."""

    @property
    def upload_bytes(self) -> int:
        """Length of every upload."""

    def begin(self, round: int) -> None:
        """Ends all earlier rounds at both servers. Raises `CpsgdError` if this one is ended already."""

    def read(self, upload: bytes) -> Any:
        """Returns a report that the leader has found in order. Raises `CpsgdError` if it is not."""

    def settle(self, reports: Sequence[Any]) -> list[str]:
        """Asks the helper about reports; returns the reason of each refusal, empty if accepted."""

    def accepted(self, round: int) -> int:
        """Returns the number of reports that are in the leader's sum."""

    def finish(self, round: int) -> tuple[NDArray[np.uint32], int]:
        """Ends the round at both servers; returns the sum of all accepted reports and their number."""


class PairSum(Generic[Node]):
    """A round of one exchange: messages to two servers. Round r of a federation is round r - 1 of the task."""

    stage, binding = Stage.UPLOAD, True

    def __init__(
        self,
        servers: PairServers,
        terms: Terms,
        round: int,
        nodes: Sequence[Node],
        request: Callable[[bytes], bytes],
    ) -> None:
        """Ends earlier rounds at both servers; `request` makes a request of its payload.

        Raises:
            CpsgdError: The round was ended before, or the helper does not answer.
        """
        self._servers, self._round, self._number = servers, round - 1, terms.memory.number(round)
        self.needed = self.fewest = terms.surviving
        servers.begin(self._round)
        self._requests = dict.fromkeys(nodes, request(asks_for(servers.task.fingerprint)))
        self._waiting: dict[Node, Any] = {}  # reports that the helper was not asked about yet
        self._refused: dict[Node, str] = {}
        self._sums: tuple[NDArray[np.uint32], int] | None = None

    @property
    def exchanges(self) -> list[PairSum[Node]]:
        """The round's only exchange, this object itself: clients send one message to both servers."""
        return [self]

    def requests(self) -> Mapping[Node, bytes]:
        """Returns the same request for all nodes."""
        return self._requests

    def receive(self, node: Node, answer: bytes) -> None:
        """Takes an upload; uploads are settled with the helper in batches."""
        if not isinstance(answer, bytes) or len(answer) != self._servers.upload_bytes:
            raise MessageError(f"Expected an upload of {self._servers.upload_bytes} bytes.")
        report = self._servers.read(answer)
        if any(report.id == other.id for other in self._waiting.values()):
            raise SenderError("Another node has sent this report.")
        self._waiting[node] = report
        if len(self._waiting) >= _BATCH:
            self._settle()

    def _settle(self) -> None:
        if self._waiting:
            reasons = self._servers.settle(list(self._waiting.values()))
            self._refused |= {node: why for node, why in zip(self._waiting, reasons, strict=True) if why}
            self._waiting = {}

    def close(self) -> Mapping[Node, str]:
        """Ends the round at both servers. Returns the nodes whose reports they refused.

        Raises:
            ThresholdError: Too few reports were accepted; the round is still open.
        """
        self._settle()
        if (found := self._servers.accepted(self._round)) < self.needed:
            raise ThresholdError(f"{found} reports were accepted, and {self.needed} are needed")
        self._sums = self._servers.finish(self._round)
        return self._refused

    @property
    def survivors(self) -> int:
        """Number of clients whose messages are in the sum."""
        return 0 if self._sums is None else self._sums[1]

    def mean(self) -> NDArray[np.float32]:
        """Returns the decoded mean."""
        assert self._sums is not None  # only asked for at the end of the round
        return self._servers.task.protocol.decode_sum(self._sums[0], self._sums[1], self._number)
