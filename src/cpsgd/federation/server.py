"""`ServerSession`: the server's side of a round. Says what to send to whom, takes the answers, and releases a mean."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import (
    CpsgdError,
    ImplausibleMeanError,
    LedgerError,
    ParameterError,
    SenderError,
    ShareError,
    StageError,
    ThresholdError,
    WireError,
)
from cpsgd.federation.messages import OPENING, TRAINING, Request
from cpsgd.federation.plausibility import FALSE_ALARM, largest_norm
from cpsgd.federation.sums import MaskedSum, PlainSum
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Entry
from cpsgd.secagg import Stage

_MOST_METRICS = 100
# What a client says that could not use what another one sent it through the server.
_ACCUSATION = re.compile(r"(?:ShareError|SignatureError): [^0-9]*[Cc]lient (\d{1,9})\b")
_CLIENT = re.compile(r"\b([Cc]lient) (\d{1,9})\b")

Node = TypeVar("Node", bound=Hashable)
"""What the engine calls a client: a number, a name."""


@dataclass
class RoundReport(Generic[Node]):
    """What became of a round.

    Attributes:
        round: Number of the round.
        released: Whether a mean came of it.
        reason: Why not, where not.
        survivors: Clients whose updates are in the sum.
        dropped: Nodes that dropped out on the way, and why.
        stages: At which stage they did.
        faults: Nodes that are at fault and in which way: what they sent, or what others prove about it, no honest
            client sends. Silence, errors and refusals are no faults.
        metrics: Of a released round, the plain mean of each metric over the nodes that sent it; no guarantee covers
            them.
        measures: Of a released round, private means that ride on the updates (`cpsgd.federation.extras`); the plan's
            guarantee covers them.
        upload_bytes: Bytes that each node's replies took, over all stages.
        relay_bytes: Those of replies about lineages of noise that are handed on, also of nodes that have no part in the
            round.
        accused: Nodes of which others say that they sent them something wrong, and who says so. Anybody may say so;
            more than may collude prove it.
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


class ServerSession(Generic[Node]):
    """One round: while there is a `stage`, send `requests`, `receive` the answers and `close` it; then `release`.

    Whoever has not answered when a stage is closed is out of the round. A round is *withheld* where something keeps it
    from being released under the plan's guarantee: too few clients, or no budget; also where the mean is larger than
    honest clients could have made it. Its `stage` is then None at once and `release` returns None; the report says why.
    How long a stage stays open is for the engine to say, by `cpsgd.federation.pacing`.

    Attributes:
        report: What has become of the round so far.
    """

    def __init__(
        self,
        terms: Terms,
        round: int,
        nodes: Sequence[Node],
        *,
        run: str,
        charged_to: str | None = None,
        course: str = "",
        revealing: Callable[[], None] | None = None,
        ahead: bool = False,
    ) -> None:
        """Charges the round to the ledger: from here on it counts as spent, also if it is never ended.

        Only where it is withheld before anything about the data was asked for, the charge is given up.

        Args:
            terms: What the round is held to.
            round: Its number.
            nodes: Who takes part, at most as many as the plan has clients. With a roster the round is for all who are
                on it: those without a node have dropped out from the beginning. Which node is which of them does not
                matter, for they sign what they say with their number.
            run: The engine's name of the run, the same on the clients.
            charged_to: An earlier run that charged this round and stopped before `revealing` was called: it is not
                charged again.
            course: The run that began with the first of these rounds, if it is another one than `run`.
            revealing: Called once, before anything is asked for that reveals the sum.
            ahead: Prepares a round of secure aggregation while another one runs: keys and shares are exchanged, and
                nothing about the data is asked for before `charge`. `charged_to` and `revealing` are then for that.

        Raises:
            ParameterError: There are too many nodes, or one of them twice.
        """
        plan = terms.plan
        if len(set(nodes)) != len(nodes) or len(nodes) > plan.protocol.clients:
            raise ParameterError(f"Expected at most {plan.protocol.clients} different nodes, got {len(nodes)}.")
        self.report: RoundReport[Node] = RoundReport(round)
        self._terms, self._nodes, self._run, self._course = terms, list(nodes), run, course
        self._numbers = {node: client for client, node in enumerate(nodes)}
        self._answered: set[int] = set()
        self._metrics: dict[int, dict[str, float]] = {}
        self._refused: dict[int, str] = {}  # what was wrong with answers to the open stage
        self._entry: Entry | None = None
        # Whether anything about the data was asked for; an earlier run that charged the round may have done so.
        self._asked = charged_to is not None
        self._charged = not ahead
        self._revealing = revealing or (lambda: None)
        self._sum: MaskedSum | PlainSum | None = None
        try:
            if len(nodes) < plan.surviving:
                raise ThresholdError(f"{len(nodes)} nodes are connected, and the plan needs {plan.surviving}")
            if not ahead:
                self._entry = terms.reserve(round, run, charged_to, course)
            if terms.secure:
                self._sum = MaskedSum(terms, round, len(nodes), run, ahead=ahead)
            else:
                self._sum = PlainSum(terms, round, len(nodes))
                self._revealing()
        except CpsgdError as error:
            self._withhold(error)

    def charge(
        self, present: Container[Node], charged_to: str | None = None, revealing: Callable[[], None] | None = None
    ) -> None:
        """Begins a round that was prepared ahead: charges it, and drops the nodes that are not present any more.

        Raises:
            StageError: It is charged, or its preparation has not come to an end.
        """
        if self._charged or self.stage is not Stage.MASK:
            raise StageError("A round is charged once, when it is prepared.")
        self._charged, self._revealing = True, revealing or self._revealing
        self._asked |= charged_to is not None
        for node in self.waiting:
            if node not in present:
                self.drop(node, "it has left since the round was prepared")
        try:
            self._entry = self._terms.reserve(self.report.round, self._run, charged_to, self._course)
        except CpsgdError as error:
            self._withhold(error)

    @property
    def stage(self) -> Stage | None:
        """What the clients are asked for, or None at the end."""
        return None if self._sum is None or self._sum.stage is Stage.DONE else self._sum.stage

    @property
    def nodes(self) -> tuple[Node, ...]:
        """Who was to take part."""
        return tuple(self._nodes)

    def requests(self) -> dict[Node, bytes]:
        """The stage's request to each node that is still in the round."""
        stage, open_sum, plan = self.stage, self._sum, self._terms.plan
        if stage is None or open_sum is None:
            return {}
        if not self._charged and stage in TRAINING:
            raise StageError("Nothing about the data is asked for before the round is charged.")
        self._asked |= stage in TRAINING
        protocol = plan.protocol.to_json() if stage in OPENING else ""
        return {
            self._nodes[client]: Request(
                stage=stage,
                round=self.report.round,
                rounds=plan.rounds,
                surviving=plan.surviving,
                protocol=protocol,
                payload=payload,
                examples=self._terms.examples or 0,
            ).to_bytes()
            for client, payload in open_sum.outgoing.items()
            if self._nodes[client] not in self.report.dropped
        }

    def receive(self, node: Node, reply: bytes, metrics: Mapping[str, object] | None = None) -> None:
        """Takes a node's answer; that it is from this node, the engine must know.

        Of `metrics`, where clients train, single finite numbers are kept, at most 100 of them.

        Raises:
            CpsgdError: It is refused and nothing was changed. The node may answer properly as long as the stage is
                open, or be dropped.
        """
        if self.stage is None or self._sum is None:
            raise StageError("There is no open stage to answer.")
        client = self._numbers.get(node, -1)
        if client not in self._sum.outgoing or node in self.report.dropped:
            raise SenderError(f"Node {node} has no part in this stage.")
        if client in self._answered:
            raise StageError(f"Node {node} has answered before.")
        try:
            if not isinstance(reply, bytes) or len(reply) > self._sum.reply_limit:
                size = f"{len(reply)} bytes" if isinstance(reply, bytes) else "no bytes"
                raise WireError(f"The upload has {size}; no honest one has more than {self._sum.reply_limit}.")
            self._sum.receive(client, reply)
        except CpsgdError as error:
            self._refused[client] = f"{type(error).__name__}: {error}"
            raise
        self._answered.add(client)
        if self.stage in TRAINING:
            named = ((name, value) for name, value in (metrics or {}).items() if isinstance(name, str))
            numbers = ((name, value) for name, value in named if isinstance(value, int | float))
            finite = ((name, float(value)) for name, value in numbers if abs(value) <= sys.float_info.max)
            self._metrics[client] = dict(islice(finite, _MOST_METRICS))

    def count_bytes(self, node: Node, size: int) -> None:
        """Notes how many bytes a node's reply took on the way; for the engine to say."""
        self.report.upload_bytes[node] = self.report.upload_bytes.get(node, 0) + size

    def drop(self, node: Node, reason: str | None) -> None:
        """Notes the first reason why a node's answer is not coming; one that was taken stays taken.

        The reason may be a stranger's text, and a traceback: its last line is kept, as far as it is fit for a log.
        """
        lines = [line for line in (reason or "").splitlines() if line.strip()]
        client = self._numbers.get(node, -1)
        if self.stage is not None and client not in self._answered:
            shown = "".join(letter for letter in (lines[-1] if lines else "an error")[:300] if letter.isprintable())
            self._note(node, shown, self.stage)
            self._accuse(client, shown)

    @property
    def waiting(self) -> frozenset[Node]:
        """Nodes that the open stage may still hear from: they have neither answered nor dropped out."""
        if self.stage is None or self._sum is None:
            return frozenset()
        nodes = {self._nodes[client] for client in self._sum.outgoing.keys() - self._answered}
        return frozenset(nodes - self.report.dropped.keys())

    @property
    def enough(self) -> bool:
        """Whether as many have answered the open stage as it needs; see `close` for whether they suffice."""
        return self.stage is not None and self._sum is not None and len(self._answered) >= self._sum.needed

    def close(self, *, early: bool = False) -> bool:
        """Ends the stage. Whoever has not answered is out; where too few are left, the round is withheld.

        Args:
            early: Ends it only if the round can go on without the others. Otherwise nothing is changed, and the stage
                stays open.

        Returns:
            Whether the stage has ended.
        """
        stage, open_sum = self.stage, self._sum
        if stage is None or open_sum is None:
            raise StageError("There is no open stage to close.")
        asked = open_sum.outgoing.keys()
        try:
            open_sum.advance()
        except CpsgdError as error:
            if early and self.waiting:
                return False
            if isinstance(error, ShareError) and error.dealer is not None:
                self._blame(error.dealer, str(error))
            self._withhold(error)
        for client in asked - self._answered:
            self._note(self._nodes[client], "no answer in time", stage)
        # Who has sent a right answer since has made up for a wrong one.
        wrong = {client: text for client, text in self._refused.items() if client not in self._answered}
        for client, offence in {**wrong, **open_sum.offences}.items():
            self._blame(client, offence)
        self._refused = {}
        if self.stage is not None:
            for client in self._answered - open_sum.outgoing.keys():
                self._note(self._nodes[client], "too few of its neighbours are left", stage)
        self._answered = set()
        if self.stage is Stage.UNMASK:
            self._revealing()
        return True

    def release(self) -> NDArray[np.float32] | None:
        """The mean of the updates, once, with the ledger's leave; None where the round is withheld.

        Raises:
            StageError: A stage is open, or the mean was released before.
        """
        if self.stage is not None or self.report.released:
            raise StageError("The mean is released once, after the last stage.")
        if self._sum is None:
            return None
        found, self._sum = self._sum, None
        try:
            self.report.survivors = found.survivors
            if found.survivors < self._terms.plan.surviving:
                raise ThresholdError(
                    f"{found.survivors} clients are left, and the plan needs {self._terms.plan.surviving}"
                )
            mean = found.mean()
            self._check_plausible(mean, found.survivors)
            if self._terms.ledger is not None and self._entry is not None:
                self._terms.ledger.release(self._entry, survivors=found.survivors)
        except CpsgdError as error:
            self._withhold(error)
            return None
        self.report.released = True
        names = sorted({name for metrics in self._metrics.values() for name in metrics})
        for name in names:
            values = [metrics[name] for metrics in self._metrics.values() if name in metrics]
            self.report.metrics[name] = math.fsum(value / len(values) for value in values)  # a sum may be infinite
        return mean

    def _check_plausible(self, mean: NDArray[np.float32], survivors: int) -> None:
        norm, most = float(np.linalg.norm(mean)), largest_norm(self._terms.plan.protocol, survivors)
        if not norm <= most:
            raise ImplausibleMeanError(
                f"The mean has norm {norm:.4g}, and that of honest clients has more than {most:.4g} with a probability "
                f"of at most {FALSE_ALARM:g} only: some client sent what no honest one sends"
            )

    # ------------------------------------------------------------------ who did what

    def _note(self, node: Node, reason: str, stage: Stage) -> None:
        if node not in self.report.dropped:
            self.report.dropped[node], self.report.stages[node] = self._named(reason), stage

    def _blame(self, client: int, offence: str) -> None:
        """Notes a fault that is proved."""
        self.report.faults.setdefault(self._nodes[client], self._named(offence))

    def _accuse(self, accuser: int, reason: str) -> None:
        """Notes that a client says it was sent something wrong by another.

        Anybody may say so. But of more accusers than may collude one is honest, and the accused is at fault. Before the
        first stage is closed nobody was sent anything: who speaks then need not even have keys, or be on the roster.
        """
        found = None if self.stage in OPENING else _ACCUSATION.match(reason)
        accused = int(found[1]) if found else -1
        if 0 <= accused < len(self._nodes) and accused != accuser:
            accusers = self.report.accused.setdefault(self._nodes[accused], [])
            if self._nodes[accuser] not in accusers:
                accusers.append(self._nodes[accuser])
            if len(accusers) > self._terms.plan.colluding:
                self._blame(accused, f"{len(accusers)} others say: {reason}")

    def _named(self, text: str) -> str:
        """Numbers of clients are drawn anew in every round; nodes keep their names."""
        known = len(self._nodes)

        def name(found: re.Match[str]) -> str:
            number = int(found[2])
            return f"{found[0]} (node {self._nodes[number]})" if number < known else found[0]

        return _CLIENT.sub(name, text)

    def _withhold(self, error: CpsgdError) -> None:
        self.report.reason, self._sum = self._named(str(error)), None
        if self._terms.ledger is not None and self._entry is not None and not self._asked:
            # No client has drawn noise or sent anything that depends on its data. If the ledger does not take it, the
            # round stays spent.
            with suppress(LedgerError):
                self._terms.ledger.abandon(self._entry, "withheld before anything about the data was asked for")
