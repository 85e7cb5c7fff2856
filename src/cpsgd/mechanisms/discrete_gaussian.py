"""Stochastic rounding to k levels plus discrete Gaussian noise: N_Z(0, v) has masses in proportion to e^(-j²/(2v)).

(Kairouz, Liu, Steinke: "The Distributed Discrete Gaussian Mechanism for Federated Learning with Secure Aggregation",
ICML 2021.) The sum of n clients' noise is not a discrete Gaussian, but log-concave, which is all our certificates need.
Its masses f_n are computed in one of two ways.

**Close to a discrete Gaussian.** Integers x with the sum z are z/n in each place plus a vector y orthogonal to
(1, ..., 1), and so

    f_n(z) ∝ e^(-z²/(2 n v)) C(z),   C(z) = Σ e^(-|y|²/(2v)) over y in a coset of the root lattice A_{n-1}.

By Poisson's summation formula C(z) is, up to a constant, 1 + Σ e^(-2π²v|w|²) cos(2π w·y) over the other points w of the
dual lattice: within 1 ± τ, where 1 + τ is the same sum with all cosines 1. Written as an integral over the torus,

    1 + τ = E[(1 + q(T))^n; |T| <= π],   T ~ N(0, 1/(n v)),   q(t) = 2 Σ_{k>=1} e^(-2π²vk²) cosh(2πvkt),

which `closeness` bounds from above by a sum over cells. This is sharper than the authors' bound on the same ratio.

**Convolution**, where v is so small that τ is not: by repeated squaring, f_k with f_k is f_2k, f_2k with f_1 is f_2k+1.
All terms are positive, so that relative errors only add up. Masses outside of the windows convolved are left out.
Given the sum z of X and Y, log-concave and independent, X rises stochastically with z (Efron 1965), so that the share
P(|X| > R | z) that is lost is largest at the window's end; there it is a sum that falls faster than a geometric one.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from decimal import Decimal, localcontext
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.rounding import WORKING_BITS, Table
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import lattice
from cpsgd.mechanisms.law import Array, Window, window_of_ratios
from cpsgd.mechanisms.symmetric import MAX_SIZE, Symmetric, SymmetricLaw, SymmetricNoise
from cpsgd.randomness import Keystream

# From here on the noise's variance is v to all digits: 1 - 8π²v e^(-2π²v) + ... of it.
_FINE = 4.0
# A sum is taken for a discrete Gaussian where it is as close to one; windows up to these are convolved otherwise.
_CLOSE, _QUICK = 2.0**-34, 8_000
_CLOSE_ENOUGH, _MOST_CONVOLVED = 1e-7, 40_000
# Masses and what is left out of a convolution, relative to the largest and to the result.
_SMALLEST_MASS, _LOST_NATS, _MOST_LOST = 1e-280, 40.0, 1e-15
# Longer sums of products would be split among threads, which takes longer on a busy machine.
_PIECE = 4096
_DIGITS = 150
_UNIT = 2.0**-53
# Outcomes of a sum beyond this many nats are not drawn.
_DRAWN_NATS = 100.0


@dataclass(frozen=True)
class DiscreteGaussianNoise(SymmetricNoise):
    """A client's noise: the discrete Gaussian N_Z(0, v)."""

    size_name = "sigma_squared"

    @property
    def variance(self) -> float:
        """The variance of N_Z(0, v)."""
        return integer_variance(self.size)

    def sum_law(self, honest: int) -> DiscreteGaussianLaw:
        """Returns the law of the summed noise of `honest` clients, shifts included."""
        return DiscreteGaussianLaw(honest, self.size, self.limit)

    def cumulant(self, slope: float) -> float:
        """Returns the upper bound λ²v/2 on the cumulant, which is that of a continuous Gaussian."""
        return 0.5 * self.size * slope * slope

    @staticmethod
    def truncation(size: float, limit: int) -> float:
        """Returns Chernoff's bound, 2 e^(-(W+1)²/(2v))."""
        return min(1.0, 2.0 * math.exp(-((limit + 1) ** 2) / (2.0 * size) * (1.0 - 1e-12)) * (1.0 + 1e-12))

    @staticmethod
    def thresholds(size: float, limit: int) -> Table:
        """Returns the sampler's thresholds, computed from masses in high precision."""
        return table(size, limit)

    def of_sum(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64]:
        """Draws from the law of the sum, in parts of not too large a variance.

        These draws have the precision of the law's window, which is less than that of a client's own draws.
        """
        noise = np.full(dim, count * self.limit, dtype=np.int64)
        most = max(1, math.floor(MAX_SIZE / self.size)) if self.size else 1
        left = count if self.size else 0
        while left > 0:
            part = min(left, most)
            thresholds = sum_table(self.size, part)
            reach = len(thresholds.high) // 2
            noise += lattice.draw(thresholds, 2 * reach, dim, keystream).astype(np.int64) - reach
            left -= part
        return noise

    def sum_variation(self, count: int) -> float:
        """Returns 1, the trivial bound: windows have float64 precision only, so `of_clients` is used for releases."""
        return 1.0 if self.size else 0.0


@dataclass(frozen=True, kw_only=True)
class DiscreteGaussian(Symmetric):
    """k levels and discrete Gaussian noise.

    Attributes:
        sigma_squared: σ² of a client's noise N_Z(0, σ²), in squared levels; 0 is rounding without noise. Its variance
            is a little smaller: by 2e-7 of it at σ² = 1, by three tenths at σ² = 0.2.

    Example:
        >>> from cpsgd.mechanisms import DiscreteGaussian
        >>> print(DiscreteGaussian(levels=16, sigma_squared=25.0, coordinate_range=0.1, noise_limit=60).describe())
        k = 16 levels in ±0.1, discrete Gaussian noise of variance 25 within ±60
    """

    name = "discrete-gaussian"
    title = "rounding and discrete Gaussian noise"
    summary = (
        "k = {levels:,} levels in ±{coordinate_range:.4g}, discrete Gaussian noise of variance {sigma_squared:.6g} "
        "within ±{noise_limit:,}"
    )
    noise_type = DiscreteGaussianNoise
    least_size = 2.0**-6

    sigma_squared: float


def integer_variance(variance: float) -> float:
    """Returns the variance of N_Z(0, v)."""
    if variance >= _FINE or variance == 0.0:
        return variance
    squares = np.arange(1.0, math.sqrt(1500.0 * variance) + 2.0) ** 2
    masses = np.exp(-0.5 * squares / variance)
    return float(2.0 * (squares @ masses) / (1.0 + 2.0 * masses.sum()))


def _masses(variance: float, count: int) -> list[Decimal]:
    """Returns e^(-j²/(2v)) for j = 0, ..., count - 1, with v the exact fraction that the float is."""
    with localcontext() as context:
        context.prec = _DIGITS
        ratio = (Decimal(-1) / (2 * Decimal(variance))).exp()
        square, found = ratio * ratio, [Decimal(1)]
        for _ in range(1, count):
            found.append(found[-1] * ratio)
            ratio *= square
    return found


@lru_cache(maxsize=16)
def table(variance: float, limit: int) -> Table:
    """Returns the thresholds of the outcomes 0, ..., 2W, which mean -W, ..., W."""
    with localcontext() as context:
        context.prec = _DIGITS
        weights = [int(mass * (1 << WORKING_BITS)) for mass in _masses(variance, limit + 1)]
    return Table.of_weights(0, weights[:0:-1] + weights)


@lru_cache(maxsize=16)
def sum_table(variance: float, clients: int) -> Table:
    """Returns the thresholds of a sum's outcomes, with the precision of a window; the middle outcome means 0."""
    masses = DiscreteGaussianLaw(clients, variance, 0).window(_DRAWN_NATS).mass
    return Table.of_weights(0, [int(math.ldexp(mass, 1000)) >> (1000 - WORKING_BITS) for mass in masses])


# ---------------------------------------------------------------------- the law


@dataclass(frozen=True)
class DiscreteGaussianLaw(SymmetricLaw):
    """The sum of `parts` discrete Gaussians N_Z(0, v), moved up by W each."""

    @property
    def variance(self) -> float:  # type: ignore[override]
        """The variance of all clients, rounded down."""
        return self.parts * integer_variance(self.each) * (1.0 - 1e-12)

    def __str__(self) -> str:
        return f"the sum of {self.parts} discrete Gaussians with variance {self.each:g} each"

    def window(self, nats: float, margin: int = 0) -> Window:
        """Returns the window around the centre."""
        reach = self.half_window(nats, margin)
        ratios, error = self._ratios(reach + 1)
        outer = float(ratios[-1]) * (1.0 + 3.0 * error)
        found = window_of_ratios(self.parts * self.limit, ratios[:-1], ratios[:-1], outer, outer)
        # Each mass is off by the error relative to the centre's, which is off as much itself; so is the total.
        return replace(found, error=found.error + 4.1 * error)

    def step(self, points: Array, direction: int) -> tuple[Array, Array]:
        """Returns f(i - direction)/f(i) - 1 at each point i, and bounds on the relative errors, in units of 2^-53."""
        distance = (points - self.parts * self.limit) * direction
        index = np.abs(distance).astype(np.int64)
        ratios, error = self._ratios(int(index.max()) + 1)
        if index.max() >= len(ratios):
            raise ConditionError(f"Masses of {self} so far out are too small for floating point. Add noise.")
        towards = distance >= 1.0
        place = np.where(towards, index - 1, index)
        ratio = np.where(towards, 1.0 / ratios[place], ratios[place])
        # Taking 1 off costs up to one rounding of the difference, which is large relative to a small ratio.
        return ratio - 1.0, 2.1 * error / _UNIT + 8.0 + 2.0 / ratio

    def _ratios(self, count: int) -> tuple[Array, float]:
        """Returns f(j + 1)/f(j) for j < `count`, and a bound on the relative errors of f, beyond five roundings.

        Returns fewer ratios if masses are too small for floating point.
        """
        close = closeness(self.each, self.parts)
        if close > (_CLOSE if count <= _QUICK else _CLOSE_ENOUGH):
            if count > _MOST_CONVOLVED:
                raise ConditionError(
                    f"The masses of {self} are not computed: too many clients with too little noise each. Account for "
                    "fewer clients, which is only a loss, or add noise."
                )
            # More are computed than asked for, so that the next question is likely to be answered already.
            masses, error = convolved(self.each, self.parts, 1 << (count + 1).bit_length())
            masses = masses[: count + 1]
            return masses[1:] / masses[:-1], error
        # The exponents have three roundings each, and add up to less than 700 where masses are used.
        ratios = np.exp(-(np.arange(1.0, 2.0 * count, 2.0)) / (2.0 * self.parts * self.each))
        return ratios, 2.1 * close + 3000.0 * _UNIT


@lru_cache(maxsize=64)
def closeness(variance: float, clients: int) -> float:
    """Returns a bound on τ: the sum's masses f_n are within 1 ± τ of a discrete Gaussian's (this module's description).

    Rounded up; infinite where it is useless. The integral over T becomes a sum over cells of t. (1 + q(t))^n rises with
    |t|, so its value at the far end of a cell bounds it there.
    """
    if clients == 1:
        return 0.0
    # In standard deviations of T: small cells where its mass is, and then wider ones to the end of the torus.
    last = math.pi * math.sqrt(clients * variance)
    ends = np.unique(np.minimum(np.append(np.arange(0.0, 10.0, 0.01), np.geomspace(10.0, max(last, 10.1), 4000)), last))
    share = ends[1:] / last
    a = 2.0 * math.pi**2 * variance
    # 2 e^(-ak²) cosh(ak t/π) as two exponentials that do not overflow. Further k are below 1e-17 of the first.
    k = np.arange(1.0, 3.0 + math.sqrt(40.0 / a))[:, None]
    growth = clients * np.log1p((np.exp(-a * k * (k - share)) + np.exp(-a * k * (k + share))).sum(axis=0))
    from scipy.special import log_ndtr  # late: who only encodes does without SciPy

    beyond = log_ndtr(-ends)
    log_mass = math.log(2.0) + beyond[:-1] + np.log(-np.expm1(np.diff(beyond)))
    growth = np.maximum(growth, 1e-300)  # where it has vanished
    with np.errstate(over="ignore"):
        # log(e^g - 1) without cancellation or overflow.
        log_excess = np.where(growth < 1.0, np.log(np.expm1(np.minimum(growth, 1.0))), growth)
        excess = float(np.sum(np.exp(log_mass + log_excess)))
    # And 1 is more than the mass of the torus.
    return excess * (1.0 + 1e-6) - 2.0 * math.exp(float(beyond[-1])) * (1.0 - 1e-6)


@lru_cache(maxsize=8)
def convolved(variance: float, clients: int, reach: int) -> tuple[Array, float]:
    """Returns f_n(z)/f_n(0) for z = 0, ..., `reach` by convolution, and a bound on the relative errors.

    Returns fewer masses if the rest are too small for floating point, or if too much of their sums was cut off.
    """
    count = math.floor(math.sqrt(-2.0 * variance * math.log(_SMALLEST_MASS))) + 1
    single = np.array([float(mass) for mass in _masses(variance, count + 1)])
    spread = integer_variance(variance)
    sizes = []
    while clients > 1:
        # Given the sum of two halves, one of them has about half its value, and half its own variance.
        half = clients // 2
        both = reach + count * (clients % 2)
        sizes.append((clients % 2, both, reach))
        clients, reach = half, math.ceil(0.5 * both + math.sqrt(_LOST_NATS * (half * spread + 0.5 * both)) + 2.0)
    found, error = single, 2.0 * _UNIT
    for odd, both, one_more in reversed(sizes):
        found, error = _sum(found, error, found, error, both)
        if odd:
            found, error = _sum(single, 2.0 * _UNIT, found, error, one_more)
    found.flags.writeable = False
    return found, error


def _sum(x: Array, x_error: float, y: Array, y_error: float, reach: int) -> tuple[Array, float]:
    """Returns the law of X + Y, both symmetric and log-concave, from masses at 0, 1, ... and their relative errors."""
    a, b = len(x) - 1, len(y) - 1
    reach = min(reach, a + b)
    wide = np.zeros(2 * a + reach + 1)
    places = np.abs(np.arange(-a, a + reach + 1))
    wide[places <= b] = y[places[places <= b]]
    both = np.concatenate([x[:0:-1], x])
    found = np.zeros(reach + 1)
    for start in range(0, both.size, _PIECE):
        piece = both[start : start + _PIECE]
        found += np.correlate(wide[start : start + reach + piece.size], piece, mode="valid")
    found = found[: np.count_nonzero(found > _SMALLEST_MASS * found[0])]
    z = np.arange(1, len(found))
    lost = 2.0 * (_lost(x, y, z, found) + _lost(y, x, z, found)) * (1.0 + 1e-6)
    # What holds at one z holds at all smaller ones.
    enough = np.flatnonzero(lost <= _MOST_LOST)
    if not enough.size:
        raise ConditionError("The noise is too small for its masses to be computed. Add noise.")
    last = int(enough[-1]) + 1
    error = (x_error + y_error + (2 * a + 4) * _UNIT) * (1.0 + 1e-6) + float(lost[last - 1])
    return found[: last + 1] / found[0], error


def _lost(x: Array, y: Array, z: NDArray[np.int64], found: Array) -> Array:
    """Returns bounds on P(X > a | X + Y = z), a the last place of x.

    The terms P(X = j) P(Y = z - j) fall with j faster than geometrically. Where z - a is not inside y, the terms are
    among those that y's end leaves out.
    """
    a, b = len(x) - 1, len(y) - 1
    m = z - a
    inside = (m > -b) & (m <= b)
    at, next_ = np.abs(np.where(inside, m, 0)), np.abs(np.where(inside, m - 1, 0))
    ratio = x[a] / x[a - 1] * y[next_] / y[at] * (1.0 + 1e-6)
    with np.errstate(divide="ignore"):
        bound = np.where(ratio < 1.0, x[a] * y[at] * ratio / (1.0 - ratio) / found[z], np.inf)
    return np.where(inside, bound, 0.0)
