"""One example's share of a client's sum: the distance the accounting relies on, and what is sent."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from cpsgd.codec import pipeline
from cpsgd.codec.clip import Grid
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.learning import NoPrivacy, Trainer, mlp
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.example_sums import ExampleSums
from cpsgd.learning.experiment import Experiment
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.settings import Settings
from cpsgd.neighbours import Adjacency
from cpsgd.planner import plan
from cpsgd.planner.examples import plan_examples, sum_norm
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.privacy.one_example import example_norm, example_protocol
from cpsgd.protocol import Protocol
from tests.learning.nets import cnn
from tests.learning.training import LOSS, finish, gradient, linear, make_trainer, spent, weights


def grid_point(protocol: Protocol, vector: np.ndarray) -> np.ndarray:
    """Where rounding starts from."""
    assert protocol.mechanism.grid is not None
    limit = protocol.mechanism.grid.limit
    return np.rint(np.clip(pipeline.to_grid(protocol, vector, 0), -limit, limit).astype(np.float64))


@pytest.mark.parametrize("dim", [64, 100, 1000])
@pytest.mark.parametrize("levels", [2, 3, 64, 2**18])
@pytest.mark.parametrize("wide", [0.05, 0.5, 2.0])
def test_neighbours_grid_points_are_within_the_sensitivity(dim: int, levels: int, wide: float) -> None:
    examples = 20
    protocol = Protocol.rotated_binomial(
        clients=10, dim=dim, clip_norm=1.0, levels=levels, trials=10, coordinate_range=wide
    )
    bound = example_norm(1.0, examples)
    stand_in = example_protocol(protocol, examples)
    allowed = {
        adjacency: stand_in.mechanism.sensitivity(dim=dim, clip_norm=stand_in.clip_norm, adjacency=adjacency)
        * 2 ** Grid.of_levels(levels, wide).fraction_bits
        for adjacency in Adjacency
    }
    assert stand_in.clip_norm < 1.1 * bound
    rng = np.random.default_rng(levels + dim)
    largest = 0.0
    for trial in range(40):
        # All but one example pull the same way, which makes the longest sums; the last one turns round.
        common = rng.normal(size=dim)
        own = rng.normal(size=dim) if trial % 2 else common
        common, own = common / np.linalg.norm(common), own / np.linalg.norm(own)
        rest = common * bound * (examples - 1)
        vectors = [(rest + share * bound * own).astype(np.float32) for share in (1.0, -1.0, 0.0)]
        points = [grid_point(protocol, vector) for vector in vectors]
        assert np.linalg.norm(points[0] - points[1]) <= allowed[Adjacency.REPLACE_ONE]
        assert np.linalg.norm(points[0] - points[2]) <= allowed[Adjacency.ZERO_OUT]
        largest = max(largest, float(np.linalg.norm(points[0] - points[1])) / allowed[Adjacency.REPLACE_ONE])
    if wide == 2.0 and levels > 3:
        assert largest > 0.9  # the bound is not idle


@pytest.mark.parametrize(("make", "shape"), [(cnn, (1, 8, 8)), (lambda: mlp(64, 10), (64,))], ids=["cnn", "mlp"])
@pytest.mark.parametrize("other", [0.0, 1e30, math.nan])
def test_what_is_in_one_place_does_not_move_other_gradients_by_a_digit(make: Any, shape: Any, other: float) -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(37, *shape)).astype(np.float32)
    labels, counts = rng.integers(0, 10, 37), np.ones(37, dtype=np.int64)
    updates = ClientUpdates(make(), LOSS)
    before = np.concatenate([chunk.copy() for chunk in updates.chunks(Batch(features, labels, counts))])
    features[20] = other
    after = np.concatenate([chunk.copy() for chunk in updates.chunks(Batch(features, labels, counts))])
    assert np.flatnonzero((before != after).any(axis=1)).tolist() == [20]


def test_the_rounding_of_long_sums_is_paid_for() -> None:
    """Every product and every addition in float64 may be off by 2^-53 of the largest sum, for both neighbours."""
    examples = 2**22
    protocol = Protocol.rotated_binomial(
        clients=10, dim=64, clip_norm=1.0, levels=2**18, trials=10, coordinate_range=1.0
    )
    total = example_norm(1.0, examples) * examples
    float32 = (1 + 2.0**-24) ** 21 - 1
    float64 = 2 * examples * 2.0**-53
    needed = total / examples + 2 * (float32 + float64) * total + 8.0 / Grid.of_levels(2**18, 1.0).unit
    # Without float64's part the bound would be some 1e-9 of this sum's norm too small.
    assert example_protocol(protocol, examples).clip_norm >= needed


def test_the_encoder_leaves_the_longest_sums_alone() -> None:
    protocol = Protocol.rotated_binomial(clients=10, dim=300, clip_norm=1.0, levels=16, trials=10, coordinate_range=2.0)
    example_protocol(protocol, 7)
    vector = np.full(300, example_norm(1.0, 7) * 7 / math.sqrt(300), dtype=np.float32)
    unit = Grid.of_levels(16, 2.0).unit
    point = grid_point(protocol, vector)
    assert np.linalg.norm(point) / unit == pytest.approx(np.linalg.norm(vector.astype(np.float64)), abs=9.0 / unit)


def test_a_grid_too_coarse_is_refused() -> None:
    coarse = Protocol.rotated_binomial(
        clients=10, dim=10**6, clip_norm=1.0, levels=2, trials=10, coordinate_range=100.0
    )
    with pytest.raises(ParameterError, match="too coarse"):
        example_protocol(coarse, 5)


def test_sums_of_clipped_gradients() -> None:
    rng = np.random.default_rng(1)
    counts = np.array([3, 0, 1, 6, 2])
    batch = Batch(rng.normal(size=(12, 4)).astype(np.float32), rng.integers(0, 3, 12), counts)
    model = mlp(4, 3, (), seed=2)
    updates = ClientUpdates(model, LOSS)
    single = Batch(batch.features, batch.labels, np.ones(12, dtype=np.int64))
    gradients = np.concatenate([chunk.copy() for chunk in updates.chunks(single)]).astype(np.float64)
    bound = example_norm(2.0, 4)
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    assert (norms > bound).any()
    clipped = gradients * np.minimum(1.0, bound / norms)
    owners = np.repeat(np.arange(5), counts)
    # The client with six examples counts its first four.
    expected = [clipped[owners == client][:4].sum(axis=0) for client in range(5)]
    for limit in (1, 1 << 20):
        sums = ExampleSums(ClientUpdates(model, LOSS, memory_limit=limit), 2.0, 4)
        found = np.concatenate(list(sums.chunks(batch)))
        np.testing.assert_allclose(found, expected, atol=1e-5)
        assert np.linalg.norm(found, axis=1).max() <= 2.0


def run(data: ArrayDataset, mechanism: Any, **options: Any) -> Trainer:
    return finish(make_trainer(data, mechanism, **{"cohort": 200, "lr": 1.0, "examples": 5, **options}))


def test_training_with_the_privacy_of_examples(families: ArrayDataset) -> None:
    protocol = plan_examples(200, 15, 3.0, 1e-5, examples=5, clip_norm=1.0, bits=10, mechanism="binomial").protocol
    trainer = run(families, protocol, epsilon=3.0, delta=1e-5)
    found = spent(trainer)
    assert 2.5 < found.epsilon <= 3.0
    # Protecting whole clients with the same noise costs about five times as much.
    assert guarantee_over_rounds(protocol, 1e-5, participation="once").epsilon > 4 * found.epsilon
    assert not any(name.startswith("paper") for name, _ in found.alternatives)
    assert (trainer.history[-1].accuracy or 0.0) > 0.8


def test_a_requirement_that_would_be_too_coarse_with_the_noise_of_whole_clients() -> None:
    # A protocol with this ε for a whole client has a range so wide that its grid cannot tell one example's share.
    required: dict[str, Any] = {"bits": 2, "participation": "once"}
    for_clients = plan(100, 64, 0.02, 1e-6, sum_norm(1.0, 10), **required).protocol
    with pytest.raises(ParameterError, match="too coarse"):
        example_protocol(for_clients, 10)
    found = example_protocol(plan_examples(100, 64, 0.02, 1e-6, examples=10, **required).protocol, 10)
    assert 0.0195 < guarantee_over_rounds(found, 1e-6, participation="once").epsilon <= 0.02


def test_without_privacy_it_is_sgd_on_the_examples(families: ArrayDataset) -> None:
    trainer = run(families, NoPrivacy(1e6), rounds=1)
    expected = weights(linear()) - gradient(linear(), families, trainer._cohorts.clients(0))
    np.testing.assert_allclose(weights(trainer), expected, atol=1e-5)


def test_bad_input(families: ArrayDataset) -> None:
    with pytest.raises(ParameterError, match="whole clients"):
        run(families, NoPrivacy(1.0), participation="fixed-size")
    with pytest.raises(ParameterError, match="examples or local_steps"):
        run(families, NoPrivacy(1.0), local_steps=2, local_lr=0.1)
    with pytest.raises(ParameterError, match="zero-out"):
        plan_examples(200, 15, 3.0, 1e-5, examples=5, participation="poisson:0.1")
    with pytest.raises(InfeasibleError, match="example among 5"):
        plan_examples(2, 15, 0.5, 1e-5, examples=5, bits=1.6, mechanism="binomial")


def test_sampled_clients_are_not_taken_for_drawn_examples(families: ArrayDataset) -> None:
    """The same words mean two things: only silos draw among their examples, and a trainer's sampling draws clients."""
    asked = {"clients": 2000, "cohort": 100, "rounds": 3, "model": "linear", "baselines": False, "examples": 5}
    with pytest.raises(ParameterError, match="speaks of whole clients"):
        Experiment(Settings.of({**asked, "participation": "poisson"}))
    with pytest.raises(ParameterError, match="speaks of whole clients"):
        run(families, NoPrivacy(1.0), participation="poisson")


def test_a_range_that_one_example_fills_is_refused() -> None:
    # Two sums may lie in opposite corners of so small a cube, twice as far apart as a zero-out account would have it.
    tiny = Protocol.binomial(clients=1000, dim=4, clip_norm=2.002, levels=16, trials=200, coordinate_range=0.1)
    with pytest.raises(ParameterError, match="too small for the proof"):
        example_protocol(tiny, 2)
