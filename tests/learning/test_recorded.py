"""Rounds replayed from CUDA graphs against rounds that are launched, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.learning import mlp
from cpsgd.learning.backends import GpuBackend
from cpsgd.learning.datasets import ImageDataset
from cpsgd.learning.datasets.infinite import FIELD_COUNT, InfiniteDataset, smooth_fields
from cpsgd.learning.recorded import RecordedRound
from cpsgd.mechanisms import Binomial, Coins, Mechanism, RoundedGaussian
from cpsgd.protocol import Protocol
from tests.learning.training import finish, make_trainer, weights


def data_set() -> InfiniteDataset:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (500, 28, 28), dtype=np.uint8)
    labels = rng.integers(0, 10, 500, dtype=np.uint8)
    base = ImageDataset("noise", "random numbers", images, labels, images[:10], labels[:10])
    return InfiniteDataset(base, smooth_fields(FIELD_COUNT, 28, smoothing=4.0, displacement=1.0), size=100_000)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "mechanism",
    [
        Binomial(levels=3, trials=13, coordinate_range=0.02),
        Coins(coins=1, theta=0.12, coordinate_range=3.6 / 51_370**0.5),
        RoundedGaussian(noise_deviation=2.0, step=0.01, window=64, coordinate_range=0.02),
        CorrelatedGaussian(noise_deviation=64.0, step=0.001, window=4096, coordinate_range=0.02, bands=3, run_length=6),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_recorded_rounds(mechanism: Mechanism, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = Protocol(clients=400, dim=51_370, clip_norm=1.0, mechanism=mechanism)

    def trained(record: bool, memory_limit: int | None = None) -> tuple[np.ndarray, type]:
        with monkeypatch.context() as patch:
            if not record:
                patch.setattr(RecordedRound, "of", lambda *arguments: None)
            model = mlp(784, 10, scaled=isinstance(protocol.mechanism, Coins), seed=0)
            options = {"cohort": 400, "rounds": 6, "participation": "once", "lr": 1.0, "delta": 1e-6, "seed": 3}
            options |= {"device": "cuda", "evaluate_every": 3, "memory_limit": memory_limit}
            trainer = finish(make_trainer(data_set(), protocol, model, **options))
            assert isinstance(trainer._backend, GpuBackend)
            return weights(trainer), type(trainer._backend._recorded)

    (found, kind), (expected, none) = trained(True), trained(False)
    assert (kind, none) == (RecordedRound, type(None))
    assert trained(True, memory_limit=1)[1] is type(None)  # all clients at once would take six MiB
    np.testing.assert_array_equal(found, expected)
