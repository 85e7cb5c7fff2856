"""The Gaussian certificate: a noise multiplier at which a round is at least as private as a Gaussian mechanism.

Let F and f be the distribution and mass function of the noise, a log-concave law on the integers, Φ and φ those of the
standard normal law and q = Φ^-1. On a range of integers put

    μ₁ = max over z of  f(z) / min(φ(q(F(z - 1))), φ(q(F(z)))).

If two neighbours are t apart in lattice units then, on outputs within the range, the pair is (μ₁ ‖t‖₂)-GDP in the sense
of Dong, Roth and Su's "Gaussian Differential Privacy" (2022). The range leaves out the far tails, where the quotient
grows without bound; their probability, `tail_mass`, is added to δ. docs/proofs/gaussian-certificate.md has the proofs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, TypedDict

import numpy as np

from cpsgd import _validate
from cpsgd._lazy import Late
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.law import Array, Law, Window
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.promise import Claim
from cpsgd.run import Run

if TYPE_CHECKING:
    from scipy import special
else:
    special = Late("scipy.special")

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
# One profile serves tails within so many powers of two.
_PROFILED = 16


class Shape(TypedDict):
    """Arguments of the certificate beside the law: dimension, sensitivity S in lattice units, and k levels."""

    dim: int
    sensitivity: float
    levels: int


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


def gaussian_certificate(law: Law, *, dim: int, sensitivity: float, levels: int, tail: float) -> GaussianCertificate:
    """Returns the Gaussian certificate of a round whose sum carries noise of this law in every coordinate.

    All its numbers are upper bounds, also in floating point.

    Args:
        law: Of the noise of all honest clients in a coordinate of the sum.
        dim: d.
        sensitivity: S, the largest Euclidean distance of neighbours in lattice units.
        levels: k. No coordinate of neighbours differs by more than k - 1.
        tail: Probability, over all coordinates together, that may be left outside the certified range.

    Raises:
        ConditionError: The range that holds all but `tail` of the noise reaches the end of the law's support.

    Example:
        >>> from cpsgd.mechanisms.binomial import BinomialLaw
        >>> law = BinomialLaw(160_000, 0.5)
        >>> certificate = gaussian_certificate(law, dim=65_536, sensitivity=1.0, levels=2, tail=1e-14)
        >>> round(certificate.unit_mu * 200, 4)  # 200 is the standard deviation: 2.3 % over a Gaussian
        1.0231
    """
    check_parameters(dim, sensitivity, levels, tail)
    return _profile(law, dim, sensitivity, levels, _PROFILED * (math.frexp(tail)[1] // _PROFILED)).certificate(tail)


def certified_epsilon(
    law: Law, *, dim: int, sensitivity: float, levels: int, delta: float
) -> tuple[float, GaussianCertificate]:
    """Returns the smallest ε the Gaussian certificate proves for this δ, and the certificate that proves it.

    δ includes the tails; the other parameters are those of `gaussian_certificate`. A smaller tail leaves more of δ to
    the Gaussian, a larger one makes the range narrower and μ₁ smaller. Twenty shares are tried; each is valid.

    Raises:
        ConditionError: There is no certificate at any share of the tail.
        ParameterError: δ is too small to compute with, or another parameter is outside its range.

    Example:
        >>> from cpsgd.mechanisms.binomial import BinomialLaw
        >>> law = BinomialLaw(160_000, 0.5)
        >>> epsilon, certificate = certified_epsilon(law, dim=65_536, sensitivity=19.8177, levels=2, delta=1e-9)
        >>> f"{epsilon:.3f}"
        '0.542'
    """
    check_delta(delta, dim, _TAIL_SHARES[-1])
    profile = _Profile(law, dim, sensitivity, levels, delta * _TAIL_SHARES[-1])
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
    """The growth of μ₁ with the range, computed once for all tails down to `smallest_tail`."""

    def __init__(self, law: Law, dim: int, sensitivity: float, levels: int, smallest_tail: float) -> None:
        self.steps = check_parameters(dim, sensitivity, levels, smallest_tail)
        self.law, self.dim, self.sensitivity = law, dim, sensitivity
        nats = math.log(2.0 * dim / smallest_tail) + _DEPTH
        self.window = law.window(nats, margin=self.steps)
        self.quotients = _quotients(self.window)

    def certificate(self, tail: float) -> GaussianCertificate:
        """Returns the certificate that leaves at most `tail` outside."""
        low, high, mass = central_range(self.window, tail / self.dim)
        if not inside(self.law, low - self.steps, high + self.steps):
            raise ConditionError(
                f"No Gaussian certificate for {self.law}: all but {tail:.3g} of the noise in {self.dim} coordinates "
                f"lies in [{low}, {high}], and that range, widened by the {self.steps} lattice units two neighbours "
                f"may differ by, must stay inside the law's support. {_remedy(self.law, self.dim, self.steps, tail)}"
            )
        unit_mu = _unit_mu(self.window, self.quotients, low - self.steps, high + self.steps)
        return GaussianCertificate(
            mu=unit_mu * self.sensitivity * (1.0 + 2.0**-52),
            unit_mu=unit_mu,
            tail_mass=self.dim * mass * (1.0 + 2.0**-52),
        )


@lru_cache(maxsize=2)
def _profile(law: Law, dim: int, sensitivity: float, levels: int, power: int) -> _Profile:
    """Returns the profile for tails down to 2^(power - 1), or down to d `SMALLEST_MASS` if that is larger. Cached."""
    return _Profile(law, dim, sensitivity, levels, max(math.ldexp(0.5, power), SMALLEST_MASS * dim))


def inside(law: Law, low: int, high: int) -> bool:
    """Returns whether the noise can take every value from low - 1 to high + 1."""
    return law.lowest + 1 <= low and high <= law.highest - 1


def check_parameters(dim: int, sensitivity: float, levels: int, tail: float) -> int:
    """Validates; returns T = ⌈min(k - 1, S)⌉, the unit steps between two neighbours' coordinates."""
    _validate.integer("dim", dim, low=1)
    _validate.integer("levels", levels, low=2)
    _validate.positive("sensitivity", sensitivity)
    if _validate.probability("tail", tail) < SMALLEST_MASS * dim:
        raise ParameterError(f"Expected tail >= {SMALLEST_MASS:g} per coordinate, got tail={tail!r} for dim={dim}.")
    return math.ceil(min(levels - 1, sensitivity))


def check_delta(delta: float, dim: int, share: float) -> None:
    """Validates δ, given the `share` of it that pays for the tails."""
    smallest = SMALLEST_MASS * _validate.integer("dim", dim, low=1) / share
    if _validate.probability("delta", delta) < smallest:
        raise ParameterError(
            f"Expected delta >= {smallest:.3g} for dim={dim}, got delta={delta!r}: with less, the tails of the noise "
            "are too small for floating point."
        )


def central_range(law: Window, mass: float) -> tuple[int, int, float]:
    """Returns the narrowest [a, b] with P(Z < a) and P(Z > b) at most mass/2 each, and a bound on P(Z not in [a, b]).

    Where no a (or b) in the window will do, it is the window's end, and the bound is larger.
    """
    left = law.below * (1.0 + law.error) + law.outside_below
    right = law.above * (1.0 + law.error) + law.outside_above
    below = int(np.searchsorted(left, 0.5 * mass, side="right"))
    above = int(np.searchsorted(right[::-1], 0.5 * mass, side="right"))
    # `below` points lie left of a; `right` is P(Z > z), so b itself is the first of the `above` points.
    left_out = float(left[below - 1]) if below else law.outside_below
    right_out = float(right[-above]) if above else law.outside_above
    return law.first + below, law.last - max(above - 1, 0), (left_out + right_out) * (1.0 + 2.0**-52)


def _quotients(law: Window) -> Array:
    """Returns upper bounds on f(z) / min(φ(q(F(z - 1))), φ(q(F(z)))) for all z of the window but its first."""
    # Lower bound on min(F, 1 - F). Each is summed from its own end, so the smaller of the two is accurate.
    side = np.minimum(law.below, law.above)[:-1] * (1.0 - 2.0 * law.error)
    # Upper bound on |q|, hence a lower bound on φ(q), which falls with |q|.
    quantile = -special.ndtri(np.minimum(side, 0.5)) * (1.0 + _NDTRI_RELATIVE) + _NDTRI_ABSOLUTE
    inverse_density = math.sqrt(2.0 * math.pi) * np.exp(0.5 * quantile * quantile)
    # 1e-12 covers the roundings of these lines (the exponent is under 700). At the window's last point F may be 1.
    largest = np.maximum(inverse_density[:-1], inverse_density[1:]) * (1.0 + 2.0 * law.error + 1e-12)
    return np.append(law.mass[1:-1] * largest, np.inf)


def _unit_mu(law: Window, quotients: Array, low: int, high: int) -> float:
    """Returns an upper bound on the largest quotient in [low, high]."""
    if low <= law.first or high >= law.last:
        raise ConditionError(
            f"No Gaussian certificate: the range [{low}, {high}] reaches probabilities under {SMALLEST_MASS:g}. "
            "The noise is too small against the number of levels; add noise or use fewer levels."
        )
    return float(np.max(quotients[low - law.first - 1 : high - law.first]))


def _remedy(law: Law, dim: int, steps: int, tail: float) -> str:
    """Returns advice: the noise that would be enough."""

    def fits(parts: int) -> bool:
        louder = law.with_parts(parts)
        window = louder.window(math.log(2.0 * dim / tail) + 1.0, margin=steps)
        low, high, _ = central_range(window, tail / dim)
        return inside(louder, low - steps, high + steps)

    enough = law.parts
    try:
        while not fits(enough):
            enough *= 2
    except ConditionError:
        return "Only far more noise than can be accounted for would do, or less skewed noise."
    short = law.parts
    while enough - short > 1:
        middle = (short + enough) // 2
        short, enough = (short, middle) if fits(middle) else (middle, enough)
    return f"{law.part_name}={enough} would do, or a larger tail."


# ---------------------------------------------------------------------- the proof

# 1 + _EXCESS/(deviation of the noise) is how far the certificate is from a Gaussian of equal variance.
_EXCESS = 4.0


@dataclass(frozen=True)
class Certified(Proof):
    """The Gaussian certificate of integer noise, which is the quickest proof."""

    name: str = "gaussian-certificate"
    citation: str = (
        "Gaussian certificate (docs/proofs/gaussian-certificate.md), on Dong, Roth and Su, "
        '"Gaussian Differential Privacy", JRSS B 2022, and Balle and Wang, ICML 2018, Theorem 8'
    )
    effort: int = 2

    def supports(self, run: Run) -> bool:
        """Returns whether the noise is log-concave on the integers."""
        return isinstance(base.law_of(run), Law)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns ε of one round, or of rounds as equivalent Gaussians."""
        if not base.alone(run):
            shares = [base.SAMPLED_TAIL_SHARE] if run.sampling.rate < 1.0 else base.TAIL_SHARES
            found = base.composed(run, delta, self, shares)
            return Proved(*found, f"{self.citation}; {base.COMPOSED[run.sampling.scheme]}")

        def prove(left: float) -> tuple[float, float]:
            epsilon, certificate = certified_epsilon(law_of(run), **shape(run), delta=left)
            return epsilon, certificate.tail_mass

        return Proved(*base.with_sampler(run, delta, prove), self.citation)

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns the equivalent Gaussian of one round."""
        counted = base.counted_tail(run.sampling)
        found = gaussian_certificate(law_of(run), **shape(run), tail=min(0.5, tail / counted))
        variation = run.honest * run.protocol.dim * run.protocol.mechanism.noise.variation
        return Rounds(found.mu, 1, counted * found.tail_mass * (1.0 + 1e-15), variation)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the scale with μ₁ S within what the Gaussian trade-off allows, over a few shares of δ for tails."""
        law, mechanism, rounds, sampled = law_of(run), run.protocol.mechanism, base.counted(run), _sampled(run)
        deviation, best = math.sqrt(law.variance), 0.0
        for share in [base.SAMPLED_TAIL_SHARE] if sampled else _shares(law.variance):
            if sampled:
                mu = base.sampled_mu(run, claim)
            else:
                mu = gdp_mu(claim.epsilon, claim.delta * (1.0 - share)) / math.sqrt(rounds)
            # μ₁ depends on S only through the unit steps between neighbours, and on those only a little: bounding S by
            # what a Gaussian of the same variance allows is safe and close.
            most = mu * deviation * 1.0001
            tail = claim.delta * share / rounds / base.counted_tail(run.sampling)
            certificate = gaussian_certificate(
                law, dim=run.protocol.dim, sensitivity=most, levels=mechanism.levels, tail=min(0.5, tail)
            )
            best = max(best, min(most, mu / certificate.unit_mu))
        return base.scale_for(run, best * (1.0 - 1e-12))

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns the scale that a Gaussian of slightly smaller variance would need."""
        deviation = math.sqrt(run.honest * run.protocol.mechanism.noise.variance)
        return base.ideal_scale(run, claim) * (1.0 + _EXCESS / deviation)


def law_of(run: Run) -> Law:
    """Returns the law of a run whose noise is log-concave on the integers."""
    law = base.law_of(run)
    assert isinstance(law, Law)
    return law


def shape(run: Run) -> Shape:
    """Returns the run's dimension, sensitivity and levels, which the certificate needs beside the law."""
    protocol = run.protocol
    return {"dim": protocol.dim, "sensitivity": base.sensitivity(run), "levels": protocol.mechanism.levels}


def _sampled(run: Run) -> bool:
    return run.sampling.rate < 1.0


def _shares(variance: float) -> list[float]:
    """Returns candidate shares of δ for the tails, around the likely best: the certificate's excess over a Gaussian."""
    centre = min(0.2, 5.0 / math.sqrt(variance))
    return [0.3 * centre, centre] if variance < 250_000 else [centre]


PROOFS = (Certified(),)
