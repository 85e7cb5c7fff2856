"""Computes the plans that docs/explanation/planner.md shows without a server: `python docs/_site/plans.py`.

Takes about four minutes of one core. The file is a script and not JSON, because browsers fetch nothing for pages that
are opened from the disk.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsgd import plan
from cpsgd.errors import InfeasibleError

OUT = Path(__file__).parents[1] / "assets" / "plans.js"
PREFIX = "window.cpsgdPlans = "
DELTA = 1e-6
CLIENTS = (100, 1_000, 10_000, 100_000)
DIMS = (1_000, 30_000, 1_000_000)
EPSILONS = (0.5, 1.0, 2.0, 4.0)


def points(clients: int, dim: int, epsilon: float, *, secure: bool) -> list[list[Any]]:
    """Returns [bits, bytes of a message, squared error, the same over the Gaussian's, mechanism] for each number."""
    try:
        best = plan(clients=clients, dim=dim, epsilon=epsilon, delta=DELTA, secure=secure)
    except InfeasibleError:
        return []
    found: list[list[Any]] = []
    for point in best.frontier:
        protocol = replace(best.protocol, mechanism=point.mechanism, modulus=point.modulus, promise=None)
        error, ratio = (float(f"{number:.4g}") for number in (point.expected_squared_error, point.ratio))
        # More bits than the best protocol can use change nothing.
        if not found or protocol.message_bytes != found[-1][1]:
            found.append([point.bits, protocol.message_bytes, error, ratio, point.mechanism.name])
    return found


def compute() -> dict[str, Any]:
    """Returns the grid and its plans, in the order secure, clients, dim, ε."""
    grid = itertools.product((False, True), CLIENTS, DIMS, EPSILONS)
    plans = []
    for secure, clients, dim, epsilon in grid:
        plans.append(points(clients, dim, epsilon, secure=secure))
        print(f"{len(plans)}: {clients} clients, {dim} numbers, ε = {epsilon}, secure {secure}", flush=True)
    return {"delta": DELTA, "clients": CLIENTS, "dims": DIMS, "epsilons": EPSILONS, "plans": plans}


def read(path: Path = OUT) -> dict[str, Any]:
    """Returns what a file has that this program wrote."""
    found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8").removeprefix(PREFIX).rstrip(";\n"))
    return found


if __name__ == "__main__":
    out = Path(sys.argv[1]) if len(sys.argv) > 1 else OUT
    out.write_text(f"{PREFIX}{json.dumps(compute(), separators=(',', ':'))};\n", encoding="utf-8")
