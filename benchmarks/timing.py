"""Tests whether a client's time depends on its draws or data: two classes of input, and Welch's t-test on the times.

After dudect (Reparaz, Balasch, Verbauwhede: "Dude, is my code constant time?", DATE 2017). Inputs of both classes come
in random order and are copied to the same buffer before the clock starts, from places in memory that change. The
slowest measurements are cut off at several percentiles, since interruptions tell nothing; the largest |t| counts. Under
4.5 these measurements found nothing, which is no proof; beyond 10 the times do differ. "differ by" is the
difference of the medians. Rows "random against random" compare equal classes: what they show is the method's own noise.

What is claimed: the noise sampler's time does not depend on the values drawn, nor the rounding's on the vector. Those
rows come first. That the same instructions read and write the same addresses is tested (tests/codec/_kernels); the
times show whether that is enough. The others are reported so that nobody takes them for granted:

* whole encoding: a vector that is clipped is scaled by another factor, one on the edge of the norm bound may be shrunk
  again, and an overflowing norm is computed anew in other units.
* subnormal numbers are slow on many processors, whatever is done with them.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cpsgd import Protocol
from cpsgd.codec import pipeline
from cpsgd.mechanisms import Binomial, binomial

DIM = 1024
LEVELS = 5
# Few enough for all inputs of a case to stay in the second-level cache, whichever class they are of.
ROWS = 8
_BLOCK = 100
SUSPICIOUS, CERTAIN = 4.5, 10.0
_PERCENTILES = (100.0, 99.0, 95.0, 90.0, 75.0, 50.0)


@dataclass(frozen=True)
class Case:
    """Inputs of two classes, a row each, the buffer they are copied to, and the function that is timed."""

    name: str
    claimed: bool
    first: NDArray[Any]
    second: NDArray[Any]
    buffer: NDArray[Any]
    run: Callable[[], object]


def sampler_cases(trials: int, p: float) -> list[Case]:
    """Returns keystreams that draw the smallest values, the largest ones, and random ones."""
    mechanism = Binomial(levels=LEVELS, trials=trials, p=p, coordinate_range=1.0)
    size, kernel = mechanism.keystream_bytes * DIM, mechanism.kernel()
    words, grid, out = np.zeros(size, np.uint8), np.zeros(DIM, np.float32), np.empty(DIM, np.uint32)
    smallest, largest = (np.full((ROWS, size), byte, dtype=np.uint8) for byte in (0, 255))
    fresh, others = np.random.default_rng(0).integers(0, 256, size=(2, ROWS, size), dtype=np.uint8)

    def run() -> None:
        kernel.values(grid, words, out)

    what = f"{'coins' if binomial.uses_coins(trials, p) else 'inversion'}, m = {trials}, p = {p:g}"
    return [
        Case(f"{what}: random against random values", True, fresh, others, words, run),
        Case(f"{what}: smallest against largest values", True, smallest, largest, words, run),
        Case(f"{what}: smallest against random values", True, smallest, fresh, words, run),
    ]


def rounding_cases() -> list[Case]:
    """Returns grid points for the rounding kernel, fixed and random."""
    mechanism = Binomial(levels=LEVELS, trials=14, coordinate_range=1.0)
    kernel, limit = mechanism.kernel(), mechanism.grid.limit
    generator = np.random.default_rng(1)
    words = generator.integers(0, 256, size=mechanism.keystream_bytes * DIM, dtype=np.uint8)
    anywhere = generator.uniform(-2 * limit, 2 * limit, size=(ROWS, DIM)).astype(np.float32)
    grid, out = np.zeros(DIM, np.float32), np.empty(DIM, np.uint32)

    def run() -> None:
        kernel.values(grid, words, out)

    return [
        Case("rounding: zero against random vectors", True, np.zeros_like(anywhere), anywhere, grid, run),
        Case("rounding: out of range against random", True, np.full_like(anywhere, 2 * limit), anywhere, grid, run),
    ]


def encoding_cases() -> list[Case]:
    """Measures a client's whole work on vectors of different kinds."""
    protocol = Protocol.rotated_binomial(clients=100, dim=DIM, clip_norm=1.0, levels=LEVELS, trials=14)
    short = (np.random.default_rng(2).normal(size=(ROWS, DIM)) * 0.5 / math.sqrt(DIM)).astype(np.float32)
    vector = np.zeros(DIM, np.float32)

    def run() -> None:
        pipeline.integers(protocol, vector, 0)

    long, tiny = short * np.float32(100.0), short * np.float32(1e-38)
    return [
        Case("encoding: zero against random vectors", False, np.zeros_like(short), short, vector, run),
        Case("encoding: short against clipped vectors", False, short, long, vector, run),
        Case("encoding: normal against subnormal numbers", False, short, tiny, vector, run),
    ]


def measure(case: Case, count: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Returns the times of the two classes in nanoseconds, measured in random order."""
    times: tuple[list[int], list[int]] = ([], [])
    inputs = np.concatenate([case.first, case.second])
    classes = np.repeat([0, 1], ROWS)
    places = np.random.default_rng()
    while min(map(len, times)) < count:
        # Inputs move in memory from time to time, as some places are faster to copy from than others.
        order = places.permutation(2 * ROWS)
        inputs, classes = inputs[order], classes[order]
        for row in inputs:
            np.copyto(case.buffer, row)
            case.run()
        for _ in range(_BLOCK):
            choice = random.randrange(2 * ROWS)
            np.copyto(case.buffer, inputs[choice])
            start = time.perf_counter_ns()
            case.run()
            end = time.perf_counter_ns()
            times[classes[choice]].append(end - start)
    return np.array(times[0], dtype=np.float64), np.array(times[1], dtype=np.float64)


def welch(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Returns Welch's t; 0 if a class does not vary."""
    variance = first.var(ddof=1) / first.size + second.var(ddof=1) / second.size
    return float((first.mean() - second.mean()) / math.sqrt(variance)) if variance > 0.0 else 0.0


def largest_t(first: NDArray[np.float64], second: NDArray[np.float64]) -> float:
    """Returns the t farthest from 0 over all percentiles at which slow measurements are cut off."""
    found = []
    for percentile in _PERCENTILES:
        limit = np.percentile(np.concatenate([first, second]), percentile)
        left, right = first[first <= limit], second[second <= limit]
        if min(left.size, right.size) > 100:
            found.append(welch(left, right))
        else:
            found.append(math.inf)  # one class is cut off altogether: nothing could differ more
    return max(found, key=abs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--measurements", type=int, default=50_000, help="of each class")
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options = parser.parse_args()
    cases = [
        *sampler_cases(14, 0.5),
        *sampler_cases(256, 0.5),
        *sampler_cases(14, 0.25),
        *sampler_cases(300, 0.5),
        *sampler_cases(4000, 0.5),
        *sampler_cases(1_000_000, 0.5),
        *rounding_cases(),
        *encoding_cases(),
    ]
    results: list[dict[str, Any]] = []
    for case in cases:
        first, second = measure(case, options.measurements)
        medians = float(np.median(first)), float(np.median(second))
        results.append({"case": case.name, "claimed": case.claimed, "t": largest_t(first, second), "ns": medians})
    if options.json:
        print(json.dumps(results))
        return
    console = Console(width=120)
    table = Table(title=f"{options.measurements:,} measurements a class, {DIM:,} coordinates")
    table.add_column("what")
    for heading in ("t", "µs", "differ by", "claimed"):
        table.add_column(heading, justify="right")
    for case, result in zip(cases, results, strict=True):
        t, (before, after) = result["t"], result["ns"]
        colour = "green" if abs(t) < SUSPICIOUS else "yellow" if abs(t) < CERTAIN else "red"
        table.add_row(
            case.name,
            f"[{colour}]{t:+.1f}",
            f"{before / 1e3:.2f}",
            f"{after / before - 1:+.2%}",
            "yes" if case.claimed else "no",
        )
    console.print(table)


if __name__ == "__main__":
    main()
