from __future__ import annotations

from pathlib import Path

import pytest

from cpsgd.errors import ParameterError
from cpsgd.learning.datasets import NAMES, Dataset, load


@pytest.mark.parametrize("name", NAMES)
def test_every_name(name: str, small_mnist: Path) -> None:
    data: Dataset = load(name, folder=small_mnist)
    assert data.name == name
    assert data.size == {"digits": 1442, "mnist": 30}.get(name, 25_000_000)
    assert data.classes == 10
    batch = data.batch([0, data.size - 1])
    assert batch.features.shape == (2, data.feature_dim)
    assert 0 <= batch.features.min() < batch.features.max() <= 1
    assert set(data.test_set().labels) <= set(range(10))
    assert data.source


def test_the_number_of_clients(small_mnist: Path) -> None:
    assert load("infinite-mnist", clients=123, folder=small_mnist).size == 123
    assert load("infinite-digits", clients=10**12).size == 10**12
    assert load("digits", clients=1442).size == 1442
    with pytest.raises(ParameterError, match=r"1,442 clients.* not 1,000\. infinite-digits has"):
        load("digits", clients=1_000)
    for name in NAMES:
        with pytest.raises(ParameterError, match="clients"):
            load(name, clients=0, folder=small_mnist)


def test_unknown_names_are_answered_with_the_known() -> None:
    with pytest.raises(ParameterError, match=r"'cifar'\. Known are digits, infinite-digits, mnist, infinite-mnist"):
        load("cifar")
