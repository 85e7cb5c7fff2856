"""Measures the speed of the codec, as ratios to memcpy and to NumPy measured in the same run. `make bench` runs this.

Times are the best of many repetitions, one thread unless said otherwise, in nanoseconds per coordinate: machines are
noisy, and the best is the least so. The contenders of a row take turns, so that a slow moment hits all of them; within
its turn each runs several times, so that each finds its own data in the cache (above all memcpy, the floor).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable, Collection
from multiprocessing.connection import Connection

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import track
from rich.table import Table

from cpsgd import Aggregator, Protocol
from cpsgd.codec import rotate
from cpsgd.codec._kernels import kernels
from cpsgd.mechanisms import Coins
from cpsgd.randomness import Keystream

LEVELS, TRIALS, ROUND = 2, 14, 0
DIMENSIONS = [51_370, 2**16, 2**20, 10**7]
console = Console(width=110)


def numpy_hadamard(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Applies the Walsh–Hadamard transform in place, in plain NumPy."""
    distance = 1
    while distance < x.size:
        pairs = x.reshape(-1, 2, distance)
        upper = pairs[:, 0] - pairs[:, 1]
        pairs[:, 0] += pairs[:, 1]
        pairs[:, 1] = upper
        distance *= 2
    return x


def numpy_pipeline(
    x: NDArray[np.float32], protocol: Protocol, signs: NDArray[np.float32], random: np.random.Generator
) -> bytes:
    """Encodes in plain NumPy: padded rotation, float rounding, Generator.binomial, nibbles."""
    padded = np.zeros(signs.size, np.float32)
    padded[: x.size] = x * min(1.0, protocol.clip_norm / float(np.linalg.norm(x)))
    rotated = numpy_hadamard(padded * signs)[: x.size] / np.float32(signs.size**0.5)
    reach = protocol.scale * (LEVELS - 1) / 2
    lattice = (np.clip(rotated, -reach, reach) + reach) / protocol.scale
    values = np.floor(lattice + random.random(x.size, dtype=np.float32)).astype(np.uint8)
    values += random.binomial(TRIALS, 0.5, x.size).astype(np.uint8)
    values = np.append(values, np.zeros(x.size % 2, np.uint8))
    return bytes(values[::2] | values[1::2] << 4)


def numpy_clip(x: NDArray[np.float32]) -> NDArray[np.float32]:
    return x * np.float32(min(1.0, 1.0 / float(np.linalg.norm(x))))


def numpy_gaussian(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Clips and adds np.random.normal: local differential privacy as in Flower's mod."""
    return numpy_clip(x) + np.random.normal(0.0, 0.1, x.size).astype(np.float32)  # noqa: NPY002


def numpy_fast_gaussian(x: NDArray[np.float32], random: np.random.Generator) -> NDArray[np.float32]:
    """Does the same with NumPy's fastest generator of normal numbers."""
    return numpy_clip(x) + np.float32(0.1) * random.standard_normal(x.size, dtype=np.float32)


def best_times(
    contenders: dict[str, Callable[[], object]], seconds: float, once: Collection[str] = ()
) -> dict[str, float]:
    """Returns the shortest time of each contender over turns of five runs, or of one run if it takes long."""
    best = dict.fromkeys(contenders, float("inf"))
    end = time.perf_counter() + seconds
    while True:
        for name, contender in contenders.items():
            for _ in range(1 if name in once else 5):
                start = time.perf_counter()
                contender()
                best[name] = min(best[name], time.perf_counter() - start)
        if time.perf_counter() > end:
            return best


def measure(dim: int, seconds: float, with_numpy: bool) -> dict[str, float]:
    """Returns the nanoseconds per coordinate of every stage at this dimension."""
    random = np.random.default_rng(0)
    x = random.standard_normal(dim).astype(np.float32)
    out = np.empty_like(x)
    protocol = Protocol.rotated_binomial(clients=10_000, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS)
    coins = Protocol(
        clients=10_000, dim=dim, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.12, coordinate_range=4 / dim**0.5)
    )
    bits = rotate.signs(dim, 0, ROUND)
    stream, block = Keystream(), 1 << 18
    buffer = stream.buffer(block)
    aggregator = Aggregator(protocol, ROUND)
    pool: list[bytes] = []

    def keystream() -> None:
        for start in range(0, 4 * dim, block):
            stream.fill(buffer, min(block, 4 * dim - start))

    def add() -> None:
        aggregator.add(pool.pop())

    contenders: dict[str, Callable[[], object]] = {
        "memcpy": lambda: np.copyto(out, x),
        "keystream": keystream,
        "rotation": lambda: kernels.rotate_forward(x, 1.0, bits, out),
        "encode": lambda: pool.append(protocol.encode(x, ROUND)),
        "one coin": lambda: coins.encode(x, ROUND),
        "add": add,
        "decode": aggregator.mean,
    }
    if with_numpy:
        signs = random.choice(np.array([-1, 1], np.float32), 1 << (dim - 1).bit_length())
        contenders["numpy pipeline"] = lambda: numpy_pipeline(x, protocol, signs, random)
        contenders["numpy gaussian"] = lambda: numpy_gaussian(x)
        contenders["its fastest"] = lambda: numpy_fast_gaussian(x, random)
    best = best_times(contenders, seconds, once=("numpy pipeline", "numpy gaussian", "its fastest"))
    return {name: time / dim * 1e9 for name, time in best.items()}


def thread_speedup(dim: int, seconds: float) -> dict[str, float]:
    """Returns the speed-up of two threads of `encode_many` over one: in wall time, and in processor time.

    On a machine that others use as well the clock says little. Processor time that does not grow with the number of
    threads says that they do not stand in each other's way, though not how long they wait for the interpreter lock.
    """
    protocol = Protocol.rotated_binomial(clients=64, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS)
    batch = np.random.default_rng(0).standard_normal((64, dim)).astype(np.float32)
    clock, processor = ({1: float("inf"), 2: float("inf")} for _ in range(2))
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for threads in clock:
            begun, used = time.perf_counter(), time.process_time()
            for _ in protocol.encode_many(batch, ROUND, threads=threads):
                pass
            clock[threads] = min(clock[threads], time.perf_counter() - begun)
            processor[threads] = min(processor[threads], time.process_time() - used)
    return {"clock": clock[1] / clock[2], "processor": 2.0 * processor[1] / processor[2]}


def process_speedup(dim: int, seconds: float) -> float:
    """Returns the speed-up of two independent processes over one when encoding a batch: the bound for threads."""
    protocol = Protocol.rotated_binomial(clients=64, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS)
    batch = np.random.default_rng(0).standard_normal((32, dim)).astype(np.float32)

    def work(pipe: Connection) -> None:
        while pipe.recv():
            for vector in batch:
                protocol.encode(vector, ROUND)
            pipe.send(True)

    context = multiprocessing.get_context("fork")
    pipes = []
    for _ in range(2):
        ours, theirs = context.Pipe()
        context.Process(target=work, args=(theirs,), daemon=True).start()
        pipes.append(ours)
    best = {1: float("inf"), 2: float("inf")}
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for count in best:
            begun = time.perf_counter()
            for pipe in pipes[:count]:
                pipe.send(True)
            for pipe in pipes[:count]:
                pipe.recv()
            best[count] = min(best[count], time.perf_counter() - begun)
    for pipe in pipes:
        pipe.send(False)
    return 2.0 * best[1] / best[2]


def encode_memory(dim: int) -> float:
    """Returns the peak memory of a thread's first encode beside its output, over the input's bytes."""
    protocol = Protocol.rotated_binomial(clients=64, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS)
    x = np.zeros(dim, np.float32)
    protocol.encode(x, ROUND)
    found: list[int] = []

    def first() -> None:
        tracemalloc.start()
        message = protocol.encode(x, ROUND)
        found.append(tracemalloc.get_traced_memory()[1] - len(message))
        tracemalloc.stop()

    thread = threading.Thread(target=first)
    thread.start()
    thread.join()
    return found[0] / x.nbytes


def avx2_only(seconds: float) -> dict[str, float] | None:
    """Returns the measurements at 2^20 in a process without AVX-512, but with AVX2."""
    if "avx2" not in kernels.supported_levels():
        return None
    command = [sys.executable, __file__, "--one", str(2**20), "--seconds", str(seconds)]
    result = subprocess.run(
        command, env={**os.environ, "CPSGD_SIMD": "avx2"}, capture_output=True, text=True, check=True
    )
    return dict(json.loads(result.stdout))


def print_report(
    rows: dict[int, dict[str, float]],
    avx2: dict[str, float] | None,
    speedup: dict[str, float],
    processes: float,
    memory: float,
) -> None:
    table = Table(
        title=f"ns per coordinate (k={LEVELS}, m={TRIALS}, rotated; {kernels.simd_level()}; × = times memcpy)"
    )
    table.add_column("dimension")
    names = list(next(iter(rows.values())))
    for name in names:
        table.add_column(name, justify="right")
    for dim, times in rows.items():
        cells = [
            f"{times[name]:.3f}" + ("" if name == "memcpy" else f"\n{times[name] / times['memcpy']:.1f}×")
            for name in names
        ]
        table.add_row(f"{dim:,}", *cells)
    console.print(table)

    million, small, paper = rows[2**20], rows[2**16], rows[51_370]
    targets = [
        ("encode at 2^20, times memcpy", million["encode"] / million["memcpy"], "<=", 16.0),
        ("encode of one coin at 2^20, times memcpy", million["one coin"] / million["memcpy"], "<=", 13.0),
        ("encode at 51,370, times memcpy", paper["encode"] / paper["memcpy"], "<=", 20.0),
        ("encode at 10^7, ns per coordinate", rows[10**7]["encode"], "<=", 2.2),
        ("decode at 2^20, times memcpy", million["decode"] / million["memcpy"], "<=", 6.0),
        ("NumPy pipeline at 2^20, times encode", million["numpy pipeline"] / million["encode"], ">=", 40.0),
        ("NumPy clip + Gaussian at 2^20, times encode", million["numpy gaussian"] / million["encode"], ">=", 8.0),
        ("rotation at 2^16, times memcpy", small["rotation"] / small["memcpy"], "<=", 8.0),
        ("aggregator add at 2^20, times memcpy", million["add"] / million["memcpy"], "<=", 8.0),
        ("two threads on 64 vectors of 2^20, times one", speedup["clock"], ">=", 1.85),
        ("the same by processor time", speedup["processor"], ">=", 1.85),
        ("encode's memory at 2^20, times the input", memory, "<=", 1.5),
    ]
    if avx2 is not None:
        targets.insert(1, ("the same with AVX2 only", avx2["encode"] / avx2["memcpy"], "<=", 30.0))
    table = Table(title="Targets")
    for heading in ("what", "measured", "target", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for what, value, sign, target in targets:
        met = value <= target if sign == "<=" else value >= target
        table.add_row(what, f"{value:.2f}", f"{sign} {target:g}", "[green]met" if met else "[red]missed")
    console.print(table)
    console.print(f"Two processes that share nothing but the machine encode {processes:.2f} times as fast as one.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    parser.add_argument("--seconds", type=float, default=4.0, help="time spent on each row")
    parser.add_argument("--one", type=int, help="measure this dimension alone, without NumPy, and print JSON")
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure(options.one, options.seconds, with_numpy=False)))
        return
    progress = track(DIMENSIONS, "measuring", console=Console(stderr=True), transient=True)
    rows = {dim: measure(dim, options.seconds, with_numpy=True) for dim in progress}
    avx2, memory = avx2_only(options.seconds), encode_memory(2**20)
    speedup, processes = thread_speedup(2**20, options.seconds), process_speedup(2**20, options.seconds)
    if options.json:
        report = {"rows": rows, "avx2": avx2, "two_thread_speedup": speedup, "two_process_speedup": processes}
        print(json.dumps({**report, "encode_memory": memory}))
    else:
        print_report(rows, avx2, speedup, processes, memory)


if __name__ == "__main__":
    main()
