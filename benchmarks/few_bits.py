"""Prints gain and cost of correlated noise in few bits: `python -m benchmarks.few_bits` (five seconds of one core)."""

from __future__ import annotations

import argparse
import os
from time import process_time
from typing import Any

import numpy as np

from cpsgd import Protocol, plan
from cpsgd.correlated.saturating import RoundedCorrelated


def encode_seconds(protocol: Protocol, turns: int = 7) -> float:
    """Returns the least processor time of encoding a vector, with all seeds of a lineage where noise is correlated."""
    vector = np.random.default_rng(1).normal(size=protocol.dim)
    found = []
    for _ in range(turns):
        bands = protocol.mechanism.memory.bands
        seeds = [os.urandom(16) for _ in range(bands)] if bands > 1 else None
        begun = process_time()
        protocol.encode(vector, bands, seeds=seeds)
        found.append(process_time() - begun)
    return min(found)


def main() -> None:
    """Plans the paper's experiment with 3 to 6 bits, and encodes a vector with each plan."""
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--bits", type=float, nargs="+", default=[3.0, 4.0, 5.0, 6.0])
    arguments.add_argument("--bands", type=int, default=129)
    arguments.add_argument("--clients", type=int, default=10_000)
    arguments.add_argument("--dim", type=int, default=51_370)
    arguments.add_argument("--rounds", type=int, default=2500)
    arguments.add_argument("--epsilon", type=float, default=2.0)
    options = arguments.parse_args()
    run: dict[str, Any] = {
        "clients": options.clients,
        "dim": options.dim,
        "epsilon": options.epsilon,
        "delta": 1e-9,
        "rounds": options.rounds,
        "participation": "once",
    }
    independent = encode_seconds(plan(**run, bits=5.0, mechanism="rounded-gaussian").protocol)
    print(f"independent Gaussian noise: encode takes {1e3 * independent:.2f} ms of a processor")
    for bits in options.bits:
        found = plan(**run, bits=bits, correlated=options.bands, mechanism=RoundedCorrelated.name)
        assert found.prefix is not None
        taken = encode_seconds(found.protocol)
        print(
            f"{bits:g} bits: gain {found.prefix.gain:.1f}, ε = {found.guarantee.epsilon:.3f}, encode "
            f"{1e3 * taken:.1f} ms, {taken / independent:.1f} × independent; {found.protocol.mechanism}",
            flush=True,
        )


if __name__ == "__main__":
    main()
