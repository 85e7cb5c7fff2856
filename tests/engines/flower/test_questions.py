"""Private statistics over Flower, in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, MetricRecord

from cpsgd.engines.flower import CpsgdStrategy, answer_question, ask_question, cpsgd_mod
from cpsgd.errors import ConditionError
from cpsgd.ledger import Budget, Ledger
from cpsgd.statistics import Clusters, Components, Histogram, Planned

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


POINTS = np.array([[0.9, 0.1], [-0.9, 0.1], [0.8, -0.1], [-0.8, -0.1], [0.9, 0.0], [-0.9, 0.0]])


def test_principal_components_are_a_question_like_others() -> None:
    question = Components(["x", "y"], 1, radius=1.0, mean=[0.0, 0.0])
    asked = question.plan(6, 60.0, 1e-5, **WISHES)
    agreed = {"epsilon": 60.0, "delta": 1e-5, "rounds": 1, "fingerprint": asked.protocol.fingerprint}

    def train(x: float, y: float) -> Any:
        return lambda message, context: answer_question(message, question, {"x": x, "y": y})

    members = [Node(100 + i, cpsgd_mod(**agreed), train(*point)) for i, point in enumerate(POINTS)]
    found = ask_question(LocalGrid(members), asked, timeout=1.0)
    assert found.components.shape == (1, 2)
    assert found.guarantee.epsilon <= 60.0
    assert abs(found.variances[0] - 0.75) < 0.4  # eight standard deviations


def test_rounds_of_kmeans() -> None:
    """As docs/statistics-between-machines.md has it: the centres travel in the settings, the model stays zero."""
    initial = [[0.2, 0.0], [-0.2, 0.0]]
    asked = Clusters(2, 2, radius=1.0, rounds=2, initial=initial).plan(12, 450.0, 1e-5, **WISHES)
    agreed = {"epsilon": 450.0, "delta": 1e-5, "rounds": 2, "fingerprint": asked.protocol.fingerprint}

    def train(point: Any) -> Any:
        def answer(message: Message, context: Context) -> Message:
            centres: Any = np.reshape(message.content["config"]["centres"], (-1, 2))
            return answer_question(message, asked.around(centres).question, point)

        return answer

    server, means = asked.start(), []
    config = ConfigRecord({"centres": server.centres.ravel().tolist()})

    def keep(model: Any, mean: Any, round: int) -> Any:
        means.append(mean)
        return model

    def update(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if means:
            found = asked.around(server.centres).result(means.pop(), strategy.reports[-1].survivors)
            config["centres"] = server.update(found).ravel().tolist()
        return None

    strategy = CpsgdStrategy(asked.plan, apply=keep)
    members = [Node(100 + i, cpsgd_mod(**agreed), train(point)) for i, point in enumerate([*POINTS, *POINTS])]
    zeros = ArrayRecord({"answer": Array(np.zeros(asked.protocol.dim, dtype=np.float32))})
    strategy.start(LocalGrid(members), zeros, num_rounds=2, timeout=1.0, train_config=config, evaluate_fn=update)
    assert [report.released for report in strategy.reports] == [True, True]
    found = server.result()
    # Eight standard deviations.
    np.testing.assert_allclose(found.centres, [[0.87, 0.0], [-0.87, 0.0]], atol=0.5)
    assert found.guarantee.epsilon <= 450.0
