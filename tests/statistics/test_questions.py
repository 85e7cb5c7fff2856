"""Questions: their geometry by brute force, and the round between clients and a server."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from cpsgd import RoundSimulator, statistics
from cpsgd.errors import ColumnError, CpsgdError, GuaranteeError, ParameterError, TableError, VectorError
from cpsgd.privacy.gaussian import analytic_sigma
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage
from cpsgd.secagg.parameters import smallest_threshold
from cpsgd.statistics import Count, Histogram, Mean, Quantiles, Sum
from cpsgd.statistics.ranks import Ranges, root
from cpsgd.statistics.rows import RowQuestion
from cpsgd.statistics.users import users_of
from cpsgd.tables import open_table

QUICK: dict[str, Any] = {"bits": 8, "mechanism": "binomial"}
BOX = {"x": (-1.0, 3.0), "y": (2.0, 5.0)}
GROUPS = {"g": ["a", "b"]}
QUESTIONS: dict[str, RowQuestion] = {
    "mean": Mean(BOX),
    "mean by group": Mean(BOX, group_by=GROUPS),
    "sum": Sum(BOX),
    "sum of rows": Sum(BOX, rows=3),
    "positive sum of rows": Sum({"y": (0.0, 5.0)}, rows=3),
    "sum by group": Sum(BOX, rows=2, group_by=GROUPS),
    "count": Count(["t"]),
    "count of rows": Count(rows=4),
    "count by group": Count(group_by=GROUPS),
    "counts by group": Count(["t"], rows=2, group_by=GROUPS),
    "histogram": Histogram("x", edges=[0.0, 1.0, 2.0], rows=2),
    "one bin": Histogram("x", edges=[0.0, 1.0], rows=2),
    "categories by group": Histogram("t", categories=[0, 1], group_by=GROUPS),
    "quantiles": Quantiles({"x": (-1.0, 3.0)}, bins=8),
    "quantiles by group": Quantiles(BOX, bins=4, group_by=GROUPS),
    "ranges": Ranges(["x"]),
    "mean with missing values": Mean(BOX, missing="drop"),
    "mean with missing values by group": Mean(BOX, missing="drop", group_by=GROUPS),
    "mean of users who are not public": Mean(BOX).central("add-remove", None),
    "sum of users who are not public": Sum(BOX).central("add-remove", None),
    "count on one machine": Count(["t"]).central("replace-one", None),
    "sum with missing values": Sum(BOX, missing="drop"),
    "two columns of groups": Count(group_by=GROUPS | {"t": [0, 1]}),
    "quantiles with missing values": Quantiles(BOX, bins=4, missing="drop"),
}


def corners(question: RowQuestion) -> dict[str, np.ndarray]:
    """Rows of all kinds: bounds, beyond them, between them, each group and none."""
    x, y, t, g = [-9.0, -1.0, 0.3, 1.5, 3.0], [0.0, 2.0, 2.9, 5.0], [0, 1], ["a", "b", "other"]
    if question.missing is not None:
        x, y = [*x, math.nan], [*y, math.nan]
    rows = list(itertools.product(x, y, t, g))
    columns = [np.array(column) for column in zip(*rows, strict=True)]
    return dict(zip("xytg", columns, strict=True))


@pytest.mark.parametrize("name", QUESTIONS)
def test_distance_is_that_of_the_farthest_users(name: str) -> None:
    question = QUESTIONS[name]
    geometry = question.geometry
    rows = corners(question)
    count = len(rows["x"])
    generator = np.random.default_rng(0)
    # Users with one row each, and one who has none left that counts.
    own = [np.array([i]) for i in range(count)]
    # The farthest that `rows` rows can get a user, and any mixture of rows.
    for _ in range(200):
        size = int(generator.integers(1, 6))
        chosen = generator.integers(count, size=1 if generator.random() < 0.3 else size)
        own.append(np.repeat(chosen, question.rows or 1) if len(chosen) == 1 else chosen)
    own += [np.repeat(i, question.rows or 1) for i in range(count)]
    together = {name: column[np.concatenate(own)] for name, column in rows.items()}
    vectors = question.vectors(together, np.array([len(each) for each in own]))
    assert vectors.shape == (len(own), geometry.dim)
    norms = np.linalg.norm(vectors, axis=1)
    stated = geometry.stated()
    assert norms.max() <= stated["clip_norm"]
    squares = norms**2
    apart = np.sqrt(np.maximum(0.0, squares[:, None] + squares[None, :] - 2.0 * vectors @ vectors.T)).max()
    allowed = stated.get("replace_one_distance", 2.0 * stated["clip_norm"])
    assert apart <= allowed
    assert geometry.norm <= geometry.distance * (1.0 + 1e-12)
    added = np.abs(vectors).sum(axis=1).max()
    apart_added = max(np.abs(vectors - vector).sum(axis=1).max() for vector in vectors)
    assert added <= geometry.l1_norm * geometry.rounding
    assert apart_added <= geometry.l1_distance * geometry.rounding
    if geometry.lattice:
        np.testing.assert_allclose(vectors * geometry.lattice, np.rint(vectors * geometry.lattice), atol=1e-9)
    if name != "ranges":  # whose farthest bins are not among these values
        assert apart >= 0.999 * max(geometry.distance, geometry.norm) or name in LOOSE
        assert norms.max() >= 0.999 * geometry.norm or name in LOOSE
        assert apart_added >= 0.999 * geometry.l1_distance or name in LOOSE or question.statistic == "sum"


# The rows above do not reach all bins; and a user without a row, whose count were zero, is in no table.
LOOSE = {"quantiles", "quantiles by group", "count of rows", "quantiles with missing values"}


def test_known_distances() -> None:
    assert math.isclose(Histogram("x", categories=["a", "b"]).geometry.distance, math.sqrt(2.0))
    assert Histogram("x", categories=["a"]).geometry.distance == 1.0
    assert math.isclose(Mean(BOX).geometry.distance, math.sqrt(2.0))
    assert "replace_one_distance" not in Mean(BOX).geometry.stated()
    assert math.isclose(Mean(BOX, group_by=GROUPS).geometry.distance, math.sqrt(2.0))
    assert Sum({"y": (0.0, 5.0)}, rows=3).geometry.distance == 1.0


def test_quantiles_distance_is_computed_for_all_pairs() -> None:
    matrix = root(6)
    pairs = [np.linalg.norm(matrix[:, i] - matrix[:, j]) for i in range(6) for j in range(6)]
    norm = np.linalg.norm(matrix, axis=0).max()
    assert math.isclose(Quantiles({"x": (0, 1)}, bins=6).geometry.distance, max(norm, *pairs))
    np.testing.assert_allclose(root(64) @ root(64), np.tril(np.ones((64, 64))), atol=1e-12)


def test_users_are_combined_as_by_hand() -> None:
    generator = np.random.default_rng(1)
    table = {
        "id": generator.integers(7, size=40),
        "x": generator.uniform(-2, 4, 40),
        "g": generator.choice(["a", "b"], 40),
    }
    question: RowQuestion
    for question in (
        Mean({"x": (-1, 3)}, group_by=GROUPS),
        Sum({"x": (-1, 3)}, rows=3),
        Histogram("x", edges=[0, 1, 2], rows=2),
    ):
        blocks = users_of(open_table(table), "id", question.needed)
        found = np.concatenate([question.vectors(chunk, sizes) for chunk, sizes in blocks])
        users = np.unique(table["id"])
        assert len(found) == len(users)
        for row, user in zip(found, users, strict=True):
            own = {name: column[table["id"] == user] for name, column in table.items()}
            np.testing.assert_allclose(row, question.vector(own), atol=1e-6)


def test_a_round_between_clients_and_server() -> None:
    asked = Mean(BOX, group_by=GROUPS).plan(clients=400, epsilon=4.0, delta=1e-6, **QUICK)
    messages = [asked.encode({"x": 1.0 + i % 2, "y": 3.0, "g": "ab"[i % 2]}) for i in range(400)]
    assert len(messages[0]) == asked.protocol.message_bytes
    found = asked.aggregate(messages, confidence=1.0 - 1e-8)
    assert found.groups == ("a", "b")
    assert found.names == ("x", "y")
    assert ((found.low <= [[1.0, 3.0], [2.0, 3.0]]) & (found.high >= [[1.0, 3.0], [2.0, 3.0]])).all()
    assert (found.epsilon, found.delta, found.unit, str(found.adjacency)) == (
        asked.plan.guarantee.epsilon,
        1e-6,
        "user",
        "replace-one",
    )
    assert "block (v, b)" in str(found.assumption)
    plain = found.to_dict()
    assert len(plain["values"]) == 4
    assert plain["values"][0].keys() == {"group", "name", "value", "low", "high"}
    assert repr(found).startswith("<mean of 400 users: a/x ")
    with pytest.raises(GuaranteeError) as refused:
        asked.aggregate(messages[:200])
    assert refused.value.messages == 200
    true = refused.value.epsilon
    assert true is not None
    assert true > found.epsilon
    with pytest.raises(GuaranteeError):
        asked.result(np.zeros(asked.protocol.dim), 200)
    # Who accepts it gets the figure that is true, and wider intervals.
    accepted = asked.aggregate(messages[:200], accept_epsilon=true * 1.01, confidence=1.0 - 1e-8)
    assert accepted.epsilon == pytest.approx(true)
    assert accepted.users == 200
    assert ((accepted.low <= [[1.0, 3.0], [2.0, 3.0]]) & (accepted.high >= [[1.0, 3.0], [2.0, 3.0]])).all()


def test_a_secure_round() -> None:
    """The server adds up masked integers, and learns no more than their sum."""
    asked = Histogram("x", categories=["a", "b"]).plan(
        clients=8, epsilon=20.0, delta=1e-6, secure=True, bits=14, mechanism="binomial"
    )
    protocol = asked.protocol
    assert protocol.modulus is not None
    agreed = SecureParameters(
        clients=8,
        dim=protocol.dim,
        bits=(protocol.modulus - 1).bit_length(),
        modulus=protocol.modulus,
        neighbours=7,
        threshold=smallest_threshold(8, 7),
        round=3,
        surviving=8,
        fingerprint=protocol.fingerprint,
    )
    server, clients = SecureServer(agreed), [SecureClient(i, expected=agreed) for i in range(8)]
    waiting = server.invite()
    while server.stage is not Stage.DONE:
        for i, message in waiting.items():
            own = [protocol.encode_integers(asked.vector("ab"[i % 2]), round=3)] if server.stage is Stage.MASK else []
            server.receive(i, getattr(clients[i], server.stage.value)(message, *own))
        waiting = server.advance()
    total = server.result()
    mean = protocol.decode_sum(total.sums, len(total.survivors), round=3)
    found = asked.result(mean, len(total.survivors), confidence=1.0 - 1e-9)
    assert ((found.low <= 4.0) & (found.high >= 4.0)).all()
    assert (np.abs(found.values - 4.0) < 4.0).all()


def test_values_in_many_forms() -> None:
    question = Mean({"x": (0, 1)})
    expected = question.vector({"x": 0.25})
    for value in (0.25, [0.25], {"x": [0.2, 0.3]}, np.array([0.25]), {"x": np.float32(0.25), "other": "text"}):
        np.testing.assert_allclose(question.vector(value), expected, atol=1e-7)
    bad: list[tuple[object, type[CpsgdError]]] = [
        ("text", ColumnError),
        (float("nan"), ColumnError),
        ({"y": 1}, ColumnError),
        ([], VectorError),
    ]
    for strange, error in bad:
        with pytest.raises(error):
            question.vector(strange)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Mean({}),
        lambda: Mean({"x": (1, 1)}),
        lambda: Mean({"x": (2, 1)}),
        lambda: Mean({"x": (0, math.inf)}),
        lambda: Mean({"x": (1e16, 1e16 + 2)}),
        lambda: Mean({"x": 3}),  # type: ignore[dict-item]
        lambda: Mean({"x": (0, 1)}, group_by={"g": "ab"}),
        lambda: Mean({"x": (0, 1)}, group_by={"g": []}),
        lambda: Mean({"x": (0, 1)}, group_by={"g": ["a", "a"]}),
        lambda: Mean({"x": (0, 1)}, group_by="g"),
        lambda: Sum({"x": (0, 1)}, rows=0),
        lambda: Count().plan(10, 1.0, 1e-6),
        lambda: Histogram("x", edges=[0, 1], missing="bounds"),
        lambda: Count("t"),
        lambda: Histogram("x"),
        lambda: Histogram("x", edges=[0, 1], categories=["a"]),
        lambda: Histogram("x", edges=[1, 0]),
        lambda: Histogram("x", edges=[0]),
        lambda: Histogram("x", edges=["a", "b"]),
        lambda: Histogram("x", categories=[]),
        lambda: Quantiles({"x": (0, 1)}, [0.0]),
        lambda: Quantiles({"x": (0, 1)}, 0.5),
        lambda: Quantiles({"x": (0, 1)}, bins=1),
        lambda: Mean({"x": (0, 1)}, group_by={"g": range(11)}).plan(10, 1.0, 1e-6),
        lambda: Mean({"x": (0, 1)}).plan(1, 1.0, 1e-6),
        lambda: Mean({"x": (-8e307, 8e307)}),
    ],
)
def test_bad_questions_are_refused(make: Any) -> None:
    with pytest.raises(ParameterError):
        make()


@pytest.mark.parametrize("secure", [False, True])
def test_a_question_is_planned_at_once(secure: bool) -> None:
    # All mechanisms at all bits are looked through only if that is asked for: it takes most of a minute.
    asked = Mean({str(i): (0, 1) for i in range(20)}).plan(10_000, 1.0, 1e-6, secure=secure)
    assert asked.protocol.mechanism.name == "rounded-gaussian"
    assert asked.plan.guarantee.epsilon <= 1.0
    assert asked.plan.ratio <= 1.1
    assert Mean({"x": (0, 1)}).plan(1000, 1.0, 1e-6, bits=8, mechanism="binomial").protocol.mechanism.name == "binomial"


NEAR = 1.05**2


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("name", ["count", "sum", "mean", "mean by group", "histogram", "many bins", "many columns"])
def test_the_noise_is_chosen_by_question(name: str, secure: bool) -> None:
    others = {
        "many bins": Histogram("c", categories=range(1000)),
        "many columns": Mean({str(i): (0, 1) for i in range(30)}),
    }
    question = others.get(name) or QUESTIONS[name]
    clients, epsilon, geometry = 2000, 1.0, question.geometry
    asked = question.plan(clients, epsilon, 1e-6, secure=secure)
    laplace = 2.0 * (geometry.l1_distance / epsilon) ** 2
    if geometry.levels is not None or name == "histogram":
        laplace = 0.5 / math.sinh(0.5 * epsilon / geometry.l1_distance) ** 2  # on whole numbers, as one machine adds it
    gaussian = analytic_sigma(epsilon=epsilon, sensitivity=geometry.distance, delta=1e-6) ** 2
    assert asked.plan.error.total * clients**2 <= NEAR * geometry.dim * min(laplace, gaussian)
    assert asked.plan.guarantee.epsilon <= epsilon
    if laplace < gaussian:
        # No δ is spent, and none is needed.
        chosen = "discrete-laplace" if geometry.levels is None else "whole-laplace"
        assert (asked.protocol.mechanism.name, asked.plan.guarantee.delta) == (chosen, 0.0)
        assert question.plan(clients, epsilon, secure=secure).plan.error.total == asked.plan.error.total
        assert asked.protocol.modulus is not None
    else:
        assert (asked.protocol.mechanism.name, asked.plan.guarantee.delta) == ("rounded-gaussian", 1e-6)


def test_a_mechanism_that_is_named_is_taken() -> None:
    asked = Histogram("c", categories=range(50)).plan(500, 1.0, 1e-6, mechanism="discrete-laplace")
    assert (asked.plan.guarantee.delta, asked.protocol.replace_one_l1_distance) == (0.0, pytest.approx(2.0))
    # Two servers check ranges, which integers that wrap around do not have.
    assert Count(["t"]).plan(500, 1.0, 1e-6, pair=True).protocol.mechanism.name != "discrete-laplace"
    with pytest.raises(ParameterError, match="delta=0"):
        Count(["t"]).plan(500, 1.0, pair=True)
    # Few bits hold no Laplace noise.
    few = Count(["t"]).plan(60, 1.0, 1e-6, bits=2)
    assert few.protocol.bits_per_coordinate <= 2.0


def test_values_between_clients_are_as_accurate_as_planned() -> None:
    """A count by shares of Laplace noise: its errors, and intervals that hold. False alarms: 1e-6."""
    asked = Count(["t"]).plan(100, 1.0, 1e-6)
    vectors = np.array([asked.vector(i % 2) for i in range(100)])
    found = []
    for seed in range(600):
        simulator = RoundSimulator(asked.protocol, 0, seed=seed, threads=1)
        simulator.add(vectors)
        found.append(asked.result(simulator.mean(), 100))
    values = np.array([each.values[0] for each in found])
    held = sum(each.low[0] <= 50.0 <= each.high[0] for each in found)
    # Mean squares of 600 Laplace variables of variance 2 have the deviation 2 √(5/600).
    assert abs(np.mean((values - 50.0) ** 2) - 2.0) < 4.9 * 2.0 * math.sqrt(5.0 / 600) + 0.2
    assert held >= stats.binom.ppf(1e-6, 600, 0.95)


def test_a_mean_that_is_not_the_question_s_is_refused() -> None:
    asked = Mean({"x": (0, 1)}).plan(200, 1.0, 1e-6)
    for mean in ([0.1, 0.2, 0.3], [float("nan")], 0.1):
        with pytest.raises(VectorError, match="mean of 1 finite numbers"):
            asked.result(mean, 200)


def test_one_user_is_refused() -> None:
    for table, user in (({"id": [3, 3], "x": [1, 2]}, "id"), ({"x": [1]}, None)):
        with pytest.raises(TableError, match="one user"):
            statistics.mean(table, bounds={"x": (0, 1)}, user=user, epsilon=1.0)
