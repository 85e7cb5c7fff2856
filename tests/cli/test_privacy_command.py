"""`cpsgd privacy`: values and keys."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from cpsgd.cli.privacy import app
from cpsgd.errors import ConditionError

THEOREM = "theorem --trials 2000 --p 0.5 --dim 1 --delta 1e-6 --l1 1 --l2 1 --linf 1"
EPSILON = "epsilon --clients 10000 --dim 65536 --levels 2 --trials 16 --clip-norm 1 --range 0.0504601 --delta 1e-9"


def run(command: str) -> str:
    result = CliRunner().invoke(app, command.split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def as_json(command: str) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(run(f"{command} --json"))
    return data


def test_theorem_of_the_paper() -> None:
    assert as_json(THEOREM)["epsilon"] == pytest.approx(0.6375134, abs=1e-7)
    assert "0.6375135" in run(THEOREM)  # shown rounded up


def test_theorem_scale() -> None:
    # Twice the scale and twice the sensitivities are the same mechanism in other units.
    doubled = "theorem --trials 2000 --p 0.5 --dim 1 --delta 1e-6 --l1 2 --l2 2 --linf 2 --scale 2"
    assert as_json(doubled)["epsilon"] == pytest.approx(as_json(THEOREM)["epsilon"], rel=1e-12)


def test_theorem_whose_condition_fails() -> None:
    failed = CliRunner().invoke(app, THEOREM.replace("2000", "500").split())
    assert isinstance(failed.exception, ConditionError)


def test_epsilon_names_its_theorem() -> None:
    data = as_json(EPSILON)
    assert {"epsilon", "delta", "method", "alternatives", "citation", "adjacency"} <= data.keys()
    assert 0.530 < data["epsilon"] < 0.543
    assert data["delta"] == 1e-9
    assert data["method"] == "gaussian-certificate"
    paper = next(entry for entry in data["alternatives"] if entry["method"] == "paper-theorem")
    assert paper["epsilon"] == pytest.approx(3.36, abs=0.01)
    text = run(EPSILON)
    assert "proved by" in text
    assert "Gaussian certificate" in text


def test_epsilon_options() -> None:
    base = as_json(EPSILON)["epsilon"]
    assert as_json(f"{EPSILON} --rounds 10")["epsilon"] > 3 * base
    assert as_json(f"{EPSILON} --rounds 10 --participation once")["epsilon"] == base
    assert as_json(f"{EPSILON} --adjacency zero-out")["epsilon"] < 0.6 * base
    assert as_json(f"{EPSILON} --surviving 8000")["epsilon"] > base
    assert as_json(f"{EPSILON} --colluding 100")["epsilon"] > base
    assert as_json(f"{EPSILON} --p 0.3")["epsilon"] > base
    sampled = as_json(f"{EPSILON} --rounds 10 --participation poisson:0.01 --adjacency zero-out")
    assert sampled["epsilon"] < base
    assert sampled["participation"] == "poisson:0.01"
    assert "10, every" in run(f"{EPSILON} --rounds 10")
