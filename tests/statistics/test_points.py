"""Clients' points in a public ball, and what k-means and principal components have in common."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from cpsgd import RoundSimulator
from cpsgd.errors import CpsgdError, InfeasibleError, ParameterError, VectorError
from cpsgd.planner import plan
from cpsgd.statistics import Components, Statistic, kmeans, pca
from cpsgd.statistics.cluster_sums import Blocks
from cpsgd.statistics.components import MomentVector, exact_components
from cpsgd.statistics.points import Ball, in_unit_ball, people_in_ball

POINTS = np.random.default_rng(8).normal([0.3, 0.1, 0.0, -0.2], 0.1, size=(2000, 4))


def test_points_are_brought_into_the_ball() -> None:
    points = np.array([[3.0, 4.0], [0.3, -0.4], [1e300, 0.0], [0.0, 0.0]])
    expected = [[0.6, 0.8], [0.15, -0.2], [1.0, 0.0], [0.0, 0.0]]
    np.testing.assert_allclose(in_unit_ball(points, 2.0), expected, rtol=1e-6)
    np.testing.assert_allclose(in_unit_ball([[3, 4]], 10, [3, 3]), [[0.0, 0.1]], rtol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_row_that_is_not_finite_is_named(bad: float) -> None:
    points = POINTS.copy()
    points[7, 2] = points[9, 0] = bad
    with pytest.raises(VectorError, match="Row 7 is NaN or infinite at coordinate 2"):
        kmeans(points, 2, 2.0, 1e-6, radius=1.0)


def test_points_of_people_are_the_means_of_their_rows() -> None:
    generator = np.random.default_rng(3)
    rows = generator.normal(scale=0.3, size=(1800, 2))
    order, points = generator.permutation(1800), rows.reshape(600, 3, 2).mean(axis=1)
    table = {"id": (np.arange(1800) // 3)[order], "x": rows[order, 0], "y": rows[order, 1]}
    np.testing.assert_allclose(people_in_ball(table, Ball(("x", "y"), 2.0), "id"), points / 2.0, atol=1e-6)
    # Rows are moved into the ball before, so that one of them cannot count for more than the others.
    wild = table | {"x": np.where(np.arange(1800) == 7, 1e12, table["x"])}
    moved = people_in_ball(wild, Ball(("x", "y"), 2.0), "id")
    assert np.linalg.norm(moved, axis=1).max() <= 1.0
    person = table["id"][7]
    assert np.linalg.norm(moved[person] - points[person] / 2.0) < 2.0 / 3.0


@pytest.mark.parametrize(
    ("layout", "rounds", "factor"),
    [
        (Blocks(4, 2), 8, 1.0 + 2.0**-0.5),
        (MomentVector.of(20, with_mean=False), 1, 2.0),
        (MomentVector.of(20, with_mean=True), 1, 2.0),
    ],
)
def test_the_noise_that_is_needed_falls_by_the_square_of_the_distance(layout: Any, rounds: int, factor: float) -> None:
    common: dict[str, Any] = {"bits": 12, "rounds": rounds, "participation": "every"}
    stated = {"replace_one_distance": layout.distance, "distance_reason": "of their layout"}
    plain = plan(5000, layout.length, 2.0, 1e-6, layout.clip_norm, **common)
    found = plan(5000, layout.length, 2.0, 1e-6, layout.clip_norm, **common, **stated)
    assert (2.0 * layout.clip_norm / layout.distance) ** 2 == pytest.approx(factor, abs=0.05)
    ratio = (2.0 * layout.clip_norm / layout.distance) ** 2
    assert plain.error.noise / found.error.noise == pytest.approx(ratio, rel=0.01)
    assert found.guarantee.epsilon <= 2.0


@pytest.mark.usefixtures("fixed_seed")
@pytest.mark.parametrize(
    ("find", "options", "layout"),
    [(kmeans, {"rounds": 2}, Blocks(4, 4)), (pca, {}, MomentVector.of(4, with_mean=True))],
)
def test_the_guarantee_says_what_it_rests_on(find: Any, options: dict[str, Any], layout: Any) -> None:
    found = find(POINTS, 2, 20.0, 1e-6, radius=1.0, bits=8, **options)
    assert found.plan.protocol.replace_one_distance == layout.distance
    assert found.guarantee.assumption.startswith(f"replace-one distance {layout.distance:.6g} because each vector is")


@pytest.mark.parametrize(
    ("find", "changes", "error", "words"),
    [
        (kmeans, {"clusters": 61}, ParameterError, "61 for 60 clients"),
        (kmeans, {"radius": np.nan}, ParameterError, "radius"),
        (kmeans, {"epsilon": 0.0}, ParameterError, "epsilon"),
        (kmeans, {"delta": 1.0}, ParameterError, "delta"),
        (kmeans, {"initial": np.zeros((2, 3))}, VectorError, "initial centres"),
        (kmeans, {"points": np.zeros(4)}, VectorError, "one row per client"),
        (kmeans, {"points": np.zeros((0, 4))}, VectorError, "one row per client"),
        (kmeans, {"points": np.array([["a"]])}, VectorError, "real numbers"),
        (kmeans, {"bits": 8}, InfeasibleError, "would do"),
        (pca, {"components": 9}, ParameterError, "components"),
        (pca, {"epsilon": -1.0}, ParameterError, "epsilon"),
        (pca, {"delta": -1e-9}, ParameterError, "delta"),
        (pca, {"bits": 0.0}, ParameterError, "bits"),
        (pca, {"mean": np.zeros(3)}, VectorError, "origin"),
        (
            pca,
            {"points": np.where(np.eye(8, k=-2), np.nan, 0.1)},
            VectorError,
            "Row 2 is NaN or infinite at coordinate",
        ),
        (pca, {"epsilon": 0.05, "bits": 8}, InfeasibleError, "clients are needed"),
    ],
)
def test_bad_input_sends_nothing(find: Any, changes: dict[str, Any], error: type[Exception], words: str) -> None:
    many = {"clusters": 2} if find is kmeans else {"components": 2}
    options = {"points": POINTS[:60], **many, "epsilon": 2.0, "delta": 1e-6, "radius": 1.0, **changes}
    heard: list[int] = []
    with pytest.raises(error, match=words):
        find(**options, advance=heard.append)
    assert heard == []


# ------------------------------------------------------------------ bounds per column, and the result


def visits() -> dict[str, np.ndarray]:
    """400 people in two clusters, with columns of very different widths; some values are absurd or missing."""
    generator = np.random.default_rng(5)
    second = np.arange(400) % 2
    age = np.where(second, 70.0, 30.0) + generator.normal(scale=3.0, size=400)
    pay = np.where(second, 2e4, 8e4) + generator.normal(scale=3e3, size=400)
    age[:2], pay[2] = [np.inf, -np.inf], np.nan
    return {"id": np.arange(400), "age": age, "pay": pay}


BOUNDS = {"age": (0.0, 100.0), "pay": (0.0, 1e5)}


@pytest.mark.usefixtures("fixed_seed")
def test_clusters_within_bounds_are_a_statistic() -> None:
    wishes: dict[str, Any] = {"bounds": BOUNDS, "missing": "bounds", "rounds": 4, "bits": 10}
    found = kmeans(visits(), 2, 30.0, 1e-6, user="id", **wishes)
    assert isinstance(found, Statistic)
    assert (found.statistic, found.names, found.groups) == ("kmeans", ("age", "pay"), ("cluster 1", "cluster 2"))
    assert (found.users, found.unit, found.bounds, found.epsilon <= 30.0) == (400, "user", BOUNDS, True)
    centres = found.values[np.argsort(found.values[:, 0])]
    np.testing.assert_allclose(centres, [[30.0, 8e4], [70.0, 2e4]], rtol=0.25)
    assert ((found.low <= found.values) & (found.values <= found.high)).all()
    assert ((found.low >= 0.0) & (found.high <= [100.0, 1e5])).all()
    frame = found.to_pandas()
    assert frame.columns.tolist() == ["cluster", "name", "value", "low", "high"]
    assert len(frame) == 4
    plain = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert plain["sizes"] == found.sizes.tolist()
    assert repr(found).startswith("<kmeans of 400 users: cluster 1/age ")
    assert "cluster 2" in found._repr_html_()
    first, second = found.plot().figure.axes  # age and pay have a picture each, with the clusters on one axis
    assert [label.get_text() for label in first.get_yticklabels()] == ["cluster 1", "cluster 2"]
    assert ("age" in first.get_xlabel(), "pay" in second.get_xlabel()) == (True, True)
    # Distances are in units of the bounds: pay does not drown age.
    assert kmeans(visits(), 2, 30.0, 1e-6, **wishes).unit == "row"


@pytest.mark.usefixtures("fixed_seed")
def test_components_within_bounds_are_a_statistic() -> None:
    table = visits()
    found = pca(table, 1, 30.0, 1e-6, bounds=BOUNDS, missing="bounds", bits=10)
    assert isinstance(found, Statistic)
    assert (found.statistic, found.names, found.groups, found.unit) == ("pca", ("age", "pay"), ("component 1",), "row")
    clean = {name: np.clip(np.nan_to_num(table[name], nan=high / 2), 0.0, high) for name, (_, high) in BOUNDS.items()}
    scaled = np.column_stack([clean["age"] / 50.0, clean["pay"] / 5e4])
    values, vectors = np.linalg.eigh(np.cov(scaled.T, bias=True))
    exact = vectors[:, -1] * np.sign(vectors[np.abs(vectors[:, -1]).argmax(), -1])
    assert abs(found.values[0] @ exact) > 0.95
    assert found.variances[0] == pytest.approx(values[-1], rel=0.4)
    assert list(found.details["mean"]) == ["age", "pay"]
    np.testing.assert_allclose(found.mean, [clean["age"].mean(), clean["pay"].mean()], rtol=0.3)
    assert ((found.low <= found.values) & (found.values <= found.high)).all()
    json.dumps(found.to_dict(), allow_nan=False)


def test_intervals_of_components_cover_and_are_the_whole_range_where_all_is_noise() -> None:
    """Of 200 releases, the exact loadings are in 95 % intervals in more than 85 %: they are estimates."""
    generator = np.random.default_rng(0)
    points = generator.normal(size=(3000, 3)) @ np.diag([0.3, 0.15, 0.05])
    exact = exact_components(in_unit_ball(points, 1.0), 1)
    asked = Components(3, 1, radius=1.0).plan(3000, 4.0, 1e-6, bits=10, mechanism="rounded-gaussian")
    vectors = asked.question.layout.write(in_unit_ball(points, 1.0))  # type: ignore[attr-defined]
    held = []
    for seed in range(200):
        simulator = RoundSimulator(asked.protocol, 0, seed=seed, threads=1)
        simulator.add(vectors)
        found = asked.result(simulator.mean(), 3000)
        held.append((found.low <= exact) & (exact <= found.high))
    assert np.mean(held) > 0.85
    alike = asked.result(np.zeros(asked.protocol.dim), 3000)
    assert (alike.low == -1.0).all()
    assert (alike.high == 1.0).all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bounds": BOUNDS, "radius": 1.0}, "leave out radius"),
        ({"columns": ["age"]}, "bounds of the columns"),
        ({"bounds": BOUNDS, "columns": ["age"]}, "each of the columns"),
        ({"bounds": {"age": (3, 1)}}, "low < high"),
        ({}, "Name the columns"),
        ({"bounds": BOUNDS, "missing": "drop"}, "all its coordinates"),
        ({"radius": 1.0, "columns": ["age"], "missing": "bounds"}, "all its coordinates"),
        ({"bounds": BOUNDS, "user": "age"}, "is the column of users"),
        ({"bounds": BOUNDS}, "missing='drop'"),
        ({"bounds": BOUNDS, "missing": 0, "clusters": 0}, "clusters"),
    ],
)
def test_bad_bounds_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(CpsgdError, match=words):
        kmeans(**{"points": visits(), "clusters": 2, "epsilon": 8.0, "delta": 1e-6, **changes})
