"""The walk of a training step; see `tests.walks`."""

from __future__ import annotations

from cpsgd import plan
from tests.learning.conftest import blobs
from tests.learning.training import DIM, make_trainer
from tests.walks import walk


def test_a_training_step() -> None:
    trainer = make_trainer(blobs(), plan(clients=100, dim=DIM, epsilon=6.0, delta=1e-5, bits=10))
    files = walk(trainer.step)
    assert "learning/trainer.py" in files
    assert len(files) <= 20, files
