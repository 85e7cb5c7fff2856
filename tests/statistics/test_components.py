"""Private principal components against the exact ones and scikit-learn's."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.optimize import minimize
from sklearn.decomposition import PCA

from cpsgd import planner
from cpsgd.errors import ColumnError, CpsgdError, GuaranteeError, InfeasibleError, ParameterError, VectorError
from cpsgd.ledger import Budget, Ledger
from cpsgd.planner import plan
from cpsgd.privacy import guarantee
from cpsgd.protocol import Protocol
from cpsgd.statistics.components import Components, MomentVector, exact_components, pca, subspace_angle
from cpsgd.statistics.points import in_unit_ball, people_in_ball

DEVIATIONS = np.array([0.25, 0.18, 0.14, 0.06, 0.05, 0.04, 0.03, 0.03])
DIM = len(DEVIATIONS)


def cloud(clients: int, seed: int) -> NDArray[np.float64]:
    """An ellipsoid in a random position, away from zero."""
    generator = np.random.default_rng(seed)
    axes = np.linalg.qr(generator.normal(size=(DIM, DIM)))[0]
    return 0.1 + generator.normal(size=(clients, DIM)) * DEVIATIONS @ axes.T


@pytest.mark.usefixtures("fixed_seed")
def test_the_subspace_is_close_to_scikit_learns(record_property: Callable[[str, object], None]) -> None:
    points = cloud(100_000, seed=1)
    found = pca(points, 3, 2.0, 1e-6, radius=1.2)
    exact = PCA(3).fit(points)
    angle = subspace_angle(exact.components_, found.components)
    record_property("angle_degrees", math.degrees(angle))
    assert math.degrees(angle) < 1.5
    # The estimate is the root of the mean square over all pairs of directions, of which the largest angle is a part.
    assert angle < 3 * found.expected_angle
    assert math.degrees(found.expected_angle) < 1.5
    np.testing.assert_allclose(found.variances, exact.explained_variance_, rtol=0.05)
    assert found.variances.sum() / found.total_variance == pytest.approx(
        exact.explained_variance_ratio_.sum(), abs=0.03
    )
    np.testing.assert_allclose(found.mean, exact.mean_, atol=0.003)
    np.testing.assert_allclose(found.components @ found.components.T, np.eye(3), atol=1e-12)

    assert 1.9 < found.guarantee.epsilon <= 2.0
    assert found.guarantee.epsilon == guarantee(found.plan.protocol, 1e-6).epsilon
    assert found.guarantee.citation
    assert found.bits_per_client == found.plan.protocol.bits_per_client
    assert found.plan.error.total > 0


@pytest.mark.usefixtures("fixed_seed")
def test_the_estimated_angle_is_about_the_measured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    points = cloud(1000, seed=2)
    layout = MomentVector.of(DIM, with_mean=True)
    stated = {"replace_one_distance": layout.distance, "distance_reason": "of their products"}
    once = plan(1000, layout.length, 60.0, 1e-6, layout.clip_norm, bits=8, **stated)
    monkeypatch.setattr(planner, "plan", lambda *arguments, **options: once)
    exact = exact_components(points, 1)
    squares, estimates = [], []
    for _ in range(30):
        found = pca(points, 1, 60.0, 1e-6, radius=1.2, bits=8)
        squares.append(math.sin(subspace_angle(exact, found.components)) ** 2)
        estimates.append(math.sin(found.expected_angle) ** 2)
    # With one component the sum over pairs is the angle itself: 30 · 7 squares, whose mean is within 60 % but for a
    # probability below 1e-6. The estimate counts rounding at its largest, and smaller gaps.
    assert 0.4 < np.mean(squares) / np.mean(estimates) < 1.6


@pytest.mark.usefixtures("fixed_seed")
@pytest.mark.parametrize("centred", [False, True])
def test_without_noise_it_is_exact(monkeypatch: pytest.MonkeyPatch, centred: bool) -> None:
    points = cloud(1500, seed=3)
    layout = MomentVector.of(DIM, with_mean=not centred)
    silent = Protocol.binomial(
        clients=1500, dim=layout.length, clip_norm=layout.clip_norm, levels=2**16, trials=0, coordinate_range=1.5
    )

    def quiet(*arguments: object, **options: object) -> object:
        return dataclasses.replace(plan(*arguments, **options), protocol=silent)

    monkeypatch.setattr(planner, "plan", quiet)
    mean = points.mean(axis=0) if centred else None
    found = pca(points, 3, 8.0, 1e-6, radius=3.0, mean=mean, bits=8)
    exact = PCA(3).fit(points)
    assert subspace_angle(exact.components_, found.components) < 2e-3
    np.testing.assert_allclose(found.variances, exact.explained_variance_ * 1499 / 1500, rtol=2e-3)
    np.testing.assert_allclose(found.mean, exact.mean_, atol=1e-3)
    # Signs are fixed, so that the components are equal to those computed without privacy.
    np.testing.assert_allclose(found.components, exact_components(points, 3), atol=5e-3)


@pytest.mark.parametrize("with_mean", [False, True])
def test_a_clients_vector_has_the_matrixs_norm(with_mean: bool) -> None:
    point = np.array([[0.48, -0.6, 0.64]], dtype=np.float32)
    layout = MomentVector.of(3, with_mean=with_mean)
    vectors = layout.write(point)
    assert vectors.dtype == np.float32
    assert vectors.shape == (1, layout.length)
    assert np.linalg.norm(vectors) == pytest.approx(layout.clip_norm, rel=1e-6)
    assert np.linalg.norm(vectors[:, :6]) == pytest.approx(np.linalg.norm(np.outer(point, point)), rel=1e-6)
    moments, mean = layout.read(vectors[0].astype(np.float64))
    np.testing.assert_allclose(moments, np.outer(point, point), rtol=1e-6)
    np.testing.assert_allclose(mean, point[0] if with_mean else np.zeros(3), rtol=1e-6)


@pytest.mark.parametrize("dim", [1, 4, 60])
def test_the_weight_of_the_mean_is_the_best(dim: int) -> None:
    def error(weight: float) -> float:
        return (1 + weight**2) * (dim * (dim + 1) / 2 + 2 * 0.5**2 * dim / weight**2)

    best = MomentVector.of(dim, with_mean=True).weight
    assert error(best) <= min(error(0.9 * best), error(1.1 * best))


# Of the search for the farthest pair.
OPTIONS: Any = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 20_000, "maxfev": 20_000}
WEIGHTS = [0.0, 0.05, 0.3, 0.5, 0.66, 0.84, 1.0, 1.3, 2**0.5, 1.5, 3.0]


def squared_distance(first: NDArray[np.float64], second: NDArray[np.float64], weight: float) -> float:
    """By the definition, from matrices."""
    matrices = first[:, None] * first - second[:, None] * second
    difference = first - second
    return float(np.vdot(matrices, matrices) + weight**2 * (difference @ difference))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("dim", [1, 2, 4])
def test_no_two_vectors_are_further_apart_than_stated(dim: int, weight: float) -> None:
    layout = MomentVector(dim, weight)
    generator = np.random.default_rng(dim)

    def negative(flat: NDArray[np.float64]) -> float:
        first, second = (x / max(1.0, math.sqrt(x @ x)) for x in flat.reshape(2, dim))
        return -squared_distance(first, second, weight)

    best = 0.0
    for _ in range(4):
        found = minimize(negative, 1.5 * generator.normal(size=2 * dim), method="Nelder-Mead", options=OPTIONS)
        found = minimize(negative, found.x, method="Nelder-Mead", options=OPTIONS)
        best = max(best, math.sqrt(-found.fun))
    # A grid over lengths and angles as well, where there is no more to it than those.
    lengths, cosines = np.linspace(0, 1, 41), np.linspace(-1, 1, 401) if dim > 1 else np.array([-1.0, 1.0])
    u, v, angle = np.meshgrid(lengths, lengths, cosines)
    inner = u * v * angle
    squares = u**4 + v**4 - 2 * inner**2 + weight**2 * (u**2 + v**2 - 2 * inner)
    assert math.sqrt(squares.max()) <= layout.distance
    assert layout.distance * (1.0 - 1e-6) < best <= layout.distance <= 2.0 * layout.clip_norm


@pytest.mark.parametrize("dim", [1, 2, 5, 30])
@pytest.mark.parametrize("with_mean", [False, True])
def test_float32_vectors_are_no_further_apart_either(dim: int, with_mean: bool) -> None:
    layout = MomentVector.of(dim, with_mean=with_mean)
    generator = np.random.default_rng(dim)
    cosine = -0.5 * layout.weight**2
    largest = 0.0
    for _ in range(300):
        first, other = generator.normal(size=(2, dim))
        first /= np.linalg.norm(first)
        other -= (other @ first) * first
        # The farthest pair there is, a little too long, in single precision.
        second = -first if dim == 1 else cosine * first + math.sqrt(1 - cosine**2) * other / np.linalg.norm(other)
        second = second if with_mean or dim > 1 else np.zeros(1)
        vectors = layout.write(in_unit_ball(np.stack([first, second]) * [[1.1], [1.2]], 1.0)).astype(np.float64)
        largest = max(largest, float(np.linalg.norm(vectors[0] - vectors[1])))
    assert layout.distance - 1e-6 < largest <= layout.distance


def test_the_formula_of_the_farthest_pair() -> None:
    for dim in (2, 5, 100):
        a = MomentVector.of(dim, with_mean=True).weight
        exact = math.sqrt(2 + 2 * a**2 + a**4 / 2)
        assert MomentVector.of(dim, with_mean=True).distance == pytest.approx(exact, rel=1e-6)
        assert MomentVector.of(dim, with_mean=False).distance == pytest.approx(math.sqrt(2), rel=1e-6)


@pytest.mark.usefixtures("fixed_seed")
def test_equal_variances_have_no_direction() -> None:
    points = np.random.default_rng(4).normal(scale=0.2, size=(3000, 3))
    found = pca(points, 1, 4.0, 1e-6, radius=1.0, bits=8)
    assert found.expected_angle == math.pi / 2


def test_angles() -> None:
    plane = np.eye(4)[:2]
    assert subspace_angle(plane, plane[::-1]) == 0.0
    assert subspace_angle(plane, np.eye(4)[1:3]) == pytest.approx(math.pi / 2)
    turned = [[1.0, 0.0, 0.0, 0.0], [0.0, math.cos(0.01), math.sin(0.01), 0.0]]
    assert subspace_angle(plane, turned) == pytest.approx(0.01)


def test_components_of_peoples_columns(fixed_seed: None, tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    rows = 0.1 + generator.normal(size=(4000, 2)) * [0.3, 0.05]
    path = tmp_path / "t.csv"
    lines = [f"{100000 + i // 2},{x:.6f},{y:.6f}" for i, (x, y) in enumerate(rows)]
    path.write_text("id,x,y\n" + "\n".join(lines))
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=9.0, delta=1e-6))
    wishes: dict[str, Any] = {"radius": 1.0, "bits": 8, "columns": ["x", "y"], "user": "id"}
    found = pca(path, 1, 8.0, 1e-6, **wishes, ledger=ledger, population="people")
    assert found.plan.protocol.clients == 2000
    assert subspace_angle(found.components, exact_components(rows.reshape(2000, 2, 2).mean(axis=1), 1)) < 0.1
    assert ledger.total("people").rounds == 1
    with pytest.raises(ParameterError, match="Name the columns"):
        pca(path, 1, 8.0, 1e-6, radius=1.0)


def small_cloud(clients: int) -> NDArray[np.float64]:
    return 0.1 + np.random.default_rng(7).normal(size=(clients, 2)) * [0.4, 0.1]


def test_a_round_between_clients_and_server(fixed_seed: None) -> None:
    points = small_cloud(500)
    asked = Components(["x", "y"], 1, radius=1.0).plan(500, 8.0, 1e-6, bits=8)
    messages = [asked.encode({"x": x, "y": y}) for x, y in points]
    assert len(messages[0]) == asked.protocol.message_bytes
    found = asked.aggregate(messages)
    assert found.components.shape == (1, 2)
    assert subspace_angle(found.components, exact_components(points, 1)) < 6 * found.expected_angle < 0.6
    np.testing.assert_allclose(found.mean, points.mean(axis=0), atol=0.1)
    assert found.guarantee is asked.plan.guarantee
    # On one machine the protocol is the same.
    assert pca(points, 1, 8.0, 1e-6, radius=1.0, bits=8).plan.protocol == asked.protocol
    assert asked.protocol.replace_one_distance == MomentVector.of(2, with_mean=True).distance

    with pytest.raises(GuaranteeError) as refused:
        asked.aggregate(messages[:250])
    true = refused.value.epsilon
    assert true is not None
    accepted = asked.aggregate(messages[:250], accept_epsilon=1.01 * true)
    assert accepted.guarantee.epsilon == pytest.approx(true)
    assert accepted.guarantee.epsilon > found.guarantee.epsilon
    # The noise of fewer messages turns the components further.
    assert accepted.expected_angle > found.expected_angle


def test_integers_that_are_added_up_elsewhere(fixed_seed: None) -> None:
    """As in secure aggregation, whose server sees the sum alone."""
    points = small_cloud(60)
    asked = Components(2, 2, radius=1.0, mean=[0.1, 0.1]).plan(60, 40.0, 1e-6, secure=True, colluding=1, bits=12)
    protocol = asked.protocol
    assert protocol.modulus is not None
    sums = np.zeros(protocol.dim, dtype=np.uint64)
    for point in points:
        sums = (sums + protocol.encode_integers(asked.vector(point), round=3)) % np.uint64(protocol.modulus)
    found = asked.result(protocol.decode_sum(sums, 60, round=3), 60)
    centred = points - 0.1
    np.testing.assert_allclose(found.variances, np.linalg.eigvalsh(centred.T @ centred / 60)[::-1], atol=0.1)
    np.testing.assert_array_equal(found.mean, [0.1, 0.1])


def test_a_clients_rows_become_its_point() -> None:
    question = Components(["x", "y"], 1, radius=2.0, mean=[1.0, 0.0])
    rows: dict[str, list[float]] = {"x": [1.2, 9e9], "y": [0.3, 0.0], "id": [7, 7]}
    expected = question.layout.write(np.array([[0.55, 0.075]], dtype=np.float32))[0]
    np.testing.assert_allclose(question.vector(rows), expected, atol=1e-6)
    np.testing.assert_allclose(question.vector([[1.2, 0.3], [9e9, 0.0]]), expected, atol=1e-6)
    # As on one machine, to the bit.
    table = {name: np.array([*column, 0.0, 0.1]) for name, column in rows.items()}
    points = people_in_ball(table, question.ball, "id")
    np.testing.assert_array_equal(question.layout.write(points)[-1], question.vector(rows))
    alone = question.vector({"x": 1.2, "y": 0.3})
    np.testing.assert_array_equal(alone, question.vector([1.2, 0.3]))
    np.testing.assert_array_equal(alone, question.vector(np.array([1.2, 0.3])))


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([1.0, np.nan], VectorError),
        ([1.0, 2.0, 3.0], VectorError),
        ([], VectorError),
        (np.zeros((0, 2)), VectorError),
        (np.zeros((1, 1, 2)), VectorError),
        (["a", "b"], VectorError),
        ([[1.0, 2.0], [3.0]], VectorError),
        (np.ma.masked_array([1.0, 2.0], [True, False]), VectorError),
        ({"x": 1.0}, ColumnError),
        ({"x": 1.0, "y": "b"}, ColumnError),
        ({"x": 1.0, "y": np.inf}, ColumnError),
        ({"x": [], "y": []}, VectorError),
        (3.0, CpsgdError),
    ],
)
def test_values_that_are_no_point(value: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        Components(["x", "y"], 1, radius=1.0).vector(value)


@pytest.mark.parametrize(
    ("columns", "changes", "error"),
    [
        (0, {}, ParameterError),
        ("xy", {}, ParameterError),
        (["x", "x"], {}, ParameterError),
        ([], {}, ParameterError),
        (True, {}, ParameterError),
        (2, {"components": 3}, ParameterError),
        (2, {"components": 0}, ParameterError),
        (2, {"radius": 0.0}, ParameterError),
        (2, {"radius": -2.0}, ParameterError),
        (2, {"mean": [0.0]}, VectorError),
        (2, {"mean": [0.0, np.inf]}, VectorError),
        (2, {"mean": [0.0, np.nan]}, VectorError),
    ],
)
def test_bad_questions(columns: Any, changes: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        Components(columns, **{"components": 1, "radius": 1.0, **changes})


def test_bad_plans() -> None:
    with pytest.raises(InfeasibleError, match="clients are needed"):
        Components(2, 1, radius=1.0).plan(10, 0.05, 1e-6, bits=16, mechanism="binomial")
    with pytest.raises(ParameterError, match="clients"):
        Components(2, 1, radius=1.0).plan(1, 1.0, 1e-6)
    with pytest.raises(ParameterError, match="at most"):
        Components(6000, 1, radius=1.0).plan(1000, 1.0, 1e-6)
