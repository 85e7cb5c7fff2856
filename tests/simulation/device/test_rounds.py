"""Rounds on a device against the exact law and against the simulator of the CPU."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from cpsgd import Protocol
from cpsgd.errors import EmptyError, ParameterError, VectorError
from cpsgd.mechanisms import Binomial, Coins, Mechanism, RoundedGaussian, SampledCoins
from cpsgd.mechanisms.whole_laplace import WholeLaplace
from cpsgd.simulation import device as rounds
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.cpu import RoundSimulator, float_mean
from cpsgd.simulation.device import DeviceRound, device_float_mean
from cpsgd.simulation.device_kernels import current

from ..exact_law import CLIENTS, DIM, PROTOCOLS, VALUES, coins, exact_law, integers, protocol  # noqa: TID252
from .roundings import goodness_of_fit


def test_whole_levels_need_the_second_check_of_norms() -> None:
    # A device would send (1, 1) for (0.6, 0.6), which is further from other vectors than is accounted for.
    noise = WholeLaplace(levels=3, coordinate_range=1.0, spread=1, divisor=1, shares=2, window=128)
    tested = Protocol(clients=2, dim=2, clip_norm=1.0, mechanism=noise, rotate=False)
    with pytest.raises(ParameterError, match="second check"):
        DeviceRound(tested, 0, seed=1, device="cpu")


@pytest.mark.parametrize("tested", [*PROTOCOLS.values(), protocol(modulus=64)], ids=[*PROTOCOLS, "modulus"])
def test_the_sum_has_the_exact_law(tested: Protocol, device: torch.device) -> None:
    # Chi-square over 20,000 coordinates. False alarm: 1e-7 each.
    round_ = DeviceRound(tested, 3, seed=5, device=device)
    round_.add(torch.tensor(VALUES, device=device)[:, None].repeat(1, DIM))
    sums = integers(tested, round_.mean().cpu().numpy(), CLIENTS)
    assert goodness_of_fit(sums, exact_law(tested)) > 1e-7


@pytest.mark.parametrize(
    "mechanism",
    [
        Binomial(levels=3, trials=13, coordinate_range=0.05),
        Coins(coins=1, theta=0.12, coordinate_range=0.05),
        Coins(coins=3, theta=0.07, coordinate_range=0.05),
        SampledCoins(rate=0.05, theta=0.45, coordinate_range=0.05),
        RoundedGaussian(noise_deviation=1.5, step=0.1, window=30, coordinate_range=0.05),
    ],
    ids=["binomial", "one coin", "three coins", "sampled coins", "noise before rounding"],
)
def test_means_and_variances_equal_the_simulators(mechanism: Mechanism, device: torch.device) -> None:
    # The same vectors through both: errors of both means have mean 0 and one variance. With 4,100 coordinates a mean
    # of errors has deviation σ/64, a variance σ²/45: six of each are a false alarm in 1e-8.
    rng = np.random.default_rng(1)
    dim, clients = 4_100, 300
    x = rng.standard_normal((clients, dim)).astype(np.float32) / 80.0
    of = Protocol(clients=clients, dim=dim, clip_norm=1.0, mechanism=mechanism)
    simulator = RoundSimulator(of, 2, seed=3)
    simulator.add(x)
    round_ = DeviceRound(of, 2, seed=3, device=device)
    round_.add(torch.from_numpy(x.copy()).to(device))
    truth = x.astype(np.float64).mean(axis=0)
    expected = of.expected_squared_error(list(x), 2)
    sigma = math.sqrt(expected.total / dim)
    for mean in (simulator.mean(), round_.mean().cpu().numpy()):
        error = mean - truth
        assert abs(error.mean()) < 6 * sigma / math.sqrt(dim)
        assert abs((error**2).mean() / sigma**2 - 1.0) < 6 * math.sqrt(2.0 / dim)
    assert round_.noise_norm() == simulator.noise_norm()


def test_gaussian_rounds_and_float_means(device: torch.device) -> None:
    of = Protocol.gaussian(clients=50, dim=5_000, clip_norm=1.0, sigma=0.7)
    x = torch.randn(50, 5_000, generator=torch.Generator().manual_seed(2)).to(device)
    x[3, 7] = float("inf")  # counts as zero
    plain_mean = device_float_mean(5_000, 1.0, device)
    plain_mean.add(x.clone())
    reference = float_mean(5_000, 1.0)
    finite = x.clone()
    finite[3] = 0.0
    reference.add(finite.cpu().numpy())
    np.testing.assert_allclose(plain_mean.mean().cpu().numpy(), reference.mean(), atol=1e-6)
    round_ = DeviceRound(of, 0, seed=1, device=device)
    round_.add(x.clone())
    noise = (round_.mean() - plain_mean.mean()).double().cpu()
    # 5,000 normal numbers: six deviations of mean and variance.
    assert abs(float(noise.mean())) < 6 * 0.7 / math.sqrt(50 * 5_000)
    assert abs(float((noise**2).mean()) / (0.49 / 50) - 1.0) < 6 * math.sqrt(2 / 5_000)
    assert plain_mean.noise_norm() == 0.0


@pytest.mark.parametrize("of", [protocol(dim=50), replace(coins(2), dim=50)], ids=["levels", "coins"])
def test_a_seed_repeats_a_round_in_any_pieces(of: Protocol, device: torch.device) -> None:
    x = torch.rand(CLIENTS, 50, generator=torch.Generator().manual_seed(3)).to(device)
    means = []
    for pieces in ([6], [1, 2, 3], [5, 1]):
        round_ = DeviceRound(of, 0, seed=11, device=device)
        for part in torch.split(x.clone(), pieces):
            round_.add(part)
        means.append(round_.mean())
    assert torch.equal(means[0], means[1])
    assert torch.equal(means[0], means[2])
    for seed, number in ((12, 0), (11, 1), (None, 0)):
        other = DeviceRound(of, number, seed=seed, device=device)
        other.add(x.clone())
        assert not torch.equal(means[0], other.mean())


@pytest.mark.parametrize("rotated", [False, True])
def test_rows_may_lie_anyhow_in_memory(rotated: bool, device: torch.device) -> None:
    # Kernels go through rows number by number and write into them.
    of = replace(protocol(dim=64), rotate=rotated)
    one = torch.linspace(-1.0, 1.0, 64, device=device)
    spread = torch.zeros(CLIENTS, 64, 2, device=device)
    spread[:, :, 0] = one
    means = []
    copies = one.repeat(CLIENTS, 1)
    for rows in (copies.clone(), one.expand(CLIENTS, 64), copies.t().contiguous().t(), spread[:, :, 0]):
        round_ = DeviceRound(of, 0, seed=1, device=device)
        round_.add(rows)
        means.append(round_.mean())
    for mean in means[1:]:
        assert torch.equal(mean, means[0])
    floats = device_float_mean(64, 1.0, device)
    floats.add(torch.full((64,), float("nan"), device=device).expand(2, 64))  # broken rows are overwritten, too
    assert bool((floats.mean() == 0.0).all())


def test_zeros_fill_a_round_up(device: torch.device) -> None:
    of = protocol(dim=30, trials=0, levels=2)
    round_ = DeviceRound(of, 0, seed=1, device=device)
    round_.add(torch.ones(3, 30, device=device))
    round_.add_zeros(3)
    assert round_.count == 6
    assert bool((round_.mean() >= -1e-6).all())  # each of three zeros goes to -1 or 1


REACH = 3.6 / math.sqrt(51_370)
LARGE = [
    *(Coins(coins=n, theta=0.12 / math.sqrt(n), coordinate_range=REACH) for n in (1, 3, 15, 255)),
    *(SampledCoins(rate=rate, theta=0.45, coordinate_range=REACH) for rate in (0.05, 0.6)),
]


@pytest.mark.gpu
@pytest.mark.parametrize("mechanism", LARGE, ids=lambda mechanism: mechanism.describe())
def test_a_large_round_of_coins(mechanism: Mechanism, device: torch.device) -> None:
    """The paper's size: errors have the mean and the variance of the law, and plain kernels give the same sums.

    All but 4 to 15 coins, which CUDA draws by inversion where plain kernels toss each.
    """
    of = Protocol(clients=2_000, dim=51_370, clip_norm=1.0, mechanism=mechanism)
    rows = torch.randn(of.clients, of.dim, generator=torch.Generator(device).manual_seed(1), device=device)
    rows *= 0.9 / torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    truth = rows.double().mean(dim=0)
    means = []
    for kernels in (None, plain):
        round_ = DeviceRound(of, 2, seed=3, device=device, kernels=kernels)
        round_.add(rows.clone())
        means.append(round_.mean())
    # Scaling may differ in the last digit, which moves a point of the grid here and there, and a coin in 2^16 with it.
    noise = of.scale**2 * of.mechanism.noise.variance / of.clients
    if mechanism != LARGE[2]:
        assert float((means[0] - means[1]).double().square().mean()) < 1e-3 * noise
    expected = of.expected_squared_error(list(rows[:200].cpu().numpy()), 2)
    sigma = math.sqrt((expected.noise + expected.rounding) * 200 / of.clients / of.dim)
    for mean in means:
        error = mean.double() - truth
        assert abs(float(error.mean())) < 6 * sigma / math.sqrt(of.dim)
        # The variance of a sample variance; clipping at 3.6 deviations is a bias far below it.
        assert abs(float((error**2).mean()) / sigma**2 - 1.0) < 6 * math.sqrt(2.0 / of.dim) + 1e-3


def test_bad_input_is_refused(device: torch.device) -> None:
    round_ = DeviceRound(protocol(dim=4), 0, seed=1, device=device)
    with pytest.raises(EmptyError):
        round_.mean()
    for wrong in (torch.zeros(2, 5), torch.zeros(4), torch.zeros(2, 4, dtype=torch.float64)):
        with pytest.raises(VectorError, match="Expected rows of 4 float32"):
            round_.add(wrong.to(device))
    round_.add(torch.zeros(2, 4, device=device))
    round_.mean()
    with pytest.raises(ParameterError, match="no more messages"):
        round_.add(torch.zeros(2, 4, device=device))
    with pytest.raises(EmptyError):
        device_float_mean(4, 1.0, device).mean()


def test_more_coordinates_than_kernels_can_number_are_refused() -> None:
    with pytest.raises(ParameterError, match="at most 1,073,741,824 coordinates"):
        DeviceRound(protocol(dim=2**30 + 1), 0, seed=1, device="cpu")


def test_kernels_run_on_the_gpu_that_is_meant() -> None:
    # Launches do not look at where tensors are, only at which GPU is the current one.
    found = current(torch.device("cuda", 1))
    assert isinstance(found, torch.cuda.device)
    assert found.idx == 1
    with current(torch.device("cpu")) as nothing:
        assert nothing is None


def test_a_round_makes_its_device_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.device] = []
    monkeypatch.setattr(rounds, "current", lambda device: nullcontext(seen.append(device)))
    round_ = DeviceRound(protocol(dim=4), 0, seed=1, device="cpu")
    round_.add(torch.zeros(2, 4))
    round_.mean()
    assert seen == [torch.device("cpu")] * 2
