"""Clients' points in a public ball, and what k-means and principal components have in common."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpsgd.errors import InfeasibleError, ParameterError, VectorError
from cpsgd.planner import plan
from cpsgd.statistics import kmeans, pca
from cpsgd.statistics.clusters import Blocks
from cpsgd.statistics.components import MomentVector
from cpsgd.statistics.points import in_unit_ball, people_in_ball

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
    np.testing.assert_allclose(people_in_ball(table, ["x", "y"], "id", 2.0), points / 2.0, atol=1e-6)
    # Rows are moved into the ball before, so that one of them cannot count for more than the others.
    wild = table | {"x": np.where(np.arange(1800) == 7, 1e12, table["x"])}
    moved = people_in_ball(wild, ["x", "y"], "id", 2.0)
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
