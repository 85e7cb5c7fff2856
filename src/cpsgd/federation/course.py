"""`Course`: a server's rounds one after the other, whatever engine carries them.

It keeps the model, draws the nodes of each round by their conduct, and can go on after the server was stopped. An
engine asks it for a session, carries the session's messages (`cpsgd.federation.carrying`), and hands it back:

    while course.round <= rounds:
        session = course.begin(connected nodes)
        ... while session.stage is not None: requests, receive, drop, StageClock.end
        course.finish(session)

A round of secure aggregation prepares the next one, which then takes three exchanges in place of five. The next round
begins from the beginning after all if

* too few of the nodes that prepared it are connected; or
* a node is connected that did not prepare it and may be invited. If more nodes prepared it than are needed, nodes that
  dropped out of the round before, or while this one was prepared, are not waited for: they sit it out.

So a node that joins is in the next round, one that keeps dropping out does not make every round a long one, and no
round begins without a spare node if there is one. What was prepared is kept in memory alone: a server that was stopped
begins from the beginning.

`Conduct` decides which nodes are invited, by what they did in earlier rounds of the run:

* **Faults.** A node that was at fault (`RoundReport.faults`) in `FAULTS` rounds is not invited again in this run: for a
  message that no honest client sends, or accusations by more nodes than may collude. One fault suffices that no failing
  transport explains (`RoundReport.proved`): shares that it signed and nobody can open, or a false complaint.
* **Accusations** that prove nothing in one round (`RoundReport.accused`) are kept until more nodes than may collude
  have made one: that is a fault in the last of these rounds.
* **Absence.** A node that dropped out of `ABSENCES` rounds in a row without a fault (silence, an error, a refusal) sits
  out the next `REST` rounds, unless the round has too few nodes without it.

So one bad message costs a node nothing, for transports fail; a node that keeps sending them costs the others two
rounds, and one that spoils rounds by what it signs costs them one.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from logging import getLogger
from pathlib import Path
from typing import Any, Generic, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ParameterError
from cpsgd.federation import checkpoint
from cpsgd.federation.checkpoint import Standing
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.extras import AdaptiveClip, Extras
from cpsgd.federation.sessions import Node, RoundReport, RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.planner.utility import utility_warning
from cpsgd.secagg import Stage

Apply = Callable[[NDArray[np.float32], NDArray[np.float32], int], NDArray[np.float32]]
"""From the model, the mean update and the round's number to the next model, all as flat vectors."""

LOST = "stopped or given up after the sum may have been revealed: the round counts, and its result is lost"
FAULTS = 2
ABSENCES = 3
REST = 5

_log = getLogger("cpsgd")


class Conduct(Generic[Node]):
    """The conduct of the nodes of a run so far."""

    def __init__(self, colluding: int = 1) -> None:
        """Starts without suspects; up to `colluding` nodes may lie together."""
        self._colluding = colluding
        self._faults: Counter[Node] = Counter()
        self._absences: Counter[Node] = Counter()
        self._rests_until: dict[Node, int] = {}
        self._accusers: dict[Node, set[Node]] = {}  # by the accused, since its last fault

    def learn(self, report: RoundReport[Node], invited: Iterable[Node]) -> None:
        """Takes the report of a round that these nodes were invited to."""
        for node, accusers in report.accused.items():
            self._accusers.setdefault(node, set()).update(accusers)
        proved = {node for node, accusers in self._accusers.items() if len(accusers) > self._colluding}
        for node in proved | report.faults.keys():
            self._faults[node] += FAULTS if node in report.proved else 1
            self._accusers.pop(node, None)
        for node in invited:
            if node not in report.dropped:
                self._absences[node] = 0
            elif node not in report.faults:
                self._absences[node] += 1
                if self._absences[node] >= ABSENCES:
                    self._absences[node] = 0
                    self._rests_until[node] = report.round + REST

    @property
    def excluded(self) -> frozenset[Node]:
        """Nodes that are not invited again."""
        return frozenset(node for node, count in self._faults.items() if count >= FAULTS)

    def resting(self, round: int) -> frozenset[Node]:
        """Returns the nodes that skip this round if there are enough others."""
        return frozenset(node for node, until in self._rests_until.items() if round <= until)

    def choose(self, connected: Iterable[Node], round: int, *, wanted: int, needed: int) -> list[Node]:
        """Draws `wanted` nodes at random; resting ones only if fewer than `needed` others are connected."""
        allowed = [node for node in connected if node not in self.excluded]
        resting = self.resting(round)
        awake = [node for node in allowed if node not in resting]
        if len(awake) < needed:
            missing = min(needed - len(awake), len(allowed) - len(awake))
            awake += random.SystemRandom().sample([node for node in allowed if node in resting], missing)
        return random.SystemRandom().sample(awake, min(wanted, len(awake)))


@runtime_checkable
class Stateful(Protocol):
    """Interface of an `apply` with a state, such as momentum, which a checkpoint keeps."""

    def state_dict(self) -> dict[str, NDArray[Any]]:
        """Returns the state as arrays by name."""

    def load_state_dict(self, state: Mapping[str, NDArray[Any]]) -> object:
        """Takes the state that `state_dict` returned."""


class Course(Generic[Node]):
    """The rounds of a run.

    Attributes:
        model: The model so far, as one vector.
        round: Number of the next round, 1 for the first.
        reports: Reports of the rounds so far, those before a restart included.
        conduct: The conduct of the nodes.
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
            terms: The terms of all rounds.
            model: The model to begin with; not used where a run goes on.
            run: The engine's name of the run, the same on the clients, and another one after a restart.
            apply: Moves the model by the mean; by default the mean is added. Privacy does not depend on it. If it has
                `state_dict` and `load_state_dict`, a run that goes on has its state.
            path: File that is written after every round; None for a run that cannot be resumed.
            measures: Metrics of the clients whose means are estimated from the same budget, with their ranges.
            adaptive: Finds the norm to clip to; None for the plan's.

        Raises:
            ParameterError: The plan's dimension is not the model's and one for each of those; or single examples are
                protected, or a distance of updates is assumed, which is not one of those.
            CheckpointError: The file is of another plan, or damaged.
            LedgerError: No round of the plan can ever be charged to the ledger (`Terms.check_ledger`).
        """
        terms.check_ledger()
        protocol = terms.protocol
        self._terms, self._run, self._path = terms, run, path
        self._apply = apply or (lambda model, mean, round: model + mean)
        remembering: object = apply
        self._stateful = remembering if isinstance(remembering, Stateful) else None
        self.conduct: Conduct[Node] = Conduct(terms.colluding)
        self._prepared: RoundSession[Node] | None = None
        self._fell_out: frozenset[Node] = frozenset()  # of the last round, while it ran
        self._counters: dict[bytes, int] = {}  # of the clients' memories, by identity
        self._trained: dict[Node, int] = {}  # the last round in which a node may have trained
        self._handing = terms.memory.handing(run, protocol.fingerprint)
        self._measures, self._adaptive = dict(measures or {}), adaptive
        fingerprint = protocol.fingerprint.hex()
        found = None if path is None else checkpoint.load(path, fingerprint, len(model))
        if warning := utility_warning(terms.plan):
            _log.warning("%s", warning)
        self._progress: Standing[Node] = found or Standing(
            fingerprint, model, clip=0.0 if adaptive is None else adaptive.initial, course=run
        )
        self._check_extras(len(model))
        if found is not None:
            self._go_on()

    def _check_extras(self, dim: int) -> None:
        """Refuses numbers that ride on the updates where the plan does not allow for them."""
        extras, protocol = self.extras, self._terms.protocol
        if extras is not None and self._terms.examples is not None:
            raise ParameterError(
                "measures and adaptive clipping are about whole clients, and single examples are protected here."
            )
        if extras is not None and protocol.distance_reason is not None:
            raise ParameterError(
                "The plan has a replace_one_distance, and what rides on the updates is further apart than they are: "
                "plan without one."
            )
        size = dim + (0 if extras is None else extras.size)
        if size != protocol.dim:
            raise ParameterError(f"The model and what rides on it have {size} coordinates; plan with dim={size}.")

    @property
    def model(self) -> NDArray[np.float32]:
        """The model after the last round."""
        return self._progress.model

    @property
    def reports(self) -> list[RoundReport[Node]]:
        """Reports of the rounds so far."""
        return self._progress.reports

    @property
    def round(self) -> int:
        """Number of the next round."""
        return len(self.reports) + 1

    @property
    def extras(self) -> Extras | None:
        """Numbers that ride on the updates of the next round; an engine sends it along with the model."""
        clip = None if self._adaptive is None else self._progress.clip
        return Extras(measures=self._measures, clip=clip) if self._measures or self._adaptive else None

    @property
    def awaited(self) -> int:
        """Number of connected nodes to wait for: those of the plan, or those that have prepared the round."""
        return self._terms.protocol.clients if self._prepared is None else len(self._prepared.waiting)

    # ------------------------------------------------------------------ a round begins

    def begin(self, connected: Iterable[Node]) -> RoundSession[Node]:
        """Returns the next round's session: with the nodes that prepared it, or with nodes drawn from those here.

        The round is charged to the ledger, if there is one, after its beginning was saved. If the last round was
        interrupted after its sum could be known, it is first ended as lost.
        """
        terms, progress = self._terms, self._progress
        self._lose_revealed()  # where an engine gave the last round up
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
            progress.asked = list(prepared.waiting)
            prepared.charge(frozenset(allowed), charged_to, self._reveal)
            return prepared
        nodes = self.conduct.choose(allowed, self.round, wanted=terms.protocol.clients, needed=terms.surviving)
        progress.asked = nodes
        return begin_round(
            self._terms,
            self.round,
            nodes,
            run=self._run,
            course=progress.course,
            counters=self._counters,
            charged_to=charged_to,
            revealing=self._reveal,
            before=self._handing.before(self.round, present, nodes) if self._handing else [],
            prepares=True,
        )

    def _has_turn(self, node: Node) -> bool:
        """Returns whether the run's rules let a node take part in the next round."""
        last, apart = self._trained.get(node), self._terms.apart
        return last is None or (apart is not None and self.round >= last + apart)

    def _take_prepared(self, allowed: Collection[Node]) -> RoundSession[Node] | None:
        """Returns the prepared next round if it can still run; otherwise forgets it and returns None."""
        prepared, self._prepared = self._prepared, None
        if prepared is None:
            return None
        present = frozenset(allowed)
        spare = len(prepared.waiting & present) - prepared.fewest
        if spare < 0:
            return None
        others = {*self.conduct.resting(self.round), *prepared.waiting}
        if spare > 0:
            others |= {*prepared.nodes, *self._fell_out}
        full = len(prepared.waiting & present) == self._terms.protocol.clients
        return prepared if full or present <= others else None

    # ------------------------------------------------------------------ a round ends

    def finish(self, session: RoundSession[Node]) -> NDArray[np.float32] | None:
        """Moves the model by the round's mean, and saves it. Returns the model, or None for a withheld round."""
        mean, progress, report = session.release(), self._progress, session.report
        self._prepared = session.prepared
        self._fell_out = frozenset(progress.asked) & report.dropped.keys()
        if mean is not None:
            mean = self._without_extras(mean, report)
            moved = np.asarray(self._apply(self.model, mean, report.round), dtype=np.float32)
            if moved.shape != mean.shape:
                raise ParameterError(f"Expected apply to return {len(mean)} numbers, got shape {moved.shape}.")
            progress.model = moved
        self.conduct.learn(report, session.nodes)
        trained = [node for node in session.nodes if report.stages.get(node) not in (Stage.ADVERTISE, Stage.SHARE)]
        self._trained |= dict.fromkeys(trained, report.round)
        if self._handing:
            self._handing.trained(trained, report.round)
        self._end_round(report)
        self._save()
        return None if mean is None else progress.model

    def _without_extras(self, mean: NDArray[np.float32], report: RoundReport[Node]) -> NDArray[np.float32]:
        """Decodes the extra coordinates into the report, and returns the mean update without them."""
        if (extras := self.extras) is None:
            return mean
        update, unclipped, report.measures = extras.decode(mean, self._terms.protocol.clip_norm)
        if self._adaptive is not None and unclipped is not None:
            report.measures |= {"cpsgd-clip-norm": self._progress.clip, "cpsgd-unclipped": unclipped}
            self._progress.clip = self._adaptive.following(self._progress.clip, unclipped)
        return update

    def _end_round(self, report: RoundReport[Node]) -> None:
        progress = self._progress
        progress.reports.append(report)
        progress.begun, progress.charged_to, progress.revealing, progress.asked = 0, "", False, []

    # ------------------------------------------------------------------ a run that was stopped

    def _go_on(self) -> None:
        """Restores the run from its checkpoint file."""
        progress = self._progress
        if self._stateful is not None and progress.optimizer:
            self._stateful.load_state_dict(progress.optimizer)
        for report in progress.reports:
            self.conduct.learn(report, {*report.upload_bytes, *report.dropped})
            self._trained |= dict.fromkeys(report.upload_bytes, report.round)
        self._lose_revealed()

    def _lose_revealed(self) -> None:
        """Ends an interrupted round whose sum may be known, and saves that it must not run again."""
        progress = self._progress
        if not (progress.begun and progress.revealing):
            return
        self._trained |= dict.fromkeys(progress.asked, progress.begun)
        self._end_round(RoundReport(progress.begun, reason=LOST, upload_bytes=dict.fromkeys(progress.asked, 0)))
        self._save()

    def _reveal(self) -> None:
        self._progress.revealing = True
        self._save()

    def _save(self) -> None:
        if self._path is not None:
            if self._stateful is not None:
                self._progress.optimizer = dict(self._stateful.state_dict())
            checkpoint.save(self._path, self._progress)
