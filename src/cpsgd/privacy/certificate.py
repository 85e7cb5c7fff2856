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
from cpsgd.privacy.gaussian import gdp_epsilon

__all__ = ["GaussianCertificate", "certified_epsilon", "gaussian_certificate", "lattice_sensitivity"]

SMALLEST_MASS = 1e-250
"""The smallest tail probability of one coordinate that is computed; below, floating point would underflow."""

# Assumed of scipy.special.ndtri(y) for 1e-290 <= y <= 1/2: within 1e-13 relative plus 1e-14 absolute of Φ^-1(y).
# The tests compare it with mpmath over that range.
_NDTRI_RELATIVE = 1e-13
_NDTRI_ABSOLUTE = 1e-14
_TAIL_SHARES = tuple(0.5**i for i in range(1, 21))
# How much deeper than the allowed tail mass the window goes, in nats. Leaving the rest out of the (lower bounds
# on the) tail sums costs at most about e^-_DEPTH relative.
_DEPTH = 25.0


@dataclass(frozen=True)
class GaussianCertificate:
    """The round, on all but `tail_mass` of its outputs, is as private as a Gaussian mechanism with multiplier 1/μ.

    Attributes:
        mu: μ₁ S rounded up: the round is mu-GDP up to the tails.
        unit_mu: μ₁ rounded up, the same for a distance of one lattice unit.
        tail_mass: Upper bound on the probability, over all coordinates, of an output outside the certified range. It is
            what the tails add to δ, whatever ε is: let A and B be the output laws of two neighbours, A* and B* the
            clamped ones and I the inside of the box. For any event E, A(E) <= A(E ∩ I) + A(not I), and on subsets of I
            clamped and unclamped laws are the same, so A(E ∩ I) = A*(E ∩ I) <= e^ε B*(E ∩ I) + δ(ε) <= e^ε B(E) + δ(ε).
            The usual argument by total variation, which would give tail_mass (1 + e^ε), is not needed.
    """

    mu: float
    unit_mu: float
    tail_mass: float

    @property
    def noise_multiplier(self) -> float:
        """1/μ rounded down: standard deviation over sensitivity of the equivalent Gaussian mechanism."""
        return math.nextafter(1.0 / self.mu, 0.0)


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
    return _Profile(noise_trials, p, dim, sensitivity, levels, tail).certificate(tail)


def certified_epsilon(
    *, noise_trials: int, p: float, dim: int, sensitivity: float, levels: int, delta: float
) -> tuple[float, GaussianCertificate]:
    """The smallest ε the Gaussian certificate proves for this δ, and the certificate that proves it.

    A smaller tail leaves more of δ to the Gaussian, a larger one makes the range narrower and μ₁ smaller. Twenty
    shares are tried; each is valid.

    Args:
        noise_trials: N, see `gaussian_certificate`.
        p: Success probability of the noise.
        dim: d.
        sensitivity: S.
        levels: k.
        delta: δ in total, tails included.

    Raises:
        ConditionError: There is no certificate at any share of the tail.

    Example:
        >>> epsilon, certificate = certified_epsilon(
        ...     noise_trials=160_000, p=0.5, dim=65_536, sensitivity=19.8177, levels=2, delta=1e-9
        ... )
        >>> f"{epsilon:.3f}"
        '0.542'
    """
    _validate.probability("delta", delta)
    profile = _Profile(noise_trials, p, dim, sensitivity, levels, delta * _TAIL_SHARES[-1])
    proved: list[tuple[float, GaussianCertificate]] = []
    for share in _TAIL_SHARES:
        try:
            certificate = profile.certificate(delta * share)
        except ConditionError:
            # Smaller tails have wider ranges, which do not fit either.
            if not proved:
                raise
            break
        proved.append((gdp_epsilon(certificate.mu, (delta - certificate.tail_mass) * (1.0 - 2.0**-52)), certificate))
    return min(proved, key=lambda pair: pair[0])


class _Profile:
    """How μ₁ grows with the range, computed once for all tails down to `smallest_tail`."""

    def __init__(
        self, noise_trials: int, p: float, dim: int, sensitivity: float, levels: int, smallest_tail: float
    ) -> None:
        self.p, self.steps = check_parameters(noise_trials, p, dim, sensitivity, levels, smallest_tail)
        self.noise_trials, self.dim, self.sensitivity = noise_trials, dim, sensitivity
        nats = math.log(2.0 * dim / smallest_tail) + _DEPTH
        self.law = _binomial.window(noise_trials, self.p, nats, margin=self.steps)
        self.quotients = _quotients(self.law)

    def certificate(self, tail: float) -> GaussianCertificate:
        """The certificate that leaves at most `tail` outside."""
        low, high, mass = central_range(self.law, tail / self.dim)
        if low - self.steps < 1 or high + self.steps > self.noise_trials - 1:
            raise ConditionError(
                f"No Gaussian certificate for N={self.noise_trials}, p={self.p:g}: all but {tail:.3g} of the noise in "
                f"{self.dim} coordinates lies in [{low}, {high}], and that range, widened by the {self.steps} lattice "
                "units two neighbours may differ by, must stay inside [1, N - 1]. "
                + _remedy(self.noise_trials, self.p, self.dim, self.steps, tail)
            )
        unit_mu = _unit_mu(self.law, self.quotients, low - self.steps, high + self.steps)
        return GaussianCertificate(
            mu=unit_mu * self.sensitivity * (1.0 + 2.0**-52),
            unit_mu=unit_mu,
            tail_mass=self.dim * mass * (1.0 + 2.0**-52),
        )


def check_parameters(
    noise_trials: int, p: float, dim: int, sensitivity: float, levels: int, tail: float
) -> tuple[float, int]:
    """Validates; returns p and T = ⌈min(k - 1, S)⌉, the unit steps between two neighbours' coordinates."""
    if _validate.integer("noise_trials", noise_trials, low=0) == 0:
        raise ConditionError("No noise arrived (N = 0), so there is no privacy: raise trials or honest clients.")
    _validate.integer("dim", dim, low=1)
    _validate.integer("levels", levels, low=2)
    _validate.positive("sensitivity", sensitivity)
    if _validate.probability("tail", tail) < SMALLEST_MASS * dim:
        raise ParameterError(f"Expected tail >= {SMALLEST_MASS:g} per coordinate, got tail={tail!r} for dim={dim}.")
    return _validate.probability("p", p), math.ceil(min(levels - 1, sensitivity))


def central_range(law: _binomial.Window, mass: float) -> tuple[int, int, float]:
    """The narrowest [a, b] with P(Z < a) and P(Z > b) at most mass/2 each, and a bound on P(Z not in [a, b])."""
    left = law.below * (1.0 + law.error) + law.outside_below
    right = law.above * (1.0 + law.error) + law.outside_above
    below = int(np.searchsorted(left, 0.5 * mass, side="right"))
    above = int(np.searchsorted(right[::-1], 0.5 * mass, side="right"))
    # `below` points lie left of a; `right` is P(Z > z), so b itself is the first of the `above` points.
    left_out = float(left[below - 1]) if below else law.outside_below
    right_out = float(right[-above]) if above else law.outside_above
    return law.first + below, law.last - max(above - 1, 0), (left_out + right_out) * (1.0 + 2.0**-52)


def _quotients(law: _binomial.Window) -> _binomial.Array:
    """Upper bounds on f(z) / min(φ(q(F(z - 1))), φ(q(F(z)))) for all z of the window but its first."""
    # Lower bound on min(F, 1 - F). Each is summed from its own end, so the smaller of the two is accurate.
    side = np.minimum(law.below, law.above)[:-1] * (1.0 - 2.0 * law.error)
    # Upper bound on |q|, hence a lower bound on φ(q), which falls with |q|.
    quantile = -ndtri(np.minimum(side, 0.5)) * (1.0 + _NDTRI_RELATIVE) + _NDTRI_ABSOLUTE
    inverse_density = math.sqrt(2.0 * math.pi) * np.exp(0.5 * quantile * quantile)
    # 1e-12 covers the roundings of these lines (the exponent is under 700). At the window's last point F may be 1.
    largest = np.maximum(inverse_density[:-1], inverse_density[1:]) * (1.0 + 2.0 * law.error + 1e-12)
    return np.append(law.mass[1:-1] * largest, np.inf)


def _unit_mu(law: _binomial.Window, quotients: _binomial.Array, low: int, high: int) -> float:
    """Upper bound on the largest quotient in [low, high]."""
    if low <= law.first or high >= law.last:
        raise ConditionError(
            f"No Gaussian certificate: the range [{low}, {high}] reaches probabilities under {SMALLEST_MASS:g}. "
            "The noise is too small against the number of levels; add noise or use fewer levels."
        )
    return float(np.max(quotients[low - law.first - 1 : high - law.first]))


def _remedy(noise_trials: int, p: float, dim: int, steps: int, tail: float) -> str:
    """Says how much noise would do."""

    def fits(trials: int) -> bool:
        law = _binomial.window(trials, p, math.log(2.0 * dim / tail) + 1.0, margin=steps)
        low, high, _ = central_range(law, tail / dim)
        return low - steps >= 1 and high + steps <= trials - 1

    enough = noise_trials
    while not fits(enough):
        enough *= 2
    short = noise_trials
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if fits(middle) else (middle, enough)
    return f"N={enough} would do, or a larger tail."
