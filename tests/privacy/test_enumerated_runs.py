"""Whole runs of `rounded-correlated`, enumerated: the exact δ lies under the certificate's.

One lineage has a law of two messages, by integration over its z. Lineages are independent, so the law of both sums is a
power of that in two dimensions; coordinates are independent, too. Sums are taken modulo a number, and losses are
rounded down: both make the exact δ smaller, by next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import SlotsAndCoins
from cpsgd.privacy.rounded_runs import run_cost

pytestmark = pytest.mark.slow

TAIL = 1e-9
EPSILONS = np.array([0.1, 0.3, 0.6, 1.0])


@dataclass(frozen=True)
class TwoRounds:
    """A run of two rounds with d coordinates alike, in which a client goes from -t/2 to t/2 in each."""

    clients: int
    sigma: float
    values: int
    t: float
    dim: int
    weight: int
    others: float = 0.0
    told: bool = False
    # The share of lineages that break after the first round, and the others whose first z, ±σ, is told.
    broken: float = 0.0
    exposed: int = 0

    @property
    def clip(self) -> float:
        return 2.2 * self.sigma * self.weight / 2**14

    @property
    def law(self) -> SlotsAndCoins:
        room = (0.5 * (self.values - 1) - max(0.5 * self.t, self.others) - self.clip) / self.sigma
        farther = (self.values - 1) / self.sigma - room
        weighting = Correlation(2, 2, None, f"1:{self.weight}")
        untold = self.clients - 1 - self.exposed
        return SlotsAndCoins(untold, self.clients - untold, self.sigma, self.sigma * 2.0**-38, room, farther, weighting)

    def rounded(self, numbers: np.ndarray) -> np.ndarray:
        """Returns the masses of all integers, for each number."""
        place = np.clip(numbers + 0.5 * (self.values - 1), 0.0, self.values - 1.0)
        return np.maximum(0.0, 1.0 - np.abs(place[..., None] - np.arange(self.values)))

    def lineage(
        self, first: float, second: float, z: np.ndarray, chances: np.ndarray, whole: bool = True
    ) -> np.ndarray:
        """Returns the law of a lineage's messages, z of its first round having these chances."""
        inherited = second + whole * np.clip(-self.weight / 2**14 * z, -self.clip, self.clip)
        fresh, normal = _normal(self.sigma)
        places = np.linspace(inherited.min() - 1e-9, inherited.max() + 1e-9, 200)
        known = np.array([normal @ self.rounded(place + fresh) for place in places])
        after = np.stack([np.interp(inherited, places, known[:, j]) for j in range(self.values)], axis=1)
        return (self.rounded(first + z) * chances[:, None]).T @ after

    def sums(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the laws of both sums of a coordinate; with z of the client's own where it is told."""
        size = 1 << math.ceil(math.log2(7.0 * math.sqrt(self.clients * (1.3 * self.sigma**2 + 0.3))))
        z, normal = _normal(self.sigma)

        def transform(law: np.ndarray) -> np.ndarray:
            return np.fft.rfft2(np.pad(law, (0, size - self.values)))

        broken = int(self.broken * self.law.untold)
        rest = transform(self.lineage(self.others, self.others, z, normal)) ** (self.law.untold - broken)
        rest *= transform(self.lineage(self.others, self.others, z, normal, whole=False)) ** broken
        for known in (-self.sigma, self.sigma):
            one = self.lineage(self.others, self.others, np.array([known]), np.ones(1))
            rest *= transform(one) ** (self.exposed // 2)
        own = self.sigma * stats.norm.ppf((np.arange(8) + 0.5) / 8)
        parts = [(np.array([one]), np.ones(1)) for one in own] if self.told else [(z, normal)]

        def world(x: float) -> np.ndarray:
            laws = (self.lineage(x, 0.0, *part) for part in parts)
            return np.concatenate([np.fft.irfft2(rest * transform(one)).ravel() / len(parts) for one in laws])

        return world(0.5 * self.t), world(-0.5 * self.t)

    def deltas(self) -> np.ndarray:
        """Returns δ at each ε of all coordinates together, rounded down."""
        first, second = self.sums()
        step, size = 2e-5, 1 << 19
        both = (first > 1e-16) & (second > 1e-16)
        losses = np.floor(np.log(first[both] / second[both]) / step).astype(int)
        alone = np.bincount(losses % size, weights=first[both], minlength=size)
        whole = np.fft.irfft(np.fft.rfft(alone) ** self.dim, size)
        values = step * np.where(np.arange(size) < size // 2, np.arange(size), np.arange(size) - size)
        return np.array([float(whole @ np.maximum(0.0, -np.expm1(np.minimum(e - values, 0.0)))) for e in EPSILONS])


def _normal(sigma: float) -> tuple[np.ndarray, np.ndarray]:
    z = np.arange(-8.5, 8.505, 0.01)
    chances = np.exp(-0.5 * z * z)
    return sigma * z, chances / chances.sum()


def gaussian(w: float) -> np.ndarray:
    """Returns δ of G(w)."""
    mu = math.sqrt(w)
    found: np.ndarray = stats.norm.cdf(mu / 2 - EPSILONS / mu) - np.exp(EPSILONS) * stats.norm.cdf(
        -mu / 2 - EPSILONS / mu
    )
    return found


@pytest.mark.parametrize(
    "run",
    [
        TwoRounds(3000, 1.0, 10, 0.5, 1500, 8192),
        TwoRounds(3000, 1.0, 10, 0.5, 1500, 8192, told=True, broken=0.5),
        TwoRounds(3000, 1.0, 10, 0.5, 1500, 8192, others=0.37, exposed=20),
        TwoRounds(4000, 0.8, 8, 1.0, 400, 14000, told=True),
        TwoRounds(4000, 1.6, 16, 1.7, 300, 12000, others=0.85),
    ],
    ids=str,
)
def test_exact_delta_of_a_whole_run_is_within_its_certificate(run: TwoRounds) -> None:
    cost = run_cost(run.law, distance=run.t * math.sqrt(run.dim), reach=run.t, dim=run.dim, tail=TAIL)
    exact = run.deltas()
    assert np.all(exact <= gaussian(cost.w) + TAIL)
    # The certificate is not vacuous: half of its w is not enough.
    assert np.all(exact > gaussian(0.5 * cost.w))


def test_runs_of_three_clients_are_refused() -> None:
    run = TwoRounds(3, 1.0, 10, 0.5, 1, 8192, told=True)
    with pytest.raises(ConditionError, match="hundreds"):
        run_cost(run.law, distance=0.5, reach=0.5, dim=1, tail=TAIL)
    # As if slots and coins were Gaussians: that is no bound for so few.
    lower = np.array([[1.0, 0.0], [-0.5, 1.0]])
    guide = 0.25 * np.linalg.inv(2.0 * lower @ lower.T + 0.5 * np.eye(2))[0, 0]
    assert np.any(run.deltas() > 2.0 * gaussian(guide))
