"""NVFlare's Shareables: a request or an answer as bytes, metrics, refusals, and a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.shareable import Shareable, make_reply
from nvflare.app_common.abstract.fl_model import FLModel
from nvflare.app_common.utils.fl_model_utils import FLModelUtils

from cpsgd.errors import CpsgdError, StageError, WireError
from cpsgd.federation.extras import Extras

TASK = "cpsgd"  # the name of all our tasks
ACCEPTED = "cpsgd"  # in the model's meta, for the train script: what the client has accepted
_REQUEST = "cpsgd-request"
_EXTRAS = "cpsgd-extras"
_ANSWER = "cpsgd-answer"
_METRICS = "cpsgd-metrics"
_REASON = "cpsgd-reason"


def make_task(request: bytes, model: FLModel | None, extras: Extras | None = None) -> Shareable:
    """Returns a task's data: the request, and for training also the model and the extra numbers."""
    data = Shareable() if model is None else FLModelUtils.to_shareable(model)
    data[_REQUEST] = request
    if extras is not None:
        data[_EXTRAS] = extras.to_json()
    return data


def read_request(data: Shareable) -> bytes:
    """Returns the request in a task from the server.

    Raises:
        StageError: The task is not part of a round of cpsgd.
    """
    request = data.get(_REQUEST)
    if not isinstance(request, bytes):
        raise StageError(
            "The server's task holds no request of cpsgd: what it would get is not protected, so nothing is sent. Use "
            "CpsgdController on the server."
        )
    return request


def read_extras(data: Shareable) -> Extras | None:
    """Returns the numbers that the server wants to ride on the update, or None.

    Raises:
        WireError: It cannot be read.
    """
    text = data.get(_EXTRAS)
    return None if text is None else Extras.from_json(str(text))


def read_model(data: Shareable, error: CpsgdError) -> FLModel:
    """Returns the model in a task or in a train script's result; `error` is raised where there is none."""
    try:
        found = FLModelUtils.from_shareable(data)
    except Exception:
        # What a stranger can make NVFlare's reader raise is anybody's guess.
        raise error from None
    if not isinstance(found.params, dict) or not all(hasattr(array, "dtype") for array in found.params.values()):
        raise error
    return found


def make_answer(answer: bytes, metrics: Mapping[str, float]) -> Shareable:
    """Returns a reply with the client's bytes, and the metrics that may leave."""
    reply = make_reply(ReturnCode.OK)
    reply[_ANSWER] = answer
    if metrics:
        reply[_METRICS] = dict(metrics)
    return reply


def make_refusal(error: CpsgdError) -> Shareable:
    """Returns a reply with the reason for a refusal; the server may see the text of cpsgd's errors."""
    reply = make_reply(ReturnCode.EXECUTION_EXCEPTION)
    reply[_REASON] = f"{type(error).__name__}: {error}"
    return reply


def read_answer(reply: Any) -> tuple[bytes, Mapping[str, object]]:
    """Returns the client's bytes, and the metrics beside them.

    Raises:
        WireError: It is not an answer; the message is the client's reason where it gave one.
    """
    if not isinstance(reply, Shareable):
        raise WireError("The reply is not a Shareable.")
    if reply.get_return_code() != ReturnCode.OK:
        raise WireError(str(reply.get(_REASON) or reply.get_return_code()))
    answer, metrics = reply.get(_ANSWER), reply.get(_METRICS, {})
    if not isinstance(answer, bytes) or not isinstance(metrics, Mapping):
        raise WireError("The reply does not hold one answer.")
    return answer, metrics
