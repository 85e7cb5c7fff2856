from __future__ import annotations

import copy
import subprocess
import sys
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from cpsgd.errors import DivergedError, InfeasibleError, ParameterError
from cpsgd.learning import NoPrivacy, RoundMetrics, Trainer, baselines, mlp
from cpsgd.learning.datasets import ArrayDataset, Dataset, from_arrays, infinite_digits
from cpsgd.learning.estimators import Estimator
from cpsgd.neighbours import Scheme
from cpsgd.planner import Plan, plan
from cpsgd.privacy import Adjacency, guarantee_over_rounds
from cpsgd.protocol import Protocol
from tests.learning.training import DIM, finish, gradient, linear, make_trainer, spent, weights


def run(data: Dataset, mechanism: Estimator, start: torch.nn.Module | None = None, **options: Any) -> Trainer:
    return finish(make_trainer(data, mechanism, start, **{"lr": 0.5, **options}))


@pytest.fixture(scope="module")
def private() -> Plan:
    return plan(clients=100, dim=DIM, epsilon=6.0, delta=1e-5, bits=10)


@pytest.mark.parametrize(("schedule", "rates"), [("constant", (0.5, 0.5)), ("linear", (0.5, 0.25))])
def test_without_privacy_it_is_plain_sgd(triangle: ArrayDataset, schedule: str, rates: tuple[float, ...]) -> None:
    trainer = make_trainer(triangle, NoPrivacy(clip_norm=1e6), rounds=2, lr=0.5, schedule=schedule)
    for number, rate in enumerate(rates):
        before = weights(trainer)
        expected = before - rate * gradient(trainer.model, triangle, trainer._cohorts.clients(number))
        trainer.step()
        np.testing.assert_allclose(weights(trainer), expected, atol=1e-6)
    last = trainer.history[-1]
    assert (last.epsilon, last.delta, last.method, last.noise_to_signal) == (None, None, None, 0.0)
    assert (last.bytes_per_client, last.bytes_total) == (60, 2 * 100 * 60)
    assert trainer.guarantee() is None


def test_updates_are_clipped(triangle: ArrayDataset) -> None:
    trainer = run(triangle, NoPrivacy(clip_norm=1e-3), rounds=1)
    assert np.linalg.norm(weights(trainer) - weights(linear())) <= 0.5 * 1e-3


def test_fine_rounding_is_nearly_plain_sgd(triangle: ArrayDataset) -> None:
    fine = Protocol.rotated_binomial(clients=100, dim=DIM, clip_norm=3.0, levels=2**16, trials=0, coordinate_range=3.0)
    noisy = run(triangle, fine)
    plain = run(triangle, NoPrivacy(clip_norm=3.0))
    np.testing.assert_allclose(weights(noisy), weights(plain), atol=1e-3)


def test_the_accounting_keeps_the_planners_promise(triangle: ArrayDataset, private: Plan) -> None:
    trainer = run(triangle, private)
    found = spent(trainer)
    assert found.epsilon == private.guarantee.epsilon <= 6.0
    assert [row.epsilon for row in trainer.history] == [found.epsilon] * 3
    assert {row.method for row in trainer.history} == {private.guarantee.method}
    every = plan(clients=600, dim=DIM, epsilon=6.0, delta=1e-5, bits=10, rounds=4, participation="every")
    trainer = run(triangle, every, participation="every", cohort=600, rounds=4)
    assert spent(trainer).epsilon == pytest.approx(every.guarantee.epsilon, rel=1e-9)
    epsilons = [row.epsilon or 0.0 for row in trainer.history]
    assert epsilons == sorted(epsilons)
    assert epsilons[0] < 0.7 * epsilons[-1]


def test_dropouts_are_accounted_by_the_noise_that_arrived(triangle: ArrayDataset) -> None:
    private = plan(clients=200, dim=DIM, epsilon=6.0, delta=1e-5, bits=10, dropout=0.4)
    trainer = run(triangle, private, cohort=200, dropout=0.2)
    sizes = [row.survivors for row in trainer.history]
    assert all(120 < size < 200 for size in sizes)
    assert len(set(sizes)) > 1
    expected = guarantee_over_rounds(private.protocol, 1e-5, surviving=sizes, participation="once")
    assert spent(trainer).epsilon == expected.epsilon < 6.0
    assert trainer.history[-1].bytes_total == sum(sizes) * private.protocol.message_bytes
    # A plan without room for dropouts is refused: the noise that would arrive is not enough.
    tight = plan(clients=200, dim=DIM, epsilon=6.0, delta=1e-5, bits=10)
    with pytest.raises(InfeasibleError, match=r"buys 0\..* plan with dropout=0\.3"):
        run(triangle, tight, cohort=200, dropout=0.2)


def test_a_round_that_would_break_the_budget_is_abandoned(
    triangle: ArrayDataset, private: Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(triangle, private, rounds=2)
    trainer._dropout = 0.5
    before = weights(trainer)
    metrics = trainer.step()
    assert not metrics.released
    assert (metrics.epsilon, metrics.noise_to_signal) == (0.0, None)
    np.testing.assert_array_equal(weights(trainer), before)
    trainer._dropout = 0.0
    assert trainer.step().released
    assert spent(trainer).rounds == 1


@pytest.mark.parametrize("scheme", ["poisson", "fixed-size"])
def test_sampled_cohorts_learn_and_are_accounted(triangle: ArrayDataset, scheme: Scheme) -> None:
    adjacency = Adjacency.ZERO_OUT if scheme == "poisson" else Adjacency.REPLACE_ONE
    participation = f"{scheme}:{200 / 600}"
    sampled = plan(200, DIM, 8.0, 1e-4, bits=10, rounds=8, participation=participation, adjacency=adjacency)
    trainer = run(triangle, sampled, cohort=200, rounds=8, participation=scheme, evaluate_every=4, lr=1.0)
    found = spent(trainer)
    assert found.epsilon <= 8.0
    assert found.adjacency == adjacency
    assert [row.epsilon is not None for row in trainer.history] == [False, False, False, True] * 2
    assert (trainer.history[-1].accuracy or 0.0) > 0.6
    if scheme == "poisson":
        assert {row.survivors for row in trainer.history} == {trainer._cohorts.messages}


def test_the_poisson_mean_is_over_the_expected_cohort(triangle: ArrayDataset) -> None:
    fine = Protocol.rotated_binomial(
        clients=200, dim=DIM, clip_norm=30.0, levels=2**16, trials=0, coordinate_range=30.0
    )
    trainer = run(triangle, fine, cohort=200, rounds=1, participation="poisson", lr=1.0)
    expected = gradient(linear(), triangle, trainer._cohorts.clients(0), reduction="sum") / 200
    np.testing.assert_allclose(weights(linear()) - weights(trainer), expected, atol=1e-3)


def test_private_training_on_digits_learns_with_every_baseline() -> None:
    data = infinite_digits(100_000)
    dim = 64 * 10 + 10
    private = plan(clients=2000, dim=dim, epsilon=4.0, delta=1e-6, bits=6)
    accuracy: dict[str, float] = {}
    start = mlp(64, 10, (), seed=0)
    mechanisms: dict[str, Estimator] = {"private": private, **baselines(private)}
    for name, mechanism in mechanisms.items():
        options = {"cohort": 2000, "rounds": 8, "optimizer": "adagrad", "lr": 0.1, "delta": 1e-6, "epsilon": 4.001}
        trainer = run(data, mechanism, copy.deepcopy(start), **options, evaluate_every=8)
        accuracy[name] = trainer.history[-1].accuracy or 0.0
        if name in ("private", "gaussian"):
            assert 3.5 < spent(trainer).epsilon <= 4.0 * (1 + 1e-6)
        else:
            assert trainer.guarantee() is None
    assert accuracy["no privacy"] > 0.8
    assert min(accuracy.values()) > accuracy["no privacy"] - 0.1


@pytest.mark.parametrize("scheme", ["once", "every"])
def test_there_is_no_round_beyond_those_the_budget_was_checked_for(triangle: ArrayDataset, scheme: Scheme) -> None:
    few = plan(clients=600, dim=DIM, epsilon=6.0, delta=1e-5, bits=10)
    trainer = run(triangle, few, cohort=600, rounds=1, participation=scheme)
    before, epsilon = weights(trainer), spent(trainer).epsilon
    with pytest.raises(InfeasibleError, match="All 1 rounds were run"):
        trainer.step()
    assert np.array_equal(weights(trainer), before)
    assert (trainer.round, len(trainer.history), spent(trainer).epsilon) == (1, 1, epsilon)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
def test_federated_averaging_with_other_optimizers(triangle: ArrayDataset, optimizer: str) -> None:
    options = {"cohort": 60, "rounds": 10, "local_steps": 5, "local_lr": 0.2, "optimizer": optimizer, "lr": 0.2}
    trainer = run(triangle, NoPrivacy(1.0), **options)
    assert (trainer.history[-1].accuracy or 0.0) > 0.9


def test_dropout_layers_train_and_rest_while_evaluated(triangle: ArrayDataset) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 3))
    first = run(triangle, NoPrivacy(1.0), copy.deepcopy(net))
    second = run(triangle, NoPrivacy(1.0), copy.deepcopy(net))
    np.testing.assert_array_equal(weights(first), weights(second))
    assert first.evaluate() == first.evaluate()


def test_a_seed_repeats_everything_and_its_absence_nothing(triangle: ArrayDataset, private: Plan) -> None:
    first, second = run(triangle, private), run(triangle, private)
    np.testing.assert_array_equal(weights(first), weights(second))
    assert first.history == second.history
    others = [run(triangle, private, seed=seed) for seed in (2, None, None)]
    assert len({weights(t).tobytes() for t in [first, *others]}) == 4


def test_metrics_are_plain_data(triangle: ArrayDataset, private: Plan) -> None:
    row = run(triangle, private, rounds=1).history[0]
    assert RoundMetrics(**row.to_dict()) == row
    assert row.released
    assert row.noise_to_signal is not None
    assert row.noise_to_signal > 0.0


def test_bad_input(triangle: ArrayDataset, private: Plan) -> None:
    def start(mechanism: Estimator = private, net: torch.nn.Module | None = None, **options: Any) -> None:
        make_trainer(triangle, mechanism, net, **options)

    unpromised = replace(private.protocol, promise=None)
    with pytest.raises(ParameterError, match="Known are sgd, momentum, adagrad, adam"):
        start(optimizer="lion")
    with pytest.raises(ParameterError, match="larger than the population of 600"):
        start(cohort=601)
    with pytest.raises(InfeasibleError, match="enough for 6 disjoint cohorts"):
        start(rounds=7)
    with pytest.raises(InfeasibleError, match=r"the budget ε=6 buys \d"):
        start(unpromised, rounds=20, participation="fixed-size", epsilon=6.0, delta=1e-5)
    with pytest.raises(ParameterError, match="15 trainable parameters, the protocol is for 16"):
        start(Protocol.binomial(clients=9, dim=16, clip_norm=1.0, levels=2, trials=9), delta=1e-5)
    with pytest.raises(ParameterError, match="give delta"):
        start(unpromised)
    with pytest.raises(ParameterError, match="no trainable parameters"):
        start(net=torch.nn.Flatten())
    with pytest.raises(ParameterError, match="zero-out"):
        start(unpromised, participation="poisson", adjacency="replace-one", delta=1e-5)
    with pytest.raises(ParameterError, match="dropout"):
        start(dropout=1.0)
    with pytest.raises(ParameterError, match="nothing to resume"):
        start(resume=True)


def test_a_diverged_model_ends_the_run_and_costs_nothing_more(triangle: ArrayDataset, private: Plan) -> None:
    trainer = make_trainer(triangle, private, rounds=2)
    trainer.step()
    with torch.no_grad():
        next(trainer.model.parameters()).fill_(float("nan"))
    with pytest.raises(DivergedError, match=r"After 1 rounds .* lower learning rate"):
        trainer.step()
    assert spent(trainer).rounds == 1


@pytest.mark.parametrize("rounds", [1, 3])
def test_a_model_that_diverges_in_a_round_leaves_no_figures_of_it(
    triangle: ArrayDataset, private: Plan, rounds: int
) -> None:
    factory = partial(torch.optim.SGD, lr=1e38, weight_decay=1e9)
    trainer = make_trainer(triangle, private, rounds=rounds, optimizer=factory)
    with pytest.raises(DivergedError, match="After 1 rounds"):
        finish(trainer)
    (row,) = trainer.history
    assert (row.released, row.loss, row.accuracy) == (True, None, None)
    assert spent(trainer).rounds == 1


@pytest.mark.parametrize("examples", [None, 2])
@pytest.mark.parametrize("mechanism", ["protocol", "no privacy"])
def test_a_client_that_is_not_finite_counts_as_silent_and_leaves_no_trace(
    triangle: ArrayDataset, private: Plan, mechanism: str, examples: int | None
) -> None:
    # Client 5's example has a gradient of NaN; the neighbour's client 5 has a label whose gradient is zero instead.
    def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        poisoned = torch.where(labels == 7, torch.nan, torch.where(labels == 8, 0.0, 1.0))
        return (poisoned * torch.nn.functional.cross_entropy(outputs, labels % 3, reduction="none")).mean()

    runs = []
    for label in (7, 8):
        labels = triangle.labels.copy()
        labels[5] = label
        data = from_arrays(
            triangle.features,
            labels,
            test_features=triangle.test_features,
            test_labels=triangle.test_labels,
            classes=9,
        )
        wide = Protocol.rotated_binomial(clients=600, dim=15, clip_norm=1.0, levels=4096, trials=10**6)
        chosen: Estimator = wide if mechanism == "protocol" else NoPrivacy(1.0)
        trainer = make_trainer(data, chosen, loss=loss, cohort=600, rounds=1, examples=examples, delta=1e-5)
        runs.append((trainer.step(), weights(trainer)))
    (first, one), (second, other) = runs
    assert replace(first, seconds=0.0) == replace(second, seconds=0.0)
    assert np.isfinite(one).all()
    np.testing.assert_array_equal(one, other)


def test_without_torch_the_error_says_what_to_install() -> None:
    code = (
        "import sys\n"
        "class NoTorch:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'torch':\n            raise ModuleNotFoundError(name)\n"
        "sys.meta_path.insert(0, NoTorch())\n"
        "import cpsgd.learning, cpsgd.learning.datasets\n"
        "try:\n    cpsgd.learning.Trainer\n"
        "except ImportError as error:\n    print(error)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "pip install 'cpsgd[torch]'" in found.stdout
