"""`CpsgdRecipe`: a complete job from a train script, for NVFlare's simulator, POC mode and production."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from nvflare.app_common.abstract.model_persistor import ModelPersistor
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.executors.client_api_executor import ClientAPIExecutor, ExecutionMode
from nvflare.client.config import ExchangeFormat
from nvflare.job_config.api import FedJob
from nvflare.recipe.spec import Recipe

from cpsgd.engines.nvflare.controller import CpsgdController
from cpsgd.engines.nvflare.executor import CpsgdExecutor
from cpsgd.neighbours import Participation

if TYPE_CHECKING:
    import torch

# NVFlare's clients ask for tasks; by default every two seconds, which a round of three or five stages would be made of.
_TASK_SECONDS = 0.2


class CpsgdRecipe(Recipe):
    """Federated averaging of private updates, in place of NVFlare's `FedAvgRecipe`.

    The train script uses NVFlare's Client API and stays as it is. It runs in the client's job process. Nothing is added
    to the job by which its logs or metrics would travel.

    Example:
        >>> import tempfile, torch
        >>> with tempfile.NamedTemporaryFile(suffix=".py") as script:  # the train script
        ...     recipe = CpsgdRecipe(
        ...         model=torch.nn.Linear(4, 2), train_script=script.name, num_clients=10, num_rounds=5,
        ...         epsilon=4.0, delta=1e-5,
        ...     )
        >>> recipe._job.name
        'cpsgd'
    """

    def __init__(
        self,
        *,
        name: str = "cpsgd",
        model: torch.nn.Module | ModelPersistor,
        train_script: str,
        train_args: str = "",
        num_clients: int,
        num_rounds: int,
        epsilon: float,
        delta: float,
        examples: int | None = None,
        plan: dict[str, Any] | None = None,
        limits: dict[str, Any] | None = None,
        allow_metrics: list[str] | None = None,
        secure: bool = True,
        require_memory: bool = False,
        require_roster: bool = False,
        **server: Any,
    ) -> None:
        """Makes the job.

        Args:
            name: The job's name.
            model: The first model of PyTorch, or a persistor that loads one of any kind as NumPy arrays.
            train_script: File of the train script.
            train_args: Its arguments.
            num_clients: Clients of a round. The job starts when as many are there as the plan needs to survive.
            num_rounds: Rounds of the job.
            epsilon: ε that all rounds may cost a client, or an example.
            delta: δ of the guarantee.
            examples: Protects single examples, at most this many in a client's sum; None protects whole clients.
            plan: Further arguments of `cpsgd.plan`.
            limits: Limits of the clients, unless a site has its own; by default ε, δ, `examples`, and the rate and
                adjacency of `plan` where examples are drawn ("participation": "poisson:RATE").
            allow_metrics: Names of metrics that may leave a client, in clear.
            secure: Secure aggregation, which the clients then insist on.
            require_memory: Sites without `cpsgd-memory` refuse every round.
            require_roster: Sites without `cpsgd-identity` and `cpsgd-roster` refuse every round.
            server: Further arguments of `CpsgdController`: apply, roster, ledger, population, checkpoint, measures,
                adaptive, pace, pair.
        """
        surviving = num_clients - math.ceil(num_clients * (plan or {}).get("dropout", 0.0) - 1e-9)
        job = FedJob(name=name, min_clients=surviving)
        job.set_app_packages(["cpsgd"])  # installed at every site, and not to be copied into the job
        is_persistor = isinstance(model, ModelPersistor)
        job.to_server(model if is_persistor else _torch_model(model), id=AppConstants.DEFAULT_PERSISTOR_ID)
        controller = CpsgdController(
            num_clients, num_rounds, epsilon, delta, examples=examples, plan=plan, secure=secure, **server
        )
        job.to_server(controller)
        job.to_server({"server": {"task_request_interval": _TASK_SECONDS}})
        trainer = ClientAPIExecutor(
            ExecutionMode.IN_PROCESS,
            task_script_path=train_script,
            task_script_args=train_args,
            params_exchange_format=ExchangeFormat.NUMPY if is_persistor else ExchangeFormat.PYTORCH,
        )
        if limits is None:
            sampling = Participation.parse((plan or {}).get("participation", "every"))
            drawn = {"rate": sampling.rate, "adjacency": "zero-out"} if sampling.sampled else {}
            limits = {"epsilon": epsilon, "delta": delta, "examples": examples, **drawn}
        executor = CpsgdExecutor(trainer, limits, allow_metrics, secure, require_memory, require_roster)
        job.to_clients(executor, tasks=["*"])
        job.to_clients(train_script)
        super().__init__(job)


def _torch_model(model: Any) -> Any:
    from nvflare.app_opt.pt.job_config.model import PTModel

    return PTModel(model)
