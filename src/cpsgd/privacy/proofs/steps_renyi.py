"""Rényi divergences of sums without separate noise: better than smoothing where odds are far from even and δ is tiny.

A client's own integer has likelihood ratios of at most ρ = max high/low: all losses are bounded, and no output need be
left out. docs/proofs/bounded-losses.md has the proof ("Bounded losses").
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cpsgd._numbers import rounded_down
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Steps
from cpsgd.neighbours import Adjacency
from cpsgd.privacy import step_norms
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.privacy.proofs.certified_renyi import rdp_epsilon
from cpsgd.privacy.step_norms import Norms, StepSum
from cpsgd.run import Run

Array = NDArray[np.float64]

_ORDERS = (2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128)
_UNIT = 2.0**-53
# Distances at which divergences are summed up: each this much larger than the one before, and cut again in between.
_RATIO, _NODES, _BETWEEN = 1.18, 24, 16
# Others times outputs times distances times orders; about two seconds.
_MOST_WORK = 1.2e8
# Others times outputs where norms are counted: about a second. Shares of the first neighbour's norm that are tried.
_MOST_FOR_NORMS, _WEIGHTS = 60_000, (0.3, 0.4, 0.5, 0.6, 0.8, 1.0)
# Counting norms is worth its time where the result is this much smaller.
_WORTH = 1.1
# What underflow may hide of a mass, and of all; and the logarithm of the largest power of a ratio that is used.
_HIDDEN, _ALL_HIDDEN, _LARGEST_LOG = 1e-290, 1e-284, 300.0


@dataclass(frozen=True)
class StepsRenyi(Proof):
    """The Rényi divergence of all coordinates, each with the others' integers as its only noise."""

    name: str = "bounded-losses"
    citation: str = (
        "Rényi divergences of sums of bounded losses (docs/proofs/bounded-losses.md), converted by Canonne, Kamath "
        "and Steinke 2020, Proposition 12"
    )
    effort: int = 4

    def supports(self, run: Run) -> bool:
        """Returns whether clients' integers are their own noise, in rounds without sampling."""
        return isinstance(base.law_of(run), Steps) and (base.alone(run) or run.sampling.scheme == "every")

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the smallest ε over several Rényi orders."""
        law = base.law_of(run)
        assert isinstance(law, Steps)
        sensitivity = base.sensitivity(run)
        coordinates = base.counted(run) * law.copies
        budget = coordinates * sensitivity**2 * (1.0 + 1e-14)
        reach = min(run.protocol.reach(run.adjacency), sensitivity)

        norm = run.protocol.largest_norm
        norms = Norms(min(1.0, norm), zero=run.adjacency is Adjacency.ZERO_OUT)
        squares = coordinates * norm**2 * (1.0 + 1e-14)

        def prove(left: float) -> tuple[float, float]:
            every, found = coordinates * run.protocol.dim, below
            with suppress(ConditionError):
                found = bounded_epsilon(law, coordinates=every, budget=budget, reach=reach, delta=left, below=below)
            return norms_epsilon(law, norms=norms, squares=squares, delta=left, below=found), 0.0

        return Proved(*base.with_sampler(run, delta, prove), self.citation)


def bounded_epsilon(
    law: Steps, *, coordinates: int, budget: float, reach: float, delta: float, below: float = math.inf
) -> float:
    """Returns the smallest ε at this δ for coordinates at distances up to `reach` whose squares add up to `budget`.

    Raises:
        ConditionError: It could not come below `below`, or would take too long.

    Example:
        >>> coins = Steps(low=(0.95, 0.05), high=(0.05, 0.95), clients=20)
        >>> round(bounded_epsilon(coins, coordinates=1, budget=4.0, reach=2.0, delta=1e-12), 4)  # log(0.95/0.05)
        2.9444
    """
    low, high = np.array(law.low), np.array(law.high)
    if min(law.low) <= 0.0 or min(law.high) <= 0.0:
        raise ConditionError("A client's integer may tell its coordinate for sure.")
    largest = math.log(float(max(np.max(high / low), np.max(low / high)))) + 1e-12
    orders = [order for order in _ORDERS if (order + 3) * largest < _LARGEST_LOG]
    outputs = law.clients * (len(low) - 1) + 1
    if not orders or law.clients * outputs * _NODES * len(orders) > _MOST_WORK:
        raise ConditionError("Rényi divergences of so many integers would take too long.")
    # The worst for small distances come first: then most orders are given up after a few.
    pairs = sorted(_pairs(low, high, law.clients - 1), key=lambda pair: -float(pair[0] @ pair[1] ** 2))
    # As distances go to 0 a divergence over t² goes to α κ/2, so nothing less is ever proved.
    kappa = 0.25 * float(pairs[0][0] @ pairs[0][1] ** 2) * (1.0 - 1e-6)
    floors = {order: rdp_epsilon(budget * 0.5 * order * kappa, order, delta) for order in orders}
    if (floor := min(floors.values())) >= below:
        raise ConditionError(f"could not come below {rounded_down(floor)}, so not computed")
    error = (24.0 * law.clients + 128.0) * _UNIT
    found = min(below, _pure(largest, budget, reach, coordinates))
    for order in sorted(orders, key=lambda order: floors[order]):
        epsilon = floors[order]
        for mass, ratio in pairs:
            if epsilon >= found:
                break
            rate = _rate(mass, ratio, order, reach, error, largest)
            epsilon = max(epsilon, rdp_epsilon(budget * rate * (1.0 + 1e-12), order, delta))
        found = min(found, epsilon)
    if found >= below:
        raise ConditionError(f"does not come below {rounded_down(found)}")
    return found


def norms_epsilon(law: Steps, *, norms: Norms, squares: float, delta: float, below: float = math.inf) -> float:
    """Returns the smallest ε at this δ, at most `below`, for vectors whose squared norms add up to `squares`.

    Raises:
        ConditionError: Nothing is proved.

    Example:
        >>> coins = Steps(low=(0.95, 0.05), high=(0.05, 0.95), clients=20)
        >>> round(norms_epsilon(coins, norms=Norms(1.0), squares=1.0, delta=1e-12), 2)
        8.0
    """
    low, high = np.array(law.low), np.array(law.high)
    work = law.clients * (law.clients * (len(low) - 1) + 1)
    if min(law.low) > 0.0 and np.array_equal(low, high[::-1]) and work <= _MOST_FOR_NORMS and math.isfinite(squares):
        largest = math.log(float(np.max(high / low))) + 1e-12
        total = squares * (1.0 if norms.zero else 2.0)
        charging = [norms] if norms.zero else [replace(norms, weight=weight) for weight in _WEIGHTS]
        best = (below, 0, norms, 0.0)
        last = math.inf
        for order in (order for order in _ORDERS if (order + 3) * largest < _LARGEST_LOG):
            some = _backgrounds(low, high, law.clients - 1, order, largest)
            some = [some[0], some[len(some) // 2], some[-1]]
            rates = np.max([step_norms.attained(each, order, charging) for each in some], axis=0)
            place = int(np.argmin(rates))
            here = rdp_epsilon(total * float(rates[place]) * _WORTH, order, delta)
            best = min(best, (here, order, charging[place], float(rates[place])), key=lambda each: each[0])
            if here > last:
                break
            last = here
        _, order, norms, rate = best
        if order:
            every = _backgrounds(low, high, law.clients - 1, order, largest)
            rate = step_norms.bound(every, order, norms, rate)
            below = min(below, rdp_epsilon(total * rate * (1.0 + 1e-12), order, delta))
    if math.isinf(below):
        raise ConditionError("Rényi divergences of these integers are not computed.")
    return below


def _backgrounds(low: Array, high: Array, others: int, order: int, largest: float) -> list[StepSum]:
    """Returns the sums with up to half of the other clients at 1; sums with more are mirror images."""
    error = (48.0 * (others + 1) + 256.0) * _UNIT
    hidden = _ALL_HIDDEN * math.exp((order + 3) * largest)
    pairs = itertools.islice(_pairs(low, high, others), others // 2 + 1)
    return [StepSum(mass * (1.0 + 0.5 * moved), moved / (2.0 + moved), error, hidden) for mass, moved in pairs]


def _pure(largest: float, budget: float, reach: float, coordinates: int) -> float:
    """Returns the largest loss of all coordinates: log(1 + t (ρ - 1)/2) is concave in t², so an even split is worst."""
    step = min(math.sqrt(budget / coordinates), reach) * (1.0 + 1e-14)
    return coordinates * math.log1p(0.5 * math.expm1(largest) * step) * (1.0 + 1e-13)


def _pairs(low: Array, high: Array, others: int) -> Iterator[tuple[Array, Array]]:
    """Yields masses B with the client at -1, and A/B - 1 with the client at 1, for every number of others at 1."""
    lows, highs = [np.ones(1)], [np.ones(1)]
    for _ in range(others):
        lows.append(np.convolve(lows[-1], low))
        highs.append(np.convolve(highs[-1], high))
    for count in range(others + 1):
        rest = np.convolve(highs[count], lows[others - count])
        mass, moved = np.convolve(rest, low), np.convolve(rest, high)
        seen = (mass > _HIDDEN) & (moved > _HIDDEN)
        yield mass[seen], moved[seen] / mass[seen] - 1.0


def _rate(mass: Array, ratio: Array, order: int, reach: float, error: float, largest: float) -> float:
    """Returns an upper bound on D_α(t)/t², t up to `reach`, of both orders of the pair."""
    nodes = reach * _RATIO ** np.arange(1.0 - _NODES, 1.0)
    nodes[-1] = reach
    # Outputs that are left out have next to no mass, and ratios that are bounded.
    hidden = _ALL_HIDDEN * math.exp((order + 3) * largest)
    x = 0.5 * nodes[:, None] * ratio
    logs, off = np.log1p(x), 0.5 * nodes[:, None] * (1.0 + np.abs(ratio)) * error
    found = 0.0
    for power in (float(order), 1.0 - order):
        # φ(x) = (1+x)^p - 1 - p x >= 0, and Σ B x = 0: the sum of φ is M - 1.
        grown = np.exp(power * logs)
        terms = np.maximum(np.expm1(power * logs) - power * x, 0.0)
        slope = np.abs(power * np.expm1((power - 1.0) * logs)) + power * power * grown * off
        inexact = 2.0 * slope * off + 16.0 * _UNIT * (1.0 + abs(power) * (np.abs(x) + np.abs(logs) * grown) + grown)
        excess = np.maximum.accumulate(((terms + inexact) @ mass) * (1.0 + 4.0 * error) + hidden)
        # Up to the first distance: φ'' is largest at one of its ends.
        ends = np.maximum(1.0, grown[0] / (1.0 + x[0]) ** 2 * (1.0 + 1e-9))
        start = 0.125 * power * (power - 1.0) * float((ends * (np.abs(ratio) + 2.0 * error) ** 2) @ mass) * (1.0 + 1e-9)
        start += hidden / nodes[0] ** 2 * order**2
        found = max(found, start / (order - 1.0))
        # M is convex in t, so it lies under its chords.
        for i in range(_NODES - 1):
            cuts = np.linspace(nodes[i], nodes[i + 1], _BETWEEN + 1)
            chord = np.interp(cuts[1:], nodes[i : i + 2], excess[i : i + 2])
            found = max(found, float(np.max(np.log1p(chord) / cuts[:-1] ** 2)) / (order - 1.0))
    return found * (1.0 + 1e-12)


PROOFS = (StepsRenyi(),)
