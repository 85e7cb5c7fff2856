"""Clients in this process, for tests that need no processes: every message is serialized and read again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext, FLContextManager
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.abstract.model import ModelLearnable, make_model_learnable
from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.decomposers import common_decomposers
from nvflare.app_common.utils.fl_model_utils import FLModelUtils
from nvflare.fuel.utils import fobs

from cpsgd.engines.nvflare import CpsgdController, CpsgdExecutor
from cpsgd.planner import plan

common_decomposers.register()

JOB = "a-job"
cached_plan = cache(plan)
Tamper = Callable[[Any], Any]


def through_the_wire(data: Any) -> Any:
    return fobs.loads(fobs.dumps(data))


class Workspace:
    """A site's folder, as far as an adapter looks into it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get_site_config_dir(self) -> str:
        return str(self.folder / "local")

    def get_run_dir(self, job_id: str) -> str:
        return str(self.folder)


def context(folder: Path, name: str, job: str = JOB) -> FLContext:
    engine = SimpleNamespace(get_workspace=lambda: Workspace(folder), fire_event=lambda *arguments: None)
    return FLContextManager(engine=engine, identity_name=name, job_id=job).new_context()


class Trainer(Executor):
    """Stands for a train script: makes a result of the model it is sent."""

    def __init__(self, train: Callable[[FLModel], Any]) -> None:
        super().__init__()
        self.train = train
        self.received: list[FLModel] = []

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        assert task_name == "train"
        self.received.append(FLModelUtils.from_shareable(shareable))
        found = self.train(self.received[-1])
        return FLModelUtils.to_shareable(found) if isinstance(found, FLModel) else found


def adds(vector: np.ndarray, **metrics: float) -> Callable[[FLModel], FLModel]:
    """Moves the model by a known vector."""

    def train(model: FLModel) -> FLModel:
        moved, start = {}, 0
        for name, array in model.params.items():
            moved[name] = array + vector[start : start + array.size].reshape(array.shape)
            start += array.size
        return FLModel(params=moved, metrics=metrics or None)

    return train


class Site:
    """A client; `tamper` may change its replies, or return None for silence."""

    def __init__(self, folder: Path, name: str, train: Callable[[FLModel], Any], **options: Any) -> None:
        self.folder, self.name = folder / name, name
        (self.folder / "local").mkdir(parents=True)
        self.trainer = Trainer(train)
        self.options = options
        self.tamper: Tamper = lambda reply: reply
        self.begin(JOB)

    def begin(self, job: str) -> None:
        """As NVFlare does for each job: a new process, with nothing but the site's folder."""
        self.executor = CpsgdExecutor(self.trainer, **self.options)
        self.context = context(self.folder, self.name, job)

    def answer(self, data: Shareable) -> Any:
        reply = self.executor.execute("cpsgd", through_the_wire(data), self.context, Signal())
        return self.tamper(through_the_wire(reply))


class Persistor(ModelPersistor):
    """Keeps models in memory."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        super().__init__()
        self.saved = [arrays]

    def load_model(self, fl_ctx: FLContext) -> ModelLearnable:
        return make_model_learnable(self.saved[-1], {})

    def save_model(self, model: ModelLearnable, fl_ctx: FLContext) -> None:
        self.saved.append(dict(model["weights"]))


class Communicator:
    """Carries tasks to sites at once."""

    def __init__(self, sites: Sequence[Site]) -> None:
        self.sites = {site.name: site for site in sites}
        self.cancelled: list[Task] = []

    def send(self, task: Task, fl_ctx: FLContext, targets: list[str], *others: object) -> None:
        (name,) = targets
        reply = self.sites[name].answer(task.data)
        if reply is not None:
            client_task = ClientTask(Client(name, "token"), task)
            client_task.result = reply
            task.result_received_cb(client_task=client_task, fl_ctx=fl_ctx)

    def cancel_task(self, task: Task, *others: object) -> None:
        self.cancelled.append(task)


def run(controller: CpsgdController, sites: Sequence[Site], folder: Path, job: str = JOB) -> np.ndarray:
    """Runs a whole job; returns the last model as one vector."""
    folder.mkdir(exist_ok=True)
    persistor = Persistor({"weight": np.zeros((5, 4), np.float32), "bias": np.zeros(20, np.float32)})
    controller.persistor, controller.abort_signal = persistor, Signal()
    controller.engine = SimpleNamespace(
        get_clients=lambda: [Client(site.name, "token") for site in sites], get_workspace=lambda: Workspace(folder)
    )
    controller.fl_ctx = context(folder, "server", job)
    controller.communicator = Communicator(sites)
    controller.run()
    return np.concatenate([array.reshape(-1) for array in persistor.saved[-1].values()])


def failure(model: FLModel) -> Shareable:
    return make_reply(ReturnCode.EXECUTION_EXCEPTION)
