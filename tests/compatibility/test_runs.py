"""Run folders of release 0.1.0 are taken up by `cpsgd train --resume`, and end as they would have ended then."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from .recorded import DATA, read

RECORDED: dict[str, dict[str, Any]] = read("trainings.json")


def train(folder: Path, *options: str) -> dict[str, Any]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "cpsgd", "train", *options, "--json"]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def resume(name: str, folder: Path) -> dict[str, Any]:
    shutil.copytree(DATA / "trainings" / name, folder / "runs" / name)
    return train(folder, "--resume", "--run", name)


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


@pytest.mark.slow
def test_a_finished_run_is_still_finished(tmp_path: Path) -> None:
    printed = resume("whole", tmp_path)
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


@pytest.mark.slow
@pytest.mark.parametrize("name", ["interrupted", pytest.param("interrupted-adam", marks=pytest.mark.thorough)])
def test_an_interrupted_run_ends_as_it_would_have(name: str, tmp_path: Path) -> None:
    recorded = RECORDED[name]
    printed = resume(name, tmp_path)
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
    train(tmp_path, *options, "--run", "anew")
    assert metrics(tmp_path, "anew")[2:] == rows[2:]
