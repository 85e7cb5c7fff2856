"""Spark: the sums of one machine whatever the partitions, also when workers die; one charge and one noise."""

from __future__ import annotations

import doctest
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet
from pyspark.sql import SparkSession

from cpsgd import statistics
from cpsgd.engines import spark as engine
from cpsgd.errors import BudgetExceededError, ColumnError, ParameterError, TableError
from cpsgd.ledger import Budget, Ledger
from cpsgd.statistics import ClippingWarning, Count, Job, Mean, Sum, prepare
from cpsgd.tables import text_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas:FutureWarning"),
    pytest.mark.filterwarnings("ignore::cpsgd.statistics.ClippingWarning"),  # which depends on the noise
]
ROWS = 3000
GROUPS = {"sex": ["f", "m"]}


@pytest.fixture(scope="module")
def session() -> Iterator[Any]:
    options = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.shuffle.partitions": "2",
        "spark.driver.memory": "512m",
        # Half a minute of Java does not pay for its second compiler, nor for threads that collect garbage.
        "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
        "spark.log.level": "OFF",
    }
    # Three attempts for each task; without the number, Spark tries once on one machine.
    builder = SparkSession.builder.master("local[2, 3]").appName("cpsgd")
    for name, value in options.items():
        builder = builder.config(name, value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYSPARK_PYTHON", sys.executable)
        found = builder.getOrCreate()
        yield found
        found.stop()


@pytest.fixture(scope="module")
def table() -> dict[str, list[Any]]:
    generator = np.random.default_rng(0)
    users = generator.integers(0, 700, ROWS)
    # One person's id is written in several ways.
    ways: list[Any] = [str, lambda n: f" {n}", lambda n: f"{n}.0"]
    return {
        "id": [ways[i % 3](user) for i, user in enumerate(users.tolist())],
        "number": (users + 2**53).tolist(),
        "age": generator.integers(-5, 120, ROWS).astype(float).tolist(),
        "sex": generator.choice(["f", "m", "x"], ROWS).tolist(),
    }


@pytest.fixture(scope="module")
def frame(session: Any, table: dict[str, list[Any]]) -> Any:
    rows = list(zip(*table.values(), strict=True))
    return session.createDataFrame(rows, "id string, number long, age double, sex string").repartition(3).cache()


def same(found: Any, expected: Any) -> bool:
    pairs = zip(found.sums, expected.sums, strict=True)
    return found.users == expected.users and all(np.array_equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("user", ["id", "number", None])
def test_sums_are_those_of_one_machine(frame: Any, table: dict[str, list[Any]], user: str | None) -> None:
    job = prepare(Mean({"age": (0, 100)}, group_by=GROUPS), user=user, epsilon=1.0).job
    assert same(engine.sums(frame, job), job.partial(table))


def test_a_user_is_one_whatever_the_type(session: Any) -> None:
    job = prepare(Mean({"age": (0, 100)}, missing="drop"), user="id", epsilon=1.0).job
    kinds: dict[str, list[Any]] = {
        "binary": [b"7", b" 7", b"7.0", b"8"],
        "double": [0.0, -0.0, None, 8.0],
        "string": ["7", "\u00a0+7.0", "0.7e1", "8"],
        "boolean": [True, True, None, False],
        "long": [2**53 + 1, 2**53 + 1, None, 1],
    }
    for kind, ids in kinds.items():
        rows = [(user, 40.0) for user in ids]
        frame = session.createDataFrame(rows * 3, f"id {kind}, age double").repartition(2)
        assert engine.sums(frame, job).users == 2, kind


def test_rows_of_one_text_come_together(session: Any) -> None:
    users = ["5", "5.", ".5e1", "+5", "0.5E+1", "\u20035\x1c", "0", "-0.0", "+.0", "1e400", "10e399", "a b", " a b\x85"]
    users += ["12345678901234567890", "12345678901234567890.0", "-1e999", "-10e998", "1e-400", "10e-401", "007", "nan"]
    frame = session.createDataFrame([(user,) for user in users], "id string")
    keys: dict[str, set[str]] = {}
    for row in frame.select("id", engine._key(frame, "id").alias("key")).collect():
        keys.setdefault(text_of(row["id"]), set()).add(row["key"])
    assert [text for text, found in keys.items() if len(found) > 1] == []
    assert len({key for found in keys.values() for key in found}) >= 7


@pytest.mark.parametrize("rows", [0, 3000])
def test_a_user_does_not_choose_which_rows_of_others_count(session: Any, tmp_path: Path, rows: int) -> None:
    """Spark reads the largest file first, so that one user's rows in the second one change everybody's first row."""
    for name, value, more in (("a", 0.0, 1500), ("b", 1.0, rows)):
        users, values = np.arange(500), np.full(500, value)
        own = np.random.default_rng(0).random(more)
        table = {"id": np.concatenate([users, np.zeros(more, int)]), "x": np.concatenate([values, own])}
        parquet.write_table(pyarrow.table(table), tmp_path / f"{name}.parquet")
    job = prepare(Sum({"x": (0, 1)}, rows=1), user="id", epsilon=1.0).job
    found = engine.sums(session.read.parquet(str(tmp_path)), job)
    assert found.users == 500
    # Hoeffding: a sum of 500 values of ±1/2 is further than 65 from zero with probability 1e-7. It was -250 or 250.
    assert abs(int(found.sums[0][0])) / job.tasks[0].noise.units < 65.0


def test_workers_that_are_killed_count_once(frame: Any, table: dict[str, list[Any]], tmp_path: Path) -> None:
    class Dying(Job):
        """Its first worker is killed when the sums are made, and another raises."""

        def partial(self, table: object, **options: Any) -> Any:
            found = super().partial(table, **options)
            for name in ("killed", "raised"):
                try:
                    os.close(os.open(tmp_path / name, os.O_CREAT | os.O_EXCL))
                except FileExistsError:
                    continue
                if name == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise RuntimeError("the first attempt")
            return found

    def once(batches: Iterator[Any]) -> Iterator[Any]:
        """Kills the first worker that reads rows, after it has sent some."""
        for batch in batches:
            yield batch
            try:
                os.close(os.open(tmp_path / "read", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            os.kill(os.getpid(), signal.SIGKILL)

    job = prepare(Sum({"age": (0, 100)}, rows=50), user="id", epsilon=1.0).job
    dying = Dying(job.tasks, job.user, job.missing, job.identity)
    found = engine.sums(frame.mapInArrow(once, frame.schema), dying)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["killed", "raised", "read"]
    assert same(found, job.partial(table))


def test_one_charge_one_release_and_one_row_per_group(frame: Any, table: dict[str, list[Any]], tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="all", epsilon=1.5, delta=1e-6))
    ready = prepare(Mean({"age": (0, 100)}, group_by=GROUPS), user="id", epsilon=1.0)
    question = Mean({"age": (0, 100)}, group_by=GROUPS)
    options: dict[str, Any] = {"user": "id", "epsilon": 1.0, "ledger": ledger, "population": "all"}
    found = engine.ask(frame, question, **options)
    assert (found.epsilon, found.delta, found.mechanism) == (ready.proof[0].epsilon, 0.0, ready.job.tasks[0].noise.kind)
    rows = engine.to_frame(found, frame).collect()
    assert [row["group"] for row in rows] == ["f", "m"]
    assert [row["age"] for row in rows] == found.values.reshape(-1).tolist()
    # Refused before Spark has any work.
    with pytest.raises(BudgetExceededError):
        engine.ask(frame.selectExpr("id", "sex", "cast(raise_error('read') as double) age"), question, **options)


def test_wrong_and_empty_frames(frame: Any) -> None:
    job = prepare(Count(["smokes"]), user="id", epsilon=1.0).job
    with pytest.raises(ColumnError, match="no column 'smokes'"):
        engine.sums(frame, job)
    ready = prepare(Count(), user=None, epsilon=1.0, neighbours="add-remove")
    empty = engine.sums(frame.limit(0), ready.job)
    assert empty.users == 0
    ready.finish(empty)
    with pytest.raises(ParameterError, match="released already"):
        ready.finish(empty)
    with pytest.raises(TableError, match="a data frame of Spark, got dict"):
        engine.sums({"id": [1]}, job)  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="a Mean, Sum"):
        engine.ask(frame, "mean", epsilon=1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize("user", ["id", None])
def test_refusals_of_tasks_are_those_of_one_machine(session: Any, user: str | None) -> None:
    job = prepare(Mean({"age": (0, 100)}), user=user, epsilon=1.0).job
    for kind, value, said in [
        ("double", None, "missing"),
        ("string", "x", "not of numbers"),
        ("array<int>", [1], "not of"),
    ]:
        frame = session.createDataFrame([(i, value) for i in range(20)], f"id int, age {kind}").repartition(2)
        with pytest.raises(ColumnError, match=f"^(The table: c|C)olumn 'age' .*{said}"):
            engine.sums(frame, job)


@pytest.mark.parametrize("kind", ["map<string,int>", "array<int>", "struct<a:int>"])
def test_users_are_single_values(session: Any, kind: str) -> None:
    job = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job
    with pytest.raises(ColumnError, match="'id' is not of single values"):
        engine.sums(session.createDataFrame([], f"id {kind}, age double"), job)


def test_names_may_have_dots_and_quotes(session: Any) -> None:
    rows = [(i, 40.0, 1.0) for i in range(20)]
    frame = session.createDataFrame(rows, "`the.user` int, `a.b` double, `c``d` double")
    job = prepare(Mean({"a.b": (0, 100), "c`d": (0, 1)}), user="the.user", epsilon=1.0).job
    assert same(engine.sums(frame, job), job.partial({"the.user": range(20), "a.b": [40.0] * 20, "c`d": [1.0] * 20}))


def test_no_group_is_a_frame_without_rows(session: Any) -> None:
    with pytest.warns(ClippingWarning, match="No group was kept"):
        found = statistics.count({"x": [None] * 50}, group_by="x", missing="drop", epsilon=1.0, delta=1e-6)
    assert engine.to_frame(found, session.range(1)).collect() == []


@pytest.mark.parametrize("name", ["ask", "sums", "to_frame"])
def test_examples_print_what_they_show(session: Any, name: str) -> None:
    """They are skipped as doctests, since they need Java. They import all they use, and find the session here.

    False alarms: noise of scale 102 on a sum over 100,000 users moves `ask`'s mean by 0.05 with probability
    exp(-49). In `to_frame` each group has 50,000 users: sums have noise of scale 204 and counts of scale 4.1, so that a
    mean moves by 0.5 with probability below exp(-50).
    """
    (example,) = doctest.DocTestFinder(recurse=False).find(getattr(engine, name), name, globs={})
    for line in example.examples:
        line.options.pop(doctest.SKIP)
    assert doctest.DocTestRunner().run(example) == (0, len(example.examples))
