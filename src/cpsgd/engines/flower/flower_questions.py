"""Private statistics over Flower: a question is a round whose model is zero and whose update is the client's vector.

On a client, under `cpsgd_mod` with the fingerprint of the plan's protocol:

    @app.train(mods=[cpsgd_mod(epsilon=1.0, delta=1e-6, fingerprint=bytes.fromhex("..."))])
    def train(message, context):
        return answer_question(message, question, my_rows)

On the server `ask_question(grid, planned)`, with the question planned for secure aggregation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, Message, RecordDict

from cpsgd.engines.flower import records
from cpsgd.errors import ConditionError, RoundRefusedError
from cpsgd.federation.messages import flatten
from cpsgd.statistics.planned import Planned
from cpsgd.statistics.questions import Answer, Question

if TYPE_CHECKING:
    from flwr.serverapp import Grid

_NAME = "answer"


def answer_question(message: Message, question: Question[Any], value: object) -> Message:
    """Returns a client's reply, for a train function under `cpsgd_mod`.

    Args:
        message: The train function's message.
        question: The client's own copy of the question: a server could otherwise ask for anything.
        value: The client's rows, in any form that `question.vector` takes.

    Raises:
        RoundRefusedError: The server's model is not zero. Clients send differences from the model; differences from
            large numbers are rounded, which the accounting does not cover.
    """
    (sent,) = message.content.array_records.values()
    arrays = records.read_arrays(sent)
    if any(np.any(array) for array in arrays.values()):
        raise RoundRefusedError("A question goes with a model of zeros; the server's is another.")
    reply = records.make_arrays({_NAME: question.vector(value)})
    return Message(RecordDict({"arrays": reply}), reply_to=message)


def ask_question(grid: Grid, planned: Planned[Answer], *, confidence: float = 0.95, **options: Any) -> Answer:
    """Returns the answer from all clients' answers, in one round.

    Args:
        grid: Flower's grid.
        planned: The question, planned with `secure=True` and `colluding=1`, as for `CpsgdStrategy`.
        confidence: Of the intervals, where the answer has some.
        options: Options of `CpsgdStrategy`, and `timeout` of its `start`.

    Raises:
        ConditionError: Too few clients answered. Nothing was released.
    """
    from cpsgd.engines.flower.strategy import CpsgdStrategy

    start = {name: options.pop(name) for name in ("timeout",) if name in options}
    strategy = CpsgdStrategy(planned.plan, **options)
    zeros = records.make_arrays({_NAME: np.zeros(planned.protocol.dim, dtype=np.float32)})
    found: ArrayRecord = strategy.start(grid, zeros, num_rounds=1, **start).arrays
    (report,) = strategy.reports
    if not report.released:
        raise ConditionError(f"Nothing was released: {report.reason}")
    mean = flatten(records.read_arrays(found), planned.protocol.dim)
    return planned.result(mean, report.survivors, confidence=confidence)
