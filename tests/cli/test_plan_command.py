"""`cpsgd plan`: keys, table, picture, and refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

WISHES = "--clients 1000 --dim 4096 --epsilon 3 --delta 1e-6"

Run = Callable[[str], str]


@pytest.fixture
def plan(cpsgd: Any) -> Run:
    def run(options: str) -> str:
        result = cpsgd("plan", *WISHES.split(), *options.split())
        assert (result.exit_code, result.stderr) == (0, "")
        return str(result.stdout)

    return run


def test_json_keys(plan: Run) -> None:
    data = json.loads(plan("--bits 4 --mechanism binomial --json"))
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


def test_table_reads_well(plan: Run) -> None:
    text = plan("--bits 4 --dropout 0.1 --rounds 7 --participation once --mechanism binomial")
    for words in ("proved by", "× the exact Gaussian", "Frontier", "▸ 4", "fewer than 900", "more than one of them"):
        assert words in text


def test_secure_aggregation_names_modulus_and_overflow(plan: Run) -> None:
    # Where any plan will do, a mechanism whose plans are soon made.
    secure = "--bits 13 --secure --mechanism rounded-gaussian"
    assert "overflows with probability ≤" in plan(f"{secure} --overflow 1e-8")
    assert json.loads(plan(f"{secure} --json"))["modulus"] <= 2**13


def test_the_protocol_of_a_plan_encodes(plan: Run, cpsgd: Any) -> None:
    Path("protocol.json").write_text(json.dumps(json.loads(plan("--bits 3 --mechanism coins --json"))["protocol"]))
    np.save("vector.npy", np.full(4096, 0.01))
    result = cpsgd(
        *["round encode", "vector.npy", "--protocol", "protocol.json", "--round", "1", "--out", "message", "--json"]
    )
    assert json.loads(result.stdout)["bits_per_coordinate"] == 3.0
    # One message is not what was promised.
    result = cpsgd(*["round aggregate", "message", "--protocol", "protocol.json", "--round", "1", "--out", "mean.npy"])
    assert result.exit_code != 0
    assert "promise" in result.stderr


def test_picture(plan: Run) -> None:
    pytest.importorskip("matplotlib")
    path = Path("deep") / "frontier.png"
    assert path.name in plan(f"--bits 3 --mechanism coins --plot {path}")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_infeasible_wishes_name_the_nearest(cpsgd: Any) -> None:
    result = cpsgd("plan", *WISHES.split(), "--bits", 1, "--mechanism", "binomial")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "bits=1.585 is the fewest" in result.stderr


def test_unknown_adjacency_is_a_usage_error(cpsgd: Any) -> None:
    assert cpsgd("plan", *WISHES.split(), "--adjacency", "friends").exit_code == 2


def test_a_picture_of_unknown_kind_is_refused_at_once(cpsgd: Any) -> None:
    wishes = "--clients 1000 --dim 100 --epsilon 2 --delta 1e-6 --bits 4 --plot frontier.xyz"
    cpsgd.refuses(".png", "plan", *wishes.split())


@pytest.mark.thorough
def test_a_stated_distance(cpsgd: Any, plan: Run) -> None:
    stated = ("--replace-one-distance", 1.4142136, "--distance-reason", "rows are one-hot")
    data = cpsgd.json("plan", *WISHES.split(), "--bits", 4, *stated)
    usual = json.loads(plan("--bits 4 --json"))
    assert data["expected_squared_error"] < 0.52 * usual["expected_squared_error"]
    assert data["protocol"]["replace_one_distance"] == 1.4142136
    assert data["guarantee"]["assumption"] == "replace-one distance 1.41421 because rows are one-hot"
    assert "because rows are one-hot" in cpsgd("plan", *WISHES.split(), "--bits", 4, *stated).stdout
    assert "replace_one_distance" not in usual["protocol"]
    cpsgd.refuses("leave it out", "plan", *WISHES.split(), "--bits", 4, *stated, "--adjacency", "zero-out")


@pytest.mark.parametrize("digits", [11, 23, 400])
@pytest.mark.parametrize(
    ("option", "command"),
    [
        ("clients", "plan --dim 10 --epsilon 1 --delta 1e-6 --bits 8 --dropout 0.1"),
        ("dim", "plan --clients 100 --epsilon 1 --delta 1e-6 --bits 8"),
        ("rounds", "plan --clients 100 --dim 10 --epsilon 1 --delta 1e-6 --bits 8"),
        ("colluding", "plan --clients 100 --dim 10 --epsilon 1 --delta 1e-6 --bits 8 --dropout 0.1"),
        ("rounds", "audit --clients 100 --dim 10 --mechanism binomial --levels 4 --trials 64 --range 1 --delta 1e-6"),
        (
            "surviving",
            "audit --clients 100 --dim 10 --mechanism binomial --levels 4 --trials 64 --range 1 --delta 1e-6",
        ),
    ],
)
def test_numbers_that_are_too_large_are_refused_by_name(cpsgd: Any, option: str, command: str, digits: int) -> None:
    """0.2.0 ended in a traceback where a number was too large for a float."""
    result = cpsgd(*command.split(), f"--{option}", "9" * digits)
    assert result.exit_code == 2
    assert option in result.stderr or "collude" in result.stderr
