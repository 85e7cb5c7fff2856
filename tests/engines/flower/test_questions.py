"""Private statistics over Flower, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Message

from cpsgd.engines.flower import CpsgdStrategy, answer_question, ask_question, cpsgd_mod
from cpsgd.errors import ConditionError
from cpsgd.ledger import Budget, Ledger
from cpsgd.statistics import Histogram, Planned

from .local import LocalGrid, Node

COLOURS = ["red", "green", "blue", "red", "red", "green"]
QUESTION = Histogram("colour", categories=["red", "green", "blue"], rows=2)
WISHES: dict[str, Any] = {"secure": True, "colluding": 1, "dropout": 0.3, "bits": 14, "mechanism": "binomial"}


@pytest.fixture(scope="module")
def planned() -> Planned:
    """Six clients of whom one may drop out."""
    return QUESTION.plan(6, 40.0, 1e-5, **WISHES)


def nodes(planned: Planned, **limits: Any) -> list[Node]:
    agreed = {"epsilon": 40.0, "delta": 1e-5, "rounds": 1, "fingerprint": planned.protocol.fingerprint, **limits}

    def train(colour: str) -> Any:
        def answer(message: Message, context: Context) -> Message:
            return answer_question(message, QUESTION, {"colour": [colour, colour]})

        return answer

    return [Node(100 + i, cpsgd_mod(**agreed), train(colour)) for i, colour in enumerate(COLOURS)]


def test_a_histogram_by_secure_aggregation(planned: Planned, tmp_path: Any) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=50.0, delta=1e-5))
    members = nodes(planned)
    found = ask_question(
        LocalGrid(members), planned, timeout=1.0, ledger=ledger, population="people", confidence=1.0 - 1e-9
    )
    assert (found.names, found.users, found.unit) == (("red", "green", "blue"), 6, "user")
    assert ((found.low <= [6, 4, 2]) & (found.high >= [6, 4, 2])).all()
    assert np.abs(found.values - [6, 4, 2]).max() < 6
    assert found.epsilon <= 40.0
    assert "one-hot" in str(found.assumption)
    assert ledger.total("people").rounds == 1


def test_too_few_answers_release_nothing(planned: Planned) -> None:
    members = nodes(planned)
    for node in members[:3]:
        node.tamper = lambda reply: None
    with pytest.raises(ConditionError, match="Nothing was released"):
        ask_question(LocalGrid(members), planned, timeout=0.3, node_timeout=0.1, grace=0.0)


def test_a_model_that_would_round_vectors_apart_is_refused(planned: Planned) -> None:
    """With a model of 1e8 the difference would be 0 or 8, and the distance 2D instead of \u221a2 D."""
    members = nodes(planned)
    large = ArrayRecord({"answer": Array(np.full(3, 1e8, dtype=np.float32))})
    strategy = CpsgdStrategy(planned.plan, node_timeout=0.1, grace=0.0)
    strategy.start(LocalGrid(members), large, num_rounds=1, timeout=0.3)
    assert not strategy.reports[0].released
    assert all("TrainFunctionError" in reason for reason in strategy.reports[0].dropped.values())
    assert [node.trained for node in members] == [1] * 6


def test_a_client_that_does_not_know_the_protocol_takes_no_distance_for_granted(planned: Planned) -> None:
    members = nodes(planned, fingerprint=None, epsilon=planned.plan.guarantee.epsilon)
    with pytest.raises(ConditionError, match="Nothing was released"):
        ask_question(LocalGrid(members), planned, timeout=0.3, node_timeout=0.1, grace=0.0)
