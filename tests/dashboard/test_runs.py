"""A run as its folder tells it, while it goes on and when it is over; and folders that are damaged."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from cpsgd.dashboard import runs
from cpsgd.dashboard.folder import Folder
from cpsgd.errors import DataError
from tests.dashboard.clients import Client
from tests.dashboard.samples import metrics, write_rounds, write_run


def test_a_run_that_goes_on(tmp_path: Path) -> None:
    run = runs.read(write_run(tmp_path / "r", done=4), "r")
    assert run.state == "running"
    assert [curve.name for curve in run.curves] == ["private", "no privacy"]
    assert (run.rounds, run.limit, len(run.private.rounds)) == (10, 2.0, 4)
    assert run.private.last("epsilon") == 1.0
    assert run.curves[1].last("epsilon") is None
    # Six rounds of two curves are missing, and a round takes a second and a half.
    assert run.seconds_left == pytest.approx(2 * 6 * 1.5)


def test_a_curve_that_has_not_begun_is_expected_to_be_as_slow_as_the_first(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", done=10)
    (path / "baselines" / "no-privacy" / "metrics.jsonl").unlink()
    assert runs.read(path, "r").seconds_left == pytest.approx(10 * 1.5)


def test_baselines_come_after_the_private_curve(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", done=10)
    write_rounds(path / "baselines" / "no-privacy", 3)
    assert runs.read(path, "r").current.name == "no privacy"
    assert runs.read(write_run(path, done=10), "r").current.name == "private"


def test_a_run_that_has_been_silent_is_stopped(tmp_path: Path) -> None:
    run = runs.read(write_run(tmp_path / "r"), "r")
    later = replace(run, now=time.time() + 61.0)
    assert (later.state, later.seconds_left) == ("stopped", None)
    # Not where a checkpoint takes longer than that.
    slow = replace(later, settings={**run.settings, "evaluate_every": 100})
    assert slow.state == "running"


def test_a_finished_run(tmp_path: Path) -> None:
    run = runs.read(write_run(tmp_path / "r", finished=True), "r")
    assert (run.state, run.seconds_left) == ("finished", None)
    assert run.seconds == pytest.approx(2 * 4 * 1.5)


def test_a_line_that_is_being_written_is_left_for_later(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", done=2)
    before = runs.version(path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(metrics(2))[:40])
    assert runs.version(path) != before
    curve = runs.read(path, "r").private
    assert (len(curve.rounds), curve.damaged) == (2, 0)


def test_lines_that_make_no_sense_are_counted_and_left_out(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r", done=2)
    bad = ["[]", "nonsense", '{"round": "1"}', '{"round": true}', '{"round": -1}', '{"round": 1e9}', "[" * 5000, ""]
    with (path / "metrics.jsonl").open("a") as file:
        file.write("\n".join(bad) + "\n")
        file.write(json.dumps(metrics(5, loss="<b>", accuracy=1e999, epsilon=None, seconds=-3)) + "\n")
    curve = runs.read(path, "r").private
    assert curve.damaged == len(bad)
    last = curve.rounds[-1]
    assert (last.number, last.loss, last.score, last.epsilon, last.seconds) == (6, None, None, None, 0.0)
    assert curve.last("loss") == pytest.approx(1.9)


def test_a_file_without_end_is_not_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "r")
    monkeypatch.setattr(runs, "_MOST_LINES", 3)
    with pytest.raises(DataError, match="more than 3 lines"):
        runs.read(path, "r")
    monkeypatch.undo()
    monkeypatch.setattr(runs, "_MOST_LISTED", 10)
    found, failed = runs.read_all(Folder.at(tmp_path))
    assert (found, failed[0][0]) == ([], "r")
    monkeypatch.undo()
    monkeypatch.setattr(runs, "_MOST_LINES", 7)  # of all curves together, which have four each
    with pytest.raises(DataError, match="more than 7 lines"):
        runs.read(path, "r")
    monkeypatch.undo()
    write_run(tmp_path / "s")
    monkeypatch.setattr(runs, "_MOST_LISTED_LINES", 8)
    found, failed = runs.read_all(Folder.at(tmp_path))
    assert (len(found), len(failed)) == (1, 1)
    monkeypatch.undo()
    monkeypatch.setattr(runs, "_LARGEST", 10)
    with pytest.raises(DataError, match="files of up to 10 are read"):
        runs.read(path, "r")


def test_a_file_that_takes_too_long_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_run(tmp_path / "r")
    with pytest.raises(DataError, match="take too long"):
        runs.read(path, "r", seconds=-1.0)
    monkeypatch.setattr(runs, "_LONGEST_LIST", 0.0)
    assert [name for name, _ in runs.read_all(Folder.at(tmp_path))[1]] == ["r"]


def test_other_ends_of_lines_do_not_count_as_lines_without_a_limit(tmp_path: Path) -> None:
    """A file of carriage returns took minutes: the limit counted newlines alone."""
    path = write_run(tmp_path / "r", done=2)
    with (path / "metrics.jsonl").open("ab") as file:
        file.write(b"\r" * 100_000 + b"\n")
    curve = runs.read(path, "r").private
    assert (len(curve.rounds), curve.damaged, curve.lines) == (2, 1, 3)


def test_half_a_pair_of_surrogates_in_the_settings_can_be_shown(folder: Path, client: Client) -> None:
    write_run(folder / "hostile")
    (folder / "hostile" / "config.json").write_text('{"rounds": 3, "dataset": "\\ud800"}')
    for place in ("/runs", "/run?name=hostile", "/run/report.html?name=hostile"):
        assert client.get(place).status_code == 200


def test_regression_has_another_score(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r")
    write_rounds(path, 3, accuracy=None, r_squared=0.5)
    curve = runs.read(path, "r").private
    assert (curve.regression, curve.last("score")) == (True, 0.5)


def test_a_run_without_a_round_yet(tmp_path: Path) -> None:
    path = write_run(tmp_path / "r")
    (path / "metrics.jsonl").unlink()
    os.utime(path / "config.json")
    run = runs.read(path, "r")
    assert run.private.rounds == ()
    assert run.private.pace is None


@pytest.mark.parametrize("settings", [{"rounds": "many", "epsilon": []}, {"rounds": -1, "epsilon": float("nan")}])
def test_settings_of_other_types_are_not_believed(tmp_path: Path, settings: dict[str, object]) -> None:
    run = runs.read(write_run(tmp_path / "r", **settings), "r")
    assert (run.rounds, run.limit, run.seconds_left) == (None, None, None)


def test_what_cannot_be_read_does_not_hide_the_others(folder: Path) -> None:
    (folder / "runs" / "done" / "summary.json").write_text("[")
    found, failed = runs.read_all(Folder.at(folder))
    assert [run.name for run in found] == ["runs/going"]
    assert failed == [("runs/done", "summary.json is not JSON.")]
    with pytest.raises(DataError):
        runs.read(folder / "runs" / "done", "runs/done")
