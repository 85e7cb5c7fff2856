"""`CpsgdController`: the server's side. Runs rounds of secure aggregation over NVFlare, releases private means only."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.app_event_type import AppEventType
from nvflare.app_common.workflows.model_controller import ModelController

from cpsgd import _validate
from cpsgd.engines.nvflare import shareables
from cpsgd.errors import CpsgdError, ParameterError
from cpsgd.federation.messages import TRAINING, flatten, unflatten
from cpsgd.federation.server import RoundReport, ServerSession, Terms
from cpsgd.ledger import Ledger
from cpsgd.planner import Plan, plan
from cpsgd.planner.examples import plan_examples
from cpsgd.secagg import read_roster

Apply = Callable[[NDArray[np.float32], NDArray[np.float32], int], NDArray[np.float32]]
"""From the model, the mean update and the round's number to the next model, all as flat vectors."""

REPORTS_FILE = "cpsgd_rounds.json"
"""In the server's folder of the job: what became of each round."""

_POLL_SECONDS = 0.1


class CpsgdController(ModelController):
    """An NVFlare workflow that adds the private mean of the clients' updates to the model.

    The plan is made when the job starts, for the model that the persistor loads. Every client counts the same. A round
    is *withheld*, and the model stays as it was, where fewer clients than `Plan.surviving` are left: their noise would
    be too little for the plan's guarantee. Rounds are numbered from 0, as everywhere in NVFlare.

    Attributes:
        reports: What became of each round so far.
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
        stage_timeout: float = 600.0,
        persistor_id: str = AppConstants.DEFAULT_PERSISTOR_ID,
    ) -> None:
        """Takes what the plan is to keep; all of it is plain enough for a job's configuration.

        Args:
            num_clients: Clients of a round.
            num_rounds: Rounds of the job, which the guarantee covers together.
            epsilon: ε that all rounds may cost a client, or an example.
            delta: δ of the guarantee.
            examples: Protects single examples, at most so many in a client's sum; None protects whole clients.
            plan: Further arguments of `cpsgd.plan`, or of `plan_examples`: dropout, bits, clip_norm and so on. All
                clients see the next model, and one of them can subtract its own noise from it: so `colluding` is 1
                unless it is given here.
            apply: What the mean update does to the model; by default it is added. Privacy does not depend on it.
            secure: Sums by secure aggregation. Without, the server sees each client's noisy message.
            roster: File with the public keys of all clients; empty for none.
            ledger: File of a privacy ledger; empty for none.
            population: The ledger's name of the clients; needed with a ledger.
            stage_timeout: Seconds that each stage of a round waits for answers.
            persistor_id: NVFlare's name of the component that loads and saves the model.
        """
        super().__init__(persistor_id=persistor_id, task_check_period=_POLL_SECONDS)
        # Under these names the Job API writes them into the job's configuration.
        self.num_clients, self.num_rounds, self.epsilon, self.delta = num_clients, num_rounds, epsilon, delta
        self.examples, self.plan, self.apply, self.secure = examples, plan, apply, secure
        self.roster, self.ledger, self.population = roster, ledger, population
        self.stage_timeout = _validate.positive("stage_timeout", stage_timeout)
        self.persistor_id = persistor_id
        self.reports: list[RoundReport[str]] = []

    def run(self) -> None:
        """All rounds; NVFlare calls it in the server's job process."""
        model = self.load_model()
        if model is None:
            return
        with ExitStack() as stack:
            terms = Terms(
                plan=self._plan(sum(np.size(array) for array in model.params.values())),
                secure=self.secure,
                examples=self.examples,
                roster=read_roster(Path(self.roster)) if self.roster else None,
                ledger=stack.enter_context(Ledger(self.ledger)) if self.ledger else None,
                population=self.population or None,
                engine="nvflare",
            )
            self.info(f"cpsgd: {self.num_clients} clients, {terms.way}. {terms.plan.guarantee}")
            for round in range(self.num_rounds):
                model.current_round, model.total_rounds = round, self.num_rounds
                self.set_fl_context(model)
                self.event(AppEventType.ROUND_STARTED)
                self._round(terms, model)
                self.event(AppEventType.ROUND_DONE)
                if self.abort_signal.triggered:
                    return

    def _plan(self, dim: int) -> Plan:
        wanted: dict[str, Any] = {"colluding": 1, **(self.plan or {}), "rounds": self.num_rounds, "secure": self.secure}
        basic = (self.num_clients, dim, self.epsilon, self.delta)
        if self.examples is None:
            return plan(*basic, **wanted)
        return plan_examples(*basic, examples=self.examples, participation="every", **wanted)

    def _round(self, terms: Terms, model: FLModel) -> None:
        """Runs one round, and moves the model if the round is released."""
        vector = flatten(model.params, terms.plan.protocol.dim)
        nodes = [client.name for client in self.engine.get_clients()]
        chosen = random.SystemRandom().sample(nodes, min(self.num_clients, len(nodes)))
        session = ServerSession(terms, model.current_round, chosen, run=self.fl_ctx.get_job_id())
        self.reports.append(session.report)
        while session.stage is not None and not self.abort_signal.triggered:
            self._exchange(session, model if session.stage in TRAINING else None)
            session.close()
        if session.stage is not None:
            return
        mean, report = session.release(), session.report
        for node, reason in report.dropped.items():
            self.info(f"{node} is out: {reason}")
        if mean is None:
            self.warning(f"Round {report.round} is withheld, the model stays as it was: {report.reason}")
        else:
            following = vector + mean if self.apply is None else self.apply(vector, mean, report.round)
            following = np.asarray(following, dtype=np.float32)
            if following.shape != mean.shape:
                raise ParameterError(f"Expected apply to return {len(mean)} numbers, got shape {following.shape}.")
            model.params = unflatten(following, model.params)
            self.info(f"Round {report.round} is released, with {report.survivors} clients.")
            self.save_model(model)
        reports = Path(self.get_run_dir()) / REPORTS_FILE
        reports.write_text(json.dumps([vars(report) for report in self.reports]))

    def _exchange(self, session: ServerSession[str], model: FLModel | None) -> None:
        """Carries the requests of one stage to their clients, and the answers back."""
        answers: SimpleQueue[tuple[str, Shareable]] = SimpleQueue()

        def received(client_task: ClientTask, fl_ctx: FLContext) -> None:
            answers.put((client_task.client.name, client_task.result))  # in a thread of NVFlare's

        waiting: dict[str, Task] = {}
        for node, request in session.requests().items():
            data = shareables.make_task(request, model)
            waiting[node] = Task(shareables.TASK, data, result_received_cb=received)
            self.send(waiting[node], self.fl_ctx, targets=[node])
        deadline = time.monotonic() + self.stage_timeout
        while waiting and time.monotonic() < deadline and not self.abort_signal.triggered:
            try:
                node, reply = answers.get(timeout=_POLL_SECONDS)
            except Empty:
                for node, task in list(waiting.items()):
                    if task.completion_status not in (None, TaskCompletionStatus.OK):
                        session.drop(node, f"NVFlare ended its task: {task.completion_status.value}")
                        del waiting[node]
                continue
            if waiting.pop(node, None) is None:
                continue
            try:
                answer, metrics = shareables.read_answer(reply)
                session.report.upload_bytes[node] = session.report.upload_bytes.get(node, 0) + len(answer)
                session.receive(node, answer, metrics)
            except CpsgdError as error:
                session.drop(node, str(error))
        for task in waiting.values():
            self.cancel_task(task, fl_ctx=self.fl_ctx)
