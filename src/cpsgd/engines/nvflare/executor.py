"""The client's side: `CpsgdExecutor` wraps an executor, and what leaves the client is one private, masked vector.

`silo_sum` is what a silo's train script sends where single examples are protected.
"""

from __future__ import annotations

import json
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType
from nvflare.app_common.app_constant import AppConstants
from nvflare.app_common.logging.constants import is_log_streaming_allowed
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from cpsgd.engines.nvflare import shareables
from cpsgd.engines.nvflare.shareables import ACCEPTED
from cpsgd.engines.pair import task_of
from cpsgd.engines.silo import example_sum
from cpsgd.errors import (
    CpsgdError,
    ParameterError,
    RoundRefusedError,
    StageError,
    TrainFunctionError,
    VectorError,
)
from cpsgd.federation.answering import ClientSession, call_privately
from cpsgd.federation.client_files import FILE_KEYS, TASK_KEY
from cpsgd.federation.limits import Limits, check_names, open_client_files
from cpsgd.federation.messages import check_alike, flatten
from cpsgd.protocol import Protocol

if TYPE_CHECKING:
    import torch

    from cpsgd.learning.models import Loss

SITE_FILE = "cpsgd.json"
"""The file in a site's `local` folder with the site's own conditions; its fields stand above those of any job."""

_SITE_FIELDS = ("limits", "allow_metrics", "secure", "require_memory", "require_roster", *FILE_KEYS)


class CpsgdExecutor(Executor):
    """Takes part in rounds of `CpsgdController`, and calls another executor to train.

    That one stays as it is: it gets the model and returns the trained one, or the difference. The difference is the
    update; it is clipped, rounded, given its share of the noise, masked, and sent as bytes. Everything else that it
    returns stays here, except the metrics named in `allow_metrics`. An error in it is reported to the server without
    its text. Whatever task the server sends, what has no request of cpsgd in it is refused.

    The client does not take the server's word for its privacy: with `epsilon` and `delta` among its limits it computes
    the guarantee itself, for all rounds together, and refuses every round that would not keep them. A job comes from
    outside, too. So a site's operator can write `local/cpsgd.json` in the site's workspace:

        {"limits": {"epsilon": 4.0, "delta": 1e-6}, "allow_metrics": [], "secure": true,
         "require_memory": true, "require_roster": true,
         "cpsgd-memory": "/path", "cpsgd-identity": "/path", "cpsgd-roster": "/path", "cpsgd-task": "/path"}

    Every field may be left out; one that is not known refuses every round. A limit that stands there replaces the
    job's, and `epsilon` also the job's `delta`, `colluding`, `adjacency`, `examples` and `fingerprint`, for it means
    nothing without them. Files of the last line are never the job's to name.
    """

    def __init__(
        self,
        executor: Executor,
        limits: dict[str, Any] | None = None,
        allow_metrics: list[str] | None = None,
        secure: bool = True,
        require_memory: bool = False,
        require_roster: bool = False,
    ) -> None:
        """Wraps an executor.

        Args:
            executor: The executor that trains, for instance NVFlare's `ClientAPIExecutor` with a script.
            limits: The fields of `Limits`: epsilon, delta, rounds and so on; `fingerprint` in hexadecimal. With
                `examples` the script sends the *sum* of at most this many clipped gradients, as `silo_sum` makes it.
            allow_metrics: Names of metrics that may leave. They travel in clear and outside the privacy guarantee.
            secure: False also accepts rounds without secure aggregation, in which the server sees this client's own
                noisy message. The guarantees above then hold only for those who see no more than the model.
            require_memory: Refuses every round at a site without `cpsgd-memory`; a site can require it, too.
            require_roster: Refuses every round at a site without `cpsgd-identity` and `cpsgd-roster`; a site can
                require them, too.
        """
        super().__init__()
        # Under these names the Job API writes them into the job's configuration.
        self.executor, self.limits, self.allow_metrics, self.secure = executor, limits, allow_metrics, secure
        self.require_memory, self.require_roster = require_memory, require_roster
        self._conditions({})
        # SciPy, which limits are computed with, looks at PyTorch where it is loaded, also where a train script that
        # starts in another thread has loaded half of it.
        with suppress(ImportError):
            import_module("torch")
        self._state = b""
        self._warned = False
        # A server may also push tasks, which NVFlare runs beside those that the client has asked for.
        self._lock = Lock()

    def requires_materialized_task_result(self, task_name: str) -> bool:
        """Returns True: the result of the executor inside is read here, and not passed through to the server."""
        return True

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answers one request of the server."""
        try:
            with self._lock:
                return self._answer(shareable, fl_ctx, abort_signal)
        except CpsgdError as error:
            self.log_warning(fl_ctx, f"Nothing is sent. {type(error).__name__}: {error}")
            return shareables.make_refusal(error)

    def _answer(self, data: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """Answers one request of the server, within the site's own limits."""
        request, site = shareables.read_request(data), _site(fl_ctx)
        limits, allowed, secure = self._conditions(site)
        if not self._warned and is_log_streaming_allowed(fl_ctx):
            self._warned = True
            self.log_warning(
                fl_ctx,
                "This site lets NVFlare send logs to the server, and with them what errors of the train script quote. "
                'Set "allow_log_streaming" to false in local/resources.json.',
            )
        memory, signing = open_client_files(
            site,
            require_memory=self.require_memory or site.get("require_memory", False) is not False,
            require_roster=self.require_roster or site.get("require_roster", False) is not False,
        )
        session = ClientSession(
            limits,
            fl_ctx.get_job_id(),
            self._state,
            memory=memory,
            signing=signing,
            secure=secure,
            task=task_of(site[TASK_KEY]) if TASK_KEY in site else None,
        )
        metrics: dict[str, float] = {}

        def train(protocol: Protocol) -> NDArray[np.float32]:
            sent = shareables.read_model(data, StageError("Expected a model in the server's task."))
            extras = shareables.read_extras(data)
            if extras is not None:
                extras.check(protocol, limits.examples)
            dim = protocol.dim - (0 if extras is None else extras.size)
            start = flatten(sent.params, dim)
            # The train script sees what was accepted here, and nothing else of what the server wrote.
            examples = {"examples": limits.examples or 0, "rate": limits.rate}
            meta = {ACCEPTED: {"clip-norm": protocol.clip_norm, "round": session.round, **examples}}
            rounds = {"current_round": sent.current_round, "total_rounds": sent.total_rounds}
            task = FLModelUtils.to_shareable(FLModel(ParamsType.FULL, sent.params, meta=meta, **rounds))
            found = self._train(task, fl_ctx, abort_signal)
            check_alike(found.params, sent.params)
            vector = flatten(found.params, dim)
            numbers = found.metrics if isinstance(found.metrics, dict) else {}
            metrics.update({name: numbers[name] for name in allowed if isinstance(numbers.get(name), int | float)})
            update = vector - start if found.params_type == ParamsType.FULL and limits.examples is None else vector
            return update if extras is None else extras.encode(update, numbers, protocol.clip_norm)

        try:
            answer = session.answer(request, train)
        finally:
            self._state = session.state
        return shareables.make_answer(answer, metrics)

    def _train(self, task: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> FLModel:
        """Returns the model that the executor inside has trained."""
        result = call_privately(self.executor.execute, AppConstants.TASK_TRAIN, task, fl_ctx, abort_signal)
        if not isinstance(result, Shareable) or result.get_return_code() != ReturnCode.OK:
            raise TrainFunctionError("an error reply")
        return shareables.read_model(result, VectorError("Expected the train script to send a model of arrays."))

    def _conditions(self, site: dict[str, Any]) -> tuple[Limits, frozenset[str], bool]:
        """Returns the limits, the metrics that may leave, and whether secure aggregation is insisted on."""
        job, own = self.limits or {}, site.get("limits", {})
        if "epsilon" in own:
            # A job that says what this ε is of (examples, another adjacency, a distance) would make it void.
            job = {name: value for name, value in job.items() if name in ("rounds", "min_clients")}
        fields = {**job, **own}
        check_names(fields, Limits.__dataclass_fields__)
        if isinstance(fields.get("fingerprint"), str):
            fields["fingerprint"] = bytes.fromhex(fields["fingerprint"])
        metrics = site.get("allow_metrics", self.allow_metrics or [])
        if not isinstance(metrics, list):
            raise ParameterError(f"Expected allow_metrics to be a list of names, got {type(metrics).__name__}.")
        return Limits(**fields), frozenset(metrics), bool(site.get("secure", self.secure))


def accepted_round(received: FLModel) -> int:
    """Returns the round, from 1 on, that the client has accepted, for a train script with `disjoint` examples.

    It is not the server's `current_round`: which examples are in which round must not be for the server to say.

    Args:
        received: The model that `flare.receive()` returned.

    Raises:
        ParameterError: The train script does not run under `CpsgdExecutor`.
    """
    found = (received.meta or {}).get(ACCEPTED, {}).get("round")
    if not isinstance(found, int) or found < 1:
        raise ParameterError("accepted_round needs a train script under CpsgdExecutor.")
    return found


def silo_sum(
    received: FLModel,
    model: torch.nn.Module,
    loss: Loss,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> FLModel:
    """Returns the sum of the examples' clipped gradients, for a train script under limits with `examples`.

    What each gradient is clipped to follows from the protocol that the client has accepted. Of more examples than
    `examples` the first ones count. With a `rate` each of these is drawn by itself, in secret, anew in every round.

    Args:
        received: The model that `flare.receive()` returned.
        model: The model with the received parameters in it.
        loss: From a model's outputs and the labels to their mean loss.
        features: The silo's examples, one per row.
        labels: Their classes.

    Returns:
        What to give to `flare.send()`.

    Raises:
        ParameterError: The train script does not run under `CpsgdExecutor` with `examples`.
    """
    import torch

    accepted = (received.meta or {}).get(ACCEPTED, {})
    examples, rate, clip_norm = (accepted.get(name) for name in ("examples", "rate", "clip-norm"))
    if not isinstance(examples, int) or examples < 1 or not isinstance(rate, float):
        raise ParameterError("silo_sum needs a train script under CpsgdExecutor(limits={'examples': ...}).")
    found = example_sum(model, loss, features, labels, clip_norm=clip_norm, examples=examples, rate=rate)
    return FLModel(ParamsType.FULL, {name: torch.from_numpy(array) for name, array in found.items()})


def _site(fl_ctx: FLContext) -> dict[str, Any]:
    """Reads the settings of the site's operator; nothing if there is no file.

    Raises:
        RoundRefusedError: The file cannot be read, or has a field that is not known.
    """
    path = Path(fl_ctx.get_workspace().get_site_config_dir()) / SITE_FILE
    try:
        found = json.loads(path.read_text())
        if isinstance(found, dict) and isinstance(found.get("limits", {}), dict):
            check_names(found, _SITE_FIELDS)
            return found
    except FileNotFoundError:
        return {}
    except RoundRefusedError:
        raise
    except (OSError, ValueError):
        pass
    # The server is told this text, so it names no path and quotes nothing.
    raise RoundRefusedError(f"This site cannot read its own conditions in {SITE_FILE}.")
