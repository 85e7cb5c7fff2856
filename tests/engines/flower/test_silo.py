from __future__ import annotations

from functools import cache

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod, silo_sum
from cpsgd.engines.flower.records import RECORD
from cpsgd.errors import ParameterError
from cpsgd.learning.models import mlp
from cpsgd.planner import Plan
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy.one_example import example_norm

from .local import LocalGrid, Node

LOSS = torch.nn.functional.cross_entropy
EXAMPLES = 30
FEATURES = np.random.default_rng(1).normal(size=(4, EXAMPLES + 2, 6)).astype(np.float32)
LABELS = np.random.default_rng(2).integers(0, 3, (4, EXAMPLES + 2))


@cache
def planned() -> Plan:
    """For four silos, of which one may drop out and one may collude."""
    return plan_examples(
        *(4, 21, 4.0, 1e-5),
        examples=EXAMPLES,
        rounds=2,
        participation="every",
        dropout=0.25,
        colluding=1,
        secure=True,
        bits=14,
        mechanism="binomial",
    )


def asked(clip_norm: float, examples: int, rate: float = 1.0) -> Message:
    record = ConfigRecord({"clip-norm": clip_norm, "examples": examples, "rate": rate})
    return Message(RecordDict({RECORD: record}), dst_node_id=1, message_type="train")


def expected(silo: int, clip_norm: float) -> np.ndarray:
    total = np.zeros(21)
    for x, y in zip(FEATURES[silo, :EXAMPLES], LABELS[silo, :EXAMPLES], strict=True):
        network = mlp(6, 3, (), seed=0)
        slopes = torch.autograd.grad(
            LOSS(network(torch.from_numpy(x)[None]), torch.tensor([y])), list(network.parameters())
        )
        gradient = np.concatenate([slope.numpy().reshape(-1) for slope in slopes])
        total += gradient * min(1.0, example_norm(clip_norm, EXAMPLES) / np.linalg.norm(gradient))
    return total


def test_the_sum_of_the_first_examples_gradients_each_clipped() -> None:
    found = silo_sum(asked(9.0, EXAMPLES), mlp(6, 3, (), seed=0), LOSS, FEATURES[0], LABELS[0])
    assert list(found) == ["0.weight", "0.bias"]
    vector = np.concatenate([array.numpy().reshape(-1) for array in found.values()])
    np.testing.assert_allclose(vector, expected(0, 9.0), atol=1e-5)


def test_only_under_the_mod() -> None:
    with pytest.raises(ParameterError, match="needs a train function"):
        silo_sum(asked(9.0, 0), mlp(6, 3, (), seed=0), LOSS, FEATURES[0], LABELS[0])


def test_silos_learn_from_examples() -> None:
    plan = planned()

    def train(silo: int) -> object:
        def function(message: Message, context: Context) -> Message:
            network = mlp(6, 3, (), seed=0)
            network.load_state_dict(message.content.array_records["arrays"].to_torch_state_dict())
            found = silo_sum(message, network, LOSS, FEATURES[silo], LABELS[silo])
            return Message(RecordDict({"sum": found}), reply_to=message)

        return function

    mod = cpsgd_mod(epsilon=4.0, delta=1e-5, rounds=2, examples=EXAMPLES)
    members = [Node(100 + i, mod, train(i)) for i in range(4)]
    means: list[np.ndarray] = []

    def apply(model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        means.append(mean)
        return model

    strategy = CpsgdStrategy(plan, apply=apply, examples=EXAMPLES)
    start = ArrayRecord(mlp(6, 3, (), seed=0).state_dict())
    strategy.start(LocalGrid(members), start, num_rounds=2, timeout=5.0)
    assert [report.dropped for report in strategy.reports] == [{}, {}]
    truth = np.mean([expected(silo, plan.protocol.clip_norm) for silo in range(4)], axis=0)
    for mean in means:
        # 21 coordinates: nine times the expected squared error has a probability below 1e-25.
        assert 0.0 < np.sum((mean - truth) ** 2) < 9 * plan.error.total


def test_the_mod_refuses_a_plan_for_fewer_examples() -> None:
    plan = planned()
    # With five examples in place of 30, one of them is a sixth of the sum and no longer hidden.
    mod = cpsgd_mod(epsilon=4.0, delta=1e-5, rounds=2, examples=5)
    members = [Node(100 + i, mod, lambda message, context: message) for i in range(4)]
    strategy = CpsgdStrategy(plan, examples=5)
    strategy.start(LocalGrid(members), ArrayRecord(mlp(6, 3, (), seed=0).state_dict()), num_rounds=1, timeout=5.0)
    assert not strategy.reports[0].released
    assert all("limit is 4" in reason for reason in strategy.reports[0].dropped.values())
    assert len(strategy.reports[0].dropped) == 4
