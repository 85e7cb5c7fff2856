"""Private statistics over NVFlare: a question is a round whose model is zero and whose update is the client's vector.

In a client's train script, under `CpsgdExecutor` with the fingerprint of the plan's protocol among its limits:

    flare.send(answer_question(flare.receive(), question, my_rows))

On the server `question_controller(...)` with a persistor of `zero_model(question)`, and `read_answers` of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from nvflare.app_common.abstract.fl_model import FLModel, ParamsType

from cpsgd.errors import ConditionError
from cpsgd.federation.messages import flatten
from cpsgd.statistics.planned import Planned
from cpsgd.statistics.questions import Answer, Question

if TYPE_CHECKING:
    from cpsgd.engines.nvflare.controller import CpsgdController

_NAME = "answer"


def answer_question(received: FLModel, question: Question[Any], value: object) -> FLModel:
    """Returns the reply of a client's train script: the vector, as a difference from the received model.

    Args:
        received: The model that `flare.receive()` returned.
        question: The client's own copy of the question: a server could otherwise ask for anything.
        value: The client's rows, in any form that `question.vector` takes.
    """
    return FLModel(ParamsType.DIFF, {_NAME: question.vector(value)}, current_round=received.current_round)


def zero_model(question: Question[Any]) -> dict[str, NDArray[np.float32]]:
    """Returns the model that a question's round begins with.

    Example:
        >>> from cpsgd.statistics import Histogram
        >>> zero_model(Histogram("colour", categories=["red", "green"]))
        {'answer': array([0., 0.], dtype=float32)}
    """
    return {_NAME: np.zeros(question.geometry.dim, dtype=np.float32)}


def question_controller(
    question: Question[Any],
    num_clients: int,
    epsilon: float,
    delta: float,
    *,
    plan: Mapping[str, Any] | None = None,
    **options: Any,
) -> CpsgdController:
    """Returns the server's workflow, of one round.

    Args:
        question: The question.
        num_clients: Number of clients.
        epsilon: ε, for replacing all rows of one client.
        delta: δ.
        plan: Further arguments of `cpsgd.plan`, as for `CpsgdController`.
        options: Further options of `CpsgdController`.

    Example:
        >>> from cpsgd.statistics import Histogram
        >>> question = Histogram("colour", categories=["red", "green"])
        >>> question_controller(question, 20, epsilon=4.0, delta=1e-6).num_rounds
        1
    """
    from cpsgd.engines.nvflare.controller import CpsgdController

    stated = {name: value for name, value in question.geometry.stated().items() if name != "dim"}
    return CpsgdController(num_clients, 1, epsilon, delta, plan={**(plan or {}), **stated}, **options)


def read_answers(
    question: Question[Answer], controller: CpsgdController, model: Mapping[str, Any], *, confidence: float = 0.95
) -> Answer:
    """Returns the answer from the model that the controller's one round has left.

    Raises:
        ConditionError: Too few clients answered. Nothing was released.
    """
    (report,) = controller.reports
    if not report.released:
        raise ConditionError(f"Nothing was released: {report.reason}")
    planned = Planned(question, controller.make_plan(question.geometry.dim))
    mean = flatten(dict(model), planned.protocol.dim)
    return planned.result(mean, report.survivors, confidence=confidence)
