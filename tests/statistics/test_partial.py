"""Partial sums: exact, mergeable in any order, picklable, and released once."""

from __future__ import annotations

import math
import pickle
import random
from decimal import Decimal
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import ParameterError
from cpsgd.promise import Claim
from cpsgd.statistics import Histogram, Mean, Quantiles, Sum, prepare
from cpsgd.statistics.partial import CutUsers, Job, SumTask
from cpsgd.statistics.rows import RowQuestion
from cpsgd.statistics.table_noise import noise_for
from cpsgd.tables import text_of


def table(rows: int = 400) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "id": generator.integers(60, size=rows),
        "x": generator.uniform(-1, 4, rows),
        "g": generator.choice(["a", "b", "c"], rows),
    }


def job() -> Job:
    questions: list[Any] = [
        Mean({"x": (0, 3)}, group_by={"g": ["a", "b"]}),
        Histogram("x", edges=[0, 1, 2], rows=2),
        Quantiles({"x": (0, 3)}, bins=16),
    ]
    tasks = [SumTask(question, noise_for(question.geometry, Claim(1.0, 1e-6))) for question in questions]
    cut = CutUsers(questions[0])
    return Job((*tasks, SumTask(cut, noise_for(cut.geometry, Claim(1.0, 0.0)))), user="id")


def parts_of(data: dict[str, np.ndarray], parts: int) -> list[dict[str, np.ndarray]]:
    """All rows of a user in one part."""
    return [{name: column[data["id"] % parts == i] for name, column in data.items()} for i in range(parts)]


def test_parts_merge_to_the_whole_in_any_order() -> None:
    asked, data = job(), table()
    whole = asked.partial(data)
    assert whole.users == len(np.unique(data["id"]))
    parts = [pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(asked)).partial(part))) for part in parts_of(data, 7)]
    for order in (parts, parts[::-1]):
        merged = asked.merged(order)
        assert merged.users == whole.users
        for mine, theirs in zip(merged.sums, whole.sums, strict=True):
            np.testing.assert_array_equal(mine, theirs)


def test_sums_without_noise_are_those_of_the_vectors() -> None:
    asked, data = job(), table()
    whole = asked.partial(data)
    for task, sums in zip(asked.tasks, whole.sums, strict=True):
        users = [{name: column[data["id"] == i] for name, column in data.items()} for i in np.unique(data["id"])]
        exact = np.sum([task.summed.vectors(own, np.array([len(own["x"])]))[0] for own in users], axis=0)
        # Every user's vector is rounded by half a grid unit at most.
        assert np.abs(sums / task.noise.units - exact).max() <= 0.5 * whole.users / task.noise.units + 1e-9


def test_noise_comes_once() -> None:
    asked = job()
    whole = asked.partial(table())
    released = asked.release(whole)
    for task, sums, values in zip(asked.tasks, whole.sums, released, strict=True):
        reach = 40.0 * task.noise.variance**0.5  # beyond it lies less than 1e-24
        moved = np.abs(values - sums / task.noise.units).max()
        # On grids of whole rows the noise is zero now and then; on the others with probability 1e-30 and less.
        assert moved > 0.0 or task.noise.units < 1000
        assert moved < reach
    with pytest.raises(ParameterError, match="released already"):
        asked.release(whole)
    with pytest.raises(ParameterError, match="released already"):
        pickle.loads(pickle.dumps(asked)).release(whole)


def test_parts_of_two_jobs_do_not_mix() -> None:
    one, other = job(), job()
    with pytest.raises(ParameterError, match="two jobs"):
        one.partial(table()).merge(other.partial(table()))
    with pytest.raises(ParameterError, match="another job"):
        one.release(other.partial(table()))


def test_numbers_below_zero_are_users_as_others() -> None:
    """Numbers are sorted as they are, and rows of nobody have the number -1 elsewhere."""
    job = prepare(Mean({"x": (0, 1)}), user="id", epsilon=1.0).job
    for ids in ([-1, -1, 5, 7], np.array([-1, -1, 5, 7], dtype=np.int8), ["-1", "-1", "5", "7"]):
        assert job.partial({"id": ids, "x": [0.0, 1.0, 0.5, 0.5]}).users == 3


@pytest.mark.parametrize("block", [40, 1 << 21])
def test_nobody_changes_the_rounding_of_others(monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Floats that are added in another order may differ in the last bit, and thousands of users by a grid unit each."""
    monkeypatch.setattr("cpsgd.statistics.rows._BLOCK", block)
    generator, sizes = np.random.default_rng(0), np.array([3, 25, 1, 60, 7, 41, 30])
    values, more = generator.random(sizes.sum()), generator.random(5)
    for question in (Mean({"x": (0, 1)}), Sum({"x": (-1, 1)}, rows=50), Quantiles({"x": (0, 1)}, bins=8)):
        found = question.vectors({"x": values}, sizes)
        longer = question.vectors({"x": np.concatenate([more, values])}, sizes + 5 * (np.arange(7) == 0))
        np.testing.assert_array_equal(found[1:], longer[1:])


@pytest.mark.parametrize("first", [0.0, 1.0])
def test_rows_that_are_drawn_do_not_depend_on_their_order(first: float) -> None:
    # On a cluster one user's rows can change everybody's order: the first rows would be 0 for all, or 1 for all.
    data = {"id": np.tile(np.arange(500), 2), "x": np.repeat([first, 1.0 - first], 500)}
    asked = prepare(Sum({"x": (0, 1)}, rows=1), user="id", epsilon=1.0).job
    (found, _), units = asked.partial(data, drawn=True).sums, asked.tasks[0].noise.units
    # Hoeffding: a sum of 500 values of ±1/2 is further than 65 from zero with probability 1e-7.
    assert abs(int(found[0])) / units < 65.0
    assert int(asked.partial(data).sums[0][0]) == (first - 0.5) * 500 * units


NUMBERS = [1, 2.0, -0.0, 0, 2**53, 2**53 + 1, float(2**53), 2**64, 1e30, True, Decimal("1.00"), np.float32(0.1)]
TEXTS = ["a", " a", "1", "1.0", "01", "-0", "\x00", "nan", "None", "\u00a0a", "9007199254740993"]
VALUES = [1, 50, -5, 3.7, 1e300, True, np.float32(3.3), 2**70, -0.0, "3", " 7 ", "x", "", "-inf", None, math.nan]


@pytest.mark.parametrize("pool", [NUMBERS, TEXTS, [b"a", b" a", b"1", b"\xff"], [*NUMBERS, None], [*TEXTS, None]])
def test_what_a_user_adds_does_not_depend_on_others(pool: list[Any]) -> None:
    """Whatever types users and values are written in, and whatever NumPy makes of a column of them together."""
    generator = random.Random(0)
    questions: list[RowQuestion] = [
        Mean({"x": (0, 100)}, group_by={"g": [1, 2]}, missing="drop"),
        Sum({"x": (0, 100)}, rows=3, missing=7.0),
        Quantiles({"x": (0, 100)}, bins=4, group_by={"g": ["1", "m"]}, missing="bounds"),
    ]
    for number in range(60):
        asked = prepare(questions[number % 3], user="id", epsilon=1.0).job
        users, values = generator.sample(pool, 4), generator.sample(VALUES, 4)
        rows = [
            {"id": generator.choice(users), "x": generator.choice(values), "g": generator.choice([1, 1.0, 2, None])}
            for _ in range(10)
        ]
        own: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["id"] is not None:
                own.setdefault(text_of(row["id"]), []).append(row)
        whole, merged = asked.partial(rows), asked.merged([asked.partial(each) for each in own.values()])
        assert whole.users == merged.users == len(own)
        for mine, theirs in zip(whole.sums, merged.sums, strict=True):
            np.testing.assert_array_equal(mine, theirs)
