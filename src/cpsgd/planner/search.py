"""Searches for the best mechanism, and its best parameters, for a number of bits.

Every mechanism names candidates that fill the values a message can hold. Given its levels and noise, the target fixes
the smallest scale s, and with it the expected error. A larger s means more noise than privacy asks for, but also a
wider range of coordinates; it is chosen where clipping would cost more than that.

With secure aggregation the modulus must fit the bits. What is needed grows with the noise (and with it
goes a smaller s, so that the vectors take more levels). Where not even the least noise fits, s is widened.

Candidates are ranked with s as a Gaussian of slightly smaller variance would need it; the best few are then certified.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import TypeVar

from cpsgd._searches import lowest, smallest_enough
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import ExpectedError, Mechanism
from cpsgd.mechanisms.interface import Search
from cpsgd.planner import modulus
from cpsgd.planner.target import Target
from cpsgd.protocol import MAX_RADIX
from cpsgd.secagg.pair.extension import LARGEST_PRIME, least_prime

# How many of the ranked candidates are certified: fewer with more noise, where the ranking is the better and the
# certificates the slower.
_FINALISTS = ((1_000_000, 12), (5_000_000, 3), (math.inf, 1))
# How many of them are looked at more closely before their certificates are given up.
_DRAFTED = 2
# A mechanism whose scale is not computed at once waits for those whose error is at most this much larger.
_WAIT = 1.05
# How many finalists may turn out to have no certificate, before none of them is taken to have one.
_MOST_REFUSED = 4
# The ideal scale times this is surely below what any certificate allows: all of them bound the Fisher information of a
# shift from above, which is at least one over the variance (Cramér and Rao). The rest is for tails and tolerances.
_SURELY = 0.999
# A design that is finished may have less error by about this factor; this near the Gaussian's that is not worth a look.
_AS_FINISHED, _CLOSE_TO_GAUSSIAN = 0.999, 1.002
# No error falls faster than this power of the scale: the square, and once more where noise depends on it.
_FALLS = 4.0
_UNACCOUNTED = "the finished protocol has no guarantee"
# Next to no noise needs a scale that no error is worth, and that no range of coordinates allows.
_FARTHEST = 1e9
# No scale is widened by more than this for the sake of the modulus.
_WIDEST = 2.0**19
# The best scale is known within this factor before it is interpolated.
_NEAR_THE_BEST_SCALE = 0.05
# By this much a scale is more than roundings wider than another.
_WIDER = 1.0 + 1e-6
# A modulus, or the values of a message, must fit the radix of a message, which is below 2^32.
MAX_BITS = MAX_RADIX.bit_length() - 1


@dataclass(frozen=True)
class Setting:
    """The setting that a design is judged in: the vectors, and the transport of messages.

    Attributes:
        clients: Messages a round is planned for; the modulus must hold them all.
        surviving: Messages the error is predicted for.
        dim: d.
        clip_norm: D.
        rotate: Whether vectors are rotated.
        overflow: The overflow probability allowed per round under secure aggregation, None without.
        mechanisms: The mechanisms whose parameters are searched for.
        mean_norm: Bound on the norm of the mean, used for the modulus alone; None if only D is known.
        most_values: For two servers, whose modulus is a prime: the most integers that a coordinate may be; else None.
        added: Messages of zero among them that servers add.
    """

    clients: int
    surviving: int
    dim: int
    clip_norm: float
    rotate: bool
    overflow: float | None
    mechanisms: tuple[type[Mechanism], ...]
    mean_norm: float | None = None
    most_values: int | None = None
    added: int = 0

    @property
    def spread(self) -> float:
        """Factor of the variance where the sum is divided by the number of reports, not of messages."""
        return (self.surviving / (self.surviving - self.added)) ** 2

    def design(self, mechanism: Mechanism) -> Design:
        """Returns the design with this mechanism: the error it promises and the modulus it needs."""
        return Design(mechanism, self.needed_modulus(mechanism), self.error(mechanism))

    def error(self, mechanism: Mechanism) -> ExpectedError:
        """Returns the predicted error of a mechanism."""
        found = _predicted_error(mechanism, self.surviving, self.dim, self.clip_norm, self.rotate)
        return ExpectedError(found.noise * self.spread, found.rounding * self.spread, found.clipping)

    def needed_modulus(self, mechanism: Mechanism) -> int | None:
        """Returns the smallest modulus for a mechanism, None without secure aggregation."""
        if self.overflow is None:
            return None
        smallest = modulus.smallest_modulus(
            mechanism,
            clients=self.clients,
            dim=self.dim,
            clip_norm=self.clip_norm,
            rotate=self.rotate,
            mean_norm=self.mean_norm,
            overflow=self.overflow,
        )
        return smallest if self.most_values is None else prime_modulus(smallest, mechanism.values)

    def useful_scales(self, mechanism: Mechanism) -> tuple[float, float]:
        """Returns the smallest and largest scale worth trying in the trade between clipping and noise."""
        return mechanism.useful_scales(dim=self.dim, clip_norm=self.clip_norm, rotate=self.rotate)


@lru_cache(maxsize=8192)
def _predicted_error(mechanism: Mechanism, clients: int, dim: int, clip_norm: float, rotate: bool) -> ExpectedError:
    return mechanism.predicted_error(clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)


@dataclass(frozen=True)
class Considered:
    """The best that one mechanism reaches at a number of bits.

    Attributes:
        mechanism: Its name.
        squared_error: Expected squared error of its best design, None where it has none. If not `proved`, an estimate
            of what no design of it comes below, which is not below what another is proved to reach.
        proved: Whether that design was certified.
        reason: Why it has no design.
    """

    mechanism: str
    squared_error: float | None
    proved: bool = False
    reason: str | None = None


@dataclass(frozen=True)
class Design:
    """A mechanism that keeps the target, the smallest modulus for it (or None), and the error it promises.

    The best one of a search knows which mechanisms were `considered`, the nearest to the Gaussian first.
    """

    mechanism: Mechanism
    modulus: int | None
    error: ExpectedError
    considered: tuple[Considered, ...] = ()


def gaussian_squared_error(setting: Setting, target: Target) -> float:
    """Returns the squared error of the mean with just enough Gaussian noise, or at δ = 0 Laplace noise.

    Only the honest survivors' noise counts for privacy; all survivors' noise counts as error.
    """
    # Variance of the honest noise in the sum; at δ = 0 that of the Laplace mechanism.
    needed = (target.distance / target.gaussian_mu) ** 2 if target.claim.delta else 2.0 * target.laplace_spread**2
    return setting.spread * target.dim * needed / (target.honest * setting.surviving)


def prime_modulus(smallest: int, values: int) -> int:
    """Returns the least prime from `smallest` on that has enough points for a range proof of `values` values."""
    # Beyond the largest prime nothing fits: a number that no number of bits holds says so.
    return least_prime(max(smallest, values + 2)) if smallest <= LARGEST_PRIME else 2 * MAX_RADIX


AnyDesign = TypeVar("AnyDesign", bound=Design)


def roughly_feasible(setting: Setting, target: Target, bits: float) -> bool:
    """Returns whether some mechanism has a candidate whose rough scale fits; nothing is certified."""
    search = _search(setting, target, bits)
    return any(
        _with_best_scale(setting, candidate, target.rough_scale(candidate), values_of(bits)) is not None
        for kind in setting.mechanisms
        for candidate in kind.candidates(search)
    )


def feasible(setting: Setting, target: Target, bits: float) -> bool:
    """Returns whether some mechanism has a design that is certified."""
    target = replace(target, draft=True)
    search = _search(setting, target, bits)
    values = values_of(bits)
    contenders = [_Contender.of(setting, target, kind, search, values) for kind in setting.mechanisms]
    return any(
        contender.ranked and contender.best(setting, target, values) is not None
        for contender in sorted(contenders, key=lambda each: each.floor)
    )


def _search(setting: Setting, target: Target, bits: float) -> Search:
    """Returns the planner's question to mechanisms at this many bits."""
    values = values_of(bits)

    def fits(candidate: Mechanism) -> bool:
        needed = setting.needed_modulus(candidate.with_scale(target.rough_scale(candidate)))
        return needed is None or needed <= values

    return Search(
        values=values if setting.most_values is None else min(values, setting.most_values),
        honest=target.honest,
        variation=target.variation,
        dim=setting.dim,
        clip_norm=setting.clip_norm,
        rotate=setting.rotate,
        rough_scale=target.rough_scale,
        fits=fits,
        bits=bits,
        levels=target.levels,
    )


class Contest:
    """The comparison of all mechanisms' candidates at a number of bits per coordinate.

    Attributes:
        floor: An expected error that no certificate brings any of them below.
        promise: The error that the best of them will have, roughly.
    """

    def __init__(self, setting: Setting, target: Target, bits: float) -> None:
        self._setting, self._target, self._values = setting, target, values_of(bits)
        self._close = _CLOSE_TO_GAUSSIAN * gaussian_squared_error(setting, target)
        search = _search(setting, target, bits)
        kinds = setting.mechanisms
        if len(kinds) > 1 and bits >= 1.0:
            # From one bit on, others are as accurate, and their integers may be added up by anyone.
            kinds = tuple(kind for kind in kinds if kind.not_summed is None)
        contenders = [_Contender.of(setting, target, kind, search, self._values) for kind in kinds]
        # The most promising first: what it reaches may be below the others' floors. Certificates that take their time
        # are left for later where something else is about as good.
        self._contenders = sorted(contenders, key=lambda each: each.promise * (1.0 if each.at_once else _WAIT))
        self.floor = min((each.floor for each in contenders), default=math.inf)
        self.promise = min((each.promise for each in contenders), default=math.inf)

    def promising(self, enough: float) -> bool:
        """Returns whether certificates may bring any of them to an error of at most `enough`."""
        return any(
            each.floor <= enough and not each.hopeless(self._setting, self._target, enough) for each in self._contenders
        )

    def draft(self, enough: float) -> Design | None:
        """Returns approximately the best design; once an error is below `enough`, slow certificates are skipped."""
        return self._best(lambda design: design, replace(self._target, draft=True), enough)

    def best(self, finish: Callable[[Design], AnyDesign]) -> AnyDesign | None:
        """Returns the design with the smallest expected error, or None if there is none.

        Args:
            finish: Makes what is wanted of a certified design. It may turn out to be less accurate, or impossible.

        Raises:
            ConditionError: No design can be finished.
            ParameterError: The same.
        """
        return self._best(finish, self._target, 0.0)

    def _best(self, finish: Callable[[Design], AnyDesign], target: Target, enough: float) -> AnyDesign | None:
        best: AnyDesign | None = None
        considered: list[Considered] = []
        failure: ConditionError | ParameterError | None = None
        for contender in self._contenders:
            name = contender.kind.name
            # No certificate brings it below what the others are proved to reach.
            if best is not None and best.error.total <= contender.floor < math.inf:
                considered.append(Considered(name, contender.floor))
                continue
            reached = math.inf if best is None else best.error.total
            if (reached <= enough and not contender.at_once) or contender.hopeless(self._setting, target, reached):
                considered.append(Considered(name, reached))
                continue
            design = contender.best(self._setting, target, self._values)
            if design is None:
                considered.append(Considered(name, None, reason=contender.unfit(self._setting, self._values)))
                continue
            error = design.error.total
            if best is None or error < best.error.total or (error * _AS_FINISHED < best.error.total > self._close):
                try:
                    finished = finish(design)
                except (ConditionError, ParameterError) as reason:
                    failure = reason
                    considered.append(Considered(name, None, reason=_UNACCOUNTED))
                    continue
                error = finished.error.total
                if best is None or error < best.error.total:
                    best = finished
            considered.append(Considered(name, error, proved=True))
        if best is None:
            if failure is not None:
                raise failure
            return None
        considered.sort(key=lambda each: math.inf if each.squared_error is None else each.squared_error)
        return replace(best, considered=tuple(considered))


@dataclass(frozen=True)
class _Contender:
    """The candidates of one mechanism, the most promising first, with an estimated error and a lower bound on it."""

    kind: type[Mechanism]
    floor: float
    promise: float
    ranked: list[Mechanism]
    at_once: bool

    @classmethod
    def of(cls, setting: Setting, target: Target, kind: type[Mechanism], search: Search, values: int) -> _Contender:
        """Ranks a mechanism's candidates by their rough scales; `values` limits the values of sums."""
        found = []
        for candidate in kind.candidates(search):
            scale = target.rough_scale(candidate)
            rough = _with_best_scale(setting, candidate, scale, values)
            found.append((rough.error.total if rough is not None else math.inf, scale, candidate))
        found.sort(key=lambda each: each[0])
        floor, ranked = math.inf, [(error, candidate) for error, _, candidate in found if error < math.inf]
        for error, scale, candidate in found:
            ideal = _SURELY * target.ideal_scale(candidate)
            # Errors fall about as s² does: where that is not enough, it need not be known exactly.
            if error < math.inf and error * (ideal / scale) ** _FALLS >= floor:
                continue
            design = _with_best_scale(setting, candidate, ideal, values)
            floor = min(floor, design.error.total if design is not None else math.inf)
        promise = ranked[0][0] if ranked else math.inf
        at_once = bool(ranked) and target.closed_form(ranked[0][1])
        return cls(kind, floor, promise, [candidate for _, candidate in ranked], at_once)

    def unfit(self, setting: Setting, values: int) -> str:
        """Returns the reason why there is no design."""
        if values < self.kind.fewest_values:
            return f"a message needs {self.kind.fewest_values} values"
        if self.ranked:
            return "too little noise for a certificate"
        return "no sum fits the modulus" if setting.overflow is not None else "nothing fits"

    def hopeless(self, setting: Setting, target: Target, reached: float) -> bool:
        """Returns whether no candidate is likely to get below an error that another mechanism reaches."""
        if math.isinf(reached) or not self.ranked or not target.found_by_trying(self.ranked[0]):
            return False
        return not any(_might_reach(setting, target, candidate, reached) for candidate in self.ranked[:_DRAFTED])

    def best(self, setting: Setting, target: Target, values: int) -> Design | None:
        """Returns the best design that is certified."""
        most = next(count for limit, count in _FINALISTS if target.honest * values < limit)
        found = self._best_of(self.ranked[:most], setting, target, values)
        if found is None:
            # There is so little noise that what ranks high has no certificate; the quick one finds what does.
            sure = [candidate for candidate in self.ranked if target.quickly_certified(candidate)]
            found = self._best_of(sure[:most], setting, target, values)
        return found

    @staticmethod
    def _best_of(candidates: list[Mechanism], setting: Setting, target: Target, values: int) -> Design | None:
        """Returns the certified design with the smallest error: certifies the most promising candidates in turn."""
        finalists = [_certified(setting, target, candidate, values) for candidate in candidates]
        # The slower certificates may allow less noise, by about the same factor for all; the winner may change with it.
        found: dict[_Finalist, Design] = {}
        refused: set[_Finalist] = set()
        factor = 1.0
        while len(found) < 2 and len(refused) < _MOST_REFUSED:
            left = [f for f in finalists if f not in refused]
            designs = [(_with_best_scale(setting, f.mechanism, factor * f.scale, values), f) for f in left]
            feasible = [(design, f) for design, f in designs if design is not None]
            if not feasible:
                break
            rough, winner = min(feasible, key=lambda pair: pair[0].error.total)
            if winner in found:
                break
            # Where clipping or the modulus wants a wider scale than privacy does, the smallest one need not be known.
            wanted = rough.mechanism.scale
            if wanted <= factor * winner.scale * _WIDER:
                wanted = 0.0
            try:
                scale = target.smallest_scale(winner.mechanism, wanted)
                design = _with_best_scale(setting, winner.mechanism, scale, values)
                # Where sums do not fit at that scale a wider one is noise for nothing; less noise may fit.
                if design is not None and 0.0 < scale * _WIDER < design.mechanism.scale:
                    quieter = _fitting(setting, winner.mechanism, scale, values)
                    if quieter is not None:
                        other = _with_best_scale(setting, quieter, target.smallest_scale(quieter), values)
                        if other is not None and other.error.total < design.error.total:
                            design = other
            except ConditionError:
                refused.add(winner)
                continue
            if design is None:
                refused.add(winner)
                continue
            found[winner] = design
            if winner.scale == 0.0:
                break
            if scale != wanted:
                factor = scale / winner.scale
        return min(found.values(), key=lambda design: design.error.total, default=None)


def _might_reach(setting: Setting, target: Target, candidate: Mechanism, reached: float) -> bool:
    """Returns whether a candidate may have a smaller error than `reached`, by a draft of its certificate."""

    def better(scale: float) -> bool:
        return setting.error(candidate.with_scale(scale)).total < reached

    least, widest = setting.useful_scales(candidate)
    low = min(
        (least, target.ideal_scale(candidate), widest), key=lambda s: setting.error(candidate.with_scale(s)).total
    )
    if not better(low):
        return False
    high = 2.0 * low
    while better(high):
        low, high = high, 2.0 * high
    while high > low * 1.0005:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if better(middle) else (low, middle)
    # With more than this scale it is worse; with less it needs more privacy than this.
    return target.might_keep(candidate.with_scale(high))


def values_of(bits: float) -> int:
    """Returns the number of values that fit into this many bits."""
    return math.floor(math.exp2(bits) * (1.0 + 1e-12))


@dataclass(frozen=True)
class _Finalist:
    mechanism: Mechanism
    scale: float


def _certified(setting: Setting, target: Target, candidate: Mechanism, values: int) -> _Finalist:
    """Returns the candidate with its smallest scale by the quick certificate.

    For secure aggregation the noise is reduced until the modulus fits.
    """
    while True:
        scale = target.quick_scale(candidate)
        least, _ = setting.useful_scales(candidate)
        needed = setting.needed_modulus(candidate.with_scale(max(scale, least)))
        if needed is None or needed <= values:
            return _Finalist(candidate, scale)
        # The rough scale was a little too optimistic. The modulus grows like the noise's deviation.
        quieter = candidate.quieter((values / needed) ** 2)
        if quieter is None:
            return _Finalist(candidate, scale)
        candidate = quieter


def _fitting(setting: Setting, mechanism: Mechanism, scale: float, values: int) -> Mechanism | None:
    """Returns the mechanism with reduced noise so that its sums fit at the scale it needs, or None.

    `scale` is what this one needs; with less noise it grows like one over the noise's deviation.
    """
    candidate: Mechanism | None = mechanism
    while candidate is not None:
        rougher = scale * math.sqrt(mechanism.noise.variance / candidate.noise.variance)
        needed = setting.needed_modulus(candidate.with_scale(rougher))
        if needed is None or needed <= values:
            return None if candidate is mechanism else candidate
        candidate = candidate.quieter((values / needed) ** 2)
    return None


def _with_best_scale(setting: Setting, candidate: Mechanism, smallest_scale: float, values: int) -> Design | None:
    """Returns the design with the best scale from `smallest_scale` on whose modulus fits; None if none fits."""
    least, widest = setting.useful_scales(candidate)
    if smallest_scale > _FARTHEST * widest:
        return None

    @cache
    def over(scale: float) -> float:
        """Returns log(needed modulus / allowed modulus), at most zero if it fits."""
        needed = setting.needed_modulus(candidate.with_scale(scale)) or 0
        return math.log(needed / values) if needed > values else math.log(needed / (values + 0.5))

    # A wider scale makes the vectors small against the noise, until only the noise has to fit.
    if setting.overflow is not None and over(_WIDEST * max(smallest_scale, widest)) > 0.0:
        return None

    def at(scale: float) -> Design:
        return setting.design(candidate.with_scale(scale))

    def error_at(scale: float) -> float:
        return setting.error(candidate.with_scale(scale)).total

    if smallest_scale >= widest:
        scale = smallest_scale
    elif not setting.rotate:
        scale = widest * (1.0 + 1e-12)
    else:
        low = max(smallest_scale, least)
        near = lowest(
            lambda x: math.log(error_at(math.exp(x))), math.log(low), math.log(widest), close=_NEAR_THE_BEST_SCALE
        )
        # Exactly the ends, where one of them is best.
        scale = min([low, math.exp(near), widest], key=error_at)
    if setting.overflow is None:
        return at(scale)

    low = high = scale
    while over(high) > 0.0:
        low, high = high, 2.0 * high
        if high > _WIDEST * scale:
            return None
    return at(high if low == high else smallest_enough(over, low, high, close=1.0 + 1e-4))
