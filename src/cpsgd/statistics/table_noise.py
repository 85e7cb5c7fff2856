"""Noise that is added once, to a whole sum of integers, by whoever holds the table.

Users' vectors are rounded to a grid and summed as integers, so that sums do not depend on the order or on machines.
To the sum comes exact integer noise: discrete Laplace noise (pure ε, calibrated to the sum of absolute distances) or
discrete Gaussian noise (ε and δ, calibrated to the Euclidean distance), whichever has the smaller variance. Few outputs
get the former, many the latter. docs/proofs/statistics.md has the proofs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

from cpsgd._exact import GAUSSIAN_BITS, Integers, discrete_gaussian, discrete_laplace
from cpsgd._lazy import Late
from cpsgd._numbers import rounded_up
from cpsgd.errors import InfeasibleError
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.promise import Claim
from cpsgd.randomness import Keystream
from cpsgd.statistics.questions import Geometry

if TYPE_CHECKING:
    from scipy import special

    from cpsgd.protocol import Protocol
else:
    special = Late("scipy.special")

Neighbours = Literal["replace-one", "add-remove"]
"""Neighbouring tables: all rows of one user become any others, or one user's rows are there or not."""

SUM_LIMIT = 1 << 62
"""Sums of users' integers stay below this."""
_SIGMA = 1 << GAUSSIAN_BITS
# Grid units of the distance under Laplace noise, where vectors are not of integers by themselves.
_LAPLACE_UNITS = 1 << 30
# Fewer units than these, and the noise's parameter is a fraction with this denominator.
_FEW_UNITS, _DENOMINATOR = 1 << 12, 1 << 30
# Gaussian noise is compared with a rounded Gaussian up to 44 σ away; neighbours are at most 4 σ apart.
_TAIL, _MOST_MU = 44.0, 4.0
# A loss of λ at either end adds at most 2.6 λ to μ, and 5.2 λ where distances of both adjacencies are scaled by it.
_MU_PER_LOSS = 5.2
_SAFE = 1e-12
# Spread of the noise in a ledger's record, which is computed at least as costly as the release.
_RECORD_SPREAD = 1 << 12

LAPLACE_CITATION = (
    "discrete Laplace noise on a sum of integers (docs/proofs/statistics.md, section 1), on Ghosh, Roughgarden and "
    'Sundararajan, "Universally Utility-Maximizing Privacy Mechanisms", 2009'
)
GAUSSIAN_CITATION = (
    "discrete Gaussian noise on a sum of integers (docs/proofs/statistics.md, section 2), on Balle and Wang 2018, "
    "Theorem 8, and Canonne, Kamath and Steinke 2020"
)


@dataclass(frozen=True)
class TableNoise:
    """Noise of one sum, with all that its cost depends on.

    Attributes:
        kind: "discrete-laplace" or "discrete-gaussian"; or another, of a subclass.
        dim: Number of coordinates.
        units: Grid units per 1 of a coordinate.
        distance: The most grid units between the vectors of two users, zero among them: added up over the coordinates
            for Laplace noise, Euclidean for Gaussian noise.
        norm: The same between a user's vector and zero.
        neighbours: Which of the two the guarantee is for.
        loss: s/t, the loss per grid unit of Laplace noise.
    """

    kind: str
    dim: int
    units: int
    distance: float
    norm: float
    neighbours: Neighbours
    loss: Fraction = Fraction(0)

    @property
    def citation(self) -> str:
        """The theorem behind it."""
        return LAPLACE_CITATION if self.is_pure else GAUSSIAN_CITATION

    @property
    def is_pure(self) -> bool:
        """Whether the noise gives pure ε, with δ = 0."""
        return self.kind != "discrete-gaussian"

    @property
    def rate(self) -> float | None:
        """The loss per grid unit of Laplace noise; None for Gaussian noise."""
        return float(self.loss) if self.is_pure else None

    @property
    def sensitivity(self) -> float:
        """Largest distance between the sums of neighbouring tables, in grid units."""
        return self.distance if self.neighbours == "replace-one" else self.norm

    @property
    def epsilon(self) -> float:
        """ε of Laplace noise at δ = 0, rounded up."""
        return float(Fraction(self.sensitivity) * self.loss) * (1.0 + _SAFE)

    @property
    def mu(self) -> float:
        """μ for which the release is μ-GDP, rounded up."""
        return mu_of_pure(self.epsilon) if self.is_pure else _gaussian_mu(self.sensitivity, self.dim)

    @property
    def variance(self) -> float:
        """Variance of the noise in a coordinate of the sum, in the vectors' units."""
        if not self.is_pure:
            return (_SIGMA / self.units) ** 2
        return 0.5 / (math.sinh(0.5 * float(self.loss)) * self.units) ** 2

    def draw(self) -> Integers:
        """Draws the noise, in grid units, from a fresh private keystream."""
        keystream = Keystream()
        if self.is_pure:
            return discrete_laplace(self.loss.numerator, self.loss.denominator, self.dim, keystream)
        return discrete_gaussian(self.dim, keystream)

    def record(self, reason: str) -> Protocol:
        """Returns a protocol of one client and one coordinate that costs at least as much, for a ledger.

        The loss of Laplace noise depends on the distance alone, however many coordinates share it; so does μ.
        """
        from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
        from cpsgd.protocol import Protocol

        stated: dict[str, Any] = {}
        if self.distance < 2.0 * self.norm:
            stated = {"replace_one_distance": self.distance, "distance_reason": reason}
        norm = max(self.norm, 0.5 * self.distance)
        if not self.is_pure:
            sigma = self.distance / _gaussian_mu(self.distance, self.dim) * (1.0 - _SAFE)
            found = Protocol.gaussian(clients=1, dim=1, clip_norm=norm, sigma=sigma)
        else:
            unit = (1.0 - _SAFE) / (float(self.loss) * _RECORD_SPREAD)
            levels = math.ceil(4.0 * norm / unit) + 3
            mechanism = DiscreteLaplace(
                levels=levels,
                coordinate_range=0.5 * unit * (levels - 1),
                spread=_RECORD_SPREAD,
                shares=1,
                window=levels + 1,
            )
            found = Protocol(clients=1, dim=1, clip_norm=norm, mechanism=mechanism, rotate=False)
        return replace(found, **stated)


def laplace_noise(geometry: Geometry, epsilon: float, neighbours: Neighbours) -> TableNoise:
    """Returns the least discrete Laplace noise that is (ε, 0)-private."""
    # A grid unit more per coordinate than vectors are apart: each is rounded by half of one at most.
    units = geometry.lattice or max(1, int(_LAPLACE_UNITS / geometry.l1_distance))
    rounded = 0 if geometry.lattice else geometry.dim
    distance, norm = (
        math.ceil(units * length * geometry.rounding * (1.0 + _SAFE) - (0.5 if geometry.lattice else 0.0)) + rounded
        for length in (geometry.l1_distance, geometry.l1_norm)
    )
    sensitivity = distance if neighbours == "replace-one" else norm
    allowed = Fraction(epsilon * (1.0 - 4.0 * _SAFE)) / sensitivity
    denominator = math.ceil(1 / allowed)
    loss = Fraction(1, denominator)
    if denominator < _FEW_UNITS:
        loss = Fraction(math.floor(allowed * _DENOMINATOR), _DENOMINATOR)
    if denominator >= SUM_LIMIT >> 12:
        raise InfeasibleError(f"ε = {rounded_up(epsilon)} is too small for a statistic of {geometry.dim:,} values.")
    return TableNoise("discrete-laplace", geometry.dim, units, distance, norm, neighbours, loss)


def gaussian_noise(geometry: Geometry, mu: float, neighbours: Neighbours) -> TableNoise | None:
    """Returns the least discrete Gaussian noise that is μ-GDP; None where the grid is too coarse for it."""
    mu = min(mu, _MOST_MU) * (1.0 - _SAFE)
    length = geometry.rounding * (geometry.distance if neighbours == "replace-one" else geometry.norm)
    allowed = (mu - _MU_PER_LOSS * _loss(geometry.dim)) * _SIGMA - math.sqrt(geometry.dim)
    units = int(allowed / length * (1.0 - _SAFE)) if allowed > 0.0 else 0
    units -= units % geometry.lattice if geometry.lattice else 0
    if units < 1:
        return None
    distance, norm = (
        (units * each * geometry.rounding + math.sqrt(geometry.dim)) * (1.0 + _SAFE)
        for each in (geometry.distance, geometry.norm)
    )
    found = TableNoise("discrete-gaussian", geometry.dim, units, distance, norm, neighbours)
    return found if found.mu <= mu * (1.0 + _SAFE) else None


def _loss(dim: int) -> float:
    """Returns λ such that all masses within 44 σ are within a factor e^±λ of a rounded Gaussian's."""
    return dim * _TAIL**2 / (24.0 * float(_SIGMA) ** 2)


def _gaussian_mu(sensitivity: float, dim: int) -> float:
    return (sensitivity / _SIGMA + _MU_PER_LOSS * _loss(dim)) * (1.0 + _SAFE)


def less_reserve(epsilon: float) -> float:
    """Returns ε minus a small reserve, since a ledger's record costs slightly more than the release."""
    return max(0.5 * epsilon, epsilon * (1.0 - 2e-5) - 4e-8)


def mu_of_pure(epsilon: float) -> float:
    """Returns the μ of an (ε, 0)-private release: Φ(μ/2) = e^ε/(1 + e^ε) (Dong, Roth and Su 2022, section 2)."""
    found = -2.0 * float(special.ndtri_exp(-epsilon - math.log1p(math.exp(-epsilon))))
    return found * (1.0 + _SAFE) + 4e-15


def pure_of_mu(mu: float) -> float:
    """Returns the largest ε whose `mu_of_pure` is at most μ, rounded down."""
    tail = float(special.log_ndtr(-0.5 * mu))
    return max(0.0, (math.log1p(-math.exp(tail)) - tail) * (1.0 - 1e-9) - 1e-14)


@dataclass(frozen=True)
class SumRequest:
    """A request for the noise of one of several sums that share a budget.

    Attributes:
        geometry: The set of its vectors.
        weight: Where ε add up, the noise's deviation is in inverse proportion to this.
        weight_by_squares: The weight to use where Gaussian shifts add up in squares.
        counts: Whether its error counts in the choice between the two. Bounds and cut-off counts do not.
    """

    geometry: Geometry
    weight: float = 1.0
    weight_by_squares: float = 1.0
    counts: bool = True


def allot(
    requests: Sequence[SumRequest], claim: Claim, neighbours: Neighbours, *, squares: bool | None = None
) -> list[TableNoise]:
    """Returns the noise of each sum, so that all of them together keep the claim, with the least error.

    Two ways are compared: ε and δ in proportion to the weights, which add up; and, at δ > 0, Gaussian shifts whose
    squares are in proportion to the weights' squares. In either, each sum has the kind of noise that is smaller.

    Args:
        requests: The sums.
        claim: ε and δ of all together.
        neighbours: Which tables are neighbours.
        squares: Takes the second way, or the first; None compares them. Either way, what a sum gets does not depend on
            the geometry of the others.

    Raises:
        InfeasibleError: There is no such noise for vectors of that many coordinates.
    """
    epsilon = less_reserve(claim.epsilon)
    ways = []
    if squares is not True:
        ways.append(_by_weight(requests, Claim(epsilon, claim.delta), neighbours))
    if squares is not False and claim.delta:
        ways.append(_by_squares(requests, gdp_mu(epsilon, claim.delta), neighbours))

    def error(noises: Sequence[TableNoise]) -> float:
        pairs = zip(requests, noises, strict=True)
        return math.fsum(noise.variance * request.weight**2 for request, noise in pairs if request.counts)

    return min(ways, key=error)


def _by_weight(requests: Sequence[SumRequest], claim: Claim, neighbours: Neighbours) -> list[TableNoise]:
    whole, found = math.fsum(request.weight for request in requests), []
    for request in requests:
        share = request.weight / whole * (1.0 - _SAFE)
        options: list[TableNoise | None] = [laplace_noise(request.geometry, share * claim.epsilon, neighbours)]
        if claim.delta:
            mu = gdp_mu(share * claim.epsilon, share * claim.delta)
            options.append(gaussian_noise(request.geometry, mu, neighbours))
        found.append(_least(options))
    return found


def _by_squares(requests: Sequence[SumRequest], mu: float, neighbours: Neighbours) -> list[TableNoise]:
    whole, found = math.hypot(*(request.weight_by_squares for request in requests)), []
    for request in requests:
        part = mu * request.weight_by_squares / whole * (1.0 - 1e-9)
        options: list[TableNoise | None] = [gaussian_noise(request.geometry, part, neighbours)]
        if (pure := pure_of_mu(part)) > 0.0:
            options.append(laplace_noise(request.geometry, pure, neighbours))
        found.append(_least(options))
    return found


def _least(options: Sequence[TableNoise | None]) -> TableNoise:
    known = [option for option in options if option is not None]
    if not known:
        raise InfeasibleError("ε is too small for a statistic of so many values; ask for fewer, or allow a larger ε.")
    return min(known, key=lambda noise: noise.variance)


def total(noises: Sequence[TableNoise], delta: float) -> tuple[Claim, str, str]:
    """Returns the (ε, δ) of several releases together, with the method and the theorem.

    Pure ε add up, and so does the ε of all Gaussian noise at δ; or everything is composed by its Gaussian shift.
    """
    citations = list(dict.fromkeys(noise.citation for noise in sorted(noises, key=lambda noise: not noise.is_pure)))
    pure = math.fsum(noise.epsilon for noise in noises if noise.is_pure) * (1.0 + _SAFE)
    shifts = [noise.mu for noise in noises if not noise.is_pure]
    if not shifts:
        if len(noises) > 1:
            citations.append("pure ε add up: Dwork and Roth 2014, Theorem 3.16")
        alike = all(noise.kind == "discrete-laplace" for noise in noises)
        return Claim(pure, 0.0), "table-laplace" if alike else "table-choice", "; ".join(citations)
    mixed = pure + gdp_epsilon(math.hypot(*shifts) * (1.0 + _SAFE), delta)
    if len(noises) == 1:
        return Claim(mixed, delta), "table-gaussian", citations[0]
    squares = gdp_epsilon(math.hypot(*(noise.mu for noise in noises)) * (1.0 + _SAFE), delta)
    if squares < mixed:
        citations.append("composed as Gaussian shifts: Dong, Roth and Su 2022, Corollary 3.3")
        return Claim(squares, delta), "gaussian composition", "; ".join(citations)
    citations.append("ε add up: Dwork and Roth 2014, Theorem 3.16")
    return Claim(mixed, delta), "basic composition", "; ".join(citations)


def noise_for(geometry: Geometry, claim: Claim, neighbours: Neighbours = "replace-one") -> TableNoise:
    """Returns the noise of a single sum; see `allot`.

    Example:
        >>> one = Geometry(1, 0.5, 1.0, "one count", l1_norm=0.5, l1_distance=1.0)
        >>> noise_for(one, Claim(1.0, 1e-6)).kind
        'discrete-laplace'
    """
    return allot([SumRequest(geometry)], claim, neighbours)[0]
