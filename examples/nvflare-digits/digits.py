"""The task: the silos' images, the model, and its accuracy on test images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cpsgd.learning import mlp
from cpsgd.learning.datasets import Batch, infinite_digits

SILOS = 10
IMAGES = 5000
# With correlated noise every image is in one round only: each of at most 90 rounds has a share of a silo's images.
SHARE = IMAGES // 90
# Where images are drawn: the probability of each, for every round.
RATE = 0.05

loss = torch.nn.functional.cross_entropy


class Network(torch.nn.Module):
    """One hidden layer, 4,510 parameters. It is a class because NVFlare constructs the model again on the server."""

    def __init__(self, seed: int = 0) -> None:
        """Draws the first parameters."""
        super().__init__()
        self.seed = seed
        self.layers = mlp(64, 10, (60,), seed=seed)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns one number for each digit."""
        return self.layers(images)


def images_of(silo: int) -> Batch:
    """Returns the silo's images: no two silos share one, and none is a test image."""
    return _centred(infinite_digits(SILOS * IMAGES).batch(np.arange(silo * IMAGES, (silo + 1) * IMAGES)))


def accuracy(model: torch.nn.Module) -> float:
    """Returns the model's accuracy on the test images."""
    test = _centred(infinite_digits(SILOS * IMAGES).test_set())
    with torch.no_grad():
        found = model(torch.from_numpy(test.features)).argmax(dim=1).numpy()
    return float((found == test.labels).mean())


def _centred(images: Batch) -> Batch:
    """Gives each image a mean of zero and twice the contrast, so that training needs fewer rounds."""
    features = 2.0 * (images.features - images.features.mean(axis=1, keepdims=True))
    return replace(images, features=features)
