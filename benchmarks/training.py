"""Measures a round of training, private and not, for growing numbers of clients. Part of `make bench`.

The network is the paper's (784-60-60-10, 51,370 parameters). Both rounds form every client's clipped gradient; the
private one also rotates and rounds each, and adds noise. They take turns, and the best of a few rounds counts.
"""

from __future__ import annotations

import argparse
import resource
import time

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cpsgd.errors import DataError
from cpsgd.learning import AccountOptions, CohortOptions, NoPrivacy, RunOptions, Trainer, mlp
from cpsgd.learning.datasets import Dataset, infinite_mnist
from cpsgd.learning.datasets.infinite import FIELD_COUNT, InfiniteDataset, smooth_fields
from cpsgd.learning.datasets.populations import ImageDataset
from cpsgd.planner import plan

COHORTS = [1_000, 10_000, 100_000]


def population() -> Dataset:
    """Returns infinite MNIST if its files are there, otherwise an infinite data set of noise images."""
    try:
        return infinite_mnist()
    except DataError:
        rng = np.random.default_rng(0)
        images = rng.integers(0, 256, (10_000, 28, 28), dtype=np.uint8)
        labels = rng.integers(0, 10, 10_000, dtype=np.uint8)
        base = ImageDataset("noise", "random numbers", images, labels, images[:10], labels[:10])
        fields = smooth_fields(FIELD_COUNT, 28, smoothing=4.0, displacement=1.0)
        return InfiniteDataset(base=base, fields=fields, size=25_000_000)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--largest", type=int, default=100_000, help="largest cohort")
    arguments.add_argument("--rounds", type=int, default=3, help="rounds of each kind, of which the best counts")
    options = arguments.parse_args()
    data = population()
    table = Table("clients", "private s", "non-private s", "ratio", "data s", "µs per client", "peak MiB")
    for cohort in (size for size in COHORTS if size <= options.largest):
        private = plan(clients=cohort, dim=51_370, epsilon=2.0 * 10_000 / min(cohort, 10_000), delta=1e-9, bits=5)
        contenders = [
            Trainer(
                mlp(784, 10, seed=0),
                torch.nn.functional.cross_entropy,
                data,
                mechanism,
                cohorts=CohortOptions(cohort=cohort, rounds=options.rounds, participation="once"),
                account=AccountOptions(delta=1e-9),
                run=RunOptions(seed=1, evaluate_every=options.rounds + 1),
            )
            for mechanism in (private.protocol, NoPrivacy(1.0))
        ]
        times = [[trainer.step().seconds for trainer in contenders] for _ in range(options.rounds)]
        ours, plain = np.min(times, axis=0)
        begun = time.perf_counter()
        data.batch(np.arange(min(cohort, data.size)))
        generation = time.perf_counter() - begun
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        table.add_row(
            f"{cohort:,}",
            f"{ours:.3f}",
            f"{plain:.3f}",
            f"{ours / plain:.2f}",
            f"{generation:.3f}",
            f"{1e6 * ours / cohort:.0f}",
            f"{peak:.0f}",
        )
    console = Console(width=110)
    console.print(f"Rounds of {data.name}, PyTorch on one thread, rounding on two.")
    console.print(table)


if __name__ == "__main__":
    main()
