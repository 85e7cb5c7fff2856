"""`Course`: a server's rounds one after the other, whatever engine carries them.

It knows the model and moves it, draws the nodes of each round by their conduct, and can go on after the server was
stopped. An engine asks it for a session, carries the session's messages with a `StageClock`, and hands it back:

    while course.round <= rounds:
        session = course.begin(connected nodes)
        ... while session.stage is not None: requests, receive, drop, StageClock.end
        course.finish(session)

A round of secure aggregation prepares the next one (`cpsgd.federation.pipeline`), which then takes three exchanges in
place of five. The rule for when it begins from the beginning after all:

* too few of those who prepared it are connected; or
* a node is connected that did not prepare it and may be invited. Only where those who did are more than are needed,
  the ones that dropped out of the round before, or while this one was prepared, are not waited for: they sit it out.

So a node that joins is in the next round, one that keeps dropping out does not make every round a long one, and no
round begins without a spare node if there is one.

What was prepared is kept in memory alone: a server that was stopped begins from the beginning.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, Generic, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ParameterError
from cpsgd.federation import checkpoint
from cpsgd.federation.checkpoint import Standing
from cpsgd.federation.conduct import Conduct
from cpsgd.federation.extras import AdaptiveClip, Extras
from cpsgd.federation.pipeline import PipelinedSession
from cpsgd.federation.relay import Relay, RelayedSession
from cpsgd.federation.server import Node, RoundReport, ServerSession
from cpsgd.federation.terms import Terms
from cpsgd.planner.utility import utility_warning
from cpsgd.secagg import Stage

Apply = Callable[[NDArray[np.float32], NDArray[np.float32], int], NDArray[np.float32]]
"""From the model, the mean update and the round's number to the next model, all as flat vectors."""

LOST = "stopped or given up after the sum may have been revealed: the round counts, and its result is lost"

_log = getLogger("cpsgd")


@runtime_checkable
class Stateful(Protocol):
    """An `apply` that remembers something from round to round, as momentum does, and goes on with it."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """What it remembers, as arrays by name."""

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> object:
        """Takes what `state_dict` gave."""


class Course(Generic[Node]):
    """The rounds of a run.

    Attributes:
        model: The model so far, as one vector.
        round: Number of the next round, 1 for the first.
        reports: What became of the rounds so far, those before a restart included.
        conduct: What is known about the nodes.
    """

    def __init__(
        self,
        terms: Terms,
        model: NDArray[np.float32],
        *,
        run: str,
        apply: Apply | None = None,
        path: Path | None = None,
        measures: Mapping[str, tuple[float, float]] | None = None,
        adaptive: AdaptiveClip | None = None,
    ) -> None:
        """Begins a run, or goes on with the one in the file.

        Args:
            terms: What the rounds are held to.
            model: The model to begin with; not used where a run goes on.
            run: The engine's name of the run, the same on the clients, and another one after a restart.
            apply: What the mean does to the model; by default it is added. Privacy does not depend on it. If it has
                `state_dict` and `load_state_dict`, a run that goes on has what it remembers.
            path: File that is written after every round; None for a run that cannot be resumed.
            measures: Metrics of the clients whose means are estimated from the same budget, with their ranges.
            adaptive: Finds the norm to clip to; None for the plan's.

        Raises:
            ParameterError: The plan's dimension is not the model's and one for each of those; or single examples are
                protected, or a distance of updates is assumed, which is not one of those.
            CheckpointError: The file is of another plan, or damaged.
        """
        self._terms, self._run, self._path = terms, run, path
        self._apply = apply or (lambda model, mean, round: model + mean)
        remembering: object = apply
        self._stateful = remembering if isinstance(remembering, Stateful) else None
        self.conduct: Conduct[Node] = Conduct(terms.plan.colluding)
        self._prepared: PipelinedSession[Node] | None = None
        self._asked: frozenset[Node] = frozenset()  # nodes that the present round began with
        self._fell_out: frozenset[Node] = frozenset()  # of the last round, while it ran
        self._measures, self._adaptive = dict(measures or {}), adaptive
        fingerprint = terms.plan.protocol.fingerprint.hex()
        found = None if path is None else checkpoint.load(path, fingerprint, len(model))
        if warning := utility_warning(terms.plan):
            _log.warning("%s", warning)
        self._progress: Standing[Node] = found or Standing(
            fingerprint, model, clip=0.0 if adaptive is None else adaptive.initial, course=run
        )
        self._trained: dict[Node, int] = {}  # the last round in which a node may have trained
        self._carriers: dict[Node, int] = {}  # nodes that may hold a lineage of noise, and since when
        extras, dim = self.extras, terms.plan.protocol.dim
        if extras is not None and terms.examples is not None:
            raise ParameterError(
                "measures and adaptive clipping are about whole clients, and single examples are protected here."
            )
        if extras is not None and terms.plan.protocol.replace_one_distance is not None:
            raise ParameterError(
                "The plan has a replace_one_distance, and what rides on the updates is further apart than they are: "
                "plan without one."
            )
        wanted = len(model) + (0 if extras is None else extras.size)
        if wanted != dim:
            raise ParameterError(f"The model and what rides on it have {wanted} coordinates; plan with dim={wanted}.")
        if found is not None:
            self._go_on()

    @property
    def model(self) -> NDArray[np.float32]:
        """The model after the last round."""
        return self._progress.model

    @property
    def reports(self) -> list[RoundReport[Node]]:
        """What became of the rounds so far."""
        return self._progress.reports

    @property
    def round(self) -> int:
        """Number of the next round."""
        return len(self.reports) + 1

    @property
    def extras(self) -> Extras | None:
        """What rides on the updates of the next round; an engine sends it along with the model."""
        clip = None if self._adaptive is None else self._progress.clip
        return Extras(measures=self._measures, clip=clip) if self._measures or self._adaptive else None

    @property
    def awaited(self) -> int:
        """How many connected nodes the next round is worth waiting for: those of the plan, or those it has prepared."""
        return self._terms.plan.protocol.clients if self._prepared is None else len(self._prepared.waiting)

    def begin(self, connected: Iterable[Node]) -> ServerSession[Node]:
        """The next round, among those that prepared it, or among nodes drawn from those that are connected."""
        plan, progress = self._terms.plan, self._progress
        self._lose_revealed()  # where an engine gave the last round up
        wanted, needed = plan.protocol.clients, plan.surviving
        present = [node for node in connected if node not in self.conduct.excluded]
        allowed = [node for node in present if self._has_turn(node)]
        prepared = self._take_prepared(allowed)
        again = progress.begun == self.round
        if not again:
            progress.begun, progress.charged_to = self.round, self._run
        # On the disk before the charge: a charge that nobody knows of would be made again.
        self._save()
        charged_to = progress.charged_to if again else None
        if prepared is not None:
            self._ask(prepared.waiting)
            prepared.charge(frozenset(allowed), charged_to, self._reveal)
            return prepared
        nodes = self.conduct.choose(allowed, self.round, wanted=wanted, needed=needed)
        self._ask(nodes)
        session = RelayedSession(
            self._terms,
            self.round,
            nodes,
            run=self._run,
            charged_to=charged_to,
            course=progress.course,
            revealing=self._reveal,
        )
        if plan.protocol.mechanism.hands_on:
            session.relay = self._relay(present, nodes)
        return session

    def _ask(self, nodes: Iterable[Node]) -> None:
        self._asked = frozenset(nodes)
        self._progress.asked = list(self._asked)

    def _has_turn(self, node: Node) -> bool:
        """Whether a node may take part again."""
        last, apart = self._trained.get(node), self._terms.apart
        return last is None or (apart is not None and self.round >= last + apart)

    def _relay(self, present: Iterable[Node], nodes: Iterable[Node]) -> Relay[Node]:
        """Hands the lineages of nodes that leave on to those that come."""
        protocol, staying = self._terms.plan.protocol, set(nodes)
        bands = 1 if protocol.mechanism.correlation is None else protocol.mechanism.correlation.bands
        reach = self.round - bands
        leave = [node for node in present if self._carriers.get(node, reach) > reach and node not in staying]
        come = [node for node in nodes if self._carriers.get(node, reach) <= reach]
        return Relay(self._run, protocol.fingerprint, bands, self.round, leave, come)

    def _learn_lineages(self, session: ServerSession[Node]) -> None:
        """Who may have trained in a round and holds its noise; who has handed it on does not."""
        report = session.report
        if isinstance(session, RelayedSession) and session.relay is not None:
            for node in session.relay.given:
                self._carriers.pop(node, None)
        for node in session.nodes:
            if report.stages.get(node) not in (Stage.ADVERTISE, Stage.SHARE):
                self._trained[node] = self._carriers[node] = report.round

    def _take_prepared(self, allowed: Collection[Node]) -> PipelinedSession[Node] | None:
        """The next round as it was prepared, if that is the way to go on; it is forgotten if not."""
        prepared, self._prepared = self._prepared, None
        present = frozenset(allowed)
        if prepared is None or not prepared.can_go_on(present):
            return None
        others = {*self.conduct.resting(self.round), *prepared.waiting}
        if prepared.can_go_on(present, spare=1):
            others |= {*prepared.nodes, *self._fell_out}
        full = len(prepared.waiting & present) == self._terms.plan.protocol.clients
        return prepared if full or present <= others else None

    def finish(self, session: ServerSession[Node]) -> NDArray[np.float32] | None:
        """Moves the model by the round's mean, and writes it down. Returns the model, or None for a withheld round."""
        mean, progress = session.release(), self._progress
        report = session.report
        self._prepared = session.prepared if isinstance(session, PipelinedSession) else None
        self._fell_out = self._asked & report.dropped.keys()
        if mean is not None:
            mean = self._without_extras(mean, report)
            moved = np.asarray(self._apply(self.model, mean, report.round), dtype=np.float32)
            if moved.shape != mean.shape:
                raise ParameterError(f"Expected apply to return {len(mean)} numbers, got shape {moved.shape}.")
            progress.model = moved
        self.conduct.learn(report, session.nodes)
        self._learn_lineages(session)
        self._end_round(report)
        self._save()
        return None if mean is None else progress.model

    def _without_extras(self, mean: NDArray[np.float32], report: RoundReport[Node]) -> NDArray[np.float32]:
        """The mean update, when what rode on it is in the report."""
        if (extras := self.extras) is None:
            return mean
        update, unclipped, report.measures = extras.decode(mean, self._terms.plan.protocol.clip_norm)
        if self._adaptive is not None and unclipped is not None:
            report.measures |= {"cpsgd-clip-norm": self._progress.clip, "cpsgd-unclipped": unclipped}
            self._progress.clip = self._adaptive.following(self._progress.clip, unclipped)
        return update

    def _go_on(self) -> None:
        """Takes up what the file holds."""
        progress = self._progress
        if self._stateful is not None and progress.optimizer:
            self._stateful.load_state_dict(progress.optimizer)
        for report in progress.reports:
            self.conduct.learn(report, {*report.upload_bytes, *report.dropped})
            self._trained |= dict.fromkeys(report.upload_bytes, report.round)
        self._lose_revealed()

    def _lose_revealed(self) -> None:
        """Ends a round whose sum may be known to somebody, though nothing came of it: it is not run again."""
        progress = self._progress
        if not (progress.begun and progress.revealing):
            return
        self._trained |= dict.fromkeys(progress.asked, progress.begun)
        self._end_round(RoundReport(progress.begun, reason=LOST, upload_bytes=dict.fromkeys(progress.asked, 0)))
        self._save()

    def _end_round(self, report: RoundReport[Node]) -> None:
        progress = self._progress
        progress.reports.append(report)
        progress.begun, progress.charged_to, progress.revealing, progress.asked = 0, "", False, []

    def _reveal(self) -> None:
        self._progress.revealing = True
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            if self._stateful is not None:
                self._progress.optimizer = dict(self._stateful.state_dict())
            checkpoint.save(self._path, self._progress)
