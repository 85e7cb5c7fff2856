"""Measures how fast infinite data sets make samples, as ratios to memcpy of their pixels measured in the same run.

One thread. Times are the best of many repetitions; contenders take turns, so that a slow moment hits all of them.
Without MNIST's files images of noise stand in for it: the work does not depend on what is on them.
"""

from __future__ import annotations

import argparse
import json
import time
import tracemalloc
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from cpsgd.errors import DataError
from cpsgd.learning.datasets import ImageDataset, InfiniteDataset, infinite_digits, load_mnist
from cpsgd.learning.datasets.infinite import FIELD_COUNT, smooth_fields

BATCH = 10_000


def mnist_or_noise() -> ImageDataset:
    try:
        return load_mnist()
    except DataError:
        random = np.random.default_rng(0)
        images = random.integers(0, 256, (70_000, 28, 28), dtype=np.uint8)
        labels = random.integers(0, 10, 70_000, dtype=np.uint8)
        return ImageDataset("mnist", "noise", images[10_000:], labels[10_000:], images[:10_000], labels[:10_000])


def measure(data: InfiniteDataset, seconds: float) -> dict[str, float]:
    """Returns seconds per batch of each method, and as `memory` the peak bytes beside a batch of images."""
    in_order = 70_000 + np.arange(BATCH)
    anywhere = np.random.default_rng(0).integers(70_000, data.size, BATCH)
    images = data.images(in_order)[1]
    copy = np.empty_like(images)
    contenders: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(copy, images),
        "images in order": lambda: data.images(in_order),
        "images anywhere": lambda: data.images(anywhere),
        "batch of float32": lambda: data.batch(anywhere),
    }
    best = dict.fromkeys(contenders, float("inf"))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, contender in contenders.items():
            for _ in range(3):
                start = time.perf_counter()
                contender()
                best[name] = min(best[name], time.perf_counter() - start)
    tracemalloc.start()
    images = data.images(in_order)[1]
    best["memory"] = float(tracemalloc.get_traced_memory()[1] - images.nbytes)
    tracemalloc.stop()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    parser.add_argument("--seconds", type=float, default=3.0, help="time spent on each data set")
    options = parser.parse_args()
    fields = smooth_fields(FIELD_COUNT, 28, smoothing=4.0, displacement=1.0)
    infinite_mnist = InfiniteDataset(base=mnist_or_noise(), fields=fields, size=25_000_000)
    results = {data.name: measure(data, options.seconds) for data in (infinite_mnist, infinite_digits())}
    if options.json:
        print(json.dumps(results))
        return
    console = Console(width=110)
    table = Table(title=f"{BATCH:,} samples, one thread")
    table.add_column("data set")
    table.add_column("what")
    for heading in ("ms", "samples/s", "× memcpy"):
        table.add_column(heading, justify="right")
    for name, times in results.items():
        for what, best in times.items():
            if what != "memory":
                ratio = best / times["memcpy"]
                table.add_row(name, what, f"{best * 1e3:.2f}", f"{BATCH / best:,.0f}", f"{ratio:.1f}")
        table.add_row(name, f"memory beside the images: {times['memory'] / 2**20:.1f} MiB", end_section=True)
    console.print(table)
    rate = BATCH / results["infinite-mnist"]["batch of float32"]
    verdict = "[green]met" if rate >= 100_000 else "[red]missed"
    console.print(f"infinite MNIST, {rate:,.0f} samples/s; target >= 100,000: {verdict}")


if __name__ == "__main__":
    main()
