"""Measures errors of private statistics beside OpenDP, PipelineDP and diffprivlib at equal (ε, δ), and a large table.

    python benchmarks/private_statistics.py [--rounds 200] [--epsilon 1] [--delta 1e-6] [--json]
    python benchmarks/private_statistics.py --pipeline-dp PYTHON | --messages | --large

By default: one count, one sum, means of 1 to 100 columns and histograms of 2 to 1,000 bins, on one machine, between
clients, and between clients with secure sums, beside the noise that OpenDP's own accounting asks for: its Laplace noise
on integers for counts, on floats for others. Both errors are calculated from the laws that are released; ours with
rounding and clipping at their largest. They are played, too, about 20,000 values of each. With --pipeline-dp also
beside PipelineDP, run by a Python that has it, for add-remove neighbours. With --messages: what few-bit messages of
clients cost.

All others for replace-one neighbours. Errors are root-mean-square, over columns or bins and repetitions; means in units
of the width of a column's bounds, histograms in rows. "gaussian" is the exactly calibrated Gaussian mechanism on the
whole vector, the best that adds independent noise of one variance by Euclidean distance; "laplace" is calibrated by
hand for sums of absolute values. The other libraries' means get ε/d for each of d columns, as their users compose them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import statistics
from cpsgd.errors import CpsgdError
from cpsgd.privacy.gaussian import analytic_sigma
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.statistics import Count, Histogram, Mean, Sum, prepare
from cpsgd.statistics.rows import RowQuestion

Table = NDArray[np.float64]
# Bits per coordinate and mechanism: few, the fewest within 10 % of the Gaussian mechanism, and those on one machine.
MESSAGES = ((1, "best"), (2, "best"), (3, "best"), (4, "best"), (None, "best"), (12, "binomial"))


def data_sets() -> dict[str, tuple[Table, dict[str, tuple[float, float]]]]:
    """Returns tables with bounds known without the data: of digits by construction, of others round numbers."""
    from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits

    found = {}
    for name, load in (("digits", load_digits), ("breast cancer", load_breast_cancer), ("diabetes", load_diabetes)):
        data = np.asarray(load().data, dtype=np.float64)
        if name == "digits":
            ends = [(0.0, 16.0)] * data.shape[1]
        elif name == "diabetes":
            ends = [(-0.2, 0.2)] * data.shape[1]
        else:
            ends = [(0.0, 2.0 ** math.ceil(math.log2(column.max()))) for column in data.T]
        found[name] = (data, {str(i): pair for i, pair in enumerate(ends)})
    return found


def ours(
    question: RowQuestion, data: Table, message: tuple[float | None, str], required: dict[str, float], rounds: int
) -> dict[str, Any]:
    """Returns the errors of a coordinate of the mean of the vectors, repeated and not moved into bounds."""
    bits, mechanism = message
    try:
        asked = question.plan(len(data), required["epsilon"], required["delta"], bits=bits, mechanism=mechanism)
    except CpsgdError as error:
        return {"bits": bits, "rmse": None, "reason": str(error)[:120]}
    points = question.points({str(i): column for i, column in enumerate(data.T)}).astype(np.float32)
    exact = points.mean(axis=0, dtype=np.float64)
    squares = []
    for seed in range(rounds):
        simulator = RoundSimulator(asked.protocol, 0, seed=seed, threads=1)
        simulator.add(points)
        squares.append(np.mean((simulator.mean() - exact) ** 2))
    return {
        "bits": asked.protocol.bits_per_coordinate,
        "mechanism": asked.protocol.mechanism.name,
        "rmse": float(np.sqrt(np.mean(squares))),
        "epsilon": asked.plan.guarantee.epsilon,
    }


def central_means(
    data: Table, bounds: dict[str, tuple[float, float]], required: dict[str, float], rounds: int
) -> dict[str, float]:
    """Returns root-mean-square errors of other methods for all columns' means, in units of the width."""
    n, d = data.shape
    epsilon, delta = required["epsilon"], required["delta"]
    found = {
        "gaussian": analytic_sigma(epsilon=epsilon, sensitivity=math.sqrt(d) / n, delta=delta),
        "laplace": math.sqrt(2.0) * d / (n * epsilon),
    }
    width = np.array([high - low for low, high in bounds.values()])
    low = np.array([low for low, _ in bounds.values()])
    scaled = np.clip((data - low) / width, 0.0, 1.0)
    exact = scaled.mean(axis=0)
    found |= attempt("diffprivlib", lambda: diffprivlib_means(scaled, epsilon / d, rounds) - exact)
    found |= attempt("opendp", lambda: opendp_noise("laplace", d / (n * epsilon), (rounds, d)))
    found |= attempt("opendp gaussian", lambda: opendp_noise("gaussian", found["gaussian"], (rounds, d)))
    return found


def central_histograms(
    codes: NDArray[np.int64], bins: int, required: dict[str, float], rounds: int
) -> dict[str, float]:
    """Returns root-mean-square errors of other methods for a histogram, in rows; replace-one: √2 and 2 apart."""
    epsilon, delta = required["epsilon"], required["delta"]
    gaussian = analytic_sigma(epsilon=epsilon, sensitivity=math.sqrt(2.0), delta=delta)
    found = {"gaussian": gaussian, "laplace": math.sqrt(2.0) * 2.0 / epsilon}
    exact = np.bincount(codes, minlength=bins)
    # diffprivlib's is for adding or removing a row: half of ε makes it one for replacing.
    found |= attempt("diffprivlib", lambda: diffprivlib_histogram(codes, bins, epsilon / 2.0, rounds) - exact)
    found |= attempt("opendp", lambda: opendp_noise("geometric", 2.0 / epsilon, (rounds, bins)))
    return found


def attempt(name: str, errors: Callable[[], Any]) -> dict[str, float]:
    """Returns the root mean square of errors; None if a library does not work here."""
    try:
        return {name: float(np.sqrt(np.mean(np.square(errors()))))}
    except Exception as error:  # whatever a library in another version says
        print(f"{name}: left out ({type(error).__name__}: {str(error)[:100]})", file=sys.stderr)
        return {}


def diffprivlib_means(scaled: Table, epsilon: float, rounds: int) -> Any:
    from diffprivlib import tools

    return np.array(
        [tools.mean(scaled, epsilon=epsilon * scaled.shape[1], bounds=(0.0, 1.0), axis=0) for _ in range(rounds)]
    )


def diffprivlib_histogram(codes: NDArray[np.int64], bins: int, epsilon: float, rounds: int) -> Any:
    from diffprivlib import tools

    edges = np.arange(bins + 1) - 0.5
    ends = (edges[0], edges[-1])
    return np.array([tools.histogram(codes, epsilon=epsilon, bins=edges, range=ends)[0] for _ in range(rounds)])


def opendp_noise(kind: str, scale: float, shape: tuple[int, ...]) -> Any:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    size = math.prod(shape)
    if kind == "geometric":
        space = dp.vector_domain(dp.atom_domain(T=int), size=size), dp.l1_distance(T=int)
        return np.array(dp.m.make_laplace(*space, scale=scale)([0] * size)).reshape(shape)
    atoms = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=size)
    if kind == "gaussian":
        return np.array(dp.m.make_gaussian(atoms, dp.l2_distance(T=float), scale=scale)([0.0] * size)).reshape(shape)
    return np.array(dp.m.make_laplace(atoms, dp.l1_distance(T=float), scale=scale)([0.0] * size)).reshape(shape)


# ------------------------------------------------------------------ on one machine, beside other libraries


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
        errors = [float(ask().values[0]) - exact for _ in range(10 * rounds)]
        seconds = (time.process_time() - start) / (10 * rounds)
        ours[name] = {"rmse": float(np.sqrt(np.mean(np.square(errors)))), "seconds": seconds}
    return {"ours": ours, "pipeline-dp": theirs}


def large(required: dict[str, float]) -> dict[str, Any]:
    """Measures a million rows of 50 columns from Parquet: seconds and peak memory."""
    import pyarrow
    from pyarrow import parquet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "large.parquet"
        generator = np.random.default_rng(0)
        names = [f"c{i}" for i in range(50)]
        schema = pyarrow.schema([(name, pyarrow.float64()) for name in names])
        with parquet.ParquetWriter(path, schema) as writer:
            for _ in range(10):
                block = generator.uniform(size=(50, 100_000))
                writer.write_table(pyarrow.table(dict(zip(names, block, strict=True)), schema=schema))
        del block
        start, busy = time.perf_counter(), time.process_time()
        bounds = dict.fromkeys(names, (0.0, 1.0))
        found = statistics.mean(path, bounds=bounds, epsilon=required["epsilon"], delta=required["delta"])
        seconds, busy = time.perf_counter() - start, time.process_time() - busy
    return {
        "seconds": seconds,
        "processor seconds": busy,
        "load average": os.getloadavg()[0],
        "GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "largest error": float(np.abs(found.values - 0.5).max()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--epsilon", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-6)
    parser.add_argument("--large", action="store_true", help="only the large table")
    parser.add_argument("--messages", action="store_true", help="only messages of few bits")
    parser.add_argument("--pipeline-dp", metavar="PYTHON", help="a Python that has PipelineDP")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    required = {"epsilon": asked.epsilon, "delta": asked.delta}
    if asked.large:
        print(json.dumps(large(required), indent=2))
        return
    if not asked.messages:
        found: dict[str, Any] = {"replace-one": noise_errors(required, 100 * asked.rounds)}
        if asked.pipeline_dp:
            found["add-remove"] = pipeline_dp(asked.pipeline_dp, required, asked.rounds)
        if asked.json:
            print(json.dumps(found, indent=2))
        else:
            show_errors(found)
        return
    report: dict[str, Any] = {}
    for name, (data, bounds) in data_sets().items():
        width = np.array([high - low for low, high in bounds.values()])
        means = central_means(data, bounds, required, asked.rounds)
        codes = np.clip((4 * (data[:, 2] - bounds["2"][0]) / width[2]).astype(np.int64), 0, 3)
        histograms = central_histograms(codes, 4, required, asked.rounds)
        edges = np.linspace(*bounds["2"], 5)
        for kind, central, question, unit in (
            ("mean", means, Mean(bounds), 1.0),
            ("histogram", histograms, Histogram("2", edges=edges), len(data)),
        ):
            best = min(central.values())
            rows = []
            for message in MESSAGES:
                found = ours(question, data, message, required, asked.rounds)
                if found["rmse"] is not None:
                    found["rmse"] *= unit
                    found |= {"of best": found["rmse"] / best, "of gaussian": found["rmse"] / central["gaussian"]}
                rows.append(found)
            report[f"{name}, {kind}"] = {"n": len(data), "dim": question.geometry.dim, "central": central, "ours": rows}
            if not asked.json:
                show(f"{name}, {kind}", report[f"{name}, {kind}"])
    if asked.json:
        print(json.dumps(report, indent=2))


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


def show(title: str, entry: dict[str, Any]) -> None:
    print(f"{title}: n = {entry['n']}, d = {entry['dim']}")
    for name, error in entry["central"].items():
        print(f"  {name:<18}{error:10.4g}")
    for row in entry["ours"]:
        if row["rmse"] is None:
            print(f"  {row['bits']} bits: {row['reason']}")
        else:
            print(
                f"  {row['bits']:6.3g} bits {row['mechanism']:<18}{row['rmse']:10.4g}"
                f"{row['of best']:8.2f} of the best{row['of gaussian']:8.2f} of the Gaussian"
            )


if __name__ == "__main__":
    main()
