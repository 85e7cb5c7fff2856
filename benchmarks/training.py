"""Measures private training of single examples beside Opacus and plain PyTorch: time and memory of a step.

`python -m benchmarks.training` (on a GPU with `--device cuda`) trains two CNNs, an MLP and a transformer. Every
contender has the same model, batch and optimizer, and no data loading. Time is that of the best of several blocks of
steps. Memory is the most in use: on a GPU what PyTorch allocated, on a CPU what the process, one for each contender,
took since the model was made. Opacus is left out where it is not installed. `--profile` prints what a step is made of,
and `--rounds` measures rounds of clients instead. Part of `make bench`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn import functional

from cpsgd.errors import DataError
from cpsgd.learning import AccountOptions, CohortOptions, NoPrivacy, RunOptions, Trainer, mlp
from cpsgd.learning.datasets import Dataset, infinite_mnist
from cpsgd.learning.datasets.infinite import FIELD_COUNT, InfiniteDataset, smooth_fields
from cpsgd.learning.datasets.populations import ImageDataset
from cpsgd.learning.poisson_loader import MicroBatch
from cpsgd.learning.private_loop import Private, make_private
from cpsgd.planner import plan

COHORTS = [1_000, 10_000, 100_000]
CONTENDERS = ("plain", "cpsgd", "opacus", "opacus ghost")


class Block(nn.Module):
    """A transformer's block: attention of four heads, and two dense layers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(width), nn.LayerNorm(width)
        self.mix, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the block's output."""
        count, length, width = x.shape
        heads = self.mix(self.before(x)).view(count, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(heads[0], heads[1], heads[2])
        x = x + self.out(mixed.transpose(1, 2).reshape(count, length, width))
        found: torch.Tensor = x + self.narrow(functional.gelu(self.wide(self.after(x))))
        return found


class Transformer(nn.Module):
    """Six blocks of width 256 on 1,000 words: 5 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.blocks = nn.Embedding(1000, 256), nn.Sequential(*[Block(256) for _ in range(6)])
        self.head = nn.Linear(256, 10)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """Returns ten scores."""
        found: torch.Tensor = self.head(self.blocks(self.words(words)).mean(1))
        return found


def small_cnn() -> nn.Module:
    """Returns a CNN of 1,444 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, stride=2, bias=False), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 12, 3, stride=2)),
        *(nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(48, 10, bias=False)),
    )


def large_cnn() -> nn.Module:
    """Returns a CNN of 550,456 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(1600, 330), nn.ReLU(), nn.Linear(330, 10)),
    )


def dense() -> nn.Module:
    """Returns an MLP of 235,146 parameters."""
    return nn.Sequential(nn.Flatten(), mlp(784, 10, hidden=(256, 128)))


MODELS: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "CNN, small": (small_cnn, 256, 1024),
    "CNN": (large_cnn, 256, 1024),
    "MLP": (dense, 256, 1024),
    "transformer": (Transformer, 32, 128),
}
"""Models by name, with the examples in a batch on a CPU and on a GPU."""


def step_of(contender: str, name: str, device: torch.device, batch: int) -> tuple[Callable[[], object], int]:
    """Returns a function that takes one step of training, and the number of parameters."""
    torch.manual_seed(0)
    make, *_ = MODELS[name]
    model = make().to(device)
    words = name == "transformer"
    x = torch.randint(0, 1000, (batch, 64)) if words else torch.randn(batch, 1, 28, 28)
    x, y = x.to(device), torch.randint(0, 10, (batch,)).to(device)
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    criterion: Any = nn.CrossEntropyLoss()
    dim = sum(p.numel() for p in model.parameters())
    data = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=batch)
    private: Private | None = None
    if contender == "cpsgd":
        private = make_private(model, optimizer, data, noise_multiplier=1.0, delta=1e-5, epochs=10**5)
    elif contender.startswith("opacus"):
        from opacus import PrivacyEngine

        options: dict[str, Any] = {"noise_multiplier": 1.0, "max_grad_norm": 1.0, "poisson_sampling": False}
        if contender == "opacus":
            made = PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=data, **options)
            model, optimizer, _ = made
        else:
            options |= {"grad_sample_mode": "ghost", "criterion": criterion}
            made = PrivacyEngine().make_private(module=model, optimizer=optimizer, data_loader=data, **options)
            model, optimizer, criterion, _ = made
            # Opacus's own answer to attacks on floats, here with PyTorch's generator in place of a secure one.
            optimizer.secure_mode = contender.endswith("secure")

    def step() -> None:
        if private is not None:  # as its loader would say
            private._loader.current = MicroBatch(batch, last=True)
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()

    return step, dim


def measured(contender: str, name: str, device: torch.device, *, blocks: int = 5) -> dict[str, float]:
    """Returns seconds and processor seconds of a step, and MiB of memory, of a contender in this process."""
    gpu = device.type == "cuda"
    _, small, large = MODELS[name]
    step, dim = step_of(contender, name, device, large if gpu else small)
    before = _resident()

    def wait() -> None:
        if gpu:
            torch.cuda.synchronize()

    step()
    wait()
    begun = time.perf_counter()
    step()
    wait()
    size = max(5, min(200, int((0.2 if gpu else 1.0) / max(1e-4, time.perf_counter() - begun))))
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    best, processor = float("inf"), float("inf")
    for _ in range(blocks):
        begun, used = time.perf_counter(), time.process_time()
        for _ in range(size):
            step()
        wait()
        best = min(best, (time.perf_counter() - begun) / size)
        processor = min(processor, (time.process_time() - used) / size)
    peak = torch.cuda.max_memory_allocated() if gpu else _resident() - before
    return {"seconds": best, "processor": processor, "memory": peak / 2**20, "parameters": dim}


def _resident() -> int:
    """Returns the most bytes that this process ever had in memory."""
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _on_gpu(contender: str, name: str, device: str) -> dict[str, float]:
    """Measures a contender in this process, after all others have left the GPU."""
    gc.collect()
    torch.cuda.empty_cache()
    return measured(contender, name, torch.device(device))


def _alone(contender: str, name: str, device: str) -> dict[str, float]:
    """Measures a contender in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.training", "--one", contender, name, "--device", device]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def profiled(contender: str, name: str, device: torch.device) -> None:
    """Prints the operations of twenty steps, by their time."""
    gpu = device.type == "cuda"
    _, small, large = MODELS[name]
    step, _ = step_of(contender, name, device, large if gpu else small)
    for _ in range(5):
        step()
    activities = [torch.profiler.ProfilerActivity.CPU, *[torch.profiler.ProfilerActivity.CUDA] * gpu]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(20):
            step()
        if gpu:
            torch.cuda.synchronize()
    for key in ("self_cpu_time_total", *["self_cuda_time_total"] * gpu):
        print(profile.key_averages().table(sort_by=key, row_limit=30, max_name_column_width=60))


def examples(device: str, names: list[str]) -> None:
    """Prints time and memory of all contenders."""
    gpu = torch.device(device).type == "cuda"
    key = "seconds" if gpu else "processor"
    there = [c for c in CONTENDERS if not c.startswith("opacus") or importlib.util.find_spec("opacus") is not None]
    table = Table("model", "parameters", "batch", *(f"{each} ms" for each in there), *(f"{each} MiB" for each in there))
    ratios = Table("model", "time / plain", "time / Opacus", "time / Opacus ghost", "memory / Opacus", "memory / ghost")
    for name in names:
        found: dict[str, dict[str, float]] = {}
        for contender in there:
            try:
                found[contender] = _on_gpu(contender, name, device) if gpu else _alone(contender, name, device)
            except (RuntimeError, subprocess.SubprocessError) as error:
                print(f"{contender}, {name}: {error}", file=sys.stderr)
        nothing = {key: float("nan"), "memory": float("nan")}
        each = {contender: found.get(contender, nothing) for contender in CONTENDERS}
        table.add_row(
            name,
            f"{found['plain']['parameters']:,.0f}",
            f"{MODELS[name][2 if gpu else 1]:,}",
            *(f"{1e3 * each[contender][key]:.2f}" for contender in there),
            *(f"{each[contender]['memory']:,.0f}" for contender in there),
        )
        own = each["cpsgd"]
        times = [own[key] / each[other][key] for other in ("plain", "opacus", "opacus ghost")]
        sizes = [own["memory"] / each[other]["memory"] for other in ("opacus", "opacus ghost")]
        ratios.add_row(name, *(f"{ratio:.2f}" for ratio in (*times, *sizes)))
    console = Console(width=150)
    kind = "wall clock" if gpu else "processor time on one thread"
    console.print(f"A step of example-level private training, {kind}; {device}, PyTorch {torch.__version__}.")
    console.print(table)
    console.print(ratios)


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


def rounds_of_clients(largest: int, rounds: int) -> None:
    """Prints the time of a round, private and not, for growing numbers of clients of the paper's network.

    Both rounds form every client's clipped gradient; the private one also rotates and rounds each, and adds noise. They
    take turns, and the best of a few rounds counts.
    """
    data = population()
    table = Table("clients", "private s", "non-private s", "ratio", "data s", "µs per client", "peak MiB")
    for cohort in (size for size in COHORTS if size <= largest):
        private = plan(clients=cohort, dim=51_370, epsilon=2.0 * 10_000 / min(cohort, 10_000), delta=1e-9, bits=5)
        contenders = [
            Trainer(
                mlp(784, 10, seed=0),
                torch.nn.functional.cross_entropy,
                data,
                mechanism,
                cohorts=CohortOptions(cohort=cohort, rounds=rounds, participation="once"),
                account=AccountOptions(delta=1e-9),
                run=RunOptions(seed=1, evaluate_every=rounds + 1),
            )
            for mechanism in (private.protocol, NoPrivacy(1.0))
        ]
        times = [[trainer.step().seconds for trainer in contenders] for _ in range(rounds)]
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


def main() -> None:
    """Reads the options and measures."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments.add_argument("--models", nargs="*", choices=list(MODELS), default=list(MODELS))
    arguments.add_argument(
        "--one", nargs=2, metavar=("CONTENDER", "MODEL"), help="measure one, also 'opacus ghost secure', as JSON"
    )
    arguments.add_argument("--profile", nargs=2, metavar=("CONTENDER", "MODEL"), help="print what its steps consist of")
    arguments.add_argument(
        "--rounds", type=int, help="rounds of clients, this many of each kind, of which the best counts"
    )
    arguments.add_argument("--largest", type=int, default=100_000, help="with --rounds: largest cohort")
    options = arguments.parse_args()
    if options.rounds is not None:
        rounds_of_clients(options.largest, options.rounds)
        return
    warnings.simplefilter("ignore")  # Opacus warns that its generator is not a secure one
    if options.device == "cpu":
        torch.set_num_threads(1)
    if options.profile is not None:
        contender, name = options.profile
        profiled(contender, name, torch.device(options.device))
    elif options.one is not None:
        contender, name = options.one
        print(json.dumps(measured(contender, name, torch.device(options.device))))
    else:
        examples(options.device, options.models)


if __name__ == "__main__":
    main()
