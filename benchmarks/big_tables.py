"""Private means of five columns of partitioned Parquet: on one machine, and on Spark beside its exact `groupBy`.

    python -m benchmarks.big_tables [--rows 2000000] [--spark]

The files are written into a temporary folder (40 bytes a row), and deleted in the end. One machine: seconds, processor
seconds and peak memory of a process that does nothing else, where each row is a person's and where a sixth column says
whose it is. Spark: the ratios of elapsed times and of processor seconds in one session, in turns, after three runs of
each that are not counted. Processor seconds depend less on a machine's other work; they are read from Linux's /proc.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from cpsgd.statistics import Mean, prepare

COLUMNS = tuple("abcde")
# Rows of a file.
ROWS = 250_000


def write(folder: Path, rows: int) -> None:
    """Writes five columns of numbers and one of users, in random order."""
    import pyarrow
    from pyarrow import parquet

    for number in range(-(-rows // ROWS)):
        generator = np.random.default_rng(number)
        part, many = folder / f"day={number}", min(ROWS, rows - number * ROWS)
        part.mkdir()
        table: dict[str, Any] = {name: generator.normal(50.0, 20.0, many).astype(np.float32) for name in COLUMNS}
        table["id"] = generator.integers(0, max(2, rows // 10), many)
        parquet.write_table(pyarrow.table(table), part / "part-0.parquet", use_dictionary=False)


def taken(call: Callable[[], object]) -> tuple[float, float]:
    """Returns seconds, and processor seconds of this process and its descendants."""
    start, before = time.perf_counter(), processor_seconds()
    call()
    return time.perf_counter() - start, processor_seconds() - before


def processor_seconds() -> float:
    """Returns what this process and its descendants have taken so far; Linux only."""
    fields: dict[int, list[str]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # a process that has ended
            fields[int(path.parent.name)] = path.read_text().rpartition(")")[2].split()
    family = {os.getpid()}
    while more := {process for process, each in fields.items() if int(each[1]) in family} - family:
        family |= more
    # Of each process itself and of its children that have ended.
    ticks = sum(int(field) for process in family for field in fields[process][11:15])
    return ticks / os.sysconf("SC_CLK_TCK")


def spark_ratio(folder: Path) -> None:
    """Prints what private sums take over what the exact mean of each user's means takes."""
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
        return spark.sums(frame, job("id"))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of PySpark, about pandas
        for _ in range(3):
            exact(), private()
        turns = [(taken(exact), taken(private)) for _ in range(7)]
    for kind, what in enumerate(["s", "processor s"]):
        theirs, ours = (statistics.median(turn[i][kind] for turn in turns) for i in (0, 1))
        ratio = statistics.median(mine[kind] / other[kind] for other, mine in turns)
        print(f"Spark: exact {theirs:.1f} {what}, private {ours:.1f} {what}, ratio {ratio:.2f} (medians of 7 turns)")
    session.stop()


def job(user: str | None) -> Any:
    return prepare(Mean(dict.fromkeys(COLUMNS, (0.0, 100.0))), user=user, epsilon=1.0, delta=1e-6).job


def measure(folder: Path, user: str | None) -> None:
    """Sums all users of a folder, and prints what it took this process."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    users = job(user).partial(folder).users
    usage = resource.getrusage(resource.RUSAGE_SELF)
    print(
        f"{users:,} {'rows' if user is None else 'users'}: {time.perf_counter() - start:.1f} s, "
        f"{usage.ru_utime + usage.ru_stime:.1f} processor s, {before >> 10} to {usage.ru_maxrss >> 10} MiB",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--spark", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--user", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.measure is not None:
        measure(chosen.measure, chosen.user)
        return
    with tempfile.TemporaryDirectory() as name:
        write(Path(name), chosen.rows)
        if chosen.spark:
            spark_ratio(Path(name))
            return
        for user in ([], ["--user", "id"]):
            subprocess.run([sys.executable, "-m", "benchmarks.big_tables", "--measure", name, *user], check=True)


if __name__ == "__main__":
    main()
