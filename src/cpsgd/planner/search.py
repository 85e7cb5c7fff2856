"""The best k, m and X for a number of bits.

Without secure aggregation k + m = 2^bits: every value a message can hold is used. Given k, hence m, the target fixes
the smallest s, X = s(k-1)/2 follows, and with it the expected error. A larger s means more noise than privacy asks
for, but also a wider range; it is chosen where clipping would cost more than that. So the search runs over k alone:
all small ones, odd and even, and a geometric ladder of odd ones beyond.

With secure aggregation the modulus, a power of two, must fit the bits. What is needed grows with m (more noise; and
with it goes a smaller s, so that the vectors take more levels). For each k the largest m that fits is found by
bisection; where not even m = 1 fits, s is widened until it does.

Candidates are ranked with s as a Gaussian of slightly smaller variance would need it; the best few are then certified.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scipy.optimize import minimize_scalar

from cpsgd.codec import quantize
from cpsgd.error import ExpectedError
from cpsgd.errors import ConditionError
from cpsgd.planner import error_model, modulus
from cpsgd.planner.target import Target
from cpsgd.privacy.adjacency import distance
from cpsgd.protocol import MAX_RADIX

# How many of the ranked candidates are certified: fewer with more noise, where the ranking is the better and the
# certificates the slower.
_FINALISTS = ((1_000_000, 12), (5_000_000, 3), (math.inf, 1))
# Beyond this many standard deviations clipping costs nothing worth a wider range.
_ENOUGH_REACH = 7.0
# X is at least this many standard deviations of a rotated coordinate, which bounds the bias: clipping takes at most
# 0.2 % of D². Without a bound, where the noise is larger than any vector, clipping everything to nothing would "win".
_LEAST_REACH = 2.5
# More noise than this is as good as Gaussian already, and slow to certify.
_MOST_NOISE_TRIALS = 10**10
# 1 + _EXCESS/√N is how far the certificates are from a Gaussian of equal variance; only ranks candidates.
_EXCESS = 8.0
# A modulus, or k + m, must fit the radix of a message: 2^31 is the largest power of two that does.
MAX_BITS = MAX_RADIX.bit_length() - 1


@dataclass(frozen=True)
class Setting:
    """What a design is judged by: whose mean is estimated, and how it travels.

    Attributes:
        clients: Messages a round is planned for; the modulus must hold them all.
        surviving: Messages the error is predicted for.
        dim: d.
        clip_norm: D.
        rotate: Whether vectors are rotated.
        overflow: The overflow probability allowed a round under secure aggregation, None without.
    """

    clients: int
    surviving: int
    dim: int
    clip_norm: float
    rotate: bool
    overflow: float | None


@dataclass(frozen=True)
class Design:
    """Parameters that keep the target, and the error they promise. The modulus is a power of two, or None."""

    levels: int
    trials: int
    coordinate_range: float
    modulus: int | None
    error: ExpectedError


def best_design(setting: Setting, target: Target, bits: float) -> Design | None:
    """The design of at most `bits` bits a coordinate with the smallest expected error, or None if there is none."""
    values = values_of(bits)
    ranked: list[tuple[float, int, int]] = []
    for levels in _ladder(values):
        trials = _most_trials(setting, target, levels, values)
        scale = _rough_scale(target, trials)
        rough = _with_best_scale(setting, levels, trials, scale, values)
        if rough is not None:
            ranked.append((rough.error.total, levels, trials))
        # More levels only widen the range, and this one is wide enough already.
        if levels % 2 and levels > 3 and 0.5 * scale * (levels - 1) >= _range_worth_having(setting):
            break
    ranked.sort()
    most = next(count for limit, count in _FINALISTS if target.honest * values < limit)
    certified = [_certified(setting, target, levels, trials, values) for _, levels, trials in ranked[:most]]
    finalists = [finalist for finalist in certified if finalist is not None]
    # The slower certificate may allow less noise, by about the same factor for all; the winner may change with it.
    found: dict[_Finalist, Design] = {}
    factor = 1.0
    for _ in range(2):
        designs = [(_with_best_scale(setting, f.levels, f.trials, factor * f.scale, values), f) for f in finalists]
        feasible = [(design.error.total, f) for design, f in designs if design is not None]
        winner = min(feasible, key=lambda pair: pair[0])[1] if feasible else None
        if winner is None or winner in found:
            break
        scale = target.smallest_scale(winner.levels, winner.trials)
        design = _with_best_scale(setting, winner.levels, winner.trials, scale, values)
        if design is not None:
            found[winner] = design
        if winner.scale == 0.0:
            break
        factor = scale / winner.scale
    return min(found.values(), key=lambda design: design.error.total, default=None)


def values_of(bits: float) -> int:
    """How many values fit into this many bits."""
    return math.floor(math.exp2(bits) * (1.0 + 1e-12))


def _largest_power(values: int) -> int:
    """The largest power of two up to `values`."""
    return 1 << (values.bit_length() - 1)


def design_of(setting: Setting, levels: int, trials: int, coordinate_range: float) -> Design:
    """The design with these parameters: the error it promises and the modulus it needs."""
    error = error_model.predict(
        clients=setting.surviving,
        dim=setting.dim,
        clip_norm=setting.clip_norm,
        levels=levels,
        trials=trials,
        coordinate_range=coordinate_range,
        rotate=setting.rotate,
    )
    needed = _needed_modulus(setting, levels, trials, coordinate_range)
    # Secure aggregation counts modulo a power of two; packed, it takes no more room than the smaller modulus.
    rounded = None if needed is None else 1 << (needed - 1).bit_length()
    return Design(levels, trials, coordinate_range, rounded, error)


def _needed_modulus(setting: Setting, levels: int, trials: int, coordinate_range: float) -> int | None:
    """The smallest modulus for these parameters, None without secure aggregation."""
    if setting.overflow is None:
        return None
    return modulus.smallest_modulus(
        clients=setting.clients,
        dim=setting.dim,
        clip_norm=setting.clip_norm,
        levels=levels,
        trials=trials,
        coordinate_range=coordinate_range,
        rotate=setting.rotate,
        overflow=setting.overflow,
    )


def _ladder(values: int) -> list[int]:
    """Numbers of levels worth trying, in increasing order.

    All up to 9; then odd ones, each about a seventh larger than the last; and the mirror image of these, for where
    levels are needed so badly that only few values are left for noise.
    """
    steps = [*range(1, 10)]
    while steps[-1] < values:
        steps.append((round(steps[-1] * 1.15) + 1) | 1)
    levels = {step for step in steps if 2 <= step < values}
    levels |= {values - step for step in steps if values - step >= 2}
    return sorted(k for k in levels if k <= quantize.MAX_LEVELS)


def _range_worth_having(setting: Setting) -> float:
    """The X beyond which clipping costs nothing. Unrotated, a single coordinate may be the whole vector: X = D."""
    spread = _ENOUGH_REACH / math.sqrt(setting.dim) if setting.rotate else 1.0
    return setting.clip_norm * min(1.0, spread)


def _least_range(setting: Setting) -> float:
    """The X below which too much would be clipped."""
    spread = _LEAST_REACH / math.sqrt(setting.dim) if setting.rotate else 1.0
    return setting.clip_norm * min(1.0, spread)


def _most_trials(setting: Setting, target: Target, levels: int, values: int) -> int:
    """The largest m for these levels and bits, by the rough scale, and at least 1."""
    most = min(values - levels, max(1, _MOST_NOISE_TRIALS // target.honest), target.most_trials)
    if setting.overflow is None:
        return most

    def fits(trials: int) -> bool:
        coordinate_range = 0.5 * _rough_scale(target, trials) * (levels - 1)
        needed = _needed_modulus(setting, levels, trials, coordinate_range)
        return needed is not None and needed <= _largest_power(values)

    low, high = 1, most + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _rough_scale(target: Target, trials: int) -> float:
    noise_trials = target.honest * trials
    allowed = 0.5 * math.sqrt(noise_trials) * target.gaussian_mu / (1.0 + _EXCESS / math.sqrt(noise_trials))
    return distance(target.adjacency, target.clip_norm) / allowed


@dataclass(frozen=True)
class _Finalist:
    levels: int
    trials: int
    scale: float


def _certified(setting: Setting, target: Target, levels: int, trials: int, values: int) -> _Finalist | None:
    """The smallest scale by the quick certificate; for secure aggregation with fewer trials until the modulus fits."""
    while True:
        try:
            scale = target.smallest_scale(levels, trials, renyi=False)
        except ConditionError:
            return None
        needed = _needed_modulus(setting, levels, trials, max(0.5 * scale * (levels - 1), _least_range(setting)))
        if trials == 1 or needed is None or needed <= _largest_power(values):
            return _Finalist(levels, trials, scale)
        # The rough scale was a little too optimistic. The modulus grows like √m.
        trials = max(1, min(trials - 1, math.floor(trials * (_largest_power(values) / needed) ** 2)))


def _with_best_scale(setting: Setting, levels: int, trials: int, smallest_scale: float, values: int) -> Design | None:
    """The design with the best scale that is at least `smallest_scale` and whose modulus fits, None if none fits."""
    half = 0.5 * (levels - 1)
    widest = _range_worth_having(setting) / half

    def at(scale: float) -> Design:
        return design_of(setting, levels, trials, half * scale)

    if smallest_scale >= widest:
        scale = smallest_scale
    elif not setting.rotate:
        scale = widest * (1.0 + 1e-12)
    else:
        low = max(smallest_scale, _least_range(setting) / half)
        found = minimize_scalar(
            lambda x: math.log(at(math.exp(x)).error.total),
            bounds=(math.log(low), math.log(widest)),
            method="bounded",
            options={"xatol": 1e-3},
        )
        # The bounded search never tries the ends themselves.
        scale = min([low, math.exp(float(found.x)), widest], key=lambda s: at(s).error.total)
    if setting.overflow is None:
        return at(scale)
    # A wider scale makes the vectors small against the noise, until only the noise has to fit.
    high = scale
    while (at(high).modulus or 0) > values:
        high *= 2.0
        if high > 1e6 * scale:
            return None
    low = scale if high == scale else 0.5 * high
    while high > low * (1.0 + 1e-4):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if (at(middle).modulus or 0) <= values else (middle, high)
    return at(high)
