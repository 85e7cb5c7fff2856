"""Poisson sampling of examples: rates, micro-batches, shares of several processes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from cpsgd.errors import ParameterError
from cpsgd.learning.poisson_loader import PoissonLoader


def loader(count: int = 1000, batch: int | None = 100, **options: object) -> DataLoader[object]:
    return DataLoader(TensorDataset(torch.arange(count)), batch_size=batch, **options)  # type: ignore[arg-type]


def test_every_example_is_drawn_at_its_rate_and_independently() -> None:
    drawn = PoissonLoader(loader())
    assert (len(drawn), drawn.expected) == (10, 100.0)
    counts, sizes = torch.zeros(1000), []
    for _ in range(40):
        for (numbers,) in drawn:
            assert drawn.current is not None
            assert drawn.current.last
            assert drawn.current.count == len(numbers)
            counts[numbers] += 1
            sizes.append(len(numbers))
    # 400 batches, Binomial(400, 0.1) for each of 1000 examples: within 7.5 deviations, false alarm below 1e-9.
    assert float((counts - 40.0).abs().max()) < 7.5 * 6.0
    # Sizes are Binomial(1000, 0.1), variance 90; that of 400 sizes is within 8 standard errors of it.
    assert abs(float(torch.tensor(sizes, dtype=torch.float64).var()) / 90.0 - 1.0) < 8.0 * (2.0 / 400) ** 0.5


def test_a_collation_and_a_data_set_of_ones_own_are_used() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, ...]:
            return (2 * self.tensors[0][index],)

    own = DataLoader(Doubled(torch.arange(50)), batch_size=50)
    assert next(iter(PoissonLoader(own)))[0].tolist() == list(range(0, 100, 2))
    assert next(iter(PoissonLoader(loader(50, 50, collate_fn=len)))) == 50
    features, labels = torch.randn(50, 3, 2), torch.arange(50)
    pairs = DataLoader(TensorDataset(features, labels), batch_size=20)
    chosen, numbers = next(iter(PoissonLoader(pairs)))
    assert torch.equal(chosen, features[numbers])


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_micro_batches_end_where_their_batch_ends(workers: int) -> None:
    drawn = PoissonLoader(loader(num_workers=workers), micro_batch=30)
    sizes, batches = 0, 0
    for (numbers,) in drawn:
        part = drawn.current
        assert part is not None
        assert part.count == len(numbers) <= 30
        sizes += len(numbers)
        batches += part.last
    assert batches == 10
    assert 1000 - 300 < sizes < 1000 + 300
    assert drawn.current is None


def test_an_empty_batch_has_one_example_that_does_not_count() -> None:
    drawn = PoissonLoader(loader(count=40, batch=1))
    parts = [(drawn.current, len(numbers)) for (numbers,) in drawn for _ in range(1)]
    empty = [size for part, size in parts if part is not None and part.count == 0]
    assert empty
    assert set(empty) == {1}
    assert len(parts) == 40


def test_all_examples_where_the_batch_is_all() -> None:
    drawn = PoissonLoader(loader(batch=1000))
    assert [len(numbers) for (numbers,) in drawn] == [1000]
    assert drawn.rate == 1.0


def test_processes_share_the_examples() -> None:
    shares = [PoissonLoader(loader(batch=500), share=(rank, 3)) for rank in range(3)]
    seen = [set(torch.cat([numbers for (numbers,) in share]).tolist()) for share in shares]
    assert all(number % 3 == rank for rank, numbers in enumerate(seen) for number in numbers)


def test_what_cannot_be_sampled_is_refused() -> None:
    class Endless(IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(())

    with pytest.raises(ParameterError, match="DataLoader, got list"):
        PoissonLoader([1, 2])
    with pytest.raises(ParameterError, match="with a length"):
        PoissonLoader(DataLoader(Endless()))
    with pytest.raises(ParameterError, match="batch_size"):
        PoissonLoader(loader(batch=None))
    with pytest.raises(ParameterError, match="1 to 10"):
        PoissonLoader(loader(count=10, batch=11))
