"""The Gaussian certificate: a noise multiplier at which the Binomial round is at least as private as a Gaussian.

Let F and f be the distribution and mass function of Binomial(N, p), Φ and φ those of the standard normal law and
q = Φ^-1. On a range of integers put

    μ₁ = max over z of  f(z) / min(φ(q(F(z - 1))), φ(q(F(z)))).

If two neighbours are u and u' = u + t in lattice units, then, on outputs within the range, the pair is
(μ₁ ‖t‖₂)-GDP in the sense of Dong, Roth and Su ("Gaussian Differential Privacy", 2022), because

1. The trade-off curve of one coordinate is decided at its vertices. The likelihood ratio is monotone, so optimal
   tests are thresholds z, and the curve lies above that of N(0, 1) against N(μ, 1) if, at every threshold,
   q(F(z)) - q(F_t(z)) <= μ: between vertices it is a chord, and chords of a convex curve lie above the curve.
2. For 0 <= t <= 1, F_t(z) = F(z) - t f(z), and q(F(z)) - q(F_t(z)) is the integral of q' = 1/φ(q) over an interval
   of length t f(z) inside [F(z - 1), F(z)]. φ(q(.)) is concave, so on an interval it is smallest at an end: the
   difference is at most μ₁ t. Larger t are sums of such steps; negative ones are mirrored.
3. Coordinates are independent, and Gaussian trade-off curves compose as √Σμ².

The range has to leave out the far tails, where the quotient grows without bound. Outputs are clamped in thought: of an
event, the part inside the box is treated exactly, and the rest has at most the probability `tail_mass`, which is
added to δ. The full proofs are in docs/accounting.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtri

from cpsgd import _validate
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.privacy import _binomial
from cpsgd.privacy.adjacency import lattice_sensitivity

__all__ = ["GaussianCertificate", "gaussian_certificate", "lattice_sensitivity"]

SMALLEST_MASS = 1e-250
"""The smallest tail probability of one coordinate that is computed; below, floating point would underflow."""

# Assumed of scipy.special.ndtri(y) for 1e-290 <= y <= 1/2: within 1e-13 relative plus 1e-14 absolute of Φ^-1(y).
# The tests compare it with mpmath over that range.
_NDTRI_RELATIVE = 1e-13
_NDTRI_ABSOLUTE = 1e-14
# How much deeper than the allowed tail mass the window goes, in nats. Leaving the rest out of the (lower bounds
# on the) tail sums costs at most about e^-_DEPTH relative.
_DEPTH = 25.0


@dataclass(frozen=True)
class GaussianCertificate:
    """The round, on all but `tail_mass` of its outputs, is as private as a Gaussian mechanism with multiplier 1/μ.

    Attributes:
        mu: μ₁ S rounded up: the round is mu-GDP up to the tails.
        unit_mu: μ₁ rounded up, the same for a distance of one lattice unit.
        tail_mass: Upper bound on the probability, over all coordinates, of an output outside the certified range.
    """

    mu: float
    unit_mu: float
    tail_mass: float

    @property
    def noise_multiplier(self) -> float:
        """1/μ rounded down: standard deviation over sensitivity of the equivalent Gaussian mechanism."""
        return math.nextafter(1.0 / self.mu, 0.0)

    def tail_delta(self, epsilon: float) -> float:
        """What the tails add to δ at this ε: `tail_mass`, whatever ε is.

        Let A and B be the output laws of two neighbours, A* and B* the clamped ones and I the inside of the box. For
        any event E, A(E) <= A(E ∩ I) + A(not I), and on subsets of I clamped and unclamped laws are the same, so
        A(E ∩ I) = A*(E ∩ I) <= e^ε B*(E ∩ I) + δ(ε) = e^ε B(E ∩ I) + δ(ε) <= e^ε B(E) + δ(ε). The usual argument by
        total variation, which would give tail_mass (1 + e^ε), is not needed.
        """
        del epsilon
        return self.tail_mass


def gaussian_certificate(
    *, noise_trials: int, p: float, dim: int, sensitivity: float, levels: int, tail: float
) -> GaussianCertificate:
    """The Gaussian certificate of a round whose sum carries Binomial(N, p) noise in every coordinate.

    Args:
        noise_trials: N = m times the number of honest clients whose noise is in the sum.
        p: Success probability of the noise.
        dim: d.
        sensitivity: S, the largest Euclidean distance of neighbours in lattice units (`lattice_sensitivity`).
        levels: k. No coordinate of neighbours differs by more than k - 1.
        tail: Probability, over all coordinates together, that may be left outside the certified range.

    Returns:
        The certificate; all its numbers are upper bounds, also in floating point.

    Raises:
        ConditionError: The range that holds all but `tail` of the noise reaches 0 or N.

    Example:
        >>> certificate = gaussian_certificate(
        ...     noise_trials=160_000, p=0.5, dim=65_536, sensitivity=1.0, levels=2, tail=1e-14
        ... )
        >>> round(certificate.unit_mu * 200, 4)  # 200 is the standard deviation: 2.3 % over a Gaussian
        1.0231
    """
    p, steps = _check(noise_trials, p, dim, sensitivity, levels, tail)
    law = _binomial.window(noise_trials, p, math.log(2.0 * dim / tail) + _DEPTH, margin=steps)
    low, high, mass = _central_range(law, tail / dim)
    if low - steps < 1 or high + steps > noise_trials - 1:
        raise ConditionError(
            f"No Gaussian certificate for N={noise_trials}, p={p:g}: all but {tail:.3g} of the noise in {dim} "
            f"coordinates lies in [{low}, {high}], and that range, widened by the {steps} lattice units two "
            f"neighbours may differ by, must stay inside [1, N - 1]. {_remedy(noise_trials, p, dim, steps, tail)}"
        )
    unit_mu = _unit_mu(law, low - steps, high + steps)
    return GaussianCertificate(
        mu=unit_mu * sensitivity * (1.0 + 2.0**-52),
        unit_mu=unit_mu,
        tail_mass=dim * mass * (1.0 + 2.0**-52),
    )


def _check(noise_trials: int, p: float, dim: int, sensitivity: float, levels: int, tail: float) -> tuple[float, int]:
    """Validates; returns p and T = ⌈min(k - 1, S)⌉, the unit steps between two neighbours' coordinates."""
    if _validate.integer("noise_trials", noise_trials, low=0) == 0:
        raise ConditionError("No noise arrived (N = 0), so there is no privacy: raise trials or honest clients.")
    _validate.integer("dim", dim, low=1)
    _validate.integer("levels", levels, low=2)
    _validate.positive("sensitivity", sensitivity)
    if _validate.probability("tail", tail) < SMALLEST_MASS * dim:
        raise ParameterError(f"Expected tail >= {SMALLEST_MASS:g} per coordinate, got tail={tail!r} for dim={dim}.")
    return _validate.probability("p", p), math.ceil(min(levels - 1, sensitivity))


def _central_range(law: _binomial.Window, mass: float) -> tuple[int, int, float]:
    """The narrowest [a, b] with P(Z < a) and P(Z > b) at most mass/2 each, and a bound on P(Z not in [a, b])."""
    left = law.below * (1.0 + law.error) + law.outside_below
    right = law.above * (1.0 + law.error) + law.outside_above
    below = int(np.searchsorted(left, 0.5 * mass, side="right"))
    above = int(np.searchsorted(right[::-1], 0.5 * mass, side="right"))
    # `below` points lie left of a; `right` is P(Z > z), so b itself is the first of the `above` points.
    left_out = float(left[below - 1]) if below else law.outside_below
    right_out = float(right[-above]) if above else law.outside_above
    return law.first + below, law.last - max(above - 1, 0), (left_out + right_out) * (1.0 + 2.0**-52)


def _unit_mu(law: _binomial.Window, low: int, high: int) -> float:
    """Upper bound on max over z in [low, high] of f(z) / min(φ(q(F(z - 1))), φ(q(F(z)))); needs F(low - 1) > 0."""
    if low - 1 < law.first or high > law.last:
        raise ConditionError(
            f"No Gaussian certificate: the range [{low}, {high}] reaches probabilities under {SMALLEST_MASS:g}. "
            "The noise is too small against the number of levels; add noise or use fewer levels."
        )
    ends = slice(low - 1 - law.first, high + 1 - law.first)
    below, above = law.below[ends], law.above[ends]
    # Lower bound on min(F, 1 - F). Each is summed from its own end, so the smaller of the two is accurate.
    side = np.minimum(below, above) * (1.0 - 2.0 * law.error)
    # Upper bound on |q|, hence a lower bound on φ(q), which falls with |q|.
    quantile = -ndtri(np.minimum(side, 0.5)) * (1.0 + _NDTRI_RELATIVE) + _NDTRI_ABSOLUTE
    inverse_density = math.sqrt(2.0 * math.pi) * np.exp(0.5 * quantile * quantile)
    mass = law.mass[low - law.first : high + 1 - law.first]
    largest = float(np.max(mass * np.maximum(inverse_density[:-1], inverse_density[1:])))
    # 1e-12 covers the roundings of the last four lines (the exponent is under 700).
    return largest * (1.0 + 2.0 * law.error + 1e-12)


def _remedy(noise_trials: int, p: float, dim: int, steps: int, tail: float) -> str:
    """Says how much noise would do."""

    def fits(trials: int) -> bool:
        law = _binomial.window(trials, p, math.log(2.0 * dim / tail) + 1.0, margin=steps)
        low, high, _ = _central_range(law, tail / dim)
        return low - steps >= 1 and high + steps <= trials - 1

    enough = noise_trials
    while not fits(enough):
        enough *= 2
    short = noise_trials
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if fits(middle) else (middle, enough)
    return f"N={enough} would do, or a larger tail."
