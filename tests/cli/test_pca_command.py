from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.usefixtures("fixed_seed")

WISHES = ("--components", 2, "--epsilon", 8, "--delta", 1e-6)


def save() -> np.ndarray:
    points = 0.1 + np.random.default_rng(0).normal(size=(2000, 4)) * [0.05, 0.3, 0.05, 0.2]
    np.save("points.npy", points)
    return points


@pytest.mark.slow
def test_components_of_a_table(cpsgd: Any) -> None:
    save()
    text = cpsgd("pca", "points.npy", *WISHES, "--out", "c.csv").stdout
    components = np.loadtxt("c.csv", delimiter=",")
    np.testing.assert_allclose(components, [[0, 1, 0, 0], [0, 0, 0, 1]], atol=0.25)
    for words in ("2,000 with a point of 4 coordinates", "replace-one", "proved by", "° measured", "c.csv"):
        assert words in text


@pytest.mark.slow
@pytest.mark.parametrize("options", [(), ("--centred",)])
def test_json(cpsgd: Any, options: tuple[str, ...]) -> None:
    np.save("points.npy", save() - (0.1 if options else 0.0))
    facts = json.loads(cpsgd("pca", "points.npy", *WISHES, *options, "--bits", 8, "--radius", 1.2, "--json").stdout)
    assert np.load("components.npy").shape == (2, 4)
    assert 7.5 < facts["epsilon"] <= 8
    assert facts["protocol"]["dim"] == (10 if options else 14)
    assert facts["angle_degrees"]["measured"] < 15
    np.testing.assert_allclose(facts["mean"], 0.0 if options else 0.1, atol=0.05)
    np.testing.assert_allclose(facts["variances"], [0.09, 0.04], rtol=0.25)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--components", 5), "components"),
        (("--radius", -1), "radius"),
        (("--epsilon", 0.001, "--bits", 8), "too little"),
        (("--bits", 0), "bits"),
        (("--out", "points.npy"), "overwrite"),
    ],
)
def test_wrong_options(cpsgd: Any, options: tuple[object, ...], words: str) -> None:
    save()
    result = cpsgd("pca", "points.npy", *WISHES, *options)
    assert result.exit_code == 2
    assert words in result.stderr
    assert not Path("components.npy").exists()


def test_a_bad_row_is_named(cpsgd: Any) -> None:
    points = save()
    points[3, 2] = np.nan
    np.save("points.npy", points)
    result = cpsgd("pca", "points.npy", *WISHES)
    assert result.exit_code == 2
    assert "points.npy, row 3: NaN or infinite at coordinate 2" in result.stderr
