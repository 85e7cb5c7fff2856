"""Compares the client's work with that of other libraries in one run: ns per coordinate, and times memcpy.

Nothing here does the same as anything else, so each row says what it leaves out: cpsgd's rows are whole messages (clip,
rotate, round, noise, pack, header, checksum, cryptographic randomness); most others only draw noise, in floats, from a
generator that was not made to keep secrets. A peer that is not installed has a row that says so.

Times are processor time of one thread, minima over turns that the contenders take one after the other.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import logging
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.codec import numpy_fast_gaussian, numpy_pipeline
from benchmarks.secagg import BITS, NEIGHBOURS, flower_client, our_client, processor_seconds
from cpsgd import Protocol
from cpsgd.mechanisms import Coins
from cpsgd.privacy import Participation
from cpsgd.privacy.accountant import Rounds, composed_epsilon

DIM, LEVELS, TRIALS, ROUND = 2**20, 2, 14, 0
# OpenDP's exact samplers take many microseconds per number, so they get shorter vectors.
SHORT_DIM = 2**10
SIGMA = 0.1
# Rounds of a training with Poisson sampling, by the tight accountants.
ROUNDS, RATE, NOISE, DELTA = 1_000, 0.01, 1.0, 1e-6
Work = Callable[[], object]


def installed(package: str) -> str | None:
    """Returns the version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def best_times(contenders: dict[str, Work], turns: int, runs: int = 3) -> dict[str, float]:
    """Returns the shortest processor time of each contender over turns of a few runs."""
    best = dict.fromkeys(contenders, math.inf)
    for _ in range(turns):
        for name, contender in contenders.items():
            for _ in range(runs):
                start = time.process_time()
                contender()
                best[name] = min(best[name], time.process_time() - start)
    return best


def own(dim: int) -> dict[str, Work]:
    x = np.random.default_rng(0).standard_normal(dim, dtype=np.float32)
    out = np.zeros_like(x)
    protocol = Protocol.rotated_binomial(clients=10_000, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS)
    coins = Coins(coins=1, theta=0.12, coordinate_range=4 / math.sqrt(dim))
    one_bit = Protocol(clients=10_000, dim=dim, clip_norm=1.0, mechanism=coins)
    return {
        "memcpy": lambda: np.copyto(out, x),
        "cpsgd: message of 4 bits": lambda: protocol.encode(x, ROUND),
        "cpsgd: message of 1 bit": lambda: one_bit.encode(x, ROUND),
    }


def numpy_peers(dim: int) -> dict[str, Work]:
    random = np.random.default_rng(0)
    x = random.standard_normal(dim, dtype=np.float32)
    protocol = Protocol.rotated_binomial(clients=10_000, dim=dim, clip_norm=1.0, levels=LEVELS, trials=TRIALS)
    signs = random.choice(np.array([-1, 1], np.float32), 1 << (dim - 1).bit_length())
    return {
        "NumPy: the same protocol": lambda: numpy_pipeline(x, protocol, signs, random),
        "NumPy: clip, fastest normal noise": lambda: numpy_fast_gaussian(x, random),
    }


def flower_noise(dim: int) -> dict[str, Work]:
    """Does what `LocalDpMod` does to a model's update, without the messages around it."""
    mod = importlib.import_module("flwr.client.mod.localdp_mod")
    common = importlib.import_module("flwr.common")
    before = [np.zeros(dim, np.float32)]
    after = [np.random.default_rng(0).standard_normal(dim, dtype=np.float32)]

    def run() -> object:
        update = list(after)
        mod.compute_clip_model_update(update, before, 1.0)
        parameters = common.ndarrays_to_parameters(update)
        return mod.add_localdp_gaussian_noise_to_params(parameters, 1.0, 1.0, 1e-5)

    return {"Flower: LocalDpMod's clip and noise": run}


def torch_normal(dim: int) -> dict[str, Work]:
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    numbers = torch.empty(dim)
    return {"PyTorch: normal_": lambda: numbers.normal_(0.0, SIGMA)}


def opacus_noise(dim: int) -> dict[str, Work]:
    optimizer = importlib.import_module("opacus.optimizers.optimizer")
    torch = importlib.import_module("torch")
    torch.set_num_threads(1)
    reference = torch.zeros(dim)
    return {
        "Opacus: noise of a step": lambda: reference + optimizer._generate_noise(SIGMA, reference),
        "Opacus: the same in secure mode": lambda: (
            reference + optimizer._generate_noise(SIGMA, reference, secure_mode=True)
        ),
    }


def opendp_noise(dim: int) -> dict[str, Work]:
    """Returns samplers of exact discrete and float Gaussian noise."""
    dp = importlib.import_module("opendp.prelude")
    dp.enable_features("contrib")
    found: dict[str, Work] = {}
    for name, kind, scale, values in (
        ("integers", int, 10.0, [0] * dim),
        ("floats", float, SIGMA, [0.0] * dim),
    ):
        domain = dp.atom_domain(T=kind, nan=False) if kind is float else dp.atom_domain(T=kind)
        space = dp.vector_domain(domain), dp.l2_distance(T=float)
        measurement = dp.m.make_gaussian(*space, scale=scale)
        found[f"OpenDP: Gaussian noise, {name}"] = lambda run=measurement, values=values: run(values)  # type: ignore[misc]
    return found


def accountants() -> dict[str, Work]:
    """Returns ε of a training with Poisson sampling, by privacy-loss distributions."""
    found: dict[str, Work] = {
        "cpsgd": lambda: composed_epsilon(
            [Rounds(mu=1.0 / NOISE, count=ROUNDS)], delta=DELTA, participation=Participation.poisson(RATE)
        )
    }
    if installed("dp-accounting"):
        dp = importlib.import_module("dp_accounting")
        pld = importlib.import_module("dp_accounting.pld")
        event = dp.PoissonSampledDpEvent(RATE, dp.GaussianDpEvent(NOISE))
        found["dp-accounting"] = lambda: pld.PLDAccountant().compose(event, ROUNDS).get_epsilon(DELTA)
    return found


PEERS: tuple[tuple[str | None, Callable[[int], dict[str, Work]], bool], ...] = (
    (None, own, False),
    (None, numpy_peers, False),
    ("flwr", flower_noise, False),
    ("torch", torch_normal, False),
    ("opacus", opacus_noise, False),
    ("opendp", opendp_noise, True),
)
"""Package, contenders, and whether they get the short vector."""


def measure(turns: int, dim: int = DIM, short_dim: int = SHORT_DIM, neighbours: int = NEIGHBOURS) -> dict[str, Any]:
    contenders: dict[str, Work] = {}
    sizes: dict[str, int] = {}
    versions: dict[str, str | None] = {}
    for package, make, short in PEERS:
        if package is not None:
            versions[package] = installed(package)
            if versions[package] is None:
                continue
        size = short_dim if short else dim
        found = make(size)
        contenders |= found
        sizes |= dict.fromkeys(found, size)
    versions["dp-accounting"] = installed("dp-accounting")
    times = best_times(contenders, turns)
    rows = {name: {"coordinates": sizes[name], "ns": seconds / sizes[name] * 1e9} for name, seconds in times.items()}
    epsilons = {name: work() for name, work in accountants().items()}
    accounting = best_times(accountants(), turns=min(turns, 3), runs=1)
    clients: dict[str, Callable[[], Work]] = {"cpsgd": our_client(neighbours, dim, BITS)}
    if versions["flwr"] is not None:
        clients["Flower"] = flower_client(neighbours, dim, BITS)
    masking = processor_seconds(clients, turns=min(turns, 5))
    return {
        "coordinates": dim,
        "versions": versions,
        "noise": rows,
        "accounting": {name: {"seconds": accounting[name], "epsilon": epsilons[name]} for name in accounting},
        "masking": {"neighbours": neighbours, "bits": BITS, "seconds": masking},
    }


def print_report(report: dict[str, Any]) -> None:
    console = Console(width=110)
    rows = report["noise"]
    floor = rows["memcpy"]["ns"]
    table = Table(title=f"{report['coordinates']:,} coordinates, processor time of one thread, minima")
    for heading in ("what", "coordinates", "ns per coordinate", "× memcpy"):
        table.add_column(heading, justify="left" if heading == "what" else "right")
    for name, row in rows.items():
        table.add_row(name, f"{row['coordinates']:,}", f"{row['ns']:.3f}", f"{row['ns'] / floor:.1f}")
    for package, version in report["versions"].items():
        if version is None:
            table.add_row(f"{package}: not installed", "", "", "")
    console.print(table)
    for name, row in report["accounting"].items():
        print(f"ε of {ROUNDS:,} rounds sampled at {RATE:g}: {name} {row['seconds']:.3f} s, ε = {row['epsilon']:.4f}")
    masking = report["masking"]
    for name, seconds in masking["seconds"].items():
        print(f"masking for {masking['neighbours']} neighbours, {masking['bits']} bits: {name} {seconds * 1e3:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)  # a peer's time is not to be that of its log: Flower tells of every stage
    report = measure(options.turns)
    print(json.dumps(report, indent=2)) if options.json else print_report(report)


if __name__ == "__main__":
    main()
