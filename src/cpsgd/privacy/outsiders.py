"""`outsiders_epsilon`: ε against anyone who sees only results, where chance assigns each client to one of the rounds.

docs/proofs/two-observers.md has the proof, and the names that are used here. Every r-th of the T rounds stays hidden.
With probability p = e^-ε₀ another client's hidden round has the law of our client's two vectors, half and half, up to
h_μ(e^ε₀).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ConditionError
from cpsgd.neighbours import Adjacency
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.gaussian import gdp_delta
from cpsgd.privacy.guarantees import guarantee
from cpsgd.privacy.proofs import round_cost
from cpsgd.run import Run

CITATION = (
    "cohorts of equal size, assigned by chance and in secret (docs/proofs/two-observers.md), on Feldman, McMillan and "
    'Talwar, "Hiding Among the Clones", FOCS 2021'
)
"""The theorem behind `outsiders_epsilon`."""

# Shares of δ: for the event that few rounds look like our client's, and for tails of certificates.
_FEW_SHARE, _TAIL_SHARE = 0.05, 0.01
_SAFE, _ECHO = 1.0 + 1e-9, 1.0 + 1e-6


def outsiders_epsilon(run: Run, delta: float) -> float:
    """Returns an ε, rounded up, against an adversary who sees only the results of a run.

    The assignment of clients to rounds must be uniformly random, with cohorts of equal size, and known to nobody who
    sees results. Which messages get lost must not depend on who sent them. Then a client hides among the clients of
    other rounds. The server knows the assignment, and clients know their own rounds and neighbours in them. What holds
    against these is `guarantee`.

    Args:
        run: Rounds in which every client takes part at most once, replace-one neighbours, nobody colluding.
        delta: δ in total.

    Raises:
        ConditionError: Nothing is proved for runs of this kind; the message says why.

    Example:
        >>> from cpsgd import Protocol
        >>> noisy = Protocol.rotated_binomial(clients=10_000, dim=1024, clip_norm=1.0, levels=16, trials=64)
        >>> run = Run.of(noisy, rounds=2_500, participation="once")
        >>> f"{guarantee(run, 1e-9).epsilon:.4f} {outsiders_epsilon(run, 1e-9):.4f}"
        '0.5290 0.0150'
    """
    best = guarantee(run, delta).epsilon
    if run.participation.scheme != "once" or run.adjacency is not Adjacency.REPLACE_ONE or run.examples is not None:
        raise ConditionError(
            "Outsiders' ε is proved for clients that take part once, and replace-one neighbours. Use the guarantee, "
            "which holds for outsiders, too."
        )
    if run.colluding:
        raise ConditionError(
            "Clients that collude tell their rounds, and outsiders' ε is proved for rounds that nobody tells. Use the "
            "guarantee; or colluding=0, for people whom no client tells anything."
        )
    if delta == 0.0:
        return best
    memory, count = run.protocol.mechanism.memory, run.rounds
    if memory.echo is None:
        raise ConditionError(f"Outsiders' ε is not proved for the noise of {run.protocol.mechanism.name}.")
    cost = round_cost(run, _TAIL_SHARE * delta / count)
    # All rounds' samplers and roundings count; correlated noise has counted them already.
    times = 1 if memory.one_event else count
    bound = _Bound(delta, cost, times * cost.variation * _SAFE, times * cost.slack * _SAFE)
    for stride, factor in _strides(np.array(memory.echo), count):
        best = bound.best(cost.mu * factor, count, stride, best)
    return best


def _strides(echo: NDArray[np.float64], rounds: int) -> Iterator[tuple[int, float]]:
    """Yields distances r of hidden rounds, and the factor of the sensitivity for each: √Σ_j(Σ_i c_(j+ir))²/‖C‖."""
    stride = 1
    while stride * 2 <= rounds and (stride == 1 or echo.size > 1):
        padded = np.zeros(-(-echo.size // stride) * stride)
        padded[: echo.size] = echo
        yield stride, math.sqrt(math.fsum(padded.reshape(-1, stride).sum(axis=0) ** 2)) * _ECHO
        stride += max(1, stride // 4)


@dataclass(frozen=True)
class _Bound:
    """The theorem's δ as a function of ε, for a run's noise."""

    delta: float
    cost: Rounds
    variation: float
    slack: float

    def best(self, mu: float, rounds: int, stride: int, known: float) -> float:
        """Returns the smallest ε over all p, or `known` where that is smaller."""
        for near in np.geomspace(0.02, 20.0, 60):  # ε₀
            others = rounds // stride - 1
            alike = _at_least(others, math.exp(-near), _FEW_SHARE * self.delta) + 1
            tail = self.cost.tail_mass
            most = -(-rounds // stride) - 1
            moved = (most * math.exp(-near) * (gdp_delta(mu, float(near)) + tail) + tail) * _SAFE
            variance = min(1.0, mu * mu / 4.0 * (1.0 + mu * mu / 4.0)) / alike * _SAFE
            known = self._smallest(moved, variance, known)
        return known

    def _smallest(self, moved: float, variance: float, known: float) -> float:
        """Returns a proved ε, at most `known`, by bisection."""
        high = known * (1.0 - 1e-4)
        if self._delta(moved, variance, high) > self.delta:
            return known
        low = 0.0
        while high - low > 1e-4 * high:
            middle = 0.5 * (low + high)
            if self._delta(moved, variance, middle) > self.delta:
                low = middle
            else:
                high = middle
        return high

    def _delta(self, moved: float, variance: float, epsilon: float) -> float:
        """Returns the theorem's δ, rounded up."""
        inner = epsilon - 2.0 * self.slack
        if not 0.0 < inner <= epsilon < 700.0:
            return math.inf
        slope = math.tanh(0.5 * inner)
        both = 1.0 + math.exp(inner)
        far = both * variance / (math.e * slope) * math.exp(-slope * slope / (2.0 * variance))
        ideal = _FEW_SHARE * self.delta + both * moved + far
        return (math.exp(self.slack) * ideal + (1.0 + math.exp(epsilon)) * self.variation) * _SAFE


def _at_least(count: int, p: float, chance: float) -> int:
    """Returns a k with P[Bin(count, p) < k] <= chance, by Chernoff's bound exp(-count KL((k-1)/count, p))."""
    low, high = 0, math.floor(count * p)  # the answer is low; P[Bin < 0] = 0
    while high - low > 0:
        middle = (low + high + 1) // 2
        share = (middle - 1) / count
        gone = (1.0 - share) * math.log((1.0 - share) / (1.0 - p))
        entropy = gone + (share * math.log(share / p) if share else 0.0)
        if count * entropy * (1.0 - 1e-9) - 1e-9 >= -math.log(chance):
            low = middle
        else:
            high = middle - 1
    return low
