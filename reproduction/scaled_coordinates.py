"""Squared error of a private mean of real gradients with scaled coordinates, over that without.

The network of the paper's experiment is trained with the noise of 10,000 clients at ε = 2 and δ = 10⁻⁹, each client
once, with `CoordinateScales` from its own private means. From time to time the gradients of some images are taken as
clients' updates, and the error of their private mean is computed twice: with the scales of that round, and without.

* noise: the error of the noise alone, with updates clipped to the median of their norms in both cases;
* all: noise and clipping together, each with the clip norm that is best for it. Late in training the means are small,
  and clipping, which scales do not change much, is most of the error.

A ratio of 0.5 is half the squared error at the same ε. Means are over `--images` clients: with few of them, the chance
of who they are would show the sizes of coordinates, which the mean of 10,000 does not.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cpsgd.learning.coordinate_scales import CoordinateScales
from cpsgd.learning.datasets import ImageDataset, load
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import mlp, trainable
from cpsgd.privacy import gdp_mu

CLIENTS, EPSILON, DELTA = 10_000, 2.0, 1e-9
QUANTILES = np.linspace(0.05, 0.99, 30)

Rows = NDArray[np.float32]


def errors(rows: Rows, scales: NDArray[np.float64]) -> tuple[float, float]:
    """Returns squared errors of the private mean of `CLIENTS` such rows.

    The first is that of the noise at the median clip norm, the second all of it with the best of 30 clip norms.
    """
    mean, scaled = rows.mean(axis=0, dtype=np.float64), rows / scales
    norms = np.linalg.norm(scaled, axis=1)
    noise = (2.0 / (CLIENTS * gdp_mu(EPSILON, DELTA))) ** 2 * float(np.sum(scales**2))
    found = []
    for clip in np.quantile(norms, QUANTILES):
        clipped = np.minimum(1.0, clip / norms) @ scaled / len(rows) * scales
        found.append(float(np.sum((clipped - mean) ** 2)) + noise * float(clip) ** 2)
    return noise * float(np.median(norms)) ** 2, min(found)


def ratios(data: ImageDataset, *, scaled: bool, rounds: int, images: int, looks: int) -> list[tuple[int, float, float]]:
    """Trains and returns, for some of the rounds, the ratios of both errors."""
    model = mlp(data.feature_dim, data.classes or 0, scaled=scaled, seed=0)
    updates = ClientUpdates(model, torch.nn.functional.cross_entropy)
    scales = CoordinateScales(model, every=1)
    rng, found = np.random.default_rng(0), []
    for number in range(rounds):
        chosen = np.sort(rng.choice(data.size, images, replace=False))
        rows = np.concatenate([chunk.copy() for chunk in updates.chunks(data.batch(chosen))])
        now = scales.scales.numpy().astype(np.float64)
        if number and (number + 1) % (rounds // looks) == 0:
            (noise, everything), (plain_noise, plain) = errors(rows, now), errors(rows, np.ones_like(now))
            found.append((number + 1, noise / plain_noise, everything / plain))
        vectors = rows / scales.scales.numpy()
        norms = np.linalg.norm(vectors, axis=1)
        clip = float(np.median(norms))
        mean = np.minimum(1.0, clip / norms) @ vectors / images
        deviation = 2.0 * clip / (CLIENTS * gdp_mu(EPSILON, DELTA))
        noisy = torch.from_numpy(mean + rng.normal(0.0, deviation, len(mean))).float()
        step, _ = scales.read(noisy, deviation * len(mean) ** 0.5, number)
        with torch.no_grad():
            parameters = list(trainable(model).values())
            for parameter, part in zip(parameters, torch.split(step, [p.numel() for p in parameters]), strict=True):
                parameter.sub_(0.2 * part.view(parameter.shape))
    return found


def main(arguments: list[str] | None = None) -> None:
    """Prints the table, and writes the numbers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--datasets", nargs="+", default=["mnist", "fashion-mnist"])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--images", type=int, default=2000)
    parser.add_argument("--looks", type=int, default=4)
    parser.add_argument("--out", type=Path, help="a file for the numbers")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console, table, rows = Console(), Table("data", "inputs", "round", "noise", "all"), []
    for name in options.datasets:
        for scaled in (False, True):
            data = load(name)
            assert isinstance(data, ImageDataset)
            sizes = {"rounds": options.rounds, "images": options.images, "looks": options.looks}
            found = ratios(data, scaled=scaled, **sizes)
            inputs = "scaled" if scaled else "as they are"
            rows.append({"dataset": name, "inputs": inputs, "ratios": found})
            for number, noise, everything in found:
                table.add_row(name, inputs, f"{number}", f"{noise:.3f}", f"{everything:.3f}")
    console.print(table)
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
