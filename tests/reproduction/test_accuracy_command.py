"""`reproduction/accuracy.py`: the figure's files, resuming, redrawing, and what is refused."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.errors import CpsgdError
from reproduction import accuracy
from reproduction.paper_design import paper_design

WITHOUT_GPU = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")


@pytest.fixture
def figure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Callable[..., Any]:
    """Runs the command in a folder with nothing but run.toml, the settings of a small model."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text('dataset = "digits"\nmodel = "linear"\n')
    return lambda *arguments: invoke(accuracy.app, *arguments)


def rows_of(path: str) -> list[dict[str, str]]:
    return list(csv.DictReader(Path(path).read_text().splitlines()))


def test_the_accuracy_figure(figure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--rounds", 2, "--cohort", 300, "--bits", 2, "--epsilon", 4, "--epsilon", 2, "--seed", 0, "--seed", 1)
    command = ("--out", "figures", "--config", "run.toml", *small, "--json")
    result = figure(*command)
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert [panel["epsilon"] for panel in data["panels"]] == [4.0, 2.0]
    assert (data["accounting"], data["seeds"]) == ("ours", [0, 1])
    for panel in data["panels"]:
        line, gaussian = panel["lines"]
        methods = line["method"], gaussian["method"], data["baseline"]["method"]
        assert methods == ("coins", "gaussian", "no privacy")
        assert line["epsilon"] <= panel["epsilon"]
        assert 0.99 * panel["epsilon"] < gaussian["epsilon"] <= panel["epsilon"]
        assert gaussian["levels"] is None
        assert line["megabytes"][-1] < data["baseline"]["megabytes"][-1]
        first, second = line["accuracy"]
        assert len(first) == len(second) == 2
        assert first != second
    summary = rows_of("figures/summary.csv")
    assert [row["method"] for row in summary] == ["no privacy", "coins", "gaussian", "coins", "gaussian"]
    assert (summary[0]["k"], summary[0]["epsilon"], summary[0]["bits_per_coordinate"]) == ("", "", "32.0")
    assert summary[-1]["panel_epsilon"] == "2"
    line = data["panels"][0]["lines"][0]
    ends = [values[-1] for values in line["accuracy"]]
    found = [float(summary[1][f"accuracy_{name}"]) for name in ("mean", "min", "max")]
    assert found == [sum(ends) / 2, min(ends), max(ends)]
    assert (summary[1]["seeds"], int(summary[1]["k"]), int(summary[1]["m"])) == ("2", line["levels"], line["trials"])
    assert float(summary[1]["seconds"]) == pytest.approx(sum(line["seconds"]) / 2)
    assert summary[1]["parameters"].startswith(f"{line['trials']} coins of bias up to")
    gaps = [data["panels"][0]["lines"][1]["accuracy"][seed][-1] - ends[seed] for seed in (0, 1)]
    assert float(summary[1]["below_gaussian"]) == pytest.approx(sum(gaps) / 2, abs=1e-12)
    assert float(summary[1]["standard_error"]) == pytest.approx(abs(gaps[0] - gaps[1]) / 2, abs=1e-12)
    assert (summary[0]["below_gaussian"], summary[0]["standard_error"]) == ("", "")  # no privacy is of no panel
    assert float(summary[2]["below_gaussian"]) == 0.0

    # The trainings are kept: with the same command nothing is trained again, and with --redraw they are not needed.
    def refuse(self: object) -> None:
        raise AssertionError("trained again")

    monkeypatch.setattr("cpsgd.learning.trainer.Trainer.step", refuse)
    shutil.copytree("figures", "copy", ignore=shutil.ignore_patterns("runs", "*.png", "*.csv"))
    again = figure(*command)
    assert again.exit_code == 0, again.stderr
    assert json.loads(again.stdout) == data
    redrawn = figure("--out", "copy", "--redraw", "--json")
    assert redrawn.exit_code == 0, redrawn.stderr
    assert {**json.loads(redrawn.stdout), "files": data["files"]} == data
    assert Path("copy/accuracy.png").read_bytes().startswith(b"\x89PNG")
    assert Path("copy/summary.csv").read_bytes() == Path("figures/summary.csv").read_bytes()
    Path("explicit.toml").write_text("levels = 3\ntrials = 13\n")
    explicit = figure("--out", "figures", "--config", "explicit.toml")
    assert explicit.exit_code == 2
    assert "leave levels, trials and range out" in explicit.stderr
    # Other settings need a folder of their own.
    other = figure(*command, "--cohort", 301)
    assert other.exit_code == 2
    assert "another cohort" in other.stderr


def test_the_accuracy_figure_by_the_papers_accounting(figure: Any) -> None:
    small = ("--config", "run.toml", "--rounds", 3, "--cohort", 300, "--epsilon", 8, "--accounting", "paper")
    result = figure("--out", "figures", *small, "--bits", 8, "--evaluate-every", 2, "--json")
    assert result.exit_code == 0, result.stderr
    data = json.loads(result.stdout)
    assert data["accounting"] == "paper"
    (panel,) = data["panels"]
    line, gaussian = panel["lines"]
    expected = paper_design(300, 650, 8.0, 1e-6, bits=8)
    assert (line["levels"], line["trials"], line["bits_per_coordinate"]) == (expected.levels, expected.trials, 8.0)
    # What is proved of it is less than what the theorem says; the Gaussian noise is for the latter.
    assert line["epsilon"] < 6.0 < 7.9 < gaussian["epsilon"] <= 8.0
    assert line["rounds"] == [2, 3]
    # Looking at the test set after other rounds would not make one line with what is there.
    other = figure("--out", "figures", *small, "--bits", 8, "--seed", 0, "--seed", 1)
    assert other.exit_code == 2
    assert "evaluate_every" in other.stderr
    parts = figure("--out", "other", *small, "--bits", 6.5)
    assert parts.exit_code == 2
    assert "whole bits, not 6.5" in parts.stderr


def test_numbers_first_and_the_picture_later(figure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    small = ("--config", "run.toml", "--rounds", 1, "--cohort", 300, "--bits", 6, "--epsilon", 4)

    def missing(width: float, height: float) -> None:
        raise CpsgdError("Drawing needs matplotlib")

    with monkeypatch.context() as patched:
        patched.setattr("cpsgd.reports.plotting.new_figure", missing)
        refused = figure("--out", "out", *small)
        assert refused.exit_code == 2
        assert "matplotlib" in refused.stderr
        assert not Path("out").exists()
        result = figure("--out", "out", *small, "--no-draw", "--json")
    assert result.exit_code == 0, result.stderr
    names = [Path(file).name for file in json.loads(result.stdout)["files"]]
    assert names == ["accuracy.json", "summary.csv"]
    summary = rows_of("out/summary.csv")
    assert summary[1]["standard_error"] == ""  # one seed tells nothing of it
    assert not Path("out/accuracy.png").exists()
    assert figure("--out", "out", "--redraw").exit_code == 0
    assert Path("out/accuracy.png").exists()


def test_lines_are_called_by_what_they_send() -> None:
    line = accuracy.Line("binomial", 2.0, 3, 13, 4.0, (1,), (1.0,), ((0.5,),), (1.0,))
    assert line.label == "k = 3, m = 13: 4 bits"
    assert replace(line, method="coins", bits_per_coordinate=1.0).label == "coins: 1 bit"
    assert replace(line, method="sampled-coins", bits_per_coordinate=0.05).label == "sampled coins: 0.05 bit"
    assert replace(line, method="gaussian", bits_per_coordinate=32.0).label == "Gaussian noise: 32 bits"


@pytest.mark.parametrize("folder", ["headline", "figure2", "paper-accounting"])
def test_published_numbers_can_be_drawn_again(figure: Any, folder: str) -> None:
    published = Path(accuracy.__file__).parents[1] / "docs" / "results" / folder
    shutil.copytree(published, "copy", ignore=shutil.ignore_patterns("*.png"))
    assert figure("--out", "copy", "--redraw").exit_code == 0
    assert Path("copy/summary.csv").read_bytes() == (published / "summary.csv").read_bytes()


@pytest.mark.parametrize("text", [None, "[]", "{}", "nonsense"])
def test_a_figure_is_not_redrawn_from_nothing(figure: Any, text: str | None) -> None:
    Path("figures").mkdir()
    if text is not None:
        Path("figures/accuracy.json").write_text(text)
    result = figure("--out", "figures", "--redraw")
    assert result.exit_code == 2
    assert "accuracy.json" in result.stderr
    assert not Path("figures/accuracy.png").exists()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--accounting", "theirs"), '"theirs" for --accounting. Choose from: "ours", "paper"'),
        (("--device", "tpu"), "Unknown device 'tpu'. Known are cpu, cuda or auto."),
        pytest.param(("--device", "cuda"), "There is no CUDA device", marks=WITHOUT_GPU),
    ],
)
def test_what_a_training_cannot_be_computed_with(figure: Any, options: tuple[str, ...], words: str) -> None:
    result = figure("--out", "out", *options, "--dataset", "digits", "--cohort", 300, "--rounds", 2)
    assert result.exit_code == 2
    assert words in " ".join(result.stderr.replace("│", "").split())
    assert not list(Path().rglob("charges.jsonl"))


@WITHOUT_GPU
def test_auto_says_that_it_falls_back(figure: Any) -> None:
    small = ("--config", "run.toml", "--rounds", 1, "--cohort", 300, "--device", "auto", "--bits", 6)
    result = figure("--out", "figures", *small, "--epsilon", 4)
    assert result.exit_code == 0, result.stderr
    assert "device: cpu, since there is no CUDA device" in result.stderr


def test_an_interrupt_says_how_to_go_on(figure: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ("--out", "out", "--config", "run.toml", "--rounds", 2, "--cohort", 300, "--bits", 6, "--epsilon", 4)
    with monkeypatch.context() as patched:
        patched.setattr("cpsgd.reports.live.interrupts", lambda: nullcontext(lambda: True))
        stopped = figure(*command)
    assert stopped.exit_code == 130
    assert "the same command goes on from here" in stopped.stderr
    assert not Path("out/accuracy.json").exists()
    assert figure(*command).exit_code == 0
    assert Path("out/accuracy.json").exists()
