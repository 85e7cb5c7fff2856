from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from cpsgd.errors import ParameterError
from cpsgd.learning import CohortOptions, FolderOptions, NoPrivacy, RunOptions, ServerOptions, Trainer, mlp
from cpsgd.learning.datasets import load_digits
from cpsgd.learning.optimization import MovingAverage


def vector(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate([p.detach().numpy().reshape(-1) for p in model.parameters()])


def trainer(averaging: float | None, folder: Path | None = None, *, resume: bool = False, rounds: int = 6) -> Trainer:
    data = load_digits()
    return Trainer(
        mlp(data.feature_dim, data.classes, (), seed=1),
        torch.nn.functional.cross_entropy,
        data,
        NoPrivacy(1.0),
        cohorts=CohortOptions(cohort=50, rounds=rounds),
        server=ServerOptions(optimizer="momentum", lr=0.5, averaging=averaging),
        run=RunOptions(seed=2),
        folder=FolderOptions(run_dir=folder, resume=resume),
    )


def test_the_average_is_that_of_the_models_and_comes_out_last() -> None:
    """The decay grows to 0.4 from (t + 1)/(t + 10): recomputed here from the models of the same run without it."""
    plain, averaged = trainer(None), trainer(0.4)
    expected = vector(plain.model)
    for number in range(6):
        before, after = plain.step(), averaged.step()
        keep = min(0.4, (number + 1) / (number + 10))
        expected = keep * expected + (1.0 - keep) * vector(plain.model)
        if number < 5:  # training itself is not changed by it
            np.testing.assert_array_equal(vector(averaged.model), vector(plain.model))
            assert before.loss != after.loss
    np.testing.assert_allclose(vector(averaged.model), expected, rtol=1e-5, atol=1e-6)
    assert averaged.evaluate()[0] == after.loss


def test_a_run_goes_on_with_its_average(tmp_path: Path) -> None:
    whole, begun = trainer(0.9), trainer(0.9, tmp_path)
    losses = [metrics.loss for metrics in whole.run()]
    begun.step()
    begun.step()
    del begun
    resumed = trainer(0.9, tmp_path, resume=True)
    assert [metrics.loss for metrics in resumed.run()] == losses[2:]
    np.testing.assert_array_equal(vector(resumed.model), vector(whole.model))


def test_an_export_within_the_run_is_the_average(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    run = trainer(0.9)
    run.step()
    run.step()
    last = vector(run.model)
    model, _ = run.export(tmp_path)
    written = np.concatenate([tensor.numpy().reshape(-1) for tensor in load_file(model).values()])
    np.testing.assert_array_equal(vector(run.model), last)
    assert np.abs(np.sort(written) - np.sort(last)).max() > 1e-4


def test_the_model_is_itself_again_after_an_error() -> None:
    model = mlp(3, 2, ())
    average = MovingAverage(model.parameters(), 0.5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    moved = vector(model)

    def fail() -> None:
        with average.in_place():
            assert np.abs(vector(model) - moved).min() > 0.5
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    np.testing.assert_array_equal(vector(model), moved)


@pytest.mark.parametrize("wrong", [0.0, -0.1, 1.0, float("nan")])
def test_a_decay_is_between_zero_and_one(wrong: float) -> None:
    with pytest.raises(ParameterError, match="averaging"):
        ServerOptions(averaging=wrong)
