"""Compares correlated noise with that of jax_privacy and of the distributed matrix mechanism, at equal ε.

    pip install jax-privacy && python -m reproduction.matrix_mechanisms

The setting is the paper's experiment: 25 million clients, 2,500 rounds, 51,370 parameters, ε = 2, δ = 10⁻⁹. *Gain* is
the squared error of prefix sums, a mean over rounds, with one pass of independent Gaussian noise, over that of a row.
BandMF and BISR are computed by jax_privacy alone: a trusted server adds exact Gaussian noise, and clients send floats.
DMM's noise is at best that of the tree which its cheaper version takes (`tree_gain`); its bytes are those published.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from dataclasses import astuple, dataclass, fields
from importlib import import_module
from pathlib import Path
from typing import Any

from cpsgd.planner.passes import schedule
from reproduction.accuracy_vs_bytes import DIM, RESULTS, points
from reproduction.select_settings import FEW_BITS_BANDS, Size, few_bits

EPSILON = 2.0
SIZE = Size(10_000, 2_500, DIM, 1e-9)
TABLE = RESULTS / "peers" / "matrix-mechanisms.csv"
SERVER, SEEDS, NOBODY, SHARES = "the server", "holders of seeds", "nobody", "holders of secret shares"
# Bienstock, Kumar and Polychroniadou (ICML 2025), with Honaker's online factorization: less than this more per round,
# as others summarise the paper.
_DMM_BYTES = 10_000_000


@dataclass(frozen=True)
class Row:
    """A mechanism in this experiment.

    Attributes:
        mechanism: Its name.
        trusted: Who, with what later rounds take away.
        passes: Rounds of a client.
        gain: Against one pass of independent Gaussian noise.
        kilobytes: Sent by a client in all passes.
        accuracy: In per cent on the test images, mean over seeds; None where it was not trained.
    """

    mechanism: str
    trusted: str
    passes: int
    gain: float
    kilobytes: float
    accuracy: float | None = None


def tree_gain(rounds: int) -> float:
    """Returns the gain of a binary tree with Honaker's online estimates, for clients that come once.

    A node of height i is estimated from its subtree with variance 1/(2 - 2^-i), and a leaf is in one node per level.
    """
    height = rounds.bit_length()
    nodes = [1.0 / (2.0 - 2.0**-level) for level in range(height)]
    errors = [sum(nodes[i] for i in range(height) if t >> i & 1) for t in range(1, rounds + 1)]
    return 0.5 * (rounds + 1) * rounds / (height * sum(errors))


def central(passes: int) -> Iterator[Row]:
    """Yields what jax_privacy computes for a trusted server."""
    jax: Any = import_module("jax")
    toeplitz: Any = import_module("jax_privacy.matrix_factorization.toeplitz")
    jax.config.update("jax_enable_x64", True)
    rounds, apart = SIZE.rounds, SIZE.rounds // passes

    def row(name: str, strategy: Any) -> Row:
        error = jax.numpy.mean(toeplitz.per_query_error(strategy_coef=strategy, n=rounds))
        squared = toeplitz.minsep_sensitivity_squared(strategy, apart, max_participations=passes, n=rounds)
        gain = passes**2 * 0.5 * (rounds + 1) / float(error * squared)
        return Row(name, SERVER, passes, gain, passes * 4 * DIM / 1000)

    for bands in (32, 128):
        coefficients = toeplitz.optimal_max_error_noising_coefs(rounds)[:bands]
        strategy = toeplitz.inverse_coef(toeplitz.pad_coefs_to_n(coefficients, rounds))
        yield row(f"BISR, {bands} bands", strategy)
    for bands in (32, 128, apart):
        yield row(f"BandMF, {bands} bands", toeplitz.optimize_banded_toeplitz(rounds, bands))


def ours() -> Iterator[Row]:
    """Yields our plans for the same (ε, δ), with the accuracies of docs/results."""
    shown = [p for p in sorted(points(), key=lambda p: p.accuracy) if p.epsilon == EPSILON]
    accuracies = {(p.kind.startswith("independent"), round(p.bytes_up)): p.accuracy for p in shown}

    def row(name: str, trusted: str, passes: int, **requirements: Any) -> Row:
        who, cohort = schedule(SIZE.rounds * SIZE.cohort, SIZE.rounds, passes)
        found = SIZE.plan(EPSILON, cohort=cohort, **{"participation": who, **requirements})
        # Independent Gaussian noise of several passes has as many times less variance.
        gain = passes * (found.prefix.gain if found.prefix else 1.0 / found.ratio)
        sent = passes * found.protocol.message_bytes
        return Row(name, trusted, passes, gain, sent / 1000, accuracies.get((trusted == NOBODY, sent)))

    for passes, bits in ((1, 4.0), (50, 0.1)):
        yield row(f"independent, {bits:g} bits", NOBODY, passes, bits=bits)
    for bits in (4.0, 5.0):
        yield row(f"rounded-correlated, {bits:g} bits", SEEDS, 1, **few_bits(FEW_BITS_BANDS, bits))
    for passes, bits in ((1, 12.0), (10, 14.0)):
        yield row(f"correlated-gaussian, 32 bands, {bits:g} bits", SEEDS, passes, bits=bits, correlated=32)


def rows() -> Iterator[Row]:
    """Yields all rows."""
    yield from ours()
    yield Row("DMM, tree", SHARES, 1, tree_gain(SIZE.rounds), _DMM_BYTES / 1000)
    for passes in (1, 10):
        yield from central(passes)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=TABLE)
    options = arguments.parse_args()
    found = sorted(rows(), key=lambda row: (row.passes, row.gain))
    with options.out.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow([field.name for field in fields(Row)])
        table.writerows(
            [f"{value:.6g}" if isinstance(value, float) else value for value in astuple(row)] for row in found
        )
    for row in found:
        accuracy = "–" if row.accuracy is None else f"{row.accuracy:.2f} %"
        print(
            f"| {row.mechanism} | {row.trusted} | {row.passes} | {row.gain:.3g} | {row.kilobytes:,.0f} | {accuracy} |"
        )


if __name__ == "__main__":
    main()
