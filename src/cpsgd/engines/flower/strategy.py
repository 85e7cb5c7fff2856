"""`CpsgdStrategy`: the server's side. Runs rounds of secure aggregation over Flower and releases private means only."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.engines.flower import records
from cpsgd.errors import CpsgdError, ParameterError
from cpsgd.federation.messages import TRAINING, flatten, unflatten
from cpsgd.federation.server import RoundReport as RoundReport
from cpsgd.federation.server import ServerSession, Terms
from cpsgd.planner import Plan

Apply = Callable[[NDArray[np.float32], NDArray[np.float32], int], NDArray[np.float32]]
"""From the model, the mean update and the round's number to the next model, all as flat vectors."""

_POLL_SECONDS = 0.5
_log = getLogger("flwr")


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
        apply: Apply | None = None,
        node_timeout: float = 300.0,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        weighted_by_key: str | None = None,
        **terms: Any,
    ) -> None:
        """Takes the plan that clients will be held to.

        Args:
            plan: From `cpsgd.plan(..., secure=True)`, or `plan_examples` for single examples.
            apply: What the mean update does to the model; by default it is added. Privacy does not depend on it.
            node_timeout: Seconds that a round waits for nodes to connect.
            arrayrecord_key: Name of the model in messages.
            configrecord_key: Name of the app's settings in messages.
            weighted_by_key: Refused, see below.
            terms: The fields of `cpsgd.federation.server.Terms`: secure, examples, roster, ledger and population.

        Raises:
            ParameterError: Weighted averages were asked for, or the plan does not fit the way of summing.
            InfeasibleError: The plan's dropouts and colluding clients are more than secure aggregation tolerates.
        """
        if weighted_by_key is not None:
            raise ParameterError(
                f"weighted_by_key={weighted_by_key!r}: weighted averages are refused. A weight multiplies what one "
                "client can move the mean by, so the plan's noise would no longer hide it. To count examples the same, "
                "protect them: examples=..., where each silo sends a sum."
            )
        self.plan = plan
        self.reports: list[RoundReport[int]] = []
        self._terms = Terms(plan=plan, engine="flower", **terms)
        self._apply = apply or (lambda model, mean, round: model + mean)
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
        self._terms.check_rounds(num_rounds)
        if evaluate_config is not None:
            raise ParameterError("Clients are not asked to evaluate: what they measure is outside the guarantee.")
        self._timeout = _validate.positive("timeout", timeout)
        flatten(records.read_arrays(initial_arrays), self.plan.protocol.dim)
        return super().start(grid, initial_arrays, num_rounds, timeout, train_config, None, evaluate_fn)

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Keeps what the round needs; its exchanges are made by `aggregate_train`, not by Flower's loop."""
        self._open = arrays, config, grid
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Runs the round. Returns the next model, or None where the round is withheld, and figures about the round."""
        if self._open is None:
            raise ParameterError("aggregate_train follows configure_train.")
        (arrays, config, grid), self._open = self._open, None
        before = records.read_arrays(arrays)
        model = flatten(before, self.plan.protocol.dim)
        session = ServerSession(self._terms, server_round, self._nodes(grid), run=str(grid.run.run_id))
        self.reports.append(session.report)
        config["server-round"] = server_round
        self._exchange(session, grid, RecordDict({self._keys[0]: arrays, self._keys[1]: config}))
        mean, report, following = session.release(), session.report, None
        for node, reason in report.dropped.items():
            _log.info("\t> node %d is out: %s", node, reason)
        if mean is None:
            _log.warning("Round %d is withheld, the model stays as it was: %s", server_round, report.reason)
        else:
            vector = np.asarray(self._apply(model, mean, server_round), dtype=np.float32)
            if vector.shape != mean.shape:
                raise ParameterError(f"Expected apply to return {len(mean)} numbers, got shape {vector.shape}.")
            following = records.make_arrays(unflatten(vector, before))
        size = max(report.upload_bytes.values(), default=0)
        figures = {"released": int(report.released), "survivors": report.survivors, "upload-bytes": size}
        return following, MetricRecord(
            {**report.metrics, **{f"cpsgd-{name}": value for name, value in figures.items()}}
        )

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
        _log.info("\t├──> cpsgd: %d clients, %s", self.plan.protocol.clients, self._terms.way)
        for line in str(self.plan.guarantee).splitlines():
            _log.info("\t│\t%s", line)

    def _exchange(self, session: ServerSession[int], grid: Grid, content: RecordDict) -> None:
        """Carries the session's messages until no stage is left."""
        report, make = session.report, records.make_message
        while session.stage is not None:
            along = content if session.stage in TRAINING else None
            messages = {node: make(asked, node, report.round, along) for node, asked in session.requests().items()}
            for node, reply in _answers(grid, messages, self._timeout, session.drop):
                size = sum(len(part.deflate()) for part in get_all_nested_objects(reply).values())  # as it travels
                report.upload_bytes[node] = report.upload_bytes.get(node, 0) + size
                try:
                    session.receive(node, *records.read_reply(reply))
                except CpsgdError as error:
                    session.drop(node, f"{type(error).__name__}: {error}")
            session.close()

    def _nodes(self, grid: Grid) -> list[int]:
        """As many nodes as the plan has clients, drawn at random, or those there are after a while."""
        wanted = self.plan.protocol.clients
        deadline = time.monotonic() + self._node_timeout
        while len(found := sorted(grid.get_node_ids())) < wanted and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return random.SystemRandom().sample(found, min(wanted, len(found)))


def _answers(
    grid: Grid, messages: Mapping[int, Message], timeout: float, drop: Callable[[int, str | None], None]
) -> Iterator[tuple[int, Message]]:
    """Sends messages to nodes; the replies of those that answer within `timeout` seconds.

    Replies are fetched one at a time: one that Flower itself cannot read must not cost the others theirs.
    """
    waiting: dict[str, int] = {}
    for node, message in messages.items():
        identifier = next(iter(grid.push_messages([message])), None)
        if identifier:
            waiting[identifier] = node
        else:
            drop(node, "Flower could not take the message")
    deadline = time.monotonic() + timeout
    while waiting and time.monotonic() < deadline:
        for identifier, node in list(waiting.items()):
            try:
                found = list(grid.pull_messages([identifier]))
            except Exception as error:
                # What a stranger can make Flower's decoder raise is anybody's guess; the text may be theirs, too.
                _log.warning("A reply of node %d cannot be read (%s).", node, type(error).__name__)
                drop(node, "its reply cannot be read")
                del waiting[identifier]
                continue
            for reply in found[:1]:
                del waiting[identifier]
                if reply.has_error():
                    drop(node, reply.error.reason)
                else:
                    yield node, reply
        if waiting:
            time.sleep(_POLL_SECONDS)
