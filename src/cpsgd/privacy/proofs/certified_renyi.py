"""The Rényi certificate: better than the Gaussian one where there is little noise.

`cpsgd.privacy.moments` bounds the Rényi divergence of a round, of every order α: on all but a tail of its outputs it is
at most κ(α) S². Divergences of rounds add up, also where a round depends on the results of those before it, and so do
the tails. One conversion, at the best order, then turns the sum into ε.

How much of δ pays for the tails is a choice as well. A wide box costs nothing where there is much noise. With few
clients its ends lie where the noise is least like a Gaussian, or do not fit into the law's support at all, and a narrow
box that spends a large share of δ is better. Several shares are tried; each is valid.
docs/proofs/renyi-certificate.md has the proofs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass

from cpsgd import _validate
from cpsgd._numbers import rounded_down
from cpsgd._searches import lowest
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.law import Law
from cpsgd.privacy.moments import MAX_ORDER, Meter, Moments, TooLongError
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.argument import Proof, Proved
from cpsgd.privacy.proofs.certified_gaussian import check_delta, law_of
from cpsgd.promise import Claim
from cpsgd.run import Run

RENYI_TAIL_SHARES = (1e-3, 3e-3, 0.01, 0.03, 0.06, 0.12, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.99)
"""Shares of δ that pay for the box. The first moves ε by about a thousandth over α - 1, so no smaller one is needed."""
MAX_WORK = 7.5e7
"""Outputs times nodes, over all orders, beyond which the certificate is given up: two to three seconds of one core."""

# The search for the best order tries nine or ten. So if the first one takes more than this share of the work, all of
# them together would take too much.
_FIRST_SHARE = 1.0 / 6.0
# The same for the boxes after the first, a second at most.
_FURTHER_WORK = 2e7
# Boxes in a row that bring no gain, after which no narrower one is tried. (ε is not quite a smooth function of them.)
_PATIENCE = 2
# A box that is worse by more than this at the best order of another is not better at its own.
_CLOSE = 0.03
_UNIT = 2.0**-53


@dataclass(frozen=True)
class RenyiCertificate:
    """The rounds are (epsilon, delta)-private, by their Rényi divergence of one order.

    Attributes:
        epsilon: ε, rounded up.
        delta: δ in total, tails included.
        order: α, the order that gave the smallest ε.
        kappa: Upper bound on κ(α), added up over the rounds; clamped, they have Rényi divergence at most kappa S².
        tail_mass: Upper bound on the probability, over all coordinates and rounds, of an output outside the box.
    """

    epsilon: float
    delta: float
    order: float
    kappa: float
    tail_mass: float


def renyi_certificate(law: Law, *, dim: int, sensitivity: float, levels: int, delta: float) -> RenyiCertificate:
    """Returns the smallest ε over all orders α of the Rényi certificate, for the parameters of `certified_epsilon`.

    Raises:
        ConditionError: The box reaches the end of the law's support, or the computation would take more than a few
            seconds (much noise, where the Gaussian certificate is about as good or better).
        ParameterError: δ is too small to compute with, or another parameter is outside its range.

    Example:
        >>> from cpsgd.mechanisms.binomial import BinomialLaw
        >>> law = BinomialLaw(10_000, 0.5)
        >>> certificate = renyi_certificate(law, dim=65_536, sensitivity=19.8177, levels=2, delta=1e-9)
        >>> f"{certificate.epsilon:.2f}"
        '2.39'
    """
    return summed_renyi_certificate([(law, 1)], dim=dim, sensitivity=sensitivity, levels=levels, delta=delta)


def summed_renyi_certificate(
    rounds: Sequence[tuple[Law, int]], *, dim: int, sensitivity: float, levels: int, delta: float
) -> RenyiCertificate:
    """Returns the certificate of many rounds, given as pairs of the noise's law and its number of rounds.

    Raises:
        ConditionError: As for one round.
        ParameterError: As for one round.

    Example:
        >>> from cpsgd.mechanisms.binomial import BinomialLaw
        >>> forty = [(BinomialLaw(64, 0.5), 40)]
        >>> certificate = summed_renyi_certificate(forty, dim=1, sensitivity=2.0, levels=3, delta=1e-5)
        >>> f"{certificate.epsilon:.2f}"
        '19.50'
    """
    count = sum(_validate.integer("count", count, low=1) for _, count in rounds)
    check_delta(delta, dim, RENYI_TAIL_SHARES[0] / count)
    meter = Meter(_FIRST_SHARE * MAX_WORK)

    def orders_with(share: float) -> _Orders:
        tail = share * delta / count
        moments = [
            (Moments(law, dim=dim, sensitivity=sensitivity, levels=levels, tail=tail, meter=meter), many)
            for law, many in rounds
        ]
        return _Orders(moments, sensitivity, delta)

    # The first box that fits gets all the time it needs; narrower ones only bring a little where that is much.
    shares = iter(RENYI_TAIL_SHARES)
    orders = None
    while orders is None:
        share = next(shares)
        try:
            orders = orders_with(share)
        except TooLongError:
            raise
        except ConditionError:
            if share == RENYI_TAIL_SHARES[-1]:
                raise
    first = orders.at(orders.guess())
    meter.left += (1.0 - _FIRST_SHARE) * MAX_WORK
    best, best_orders = orders.best(first), orders
    meter.limit(_FURTHER_WORK)
    failures = 0
    with contextlib.suppress(ConditionError):
        for share in shares:
            boxes, orders = orders.boxes, orders_with(share)
            if orders.boxes == boxes:
                continue
            other = orders.at(best.order)
            # The best order changes a little with the box, and much only where ε does.
            if other.epsilon < (1.0 + _CLOSE) * best.epsilon:
                other = orders.best(other, step=0.5 if other.epsilon < 0.9 * best.epsilon else 0.2)
            if other.epsilon < best.epsilon:
                best, best_orders, failures = other, orders, 0
            elif (failures := failures + 1) == _PATIENCE:
                break
        best = best_orders.best(best, step=0.11)
    return best


class _Orders:
    """ε of the rounds, for fixed boxes, as a function of the Rényi order."""

    def __init__(self, rounds: Sequence[tuple[Moments, int]], sensitivity: float, delta: float) -> None:
        self._rounds, self._delta = rounds, delta
        self._square = sensitivity * sensitivity * (1.0 + 4.0 * _UNIT)
        self._tail = math.fsum(count * moments.tail_mass for moments, count in rounds) * (1.0 + 4.0 * _UNIT)
        self._largest = min(moments.largest_order for moments, _ in rounds)
        self.boxes = [moments.box for moments, _ in rounds]

    def at(self, order: float) -> RenyiCertificate:
        """Returns the certificate of this order, or of the largest computable order if that is smaller."""
        order = min(order, self._largest)
        kappa = math.fsum(count * moments.kappa(order) for moments, count in self._rounds) * (1.0 + 4.0 * _UNIT)
        remaining = (self._delta - self._tail) * (1.0 - 2.0 * _UNIT)
        epsilon = rdp_epsilon(kappa * self._square, order, remaining)
        return RenyiCertificate(epsilon, self._delta, order, kappa, self._tail)

    def guess(self) -> float:
        """Returns a first guess of the best order: the best order of a Gaussian with the same divergence."""
        slope = 0.5 * self._square * math.fsum(count * moments.kappa(2.0) for moments, count in self._rounds)
        return 1.0 + math.sqrt(math.log(1.0 / (self._delta - self._tail)) / slope)

    def best(self, start: RenyiCertificate, step: float = 0.5) -> RenyiCertificate:
        """Returns the smallest ε around an order, of which ε is nearly a parabola in x = log(α - 1).

        Every order is valid, so the search may stop anywhere.
        """
        limit = math.log(self._largest - 1.0)
        best = math.log(start.order - 1.0)
        tried = {best: start}
        while step > 0.1:
            for x in (best - step, best + step):
                if x <= limit and x not in tried:
                    tried[x] = self.at(1.0 + math.exp(x))
            nearest = min(tried, key=lambda x: tried[x].epsilon)
            step, best = (step / 2.0, best) if nearest == best else (step, nearest)
        below, above = tried.get(best - 2.0 * step), tried.get(best + 2.0 * step)
        if below and above and (bend := below.epsilon + above.epsilon - 2.0 * tried[best].epsilon) > 0.0:
            vertex = best + step * (below.epsilon - above.epsilon) / bend
            tried[vertex] = self.at(1.0 + math.exp(vertex))
        return min(tried.values(), key=lambda certificate: certificate.epsilon)


def rdp_epsilon(divergence: float, order: float, delta: float) -> float:
    """Returns ε from a Rényi divergence of one order, rounded up and at least 0.

    Canonne, Kamath and Steinke ("The Discrete Gaussian for Differential Privacy", 2020, Proposition 12):
    ε = D_α + log((α - 1)/α) - (log δ + log α)/(α - 1).
    """
    shift = math.log1p(-1.0 / order) - math.log(order) / (order - 1.0)
    log_term = -math.log(delta) / (order - 1.0)
    return max(0.0, divergence + shift + log_term + 1e-14 * (divergence + log_term - shift))


def renyi_floor(slope: float, delta: float) -> float:
    """Returns a lower bound on the Rényi certificate's ε: its ε if D_α were α · `slope` for all α.

    As t -> 0, D_α/t² -> α χ²/2 with χ² the chi-square divergence of Z_1 from Z_0, and χ² >= 1/Var(Z_0) (Hammersley,
    Chapman and Robbins). So κ(α) >= α/(2 Var(Z_0)), and `slope` is S² / (2 Var(Z_0)).
    """

    def at(x: float) -> float:
        order = 1.0 + math.exp(x)
        return rdp_epsilon(order * slope, order, delta)

    return at(lowest(at, -12.0, math.log(MAX_ORDER), close=0.01))


# ---------------------------------------------------------------------- the proof

# Rounds with more different numbers of clients are not computed.
_MOST_SIZES = 4
# Shares of δ for the tails in plans. The larger ones are for few clients.
_PLANNED_TAIL_SHARES = (1e-3, 0.03, 0.1, 0.3)


@dataclass(frozen=True)
class Renyi(Proof):
    """The Rényi certificates of all rounds, added up."""

    name: str = "renyi-certificate"
    citation: str = (
        "Rényi certificate (docs/proofs/renyi-certificate.md), converted by Canonne, Kamath and Steinke, "
        '"The Discrete Gaussian for Differential Privacy", NeurIPS 2020, Proposition 12'
    )
    effort: int = 4

    def supports(self, run: Run) -> bool:
        """Returns whether the noise is log-concave on the integers."""
        return isinstance(base.law_of(run), Law)

    def epsilon(self, run: Run, delta: float, below: float = math.inf) -> Proved:
        """Returns the ε at the best order; raises `ConditionError` early if it cannot be smaller than `below`."""
        if base.alone(run):
            run = base.of_size(run, run.surviving)
        if len(run.sizes) > _MOST_SIZES:
            raise ConditionError(f"is computed for rounds of up to {_MOST_SIZES} different numbers of clients")
        protocol, sensitivity = run.protocol, base.sensitivity(run)
        laws = [(law_of(base.of_size(run, size)), count) for size, count in run.sizes]
        slope = sum(count * sensitivity**2 / (2.0 * law.variance) for law, count in laws)
        if (floor := renyi_floor(slope, delta)) >= below:
            raise ConditionError(f"could not come below {rounded_down(floor)}, so not computed")

        def prove(left: float) -> tuple[float, float]:
            found = summed_renyi_certificate(
                laws, dim=protocol.dim, sensitivity=sensitivity, levels=protocol.mechanism.levels, delta=left
            )
            return found.epsilon, found.tail_mass

        summed = "" if base.alone(run) else "; Rényi divergences of rounds add up (Mironov 2017, Proposition 1)"
        return Proved(*base.with_sampler(run, delta, prove), self.citation + summed)

    def scale(
        self, run: Run, claim: Claim, *, known: float = math.inf, wanted: float = 0.0, draft: bool = False
    ) -> float:
        """Returns the smallest scale that certificates of all rounds allow, over a few shares of δ for the tails."""
        if draft and known < math.inf:
            raise ConditionError("A draft does without.")
        law, rounds = law_of(run), base.counted(run)
        guess = base.distance(run) / known if known > 0.0 else math.inf
        if run.sampling.sampled:
            raise ConditionError("Certificates of rounds added up know of no sampling.")
        if renyi_floor(rounds * guess * guess / (2.0 * law.variance), claim.delta) >= claim.epsilon:
            raise ConditionError("The scale is as small as can be.")
        # A Gaussian of the same variance allows more than any certificate.
        most = max(2.0 * guess, math.sqrt(law.variance) * base.gaussian_mu(run, claim) * 1.0001)
        # A plan has seconds, and this certificate is only worth them where there is little noise.
        meter = Meter(MAX_WORK / 2)
        best, boxes, levels = 0.0, set(), run.protocol.mechanism.levels
        for share in _PLANNED_TAIL_SHARES:
            tail = share * claim.delta / rounds
            try:
                moments = Moments(law, dim=run.protocol.dim, sensitivity=most, levels=levels, tail=tail, meter=meter)
            except ConditionError:
                continue
            if moments.box in boxes:
                continue
            boxes.add(moments.box)
            found = _largest_sensitivity(moments, rounds, claim)
            if found < best:
                break
            best = found
        if best == 0.0:
            raise ConditionError(f"No Rényi certificate exists for {law}.")
        return base.scale_for(run, min(best, most))


def _largest_sensitivity(moments: Moments, rounds: int, claim: Claim) -> float:
    """Returns the S for which R κ(α) S² + conversion(α, δ) = ε, at the best order α."""
    delta = (claim.delta - rounds * moments.tail_mass) * (1.0 - 1e-12)

    def allowed(log_order: float) -> float:
        order = 1.0 + math.exp(log_order)
        if order > moments.largest_order:
            return 0.0
        room = (claim.epsilon - rdp_epsilon(0.0, order, delta)) * (1.0 - 1e-12)
        try:
            return math.sqrt(room / (rounds * moments.kappa(order))) if room > 0.0 else 0.0
        except ConditionError:
            return 0.0

    # For a Gaussian ε ≈ √(2 L) μ and the best order is about 1 + 2L/ε, L = log(1/δ).
    centre, step = math.log(2.0 * math.log(1.0 / delta) / claim.epsilon), 0.4
    # With little noise and a small ε that may be an order at which nothing is bounded any more.
    centre = min(centre, math.log(moments.largest_order - 1.0) - 1e-9)
    best = allowed(centre)
    while step > 0.15:
        left, right = allowed(centre - step), allowed(centre + step)
        if max(left, right) > best:
            centre, best = (centre - step, left) if left > right else (centre + step, right)
        else:
            step *= 0.5
    return best


PROOFS = (Renyi(),)
