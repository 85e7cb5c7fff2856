"""The task: the silos' images, the model, and its accuracy on test images."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch

from cpsgd.learning import mlp
from cpsgd.learning.datasets import Batch, infinite_digits
from flower_digits import IMAGES, SILOS

loss = torch.nn.functional.cross_entropy


def network(seed: int = 0) -> torch.nn.Module:
    """Returns a network with one hidden layer, 4,510 parameters."""
    return mlp(64, 10, (60,), seed=seed)


def images_of(silo: int) -> Batch:
    """Returns the silo's images: no two silos share one, and none is a test image."""
    return centred(infinite_digits(SILOS * IMAGES).batch(np.arange(silo * IMAGES, (silo + 1) * IMAGES)))


def accuracy(model: torch.nn.Module, images: Batch | None = None) -> float:
    """Returns the model's accuracy on images, by default the test images."""
    test = centred(infinite_digits(SILOS * IMAGES).test_set()) if images is None else images
    with torch.no_grad():
        found = model(torch.from_numpy(test.features)).argmax(dim=1).numpy()
    return float((found == test.labels).mean())


def centred(images: Batch) -> Batch:
    """Gives each image a mean of zero and twice the contrast, so that training needs fewer rounds."""
    features = 2.0 * (images.features - images.features.mean(axis=1, keepdims=True))
    return replace(images, features=features)
