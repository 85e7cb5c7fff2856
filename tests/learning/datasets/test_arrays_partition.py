from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets import Partition, dirichlet, iid
from cpsgd.learning.datasets.partitions import one_each


def held(partition: Partition) -> list[list[int]]:
    """Each client's examples, asked for one by one."""
    return [partition.rows(np.array([client]))[0].tolist() for client in range(partition.clients)]


def assert_each_example_once(partition: Partition, examples: int) -> None:
    assert sorted(itertools.chain.from_iterable(held(partition))) == list(range(examples))


@pytest.mark.slow
@given(st.integers(1, 300), st.data(), st.integers(0, 2**70))
def test_iid_is_even_and_complete(examples: int, data: st.DataObject, seed: int) -> None:
    clients = data.draw(st.integers(1, examples))
    partition = iid(examples, clients, seed)
    assert partition.clients == clients
    assert_each_example_once(partition, examples)
    sizes = {len(rows) for rows in held(partition)}
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.slow
@given(
    st.lists(st.integers(0, 5), min_size=1, max_size=200),
    st.integers(1, 40),
    st.floats(1e-300, 1e11),
    st.integers(0, 2**70),
)
@settings(deadline=None)
def test_dirichlet_is_complete_whatever_alpha(labels: list[int], clients: int, alpha: float, seed: int) -> None:
    partition = dirichlet(labels, clients, alpha, seed)
    assert partition.clients == clients
    assert_each_example_once(partition, len(labels))


def test_the_seed_decides() -> None:
    labels = np.arange(500) % 7
    first, again, other = ([held(iid(500, 20, seed)), held(dirichlet(labels, 20, 0.5, seed))] for seed in (3, 3, 4))
    assert first == again
    assert first[0] != other[0]
    assert first[1] != other[1]


def test_order_of_examples_is_shuffled() -> None:
    assert held(iid(1_000, 1, 0))[0] != list(range(1_000))


def shares(alpha: float, clients: int) -> np.ndarray:
    """[class, client]: which share of the class the client has, for 500 classes of 1,000 examples."""
    labels = np.arange(500_000) % 500
    partition = dirichlet(labels, clients, alpha, seed=1)
    counts = np.array([np.bincount(labels[rows], minlength=500) for rows in held(partition)])
    return counts.T / 1_000


@pytest.mark.slow
def test_alpha_rules_how_uneven_classes_are() -> None:
    """A share of Dirichlet(α, ..., α) over n clients has variance (1/n)(1 − 1/n)/(nα + 1).

    Shares are nearly Gamma(α) variables, whose excess kurtosis is 6/α: at α = 0.1 the variance of 25,000 of them has a
    relative standard error of 5 %. The draws are fixed; with fresh ones 30 % would be exceeded once in 10^8.
    """
    clients = 50
    for alpha in (0.1, 1.0, 10.0):
        expected = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
        assert shares(alpha, clients).var() == pytest.approx(expected, rel=0.3)
    np.testing.assert_allclose(shares(1e9, clients), 1 / clients, atol=1e-3)
    # Nothing but whole classes.
    assert (shares(1e-9, clients).max(axis=1) == 1).all()


def test_rows_of_several_clients() -> None:
    partition = Partition(np.array([4, 1, 0, 3, 2]), np.array([0, 2, 2, 5]))
    rows, counts = partition.rows(np.array([2, 1, 0, 2]))
    assert rows.tolist() == [0, 3, 2, 4, 1, 0, 3, 2]
    assert counts.tolist() == [3, 0, 2, 3]
    rows, counts = partition.rows(np.array([], dtype=np.int64))
    assert (rows.size, counts.size) == (0, 0)


def test_one_each() -> None:
    assert held(one_each(3)) == [[0], [1], [2]]


@pytest.mark.parametrize(
    ("order", "starts"),
    [
        ([0, 0], [0, 2]),
        ([0, 2], [0, 2]),
        ([-1, 0], [0, 2]),
        ([0, 1], [0, 1]),
        ([0, 1], [1, 2]),
        ([0, 1], [0, 2, 1, 2]),
        ([0, 1], [2]),
    ],
)
def test_what_is_no_partition_is_refused(order: list[int], starts: list[int]) -> None:
    with pytest.raises(ParameterError):
        Partition(np.array(order), np.array(starts))


def test_wrong_wishes_are_refused() -> None:
    with pytest.raises(ParameterError, match="clients in"):
        iid(10, 11, 0)
    for clients, alpha, seed in ((0, 1.0, 0), (3, 0.0, 0), (3, float("nan"), 0), (3, 1e12, 0), (3, 1.0, -1)):
        with pytest.raises(ParameterError):
            dirichlet([0, 1, 2, 3], clients, alpha, seed)
    for labels in ([], [0.5], [[1]], ["a"]):
        with pytest.raises(DataError, match="list of integers"):
            dirichlet(labels, 2, 1.0, 0)
    with pytest.raises(DataError, match="negative one at position 2"):
        dirichlet([0, 1, -1], 2, 1.0, 0)


def test_lists_make_a_partition() -> None:
    partition = Partition([4, 1, 0, 3, 2], [0, 2, 2, 5])  # type: ignore[arg-type]
    assert partition.rows(np.array([2]))[0].tolist() == [0, 3, 2]
    for order, starts in (([0.5], [0, 1]), ([0], "ab"), ([[0], [1, 2]], [0, 1])):
        with pytest.raises(ParameterError, match="list of integers"):
            Partition(order, starts)  # type: ignore[arg-type]
