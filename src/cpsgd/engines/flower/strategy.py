"""`CpsgdStrategy`: the server's side. Runs rounds of secure aggregation over Flower and releases private means only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.engines.flower import _records
from cpsgd.engines.flower._carriers import Carrier, PlainCarrier, SecureCarrier, secure_parameters
from cpsgd.engines.flower._exchange import exchange
from cpsgd.errors import CpsgdError, ParameterError
from cpsgd.ledger import Entry, Ledger, RoundEvent
from cpsgd.planner import Plan
from cpsgd.secagg.identity import as_roster

Apply = Callable[[NDArray[np.float32], NDArray[np.float32], int], NDArray[np.float32]]
"""From the model, the mean update and the round's number to the next model, all as flat vectors."""

_NODE_POLL_SECONDS = 0.5
_log = getLogger("flwr")


@dataclass
class RoundReport:
    """What became of a round.

    Attributes:
        round: Number of the round.
        released: Whether a new model came of it.
        reason: Why not, where not.
        survivors: Clients whose updates are in the sum.
        dropped: Nodes that fell out on the way, and why.
        upload_bytes: Bytes that each node's replies took, over all stages.
    """

    round: int
    released: bool = False
    reason: str = ""
    survivors: int = 0
    dropped: dict[int, str] = field(default_factory=dict)
    upload_bytes: dict[int, int] = field(default_factory=dict)

    def drop(self, node: int, reason: str) -> None:
        """Notes the first reason why a node is out."""
        self.dropped.setdefault(node, reason)


class CpsgdStrategy(Strategy):
    """A Flower strategy that adds the private mean of the clients' updates to the model.

    Every client counts the same. A round is *withheld*, and the model stays as it was, where fewer clients than
    `plan.surviving` are left: their noise would be too little for the plan's guarantee.

    Attributes:
        reports: What became of each round so far.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        secure: bool = True,
        apply: Apply | None = None,
        ledger: Ledger | None = None,
        population: str | None = None,
        examples: int | None = None,
        roster: Iterable[bytes] | None = None,
        node_timeout: float = 300.0,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        weighted_by_key: str | None = None,
    ) -> None:
        """Takes the plan that clients will be held to.

        Args:
            plan: From `cpsgd.plan(..., secure=True)`, or `example_plan` for single examples.
            secure: Sums by secure aggregation. Without, the server sees each client's noisy message, and clients must
                agree (`cpsgd_mod(secure=False)`).
            apply: What the mean update does to the model; by default it is added. Privacy does not depend on it.
            ledger: Where every round's cost is written down before its model is handed out.
            population: The ledger's name of the clients; needed with a ledger.
            examples: With a plan for single examples, how many a silo's sum holds at most. Clients that are set up for
                another number refuse.
            roster: Public keys of all clients, from `cpsgd.secagg.read_roster`; as many as the plan has clients. Rounds
                are then signed, which takes one exchange more. It protects clients that have the same roster; those
                without one refuse.
            node_timeout: Seconds that a round waits for nodes to connect.
            arrayrecord_key: Name of the model in messages.
            configrecord_key: Name of the app's settings in messages.
            weighted_by_key: Refused, see below.

        Raises:
            ParameterError: Weighted averages were asked for, or the plan does not fit the way of summing.
            InfeasibleError: The plan's dropouts and colluding clients are more than secure aggregation stands.
        """
        if weighted_by_key is not None:
            raise ParameterError(
                f"weighted_by_key={weighted_by_key!r}: weighted averages are refused. A weight multiplies what one "
                "client can move the mean by, so the plan's noise would no longer hide it, and the weights themselves "
                "(numbers of examples) would be published. Every client counts the same here; to count examples the "
                "same, use example-level privacy: examples=..., where each silo sends a sum."
            )
        if plan.participation.scheme != "every":
            raise ParameterError(
                f"The plan is for participation {str(plan.participation)!r}, and here the same nodes may be in every "
                'round; plan with participation="every".'
            )
        if (ledger is None) != (population is None):
            raise ParameterError("Give ledger and population together.")
        self._roster = None if roster is None else as_roster(roster)
        if self._roster is not None and (not secure or len(self._roster) != plan.protocol.clients):
            raise ParameterError(
                f"A roster is for secure aggregation among everybody on it: {len(self._roster)} are, and the plan is "
                f"for clients={plan.protocol.clients} with secure={secure}."
            )
        if secure:
            secure_parameters(plan, 0, plan.protocol.clients, complete=self._roster is not None)
        self.plan = plan
        self.reports: list[RoundReport] = []
        self._secure = secure
        self._apply = apply or _add
        self._ledger = ledger
        self._population = population
        self._examples = None if examples is None else _validate.integer("examples", examples, low=1)
        self._node_timeout = _validate.positive("node_timeout", node_timeout)
        self._timeout = 3600.0
        self._keys = arrayrecord_key, configrecord_key
        self._open: tuple[ArrayRecord, ConfigRecord, Grid] | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Runs `num_rounds` rounds; see Flower's `Strategy.start`.

        `timeout` is how long each stage of a round waits for answers. Evaluate with `evaluate_fn` on data of the
        server's own: what clients would measure is outside the guarantee, so they are not asked.

        Raises:
            ParameterError: More rounds than the plan's guarantee covers, or a model of another size.
        """
        if num_rounds > self.plan.rounds:
            raise ParameterError(
                f"num_rounds={num_rounds} is more than the plan's guarantee covers; plan with rounds={num_rounds}."
            )
        if evaluate_config is not None:
            raise ParameterError("Clients are not asked to evaluate: what they measure is outside the guarantee.")
        self._timeout = _validate.positive("timeout", timeout)
        self._check_model(initial_arrays)
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, None, evaluate_fn)

    # ------------------------------------------------------------------ Flower's loop

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Keeps what the round needs; its exchanges are made by `aggregate_train`, not by Flower's loop."""
        self._check_model(arrays)
        self._open = arrays, config, grid
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Runs the round. Returns the next model, or None where the round is withheld, and figures about the round."""
        if self._open is None:
            raise ParameterError("aggregate_train follows configure_train.")
        (arrays, config, grid), self._open = self._open, None
        report = RoundReport(server_round)
        self.reports.append(report)
        metrics: dict[str, float] = {}
        mean = None
        try:
            mean, metrics = self._round(report, arrays, config, grid)
        except CpsgdError as error:
            report.reason = str(error)
        for node, reason in report.dropped.items():
            _log.info("\t> node %d is out: %s", node, reason)
        model = None
        if mean is not None:
            report.released = True
            model = self._next(arrays, mean, server_round)
        else:
            _log.warning("Round %d is withheld, the model stays as it was: %s", server_round, report.reason)
        figures = {
            "cpsgd-released": int(report.released),
            "cpsgd-survivors": report.survivors,
            "cpsgd-upload-bytes": max(report.upload_bytes.values(), default=0),
        }
        return model, MetricRecord({**metrics, **figures})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No client is asked to evaluate."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """There is nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Logs what the plan promises."""
        how = "by secure aggregation" if self._secure else "in the server's sight"
        how += ", signed" if self._roster is not None else ""
        _log.info("\t├──> cpsgd: %d clients, %s", self.plan.protocol.clients, how)
        for line in str(self.plan.guarantee).splitlines():
            _log.info("\t│\t%s", line)

    # ------------------------------------------------------------------ one round

    def _round(
        self, report: RoundReport, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> tuple[NDArray[np.float32] | None, dict[str, float]]:
        """The round's mean, released in the ledger, and the metrics of those in it; no mean where it is withheld."""
        plan = self.plan
        nodes = self._nodes(grid)
        if len(nodes) < plan.surviving:
            report.reason = f"{len(nodes)} nodes are connected, and the plan needs {plan.surviving}"
            return None, {}
        # Before anybody is asked for anything: what was begun and never ended counts as spent.
        entry = self._reserve(report.round, grid)
        config["server-round"] = report.round
        records = RecordDict({self._keys[0]: arrays, self._keys[1]: config})
        carrier = self._carrier(report.round, nodes, grid)
        metrics: dict[int, dict[str, float]] = {}
        while (stage := carrier.stage) is not None:
            if stage == "unmask" and carrier.count < plan.surviving:
                break
            messages = {
                node: _records.make_message(request, node, records if stage in ("mask", "upload") else None)
                for node, request in carrier.requests().items()
            }
            answers = exchange(grid, messages, self._timeout, report.drop)
            for node, reply in answers.items():
                report.upload_bytes[node] = report.upload_bytes.get(node, 0) + _size(reply)
                try:
                    carrier.receive(node, _records.read_reply(reply, carrier.reply_limit))
                    if stage in ("mask", "upload"):
                        metrics[node] = _records.read_metrics(reply)
                except CpsgdError as error:
                    report.drop(node, f"{type(error).__name__}: {error}")
            carrier.advance()
        report.survivors = carrier.count
        if carrier.count < plan.surviving:
            report.reason = f"{carrier.count} clients are left, and the plan needs {plan.surviving}"
            return None, {}
        mean = carrier.mean()
        if self._ledger is not None and entry is not None:
            self._ledger.release(entry, survivors=carrier.count)
        return mean, _means(metrics)

    def _carrier(self, round: int, nodes: list[int], grid: Grid) -> Carrier:
        examples = self._examples or 0
        if not self._secure:
            return PlainCarrier(self.plan, round, nodes, examples)
        return SecureCarrier(self.plan, round, nodes, examples, run=grid.run.run_id, roster=self._roster)

    def _next(self, arrays: ArrayRecord, mean: NDArray[np.float32], round: int) -> ArrayRecord:
        following = np.asarray(self._apply(_records.flatten(arrays, len(mean)), mean, round), dtype=np.float32)
        if following.shape != mean.shape:
            raise ParameterError(f"Expected apply to return {len(mean)} numbers, got shape {following.shape}.")
        return _records.unflatten(following, arrays)

    def _nodes(self, grid: Grid) -> list[int]:
        """As many nodes as the plan has clients, drawn at random, or those there are after a while."""
        wanted = self.plan.protocol.clients
        deadline = time.monotonic() + self._node_timeout
        while len(found := sorted(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
            time.sleep(_NODE_POLL_SECONDS)
        return random.SystemRandom().sample(found, min(wanted, len(found)))

    def _reserve(self, round: int, grid: Grid) -> Entry | None:
        """Charges the round, or raises `BudgetExceededError`."""
        if self._ledger is None or self._population is None:
            return None
        plan = self.plan
        event = RoundEvent(
            plan.protocol,
            survivors=plan.surviving,
            participation=plan.participation,
            colluding=plan.colluding,
            round=round,
            run=f"flower-{grid.run.run_id}",
            examples=self._examples,
        )
        return self._ledger.reserve(self._population, event)

    def _check_model(self, arrays: ArrayRecord) -> None:
        _records.flatten(arrays, self.plan.protocol.dim)


def _add(model: NDArray[np.float32], update: NDArray[np.float32], round: int) -> NDArray[np.float32]:
    return model + update


def _size(reply: Message) -> int:
    """Bytes of a reply as Flower serializes it."""
    return sum(len(part.deflate()) for part in get_all_nested_objects(reply).values())


def _means(metrics: dict[int, dict[str, float]]) -> dict[str, float]:
    """The plain mean of each metric over the nodes that sent it."""
    names = sorted({name for found in metrics.values() for name in found})
    return {name: float(np.mean([found[name] for found in metrics.values() if name in found])) for name in names}
