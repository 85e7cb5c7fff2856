"""Measures a round on a GPU: by stage, by mechanism, and by numbers of clients and coordinates.

Floors are the bytes a stage must move over the copy bandwidth measured here. Where vectors are made, rotated, rounded
and added up without being written, the floor is the time of the additions of their transforms, two of 2^15 points each.
Run on a machine with an NVIDIA GPU.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpsgd import Protocol
from cpsgd.codec import rotate
from cpsgd.learning import AccountOptions, CohortOptions, FolderOptions, NoPrivacy, RunOptions, ServerOptions, Trainer
from cpsgd.learning.cohorts import permuted
from cpsgd.learning.datasets import Dataset, from_arrays, load
from cpsgd.learning.datasets.device_data import on_device
from cpsgd.learning.dense import dense_layers, write_dense_gradients
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import mlp
from cpsgd.mechanisms import Binomial, Coins, Mechanism, RoundedGaussian, SampledCoins
from cpsgd.planner import plan
from cpsgd.simulation import device_cuda as kernels
from cpsgd.simulation.device import DeviceRound

DEVICE = torch.device("cuda", 0)
COHORT, DIM, LEVELS, TRIALS = 10_000, 51_370, 3, 13
# Clients times coordinates of rounds that are compared.
NUMBERS = 100_000 * DIM
REACH = 3.6 / math.sqrt(DIM)
MECHANISMS: dict[str, Mechanism] = {
    "4 bits, binomial": Binomial(levels=LEVELS, trials=TRIALS, coordinate_range=0.02),
    "1 bit, coins": Coins(coins=1, theta=0.12, coordinate_range=REACH),
    "2 bits, coins": Coins(coins=3, theta=0.07, coordinate_range=REACH),
    "4 bits, coins": Coins(coins=15, theta=0.03, coordinate_range=REACH),
    "8 bits, coins": Coins(coins=255, theta=0.0078, coordinate_range=REACH),
    "0.05 bit, sampled": SampledCoins(rate=0.05, theta=0.45, coordinate_range=REACH),
    "11 bits, Gaussian": RoundedGaussian(noise_deviation=90.0, step=6.3e-4, window=1920, coordinate_range=2 * REACH),
}
"""Parameters close to those that the planner chooses for ε = 2."""
EPOCHS: dict[str, dict[str, Any]] = {
    "1 bit, coins": {"bits": 1},
    "4 bits, binomial": {"bits": 4, "mechanism": "binomial"},
    "4 bits, coins": {"bits": 4, "mechanism": "coins"},
    "12 bits, rounded Gaussian": {"bits": 12, "mechanism": "rounded-gaussian"},
    "12 bits, 8 bands": {"bits": 12, "correlated": 8},
    "12 bits, 32 bands": {"bits": 12, "correlated": 32},
}
"""Requirements of the paper's epoch, with ε = 2 and δ = 1e-9."""
GIGA = 1e9
# NVIDIA GPUs from capability 8.6 on: additions of a multiprocessor per cycle, and cycles per millisecond.
LANES, CLOCK = 128, 1.98e6


def milliseconds(work: Callable[[], object], repeats: int = 11) -> float:
    """Returns the median time of `work` on the device, after two rounds of warm-up."""
    times: list[float] = []
    for number in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(start.elapsed_time(end))
    return float(np.median(times))


def copy_bandwidth() -> float:
    """Returns the bytes read and written per millisecond by a large copy."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 2.0 * source.numel() * 4 / milliseconds(lambda: target.copy_(source))


def stages(bandwidth: float) -> list[dict[str, Any]]:
    """Measures each stage of the paper's round."""
    data = load("infinite-mnist", clients=25_000_000)
    source = on_device(data, DEVICE)
    model = mlp(784, 10, seed=0).to(DEVICE)
    layers = dense_layers(model, torch.nn.functional.cross_entropy)
    assert layers is not None
    dim = sum(p.numel() for p in model.parameters())
    clients = permuted(np.arange(COHORT), 25_000_000, 1)
    batch = source.batch(clients)
    rows = torch.empty(COHORT, -(-dim // 32) * 32, device=DEVICE)[:, :dim]
    assert dim == DIM
    protocol = Protocol(clients=COHORT, dim=dim, clip_norm=1.0, mechanism=MECHANISMS["4 bits, binomial"])
    signs = torch.from_numpy(rotate.signs(dim, 0, 0).copy()).to(DEVICE)
    sums = torch.zeros(dim, dtype=torch.int64, device=DEVICE)
    grid = protocol.mechanism.grid
    assert grid is not None
    unit = grid.unit

    def gradients() -> None:
        write_dense_gradients(layers, batch.features, batch.labels, rows)

    gradients()
    kernels.scale_and_rotate(rows, signs, 1.0, unit)
    keys = torch.tensor([3], device=DEVICE)
    matrix = COHORT * dim * 4

    def finish() -> None:
        round_ = DeviceRound(protocol, 0, seed=1, device=DEVICE)
        round_.count = 1
        round_.mean()

    def rounding(mechanism: Mechanism) -> float:
        description = mechanism.device_rounding()
        assert description is not None
        return milliseconds(lambda: kernels.round_and_sum(rows, sums, keys=keys, first=0, rounding=description))

    updates = ClientUpdates(model, torch.nn.functional.cross_entropy)
    products = updates.products(*batch)
    assert products is not None
    lanes = LANES * torch.cuda.get_device_properties(DEVICE).multi_processor_count
    additions = bandwidth * COHORT * 2 * 15 * 2**15 / (lanes * CLOCK)

    def whole(mechanism: Mechanism) -> float:
        protocol = Protocol(clients=COHORT, dim=dim, clip_norm=1.0, mechanism=mechanism)
        round_ = DeviceRound(protocol, 0, seed=1, device=DEVICE)
        return milliseconds(lambda: round_.add(products)) if round_.takes(products.layout) else math.nan

    found = [
        ("samples", milliseconds(lambda: source.batch(clients)), COHORT * 784 * (1 + 4 + 4 + 4)),
        ("factors of gradients", milliseconds(lambda: updates.products(*batch)), COHORT * (2 * 784 + 250) * 4),
        *((f"all: {name}", whole(mechanism), additions) for name, mechanism in MECHANISMS.items()),
        ("gradients", milliseconds(gradients), matrix),
        ("clip and rotate", milliseconds(lambda: kernels.scale_and_rotate(rows, signs, 1.0, unit)), 2 * matrix),
        *((f"sum: {name}", rounding(mechanism), matrix) for name, mechanism in MECHANISMS.items()),
        (
            "noise of the sum",
            milliseconds(lambda: kernels.add_coins(sums, keys=keys, trials=COHORT * TRIALS)),
            16 * dim,
        ),
        ("decode", milliseconds(finish), 16 * dim),
    ]
    return [
        {"stage": name, "milliseconds": spent, "floor": moved / bandwidth, "ratio": spent / (moved / bandwidth)}
        for name, spent, moved in found
        if not math.isnan(spent)  # one kernel does not take all mechanisms
    ]


def whole_rounds() -> list[dict[str, Any]]:
    """Measures a round of the paper's size for each mechanism, from vectors on the device to their mean."""
    rows = torch.randn(COHORT, -(-DIM // 32) * 32, device=DEVICE)[:, :DIM]
    found = []
    for name, mechanism in MECHANISMS.items():
        protocol = Protocol(clients=COHORT, dim=DIM, clip_norm=1.0, mechanism=mechanism)

        def work(protocol: Protocol = protocol) -> None:
            round_ = DeviceRound(protocol, 0, seed=1, device=DEVICE)
            round_.add(rows)
            round_.mean()

        found.append({"mechanism": name, "milliseconds": milliseconds(work)})
    return found


def scaling(bandwidth: float) -> list[dict[str, Any]]:
    """Measures rounds of several sizes, from vectors on the device to their mean.

    The same measure for all: vectors are given in chunks of at most 2 GiB, and clipped, rotated, rounded and added up;
    then the noise of the sum is drawn and the mean is rotated back. Dimensions are compared by rounds of as many
    numbers, clients times coordinates. Floors are the bytes that must be moved. Vectors of 2^15 to 2^16 - 1 coordinates
    are read twice, for their norm and for the rest; shorter ones are read twice and written once. Of longer ones the
    first 2^j coordinates are read three times and written twice, and the others, if any, read twice and written once.
    """
    sizes = [(clients, DIM) for clients in (1_000, 3_000, 10_000, 30_000, 100_000)]
    sizes += [(NUMBERS // dim, dim) for dim in (10_000, 100_000, 1_000_000, 10_000_000)]
    found = []
    for clients, dim in sizes:
        chunk = max(1, min(clients, (2 << 30) // (4 * dim)))
        protocol = Protocol.rotated_binomial(
            clients=clients, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS, coordinate_range=5.0 / math.sqrt(dim)
        )
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        rows = torch.randn(chunk, -(-dim // 32) * 32, device=DEVICE)[:, :dim]

        milliseconds = float(np.median([_round_time(protocol, rows, clients) for _ in range(5)]))
        head = 1 << (dim.bit_length() - 1)
        moved = 20 * head + 12 * (dim - head) if dim > max(head, 1 << 16) else 12 * dim
        if 1 << 15 <= dim < 1 << 16:
            moved = 8 * dim
        found.append(
            {
                "clients": clients,
                "dim": dim,
                "chunk": chunk,
                "milliseconds": milliseconds,
                "nanoseconds per coordinate and client": milliseconds * 1e6 / clients / dim,
                "floor": moved / bandwidth * 1e6 / dim,
                "peak MiB": torch.cuda.max_memory_allocated() / 2**20,
            }
        )
        del rows
    return found


def _round_time(protocol: Protocol, rows: torch.Tensor, clients: int) -> float:
    """Returns the milliseconds of a round, without drawing new vectors for each chunk."""
    times = [0.0]

    def timed(work: Callable[[], object]) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))

    rounds: list[DeviceRound] = []
    timed(lambda: rounds.append(DeviceRound(protocol, 0, seed=1, device=DEVICE)))
    for begin in range(0, clients, len(rows)):
        rows.normal_()
        timed(partial(rounds[0].add, rows[: clients - begin]))
    timed(rounds[0].mean)
    return sum(times)


class Transformer(torch.nn.Module):
    """A classifier of 64 tokens with a million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = torch.nn.Embedding(64, 128)
        self.places = torch.nn.Parameter(0.1 * torch.randn(64, 128))
        layers = (torch.nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True) for _ in range(5))
        self.layers = torch.nn.Sequential(*layers)
        self.out = torch.nn.Linear(128, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Returns the scores of ten classes."""
        found: torch.Tensor = self.out(self.layers(self.tokens(tokens) + self.places).mean(dim=1))
        return found


def convolutions() -> torch.nn.Module:
    """A classifier of images of 28 × 28 pixels with 102,130 parameters."""
    first = [torch.nn.Conv2d(1, 16, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2)]
    second = [torch.nn.Conv2d(16, 32, 3), torch.nn.ReLU(), torch.nn.MaxPool2d(2), torch.nn.Flatten()]
    return torch.nn.Sequential(*first, *second, torch.nn.Linear(800, 120), torch.nn.ReLU(), torch.nn.Linear(120, 10))


def models(clients: int = 1_000, rounds: int = 40) -> list[dict[str, Any]]:
    """Measures the rounds per second of a `Trainer` with one example per client, private and without privacy.

    Without privacy a round is the mean of clipped updates, as `NoPrivacy` has it; and for comparison a step of ordinary
    SGD on the same examples, one batch, which clips nobody. All move a round's examples to the GPU.
    """
    rng = np.random.default_rng(0)
    everybody = clients * rounds
    labels = rng.integers(0, 10, everybody)
    inputs: dict[str, tuple[Callable[[], torch.nn.Module], Any]] = {
        "convolutions": (convolutions, rng.random((everybody, 1, 28, 28), dtype=np.float32)),
        "transformer": (Transformer, rng.integers(0, 64, (everybody, 64))),
    }
    found = []
    for name, (make, features) in inputs.items():
        data = from_arrays(features, labels, test_features=features[:100], test_labels=labels[:100])
        dim = sum(p.numel() for p in make().parameters())
        reach = 3.6 / math.sqrt(dim)
        ways: dict[str, Protocol | NoPrivacy] = {
            "1 bit, coins": Protocol(
                clients=clients, dim=dim, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.12, coordinate_range=reach)
            ),
            "4 bits, binomial": Protocol(
                clients=clients, dim=dim, clip_norm=1.0, mechanism=Binomial(levels=3, trials=13, coordinate_range=reach)
            ),
            "clipped": NoPrivacy(1.0),
        }
        row: dict[str, Any] = {"model": name, "parameters": dim}
        for way, mechanism in ways.items():
            torch.manual_seed(0)
            trainer = Trainer(
                make(),
                torch.nn.functional.cross_entropy,
                data,
                mechanism,
                cohorts=CohortOptions(cohort=clients, rounds=rounds, participation="once"),
                account=AccountOptions(delta=1e-6),
                run=RunOptions(seed=0, device="cuda", evaluate_every=rounds),
            )
            row[way] = 1e3 / _milliseconds_each(trainer.step, 5, rounds - 6)
        row["SGD"] = 1e3 / _milliseconds_each(_ordinary_step(make().to(DEVICE), data, clients), 5, rounds - 6)
        found.append(row)
    return found


def epochs(runs: int = 3) -> list[dict[str, Any]]:
    """Measures the paper's epoch, from the first round to the last, for several plans, several times each.

    With an evaluation and a checkpoint after every 50 rounds, the run's folder in memory, and every round charged. In
    the first run kernels are compiled, too.
    """
    data = load("infinite-mnist", clients=COHORT * 2_500)
    found = []
    for name, options in EPOCHS.items():
        mechanism = plan(COHORT, DIM, 2.0, 1e-9, 1.0, rounds=2_500, participation="once", **options)
        seconds = []
        for _ in range(runs):
            with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
                trainer = Trainer(
                    mlp(784, 10, scaled=True, seed=0),
                    torch.nn.functional.cross_entropy,
                    data,
                    mechanism,
                    cohorts=CohortOptions(cohort=COHORT, rounds=2_500),
                    server=ServerOptions(lr=4.0, weight_decay=1e-4, schedule="late"),
                    run=RunOptions(seed=0, device="cuda", evaluate_every=50),
                    folder=FolderOptions(run_dir=Path(folder) / "run", checkpoint_every=50),
                )
                start = time.perf_counter()
                for _ in trainer.run():
                    pass
                torch.cuda.synchronize()
                seconds.append(time.perf_counter() - start)
        accuracy = trainer.history[-1].accuracy
        found.append({"plan": name, "first": seconds[0], "seconds": seconds[1:], "accuracy": accuracy})
    return found


def _milliseconds_each(work: Callable[[], object], before: int, times: int) -> float:
    """Returns the wall-clock time of `work`, which may be asynchronous, after `before` runs."""
    for _ in range(before):
        work()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - start) / times


def _ordinary_step(model: torch.nn.Module, data: Dataset, clients: int) -> Callable[[], object]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    source, chosen = on_device(data, DEVICE), permuted(np.arange(clients), data.size, 1)

    def step() -> None:
        batch = source.batch(chosen)
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(batch.features), batch.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()

    return step


def measured_rounds() -> dict[str, Any]:
    """Measures stages, rounds by mechanism, and rounds of other sizes."""
    bandwidth = copy_bandwidth()
    return {
        "device": torch.cuda.get_device_name(DEVICE),
        "torch": torch.__version__,
        "copy GB/s": bandwidth * 1e3 / GIGA,
        "stages": stages(bandwidth),
        "rounds": whole_rounds(),
        "scaling": scaling(bandwidth),
    }


def show_rounds(report: dict[str, Any]) -> None:
    print(f"{report['device']}, PyTorch {report['torch']}; a copy moves {report['copy GB/s']:,.0f} GB/s")
    print(f"\nA round of {COHORT:,} clients and {DIM:,} coordinates (k = {LEVELS}, m = {TRIALS}).")
    print("All: from factors of gradients to sums, in one kernel; the stages after it do the same one by one:")
    for row in report["stages"]:
        print(f"  {row['stage']:<22} {row['milliseconds']:7.3f} ms   floor {row['floor']:7.4f}   {row['ratio']:6.1f}×")
    print("\nThe same round without samples and gradients, by mechanism:")
    for row in report["rounds"]:
        print(f"  {row['mechanism']:<22} {row['milliseconds']:7.3f} ms")
    print("\nRounds of other sizes:")
    for row in report["scaling"]:
        print(
            f"  {row['clients']:>7,} clients × {row['dim']:>10,}  {row['milliseconds']:9.2f} ms  "
            f"{row['nanoseconds per coordinate and client']:8.5f} ns per coordinate, floor {row['floor']:.5f} "
            f"{row['peak MiB']:8,.0f} MiB"
        )


def show_epochs(rows: list[dict[str, Any]]) -> None:
    print("The paper's epoch, 2,500 rounds of 10,000 clients and 51,370 coordinates, ε = 2:")
    for row in rows:
        others = ", ".join(f"{seconds:.2f}" for seconds in row["seconds"])
        print(f"  {row['plan']:<28} {others} s, the first time {row['first']:.2f} s; {row['accuracy']:.2%}")


def show_models(rows: list[dict[str, Any]]) -> None:
    print("Rounds per second with 1,000 clients, and how many times longer a private round takes than others:")
    for row in rows:
        print(f"  {row['model']}, {row['parameters']:,} parameters")
        for way in ("1 bit, coins", "4 bits, binomial", "clipped", "SGD"):
            ratios = f"{row['clipped'] / row[way]:.2f}× clipped, {row['SGD'] / row[way]:.2f}× SGD"
            print(f"    {way:<18} {row[way]:8.1f}   {ratios}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--models", action="store_true", help="rounds of other models than dense layers only")
    parser.add_argument("--epochs", action="store_true", help="the paper's epoch only, by several plans")
    arguments = parser.parse_args()
    measure: Callable[[], Any] = measured_rounds
    show: Callable[[Any], None] = show_rounds
    if arguments.epochs:
        measure, show = epochs, show_epochs
    elif arguments.models:
        measure, show = models, show_models
    found = measure()
    if arguments.json:
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
