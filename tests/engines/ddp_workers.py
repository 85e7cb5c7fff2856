"""Workers for the tests of `cpsgd.engines.ddp`.

All scenarios run one after another in one process group of real processes on this machine. Each worker leaves what it
saw in RANK.pickle, a dictionary by scenario, in its folder.
"""

from __future__ import annotations

import doctest
import hashlib
import io
import itertools
import multiprocessing
import os
import pickle
import runpy
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from cpsgd.codec import pipeline
from cpsgd.engines import ddp
from cpsgd.engines.allreduce import PrivateMean
from cpsgd.engines.ddp import ExampleGradients, PrivateOptimizer, WorkerGradients
from cpsgd.learning import mlp
from cpsgd.learning.datasets import infinite_digits
from cpsgd.ledger import Budget, Entry, Ledger, RoundEvent
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.protocol import Protocol

SECONDS = 60
BUDGET = {"epsilon": 400.0, "delta": 1e-5}
cross_entropy = torch.nn.functional.cross_entropy


def protocol(dim: int, trials: int = 20_000, **changes: Any) -> Protocol:
    parameters = {"clip_norm": 1.0, "levels": 64, "trials": trials, "coordinate_range": 0.6, **changes}
    return Protocol.rotated_binomial(clients=dist.get_world_size(), dim=dim, **parameters)


def small(**changes: Any) -> PrivateMean:
    return PrivateMean(protocol(20), **{**BUDGET, "rounds": 3, **changes})


def vector(rank: int, dim: int = 20) -> np.ndarray:
    return np.random.default_rng(rank).normal(scale=0.1, size=dim)


@contextmanager
def recorded() -> Iterator[dict[str, list[Any]]]:
    """What the exchange really encodes and sends."""
    seen: dict[str, list[Any]] = {"integers": [], "sent": []}
    integers, all_reduce = pipeline.integers, dist.all_reduce

    def record_integers(*args: Any, **kwargs: Any) -> np.ndarray:
        seen["integers"].append(integers(*args, **kwargs))
        return seen["integers"][-1].copy()

    def record_sent(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        seen["sent"].append((str(tensor.dtype), tensor.numel() * tensor.element_size()))
        return all_reduce(tensor, *args, **kwargs)

    pipeline.integers, dist.all_reduce = record_integers, record_sent  # type: ignore[assignment]
    try:
        yield seen
    finally:
        pipeline.integers, dist.all_reduce = integers, all_reduce


def attempt(call: Callable[[], object]) -> tuple[str, str]:
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


# ------------------------------------------------------------------ scenarios


def modular(rank: int) -> dict[str, Any]:
    # Far more than the spread of sums of two to four workers, and less than the sums of four.
    return mean(rank, PrivateMean(protocol(20, modulus=25_983), **BUDGET, rounds=3))


def mean(rank: int, exchange: PrivateMean | None = None) -> dict[str, Any]:
    exchange = small() if exchange is None else exchange
    with recorded() as seen:
        means = [exchange.mean(lambda: vector(rank)) for _ in range(3)]
    return {
        "means": means,
        "seen": seen,
        "payload_bytes": exchange.payload_bytes,
        "protocol": exchange.protocol,
        "epsilon": exchange.epsilon,
        "guarantee": exchange.guarantee(),
    }


def workers(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(mlp(6, 3, (5,), seed=rank))  # other weights on every worker, until DDP sends them
    dim = sum(p.numel() for p in model.parameters())
    private = WorkerGradients(model, PrivateMean(protocol(dim), **BUDGET, rounds=5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    generator = torch.Generator().manual_seed(rank)
    local, shared, weights = [], [], []
    for _ in range(5):
        optimizer.zero_grad()
        x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        alone = mlp(6, 3, (5,))
        alone.load_state_dict(model.module.state_dict())
        cross_entropy(alone(x), y).backward()  # type: ignore[no-untyped-call]
        cross_entropy(model(x), y).backward()  # type: ignore[no-untyped-call]
        local.append((flat_gradient(model), flat_gradient(alone)))
        private.synchronise()
        shared.append(flat_gradient(model))
        optimizer.step()
        weights.append(np.concatenate([p.detach().reshape(-1).numpy() for p in model.parameters()]))
    return {"local": local, "shared": shared, "weights": weights}


def optimizer(rank: int) -> dict[str, Any]:
    """An ordinary loop around a wrapped optimizer, with a schedule; interrupted, resumed, and out of budget."""
    model = DistributedDataParallel(mlp(6, 3, (), seed=rank))
    inner = torch.optim.Adam(model.parameters(), lr=0.2)
    private = PrivateOptimizer(inner, model, PrivateMean(protocol(21), **BUDGET, rounds=3))
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, gamma=0.5)
    generator = torch.Generator().manual_seed(rank)
    # The same steps by hand.
    twin = mlp(6, 3, ())
    twin.load_state_dict(model.module.state_dict())
    by_hand = torch.optim.Adam(twin.parameters(), lr=0.2)
    alike, gradients = [], []

    def weights() -> np.ndarray:
        return np.concatenate([p.detach().reshape(-1).numpy() for p in model.parameters()])

    def loop() -> None:
        x, y = torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)
        private.zero_grad()
        (100.0 * cross_entropy(model(x), y)).backward()  # type: ignore[no-untyped-call]  # far beyond the clip norm
        gradients.append(flat_gradient(model))
        private.step()

    with recorded() as seen:
        for number in range(2):
            loop()
            mean = private.mean.protocol.decode_sum(summed(seen["integers"][-1]), private.mean.workers, number)
            for p, part in zip(twin.parameters(), torch.from_numpy(mean).split([18, 3]), strict=True):  # type: ignore[no-untyped-call]
                p.grad = part.reshape(p.shape)
            by_hand.param_groups[0]["lr"] = 0.2 * 0.5**number
            by_hand.step()
            alike.append(all(map(torch.equal, twin.parameters(), model.module.parameters())))
            schedule.step()
    sent = [entry for entry in seen["sent"] if entry[0] != "torch.int64"]
    saved = private.state_dict()
    again = DistributedDataParallel(mlp(6, 3, (), seed=rank))
    resumed = PrivateOptimizer(
        torch.optim.Adam(again.parameters()), again, PrivateMean(protocol(21), **BUDGET, rounds=3)
    )
    resumed.load_state_dict(saved)
    spent = private.mean.guarantee()
    loop()
    before = weights()
    error = attempt(loop)
    other = DistributedDataParallel(mlp(6, 3, (), seed=rank))
    few = torch.optim.SGD(list(other.parameters())[:1], lr=0.1)
    exchange = PrivateMean(protocol(21), **BUDGET, rounds=3)
    return {
        "alike": alike,
        "sent": sent,
        "norms": [float(np.linalg.norm(gradient)) for gradient in gradients],
        "weights": weights(),
        "kept": np.array_equal(before, weights()),
        "spent": spent,
        "error": error,
        "resumed": (resumed.mean.round, resumed.mean.epsilon, resumed.optimizer.param_groups[0]["lr"]),
        "too many": attempt(lambda: resumed.load_state_dict({**saved, "round": 4})),
        "other parameters": attempt(lambda: PrivateOptimizer(few, other, exchange)),
        "several gradients": attempt(lambda: PrivateOptimizer(torch.optim.LBFGS(other.parameters()), other, exchange)),
        "protocol": exchange.protocol,
    }


def summed(integers: np.ndarray) -> np.ndarray:
    total = torch.from_numpy(integers.astype(np.int64))
    dist.all_reduce(total)
    found: np.ndarray = total.numpy().astype(np.uint64)
    return found


def flat_gradient(model: torch.nn.Module) -> np.ndarray:
    return np.concatenate([p.grad.reshape(-1).numpy().copy() for p in model.parameters() if p.grad is not None])


def digits(rank: int) -> dict[str, Any]:
    calls = itertools.count()
    # A fixed sequence a worker instead of the operating system's, so that the accuracy repeats exactly.
    os.urandom = lambda size: hashlib.shake_128(struct.pack("<QQ", rank, next(calls))).digest(size)
    examples, rounds, workers = 128, 40, dist.get_world_size()
    data = infinite_digits(1_000_000)
    model = DistributedDataParallel(mlp(data.feature_dim, data.classes, (), seed=0))
    whole = protocol(650, 2700 // (workers - 1), clip_norm=examples * (1.0 + 2.0**-9), levels=101, coordinate_range=4.5)
    exchange = PrivateMean(whole, epsilon=4.5, delta=1e-5, rounds=rounds, examples=examples, participation="once")
    private = ExampleGradients(model, cross_entropy, exchange)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    for number in range(rounds):
        first = (number * workers + rank) * examples
        batch = data.batch(np.arange(first, first + examples))
        private.synchronise(torch.from_numpy(batch.features), torch.from_numpy(batch.labels))
        optimizer.step()
    test = data.test_set()
    with torch.no_grad():
        right = model(torch.from_numpy(test.features)).argmax(1).numpy() == test.labels
    return {
        "accuracy": float(right.mean()),
        "epsilon": exchange.epsilon,
        "bits": exchange.bits_per_coordinate,
        "weights": np.concatenate([p.detach().reshape(-1).numpy() for p in model.parameters()]),
    }


def not_finite(rank: int) -> dict[str, Any]:
    last = rank == dist.get_world_size() - 1
    exchange = small()
    bad = vector(rank)
    bad[7] = np.nan
    with recorded() as seen:
        error = attempt(lambda: exchange.mean(lambda: bad if last else vector(rank)))
    spent = exchange.round
    again = exchange.mean(lambda: vector(rank))
    return {"error": error, "sent": seen["sent"], "spent": spent, "again": again}


def not_finite_gradient(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(torch.nn.Linear(19, 1, bias=True))
    private = WorkerGradients(model, small())
    model(torch.full((1, 19), float("inf") if rank == 0 else 1.0)).sum().backward()  # type: ignore[no-untyped-call]
    before = flat_gradient(model)
    return {"error": attempt(private.synchronise), "before": before, "after": flat_gradient(model)}


def other_types(rank: int) -> dict[str, Any]:
    layer = torch.nn.Linear(19, 1, dtype=torch.bfloat16)
    model = DistributedDataParallel(layer)
    private = WorkerGradients(model, small())
    model(torch.full((1, 19), float(rank), dtype=torch.bfloat16)).sum().backward()  # type: ignore[no-untyped-call]
    layer.bias.grad = None  # as of a parameter that took no part
    private.synchronise()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return {
        "types": [str(gradient.dtype) for gradient in gradients],
        "gradient": b"".join(gradient.float().numpy().tobytes() for gradient in gradients),
    }


def too_many_examples(rank: int) -> dict[str, Any]:
    model = DistributedDataParallel(torch.nn.Linear(3, 5))
    plan = protocol(20, 100_000, coordinate_range=1.0)
    exchange = PrivateMean(plan, **BUDGET, rounds=2, examples=4)
    private = ExampleGradients(model, cross_entropy, exchange)
    count = 5 if rank == 0 else 4
    error = attempt(lambda: private.synchronise(torch.ones(count, 3), torch.ones(count, dtype=torch.int64)))
    return {"error": error, "spent": exchange.round}


def other_protocol(rank: int) -> dict[str, Any]:
    # One worker has more coordinates: mixing its integers with the others' would not even add up.
    exchange = PrivateMean(protocol(21 if rank == 1 else 20), **BUDGET, rounds=3)
    with recorded() as seen:
        error = attempt(lambda: exchange.mean(lambda: vector(rank, exchange.protocol.dim)))
    return {"error": error, "sent": seen["sent"], "spent": exchange.round}


def other_budget(rank: int) -> dict[str, Any]:
    exchange = small(epsilon=399.0 if rank == 1 else 400.0)
    return {"error": attempt(lambda: exchange.mean(lambda: vector(rank))), "spent": exchange.round}


def other_round(rank: int) -> dict[str, Any]:
    exchange = small(first_round=1 if rank == 0 else 0)
    with recorded() as seen:
        error = attempt(lambda: exchange.mean(lambda: vector(rank)))
    return {"error": error, "sent": seen["sent"], "spent": exchange.round}


def budget(rank: int) -> dict[str, Any]:
    exchange = small(first_round=2)
    exchange.mean(lambda: vector(rank))
    with recorded() as seen:
        error = attempt(lambda: exchange.mean(lambda: vector(rank)))
    return {
        "error": error,
        "sent": seen["sent"],
        "spent": exchange.round,
        "too small": attempt(lambda: small(epsilon=exchange.epsilon * 0.9)),
        "alone": attempt(lambda: small(colluding=dist.get_world_size())),
        "wrong size": attempt(lambda: PrivateMean(replace(protocol(20), clients=7), **BUDGET, rounds=1)),
    }


def wrapped(rank: int) -> dict[str, Any]:
    noise = DiscreteLaplace(levels=3, coordinate_range=1.0, spread=100, shares=1, window=2**16)
    given = Protocol(clients=4, dim=20, clip_norm=1.0, mechanism=noise)
    budget = {"epsilon": 10.0, "delta": 0.0, "rounds": 1}
    return {
        "refused": attempt(lambda: PrivateMean(given, **budget, colluding=1)),
        "allowed": PrivateMean(given, **budget, colluding=3).rounds,
    }


def wrong_model(rank: int) -> dict[str, Any]:
    layer = torch.nn.Linear(19, 1)
    statistics = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(5))
    with_buffer = torch.nn.Linear(19, 1)
    with_buffer.register_buffer("last", torch.zeros(1))
    return {
        "dim": attempt(lambda: WorkerGradients(DistributedDataParallel(torch.nn.Linear(3, 1)), small())),
        "statistics": attempt(lambda: WorkerGradients(DistributedDataParallel(statistics), small())),
        "buffers": attempt(lambda: WorkerGradients(DistributedDataParallel(with_buffer), small())),
        "unused": attempt(
            lambda: WorkerGradients(DistributedDataParallel(layer, find_unused_parameters=True), small())
        ),
        "static": attempt(lambda: WorkerGradients(DistributedDataParallel(layer, static_graph=True), small())),
        "unit": attempt(lambda: ExampleGradients(DistributedDataParallel(layer), cross_entropy, small())),
    }


def book(rank: int, population: str, epsilon: float, **options: Any) -> Ledger:
    """A ledger with a budget, opened by the first worker; the others' machines need not have the file."""
    if rank != 0:
        return Ledger(Path("elsewhere.ledger"))
    ledger = Ledger(Path("b.ledger"))
    ledger.create(Budget(population=population, epsilon=epsilon, delta=BUDGET["delta"], **options))
    return ledger


def entries(rank: int, ledger: Ledger, population: str) -> list[Entry]:
    return list(ledger.events(population)) if rank == 0 else []


def charged(rank: int) -> dict[str, Any]:
    last = rank == dist.get_world_size() - 1
    ledger = book(rank, "charged", 400.0)
    exchange = small(ledger=ledger, population="charged")
    exchange.mean(lambda: vector(rank))
    before = len(entries(rank, ledger, "charged"))
    refused = attempt(lambda: exchange.mean(lambda: np.full(20, np.nan) if last else vector(rank)))
    between = len(entries(rank, ledger, "charged"))
    exchange.mean(lambda: vector(rank))
    return {
        "refused": refused,
        "counts": (before, between),
        "entries": entries(rank, ledger, "charged"),
        "spent": ledger.total("charged").epsilon if rank == 0 else None,
        "epsilon": exchange.epsilon,
        "protocol": exchange.protocol,
        "files": sorted(path.name for path in Path().glob("elsewhere*")),
    }


def unpaid(rank: int) -> dict[str, Any]:
    # Enough for two rounds of three: refused before the first.
    two = small(first_round=2).epsilon
    ledger = book(rank, "too small", 1.01 * two)
    exchange = small(ledger=ledger, population="too small")
    with recorded() as seen:
        too_small = attempt(lambda: exchange.mean(lambda: vector(rank)))
    # Enough for three, until somebody else spends of it.
    three = small(first_round=3).epsilon
    shared = book(rank, "shared", 1.01 * three)
    other = small(ledger=shared, population="shared")
    other.mean(lambda: vector(rank))
    if rank == 0:
        for _ in range(2):
            shared.reserve("shared", RoundEvent(other.protocol, survivors=other.workers, colluding=1))
    with recorded() as later:
        meanwhile = attempt(lambda: other.mean(lambda: vector(rank)))
    return {
        "errors": (too_small, meanwhile),
        "sent": seen["sent"] + later["sent"],
        "spent": (exchange.round, other.round),
        "entries": (len(entries(rank, ledger, "too small")), len(entries(rank, shared, "shared"))),
    }


def taken_up(rank: int) -> dict[str, Any]:
    options = {**BUDGET, "rounds": 4, "examples": 4, "participation": "once", "population": "once", "run": "a"}
    examples = protocol(20, 100_000, coordinate_range=1.0)
    cost = PrivateMean(examples, **{**options, "population": None}, first_round=1).epsilon
    ledger = book(rank, "once", 1.01 * cost, unit="example")
    for first in (0, 2):
        exchange = PrivateMean(examples, **options, ledger=ledger, first_round=first)
        for _ in range(2 if first == 0 else 1):
            exchange.mean(lambda: vector(rank))
    again = PrivateMean(examples, **options, ledger=ledger, first_round=2)
    with recorded() as seen:
        error = attempt(lambda: again.mean(lambda: vector(rank)))
    other = PrivateMean(examples, **{**options, "run": "b"}, ledger=ledger)
    return {
        "error": error,
        "sent": seen["sent"],
        "other": attempt(lambda: other.mean(lambda: vector(rank))),
        "entries": entries(rank, ledger, "once"),
        "total": ledger.total("once").epsilon if rank == 0 else None,
        "cost": cost,
    }


def wrong_ledger(rank: int) -> dict[str, Any]:
    ledger = book(rank, "zeros", 400.0, adjacency="zero-out")
    book_of_examples = book(rank, "examples", 400.0, unit="example")

    def refused(**options: Any) -> tuple[tuple[str, str], list[Any], int]:
        exchange = small(**options)
        with recorded() as seen:
            error = attempt(lambda: exchange.mean(lambda: vector(rank)))
        return error, seen["sent"], exchange.round

    found = {
        "adjacency": refused(ledger=ledger, population="zeros"),
        "unit": refused(ledger=book_of_examples, population="examples"),
        "unknown": refused(ledger=ledger, population="nobody"),
        "disagreement": refused() if rank == 0 else refused(ledger=ledger, population="zeros"),
    }
    spent = sum(len(entries(rank, ledger, population)) for population in ("zeros", "examples"))
    halves = [attempt(lambda: small(ledger=ledger)), attempt(lambda: small(population="zeros"))]
    return {"found": found, "spent": spent, "halves": halves}


def slow_release(rank: int) -> dict[str, Any]:
    """A transport whose thread keeps the tensor for a while after the collective, as gloo's may."""
    released: list[float] = []
    all_reduce = dist.all_reduce

    def keep(tensor: torch.Tensor) -> None:
        time.sleep(0.3)
        released.append(time.monotonic())

    def all_reduce_and_keep(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        done = all_reduce(tensor, *args, **kwargs)
        threading.Thread(target=keep, args=(tensor,)).start()
        return done

    exchange = small()
    dist.all_reduce = all_reduce_and_keep
    try:
        exchange.mean(lambda: vector(rank))
    finally:
        dist.all_reduce = all_reduce
    return {"returned": time.monotonic(), "released": released}


def lost_worker(rank: int) -> dict[str, Any]:
    ledger = book(rank, "lost", 400.0)
    exchange = small(ledger=ledger, population="lost")
    exchange.mean(lambda: vector(rank))
    if rank == 1:
        time.sleep(2.0)  # until the others have all of the first round
        os._exit(0)
    error = attempt(lambda: exchange.mean(lambda: vector(rank)))
    return {"error": error, "spent": exchange.round, "charged": len(entries(rank, ledger, "lost"))}


def run(rank: int, workers: int, folder: Path, names: list[str]) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    os.chdir(folder)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=workers,
        timeout=timedelta(seconds=SECONDS),
    )
    results = {name: globals()[name](rank) for name in names}
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(results))
    if "lost_worker" not in names:
        dist.destroy_process_group()


def show(rank: int, workers: int, folder: Path, names: list[str]) -> None:
    """Runs the example in the docstring of each class of the engine, as torchrun would: the example makes the group."""
    for name, port in zip(names, (folder / "ports").read_text().split(), strict=True):  # no group meets an earlier one
        _as_torchrun(rank, workers, port)
        (example,) = doctest.DocTestFinder(recurse=False).find(getattr(ddp, name), name, globs={})
        for line in example.examples:
            line.options.pop(doctest.SKIP)
        seen = io.StringIO()
        found = doctest.DocTestRunner().run(example, out=seen.write)
        (folder / f"{name}.{rank}").write_text(f"{found.attempted} lines, {found.failed} failed\n{seen.getvalue()}")
        dist.destroy_process_group()


def script(rank: int, workers: int, folder: Path, names: list[str]) -> None:
    """Runs scripts as torchrun would, and keeps what they print."""
    for name, port in zip(names, (folder / "ports").read_text().split(), strict=True):
        _as_torchrun(rank, workers, port)
        with redirect_stdout(io.StringIO()) as seen:
            runpy.run_path(name, run_name="__main__")
        (folder / f"{Path(name).name}.{rank}").write_text(seen.getvalue())


def _as_torchrun(rank: int, workers: int, port: str) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(workers), "GLOO_SOCKET_IFNAME": "lo"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def start(folder: Path, count: int, names: list[str], work: Callable[..., None] = run) -> int:
    """Runs scenarios on workers that are forked, so that nothing is imported again; returns the worst exit code."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=work, args=(rank, count, folder, names)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(2 * SECONDS)
    for process in processes:
        process.kill()
    return max(process.exitcode or 0 for process in processes)
