"""How rounds of coins are formed for training: on the CPU, by a GPU's kernels, and beside their baselines."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from cpsgd import Protocol
from cpsgd.learning import estimators
from cpsgd.mechanisms import Binomial, Coins, Gaussian, Mechanism, SampledCoins
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.simulation.device import DeviceRound

CLIENTS, DIM = 200, 3_000
REACH = 4.0 / math.sqrt(DIM)
KINDS: dict[str, Mechanism] = {
    "one coin": Coins(coins=1, theta=0.2, coordinate_range=REACH),
    "coins": Coins(coins=7, theta=0.1, coordinate_range=REACH),
    "sampled coins": SampledCoins(rate=0.1, theta=0.4, coordinate_range=REACH),
}
every = pytest.mark.parametrize("mechanism", KINDS.values(), ids=KINDS)


def protocol(mechanism: Mechanism) -> Protocol:
    return Protocol(clients=CLIENTS, dim=DIM, clip_norm=1.0, mechanism=mechanism)


@every
@pytest.mark.parametrize("device", [None, torch.device("cpu")], ids=["cpu", "as on a GPU"])
def test_a_round_of_coins_estimates_the_mean(mechanism: Mechanism, device: torch.device | None) -> None:
    of = protocol(mechanism)
    vector = np.random.default_rng(1).standard_normal(DIM).astype(np.float32)
    vector *= 0.9 / np.linalg.norm(vector)
    rows = np.tile(vector, (CLIENTS - 50, 1))
    round_: RoundSimulator | DeviceRound
    if device is None:
        round_ = RoundSimulator(of, 3, seed=7)
        round_.add(rows)
    else:
        round_ = DeviceRound(of, 3, seed=7, device=device)
        round_.add(torch.from_numpy(rows))
    round_.add_zeros(50)
    error = np.asarray(round_.mean()) - 0.75 * vector
    # ‖error‖² is nearly a sum of 3,000 squared normals; rounding is a little below its largest, at most 4 %.
    assert 0.96 - 6 * math.sqrt(2 / DIM) < error @ error / round_.noise_norm() ** 2 < 1.0 + 6 * math.sqrt(2 / DIM)


@every
def test_coins_are_private_and_have_baselines(mechanism: Mechanism) -> None:
    of = protocol(mechanism)
    assert estimators.is_private(of)
    found = estimators.baselines_of(of, 0.5)
    gaussian, quantized = found["gaussian"], found["quantized"]
    assert isinstance(gaussian, Protocol)
    assert isinstance(quantized, Protocol)
    assert gaussian.mechanism == Gaussian(sigma=0.5)
    # The same range and as many values, with nothing kept uncertain.
    assert isinstance(quantized.mechanism, Binomial)
    assert quantized.mechanism.coordinate_range == REACH
    assert not estimators.is_private(quantized)


def test_bytes_are_those_of_messages() -> None:
    size = {name: estimators.message_bytes(protocol(mechanism), DIM) for name, mechanism in KINDS.items()}
    header = size["one coin"] - DIM // 8
    assert 0 < header < 100
    assert size["coins"] == header + 3 * DIM // 8
    assert size["sampled coins"] == pytest.approx(header + 0.1 * DIM / 8, abs=2)  # on average
