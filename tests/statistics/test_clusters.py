"""Private Lloyd against the exact algorithm and scikit-learn's."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from sklearn.cluster import KMeans

from cpsgd import planner
from cpsgd.errors import (
    BudgetExceededError,
    ColumnError,
    GuaranteeError,
    InfeasibleError,
    ParameterError,
    VectorError,
    WireError,
)
from cpsgd.ledger import Budget, Ledger
from cpsgd.planner import plan
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.protocol import Protocol
from cpsgd.statistics.centres import nearest_centre
from cpsgd.statistics.cluster_sums import Around, Blocks
from cpsgd.statistics.clusters import Clusters, NoiseWarning, PlannedClusters, inertia, kmeans
from cpsgd.statistics.points import in_unit_ball, private_mean

CLUSTERS, DIM = 6, 4


def blobs(clients: int, seed: int, deviation: float = 0.08) -> NDArray[np.float64]:
    """Clusters at random places, of unequal sizes."""
    generator = np.random.default_rng(seed)
    centres = generator.uniform(-0.45, 0.45, size=(CLUSTERS, DIM))
    which = generator.choice(CLUSTERS, size=clients, p=np.arange(3, 3 + CLUSTERS) / np.arange(3, 3 + CLUSTERS).sum())
    return centres[which] + generator.normal(scale=deviation, size=(clients, DIM))


@pytest.mark.usefixtures("fixed_seed")
def test_inertia_is_close_to_scikit_learns() -> None:
    points = blobs(100_000, seed=1)
    heard: list[int] = []
    found = kmeans(points, CLUSTERS, 2.0, 1e-6, radius=1.0, rounds=4, advance=heard.append)
    exact = KMeans(CLUSTERS, n_init=3, random_state=0).fit(points)
    # The task asks for 15 %; the noise itself costs far less, the rest is left for a local optimum.
    assert inertia(points, found.centres) < 1.02 * exact.inertia_
    assert sum(heard) == 4 * 100_000

    assert 1.9 < found.guarantee.epsilon <= 2.0
    assert (found.guarantee.delta, found.guarantee.method) == (1e-6, "rounded-gaussian")
    assert found.guarantee.citation
    again = guarantee_over_rounds(found.plan.protocol, 1e-6, rounds=4, participation="every")
    assert found.guarantee.epsilon == again.epsilon
    assert found.bits_per_client == 4 * found.plan.protocol.bits_per_client
    assert found.plan.error.total > 0

    # Each centre within six of its deviations of the mean of the points nearest to it, and sizes likewise: sums of
    # Gaussian squares exceed that with probability below 1e-6.
    nearest = nearest_centre(points, found.centres)
    means = np.array([points[nearest == j].mean(axis=0) for j in range(CLUSTERS)])
    assert (np.linalg.norm(found.centres - means, axis=1) < 6 * found.deviations + 0.005).all()
    np.testing.assert_allclose(found.sizes, np.bincount(nearest), rtol=0.05)


def noiseless(blocks: Blocks, clients: int) -> Protocol:
    return Protocol.binomial(
        clients=clients, dim=blocks.length, clip_norm=blocks.clip_norm, levels=2**16, trials=0, coordinate_range=1.0
    )


@pytest.mark.usefixtures("fixed_seed")
def test_without_noise_a_round_is_lloyds() -> None:
    points = in_unit_ball(blobs(2000, seed=2), 1.0)
    centres = np.random.default_rng(0).uniform(-0.5, 0.5, size=(CLUSTERS, DIM))
    question = Clusters(DIM, CLUSTERS, radius=1.0)
    around = Around(question.ball, question.blocks, centres)
    mean = private_mean(noiseless(around.blocks, 2000), 0, points, around.write)
    assert len(mean) == 2 * CLUSTERS * (DIM + 1)
    sums, sizes = (found[:CLUSTERS] for found in around.blocks.read(mean, 2000))
    nearest = np.argmin(((points[:, None] - centres) ** 2).sum(axis=2), axis=1)
    np.testing.assert_allclose(sizes, np.bincount(nearest, minlength=CLUSTERS), atol=0.02)
    for j in range(CLUSTERS):
        np.testing.assert_allclose(sums[j], points[nearest == j].sum(axis=0), atol=0.02)


@pytest.mark.usefixtures("fixed_seed")
def test_without_noise_the_algorithm_is_lloyds(monkeypatch: pytest.MonkeyPatch) -> None:
    points = blobs(1500, seed=3, deviation=0.15)
    initial = np.random.default_rng(1).uniform(-0.4, 0.4, size=(CLUSTERS, DIM))

    def quiet(*arguments: object, **options: object) -> object:
        planned = plan(*arguments, **options)
        return dataclasses.replace(planned, protocol=noiseless(Blocks(CLUSTERS, DIM), 1500))

    monkeypatch.setattr(planner, "plan", quiet)
    found = kmeans(points, CLUSTERS, 8.0, 1e-6, radius=1.0, rounds=5, bits=8, initial=initial)
    centres = initial
    for _ in range(5):
        nearest = np.argmin(((points[:, None] - centres) ** 2).sum(axis=2), axis=1)
        centres = np.array([points[nearest == j].mean(axis=0) for j in range(CLUSTERS)])
    np.testing.assert_allclose(found.centres, centres, atol=1e-3)


@pytest.mark.usefixtures("fixed_seed")
def test_the_radius_is_a_unit() -> None:
    points = blobs(3000, seed=4)
    unit = kmeans(points, 3, 20.0, 1e-6, radius=1.0, rounds=2, bits=8)
    large = kmeans(1000.0 * points, 3, 20.0, 1e-6, radius=1000.0, rounds=2, bits=8)
    assert unit.plan.protocol == large.plan.protocol
    ratio = inertia(1000.0 * points, large.centres) / inertia(points, unit.centres)
    assert ratio == pytest.approx(1e6, rel=0.3)
    assert np.linalg.norm(large.centres, axis=1).max() <= 1000.0


def test_a_clients_vector() -> None:
    blocks = Blocks(3, 2)
    centres = np.array([[-1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    points = np.array([[0.6, 0.8], [-0.6, 0.0]], dtype=np.float32)
    vectors = blocks.write(points, centres)
    one = 2**-0.25
    np.testing.assert_allclose(
        vectors, [[0, 0, 0, 0.6, 0.8, one, 0, 0, 0], [-0.6, 0, one, 0, 0, 0, 0, 0, 0]], rtol=1e-6
    )
    # The longest vector there is has the norm that vectors are clipped to.
    assert np.linalg.norm(vectors[0]) == pytest.approx(blocks.clip_norm)


@pytest.mark.parametrize("dim", [1, 3, 50])
def test_the_weight_of_the_count_is_the_best(dim: int) -> None:
    def variance(one: float) -> float:
        return (1 + one**2) * (dim + 1 / one**2)

    best = Blocks(1, dim).one
    assert variance(best) == pytest.approx((dim**0.5 + 1) ** 2)
    assert variance(best) <= min(variance(0.9 * best), variance(1.1 * best))


@pytest.mark.parametrize("dim", [1, 2, 3, 10])
@pytest.mark.parametrize("clusters", [1, 4])
def test_no_two_vectors_are_further_apart_than_stated(dim: int, clusters: int) -> None:
    blocks = Blocks(clusters, dim)
    generator = np.random.default_rng(dim)
    largest = 0.0
    for _ in range(30):
        points = generator.normal(size=(200, dim))
        points /= np.linalg.norm(points, axis=1, keepdims=True)
        # Points and their opposites, on the surface and just outside of it.
        ball = in_unit_ball(np.vstack([points, -points]) * generator.choice([1.0, 1.5], size=(400, 1)), 1.0)
        centres = generator.normal(size=(clusters, dim)) * generator.choice([1e-9, 0.1, 1.0])
        vectors = blocks.write(ball, centres).astype(np.float64)
        inner = vectors @ vectors.T
        squares = np.diag(inner)[:, None] + np.diag(inner) - 2.0 * inner
        # The largest few once more, without the cancellation.
        for i, j in zip(*np.unravel_index(np.argsort(squares, axis=None)[-50:], squares.shape), strict=True):
            largest = max(largest, float(np.linalg.norm(vectors[i] - vectors[j])))
    assert blocks.distance - 1e-6 < largest <= blocks.distance <= 2.0 * blocks.clip_norm


def test_a_budget_too_small_says_how_many_rounds_it_buys() -> None:
    points = blobs(2000, seed=7)
    with pytest.raises(InfeasibleError, match=r"too little for 4000 rounds") as caught:
        kmeans(points, 3, 4.0, 1e-6, radius=1.0, rounds=4000, bits=8)
    bought = int(str(caught.value).split(" rounds would do")[0].split()[-1])
    assert 1 <= bought < 4000
    blocks = Blocks(6, DIM)
    for rounds, enough in ((int(0.9 * bought), True), (int(1.1 * bought) + 1, False)):
        wishes = {"bits": 8, "rounds": rounds, "participation": "every"}
        stated = {"replace_one_distance": blocks.distance, "distance_reason": "of their blocks"}
        planned = plan(2000, blocks.length, 4.0, 1e-6, blocks.clip_norm, **wishes, **stated)
        assert (4 * blocks.deviations(planned.protocol, 2000)[1] < 2000 / 3) == enough


def test_centres_that_would_be_anywhere_are_refused() -> None:
    asked = Clusters(100, 2, radius=1.0, rounds=1, initial=np.eye(2, 100))
    words = r"centre of a cluster of 50 clients would be off by 0\.\d+ times the radius\. about 1\d\d clients would do"
    with pytest.raises(InfeasibleError, match=words):
        asked.plan(100, 3.0, 1e-6, bits=8, mechanism="binomial")
    assert asked.plan(150, 3.0, 1e-6, bits=8, mechanism="binomial").plan.rounds == 1


@pytest.mark.usefixtures("fixed_seed")
def test_centres_that_are_noise_are_warned_of() -> None:
    alike = np.full((1200, 64), 0.1)
    with pytest.warns(NoiseWarning, match=r"hardly enough for 6 clusters of 1,200 clients in 64 dimensions"):
        found = kmeans(alike, 6, 3.0, 1e-6, radius=1.0, rounds=4)
    assert found.noise_share > 0.75


@pytest.mark.usefixtures("fixed_seed")
def test_the_share_of_noise() -> None:
    found = kmeans(blobs(2000, seed=7), 3, 64.0, 1e-6, radius=1.0, rounds=4)
    assert found.noise_share < 0.01
    centres, sizes = np.array([[3.0, 0.0], [-1.0, 0.0], [9.0, 9.0]]), np.array([100.0, 300.0, 0.0])
    reading = dataclasses.replace(found.reading, values=centres)
    noisy = dataclasses.replace(found, reading=reading, sizes=sizes, deviations=np.array([2.0, 1.0, np.inf]))
    assert noisy.noise_share == pytest.approx((100 * 4 + 300) / (100 * 9 + 300 * 1))
    assert dataclasses.replace(noisy, deviations=np.array([9.0, 9.0, np.inf])).noise_share == 1.0
    assert dataclasses.replace(noisy, sizes=np.array([400.0, 0.0, 0.0])).noise_share == 1.0


def people() -> dict[str, np.ndarray]:
    """A table of 600 people with three rows each."""
    generator = np.random.default_rng(3)
    centre = np.repeat([[0.5, 0.5], [-0.5, 0.2]], 300, axis=0)
    rows = np.repeat(centre, 3, axis=0) + generator.normal(scale=0.05, size=(1800, 2))
    order = generator.permutation(1800)
    who = np.repeat(np.arange(600), 3)
    return {"id": who[order], "x": rows[order, 0], "y": rows[order, 1]}


def test_clusters_of_people(fixed_seed: None, tmp_path: Path) -> None:
    table = people()
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=9.0, delta=1e-6))
    wishes: dict[str, Any] = {"radius": 1.0, "rounds": 2, "bits": 8, "columns": ["x", "y"], "user": "id"}
    found = kmeans(table, 2, 8.0, 1e-6, **wishes, ledger=ledger, population="people")
    assert found.plan.protocol.clients == 600
    assert ledger.total("people").rounds == 2
    with pytest.raises(BudgetExceededError):
        kmeans(table, 2, 8.0, 1e-6, **wishes, ledger=ledger, population="people")
    assert ledger.total("people").rounds == 2
    for changes, error in (
        ({"columns": None}, ParameterError),
        ({"columns": "x"}, ParameterError),
        ({"columns": ["x", "height"]}, ColumnError),
        ({"user": "who"}, ColumnError),
        ({"ledger": None}, ParameterError),
    ):
        with pytest.raises(error):
            kmeans(table, 2, 8.0, 1e-6, **{**wishes, "ledger": ledger, "population": "people", **changes})
    assert ledger.total("people").rounds == 2


PLACES = np.array([[0.5, 0.5], [-0.5, 0.5]])


@pytest.fixture(scope="module")
def asked() -> PlannedClusters:
    """Four rounds, the first two of which search."""
    return Clusters(["x", "y"], 2, radius=1.0, rounds=4).plan(200, 16.0, 1e-6, bits=8)


def two_places(clients: int) -> NDArray[np.float64]:
    return PLACES[np.arange(clients) % 2] + np.random.default_rng(2).normal(scale=0.05, size=(clients, 2))


def test_rounds_between_clients_and_server(fixed_seed: None, asked: PlannedClusters) -> None:
    points = two_places(200)
    server = asked.start()
    for number in range(4):
        centres = server.centres
        assert len(centres) == (4 if number < 2 else 2)
        messages = [asked.encode({"x": x, "y": y}, centres.tolist(), number) for x, y in points]
        following = server.aggregate(messages)
        np.testing.assert_array_equal(following, server.centres)
    found = server.result()
    away = np.linalg.norm(found.centres[:, None] - PLACES, axis=2)
    assert sorted(away.argmin(axis=1)) == [0, 1]
    assert away.min(axis=1).max() < 0.2
    np.testing.assert_allclose(found.sizes, 100, atol=50)
    # The promise covers all rounds.
    assert found.guarantee is asked.plan.guarantee
    assert found.guarantee.epsilon <= 16.0
    assert asked.protocol.promise is not None
    assert asked.protocol.promise.conditions.rounds == 4
    assert found.bits_per_client == 4 * 8 * len(messages[0])
    # On one machine the protocol is the same.
    assert kmeans(points, 2, 16.0, 1e-6, radius=1.0, rounds=4, bits=8).plan.protocol == asked.protocol
    assert asked.protocol.replace_one_distance == Blocks(4, 2).distance
    for number in (-1, 4):
        with pytest.raises(ParameterError, match="round"):
            asked.encode(points[0], server.centres, number)
    with pytest.raises(ParameterError, match="All 4 rounds are over"):
        server.aggregate(messages)


@pytest.mark.usefixtures("fixed_seed")
def test_both_forms_have_one_meaning(asked: PlannedClusters, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without noise, to what rounding leaves: search, merging and all."""
    points = 10.0 * two_places(200)
    silent = dataclasses.replace(asked.plan, protocol=noiseless(Blocks(4, 2), 200))
    monkeypatch.setattr(planner, "plan", lambda *arguments, **options: silent)
    alone = kmeans(points, 2, 16.0, 1e-6, radius=10.0, rounds=4)
    between = Clusters(2, 2, radius=10.0, rounds=4).plan(200, 16.0, 1e-6)
    server = between.start()
    for number in range(4):
        centres = server.centres
        server.aggregate([between.encode(point, centres, number) for point in points])
    np.testing.assert_allclose(server.result().centres, alone.centres, atol=1e-2)
    np.testing.assert_allclose(server.result().sizes, alone.sizes, atol=0.1)


def test_rounds_with_too_few_messages(fixed_seed: None, asked: PlannedClusters) -> None:
    points, server = two_places(200), asked.start()
    epsilons = []
    for number in range(4):
        messages = [asked.encode(point, server.centres, number) for point in points]
        if number != 1:
            server.aggregate(messages)
            if number == 2:
                # The search is over: had the last round been withheld, this were the result.
                assert server.result().centres.shape == (2, 2)
            continue
        with pytest.raises(ParameterError, match="1 of 4 rounds are over"):
            server.result()
        with pytest.raises(GuaranteeError) as refused:
            server.aggregate(messages[:100])
        assert refused.value.epsilon is not None
        epsilons.append(refused.value.epsilon)
        # Nothing has happened.
        assert server.round == 1
        with pytest.raises(WireError):
            server.aggregate([b"?", *messages])
        server.aggregate(messages[:100], accept_epsilon=1.01 * epsilons[0])
    found = server.result()
    assert found.guarantee.epsilon == pytest.approx(epsilons[0])
    assert found.guarantee.epsilon > asked.plan.guarantee.epsilon


def test_integers_that_are_added_up_elsewhere(fixed_seed: None) -> None:
    """As in secure aggregation, whose server sees the sum alone."""
    initial = [[0.2, 0.0], [-0.2, 0.0]]
    secure = Clusters(2, 2, radius=1.0, rounds=2, initial=initial).plan(
        60, 60.0, 1e-6, secure=True, colluding=1, bits=12
    )
    protocol, server = secure.protocol, secure.start()
    assert protocol.modulus is not None
    for number in range(2):
        around = secure.around(server.centres)
        sums = np.zeros(protocol.dim, dtype=np.uint64)
        for point in two_places(60):
            own = protocol.encode_integers(around.vector(point), round=number)
            sums = (sums + own) % np.uint64(protocol.modulus)
        server.update(around.result(protocol.decode_sum(sums, 60, round=number), 60))
    np.testing.assert_allclose(server.result().centres, PLACES, atol=0.25)


def test_how_far_apart_does_not_depend_on_the_centres() -> None:
    question = Clusters(2, 3, radius=2.0, rounds=1)
    generator = np.random.default_rng(0)
    for _ in range(50):
        around = Around(
            question.ball, question.blocks, 10.0 ** generator.uniform(-9, 9) * generator.normal(size=(3, 2))
        )
        vectors = np.array([around.vector(2.0 * x) for x in generator.normal(size=(20, 2))], dtype=np.float64)
        assert (
            np.linalg.norm(vectors[:, None] - vectors, axis=2).max() <= around.geometry.stated()["replace_one_distance"]
        )
        assert np.linalg.norm(vectors, axis=1).max() <= question.blocks.clip_norm * (1 + 1e-6)


@pytest.mark.parametrize(
    "centres",
    [
        *(np.zeros(shape) for shape in [(2,), (0, 2), (5, 2), (2, 3)]),
        *([[0.0, np.nan]], [[0.0, 1e300]], [["a", "b"]], [[0.0, 1.0], [2.0]], None),
    ],
)
def test_centres_that_are_none(asked: PlannedClusters, centres: Any) -> None:
    with pytest.raises(VectorError, match="centres"):
        asked.encode([0.1, 0.2], centres, 0)


def test_bad_questions(asked: PlannedClusters) -> None:
    bad = {"clusters": 0, "rounds": 0, "radius": -1.0, "seed": -1, "columns": ["x", "x"]}
    for name, value in bad.items():
        with pytest.raises(ParameterError, match=f"{name}"):
            Clusters(**{"columns": 2, "clusters": 2, "radius": 1.0, name: value})  # type: ignore[arg-type]
    for initial in (np.zeros((1, 2)), np.zeros((3, 2)), [[0.0, 0.0], [0.0, np.inf]]):
        with pytest.raises(VectorError, match="initial centres"):
            Clusters(2, 2, radius=1.0, initial=initial)
    with pytest.raises(ParameterError, match="9 for 8 clients"):
        Clusters(2, 9, radius=1.0).plan(8, 1.0, 1e-6)
    with pytest.raises(InfeasibleError, match="would do"):
        Clusters(2, 2, radius=1.0).plan(20, 0.5, 1e-6, bits=16, mechanism="binomial")
    with pytest.raises(VectorError):
        asked.encode([0.1, np.nan], np.zeros((1, 2)), 0)
    with pytest.raises(ColumnError):
        asked.encode({"x": 0.1}, np.zeros((1, 2)), 0)
