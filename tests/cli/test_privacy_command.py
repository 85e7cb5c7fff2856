"""`cpsgd privacy`: values, keys, and refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

THEOREM = "theorem --trials 2000 --p 0.5 --dim 1 --delta 1e-6 --l1 1 --l2 1 --linf 1"
EPSILON = "epsilon --clients 10000 --dim 65536 --levels 2 --trials 16 --clip-norm 1 --range 0.0504601 --delta 1e-9"

Run = Callable[[str], str]


@pytest.fixture
def privacy(cpsgd: Any) -> Run:
    def run(command: str) -> str:
        result = cpsgd("privacy", *command.split())
        assert (result.exit_code, result.stderr) == (0, "")
        return str(result.stdout)

    return run


@pytest.fixture
def as_json(privacy: Run) -> Callable[[str], dict[str, Any]]:
    def run(command: str) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(privacy(f"{command} --json"))
        return data

    return run


Json = Callable[[str], dict[str, Any]]


def test_theorem_of_the_paper(privacy: Run, as_json: Json) -> None:
    assert as_json(THEOREM)["epsilon"] == pytest.approx(0.6375134, abs=1e-7)
    assert "0.6375135" in privacy(THEOREM)  # shown rounded up


def test_theorem_scale(as_json: Json) -> None:
    # Twice the scale and twice the sensitivities are the same mechanism in other units.
    doubled = "theorem --trials 2000 --p 0.5 --dim 1 --delta 1e-6 --l1 2 --l2 2 --linf 2 --scale 2"
    assert as_json(doubled)["epsilon"] == pytest.approx(as_json(THEOREM)["epsilon"], rel=1e-12)


def test_theorem_whose_condition_fails(cpsgd: Any) -> None:
    failed = cpsgd("privacy", *THEOREM.replace("2000", "500").split())
    assert failed.exit_code == 2
    assert failed.stdout == ""
    assert "would do" in failed.stderr


def test_epsilon_names_its_theorem(privacy: Run, as_json: Json) -> None:
    data = as_json(EPSILON)
    assert {"epsilon", "delta", "method", "alternatives", "citation", "adjacency"} <= data.keys()
    assert 0.530 < data["epsilon"] < 0.543
    assert data["delta"] == 1e-9
    assert data["method"] == "smoothed-certificate"
    paper = next(entry for entry in data["alternatives"] if entry["method"] == "paper-theorem")
    assert paper["epsilon"] == pytest.approx(3.36, abs=0.01)
    text = privacy(EPSILON)
    assert "proved by" in text
    assert "Gaussian certificate" in text


def test_epsilon_options(privacy: Run, as_json: Json) -> None:
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
    assert "10, every" in privacy(f"{EPSILON} --rounds 10")


def test_rounds_beyond_any_proof_are_refused(cpsgd: Any) -> None:
    cpsgd.refuses("run fewer or add noise", "privacy", *EPSILON.split(), "--rounds", 10**7)


def test_epsilon_of_a_protocol_file_or_of_floats(cpsgd: Any, as_json: Json) -> None:
    described = EPSILON.removeprefix("epsilon ").removesuffix(" --delta 1e-9")
    cpsgd.succeeds("round protocol", *described.split(), "--out", "p.json")
    assert as_json("epsilon --protocol p.json --delta 1e-9")["epsilon"] == as_json(EPSILON)["epsilon"]
    floats = as_json("epsilon --clients 100 --dim 10 --clip-norm 1 --sigma 0.5 --delta 1e-6")
    assert 1.0 < floats["epsilon"] < 3.0


@pytest.mark.parametrize("option", ["--clients", "--dim", "--levels", "--trials", "--clip-norm", "--range", "--delta"])
def test_epsilon_guesses_no_parameter(cpsgd: Any, option: str) -> None:
    words = EPSILON.split()
    place = words.index(option)
    failed = cpsgd("privacy", *words[:place], *words[place + 2 :])
    assert (failed.exit_code, failed.stdout) == (2, "")
    assert option in failed.stderr


def test_epsilon_of_a_stated_distance(cpsgd: Any, privacy: Run, as_json: Json) -> None:
    words = [*EPSILON.split(), "--replace-one-distance", 1.4142136, "--distance-reason", "rows are [one-hot]"]
    shown = cpsgd("privacy", *words).stdout
    assert "assuming" in shown
    assert "replace-one distance 1.41421 because rows are [one-hot]" in shown
    assert "assuming" not in privacy(EPSILON)
    found = cpsgd.json("privacy", *words)
    assert found["epsilon"] < 0.75 * as_json(EPSILON)["epsilon"]
    assert found["assumption"] == "replace-one distance 1.41421 because rows are [one-hot]"
    failed = cpsgd("privacy", *EPSILON.split(), "--replace-one-distance", 1.4142136)
    assert (failed.exit_code, failed.stdout) == (2, "")
    assert "distance_reason to say why" in failed.stderr


def test_outsiders_learn_less_where_chance_assigns_the_rounds(as_json: Json) -> None:
    base = as_json(f"{EPSILON} --rounds 2500 --participation once")
    assert base["outsiders"]["epsilon"] < base["epsilon"]
    assert "only results" in base["outsiders"]["condition"], "no second ε without what it asks for"
    assert as_json(f"{EPSILON} --rounds 2500 --participation every")["outsiders"] is None


def test_no_epsilon_of_outsiders_to_whom_clients_talk(privacy: Run) -> None:
    assert "outsiders" in privacy(f"{EPSILON} --rounds 2500 --participation once")
    assert "outsiders" not in privacy(f"{EPSILON} --rounds 2500 --participation once --colluding 1")


def test_outsiders_do_not_hide_a_guarantee_at_the_smallest_delta(privacy: Run) -> None:
    tiny = "epsilon --clients 100 --dim 2 --levels 2 --trials 100 --clip-norm 1 --range 1 --delta 1e-243"
    assert "outsiders" not in privacy(f"{tiny} --rounds 1000000 --participation once")
