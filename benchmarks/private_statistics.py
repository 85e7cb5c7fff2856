"""Compares errors of private statistics with OpenDP's and PipelineDP's at equal (ε, δ).

    python benchmarks/private_statistics.py [--rounds 200] [--epsilon 1] [--delta 1e-6] [--pipeline-dp PYTHON] [--json]

One count, one sum, means of 1 to 100 columns and histograms of 2 to 1,000 bins, for replace-one neighbours: on one
machine, between clients, and between clients with secure sums. Beside them is the noise that OpenDP's own accounting
asks for, its Laplace noise on integers for counts and on floats for others. Errors are root-mean-square and calculated
from the laws that are released, ours with rounding and clipping at their largest. They are played, too, 100 values of
each per round.

With --pipeline-dp also one count, sum and mean beside PipelineDP, played by a Python that has it, for add-remove
neighbours.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from cpsgd import statistics
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.statistics import Count, Histogram, Mean, Sum, prepare
from cpsgd.statistics.rows import RowQuestion


def table_of(n: int, columns: int) -> dict[str, Any]:
    """Returns a table whose columns are within [0, 1]."""
    generator = np.random.default_rng(0)
    found: dict[str, Any] = {f"c{i}": generator.uniform(0.2, 0.9, n) for i in range(columns)}
    return found | {"yes": generator.integers(2, size=n), "bin": generator.integers(1000, size=n)}


def cases(n: int) -> dict[str, tuple[Callable[..., Any], RowQuestion, Any, Any, float, float]]:
    """Returns how to ask each question, the question, its table, exact values, and L1 and L2 sensitivity."""
    data = table_of(n, 100)
    found: dict[str, Any] = {
        "one count": (
            *(partial(statistics.count, data, columns=["yes"]), Count(["yes"]), data),
            *(data["yes"].sum(), 1.0, 1.0),
        ),
        "one sum": (
            *(partial(statistics.sum, data, bounds={"c0": (0, 1)}), Sum({"c0": (0, 1)}), data),
            *(data["c0"].sum(), 1.0, 1.0),
        ),
    }
    for d in (1, 3, 10, 30, 100):
        names = [f"c{i}" for i in range(d)]
        bounds = dict.fromkeys(names, (0.0, 1.0))
        exact = np.array([data[name].mean() for name in names])
        ask = partial(statistics.mean, data, bounds=bounds)
        found[f"mean of {d}"] = (ask, Mean(bounds), data, exact, d / n, math.sqrt(d) / n)
    for bins in (2, 10, 100, 1000):
        exact = np.bincount(data["bin"] % bins, minlength=bins)
        code = {"bin": data["bin"] % bins}
        ask = partial(statistics.histogram, code, "bin", categories=range(bins))
        question = Histogram("bin", categories=range(bins))
        found[f"histogram of {bins}"] = (ask, question, code, exact, 2.0, math.sqrt(2.0))
    return found


def opendp_error(kind: str, sensitivity: float, required: dict[str, float], *, whole: bool) -> float:
    """Returns the standard deviation of the noise that OpenDP's own accounting asks for."""
    import opendp.prelude as dp

    dp.enable_features("contrib")
    number: Any = int if whole and kind == "laplace" else float
    atoms = dp.vector_domain(dp.atom_domain(T=int) if number is int else dp.atom_domain(T=float, nan=False))
    epsilon, delta = required["epsilon"], required["delta"]
    if kind == "laplace":
        make = lambda scale: dp.m.make_laplace(atoms, dp.l1_distance(T=number), scale=scale)  # noqa: E731
        scale = float(dp.binary_search_param(make, d_in=number(sensitivity), d_out=epsilon))
        return math.sqrt(0.5) / math.sinh(0.5 / scale) if whole else math.sqrt(2.0) * scale

    def gaussian(scale: float) -> Any:
        measured = dp.m.make_gaussian(atoms, dp.l2_distance(T=float), scale=scale)
        return dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(measured), delta=delta)

    return float(dp.binary_search_param(gaussian, d_in=sensitivity, d_out=(epsilon, delta)))


def noise_errors(required: dict[str, Any], values: int) -> list[dict[str, Any]]:
    """Returns errors of this library and of OpenDP at the same guarantee, for replace-one neighbours."""
    rows = []
    n = 1000
    for name, (ask, question, data, exact, l1, l2) in cases(n).items():
        repeats = max(40, values // np.size(exact))
        whole = question.statistic in ("count", "histogram")
        theirs = {
            kind: opendp_error(kind, size, required, whole=whole) for kind, size in (("laplace", l1), ("gaussian", l2))
        }
        entry: dict[str, Any] = {"question": name, **{f"opendp {kind}": error for kind, error in theirs.items()}}
        noise = prepare(question, **required).job.tasks[0].noise
        best, start = min(theirs.values()), time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            played = [np.mean((ask(**required).values - exact) ** 2) for _ in range(repeats)]
        entry |= {
            "seconds": (time.process_time() - start) / repeats,
            "ours": question.error(math.sqrt(noise.variance) / n, n),
            "ratio": question.error(math.sqrt(noise.variance) / n, n) / best,
            "played": math.sqrt(np.mean(played)) / best,
            "noise": f"{noise.kind}, δ = {0.0 if noise.is_pure else required['delta']:g}",
        }
        for kind, secure in (("clients", False), ("secure sums", True)):
            asked = question.plan(n, **required, secure=secure)
            error = between_clients(asked, question, data, n, values)
            entry |= {
                f"{kind} ratio": question.error(math.sqrt(asked.variance(n)), n) / best,
                f"{kind} played": question.error(error, n) / best,
                f"{kind} noise": f"{asked.protocol.mechanism.name}, δ = {asked.plan.guarantee.delta:g}",
                f"{kind} bits": asked.plan.bits,
            }
        rows.append(entry)
    return rows


def between_clients(asked: Any, question: RowQuestion, data: Any, n: int, values: int) -> float:
    """Plays rounds between clients, each with one row, and returns the error of a coordinate of their mean.

    Coordinates that are not rotated are independent: many copies of a vector in one round are many rounds.
    """
    chunk = {name: np.asarray(data[name]) for name in question.needed}
    vectors = question.vectors(chunk, np.ones(n, dtype=np.int64)).astype(np.float32)
    protocol, copies = asked.protocol, 1
    if not protocol.rotate:
        copies = max(1, 1000 // protocol.dim)
        limits = {name: getattr(protocol, name) for name in ("replace_one_distance", "replace_one_l1_distance")}
        wider = {name: copies * limit for name, limit in limits.items() if limit is not None}
        protocol = replace(
            protocol, dim=copies * protocol.dim, clip_norm=copies * protocol.clip_norm, promise=None, **wider
        )
        vectors = np.tile(vectors, copies)
    exact, squares = vectors.mean(axis=0, dtype=np.float64), []
    for _ in range(max(20, values // protocol.dim)):
        simulator = RoundSimulator(protocol, 0, threads=1)
        simulator.add(vectors)
        squares.append(np.mean((simulator.mean() - exact) ** 2))
    return math.sqrt(np.mean(squares))


PIPELINE = """
import json, sys, time
import pipeline_dp as dp
n, epsilon, delta, rounds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
rows = [(i, "all", float(i * 37 % 90)) for i in range(n)]
of = dp.DataExtractors(
    privacy_id_extractor=lambda r: r[0], partition_extractor=lambda r: r[1], value_extractor=lambda r: r[2]
)
exact = {"count": n, "sum": sum(r[2] for r in rows), "mean": sum(r[2] for r in rows) / n}
out = {}
for kind in (dp.NoiseKind.LAPLACE, dp.NoiseKind.GAUSSIAN):
    for metric in (dp.Metrics.COUNT, dp.Metrics.SUM, dp.Metrics.MEAN):
        name, squares, start = str(metric).lower().split("(")[0], 0.0, time.process_time()
        for _ in range(rounds):
            budget = dp.NaiveBudgetAccountant(total_epsilon=epsilon, total_delta=delta)
            params = dp.AggregateParams(
                metrics=[metric], noise_kind=kind, max_partitions_contributed=1, max_contributions_per_partition=1,
                min_value=0.0, max_value=100.0,
            )
            found = dp.DPEngine(budget, dp.LocalBackend()).aggregate(rows, params, of, public_partitions=["all"])
            budget.compute_budgets()
            ((_, values),) = list(found)
            squares += (getattr(values, name) - exact[name]) ** 2
        seconds = (time.process_time() - start) / rounds
        out[f"{name}, {kind.value}"] = {"rmse": (squares / rounds) ** 0.5, "seconds": seconds}
print(json.dumps(out))
"""


def pipeline_dp(python: str, required: dict[str, float], rounds: int) -> dict[str, Any]:
    """Returns errors of PipelineDP, run by another Python that has it, and ours; for add-remove neighbours."""
    n = 1000
    arguments = [str(each) for each in (n, required["epsilon"], required["delta"], rounds)]
    done = subprocess.run([python, "-c", PIPELINE, *arguments], capture_output=True, text=True, check=True)
    theirs = json.loads(done.stdout)
    table = {"id": np.arange(n), "x": np.array([float(i * 37 % 90) for i in range(n)])}
    cost: dict[str, Any] = {"user": "id", "neighbours": "add-remove", **required}
    asked: dict[str, tuple[Callable[[], Any], float]] = {
        "count": (lambda: statistics.count(table, rows_per_user=1, **cost), n),
        "sum": (
            lambda: statistics.sum(table, bounds={"x": (0, 100)}, rows_per_user=1, **cost),
            float(table["x"].sum()),
        ),
        "mean": (lambda: statistics.mean(table, bounds={"x": (0, 100)}, **cost), float(table["x"].mean())),
    }
    ours = {}
    for name, (ask, exact) in asked.items():
        start = time.process_time()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            errors = [float(ask().values[0]) - exact for _ in range(10 * rounds)]
        seconds = (time.process_time() - start) / (10 * rounds)
        ours[name] = {"rmse": float(np.sqrt(np.mean(np.square(errors)))), "seconds": seconds}
    return {"ours": ours, "pipeline-dp": theirs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--pipeline-dp", metavar="PYTHON", help="a Python that has PipelineDP")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    required = {"epsilon": asked.epsilon, "delta": asked.delta}
    found: dict[str, Any] = {"replace-one": noise_errors(required, 100 * asked.rounds)}
    if asked.pipeline_dp:
        found["add-remove"] = pipeline_dp(asked.pipeline_dp, required, asked.rounds)
    if asked.json:
        print(json.dumps(found, indent=2))
    else:
        show_errors(found)


def show_errors(found: dict[str, Any]) -> None:
    print("                         OpenDP             one machine      clients               secure sums")
    print("question        Laplace Gaussian    ours  ratio played  ratio played bits  ratio played bits  noise")
    for row in found["replace-one"]:
        sent = (
            f"{row[f'{kind} ratio']:7.3f}{row[f'{kind} played']:7.3f}{row[f'{kind} bits']:5.3g}"
            for kind in ("clients", "secure sums")
        )
        print(
            f"{row['question']:<17}{row['opendp laplace']:7.4g}{row['opendp gaussian']:9.4g}{row['ours']:8.4g}"
            f"{row['ratio']:7.3f}{row['played']:7.3f}{''.join(sent)}  {row['noise']}; {row['clients noise']}"
        )
    for library, entries in found.get("add-remove", {}).items():
        for name, entry in entries.items():
            print(f"{library:<12}{name:<18}{entry['rmse']:10.4g}{entry['seconds']:10.4f} s")


if __name__ == "__main__":
    main()
