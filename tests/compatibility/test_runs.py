"""Run folders of release 0.1.0 are taken up by `cpsgd train --resume`, and end as they would have ended then."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cpsgd.cli.app import app

from .recorded import DATA, read

RECORDED: dict[str, dict[str, Any]] = read("trainings.json")


Train = Callable[..., dict[str, Any]]


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, invoke: Callable[..., Any]) -> Train:
    """Runs `cpsgd train` in the test's folder; gives what it prints."""
    monkeypatch.chdir(tmp_path)

    def run(*options: str) -> dict[str, Any]:
        done = invoke(app, "train", *options, "--json")
        assert done.exit_code == 0, done.stderr
        return dict(json.loads(done.stdout))

    return run


def resume(name: str, folder: Path, train: Train) -> dict[str, Any]:
    shutil.copytree(DATA / "trainings" / name, folder / "runs" / name)
    return train("--resume", "--run", name)


def metrics(folder: Path, name: str) -> list[dict[str, Any]]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    return [{key: value for key, value in json.loads(line).items() if key != "seconds"} for line in lines]


def agree(found: dict[str, Any], recorded: dict[str, Any]) -> None:
    """Another processor may add floats in another order, which may tip the rounding of a few coordinates."""
    for key, value in recorded.items():
        if key in ("seconds", "method"):  # which certificate it was is its own affair
            continue
        if key == "epsilon":
            no_larger(found[key], value)
            continue
        tolerance = {"loss": 1e-3, "noise_to_signal": 1e-3}.get(key, 0.0)
        allowed = {"accuracy": 3e-3}.get(key, 0.0)
        expected = pytest.approx(value, rel=tolerance, abs=allowed) if isinstance(value, float) else value
        assert found[key] == expected, key


def no_larger(found: float | None, recorded: float | None) -> None:
    """Certificates became tighter since: an ε may be smaller than it was, but never larger."""
    assert (found is None) == (recorded is None)
    assert found is None or recorded is None or found <= recorded * (1.0 + 1e-12)


PROOF = {"epsilon", "method", "citation", "tail", "alternatives"}
"""What may differ in a guarantee that another certificate proves."""


def without(fields: dict[str, Any], names: set[str]) -> dict[str, Any]:
    return {key: value for key, value in fields.items() if key not in names}


def test_a_finished_run_is_still_finished(tmp_path: Path, train: Train) -> None:
    printed = resume("whole", tmp_path, train)
    # No round is computed again, so nothing may differ, the seconds included; but what is proved about them may.
    recorded = RECORDED["whole"]
    for result, expected in zip(printed["results"], recorded["results"], strict=True):
        no_larger(result["epsilon"], expected["epsilon"])
        assert without(result, {"epsilon"}) == without(expected, {"epsilon"})
    no_larger(printed["guarantee"]["epsilon"], recorded["guarantee"]["epsilon"])
    told = without(printed["guarantee"], PROOF)
    # What is new in this release says nothing here.
    assert told.pop("assumption") is None
    assert told == without(recorded["guarantee"], PROOF)
    assert printed["protocol"] == RECORDED["whole"]["protocol"]


@pytest.mark.parametrize("name", ["interrupted", pytest.param("interrupted-adam", marks=pytest.mark.thorough)])
def test_an_interrupted_run_ends_as_it_would_have(name: str, tmp_path: Path, train: Train) -> None:
    recorded = RECORDED[name]
    printed = resume(name, tmp_path, train)
    rows = metrics(tmp_path, name)
    assert len(rows) == len(recorded["metrics"]) == 5
    for row, expected in zip(rows, recorded["metrics"], strict=True):
        agree(row, expected)
    for result, expected in zip(printed["results"], recorded["results"], strict=True):
        agree(result, expected)
    charged = (tmp_path / "runs" / name / "charges.jsonl").read_text().splitlines()
    assert len(charged) == 5
    # The same protocol from the start with the present code, which would plan another one: exactly what the old folder
    # leads to.
    options, protocol = list(recorded["options"]), printed["protocol"]
    planned = options.index("--bits")
    spelled_out = {"levels": "levels", "trials": "trials", "range": "coordinate_range"}
    options[planned : planned + 2] = [part for o, f in spelled_out.items() for part in (f"--{o}", repr(protocol[f]))]
    train(*options, "--run", "anew")
    assert metrics(tmp_path, "anew")[2:] == rows[2:]
