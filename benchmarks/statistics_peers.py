"""The same three questions about one table, by cpsgd, OpenDP, PipelineDP and diffprivlib: lines, seconds, error.

    python -m benchmarks.statistics_peers [--rounds 20] [--python PYTHON]

The table: 20,000 people with one row each, a number within 0 and 100 and one of two groups. The questions, at ε = 1
each for replacing a row: the mean of the number, the count of each group, and the median. PYTHON has the other
libraries (pip install opendp pipeline-dp diffprivlib "scikit-learn<1.6"); one that is missing is left out. Lines are
those of the functions below, which are written as each library's documentation does it. Where a library is about adding
or removing a row, it gets ε/2.
"""

from __future__ import annotations

import argparse
import inspect
import json
import subprocess
import sys
import time
import warnings
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

ROWS, GROUPS, EPSILON = 20_000, ("north", "south"), 1.0


def table() -> tuple[Any, Any]:
    generator = np.random.default_rng(0)
    return np.clip(generator.normal(45.0, 15.0, ROWS), 0.0, 100.0), generator.choice(GROUPS, ROWS, p=[0.3, 0.7])


def cpsgd(values: Any, groups: Any) -> tuple[Any, Any, Any]:
    from cpsgd import statistics

    people = {"age": values, "where": groups}
    mean = statistics.mean(people, bounds={"age": (0, 100)}, epsilon=EPSILON)
    counts = statistics.histogram(people, "where", categories=GROUPS, epsilon=EPSILON)
    median = statistics.quantiles(people, [0.5], bounds={"age": (0, 100)}, epsilon=EPSILON)
    return mean.values[0], counts.values, median.values[0]


def opendp(values: Any, groups: Any) -> tuple[Any, Any, Any]:
    dp: Any = import_module("opendp.prelude")
    dp.enable_features("contrib")
    half = EPSILON / 2.0
    space = dp.vector_domain(dp.atom_domain(T=float, nan=False), size=ROWS), dp.symmetric_distance()
    clamped = space >> dp.t.then_clamp((0.0, 100.0))
    mean = dp.binary_search_chain(lambda s: clamped >> dp.t.then_mean() >> dp.m.then_laplace(s), 2, EPSILON)
    texts = dp.vector_domain(dp.atom_domain(T=str)), dp.symmetric_distance()
    counted = texts >> dp.t.then_count_by_categories(list(GROUPS), null_category=False)
    counts = dp.binary_search_chain(lambda s: counted >> dp.m.then_laplace(s), 2, EPSILON)
    anybody = dp.vector_domain(dp.atom_domain(T=float, nan=False)), dp.symmetric_distance()
    scores = anybody >> dp.t.then_quantile_score_candidates(list(np.linspace(0.0, 100.0, 513)), 0.5)
    choose = dp.binary_search_chain(
        lambda s: scores >> dp.m.then_noisy_max(dp.max_divergence(), s, negate=True), 1, half
    )
    candidates = np.linspace(0.0, 100.0, 513)
    return mean(values.tolist()), counts(groups.tolist()), candidates[choose(values.tolist())]


def pipeline_dp(values: Any, groups: Any) -> tuple[Any, Any, Any]:
    dp: Any = import_module("pipeline_dp")

    found: list[Any] = []
    rows = [(i, group, value) for i, (value, group) in enumerate(zip(values.tolist(), groups.tolist(), strict=True))]
    for metric, partition in (
        (dp.Metrics.MEAN, lambda row: "all"),
        (dp.Metrics.COUNT, lambda row: row[1]),
        (dp.Metrics.PERCENTILE(50), lambda row: "all"),
    ):
        budget = dp.NaiveBudgetAccountant(total_epsilon=EPSILON / 2.0, total_delta=1e-6)
        limits = {"max_partitions_contributed": 1, "max_contributions_per_partition": 1}
        params = dp.AggregateParams(
            metrics=[metric], noise_kind=dp.NoiseKind.LAPLACE, min_value=0.0, max_value=100.0, **limits
        )
        extractors = dp.DataExtractors(
            privacy_id_extractor=lambda row: row[0], partition_extractor=partition, value_extractor=lambda row: row[2]
        )
        public = list(GROUPS) if metric == dp.Metrics.COUNT else ["all"]
        engine = dp.DPEngine(budget, dp.LocalBackend())
        result = engine.aggregate(rows, params, extractors, public_partitions=public)
        budget.compute_budgets()
        found.append(dict(result))
    counts = [found[1][group].count for group in GROUPS]
    return found[0]["all"].mean, counts, found[2]["all"].percentile_50


def diffprivlib(values: Any, groups: Any) -> tuple[Any, Any, Any]:
    from diffprivlib import tools

    mean = tools.mean(values, epsilon=EPSILON, bounds=(0, 100))
    codes = (groups == GROUPS[1]).astype(int)
    counts = tools.histogram(codes, epsilon=EPSILON / 2.0, bins=[-0.5, 0.5, 1.5], range=(-0.5, 1.5))[0]
    median = tools.median(values, epsilon=EPSILON, bounds=(0, 100))
    return mean, counts, median


LIBRARIES = {"cpsgd": cpsgd, "opendp": opendp, "pipeline-dp": pipeline_dp, "diffprivlib": diffprivlib}


def measure(name: str, rounds: int) -> dict[str, Any]:
    """Returns root-mean-square errors of the answers, and processor seconds of one run."""
    values, groups = table()
    exact = np.array([values.mean(), *(np.count_nonzero(groups == group) for group in GROUPS), np.median(values)])
    found = []
    LIBRARIES[name](values, groups)  # imports are not counted
    start = time.process_time()
    for _ in range(rounds):
        mean, counts, median = LIBRARIES[name](values, groups)
        found.append([mean, *counts, median])
    seconds = (time.process_time() - start) / rounds
    squares = np.mean((np.array(found, dtype=float) - exact) ** 2, axis=0)
    errors = {"mean": squares[0] ** 0.5, "counts": np.mean(squares[1:3]) ** 0.5, "median": squares[3] ** 0.5}
    body = inspect.getsource(LIBRARIES[name]).strip().splitlines()[1:]
    lines = sum(bool(line.strip()) for line in body)
    return {"library": name, "version": version(name), "lines": lines, "seconds": seconds, **errors}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--python", default=sys.executable, help="a Python that has the other libraries")
    parser.add_argument("--library", choices=LIBRARIES, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.library:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            print(json.dumps(measure(chosen.library, chosen.rounds)))
        return
    print("library              lines   seconds   mean error   count error   median error")
    for name in LIBRARIES:
        python = sys.executable if name == "cpsgd" else chosen.python
        command = [python, str(Path(__file__).resolve()), "--library", name, "--rounds", str(chosen.rounds)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            print(f"{name}: left out ({(done.stderr.strip().splitlines() or ['no output'])[-1][:150]})")
            continue
        row = json.loads(done.stdout.splitlines()[-1])
        print(
            f"{name + ' ' + row['version']:<20}{row['lines']:>6}{row['seconds']:>10.4f}{row['mean']:>13.4f}"
            f"{row['counts']:>14.3f}{row['median']:>15.4f}"
        )


if __name__ == "__main__":
    main()
