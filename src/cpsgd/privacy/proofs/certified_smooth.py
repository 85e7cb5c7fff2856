"""The smoothed certificate of a round, or of many: a product of all their coordinates.

Rounds of the same protocol are more coordinates, even if later rounds are chosen after earlier ones were seen. In the
proof coordinates are swapped for Gaussians from the last to the first, and each may depend on those before it.

A client that adds several independent steps per coordinate (the m coins of a client) is accounted for as if their sums
were released one by one: adding them up is post-processing.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from cpsgd import _validate
from cpsgd._numbers import rounded_down
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Law, Steps
from cpsgd.privacy import curves
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.curves import Family
from cpsgd.privacy.gaussian import gdp_epsilon, gdp_mu
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.privacy.proofs.certified_gaussian import SMALLEST_MASS, GaussianCertificate
from cpsgd.privacy.smoothed import Growth, fisher, growth
from cpsgd.promise import Claim
from cpsgd.run import Run

SHARES = (0.003, 0.1, 0.5)
"""Shares of δ for the tails, in the order in which they are tried: the first that will do is as good as any."""

# Coordinates at their largest distance that neighbours must be able to differ in.
_FEWEST = 3.0
# How often the budget is doubled where there is too little to smooth over: what is given away is more, and still valid.
_LARGER_BUDGETS = 4


def smoothed_certificate(
    law: Law | Steps,
    *,
    dim: int,
    sensitivity: float,
    reach: float,
    tail: float,
    rounds: int = 1,
    draft: bool = False,
) -> GaussianCertificate:
    """Returns the smoothed certificate of `rounds` rounds together: all of them are μ-GDP up to `tail_mass`.

    All its numbers are upper bounds, also in floating point.

    Args:
        law: Of the noise in one coordinate of a sum, or of the sum itself.
        dim: d.
        sensitivity: S, the largest Euclidean distance of neighbours in one round, in units of the law.
        reach: The largest distance in one coordinate.
        tail: Probability, over all coordinates and rounds together, that may be left out.
        rounds: Number of rounds that neighbours differ in.
        draft: Whether a μ that is about a percent larger will do, in a fraction of the time.

    Raises:
        ConditionError: The law's support ends too early, or a single coordinate gives away too much.

    Example:
        >>> from cpsgd.mechanisms.binomial import BinomialLaw
        >>> law = BinomialLaw(10_000, 0.5)
        >>> found = smoothed_certificate(law, dim=65_536, sensitivity=19.8177, reach=1.0, tail=1e-11)
        >>> f"{found.unit_mu * 50:.2f}"  # 50 is the standard deviation
        '1.00'
    """
    _validate.integer("dim", dim, low=1)
    _validate.positive("sensitivity", sensitivity)
    _validate.probability("tail", tail)
    copies = law.copies if isinstance(law, Steps) else 1
    coordinates = dim * copies
    # Up to the next power of two one and the same growth serves every number of rounds.
    most = 1 << (_validate.integer("rounds", rounds, low=1) - 1).bit_length()
    each = tail / (2.0 * coordinates * most)
    if each < SMALLEST_MASS:
        raise ConditionError(f"No smoothed certificate is computed for a tail of {each:.2g} per coordinate.")
    budget = sensitivity * sensitivity * copies
    if isinstance(law, Law) and coordinates * rounds < _FEWEST:
        raise ConditionError("No smoothed certificate is computed: there is next to nothing to smooth.")
    families = _families(law, min(reach, sensitivity), each, draft)
    found = _first_growth(law, min(reach, sensitivity), each, budget * most, draft)
    mu = math.sqrt(found.reached(budget * rounds)) * (1.0 + 1e-15)
    mass = coordinates * rounds * (families[0].tail + each) * (1.0 + 2.0**-50)
    return GaussianCertificate(mu=mu, unit_mu=mu / sensitivity * (1.0 + 2.0**-52), tail_mass=mass)


def smoothed_sensitivity(
    law: Law, *, dim: int, reach: float, mu: float, tail: float, rounds: int = 1, draft: bool = False
) -> float:
    """Returns the largest sensitivity, rounded down, at which `rounds` rounds together are certified as μ-GDP.

    The other arguments are those of `smoothed_certificate`.

    Raises:
        ConditionError: There is no certificate.
    """
    each = tail / (2.0 * dim * rounds)
    if each < SMALLEST_MASS:
        raise ConditionError(f"No smoothed certificate is computed for a tail of {each:.2g} per coordinate.")
    # A Gaussian of the same variance allows about that much; a smaller reach would be proved for less than is used.
    most = min(reach, 1.01 * mu * math.sqrt(law.variance / rounds))
    if dim * rounds < _FEWEST or mu * mu * law.variance < _FEWEST * most * most:
        raise ConditionError("No smoothed certificate is computed: there is next to nothing to smooth.")
    found = growth(_families(law, most, each), around=mu * mu, tail=each, draft=draft)
    allowed = math.sqrt(found.affordable(mu * mu) / rounds)
    return allowed if reach <= most else min(allowed, most)


def smoothed_epsilon(
    law: Law | Steps, *, dim: int, sensitivity: float, reach: float, delta: float, rounds: int = 1
) -> tuple[float, GaussianCertificate]:
    """Returns the smallest ε that the smoothed certificate proves for this δ, tails included, and the certificate.

    Raises:
        ConditionError: There is no certificate at any share of δ for the tails.
    """
    reason: ConditionError | None = None
    for share in SHARES:
        try:
            found = smoothed_certificate(
                law, dim=dim, sensitivity=sensitivity, reach=reach, tail=share * delta, rounds=rounds
            )
        except ConditionError as error:
            reason = error
            continue
        return gdp_epsilon(found.mu, (delta - found.tail_mass) * (1.0 - 2.0**-52)), found
    assert reason is not None
    raise reason


@lru_cache(maxsize=32)
def _families(law: Law | Steps, reach: float, tail: float, draft: bool = False) -> list[Family]:
    if isinstance(law, Steps):
        return curves.of_steps(law, reach=reach, tail=tail, draft=draft)
    return curves.of_law(law, reach=reach, tail=tail)


def _first_growth(law: Law | Steps, reach: float, tail: float, budget: float, draft: bool) -> Growth:
    """Returns the growth up to this budget, or up to a few times the budget if it is too small for smoothing."""
    for _ in range(_LARGER_BUDGETS):
        try:
            return _growth(law, reach, tail, budget, draft)
        except ConditionError:
            budget *= 2.0
    return _growth(law, reach, tail, budget, draft)


@lru_cache(maxsize=64)
def _growth(law: Law | Steps, reach: float, tail: float, budget: float, draft: bool) -> Growth:
    families = _families(law, reach, tail, draft)
    return growth(families, around=budget * max(fisher(family) for family in families), tail=tail, draft=draft)


# ---------------------------------------------------------------------- the proof

# The certificate is worth its time where it may be better by more than this; nearer to the Gaussian of equal variance
# than this, nothing is worth it.
_GAIN, _CLOSE = 1.002, 0.998
# A certificate's μ is at least this share of the Gaussian's of equal variance.
_SURELY = 0.999
# How far sums without separate noise are from a Gaussian of equal variance.
_STEPS_EXCESS = 1.0015
# Certificates of sums without separate noise are tried until μ is this close to what is allowed.
_CLOSE_ENOUGH, _AIM, _STEPS_TRIES, _SAME_ODDS = 0.9998, 1.0 + 1e-4, 12, 2
# After so many tries, each one more may be so many times farther: then odds are nearly certain, and nothing is smooth.
_SOON, _PATIENCE = 4, 4.0
# Drafts of the certificate; their μ over that of the certificate, roughly and at most; how near to what is allowed they
# come.
_DRAFTS, _DRAFT_EXCESS, _DRAFT_MOST, _DRAFT_CLOSE = 6, 1.015, 1.04, 0.03
_DRAFT_OFFSET, _DRAFT_SHARE = 0.0015, 0.25
_DRAFT_CLOSE_ENOUGH, _DRAFT_AIM = 0.985, 1.005
# How much wider the scale becomes where there is no certificate, at first and at most.
_STEP, _LONGEST_STEP = 1.02, 1.3
# Scales within this are the same; μ within this of what is allowed is near.
_SAME_SCALE, _FAR = 1e-7, 0.01


@dataclass(frozen=True)
class Smoothed(Proof):
    """The smoothed certificate of all coordinates, and of all rounds, together."""

    name: str = "smoothed-certificate"
    citation: str = (
        "smoothed Gaussian certificate of all coordinates together (docs/proofs/smoothed-certificate.md), on Dong, "
        'Roth and Su, "Gaussian Differential Privacy", JRSS B 2022, and Balle and Wang, ICML 2018, Theorem 8'
    )
    effort: int = 3
    quick: ClassVar[bool] = False

    def supports(self, run: Run) -> bool:
        """Returns whether sums are integers: with log-concave noise, or by steps that are their own noise."""
        return isinstance(base.law_of(run), Law | Steps)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns ε of all rounds' coordinates as one product, each as if it had the fewest clients."""
        if _steps(run) and not base.alone(run) and run.sampling.scheme != "every":
            return self._sampled_epsilon(run, delta)
        return self._joint_epsilon(run, delta, below)

    def _sampled_epsilon(self, run: Run, delta: float) -> Proved:
        """Returns the smaller of two ε: of sampled single rounds, and of all rounds at once without sampling."""
        shares = [base.SAMPLED_TAIL_SHARE] if run.sampling.rate < 1.0 else base.TAIL_SHARES
        citation = f"{self.citation}; {base.COMPOSED[run.sampling.scheme]}"
        try:
            found = Proved(*base.composed(run, delta, self, shares), citation)
        except ConditionError as reason:
            try:
                return self._joint_epsilon(run, delta, math.inf)
            except ConditionError:
                raise reason from None
        try:
            together = self._joint_epsilon(run, delta, found.epsilon)
        except ConditionError:
            return found
        return min(found, together, key=lambda each: each.epsilon)

    def _joint_epsilon(self, run: Run, delta: float, below: float) -> Proved:
        """Returns ε of all rounds together, whose coordinates are taken as those of one long vector.

        Raises:
            ConditionError: ε is not computed, since it would hardly be less than `below`; or the proof does not hold.
        """
        law, rounds, sensitivity = _law(run), base.counted(run), base.sensitivity(run)
        least = 0.0
        if isinstance(law, Law):
            # No certificate comes below a Gaussian of equal variance.
            mu = sensitivity * math.sqrt(rounds) / math.sqrt(law.variance)
            if (floor := gdp_epsilon(mu, delta) * _GAIN) >= below:
                raise ConditionError(f"could not come below {rounded_down(floor)}, so not computed")
            least = gdp_epsilon(mu * _SURELY, delta)

        def prove(left: float) -> tuple[float, float]:
            reach = run.protocol.reach(run.adjacency)
            epsilon, certificate = smoothed_epsilon(
                law, dim=run.protocol.dim, sensitivity=sensitivity, reach=reach, delta=left, rounds=rounds
            )
            return epsilon, certificate.tail_mass

        several = "" if base.alone(run) else "; rounds are more coordinates of one product"
        return Proved(*base.with_sampler(run, delta, prove, least=least), self.citation + several)

    def cost(self, run: Run, tail: float) -> Rounds:
        """Returns the equivalent Gaussian of one round."""
        # What is proved are hockey-stick divergences of pairs, up to the tail: all that sampling needs.
        counted = base.counted_tail(run.sampling)
        found = _certificate(run, min(0.5, tail / counted))
        return Rounds(found.mu, 1, counted * found.tail_mass * (1.0 + 1e-15), _variation(run))

    def joint_cost(self, run: Run, tail: float) -> Rounds:
        """Returns rounds that are √w-GDP together as if each of them were √(w/count)-GDP."""
        # Up to the next power of two the certificate is made for, so that the same serves every count.
        count = run.rounds
        most = 1 << (count - 1).bit_length()
        found = _certificate(run, min(0.5, tail * most), count)
        return Rounds(
            mu=found.mu / math.sqrt(count) * (1.0 + 1e-15),
            count=count,
            tail_mass=found.tail_mass / count * (1.0 + 1e-15),
            variation=_variation(run),
        )

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns approximately the smallest scale that the certificate of all rounds together proves."""
        law = _law(run)
        if isinstance(law, Steps):
            return _steps_scale(run, claim, wanted, draft)
        if run.sampling.sampled:
            raise ConditionError("The certificate of all rounds together knows of no sampling.")
        if known <= base.ideal_scale(run, claim) / _CLOSE:
            raise ConditionError("The scale is as small as can be.")
        reason: ConditionError | None = None
        for share in SHARES:
            mu = gdp_mu(claim.epsilon, claim.delta * (1.0 - 1.01 * share))
            try:
                allowed = smoothed_sensitivity(
                    law,
                    dim=run.protocol.dim,
                    reach=run.protocol.reach(run.adjacency),
                    mu=mu,
                    tail=share * claim.delta,
                    rounds=base.counted(run),
                    draft=draft,
                )
            except ConditionError as error:
                reason = error
                continue
            return base.scale_for(run, allowed)
        assert reason is not None
        raise reason

    def rough_scale(self, run: Run, claim: Claim) -> float:
        """Returns the scale that a Gaussian of slightly smaller variance would need."""
        return base.ideal_scale(run, claim) * _STEPS_EXCESS

    def might_keep(self, run: Run, claim: Claim) -> bool:
        """Returns False if a draft's μ is clearly above the μ that the claim allows. True where there is no draft."""
        if not isinstance(_law(run), Steps):
            return True
        allowed = _Allowed.of(run, claim)
        try:
            return _certificate(run, allowed.tail, allowed.rounds, draft=True).mu <= _DRAFT_MOST * allowed.mu
        except ConditionError:
            return True


def _law(run: Run) -> Law | Steps:
    law = base.law_of(run)
    assert isinstance(law, Law | Steps)
    return law


def _steps(run: Run) -> bool:
    return isinstance(base.law_of(run), Steps)


def _variation(run: Run) -> float:
    return run.honest * run.protocol.dim * run.protocol.mechanism.noise.variation


def _certificate(run: Run, tail: float, rounds: int = 1, draft: bool = False) -> GaussianCertificate:
    """Returns the smoothed certificate of a run."""
    protocol = run.protocol
    return smoothed_certificate(
        _law(run),
        dim=protocol.dim,
        sensitivity=base.sensitivity(run),
        reach=protocol.reach(run.adjacency),
        tail=tail,
        rounds=rounds,
        draft=draft,
    )


@dataclass(frozen=True)
class _Allowed:
    """The μ, tail and rounds that a claim allows to sums without separate noise."""

    mu: float
    tail: float
    rounds: int

    @classmethod
    def of(cls, run: Run, claim: Claim) -> _Allowed:
        if run.sampling.rate < 1.0:
            tail = base.SAMPLED_TAIL_SHARE * claim.delta / base.counted(run) / base.counted_tail(run.sampling)
            return cls(base.sampled_mu(run, claim), tail, 1)
        mu = gdp_mu(claim.epsilon, claim.delta * (1.0 - 1.01 * SHARES[0]))
        return cls(mu, SHARES[0] * claim.delta, base.counted(run))

    def reached(self, run: Run, scale: float, draft: bool) -> tuple[Run, float]:
        """Returns the run with this scale, rounded, and the certified μ."""
        here = base.scaled(run, scale)
        return here, _certificate(here, self.tail, self.rounds, draft).mu


@lru_cache(maxsize=256)
def _drafted(run: Run, claim: Claim) -> float:
    """Returns approximately the smallest scale, by quick drafts of the certificate."""
    allowed, scale = _Allowed.of(run, claim), base.ideal_scale(run, claim) * _STEPS_EXCESS
    known = failed = 0.0
    for _ in range(_DRAFTS):
        try:
            here, found = allowed.reached(run, scale, draft=True)
        except ConditionError:
            failed = max(failed, scale)
            scale = math.sqrt(scale * known) if known else scale * _LONGEST_STEP
            continue
        known = here.protocol.mechanism.scale
        # The certificate's μ is smaller, roughly by a share of what the draft's has over a Gaussian of equal variance.
        over = found * _deviation(run, known) / (base.distance(here) * math.sqrt(allowed.rounds)) - 1.0
        found /= 1.0 + _DRAFT_OFFSET + _DRAFT_SHARE * min(max(over, 0.0), _DRAFT_MOST - 1.0)
        scale = max(_quieter(run, known, found / allowed.mu), math.sqrt(failed * known))
        if abs(math.log(found / allowed.mu)) < _DRAFT_CLOSE:
            break
    return scale


def _deviation(run: Run, scale: float) -> float:
    """Returns the standard deviation of a sum's noise, in units of vectors, if the mechanism has this scale."""
    mechanism = base.scaled(run, scale).protocol.mechanism
    return mechanism.scale * math.sqrt(run.honest * mechanism.noise.variance)


def _quieter(run: Run, scale: float, factor: float) -> float:
    """Returns the scale at which the noise is `factor` times as large as at `scale`.

    A larger scale also means smaller odds, hence more noise: the answer lies between `scale` and `factor` times that.
    """
    wanted = factor * _deviation(run, scale)
    low, high = sorted((scale, scale * factor))
    while high > low * (1.0 + _SAME_SCALE):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _deviation(run, middle) >= wanted else (middle, high)
    return high


def _steps_scale(run: Run, claim: Claim, wanted: float, draft: bool) -> float:
    """Returns approximately the smallest scale, or the wanted one; here the law itself depends on the scale."""
    allowed, scale, longest = _Allowed.of(run, claim), wanted, _STEP
    close, aim = (_DRAFT_CLOSE_ENOUGH, _DRAFT_AIM) if draft else (_CLOSE_ENOUGH, _AIM)
    if wanted <= (rough := base.ideal_scale(run, claim) * _STEPS_EXCESS):
        scale = rough * _DRAFT_EXCESS if draft else _drafted(run, claim)
    enough, at_enough = math.inf, 0.0
    # Scales that are too small, and the μ there.
    below, at_below = 0.0, math.inf
    reason: ConditionError | None = None
    seen: Counter[Law | Steps] = Counter()
    side: bool | None = None
    for tries in range(_STEPS_TRIES):
        here = base.scaled(run, scale)
        tried, law = here.protocol.mechanism.scale, _law(here)
        # Odds are multiples of 2^-16: where none are left between what is enough and what is not, this is it.
        seen[law] += 1
        if seen[law] > _SAME_ODDS and enough < math.inf:
            break
        try:
            found = allowed.reached(run, scale, draft)[1]
        except ConditionError as error:
            found, reason = math.inf, error
        if found <= allowed.mu and tried <= enough:
            enough, at_enough = tried, found
            # A scale that is wanted anyway need not be the smallest.
            missed = (1.0 - close) * _PATIENCE ** max(0, tries - _SOON)
            if found >= (1.0 - missed) * allowed.mu or wanted >= tried * (1.0 - 1e-9):
                break
        elif found > allowed.mu and tried >= below:
            below, at_below = tried, found
        if found < math.inf:
            # μ falls nearly as that of a Gaussian of equal variance does.
            following = _quieter(run, max(tried, 1e-300), found / allowed.mu * aim)
        else:
            following, longest = max(tried, 1e-300) * longest, min(longest * longest, _LONGEST_STEP)
        if below and enough < math.inf:
            # By false positions, and in the middle where the same end has moved twice.
            share = math.log(allowed.mu / at_enough) / math.log(at_below / at_enough) if at_below < math.inf else 0.5
            moved, side = side, found <= allowed.mu
            share = 0.5 if moved == side and abs(math.log(found / allowed.mu)) > _FAR else share
            following = _quieter(run, enough, (_deviation(run, below) / _deviation(run, enough)) ** share * aim)
        if following == scale or following >= enough * (1.0 + 1e-9):
            break
        scale = following
    if enough == math.inf:
        name = run.protocol.mechanism.name
        raise reason or ConditionError(f"No scale of {name} was found that keeps the target.")
    return enough


PROOFS = (Smoothed(),)
