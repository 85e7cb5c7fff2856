"""A run's correlated noise on a device: the law is that of `cpsgd.correlated.run_sums`."""

import numpy as np
import pytest
import torch

from cpsgd.correlated.device_sums import DeviceLineages
from cpsgd.correlated.run_sums import Slots
from cpsgd.errors import ParameterError
from cpsgd.simulation.device import DeviceRound
from tests.correlated.test_run_sums import CLIENTS, ROUNDS, check_covariance, covariance, protocol_for

CPU = torch.device("cpu")


def means(rounds: range, *, dim: int, clients: int = CLIENTS, seed: int | None = 5, shift: float = 0.0) -> torch.Tensor:
    protocol = protocol_for(dim, clients=clients)
    lineages = DeviceLineages(protocol.mechanism, Slots(protocol.mechanism, seed), clients, dim, CPU)
    found = []
    for number in rounds:
        round_ = DeviceRound(protocol, number, seed=seed, device=CPU)
        round_.source = lineages
        round_.add(torch.full((clients, dim), shift))
        found.append(round_.mean())
    return torch.stack(found)


@pytest.mark.parametrize("clients", [CLIENTS, 100])
def test_noise_is_correlated_over_rounds_as_the_theory_says(clients: int) -> None:
    found = means(range(ROUNDS), dim=8000, clients=clients).double().numpy()
    check_covariance(found, covariance(protocol_for(8000, clients=clients), ROUNDS, clients))


def test_vectors_are_added_up() -> None:
    found = means(range(2), dim=8000, clients=100, shift=1.25).double().numpy()
    assert np.abs(found.mean(axis=1) - 1.25).max() < 6.0 * 0.6 / np.sqrt(8000)


def test_a_run_is_taken_up_anywhere_with_the_same_noise() -> None:
    whole = means(range(ROUNDS), dim=30)
    assert torch.equal(means(range(4, ROUNDS), dim=30), whole[4:])
    assert not torch.equal(means(range(ROUNDS), dim=30, seed=6), whole)


def test_noise_that_was_lost_is_not_taken_away() -> None:
    """Without a seed the noise of a round that was skipped is nobody's: only that of round 0 is taken away."""
    protocol = protocol_for(20_000)
    lineages = DeviceLineages(protocol.mechanism, Slots(protocol.mechanism, None), CLIENTS, protocol.dim, CPU)
    first, third, sixth = (lineages.before_rounding(number, CLIENTS) for number in (0, 2, 5))
    factors = protocol.mechanism.correlation.factors  # type: ignore[attr-defined]
    unit = float(first.var())
    assert float((first * third).mean()) / unit == pytest.approx(factors[2], abs=0.05)
    assert float(third.var()) / unit == pytest.approx(1.0 + factors[2] ** 2, rel=0.07)
    # Round 5 knows neither round 3 nor 4, and round 2 is too long ago.
    assert float(sixth.var()) / unit == pytest.approx(1.0, rel=0.07)
    assert abs(float((third * sixth).mean())) / unit < 0.05


def test_another_number_of_messages_and_rounds_beyond_the_run_are_refused() -> None:
    mechanism = protocol_for(3).mechanism
    lineages = DeviceLineages(mechanism, Slots(mechanism, 1), CLIENTS, 3, CPU)
    with pytest.raises(ParameterError, match="Expected 2 messages"):
        lineages.before_rounding(0, 3)
    with pytest.raises(ParameterError, match="run_length"):
        lineages.before_rounding(ROUNDS, CLIENTS)
