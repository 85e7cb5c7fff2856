from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("fixed_seed")

PLACES = np.array([[0.5, 0.5], [-0.5, 0.4], [0.0, -0.6]])
WISHES = ("--clusters", 3, "--epsilon", 8, "--delta", 1e-6, "--rounds", 4)


def save(name: str = "points.npy") -> np.ndarray:
    generator = np.random.default_rng(0)
    points = PLACES[generator.integers(3, size=1500)] + generator.normal(scale=0.06, size=(1500, 2))
    np.savetxt(name, points, delimiter=",") if name.endswith("csv") else np.save(name, points)
    return points


@pytest.mark.slow
@pytest.mark.parametrize(("name", "bits"), [("points.npy", ()), ("points.csv", ("--bits", 8))])
def test_centres_of_a_table(cpsgd: Any, name: str, bits: tuple[object, ...]) -> None:
    save(name)
    text = cpsgd("kmeans", name, *WISHES, *bits, "--out", "c.csv").stdout
    centres = np.loadtxt("c.csv", delimiter=",")
    assert np.linalg.norm(centres[:, None] - PLACES, axis=2).min(axis=0).max() < 0.1
    for words in ("1,500 with a point of 2 coordinates", "at δ = 1e-06, replace-one", "proved by", "inertia", "c.csv"):
        assert words in text


@pytest.mark.slow
def test_json(cpsgd: Any) -> None:
    points = save()
    facts = json.loads(cpsgd("kmeans", "points.npy", *WISHES, "--bits", 8, "--json").stdout)
    centres = np.load("centres.npy")
    nearest = np.linalg.norm(points[:, None] - centres, axis=2).min(axis=1)
    assert facts["inertia"] == pytest.approx(np.sum(nearest**2), rel=1e-5)
    assert 7.5 < facts["epsilon"] <= 8
    assert facts["guarantee"]["rounds"] == 4
    assert facts["total_bits_per_client"] == 4 * facts["bits_per_client"]
    assert facts["bits_per_coordinate"] <= 8
    assert len(facts["sizes"]) == len(facts["deviations"]) == 3


@pytest.mark.slow
def test_progress_goes_to_a_terminal_on_stderr(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save()
    assert cpsgd("kmeans", "points.npy", *WISHES, "--bits", 8).stderr == ""
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "6000/6000" in cpsgd("kmeans", "points.npy", *WISHES, "--bits", 8, "--json").stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--clusters", 1501), "1501 for 1500 clients"),
        (("--radius", 0), "radius"),
        (("--rounds", 0), "rounds"),
        (("--epsilon", 0.01, "--bits", 8), "too little"),
        (("--out", "c.txt"), ".npy or .csv"),
        (("--out", "points.npy"), "overwrite"),
    ],
)
def test_wrong_options(cpsgd: Any, options: tuple[object, ...], words: str) -> None:
    save()
    result = cpsgd("kmeans", "points.npy", *WISHES, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not Path("centres.npy").exists()


def test_a_bad_row_is_named(cpsgd: Any) -> None:
    points = save()
    points[11, 1] = np.inf
    np.save("points.npy", points)
    result = cpsgd("kmeans", "points.npy", *WISHES)
    assert result.exit_code == 2
    assert "points.npy, row 11: NaN or infinite at coordinate 1" in result.stderr


def test_clusters_of_named_columns(cpsgd: Any) -> None:
    points = save()
    lines = [f"{1000000 + i // 3},{x:.5f},{y:.5f}" for i, (x, y) in enumerate(points)]
    Path("people.csv").write_text("id,x,y\n" + "\n".join(lines) + "\n")
    options = (*WISHES, "--bits", 8, "--json")
    for wrong in ((), ("--user", "id")):
        result = cpsgd("kmeans", "people.csv", *options, *wrong)
        assert result.exit_code == 2
        assert "--columns" in result.stderr
        assert not Path("centres.npy").exists()
    result = cpsgd("kmeans", "people.csv", *options, "--columns", "x,y", "--user", "id")
    assert result.exit_code == 0, result.stderr
    facts = json.loads(result.stdout)
    assert (facts["clients"], facts["dim"]) == (500, 2)
    assert facts["inertia"] > 0
    cpsgd("budget", "create", "b.ledger", "--population", "p", "--epsilon", 9, "--delta", 1e-6)
    paid = (*options, "--columns", "x,y", "--ledger", "b.ledger", "--population", "p")
    assert json.loads(cpsgd("kmeans", "people.csv", *paid).stdout)["inertia"] is None
    refused = cpsgd("kmeans", "people.csv", *paid, "--out", "second.npy")
    assert refused.exit_code == 2
    assert not Path("second.npy").exists()
