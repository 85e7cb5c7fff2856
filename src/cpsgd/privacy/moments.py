"""The Rényi divergence of one round: a proved bound on κ(α), the divergence for neighbours at distance 1.

Let Z_0 be the noise, a log-concave law on the integers, Z_r the same shifted by r, and P_t = (1 - θ) Z_r + θ Z_{r+1}
for t = r + θ, the law of one coordinate whose value t is rounded stochastically. With D_α the Rényi divergence of
order α put

    κ(α) = sup over 0 < |t| <= min(k - 1, S) of  max(D_α(P_t, Z_0), D_α(Z_0, P_t)) / t².

A round with neighbours at distance S in lattice units then has Rényi divergence at most κ(α) S². Outputs outside a box
are first clamped to its ends, and the probability of leaving the box is added to δ.

With R = P_t/Z_0 and e = α or 1 - α, M(t) = Σ Z_0 R^e = e^((α-1) D_α). Between two nodes M lies under a parabola, from a
bound on M'' (convexity; for 2 < e < 3 Hölder's inequality), so the supremum is a proved bound and no maximum over a
grid. M - 1 is summed as Σ Z_0 (R^e - 1 - e (R - 1)), whose terms are positive.
docs/proofs/renyi-certificate.md has the proofs.
"""

from __future__ import annotations

import math

import numpy as np

from cpsgd import _validate
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.law import Array, Law, Window
from cpsgd.privacy.proofs.certified_gaussian import central_range, check_parameters, inside

MAX_ORDER = 1e6
# Outputs times unit distances beyond which moments are not computed at all.
_MAX_SIZE = 2**19

# κ is at most this factor over a value attained by some t.
_TOLERANCE = 2e-5
# Outputs are summed in blocks that fit into a processor's cache (and are too small for malloc to map pages for each),
# which is twice as fast.
_BLOCK = 12_000
_MAX_DEPTH = 12
# What a node takes whatever the number of outputs, in outputs.
_OVERHEAD = 2_000
# Powers of likelihood ratios stay below e^600.
_MAX_EXPONENT = 600.0
# A likelihood ratio R is kept as R - 1, which is good to a relative 2^-53/R.
_SMALLEST_RATIO = 1e-8
# Rounding errors of powers are bounded to first order, with 1 % for the rest: errors times orders stay below this.
_MAX_INEXACT = 1e-3
# How much deeper than the box the window goes, in nats: the end cells hold all outputs from there on, and what is
# outside the window is known only up to a bound.
_DEPTH = 25.0
_TOO_FAR = "No Rényi certificate: what one client can change is too large for this noise. Add noise."
_UNIT = 2.0**-53


class Moments:
    """Bounds on κ(α) of one round.

    Attributes:
        tail_mass: Upper bound on the probability, over all coordinates, of an output outside the box.
        largest_order: Powers of likelihood ratios overflow or lose their digits for larger orders, which promise
            nothing useful.
        box: The range of one coordinate's noise that the tails leave.

    Args:
        law: Of the noise of all honest clients in a coordinate of the sum.
        dim: d.
        sensitivity: S, the largest Euclidean distance of neighbours in lattice units.
        levels: k. No coordinate of neighbours differs by more than k - 1.
        tail: Probability, over all coordinates together, that may be left outside the box.
        meter: `kappa` raises `TooLongError` when this runs out. Unlimited by default.

    Raises:
        ConditionError: The box does not fit into the law's support, or the noise is too small.
        TooLongError: There are too many outputs.
    """

    def __init__(
        self, law: Law, *, dim: int, sensitivity: float, levels: int, tail: float, meter: Meter | None = None
    ) -> None:
        steps = check_parameters(dim, sensitivity, levels, tail)
        self._reach = min(float(levels - 1), sensitivity)
        nats = math.log(2.0 * dim / tail)
        # The box is about as wide as Bernstein's inequality says. This is known before anything is computed.
        points = 2.0 * (math.sqrt(2.0 * law.variance * nats) + nats) + steps
        if min(points, law.highest - law.lowest) * steps > _MAX_SIZE:
            raise TooLongError(points, f"{steps} distances")
        window = law.window(nats + _DEPTH, margin=2 * steps + 2)
        low, high, mass = central_range(window, tail / dim)
        self.tail_mass = dim * mass * (1.0 + 2.0 * _UNIT)
        if not inside(law, low - steps, high + steps):
            raise ConditionError(
                f"No Rényi certificate for {law}: all but {tail:.3g} of the noise in {dim} coordinates lies in "
                f"[{low}, {high}], and that range, widened by {steps}, must stay inside the law's support. More noise "
                "or a larger δ would do."
            )
        if not window.first < low - steps <= high + steps < window.last:
            raise ConditionError("No Rényi certificate: the noise is too small against the number of levels.")
        self.box = low, high
        signs = [1] if low + high == law.mirror else [1, -1]
        self._sides = [_Side(law, window, low, high, steps, sign, meter or Meter()) for sign in signs]
        # At least 29: logarithms of ratios that have their digits are below 18.5.
        self.largest_order = min(MAX_ORDER, *(side.largest_order for side in self._sides))

    def kappa(self, order: float) -> float:
        """Returns an upper bound on κ(α), α = `order` > 1."""
        if _validate.positive("order", order, low=1.0) > self.largest_order:
            raise ParameterError(f"Expected order <= {self.largest_order:g}, got order={order!r}.")
        largest = max(side.growth(exponent, self._reach) for side in self._sides for exponent in (order, 1.0 - order))
        return largest / (order - 1.0) * (1.0 + 1e-12)


class TooLongError(ConditionError):
    """The bounds would take more than a few seconds."""

    def __init__(self, outputs: float, distances: str) -> None:
        super().__init__(
            f"The Rényi certificate is not computed for about {outputs:.0f} outputs at {distances}: it would take more "
            "than a few seconds, and with that much noise the Gaussian certificate is about as good or better."
        )


class Meter:
    """A limit on the remaining work, counted in outputs times nodes."""

    def __init__(self, left: float = math.inf) -> None:
        self.left = left
        self._overhead = 0

    def limit(self, left: float) -> None:
        """Sets the remaining work. The overhead per node also bounds the time of many nodes with few outputs."""
        self.left = min(self.left, left)
        self._overhead = _OVERHEAD

    def spend(self, outputs: int) -> None:
        """Takes the work of one node off; raises `TooLongError` when none is left."""
        self.left -= outputs + self._overhead
        if self.left < 0.0:
            raise TooLongError(outputs, "the many distances and orders that matter")


class _Side:
    """Z_0 and its shifts by ±r, r = 0, ..., T, for positive or negative t.

    For t > 0 all are clamped to [low - 1, high + T + 1], for t < 0 to [low - T - 1, high + 1]: what both neighbours
    leave outside then is P(Z < low) + P(Z > high) at most.

    Attributes:
        mass: Z_0, each within the factor 1 ± `error`. The end cells hold everything beyond the box, what is outside
            the window included, for which there is only an upper bound; that makes their `error` larger.
        excess: Z_r/Z_0 - 1 for every r; Z_r/Z_0 is within the factor 1 ± `inexact`[r].
        largest_order: No larger order keeps powers of Z_r/Z_0 finite and their errors small.
    """

    def __init__(self, law: Law, window: Window, low: int, high: int, steps: int, sign: int, meter: Meter) -> None:
        first, last = (low, high + steps) if sign > 0 else (low - steps, high)
        self._meter = meter
        self.mass = np.empty(last - first + 3)
        self.mass[1:-1] = window.mass[first - window.first : last + 1 - window.first]
        outside = np.array([window.outside_below, window.outside_above])

        def ends(shift: int) -> Array:
            """Returns upper bounds on the end cells of Z_r, `shift` = ±r; `window.error` is not included."""
            below, above = window.below[first - 1 - shift - window.first], window.above[last - shift - window.first]
            return np.array([below + window.outside_below, above + window.outside_above])

        self.mass[[0, -1]] = ends(0)
        self.error = np.full_like(self.mass, 2.0 * window.error)
        self.error[[0, -1]] += outside / ends(0)
        self.excess = [np.zeros_like(self.mass)]
        self.inexact = [np.zeros_like(self.mass)]
        points = np.arange(first, last + 1, dtype=np.float64)
        for r in range(steps):
            step, roundings = law.step(points - sign * r, sign)
            before, now = self.excess[r], np.empty_like(self.mass)
            now[1:-1] = before[1:-1] + (1.0 + before[1:-1]) * step
            now[[0, -1]] = ends(sign * (r + 1)) / ends(0) - 1.0
            if now.min() < _SMALLEST_RATIO - 1.0:
                raise ConditionError(_TOO_FAR)
            # The ratio's own error; adding up costs at most 4/R + 5 units more.
            error = 4.0 * _UNIT / (1.0 + now)
            error[1:-1] += _UNIT * (5.0 + roundings)
            error[[0, -1]] += 3.0 * window.error + 1.01 * outside * (1.0 / ends(0) + 1.0 / ends(sign * (r + 1)))
            self.excess.append(now)
            self.inexact.append(self.inexact[r] + error)
        # The likelihood ratio is monotone in the output and in the shift.
        largest_log = float(np.max(np.abs(np.log1p(self.excess[steps][[0, -1]]))))
        # The errors of masses are smaller than those of the ratios of end cells.
        self.largest_order = min(_MAX_EXPONENT / largest_log - 3.0, _MAX_INEXACT / float(np.max(self.inexact[steps])))

    def growth(self, exponent: float, reach: float) -> float:
        """Returns an upper bound on sup over 0 < t <= reach of log M(t) / t²."""
        attained = 0.0
        intervals: list[tuple[_Node, _Node, int]] = []
        for r in range(math.ceil(reach)):
            left, right = self._node(exponent, r, 0.0), self._node(exponent, r, min(1.0, reach - r))
            intervals.append((left, right, 0))
            attained = max(attained, left.value, right.value)
        bound = 0.0
        while intervals:
            left, right, depth = intervals.pop()
            here = left.bound(right)
            if here > max(bound, attained * (1.0 + _TOLERANCE)) and depth < _MAX_DEPTH:
                middle = self._node(exponent, left.r, 0.5 * (left.fraction + right.fraction))
                attained = max(attained, middle.value)
                intervals += [(left, middle, depth + 1), (middle, right, depth + 1)]
            else:
                bound = max(bound, here)
        return bound

    def _node(self, exponent: float, r: int, fraction: float) -> _Node:
        node = self._plain_node(exponent, r, fraction)
        if 2.0 < exponent < 3.0:
            node.bound_curvature(exponent, self._plain_node(2.0, r, fraction), self._plain_node(3.0, r, fraction))
        return node

    def _plain_node(self, exponent: float, r: int, fraction: float) -> _Node:
        self._meter.spend(len(self.mass))
        return _Node(self, exponent, r, fraction)


class _Node:
    """M, M' and M'' at t = r + fraction, r an integer, each with a bound on its rounding error."""

    def __init__(self, side: _Side, exponent: float, r: int, fraction: float) -> None:
        self.r, self.fraction = r, fraction
        sums = np.zeros(6)
        for start in range(0, len(side.mass), _BLOCK):
            block = slice(start, start + _BLOCK)
            arrays = (side.mass, side.error, side.excess[r], side.excess[r + 1], side.inexact[r + 1])
            sums += _sums(exponent, fraction, *(array[block] for array in arrays))
        # M - 1 >= 0, M' and M''
        self.moment = max(0.0, float(sums[0]))
        self.derivative = exponent * float(sums[1])
        self.curvature = exponent * (exponent - 1.0) * float(sums[2])
        e = abs(exponent)
        self.moment_error = 1.01 * float(sums[3])
        self.derivative_error = 1.01 * e * float(sums[4])
        self.curvature_error = 1.01 * e * (e + 1.0) * float(sums[5])
        t = r + fraction
        self.value = math.log1p(self.moment) / (t * t) if t > 0.0 else 0.5 * self.curvature

    def bound_curvature(self, exponent: float, second: _Node, third: _Node) -> None:
        """Replaces M'' by Hölder's bound on it, from the nodes at the same t for the exponents 2 and 3."""
        unmoved = 0.5 * (second.curvature + second.curvature_error)
        moved = (third.curvature + third.curvature_error) / 6.0
        bound = exponent * (exponent - 1.0) * unmoved ** (3.0 - exponent) * moved ** (exponent - 2.0)
        self.curvature, self.curvature_error = bound * (1.0 + 1e-14), 0.0

    def bound(self, right: _Node) -> float:
        """Returns an upper bound on sup of log M(t) / t² between this node and the one to the right."""
        curvature = max(self.curvature + self.curvature_error, right.curvature + right.curvature_error)
        base = 1.0 + self.moment
        start, stop = self.r + self.fraction, right.r + right.fraction
        if start == 0.0:  # M = 1 and M' = 0 exactly
            return 0.5 * curvature * (1.0 + 1e-12)
        # log M <= a + b h + c h² with t = start + h, divided by t²: a quadratic in s = 1/t.
        a = math.log1p(self.moment) + self.moment_error / base
        b = (self.derivative + self.derivative_error) / base
        c = 0.5 * curvature / base
        lead, linear = a - b * start + c * start * start, b - 2.0 * c * start
        candidates = [1.0 / start, 1.0 / stop]
        if lead < 0.0 and candidates[1] < (vertex := -linear / (2.0 * lead)) < candidates[0]:
            candidates.append(vertex)
        return max((lead * s + linear) * s + c for s in candidates) * (1.0 + 1e-12)


def _sums(
    exponent: float, fraction: float, mass: Array, mass_error: Array, near: Array, far: Array, inexact: Array
) -> Array:
    """Returns the sums behind M - 1, M' and M'', and behind their rounding errors."""
    slope = far - near
    excess = near + fraction * slope
    log = np.log1p(excess)
    power = np.expm1(exponent * log)
    first = np.expm1((exponent - 1.0) * log)
    second = np.exp((exponent - 2.0) * log) * slope
    term = power - exponent * excess
    terms = np.empty((6, len(mass)))
    terms[0], terms[1], terms[2] = term, slope * first, second * slope
    # What rounding does to them, to first order: of the mass, of the ratio R and its slope (`inexact`), of log1p,
    # expm1 and exp (assumed good to two units), of sums and products.
    size_of_log = np.abs(log)
    e, inexact = abs(exponent), inexact + 8.0 * _UNIT * (1.0 + size_of_log)
    ratio, ratios = 1.0 + excess, 2.0 + near + far
    first, slope, second = np.abs(first), np.abs(slope), np.abs(second)
    terms[3] = e * (inexact * ratio * first + 8.0 * _UNIT * (size_of_log * (1.0 + power) + np.abs(excess)))
    terms[3] += 8.0 * _UNIT * np.abs(power) + mass_error * np.abs(term)
    terms[4] = mass_error * slope * first + inexact * (ratios * first + (e + 2.0) * slope * (2.0 + first))
    terms[5] = second * (((e + 4.0) * inexact + mass_error) * slope + 2.0 * inexact * ratios)
    # On one thread: BLAS starts several, which costs more than it gains here.
    found: Array = np.einsum("ji,i->j", terms, mass)
    return found
