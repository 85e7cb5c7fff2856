"""`CpsgdController`: the server's side. Runs rounds of secure aggregation over NVFlare, releases private means only."""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from cpsgd._durable import write_file
from cpsgd.engines.nvflare import shareables
from cpsgd.errors import ParameterError, WireError
from cpsgd.federation.carrying import Gathering, Pace, Reply, carry
from cpsgd.federation.course import Apply, Course
from cpsgd.federation.extras import AdaptiveClip, Extras
from cpsgd.federation.messages import TRAINING, flatten, unflatten
from cpsgd.federation.sessions import RoundReport, RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Ledger
from cpsgd.planner import Plan, plan
from cpsgd.planner.examples import plan_examples
from cpsgd.secagg import read_roster

REPORTS_FILE = "cpsgd_rounds.json"
"""In the server's folder of the job: what became of each round."""

_POLL_SECONDS = 0.1


class CpsgdController(ModelController):
    """An NVFlare workflow that adds the private mean of the clients' updates to the model.

    The plan is made when the job starts, for the model that the persistor loads. Every client counts the same. A round
    is *withheld*, and the model stays as it was, where fewer clients than `Plan.surviving` are left: their noise would
    be too little for the plan's guarantee.

    Attributes:
        reports: Report of each round so far.
    """

    def __init__(
        self,
        num_clients: int,
        num_rounds: int,
        epsilon: float,
        delta: float,
        examples: int | None = None,
        plan: dict[str, Any] | None = None,
        apply: Apply | None = None,
        secure: bool = True,
        roster: str = "",
        ledger: str = "",
        population: str = "",
        checkpoint: str = "",
        measures: dict[str, list[float]] | None = None,
        adaptive: dict[str, float] | None = None,
        pace: dict[str, float] | None = None,
        pair: dict[str, str] | None = None,
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
    ) -> None:
        """Takes the requirements of the plan, as plain values that fit a job's configuration.

        Args:
            num_clients: Clients of a round.
            num_rounds: Rounds of the job, which the guarantee covers together.
            epsilon: ε that all rounds may cost a client, or an example.
            delta: δ of the guarantee.
            examples: Protects single examples, at most this many in a client's sum; None protects whole clients.
            plan: Further arguments of `cpsgd.plan`, or of `plan_examples`: dropout, bits, clip_norm and so on;
                `colluding` is 1 unless it is given here. With `correlated` and `examples` sites keep what they take
                away beside their memory, and each example is in one round (`accepted_round`).
            apply: Moves the model by the mean update; by default it is added. Privacy does not depend on it.
            secure: Sums by secure aggregation. Without, the server sees each client's noisy message.
            roster: File with the public keys of all clients; empty for none.
            ledger: File of a privacy ledger; empty for none.
            population: The ledger's name of the clients; needed with a ledger.
            checkpoint: File that is written after each round. If it is there already, the job goes on with the round
                after its last, and charges no round twice; empty for none.
            measures: Names of metrics that train scripts return, each with its range, [low, high]. Their means are
                estimated from the same budget: each is one coordinate more of the plan.
            adaptive: The fields of `cpsgd.federation.extras.AdaptiveClip`, to find the norm that updates are clipped to
                by a private count of those that were: one coordinate more, too. None for the plan's norm.
            pace: The fields of `cpsgd.federation.carrying.Pace`: how many seconds to wait for what.
            pair: Arguments of `cpsgd.engines.pair.in_federation.PairLeader`, files on the server: sums by one message
                to two servers, of which this one is the leader. None for none.
            persistor_id: NVFlare's name of the component that loads and saves the model.

        Raises:
            ParameterError: The plan is to have correlated noise, and sites do not stay.
        """
        if (plan or {}).get("correlated") is not None and examples is None:
            raise ParameterError(
                f"correlated={(plan or {})['correlated']!r}: in jobs of NVFlare it is for silos that stay, and whose "
                "examples are in one round each. Give examples, leave correlated out, or use Flower."
            )
        super().__init__(persistor_id=persistor_id, task_check_period=_POLL_SECONDS)
        # Under these names the Job API writes them into the job's configuration.
        self.num_clients, self.num_rounds, self.epsilon, self.delta = num_clients, num_rounds, epsilon, delta
        self.examples, self.plan, self.apply, self.secure = examples, plan, apply, secure
        self.roster, self.ledger, self.population, self.checkpoint = roster, ledger, population, checkpoint
        self.measures, self.adaptive, self.pace, self.persistor_id = measures, adaptive, pace, persistor_id
        self.pair = pair
        self._pace = Pace(**(pace or {}))
        self._adaptive = None if adaptive is None else AdaptiveClip(**adaptive)
        self._measures = {name: (low, high) for name, (low, high) in (measures or {}).items()}
        clip = None if self._adaptive is None else self._adaptive.initial
        self._extra = Extras(measures=self._measures, clip=clip).size
        self.reports: list[RoundReport[str]] = []

    def run(self) -> None:
        """Runs all rounds; NVFlare calls it in the server's job process."""
        model = self.load_model()
        if model is None:
            return
        dim = sum(np.size(array) for array in model.params.values())
        with ExitStack() as stack:
            servers = None
            if self.pair is not None:
                from cpsgd.engines.pair.in_federation import PairLeader

                servers = stack.enter_context(closing(PairLeader(**self.pair)))
            terms = Terms(
                plan=self.make_plan(dim),
                secure=self.secure,
                examples=self.examples,
                roster=read_roster(Path(self.roster)) if self.roster else None,
                ledger=stack.enter_context(Ledger(self.ledger)) if self.ledger else None,
                population=self.population or None,
                engine="nvflare",
                pair=servers,
            )
            self.info(f"cpsgd: {self.num_clients} clients, {terms.way}. {terms.plan.guarantee}")
            course: Course[str] = Course(
                terms,
                flatten(model.params, dim),
                run=self.fl_ctx.get_job_id(),
                apply=self.apply,
                path=Path(self.checkpoint) if self.checkpoint else None,
                measures=self._measures,
                adaptive=self._adaptive,
            )
            self.reports = course.reports
            if self.reports:
                self.info(f"Goes on after round {len(self.reports)} of {self.num_rounds}.")
                model.params = unflatten(course.model, model.params)
                self.save_model(model)
            while course.round <= self.num_rounds and not self.abort_signal.triggered:
                self._round(course, terms.plan, model)

    def make_plan(self, dim: int) -> Plan:
        """Returns the plan for a model with `dim` parameters and for the extra coordinates of its updates."""
        way = {"secure": self.secure} if self.pair is None else {"pair": True}
        wanted: dict[str, Any] = {"colluding": 1, **(self.plan or {}), "rounds": self.num_rounds, **way}
        basic = (self.num_clients, dim + self._extra, self.epsilon, self.delta)
        if self.examples is None:
            return plan(*basic, **wanted)
        scheme = "every" if wanted.get("correlated") is None else "once"
        return plan_examples(*basic, examples=self.examples, **{"participation": scheme, **wanted})

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Ignores the answer and warns.

        NVFlare's own method would accept a task named "train", and use the client's context as the server's.
        """
        self.warning(f"{client.name} answers a task that it was not given.")

    def _round(self, course: Course[str], plan: Plan, model: FLModel) -> None:
        """Runs one round, and moves the model if the round is released."""
        model.current_round, model.total_rounds = course.round - 1, self.num_rounds  # NVFlare counts from 0
        self.set_fl_context(model)
        self.event(AppEventType.ROUND_STARTED)
        session = course.begin(self._nodes(course.awaited, plan.surviving))
        if not carry(session, _Transport(self, model, course.extras), self._pace):
            return  # aborted
        moved, report = course.finish(session), session.report
        for kind, reasons in (("out", report.dropped), ("at fault", report.faults)):
            for node, reason in reasons.items():
                self.info(f"{node} is {kind}: {reason}")
        if moved is None:
            self.warning(f"Round {report.round} is withheld, the model stays as it was: {report.reason}")
        else:
            self.info(f"Round {report.round} is released, with {report.survivors} clients.")
            model.params = unflatten(moved, model.params)
            self.save_model(model)
        reports = json.dumps([vars(report) for report in self.reports])
        write_file(Path(self.get_run_dir()) / REPORTS_FILE, reports.encode())
        self.event(AppEventType.ROUND_DONE)

    def _nodes(self, wanted: int, needed: int) -> list[str]:
        """Returns the clients of the job, when they are enough or time is up."""
        gathering = Gathering(self._pace, wanted, needed, time.monotonic())
        while not gathering.over(len(found := self.engine.get_clients()), time.monotonic()):
            if self.abort_signal.triggered:
                break
            time.sleep(_POLL_SECONDS)
        return [client.name for client in found]


class _Transport:
    """Carries requests and answers as NVFlare's tasks."""

    def __init__(self, controller: CpsgdController, model: FLModel, extras: Extras | None) -> None:
        self._controller, self._along = controller, (model, extras)
        self._answers: SimpleQueue[tuple[str, Shareable]] = SimpleQueue()
        self._tasks: dict[str, Task] = {}

    def send(self, session: RoundSession[str]) -> None:
        """Sends a task to each node; where clients train, with the model."""
        answers: SimpleQueue[tuple[str, Shareable]] = SimpleQueue()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            answers.put((client_task.client.name, client_task.result))  # in a thread of NVFlare's

        self._answers = answers
        model, extras = self._along if session.stage in TRAINING else (None, None)
        for node, request in session.requests().items():
            data = shareables.make_task(request, model, extras)
            self._tasks[node] = Task(shareables.TASK, data, result_received_cb=received)
            self._controller.send(self._tasks[node], self._controller.fl_ctx, targets=[node])

    def replies(self, waiting: frozenset[str]) -> list[Reply[str]]:
        """Returns the answers that have arrived, and reasons for tasks that NVFlare has ended."""
        found = []
        with suppress(Empty):
            found.append(_reply(*self._answers.get(timeout=_POLL_SECONDS)))
            while True:
                found.append(_reply(*self._answers.get_nowait()))
        for reply in found:
            self._tasks.pop(reply.node)
        if not found:
            ended = {node: self._tasks[node].completion_status for node in waiting}
            failed = {node: status for node, status in ended.items() if status not in (None, TaskCompletionStatus.OK)}
            found = [Reply(node, reason=f"NVFlare ended its task: {status.value}") for node, status in failed.items()]
        return found

    def end_stage(self) -> None:
        """Cancels the tasks that were not answered."""
        for task in self._tasks.values():
            self._controller.cancel_task(task, fl_ctx=self._controller.fl_ctx)
        self._tasks = {}

    @property
    def aborted(self) -> bool:
        """Whether the job is aborted."""
        return bool(self._controller.abort_signal.triggered)


def _reply(node: str, message: Shareable) -> Reply[str]:
    try:
        answer, metrics = shareables.read_answer(message)
    except WireError as error:
        return Reply(node, reason=str(error))
    return Reply(node, answer, metrics, len(answer))
