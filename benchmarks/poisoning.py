"""What one client that uploads what it likes can move the mean of a round by, and the round is still released.

    python -m benchmarks.poisoning [--draws 21]

A round of secure aggregation hides every upload, so a liar may add any integers to the sum. What limits it is that a
federation withholds a mean that honest clients cannot have made (`cpsgd.federation.plausibility`). Each row draws the
noise of honest rounds with the real codec, adds a vector of some shape, and finds the largest norm with which half of
the rounds are released. Norms are in clip norms D; an honest client moves the mean by at most 1/n of it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from cpsgd import plan
from cpsgd.federation.plausibility import bounds
from cpsgd.federation.terms import implausible
from cpsgd.protocol import Protocol

ROUNDS = (
    (20, 1_000, 8.0, 1),
    (20, 10_000, 8.0, 1),
    (100, 10_000, 8.0, 1),
    (1_000, 1_000, 8.0, 1),
    (1_000, 10_000, 8.0, 1),
)
"""Clients, coordinates, ε and rounds that it is for; δ = 1e-6."""
SHAPES = (("one coordinate", 1), ("32 coordinates", 32), ("all coordinates", 0))


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=21, help="honest rounds that are drawn for each row")
    draws = parser.parse_args().draws
    print(
        "| clients | coordinates | ε | norm of honest noise | an honest client |"
        + "".join(f" {n} |" for n, _ in SHAPES)
    )
    print("|---|---|---|---|---|" + "---|" * len(SHAPES))
    for clients, dim, epsilon, rounds in ROUNDS:
        made = plan(clients, dim, epsilon, 1e-6, rounds=rounds, secure=True, dropout=0.1, colluding=1)
        protocol = replace(made.protocol, promise=None)
        means = [honest_mean(protocol, round) for round in range(draws)]
        noise = float(np.median([np.linalg.norm(mean) for mean in means]))
        pulls = [largest_pull(protocol, means, size or dim) for _, size in SHAPES]
        cells = [f"{noise:.3g}", f"{1.0 / clients:g}", *(f"{pull:.3g}" for pull in pulls)]
        print(f"| {clients:,} | {dim:,} | {epsilon:g} | " + " | ".join(cells) + " |", flush=True)


def honest_mean(protocol: Protocol, round: int) -> NDArray[np.float32]:
    """Returns the mean of a round in which every client sends zero."""
    sums = np.zeros(protocol.dim, np.int64)
    for _ in range(protocol.clients):
        sums += protocol.encode_integers(np.zeros(protocol.dim, np.float32), round)
    return protocol.decode_sum((sums % (protocol.modulus or 2**32)).astype(np.uint64), protocol.clients, round)


def largest_pull(protocol: Protocol, means: list[NDArray[np.float32]], size: int) -> float:
    """Returns the largest norm of a vector on the first `size` coordinates with which half of the rounds pass."""
    limits, low, high = bounds(protocol, protocol.clients), 0.0, 1e6 * protocol.clip_norm
    shape = np.zeros(protocol.dim, np.float32)
    shape[:size] = 1.0 / np.sqrt(size)
    while high - low > 1e-3 * high:
        middle = 0.5 * (low + high)
        passed = sum(implausible(mean + np.float32(middle) * shape, limits) is None for mean in means)
        low, high = (middle, high) if 2 * passed >= len(means) else (low, middle)
    return low / protocol.clip_norm


if __name__ == "__main__":
    main()
