"""A private mean per user of partitioned Parquet: on one machine, and on Spark beside its own exact `groupBy`.

    python -m benchmarks.big_tables [--rows 2000000] [--spark]

Prints processor seconds and the peak memory of this process; for Spark the ratio of elapsed times in one session, after
one run of each that is not counted.
"""

from __future__ import annotations

import argparse
import os
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from cpsgd.statistics import Mean, prepare

COLUMNS = tuple("abcde")
FILES = 8


def write(folder: Path, rows: int) -> None:
    """Writes five columns of numbers and one of users, in random order."""
    import pyarrow
    from pyarrow import parquet

    for number in range(FILES):
        generator = np.random.default_rng(number)
        part = folder / f"day={number}"
        part.mkdir()
        table: dict[str, Any] = {name: generator.normal(50.0, 20.0, rows // FILES) for name in COLUMNS}
        table["id"] = generator.integers(0, rows // 10, rows // FILES)
        parquet.write_table(pyarrow.table(table), part / "part-0.parquet")


def elapsed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def spark_ratio(folder: Path) -> None:
    """Prints the time of private sums over that of the exact mean of each user's means."""
    from pyspark.sql import SparkSession, functions

    from cpsgd.engines import spark

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = SparkSession.builder.master("local[2]").config("spark.driver.host", "127.0.0.1")
    builder = builder.config("spark.driver.bindAddress", "127.0.0.1").config("spark.ui.enabled", "false")
    session = builder.config("spark.sql.shuffle.partitions", "4").config("spark.log.level", "ERROR").getOrCreate()
    frame = session.read.parquet(str(folder))
    means = [functions.avg(name).alias(name) for name in COLUMNS]

    def exact() -> Any:
        return frame.groupBy("id").agg(*means).agg(*means).collect()

    def private() -> Any:
        return spark.sums(frame, job())

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PySpark, about pandas
        exact(), private()
        theirs, ours = min(elapsed(exact) for _ in range(3)), min(elapsed(private) for _ in range(3))
    print(f"Spark: exact {theirs:.1f} s, private {ours:.1f} s, ratio {ours / theirs:.2f}")
    session.stop()


def job() -> Any:
    return prepare(Mean(dict.fromkeys(COLUMNS, (0.0, 100.0))), user="id", epsilon=1.0).job


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--spark", action="store_true")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write(folder, chosen.rows)
        if chosen.spark:
            spark_ratio(folder)
            return
        before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
        users = job().partial(folder).users
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        spent = time.process_time() - start
        print(f"{chosen.rows:,} rows, {users:,} users: {spent:.1f} processor s, {before >> 10} to {peak >> 10} MiB")


if __name__ == "__main__":
    main()
