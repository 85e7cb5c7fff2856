"""Beam: the sums of one machine on the local runners, also when bundles fail; one release after the pipeline."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.direct.direct_runner import BundleBasedDirectRunner
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiRunner
from apache_beam.transforms.trigger import AccumulationMode, AfterCount, Repeatedly
from apache_beam.transforms.window import FixedWindows, GlobalWindows

from cpsgd.engines.beam import SumUsers, UserSums, read_sums, write_sums
from cpsgd.errors import ParameterError, TableError
from cpsgd.statistics import Job, Mean, Partial, Sum, prepare

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::cpsgd.statistics.ClippingWarning"),  # which depends on the noise
]


class Person(NamedTuple):
    id: int
    age: float


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    ways: list[Any] = [str, lambda n: f" {n}", lambda n: f"{n}.0"]
    users, ages = generator.integers(0, 60, 300).tolist(), generator.integers(-5, 120, 300).tolist()
    sexes = generator.choice(["f", "m", "x"], 300).tolist()
    return [
        {"id": ways[i % 3](user), "age": float(age), "sex": sex, "other": object}
        for i, (user, age, sex) in enumerate(zip(users, ages, sexes, strict=True))
    ]


def run(rows: list[Any], job: Job, path: Path, runner: Any) -> Partial:
    with beam.Pipeline(runner=runner, options=PipelineOptions([])) as pipeline:
        pipeline | beam.Create(rows) | UserSums(job) | write_sums(str(path))
    return read_sums(str(path))


def same(found: Partial, expected: Partial) -> bool:
    pairs = zip(found.sums, expected.sums, strict=True)
    return found.users == expected.users and all(np.array_equal(mine, theirs) for mine, theirs in pairs)


@pytest.mark.parametrize("user", ["id", None])
@pytest.mark.parametrize("runner", [FnApiRunner, BundleBasedDirectRunner])
def test_sums_are_those_of_one_machine(rows: list[Any], tmp_path: Path, user: str | None, runner: Any) -> None:
    ready = prepare(Mean({"age": (0, 100)}, group_by={"sex": ["f", "m"]}), user=user, epsilon=1.0)
    found = run(rows, ready.job, tmp_path / "sums", runner())
    assert same(found, ready.job.partial(rows))
    result = ready.finish(found)
    assert (result.epsilon, result.groups) == (ready.proof[0].epsilon, ("f", "m"))
    with pytest.raises(ParameterError, match="released already"):
        ready.finish(found)


@pytest.mark.parametrize("user", ["id", None])
def test_rows_may_be_tuples_with_names(tmp_path: Path, user: str | None) -> None:
    job = prepare(Mean({"age": (0, 100)}), user=user, epsilon=1.0).job
    plain = [{"id": i // 2, "age": float(i)} for i in range(30)]
    for kind in (Person, beam.Row):  # type: ignore[attr-defined]
        assert same(run([kind(**row) for row in plain], job, tmp_path / "sums", FnApiRunner()), job.partial(plain))
    with pytest.raises(TableError, match="Expected rows as mappings of columns to values"):
        run([(1, 40.0)], job, tmp_path / "sums", FnApiRunner())
    with pytest.raises(ParameterError, match="job"):
        UserSums("job")  # type: ignore[arg-type]


def test_bundles_that_fail_count_once(rows: list[Any], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Failing(Job):
        """Fails once after sums were made."""

        def partial(self, table: object, **options: Any) -> Partial:
            found = super().partial(table, **options)
            try:
                os.close(os.open(tmp_path / "failed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                return found
            raise RuntimeError("the first attempt")

    job = prepare(Sum({"age": (0, 100)}, rows=50), user="id", epsilon=1.0).job
    failing = Failing(job.tasks, job.user, job.missing, job.identity)
    with caplog.at_level(logging.CRITICAL):
        found = run(rows, failing, tmp_path / "sums", BundleBasedDirectRunner())
    assert (tmp_path / "failed").exists()
    assert same(found, job.partial(rows))


def test_accumulators_merge_in_any_order(rows: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.engines.beam._ROWS", 7)
    job = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job
    users: dict[int, list[Any]] = {}
    for row in rows:
        users.setdefault(int(float(row["id"])), []).append(row)
    combine = SumUsers(job)
    parts = [combine.create_accumulator() for _ in range(3)]
    for i, own in enumerate(users.values()):
        parts[i % 3] = combine.add_input(parts[i % 3], iter(own))
    parts[0] = combine.compact(parts[0])
    assert same(combine.extract_output(combine.merge_accumulators(parts[::-1])), job.partial(rows))


def test_rows_that_count_are_drawn() -> None:
    combine = SumUsers(job := prepare(Sum({"age": (0, 1)}, rows=1), user="id", epsilon=1.0).job)
    found = combine.create_accumulator()
    for user in range(500):
        found = combine.add_input(found, [{"id": user, "age": 0.0}, {"id": user, "age": 1.0}])
    # Hoeffding: a sum of 500 values of ±1/2 is further than 65 from zero with probability 1e-7. The first are -250.
    assert abs(int(combine.extract_output(found).sums[0][0])) / job.tasks[0].noise.units < 65.0


def test_windows_and_damaged_files_are_refused(rows: list[Any], tmp_path: Path) -> None:
    job = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job
    early: dict[str, Any] = {
        "trigger": Repeatedly(AfterCount(1)),
        "accumulation_mode": AccumulationMode.DISCARDING,
    }
    for window in (beam.WindowInto(FixedWindows(1)), beam.WindowInto(GlobalWindows(), **early)):
        pipeline = beam.Pipeline(runner=FnApiRunner(), options=PipelineOptions([]))
        windows = pipeline | beam.Create(rows) | window
        with pytest.raises(ParameterError, match="global window"):
            windows | UserSums(job)
    (tmp_path / "sums").write_text('{"users": 3}')
    with pytest.raises(TableError, match="not partial sums"):
        read_sums(str(tmp_path / "sums"))
