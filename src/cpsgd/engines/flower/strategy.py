"""`CpsgdStrategy`: the server's side. Runs rounds of secure aggregation over Flower and releases private means only."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result, Strategy
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from cpsgd.engines.flower import records
from cpsgd.errors import ParameterError, WireError
from cpsgd.federation.carrying import Gathering, Pace, Reply, carry
from cpsgd.federation.course import Apply, Course
from cpsgd.federation.extras import AdaptiveClip
from cpsgd.federation.messages import TRAINING, flatten, unflatten
from cpsgd.federation.sessions import RoundReport as RoundReport
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.planner import Plan

_POLL_SECONDS = 0.2
_log = getLogger("flwr")


class CpsgdStrategy(Strategy):
    """A Flower strategy that adds the private mean of the clients' updates to the model.

    Every client counts the same. A round is *withheld*, and the model stays as it was, where fewer clients than
    `plan.surviving` are left: their noise would be too little for the plan's guarantee.

    Attributes:
        reports: Report of each round so far.

    Example:
        >>> from cpsgd import plan
        >>> best = plan(clients=10, dim=650, epsilon=4.0, delta=1e-5, rounds=10, secure=True, colluding=1)
        >>> strategy = CpsgdStrategy(best)  # and then strategy.start(grid, arrays, num_rounds=10)
        >>> print(best.guarantee.epsilon <= 4.0, best.surviving, strategy.reports)
        True 10 []
    """

    def __init__(
        self,
        plan: Plan,
        *,
        apply: Apply | None = None,
        checkpoint: str | Path | None = None,
        measures: Mapping[str, tuple[float, float]] | None = None,
        adaptive: AdaptiveClip | None = None,
        node_timeout: float = 300.0,
        grace: float = 10.0,
        arrayrecord_key: str = "arrays",
        configrecord_key: str = "config",
        weighted_by_key: str | None = None,
        **terms: Any,
    ) -> None:
        """Takes the plan that clients will be held to.

        Args:
            plan: From `cpsgd.plan(..., secure=True, colluding=1)`, or `plan_examples` for single examples.
            apply: Moves the model by the mean update; by default it is added. Privacy does not depend on it. If it
                remembers something, give it `state_dict` and `load_state_dict`, as PyTorch's optimizers have them.
            checkpoint: File that the model and the reports are written to after each round. If it is there already, the
                run goes on with the round after its last, and charges no round twice; see docs/flower.md.
            measures: Names of metrics that train functions return, with their ranges. Their means are estimated from
                the same budget: each is one coordinate more of the plan.
            adaptive: Finds the norm that updates are clipped to, by a private count of those that were: one coordinate
                more, too.
            node_timeout: Seconds that a round waits for enough nodes to connect.
            grace: Seconds that the others are waited for when enough nodes are connected or have answered; in a stage,
                as long again as those took if that is longer.
            arrayrecord_key: Name of the model in messages.
            configrecord_key: Name of the app's settings in messages.
            weighted_by_key: Refused, see below.
            terms: The fields of `cpsgd.federation.terms.Terms`: secure, examples, roster, ledger, population, and
                `pair` for one message to two servers.

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
        self._apply, self._checkpoint = apply, None if checkpoint is None else Path(checkpoint)
        self._measures, self._adaptive = measures, adaptive
        self._pace = Pace(nodes=node_timeout, grace=grace)
        self._keys = arrayrecord_key, configrecord_key
        self._course: Course[int] | None = None
        self._open: tuple[ArrayRecord, ConfigRecord, Grid] | None = None

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 600.0,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    ) -> Result:
        """Runs `num_rounds` rounds, those before a restart included; see Flower's `Strategy.start`.

        The result has the model after the last released round, or the first model if all rounds were withheld.

        `timeout` is how long each stage of a round waits for answers at most. Evaluate with `evaluate_fn` on data of
        the server's own: what clients would measure is outside the guarantee, so they are not asked.

        Raises:
            ParameterError: More rounds than the plan's guarantee covers, or a model of another size.
            CheckpointError: The checkpoint is of another plan, or damaged.
        """
        self._terms.check_rounds(num_rounds)
        if evaluate_config is not None:
            raise ParameterError("Clients are not asked to evaluate: what they measure is outside the guarantee.")
        self._pace = replace(self._pace, stage=timeout)
        before = records.read_arrays(initial_arrays)
        model = flatten(before, sum(array.size for array in before.values()))
        course: Course[int] = Course(
            self._terms,
            model,
            run=str(grid.run.run_id),
            apply=self._apply,
            path=self._checkpoint,
            measures=self._measures,
            adaptive=self._adaptive,
        )
        self._course, self.reports, done = course, course.reports, len(course.reports)
        if done:
            _log.info("Goes on after round %d of %d.", done, num_rounds)
        arrays = records.make_arrays(unflatten(course.model, before)) if done else initial_arrays

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return None if evaluate_fn is None else evaluate_fn(done + round, arrays)

        # Flower counts the rounds of this start; everybody else those of the whole run.
        result = super().start(grid, arrays, max(0, num_rounds - done), timeout, train_config, None, evaluate)
        result.arrays = result.arrays or arrays  # Flower leaves them empty where no round was released
        for figures in (result.train_metrics_clientapp, result.evaluate_metrics_serverapp):
            renamed = {done + round: values for round, values in figures.items()}
            figures.clear()
            figures.update(renamed)
        return result

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Stores the round's inputs; `aggregate_train` makes the exchanges, in place of Flower's loop."""
        self._open = arrays, config, grid
        return []

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Runs the round. Returns the next model, or None where the round is withheld, and figures about the round."""
        course = self._course
        if self._open is None or course is None:
            raise ParameterError("aggregate_train follows start and configure_train.")
        (arrays, config, grid), self._open = self._open, None
        session = course.begin(self._nodes(grid, course.awaited))
        config["server-round"] = session.report.round
        extras = None if course.extras is None else course.extras.to_json()
        content = RecordDict({self._keys[0]: arrays, self._keys[1]: config})
        carry(session, _Transport(grid, content, extras), self._pace)
        model, report = course.finish(session), session.report
        for node, reason in report.dropped.items():
            _log.info("\t> node %d is out: %s", node, reason)
        for node, fault in report.faults.items():
            _log.warning("\t> node %d is at fault: %s", node, fault)
        if course.conduct.excluded:
            _log.warning("\t> not invited again: nodes %s", sorted(course.conduct.excluded))
        following = None
        if model is None:
            _log.warning("Round %d is withheld, the model stays as it was: %s", report.round, report.reason)
        else:
            following = records.make_arrays(unflatten(model, records.read_arrays(arrays)))
        size = max(report.upload_bytes.values(), default=0)
        figures = {"released": int(report.released), "survivors": report.survivors, "upload-bytes": size}
        return following, MetricRecord(
            {**report.metrics, **report.measures, **{f"cpsgd-{name}": value for name, value in figures.items()}}
        )

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Returns no messages: no client is asked to evaluate."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Returns None: there is nothing to aggregate."""
        return None

    def summary(self) -> None:
        """Logs what the plan promises."""
        _log.info("\t├──> cpsgd: %d clients, %s", self.plan.protocol.clients, self._terms.way)
        for line in str(self.plan.guarantee).splitlines():
            _log.info("\t│\t%s", line)

    def _nodes(self, grid: Grid, wanted: int) -> list[int]:
        """Returns the nodes that are connected, when they are enough or time is up."""
        now = time.monotonic
        gathering = Gathering(self._pace, wanted, self._terms.surviving, now())
        while not gathering.over(len(found := list(grid.get_node_ids())), now()):
            time.sleep(_POLL_SECONDS)
        return sorted(found)


class _Transport:
    """Carries requests and replies as Flower's messages."""

    aborted = False

    def __init__(self, grid: Grid, content: RecordDict, extras: str | None) -> None:
        self._grid, self._content, self._extras = grid, content, extras
        self._waiting: dict[str, int] = {}  # nodes by the messages' names in Flower

    def send(self, session: RoundSession[int]) -> None:
        """Sends the open stage's requests; where clients train, with the model."""
        along = (self._content, self._extras) if session.stage in TRAINING else ()
        for node, request in session.requests().items():
            message = records.make_message(request, node, session.report.round, *along)
            identifier = next(iter(self._grid.push_messages([message])), None)
            if identifier:
                self._waiting[identifier] = node
            else:
                session.drop(node, "Flower could not take the message")

    def replies(self, waiting: frozenset[int]) -> list[Reply[int]]:
        """Returns the replies that have arrived.

        They are fetched one at a time: one that Flower itself cannot read must not cost the others theirs.
        """
        found = []
        for identifier, node in list(self._waiting.items()):
            try:
                messages = list(self._grid.pull_messages([identifier]))
            except Exception as error:
                # A stranger can make Flower's decoder raise anything, with a text of theirs.
                _log.warning("A reply of node %d cannot be read (%s).", node, type(error).__name__)
                found.append(Reply(node, reason="its reply cannot be read"))
                del self._waiting[identifier]
                continue
            for message in messages[:1]:
                found.append(_reply(node, message))
                del self._waiting[identifier]
        if not found:
            time.sleep(_POLL_SECONDS)
        return found

    def end_stage(self) -> None:
        """Forgets the messages that were not answered."""
        self._waiting = {}


def _reply(node: int, message: Message) -> Reply[int]:
    if message.has_error():
        return Reply(node, reason=records.read_error(message) or "an error")
    # As it travels.
    size = sum(len(part.deflate()) for part in get_all_nested_objects(message).values())
    try:
        answer, metrics = records.read_reply(message)
    except WireError as error:
        return Reply(node, size=size, reason=f"{type(error).__name__}: {error}")
    return Reply(node, answer, metrics, size)
