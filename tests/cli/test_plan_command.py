"""`cpsgd plan`: keys, table, picture."""

from __future__ import annotations

import json
from pathlib import Path

import typer
from typer.testing import CliRunner

from cpsgd.cli.plan import plan
from cpsgd.errors import InfeasibleError

app = typer.Typer()
app.command()(plan)

WISHES = "--clients 1000 --dim 4096 --epsilon 3 --delta 1e-6"


def run(options: str) -> str:
    result = CliRunner().invoke(app, f"{WISHES} {options}".split(), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_json_keys() -> None:
    data = json.loads(run("--bits 4 --json"))
    assert {
        "levels",
        "trials",
        "coordinate_range",
        "bits_per_coordinate",
        "epsilon",
        "delta",
        "expected_squared_error",
        "gaussian_squared_error",
        "ratio",
        "frontier",
    } <= data.keys()
    assert data["levels"] + data["trials"] == 16
    assert data["bits_per_coordinate"] == 4.0
    assert data["epsilon"] <= 3.0
    assert data["ratio"] == data["expected_squared_error"] / data["gaussian_squared_error"]
    assert {point["bits"] for point in data["frontier"]} == set(range(2, 17))


def test_table_reads_well() -> None:
    text = run("--bits 4 --dropout 0.1 --rounds 7")
    for words in ("proved by", "× the exact Gaussian", "Frontier", "▸ 4", "fewer than 900", "more than one of them"):
        assert words in text


def test_secure_aggregation_names_modulus_and_overflow() -> None:
    text = run("--bits 13 --secure --overflow 1e-8")
    assert "overflows with probability ≤" in text
    assert json.loads(run("--bits 13 --secure --json"))["modulus"] <= 2**13


def test_picture(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "frontier.png"
    assert str(path.name) in run(f"--bits 3 --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_infeasible_wishes_reach_the_caller() -> None:
    result = CliRunner().invoke(app, f"{WISHES} --bits 1".split())
    assert isinstance(result.exception, InfeasibleError)


def test_unknown_adjacency_is_a_usage_error() -> None:
    result = CliRunner().invoke(app, f"{WISHES} --adjacency friends".split())
    assert result.exit_code == 2
