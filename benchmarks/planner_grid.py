"""Compares plans for 200 requirements with earlier ones: error ratios before coins and now, and the time of a plan.

The requirements are a fixed list that covers its ranges evenly: points of Roberts' R-sequence, the higher-dimensional
relative of multiples of the golden ratio. Ratios are expected squared errors over the exact Gaussian mechanism's.

    python benchmarks/planner_grid.py --out docs/results/planner

plans all of them, writes `grid.csv` and fails where a plan is worse than what the file says it was before. That column
was recorded once with the package as it was before coins and the smoothed certificate (commit e3c2542):

    PYTHONPATH=OLD/src python benchmarks/planner_grid.py --out docs/results/planner --record-before

    python benchmarks/planner_grid.py --kinds

prints the processor seconds of one plan of each kind (secure, sampled, correlated, few coordinates, ...), without and
with the frontier that `cpsgd plan` shows.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cpsgd.errors import CpsgdError
from cpsgd.planner import plan

COUNT = 200
NAME = "grid.csv"
BITS = {
    False: (0.05, 0.3, 1.0, math.log2(3), 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0),
    True: (4.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0, 16.0),
}
KINDS: dict[str, dict[str, Any]] = {
    "large": {"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9},
    "4 bits": {"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9, "bits": 4},
    "secure": {"clients": 100, "dim": 10_000, "epsilon": 2.0, "delta": 1e-6, "secure": True},
    "secure, dropout": {
        **{"clients": 1_000, "dim": 51_370, "epsilon": 2.0, "delta": 1e-6, "secure": True, "rounds": 100},
        **{"dropout": 0.1, "colluding": 50},
    },
    "few coordinates": {"clients": 50, "dim": 10, "epsilon": 1.0, "delta": 1e-6},
    "one coordinate": {"clients": 1_000, "dim": 1, "epsilon": 1.0, "delta": 1e-6},
    "pure": {"clients": 1_000, "dim": 10, "epsilon": 2.0, "delta": 0.0},
    "poisson": {
        **{"clients": 1_000, "dim": 10_000, "epsilon": 2.0, "delta": 1e-6, "rounds": 500},
        **{"participation": "poisson:0.01", "adjacency": "zero-out"},
    },
    "fixed-size, secure": {
        **{"clients": 100, "dim": 51_370, "epsilon": 2.0, "delta": 1e-5, "rounds": 1_000, "secure": True},
        **{"participation": "fixed-size:0.02"},
    },
    "correlated": {
        **{"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9, "rounds": 2_500},
        **{"participation": "once", "correlated": "auto"},
    },
    "correlated, secure": {
        **{"clients": 1_000, "dim": 10_000, "epsilon": 2.0, "delta": 1e-6, "rounds": 100, "secure": True},
        **{"correlated": "auto"},
    },
    "two servers": {"clients": 1_000, "dim": 1_000, "epsilon": 2.0, "delta": 1e-6, "pair": True},
}
ASKED = ("clients", "dim", "epsilon", "delta", "bits", "secure", "rounds")
COLUMNS = (*ASKED, "before", "binomial", "best", "mechanism", "seconds")
# Digits of ratios in the file: rounding is less than what counts as worse.
_DIGITS, SLACK = 12, 1e-9
_FACTOR = 10.0**6 / 5.0


def requirements() -> Iterator[dict[str, Any]]:
    """Yields requirements: n = 5..10⁶, d = 1..2²⁰, ε = 0.1..8, 0.05..16 bits, secure or not, 1 or 100 rounds."""
    root = 1.2  # of x^7 = x + 1
    for _ in range(60):
        root = (1.0 + root) ** (1.0 / 7.0)
    for i in range(COUNT):
        u = [math.fmod(0.5 + i * root**-j, 1.0) for j in range(1, 7)]
        secure = u[3] >= 0.5
        clients = round(5.0 * _FACTOR ** u[0])
        yield {
            "clients": clients,
            "dim": round(2.0 ** (20.0 * u[1])),
            "epsilon": round(0.1 * 80.0 ** u[2], 3),
            "delta": min(1e-5, float(f"{0.01 / clients:.0e}")),
            "bits": BITS[secure][int(u[4] * len(BITS[secure]))],
            "secure": secure,
            "rounds": 1 if u[5] < 0.5 else 100,
        }


def ratio(asked: dict[str, Any], mechanism: str) -> tuple[str, str]:
    """Returns the error ratio and the mechanism of a plan; empty texts if there is no plan."""
    try:
        found = plan(**asked, mechanism=mechanism)
    except CpsgdError:
        return "", ""  # none keeps the requirement
    return f"{found.ratio:.{_DIGITS}g}", found.protocol.mechanism.name


def judge(asked: dict[str, Any], before: str) -> dict[str, Any]:
    """Returns a row of the table."""
    start = time.process_time()
    best, mechanism = ratio(asked, "best")
    seconds = time.process_time() - start
    # Where it is the best, it need not be planned again.
    binomial = best if mechanism == "binomial" else ratio(asked, "binomial")[0]
    row = {**asked, "before": before, "binomial": binomial, "best": best}
    return {**row, "mechanism": mechanism, "seconds": f"{seconds:.2f}"}


def time_kinds() -> None:
    """Prints the processor seconds of a plan of each kind, and with its frontier."""
    print(f"{'kind':<20} {'plan':>6} {'+ frontier':>10}  ratio  mechanism")
    for name, asked in KINDS.items():
        start = time.process_time()
        found = plan(**asked)
        planned = time.process_time() - start
        assert found.frontier
        whole = time.process_time() - start
        print(
            f"{name:<20} {planned:6.2f} {whole:10.2f}  {found.ratio:.3f}  {found.protocol.mechanism.name}", flush=True
        )


def worse(row: dict[str, Any]) -> bool:
    """Returns whether there was a better plan before, or is one with the paper's mechanism."""
    known = [float(row[name]) for name in ("before", "binomial") if row[name]]
    return bool(known) and not (row["best"] and float(row["best"]) <= min(known) * (1.0 + SLACK))


def key(row: dict[str, Any]) -> tuple[str, ...]:
    return tuple(str(row[name]) for name in ASKED)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder of grid.csv")
    parser.add_argument("--kinds", action="store_true", help="time one plan of each kind instead")
    parser.add_argument("--record-before", action="store_true", help="record what the package on the path reaches")
    chosen = parser.parse_args()
    if chosen.kinds:
        time_kinds()
        return
    if chosen.out is None:
        parser.error("give --out, or --kinds")
    chosen.out.mkdir(parents=True, exist_ok=True)
    path = chosen.out / NAME
    known: dict[tuple[str, ...], str] = {}
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            known = {key(row): row["before"] for row in csv.DictReader(file)}
    rows: list[dict[str, Any]] = []
    # Written beside the old file until all is done, so that nothing is lost if it is stopped.
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for asked in requirements():
            if chosen.record_before:
                rows.append({**asked, "before": ratio(asked, "binomial")[0]})
            else:
                rows.append(judge(asked, known[key(asked)]))
                if worse(rows[-1]):
                    print("WORSE", rows[-1], flush=True)
            table.writerow(rows[-1])
            file.flush()
            print(f"{len(rows):>3}/{COUNT}", *(rows[-1].get(name, "") for name in COLUMNS), flush=True)
    partial.replace(path)
    failures = [] if chosen.record_before else [row for row in rows if worse(row)]
    print(f"{len(rows)} requirements, {sum(bool(row['before']) for row in rows)} with a plan before")
    if not chosen.record_before:
        times = sorted(float(row["seconds"]) for row in rows)
        print(f"{len(failures)} worse; median {times[len(times) // 2]:.2f} s, slowest {times[-1]:.2f} s")
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
