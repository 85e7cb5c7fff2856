"""Checks of the smoothed certificate that return what is wrong, as a list of sentences.

The tests ask for empty lists; the mutation test spoils the package on purpose and asks for lists that are not empty. So
everything is looked up in its module at the time of the call.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import mpmath
import numpy as np

from cpsgd.codec._kernels import accounting_twin
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.law import Law, Steps
from cpsgd.mechanisms.skellam import SkellamLaw
from cpsgd.privacy import curves, smoothed
from cpsgd.privacy.proofs import certified_smooth as products
from cpsgd.privacy.proofs.certified_gaussian import GaussianCertificate

from . import product_oracle as oracle
from .product_oracle import Array, Exact, Pair


def coins(theta: float, clients: int, copies: int = 1) -> Steps:
    return Steps((0.5 + theta, 0.5 - theta), (0.5 - theta, 0.5 + theta), clients, copies)


def sampled_coins(rate: float, theta: float, clients: int) -> Steps:
    low = (rate * (0.5 + theta), 1.0 - rate, rate * (0.5 - theta))
    return Steps(low, low[::-1], clients)


def sides(ones: int, others: int) -> list[float]:
    """So many clients at 1, the rest at -1."""
    return [1.0] * ones + [-1.0] * (others - ones)


# ---------------------------------------------------------------------- products of coordinates by enumeration


@dataclass(frozen=True, eq=False)
class Product:
    """Neighbours' laws in all coordinates, copies and rounds, and what the certificate is asked for them."""

    name: str
    law: Law | Steps
    pairs: Sequence[Pair]
    dim: int
    sensitivity: float
    reach: float
    tail: float
    rounds: int = 1

    def certificate(self) -> GaussianCertificate:
        return products.smoothed_certificate(
            self.law,
            dim=self.dim,
            sensitivity=self.sensitivity,
            reach=self.reach,
            tail=self.tail,
            rounds=self.rounds,
        )


def violations(product: Product, points: int = 61) -> list[str]:
    """Where the exact divergence is over what the certificate says."""
    found = product.certificate()
    logs = np.linspace(-6.0, 6.0, points) * max(found.mu, 0.05)
    gammas = np.exp(logs[np.abs(logs) < 25.0])
    wrong = oracle.violations(product.pairs, found.mu, found.tail_mass, gammas)
    return [f"{product.name}, {product.law}: {sentence}" for sentence in wrong]


def few_products() -> list[Product]:
    """Cases with little slack, of every kind."""
    fair, skewed = oracle.binomial_masses(60, 0.5), oracle.binomial_masses(50, 0.3)
    wide, three = oracle.skellam_masses(SkellamLaw(3, 4.0, 500).variance), math.sqrt(3.0) * (1.0 + 1e-12)
    even, odd = coins(0.3, 30, copies=2), sampled_coins(0.5, 0.4, 25)
    together = [
        oracle.step_pair(even.low, even.high, sides(k, 29), x, x - 2.0 if x > 0.0 else x + 2.0)
        for x, k in ((-1.0, 0), (-1.0, 0), (1.0, 29), (1.0, 29))
    ]
    apart = [
        oracle.step_pair(odd.low, odd.high, sides(k, 24), -1.0, -1.0 + t) for k, t in ((0, 1.0), (24, 0.8), (9, 0.6))
    ]
    return [
        Product(
            "equal distances", BinomialLaw(60, 0.5), [oracle.lattice_pair(fair, 0.0, 1.0)] * 3, 3, three, 1.0, 1e-9
        ),
        Product("two rounds", BinomialLaw(60, 0.5), [oracle.lattice_pair(fair, 0.0, 2.0)] * 4, 2, 2.83, 2.0, 1e-6, 2),
        Product(
            "skewed",
            BinomialLaw(50, 0.3),
            [oracle.lattice_pair(skewed, u, v) for u, v in ((0.0, 1.7), (1.7, 0.0), (2.0, 0.3))],
            3,
            1.7 * three,
            1.7,
            1e-4,
        ),
        Product(
            "between levels",
            SkellamLaw(3, 4.0, 500),
            [oracle.lattice_pair(wide, u, v) for u, v in ((0.4, 1.4), (0.9, 0.0), (1.0, 2.0))],
            3,
            three,
            1.0,
            1e-7,
        ),
        Product("two coins", even, together, 2, 2.0 * math.sqrt(2.0), 2.0, 1e-9),
        Product("sampled coins, zero-out", odd, apart, 3, math.sqrt(2.0) * (1.0 + 1e-12), 1.0, 1e-9),
    ]


def wrong_products(products: Sequence[Product] | None = None) -> list[str]:
    """Enumerates all outcomes of some products, a few if none are given."""
    chosen = few_products() if products is None else products
    return [sentence for product in chosen for sentence in violations(product)]


def wrong_repetitions() -> list[str]:
    """Two clients with a hundred coins, or in a hundred rounds: few outcomes, so all is exact, and much to smooth."""
    wrong = []
    for theta, copies, rounds, t in ((0.1, 100, 1, 2.0), (0.3, 1, 100, 2.0), (0.25, 10, 10, 1.0)):
        law = coins(theta, 2, copies)
        found = products.smoothed_certificate(law, dim=1, sensitivity=t, reach=t, tail=1e-9, rounds=rounds)
        logs = np.linspace(-6.0, 6.0, 121) * found.mu
        gammas = np.exp(logs[np.abs(logs) < 25.0])
        allowed = oracle.gaussian_divergences(found.mu, gammas) + found.tail_mass * np.minimum(1.0, gammas)
        tightest = 0.0
        for ones in (0, 1):
            pair = oracle.step_pair(law.low, law.high, sides(ones, 1), -1.0 + t, -1.0)
            for order in (pair, pair[::-1]):
                exact = oracle.repeated_divergences(order, copies * rounds, gammas)
                if np.any(exact > allowed + 1e-11 * (1.0 + gammas)):
                    wrong.append(
                        f"{law} in {rounds} rounds: H is up to {np.max(exact / allowed):.6g} of what is allowed"
                    )
                tightest = max(tightest, float(np.max(exact / allowed)))
        if tightest < 0.9:
            wrong.append(f"{law} in {rounds} rounds: H is nowhere over {tightest:.6g} of what is allowed")
    return wrong


def random_products(count: int, seed: int) -> list[Product]:
    """Products of all kinds: d <= 3, up to 150 coins or clients, all K, adversarial splits, both adjacencies."""
    rng = np.random.default_rng(seed)
    return [_random_lattice(rng) if rng.random() < 0.5 else _random_steps(rng) for _ in range(count)]


def _distances(rng: np.random.Generator, dim: int, sensitivity: float, reach: float) -> list[float]:
    shapes = [np.ones(dim), rng.exponential(size=dim), np.append(1.0, np.full(dim - 1, 1e-3)), rng.uniform(0.2, 1, dim)]
    shape = shapes[rng.integers(len(shapes))]
    return [
        float(t) for t in np.minimum(shape * sensitivity / math.sqrt(float(shape @ shape)), min(reach, sensitivity))
    ]


def _random_lattice(rng: np.random.Generator) -> Product:
    dim = int(rng.integers(1, 4))
    law: Law
    if rng.random() < 0.3:
        law = SkellamLaw(1, float(rng.uniform(1.0, 30.0)), 1000)
        noise = oracle.skellam_masses(law.variance)
    else:
        trials, p = int(rng.integers(3, 150 if dim < 3 else 60)), float(rng.choice([0.5, rng.uniform(0.1, 0.9)]))
        law, noise = BinomialLaw(trials, p), oracle.binomial_masses(trials, p)
    reach = float(rng.choice([0.3, 1.0, 1.7, 2.0, 3.0, 4.0]))
    sensitivity = float(rng.uniform(0.3, 1.0) * reach * math.sqrt(dim))
    pairs = []
    for t in _distances(rng, dim, sensitivity, reach):
        u = float(rng.integers(0, 2)) if rng.random() < 0.6 else float(rng.uniform(0.0, 2.0))
        pairs.append(
            oracle.lattice_pair(noise, u, u + t) if rng.random() < 0.5 else oracle.lattice_pair(noise, u + t, u)
        )
    tail = float(10.0 ** rng.uniform(-9.0, -2.0))
    return Product("random", law, pairs, dim, sensitivity * (1.0 + 1e-12), reach, tail)


def _random_steps(rng: np.random.Generator) -> Product:
    dim = int(rng.integers(1, 4))
    clients, theta = int(rng.integers(2, 150 if dim < 3 else 40)), float(rng.choice([0.01, 0.1, 0.25, 0.4, 0.45]))
    law = coins(theta, clients, int(rng.integers(1, 3)) if dim == 1 else 1)
    if rng.random() < 0.5:
        law = sampled_coins(float(rng.choice([0.05, 0.3, 0.6, 2 / 3])), theta, clients)
    reach = float(rng.choice([1.0, 2.0]))
    sensitivity = float(rng.uniform(0.3, 1.0) * reach * math.sqrt(dim))
    pairs = []
    for t in _distances(rng, dim, sensitivity, reach):
        x = -1.0 if rng.random() < 0.6 else float(rng.uniform(-1.0, 1.0 - t))
        ends = (x, x + t) if rng.random() < 0.5 else (-x, -x - t)
        for _ in range(law.copies):
            others = sides(int(rng.choice([0, clients - 1, (clients - 1) // 2, rng.integers(0, clients)])), clients - 1)
            if rng.random() < 0.2:
                others = [float(place) for place in rng.uniform(-1.0, 1.0, clients - 1)]
            pairs.append(oracle.step_pair(law.low, law.high, others, *ends))
    tail = float(10.0 ** rng.uniform(-9.0, -2.0))
    return Product("random", law, pairs, dim, sensitivity * (1.0 + 1e-12), reach, tail)


def wrong_random_products(cases: Sequence[Product]) -> tuple[list[str], int]:
    """What is wrong, and how many of the cases got a certificate."""
    wrong, accepted = [], 0
    for product in cases:
        try:
            wrong += violations(product, points=41)
        except ConditionError:
            continue
        accepted += 1
    return wrong, accepted


# ---------------------------------------------------------------------- curves against sums over all outcomes


def interpolated(curve: curves.Curve, s: Array) -> Array:
    """The bounds, with straight lines in s between them and nothing outside."""
    return np.interp(s, np.exp(curve.log_ratios), curve.excess, left=0.0, right=0.0)


def exact_excess(pair: Pair, s: Array) -> Array:
    return np.array([np.maximum(pair[0] - x * pair[1], 0.0).sum() for x in s]) - np.maximum(0.0, 1.0 - s)


def _under(name: str, families: Sequence[curves.Family], pairs: Sequence[Pair], t: float) -> list[str]:
    """Whether each pair lies under a curve at this distance, apart from the tail, and the curves not far above all."""
    wrong, tail = [], families[0].tail
    found = [c for family in families for c in (family.first, *family.others) if c.distance == t]
    s = np.exp(np.linspace(-1.2, 1.2, 201) * float(np.max(np.abs(found[0].log_ratios))))
    exact = np.array([exact_excess(pair, s) for pair in pairs])
    curve = np.max([interpolated(c, s) for c in found], axis=0)
    for row in exact:
        over = row - curve - tail * np.minimum(1.0, s) - 1e-13 * (1.0 + s)
        if np.max(over) > 0.0:
            wrong.append(f"{name} at {t}: an excess is {np.max(over):.3g} over its bound at s={s[np.argmax(over)]:.6g}")
    if np.max(curve - 1.35 * exact.max(axis=0) - tail - 2e-3 * exact.max()) > 0.0:
        wrong.append(f"{name} at {t}: the bound is far above all excesses")
    return wrong


def wrong_curves() -> list[str]:
    """Curves of laws and of all K, at several distances."""
    wrong = []
    for trials, p in ((40, 0.5), (100, 0.3), (80, 0.75)):
        noise, reach = oracle.binomial_masses(trials, p), 2.5
        families = curves.of_law(BinomialLaw(trials, p), reach=reach, tail=1e-4)
        for t in (1.0, 2.0, 2.5):
            pairs = [oracle.lattice_pair(noise, t, 0.0), oracle.lattice_pair(noise, 3.0 - t, 3.0)]
            wrong += _under(f"Binomial({trials}, {p})", families, pairs, t)
    for law in (coins(0.3, 21), sampled_coins(0.3, 0.45, 16)):
        others = law.clients - 1
        pairs = [oracle.step_pair(law.low, law.high, sides(k, others), 1.0, -1.0) for k in range(others + 1)]
        wrong += _under(str(law), curves.of_steps(law, reach=2.0, tail=1e-8), pairs, 2.0)
    return wrong


def wrong_blocks() -> list[str]:
    """A block of unknown sides, against the mixture over all F of what is left when F is told."""
    wrong = []
    for law, free in ((coins(0.2, 61), 20), (sampled_coins(0.4, 0.3, 61), 20)):
        low, high = np.array(law.low), np.array(law.high)
        shared = np.minimum(low, high)
        rho, base = float(shared.sum()), oracle.step_sum(law.low, law.high, sides(20, 40))
        s = np.exp(np.linspace(-1.0, 1.0, 41))
        exact = np.zeros(len(s))
        for told, weight in enumerate(oracle.binomial_masses(free, rho)):
            rest = base
            for _ in range(told):
                rest = np.convolve(rest, shared / rho)
            exact += weight * exact_excess((np.convolve(rest, high), np.convolve(rest, low)), s)
        kept, untold = curves._common(low, high, free, 1e-14)
        bound = np.full(len(s), untold)
        for weight, power in kept:
            rest = np.convolve(base, power.mass)
            bound += weight * exact_excess((np.convolve(rest, high), np.convolve(rest, low)), s) + power.lost
        if np.max(exact - bound) > 1e-12:
            wrong.append(f"{law}: a block's excess is {np.max(exact - bound):.3g} over its bound")
        if np.max(bound - 1.5 * exact) > 1e-6:
            wrong.append(f"{law}: a block's bound is far above its excess")
    return wrong


def wrong_covers() -> list[str]:
    """Blocks cover every K, with the clients at -1 as many as the mirrored ones at 1."""
    wrong = []
    for others in (1, 2, 31, 33, 320, 321, 1000, 9_999):
        edges = curves._edges(others, 0.5 * math.sqrt(others))
        if edges[0] != 0 or edges[-1] != others or np.any(np.diff(edges) < 1):
            wrong.append(f"edges of {others} do not cover all K")
        if not np.array_equal(edges + edges[::-1], np.full(len(edges), others)):
            wrong.append(f"edges of {others} are not symmetric")
    return wrong


def wrong_tails() -> list[str]:
    """What curves leave out of a coordinate, against what each coordinate is charged."""
    wrong = []
    for law, dim, rounds in ((coins(0.25, 61), 8, 1), (coins(0.25, 31, copies=4), 3, 2)):
        found = products.smoothed_certificate(law, dim=dim, sensitivity=2.0, reach=2.0, tail=1e-3, rounds=rounds)
        charged = found.tail_mass / (dim * rounds * law.copies)
        each = 1e-3 / (2.0 * dim * rounds * law.copies)
        families, others = curves.of_steps(law, reach=2.0, tail=each), law.clients - 1
        end = math.exp(max(float(family.first.log_ratios[-1]) for family in families))
        s = np.linspace(end * 1.000001, end * 1.2, 50)
        pairs = [oracle.step_pair(law.low, law.high, sides(k, others), 1.0, -1.0) for k in range(others + 1)]
        left_out = max(float(np.max(exact_excess(pair, s))) for pair in pairs)
        # The curve, and thresholds far out, each have their share.
        if not left_out + each <= charged * (1.0 + 1e-9):
            wrong.append(f"{law}: {left_out:.3g} + {each:.3g} is left out of a coordinate, {charged:.3g} is charged")
    return wrong


# ---------------------------------------------------------------------- κ with 50 digits


@dataclass(frozen=True, eq=False)
class Single:
    """The pairs of one coordinate, computed with 50 digits."""

    law: Law | Steps
    reach: float

    def families(self, tail: float) -> list[curves.Family]:
        make = curves.of_steps if isinstance(self.law, Steps) else curves.of_law
        return make(self.law, reach=self.reach, tail=tail)

    def pairs(self, t: float) -> list[tuple[Exact, Exact]]:
        if isinstance(self.law, Steps):
            others = self.law.clients - 1
            return [oracle.exact_steps(self.law.low, self.law.high, k, others, t) for k in (0, others // 2, others)]
        assert isinstance(self.law, BinomialLaw)
        noise = oracle.exact_binomial(self.law.trials, self.law.p)
        return [oracle.exact_shift(noise, t), oracle.exact_shift(noise[::-1], t)]


SINGLES = [
    (Single(BinomialLaw(60, 0.5), 1.0), 1e-13, 0.9),
    (Single(BinomialLaw(110, 0.3), 1.5), 1e-13, 0.8),
    (Single(coins(0.2, 10), 2.0), 1e-40, 0.6),
    (Single(sampled_coins(0.6, 0.3, 8), 1.0), 1e-40, 0.5),
]


def wrong_rates(singles: Sequence[tuple[Single, float, float]] = SINGLES) -> list[str]:
    """pair ⊗ G(w) against G(w + κ t²) at nodes w, with κ as `growth` has it; tails so small that they hide nothing."""
    wrong = []
    for single, tail, tight in singles:
        families = single.families(tail)
        around = 60.0 * single.reach**2 * max(smoothed.fisher(family) for family in families)
        found = smoothed.growth(families, around=around, tail=tail)
        slack, nearest = families[0].tail + tail, 0.0
        for i in (0, len(found.starts) // 2, len(found.starts) - 1):
            w, rate = float(found.starts[i]), float(found.rates[i])
            for t in (single.reach, 0.05 * single.reach):
                for pair in single.pairs(t):
                    for c in math.sqrt(w) * np.linspace(-8.0, 8.0, 17):
                        excess = oracle.smoothed_excess(pair, w, float(c))
                        allowed = oracle.gaussian_increment(w, rate * t * t, float(c))
                        if excess > allowed + slack * min(1.0, math.exp(c)):
                            wrong.append(
                                f"{single.law}: over by {float(excess / allowed)} at {w=:.4g}, {t=:.3g}, {c=:.3g}"
                            )
                        if slack < 1e-3 * excess:
                            nearest = max(nearest, float(excess / allowed))
        if nearest < tight:
            wrong.append(f"{single.law}: κ is {1.0 / nearest:.3f} times as large as anything needs")
        least = max(smoothed._Curves(family).rate(float(found.starts[0]), tail) for family in families)
        if not 0.999 * least <= found.rates[0]:
            wrong.append(f"{single.law}: κ is {found.rates[0]:.6g} at the first w, where {least:.6g} was computed")
    return wrong


# ---------------------------------------------------------------------- the pieces of κ by quadrature


def wrong_moments() -> list[str]:
    """R of a curve whose cells are wide, against 50 digits: bounds lie above, and not far."""
    wrong = []
    cases = [
        ([-1.5, -1.0, -0.5, 0.0, 0.2, 0.4, 0.8], [0.01, 0.05, 0.1, 0.3, 0.25, 0.2, 0.0]),
        ([-1.0, -0.5, 0.0, 0.2, 0.4], [0.0, 0.1, 0.3, 0.1, 0.0]),
        ([0.0, 0.4, 0.8], [0.3, 0.1, 0.0]),
    ]
    for x, e in cases:
        curve = curves.Curve(1.0, np.array(x), np.array(e))
        for w in (1.0, 50.0):
            end = 3.0 * math.sqrt(w)
            found = smoothed._moments([curve], w, end, 7)[0]
            for c, bound in zip(np.linspace(-end, end, 7), found, strict=True):
                exact = _moment(tuple(x), tuple(e), w, float(c))
                if not exact <= bound <= 1.35 * exact:
                    wrong.append(f"R is {mpmath.nstr(exact, 9)} at w={w}, c={c:.3g}, bounded by {bound:.9g}")
    return wrong


@functools.cache
def _moment(x: tuple[float, ...], e: tuple[float, ...], w: float, c: float) -> mpmath.mpf:
    with mpmath.workdps(30):

        def density(at: mpmath.mpf) -> mpmath.mpf:
            i = max(j for j in range(len(x) - 1) if x[j] <= at)
            s, s0, s1 = mpmath.exp(at), mpmath.exp(x[i]), mpmath.exp(x[i + 1])
            value = e[i] + (e[i + 1] - e[i]) * (s - s0) / (s1 - s0)
            return 2 * value * mpmath.exp(at * c / w - at * at / (2 * w) - at / 2)

        return mpmath.fsum(mpmath.quad(density, ends) for ends in itertools.pairwise(x))


def wrong_cells() -> list[str]:
    """Averages of ξ^j exp(yξ), for small and large y."""
    y = np.array([-20.0, -3.0, -1.01, -0.999, -0.3, 0.0, 1e-6, 0.5, 1.0, 1.001, 12.0])
    wrong = []
    for j, row in enumerate(accounting_twin.powers(y)):
        for at, value in zip(y, row, strict=True):
            exact = mpmath.quad(lambda x, j=j, at=at: x**j * mpmath.exp(float(at) * x), [-1, 0, 1]) / 2
            if abs(value - exact) > 1e-9 * abs(exact) + 1e-18:
                wrong.append(f"the average of ξ^{j} exp({at} ξ) is {value!r}, not {exact}")
    return wrong


def wrong_averages() -> list[str]:
    """Lower bounds on log J/Δ and their tangents, at the ends and in the middle of each interval of c."""
    wrong = []
    for w in (0.05, 1.0, 9.0):
        c = math.sqrt(w) * np.linspace(-6.0, 6.0, 9)
        widths = w * np.array([1e-4, 0.01, 0.1, 0.6, 3.0])
        value, bend = smoothed._averages(w, widths, c[:-1], c[1:])
        middle = 0.5 * (c[:-1] ** 2 + c[1:] ** 2)
        for i, width in enumerate(widths):
            for k in range(len(c) - 1):
                for at in (c[k], 0.5 * (c[k] + c[k + 1]), c[k + 1]):
                    exact = _log_average(w, float(width), float(at))
                    bound = value[i, k] + bend[i, k] * (at * at - middle[k])
                    if not bound <= exact:
                        wrong.append(
                            f"log J/Δ is {exact:.6g} at w={w}, Δ={width:.3g}, c={at:.3g}, not over {bound:.6g}"
                        )
                if exact - bound > 1.5:
                    wrong.append(f"the bound on log J/Δ at w={w}, Δ={width:.3g}, c={at:.3g} is far below it")
    return wrong


@functools.cache
def _log_average(w: float, width: float, c: float) -> float:
    def density(v: mpmath.mpf) -> mpmath.mpf:
        return mpmath.sqrt(w / v) * mpmath.exp(c * c / 2 * (1 / mpmath.mpf(w) - 1 / v) - (v - w) / 8)

    return float(mpmath.log(mpmath.quad(density, mpmath.linspace(w, w + width, 6)) / width))


# ---------------------------------------------------------------------- steps of w


def wrong_growth() -> list[str]:
    """Walks over tables of κ, with many splits of Σt²: `reached` must cover them, and `affordable` agree with it."""
    wrong = []
    tables = [
        (np.array([1.0, 1.2, 1.5, 2.0, 4.0]), np.array([3.0, 1.5, 1.2, 1.0, 0.9])),
        (np.array([0.1, 0.2, 0.3, 0.4, 3.0]), np.array([9.0, 4.0, 2.0, 1.0, 0.5])),
        (np.array([1.0]), np.array([1.0])),
    ]
    rng = np.random.default_rng(5)
    for starts, rates in tables:
        for reach in (0.1, 1.0, 2.0):
            growth = smoothed.Growth(starts, rates, reach)
            for budget in (0.3 * reach**2, 2.5 * reach**2, 7.0 * reach**2):
                claimed = growth.reached(budget)
                for first in range(len(starts)):
                    claim = growth._reached_from(first, budget)
                    for split in _splits(rng, budget, reach):
                        end = _walk(starts, rates, float(starts[first]), split)
                        if end > claim:
                            wrong.append(
                                f"a walk from {starts[first]} with {budget:.3g} ends at {end:.6g}, not {claim:.6g}"
                            )
                if not claimed <= claim:
                    wrong.append("the best start is not taken")
                if growth.affordable(claimed) > budget * (1.0 + 1e-9):
                    wrong.append(
                        f"{growth.affordable(claimed):.6g} is affordable up to {claimed:.6g}, not {budget:.6g}"
                    )
                for w in (starts[0] * 0.9, claimed):
                    allowed = growth.affordable(float(w))
                    if allowed > 0.0 and growth.reached(allowed) > w * (1.0 + 1e-9):
                        wrong.append(
                            f"with {allowed:.6g}, said to be affordable, {growth.reached(allowed):.6g} is reached"
                        )
    return wrong


def _splits(rng: np.random.Generator, budget: float, reach: float) -> list[list[float]]:
    """Squared distances of at most reach² that add up to the budget: large first, large last, small, random."""
    whole = int(budget / reach**2)
    large, rest = [reach**2] * whole, budget - whole * reach**2
    found = [[*large, rest], [rest, *large], [budget / 100] * 100]
    for share in rng.random(10):
        found.append([share * rest, *large, (1.0 - share) * rest])
        found.append([share * rest, *[budget / 40] * 20, *large])
    return [
        split if sum(split) <= budget * (1.0 + 1e-12) else [x * budget / sum(split) for x in split] for split in found
    ]


def _walk(starts: Array, rates: Array, w: float, squares: Sequence[float]) -> float:
    for square in squares:
        w += float(rates[np.searchsorted(starts, w, side="right") - 1]) * square
    return w
