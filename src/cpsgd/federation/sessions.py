"""`RoundSession`: runs a round's exchanges one after the other, and keeps who answered, dropped out or was at fault.

An `Exchange` is the only interface between a round and what carries it. Which exchanges make a round, in which order,
stands in `cpsgd.federation.choreography`.
"""

from __future__ import annotations

import base64
import math
import re
import sys
from collections.abc import Callable, Container, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import CpsgdError, SenderError, ShareError, StageError
from cpsgd.federation.messages import OPENING, REVEALING, TRAINING
from cpsgd.federation.terms import Settlement
from cpsgd.secagg import Stage

_MOST_METRICS = 100
# The error of a client that could not use what another client sent it through the server.
_ACCUSATION = re.compile(r"(?:ShareError|SignatureError): [^0-9]*[Cc]lient (\d{1,9})\b")
_PROOF = re.compile(r" Proof: ([A-Za-z0-9+/]{128})")  # of `cpsgd.secagg.keys`
_CLIENT = re.compile(r"\b([Cc]lient) (\d{1,9})\b")

Node = TypeVar("Node", bound=Hashable)
"""The engine's name of a client: a number or a text."""


class Exchange(Protocol[Node]):
    """Interface of an exchange: one request to each of some nodes, and their answers."""

    @property
    def stage(self) -> str:
        """The stage that this exchange asks for, a value of `Stage`."""

    @property
    def needed(self) -> int:
        """Number of answers after which the session waits for the others only during the grace period."""

    @property
    def binding(self) -> bool:
        """Whether a node that does not answer is out of the round."""

    def requests(self) -> Mapping[Node, bytes]:
        """Returns the request to each node, the same ones until the exchange is closed."""

    def receive(self, node: Node, answer: bytes) -> None:
        """Takes an answer. Raises `CpsgdError`, and changes nothing, if it refuses the answer."""

    def close(self) -> Mapping[Node, str]:
        """Ends the exchange. Returns the nodes that the answers prove to be at fault, with the reasons.

        Raises `CpsgdError`, and changes nothing, if the round cannot go on with the answers so far.
        """


@dataclass
class RoundReport(Generic[Node]):
    """The outcome of a round.

    Attributes:
        round: Number of the round.
        released: Whether a mean was released.
        reason: Why not, where not.
        survivors: Number of clients whose updates are in the sum.
        dropped: Nodes that dropped out, each with the reason.
        stages: The stage at which they did.
        faults: Nodes that are at fault, each with the reason: no honest client sends what they sent, or what others
            prove that they sent. Silence, errors and refusals are no faults.
        metrics: Of a released round, the plain mean of each metric over the nodes that sent it. No guarantee covers
            them.
        measures: Of a released round, private means of metrics (`cpsgd.federation.extras`). The plan's guarantee covers
            them.
        upload_bytes: Bytes of each node's replies in binding exchanges, over all stages.
        accused: Nodes that others accuse of having sent them something wrong, with the accusers. A single accusation
            without a proof proves nothing; accusations by more nodes than may collude do.
        relay_bytes: Bytes of replies in exchanges that are not binding. Nodes outside the round may be among them.
        proved: Nodes whose fault no failing transport explains: they signed or dealt out what no honest client does.
    """

    round: int
    released: bool = False
    reason: str = ""
    survivors: int = 0
    dropped: dict[Node, str] = field(default_factory=dict)
    stages: dict[Node, Stage] = field(default_factory=dict)
    faults: dict[Node, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    measures: dict[str, float] = field(default_factory=dict)
    upload_bytes: dict[Node, int] = field(default_factory=dict)
    accused: dict[Node, list[Node]] = field(default_factory=dict)
    relay_bytes: dict[Node, int] = field(default_factory=dict)
    proved: list[Node] = field(default_factory=list)


class RoundSession(Generic[Node]):
    """One round: while there is a `stage`, send `requests`, `receive` the answers and `close` it; then `release`.

    A node that has not answered when a binding exchange is closed is out of the round. A round is *withheld* if it
    cannot be released under the plan's guarantee: too few clients are left, the budget is spent, or the mean is larger
    than honest clients could make it. Its `stage` is then None at once and `release` returns None; the report says why.
    `cpsgd.federation.carrying` decides how long a stage stays open.

    Attributes:
        report: The outcome so far.
        nodes: Nodes of the round; client i of secure aggregation is the i-th.
        following: The next round, if this one prepares it.
        fewest: Number of nodes without which nothing can be released.
        judge: From an accuser, the accused and a proof to the node that lies, with the reason; None if nothing is
            proved.
    """

    def __init__(
        self,
        nodes: Iterable[Node],
        *,
        round: int = 0,
        colluding: int = 1,
        settlement: Settlement | None = None,
        exchanges: Iterable[Exchange[Node]] = (),
    ) -> None:
        """Opens the first of the exchanges, if they are given here and not to `run`.

        Args:
            nodes: Nodes of the round.
            round: Number of the round.
            colluding: Number of nodes that may lie together; more accusers than that prove a fault.
            settlement: Charges the round and releases its mean; None for a round of which nothing is released here.
            exchanges: The exchanges in order.
        """
        self.nodes: tuple[Node, ...] = tuple(nodes)
        self.report: RoundReport[Node] = RoundReport(round)
        self.following: RoundSession[Node] | None = None
        self.fewest = 0
        self.judge: Callable[[Node, Node, bytes], tuple[Node, str] | None] = lambda accuser, accused, proof: None
        self._colluding, self._settlement = colluding, settlement
        self._exchanges: list[Exchange[Node]] = []  # those that are left, the open one first
        self._requests: Mapping[Node, bytes] = {}  # of the open exchange
        self._answered: set[Node] = set()
        self._silent: set[Node] = set()  # nodes that are not waited for in an exchange that is not binding
        self._refused: dict[Node, str] = {}  # reasons why answers to the open exchange were refused
        self._metrics: dict[Node, dict[str, float]] = {}
        self.run(exchanges)

    def run(self, exchanges: Iterable[Exchange[Node]]) -> None:
        """Opens the first of these exchanges; the others follow when it is closed."""
        self._exchanges = list(exchanges)
        self._open()

    def _open(self) -> None:
        """Opens the next exchange that has requests, and records a reveal before a stage that reveals."""
        self._requests = self._exchanges[0].requests() if self._exchanges else {}
        while self._exchanges and not self._exchanges[0].binding and not self._requests:
            self._exchanges.pop(0)
            self._requests = self._exchanges[0].requests() if self._exchanges else {}
        self._answered, self._silent, self._refused = set(), set(), {}
        if self._settlement is not None and self.stage in REVEALING:
            self._settlement.reveal()

    # ------------------------------------------------------------------ the open exchange

    @property
    def stage(self) -> Stage | None:
        """The open exchange's stage, or None at the end."""
        return Stage(self._exchanges[0].stage) if self._exchanges else None

    @property
    def _out(self) -> Container[Node]:
        """Nodes that have no part in the open exchange any more."""
        return self.report.dropped if self._exchanges and self._exchanges[0].binding else self._silent

    @property
    def waiting(self) -> frozenset[Node]:
        """Nodes that have neither answered the open exchange nor dropped out."""
        out = self._out
        return frozenset(node for node in self._requests if node not in self._answered and node not in out)

    @property
    def enough(self) -> bool:
        """Whether the open exchange has the number of answers it needs; `close` checks whether they suffice."""
        return bool(self._exchanges) and len(self._answered) >= self._exchanges[0].needed

    def requests(self) -> dict[Node, bytes]:
        """Returns the open exchange's request to each node that is still in the round.

        Once it has returned requests to train, a round that is withheld stays charged.

        Raises:
            StageError: The round asks for something about the data, and is not charged yet.
        """
        if self._settlement is not None and self.stage in TRAINING:
            self._settlement.ask()
        out = self._out
        return {node: request for node, request in self._requests.items() if node not in out}

    def receive(self, node: Node, reply: bytes, metrics: Mapping[str, object] | None = None) -> None:
        """Takes a node's answer. The engine must know that it is from this node.

        Of `metrics`, where clients train, single finite numbers are kept, at most 100 of them.

        Raises:
            CpsgdError: The answer is refused and nothing was changed. The node may answer properly as long as the
                exchange is open, or be dropped.
        """
        if not self._exchanges:
            raise StageError("There is no open stage to answer.")
        exchange = self._exchanges[0]
        if node not in self._requests or (exchange.binding and node in self.report.dropped):
            raise SenderError(f"Node {node} has no part in this stage.")
        if node in self._answered:
            raise StageError(f"Node {node} has answered before.")
        try:
            exchange.receive(node, reply)
        except CpsgdError as error:
            self._refused[node] = f"{type(error).__name__}: {error}"
            raise
        self._answered.add(node)
        if self.stage in TRAINING:
            self._metrics[node] = _finite(metrics or {})

    def count_bytes(self, node: Node, size: int) -> None:
        """Adds the size of a node's reply, as the engine measured it, to the report.

        It counts as `relay_bytes` during an exchange that is not binding, otherwise as `upload_bytes`.
        """
        binding = not self._exchanges or self._exchanges[0].binding
        counts = self.report.upload_bytes if binding else self.report.relay_bytes
        counts[node] = counts.get(node, 0) + size

    def drop(self, node: Node, reason: str | None) -> None:
        """Waits for a node no longer. The first reason is noted; an answer that was taken stays taken.

        The reason may be a stranger's text, or a traceback: its last line is kept, without unprintable characters.
        """
        if not self._exchanges or node in self._answered:
            return
        if not self._exchanges[0].binding:
            self._silent.add(node)
            return
        lines = [line for line in (reason or "").splitlines() if line.strip()]
        shown = "".join(letter for letter in (lines[-1] if lines else "an error")[:300] if letter.isprintable())
        proof, shown = _PROOF.search(shown), _PROOF.sub("", shown)
        self._note(node, shown, self._exchanges[0].stage)
        self._accuse(node, shown, base64.b64decode(proof[1]) if proof else b"")

    def close(self, *, early: bool = False) -> bool:
        """Ends the open exchange. Withholds the round if it cannot go on with those who answered.

        Args:
            early: Ends it only if the round can go on without the others. Otherwise nothing is changed.

        Returns:
            Whether the exchange has ended.
        """
        if not self._exchanges:
            raise StageError("There is no open stage to close.")
        exchange, asked, answered = self._exchanges[0], self._requests, self._answered
        # A node that has sent a right answer since has made up for a wrong one.
        refused = {node: reason for node, reason in self._refused.items() if node not in answered}
        proved: Mapping[Node, str] = {}
        try:
            proved = exchange.close()
        except CpsgdError as error:
            if early and self.waiting:
                return False
            if isinstance(error, ShareError) and error.dealer is not None:
                self._blame(self.nodes[error.dealer], str(error), proved=True)
            self.withhold(error)
        else:
            self._exchanges.pop(0)
            self._open()
        if exchange.binding:
            for node in asked:
                if node not in answered:
                    self._note(node, "no answer in time", exchange.stage)
            for node, reason in {**refused, **proved}.items():
                self._blame(node, reason)
            if self._exchanges:
                for node in asked:
                    if node in answered and node not in self._requests:
                        self._note(node, "too few of its neighbours are left", exchange.stage)
        return True

    # ------------------------------------------------------------------ charge and release

    def charge(
        self, present: Container[Node], charged_to: str | None = None, revealing: Callable[[], None] | None = None
    ) -> None:
        """Begins a round that was prepared ahead: charges it, and drops the nodes that are not present any more.

        Raises:
            StageError: The round is charged already, or is not prepared.
        """
        if self._settlement is None or not self.is_prepared:
            raise StageError("A round is charged once, when it is prepared.")
        for node in self.waiting:
            if node not in present:
                self.drop(node, "it has left since the round was prepared")
        try:
            self._settlement.charge(charged_to, revealing)
        except CpsgdError as error:
            self.withhold(error)

    @property
    def is_prepared(self) -> bool:
        """Whether the round waits for its charge, with everything done that comes before."""
        return self._settlement is not None and not self._settlement.charged and self.stage in TRAINING

    @property
    def prepared(self) -> RoundSession[Node] | None:
        """The next round, once this round is over and the next one is prepared; else None."""
        following = self.following
        return following if self.stage is None and following is not None and following.is_prepared else None

    def release(self) -> NDArray[np.float32] | None:
        """Returns the mean of the updates, once, if the ledger permits it; None if the round is withheld.

        The release is recorded on the ledger, if there is one, before this returns.

        Raises:
            StageError: A stage is open, or the mean was released before.
        """
        if self._exchanges or self.report.released:
            raise StageError("The mean is released once, after the last stage.")
        if self._settlement is None or self.report.reason:
            return None
        try:
            self.report.survivors = self._settlement.survivors
            mean = self._settlement.release()
        except CpsgdError as error:
            self.withhold(error)
            return None
        self.report.released = True
        for name in sorted({name for metrics in self._metrics.values() for name in metrics}):
            values = [metrics[name] for metrics in self._metrics.values() if name in metrics]
            self.report.metrics[name] = math.fsum(value / len(values) for value in values)  # a sum may be infinite
        return mean

    def withhold(self, error: CpsgdError) -> None:
        """Ends the round without a release; its charge is given up if nothing about the data was asked for."""
        self.report.reason = self._named(str(error))
        self._exchanges, self._requests = [], {}
        if self._settlement is not None:
            self._settlement.abandon()

    # ------------------------------------------------------------------ dropouts and faults

    def _note(self, node: Node, reason: str, stage: str) -> None:
        if node not in self.report.dropped:
            self.report.dropped[node] = self._named(reason)
            self.report.stages[node] = Stage(stage)

    def _blame(self, node: Node, offence: str, *, proved: bool = False) -> None:
        """Notes a fault; `proved` if no failing transport explains it."""
        self.report.faults.setdefault(node, self._named(offence))
        if proved and node not in self.report.proved:
            self.report.proved.append(node)

    def _accuse(self, accuser: Node, reason: str, proof: bytes) -> None:
        """Records an accusation: a node says that another node sent it something wrong. A proof decides who lies.

        Without a proof a single accusation means nothing. If there are more accusers than may collude, one of them is
        honest, so the accused is at fault. Before the first stage is closed nobody was sent anything: an accuser then
        need not even have keys, or be on the roster.
        """
        found = None if self.stage in OPENING else _ACCUSATION.match(reason)
        number = int(found[1]) if found else -1
        if not 0 <= number < len(self.nodes) or accuser not in self.nodes or self.nodes[number] == accuser:
            return
        accused = self.nodes[number]
        if (verdict := self.judge(accuser, accused, proof)) is not None:
            self._blame(*verdict, proved=True)
            return
        accusers = self.report.accused.setdefault(accused, [])
        if accuser not in accusers:
            accusers.append(accuser)
        if len(accusers) > self._colluding:
            self._blame(accused, f"{len(accusers)} others say: {reason}")

    def _named(self, text: str) -> str:
        """Adds the node's name after each client number: numbers are drawn anew in every round, names stay."""

        def named(found: re.Match[str]) -> str:
            number = int(found[2])
            return f"{found[0]} (node {self.nodes[number]})" if number < len(self.nodes) else found[0]

        return _CLIENT.sub(named, text)


def _finite(metrics: Mapping[str, object]) -> dict[str, float]:
    """Returns the single finite numbers among a client's metrics, at most 100 of them."""
    named = ((name, value) for name, value in metrics.items() if isinstance(name, str))
    numbers = ((name, value) for name, value in named if isinstance(value, int | float))
    finite = ((name, float(value)) for name, value in numbers if abs(value) <= sys.float_info.max)
    return dict(islice(finite, _MOST_METRICS))
