"""`cpsgd table kmeans` and `cpsgd table pca`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("fixed_seed")

PLACES = np.array([[0.5, 0.5], [-0.5, 0.4], [0.0, -0.6]])
COST = ("--epsilon", 8, "--delta", 1e-6)
KMEANS = ("table kmeans", "points.npy", "--clusters", 3, *COST, "--rounds", 4)
PCA = ("table pca", "points.npy", "--components", 2, *COST)


def blobs() -> np.ndarray:
    generator = np.random.default_rng(0)
    return PLACES[generator.integers(3, size=1500)] + generator.normal(scale=0.06, size=(1500, 2))


def cloud() -> np.ndarray:
    return 0.1 + np.random.default_rng(0).normal(size=(2000, 4)) * [0.05, 0.3, 0.05, 0.2]


def save(command: str) -> np.ndarray:
    points = blobs() if command == "table kmeans" else cloud()
    np.save("points.npy", points)
    return points


@pytest.mark.parametrize("suffix", ["npy", "csv"])
def test_centres_of_a_table(cpsgd: Any, suffix: str) -> None:
    save("table kmeans")
    np.savetxt("points.csv", blobs(), delimiter=",")
    bits = ("--bits", 8) if suffix == "csv" else ()
    text = cpsgd("table kmeans", f"points.{suffix}", *KMEANS[2:], *bits, "--out", "c.csv").stdout
    centres = np.loadtxt("c.csv", delimiter=",")
    assert np.linalg.norm(centres[:, None] - PLACES, axis=2).min(axis=0).max() < 0.1
    for words in ("of 1,500 rows", "cluster 1 · 0", "at δ = 1e-06 per row, replace-one", "proved by", "c.csv"):
        assert words in text


def test_components_of_a_table(cpsgd: Any) -> None:
    save("table pca")
    text = cpsgd(*PCA, "--out", "c.csv").stdout
    components = np.loadtxt("c.csv", delimiter=",")
    np.testing.assert_allclose(components, [[0, 1, 0, 0], [0, 0, 0, 1]], atol=0.25)
    for words in ("of 2,000 rows", "component 2 · 3", "replace-one", "proved by", "° expected", "c.csv"):
        assert words in text


def test_centres_as_json_with_progress_on_a_terminal(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    save("table kmeans")
    result = cpsgd(*KMEANS, "--bits", 8, "--json")
    assert result.stderr == ""
    facts = json.loads(result.stdout)
    centres = np.load("centres.npy")
    np.testing.assert_allclose([each["value"] for each in facts["values"]], centres.reshape(-1), rtol=1e-6)
    # Nothing is shown that the guarantee does not cover.
    assert "inertia" not in facts
    assert 7.5 < facts["epsilon"] <= 8
    assert facts["rounds"] == 4
    assert facts["total_bits_per_client"] == 4 * facts["bits_per_client"]
    assert facts["bits_per_coordinate"] <= 8
    assert len(facts["sizes"]) == len(facts["deviations"]) == 3
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "6000/6000" in cpsgd(*KMEANS, "--bits", 8, "--json").stderr


@pytest.mark.parametrize("options", [(), ("--centred",)])
def test_components_as_json(cpsgd: Any, options: tuple[str, ...]) -> None:
    np.save("points.npy", cloud() - (0.1 if options else 0.0))
    facts = cpsgd.json(*PCA, *options, "--bits", 8, "--radius", 1.2)
    assert np.load("components.npy").shape == (2, 4)
    assert 7.5 < facts["epsilon"] <= 8
    assert facts["protocol"]["dim"] == (10 if options else 14)
    assert facts["expected_angle"] < 0.3
    np.testing.assert_allclose(list(facts["mean"].values()), 0.0 if options else 0.1, atol=0.05)
    np.testing.assert_allclose(facts["variances"], [0.09, 0.04], rtol=0.25)


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        (KMEANS, ("--clusters", 1501), "1501 for 1500 clients"),
        (KMEANS, ("--clusters", 0), "clusters"),
        (KMEANS, ("--bounds", "0=1:1"), "low < high"),
        (KMEANS, ("--bounds", "0=0:1", "--radius", 2), "leave out radius"),
        (KMEANS, ("--bounds", "0=0:1", "--missing", "drop"), "all its coordinates"),
        (KMEANS, ("--radius", 0), "radius"),
        (KMEANS, ("--rounds", 0), "rounds"),
        pytest.param(KMEANS, ("--epsilon", 0.01, "--bits", 8), "too little", marks=pytest.mark.thorough),
        (KMEANS, ("--out", "c.txt"), ".npy or .csv"),
        (KMEANS, ("--out", "points.npy"), "overwrite"),
        (PCA, ("--components", 5), "components"),
        (PCA, ("--radius", -1), "radius"),
        (PCA, ("--epsilon", 0.001, "--bits", 8), "too little"),
        (PCA, ("--bits", 0), "bits"),
        (PCA, ("--out", "points.npy"), "overwrite"),
    ],
)
def test_wrong_options(cpsgd: Any, command: tuple[Any, ...], options: tuple[object, ...], words: str) -> None:
    save(command[0])
    cpsgd.refuses(words, *command, *options)
    assert [path.name for path in Path().iterdir()] == ["points.npy"]


@pytest.mark.parametrize(("command", "bad"), [(KMEANS, np.inf), (PCA, np.nan)])
def test_a_bad_row_is_named(cpsgd: Any, command: tuple[Any, ...], bad: float) -> None:
    points = save(command[0])
    points[11, 1] = bad
    np.save("points.npy", points)
    cpsgd.refuses("points.npy, row 11: NaN or infinite at coordinate 1", *command)


def test_clusters_of_named_columns(cpsgd: Any) -> None:
    lines = [f"{1000000 + i // 3},{x:.5f},{y:.5f}" for i, (x, y) in enumerate(blobs())]
    Path("people.csv").write_text("id,x,y\n" + "\n".join(lines) + "\n")
    command = ("table kmeans", "people.csv", *KMEANS[2:], "--bits", 8)
    for wrong in ((), ("--user", "id")):
        cpsgd.refuses("--columns", *command, *wrong)
        assert not Path("centres.npy").exists()
    facts = cpsgd.json(*command, "--columns", "x,y", "--user", "id")
    assert (facts["users"], facts["coordinates"], facts["unit"]) == (500, 2, "user")
    bounded = cpsgd.json(*command, "--bounds", "x=-1:1,y=-2:2", "--user", "id", "--out", "bounded.csv")
    assert Path("bounded.csv").read_text().startswith("cluster,name,value,low,high\ncluster 1,x,")
    assert [each["name"] for each in bounded["values"][:2]] == ["x", "y"]
    assert bounded["bounds"] == {"x": [-1.0, 1.0], "y": [-2.0, 2.0]}
    cpsgd.succeeds("budget", "create", "b.ledger", "--population", "p", "--epsilon", 9, "--delta", 1e-6)
    paid = (*command, "--columns", "x,y", "--ledger", "b.ledger", "--population", "p")
    assert cpsgd.json(*paid)["epsilon"] <= 8
    cpsgd.refuses("is left", *paid, "--out", "second.npy")
    assert not Path("second.npy").exists()
