"""From a required (ε, δ) to the smallest scale of a mechanism that keeps it.

For given levels and noise privacy is a matter of one number, S = Δ/s with Δ = 2D (replace-one, if no smaller distance
is stated) or D (zero-out): the more levels two neighbours can be apart, the less the same noise hides. The certificates
turn the requirement into the largest allowed S, hence the smallest s. They are evaluated here in the form that answers
this backwards question at once; where the law itself depends on the scale, by trying. What a plan finally promises
comes from `cpsgd.privacy.guarantees` on the finished protocol.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from cpsgd.errors import ConditionError
from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.law import Law, Normal, Steps
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy import accountant, gaussian
from cpsgd.privacy.certificate import gaussian_certificate
from cpsgd.privacy.costs import SAMPLED_TAIL_SHARE, counted_tail
from cpsgd.privacy.moments import Meter, Moments
from cpsgd.privacy.products import SHARES, smoothed_certificate, smoothed_sensitivity
from cpsgd.privacy.renyi import MAX_WORK, rdp_epsilon, renyi_floor

# Shares of δ for the tails of Rényi certificates. The larger ones are for few clients: see `cpsgd.privacy.renyi`.
_RENYI_TAIL_SHARES = (1e-3, 0.03, 0.1, 0.3)
# Half of what `cpsgd.privacy.guarantees` puts aside at most.
_SAMPLER_SHARE = 0.05
_TOLERANCE = 1e-4
# 1 + _EXCESS/(deviation of the noise) is how far the quick certificate is from a Gaussian of equal variance.
_EXCESS = 4.0
# The same for sums without separate noise, by the smoothed certificate.
_STEPS_EXCESS = 1.0015
# Nearer to the Gaussian of equal variance than this nothing is worth a slower certificate.
_CLOSE = 0.998
# Certificates of sums without separate noise are tried until μ is this close to what is allowed.
_CLOSE_ENOUGH, _STEPS_TRIES, _SAME_ODDS = 0.9998, 8, 2
# How much wider the scale becomes at most from one to the next, and how fast μ is taken to fall with it.
_LONGEST_STEP, _STEEPEST = 1.3, 6.0
# The largest share of δ that noise which is only close to a Gaussian may cost.
_MOST_FOR_VARIATION = 0.1
# And of ε, half of it, for what its rounding tells.
_MOST_FOR_SLACK = 0.1


@dataclass(frozen=True)
class Target:
    """What must be kept: (epsilon, delta) over `rounds` rounds, with noise from `honest` clients in each.

    Attributes:
        epsilon: ε required.
        delta: δ required.
        rounds: Rounds planned.
        participation: Who takes part in which.
        adjacency: Which data sets are neighbours.
        dim: d.
        clip_norm: D.
        honest: Clients whose noise counts: neither dropped out nor colluding.
        replace_one_distance: The largest distance of two clients' vectors, where it is stated to be less than 2D.
    """

    epsilon: float
    delta: float
    rounds: int
    participation: Participation
    adjacency: Adjacency
    dim: int
    clip_norm: float
    honest: int
    replace_one_distance: float | None = None

    @property
    def distance(self) -> float:
        """Δ, the largest distance of two neighbours' vectors."""
        return self.adjacency.distance(self.clip_norm, self.replace_one_distance)

    @property
    def counted_rounds(self) -> int:
        """Rounds that one client's vector can influence."""
        return self.participation.counted_rounds(self.rounds)

    @cached_property
    def gaussian_mu(self) -> float:
        """The largest μ of one round of an exactly Gaussian mechanism, which has no tails to pay for."""
        if self.participation.rate == 1.0:
            return gaussian.gdp_mu(self.epsilon, self.delta) / math.sqrt(self.counted_rounds) * (1.0 - 1e-14)
        noise_multiplier = accountant.least_noise(
            epsilon=self.epsilon,
            delta=self.delta,
            rounds=self.counted_rounds,
            participation=self.participation,
            tolerance=_TOLERANCE,
        )
        return 1.0 / noise_multiplier

    @cached_property
    def _sampled_mu(self) -> float:
        """The same when a share of δ is set aside for tails, under sampling."""
        mu, delta = self.gaussian_mu, self.delta * (1.0 - SAMPLED_TAIL_SHARE)
        while True:
            mu *= 1.0 - 2.0 * _TOLERANCE
            rounds = [accountant.Rounds(mu=mu, count=self.counted_rounds)]
            spent = accountant.composed_delta(
                rounds, epsilon=self.epsilon, participation=self.participation, interval=accountant.COARSE
            )
            if spent <= delta:
                return mu

    @property
    def variation(self) -> float:
        """The total variation per draw that a sampler may have.

        All draws together may move the law of the output by so little that (1 + e^ε) times that is a small share of δ.
        """
        draws = self.counted_rounds * self.honest * self.dim
        return _SAMPLER_SHARE * self.delta / (1.0 + math.exp(self.epsilon)) / draws

    def ideal_scale(self, mechanism: Mechanism) -> float:
        """The scale that a Gaussian of the same variance would need, which no certificate comes below by much."""
        return self.distance / (math.sqrt(self.honest * mechanism.noise.variance) * self.gaussian_mu)

    def rough_scale(self, mechanism: Mechanism) -> float:
        """The scale that a Gaussian of slightly smaller variance would need; only ranks candidates."""
        law = mechanism.noise.law(self.honest)
        if isinstance(law, Steps):
            return self.ideal_scale(mechanism) * _STEPS_EXCESS
        if isinstance(law, Normal):
            return self.ideal_scale(mechanism) * self.gaussian_mu / self._normal_mu(self._spent_on(mechanism))
        deviation = math.sqrt(self.honest * mechanism.noise.variance)
        return self.ideal_scale(mechanism) * (1.0 + _EXCESS / deviation)

    def quick_scale(self, mechanism: Mechanism) -> float:
        """The smallest scale by the quickest certificate there is; a rough one where there is no quick certificate."""
        law = mechanism.noise.law(self.honest)
        if isinstance(law, Steps):
            return self.rough_scale(mechanism)
        try:
            if isinstance(law, Normal):
                return self._normal_scale(law, mechanism)
            return self._scale_for(mechanism, self._gaussian_sensitivity(law, mechanism.levels))
        except ConditionError:
            return self.rough_scale(mechanism)

    def quickly_certified(self, mechanism: Mechanism) -> bool:
        """Whether the quickest certificate proves anything about so much noise."""
        law = mechanism.noise.law(self.honest)
        if isinstance(law, Steps):
            return False
        try:
            if isinstance(law, Normal):
                return self._normal_scale(law, mechanism) >= 0.0
            return self._gaussian_sensitivity(law, mechanism.levels) > 0.0
        except ConditionError:
            return False

    def smallest_scale(self, mechanism: Mechanism, wanted: float = 0.0) -> float:
        """The smallest s (rounded up) at which a mechanism's rounding and noise meet the requirement.

        Zero where the coordinates' clipping alone keeps neighbours close enough, whatever s is.

        Args:
            mechanism: Its own scale does not matter.
            wanted: A scale that is taken anyway where privacy allows it. Where it does, this may be returned.

        Raises:
            ConditionError: No certificate exists for so little noise.
        """
        law, levels = mechanism.noise.law(self.honest), mechanism.levels
        if isinstance(law, Normal):
            return self._normal_scale(law, mechanism)
        if isinstance(law, Steps):
            return self._steps_scale(mechanism, wanted)
        reason: ConditionError | None = None
        allowed = 0.0
        try:
            allowed = self._gaussian_sensitivity(law, levels)
        except ConditionError as error:
            reason = error
        if not self.participation.sampled:
            ideal = math.sqrt(law.variance) * self.gaussian_mu
            if allowed < _CLOSE * ideal:
                try:
                    allowed = max(allowed, self._smoothed_sensitivity(law, mechanism))
                except ConditionError as error:
                    reason = error
            slope = self.counted_rounds * allowed * allowed / (2.0 * law.variance)
            if renyi_floor(slope, self.delta) < self.epsilon:
                allowed = max(allowed, self._renyi_sensitivity(law, levels, allowed))
        if allowed == 0.0:
            raise reason or ConditionError(f"No certificate exists for {law}.")
        return self._scale_for(mechanism, allowed)

    def _scale_for(self, mechanism: Mechanism, allowed: float) -> float:
        """The smallest s at which neighbours are at most `allowed` apart; 0 where the range sees to that."""
        cube = math.sqrt(self.dim) * mechanism.extent.reach(self.adjacency)
        return 0.0 if allowed >= cube else self._scale_at(mechanism, allowed)

    def _normal_scale(self, law: Normal, mechanism: Mechanism) -> float:
        """The smallest scale of noise that is a Gaussian, up to a total variation and a slack.

        Raises:
            ConditionError: That costs too much of δ or ε.
        """
        slack = self.counted_rounds * self.dim * mechanism.noise.slack(self.honest)
        spent = self._spent_on(mechanism)
        if spent > _MOST_FOR_VARIATION or slack > _MOST_FOR_SLACK * self.epsilon:
            raise ConditionError(f"The noise is too far from a Gaussian; {mechanism.sampler_remedy}.")
        return self._scale_for(mechanism, self._normal_mu(spent, slack) * law.deviation * (1.0 - 1e-12))

    def _spent_on(self, mechanism: Mechanism) -> float:
        """The share of δ that a sampler's total variation costs."""
        draws = self.counted_rounds * self.honest * self.dim
        return draws * mechanism.noise.variation * (1.0 + math.exp(self.epsilon)) / self.delta

    def _normal_mu(self, spent: float, slack: float = 0.0) -> float:
        """The largest μ of a round of a Gaussian mechanism, where a share of δ is spent, and ε has to make up for λ.

        Under sampling only roughly.
        """
        if self.participation.rate < 1.0:
            return (self.gaussian_mu if spent < 1e-6 else self._sampled_mu) * (1.0 - 2.0 * slack / self.epsilon)
        left = max(1.0 - spent * (1.0 + 1e-9), 1.0 - _MOST_FOR_VARIATION) * math.exp(-slack)
        mu = gaussian.gdp_mu(self.epsilon - 2.0 * slack, self.delta * left)
        return mu / math.sqrt(self.counted_rounds) * (1.0 - 1e-14)

    def _steps_scale(self, mechanism: Mechanism, wanted: float) -> float:
        """The smallest scale, within a little, that the smoothed certificate proves to be enough; or the wanted one."""
        sampled = self.participation.rate < 1.0
        rounds = 1 if sampled else self.counted_rounds
        tail = SHARES[0] * self.delta
        if sampled:
            tail = SAMPLED_TAIL_SHARE * self.delta / self.counted_rounds / counted_tail(self.participation)
        mu = self._sampled_mu if sampled else gaussian.gdp_mu(self.epsilon, self.delta * (1.0 - 1.01 * SHARES[0]))
        scale, enough, at_enough = max(wanted, self.rough_scale(mechanism)), math.inf, 0.0
        # Scales that are too small, and the μ there.
        below, at_below = 0.0, math.inf
        reason: ConditionError | None = None
        seen: Counter[Steps] = Counter()
        last: tuple[float, float] | None = None
        for _ in range(_STEPS_TRIES):
            tried = mechanism.with_scale(scale)
            law = tried.noise.law(self.honest)
            assert isinstance(law, Steps)
            # Odds are multiples of 2^-16: where none are left between what is enough and what is not, this is it.
            seen[law] += 1
            if seen[law] > _SAME_ODDS and enough < math.inf:
                break
            sensitivity, reach = tried.sensitivity(**self._size), tried.extent.reach(self.adjacency)
            try:
                found = smoothed_certificate(
                    law, dim=self.dim, sensitivity=sensitivity, reach=reach, tail=tail, rounds=rounds
                ).mu
            except ConditionError as error:
                found, reason = math.inf, error
            if found <= mu and tried.scale <= enough:
                enough, at_enough = tried.scale, found
                # A scale that is wanted anyway need not be the smallest.
                if found >= _CLOSE_ENOUGH * mu or wanted >= tried.scale * (1.0 - 1e-9):
                    break
            elif found > mu and tried.scale >= below:
                below, at_below = tried.scale, found
            # μ is nearly proportional to 1/s, but falls faster where odds come near to certain: as from the last one.
            power = 1.0
            if last is not None and found < math.inf and last[1] != found and last[0] != tried.scale:
                power = math.log(last[1] / found) / math.log(tried.scale / last[0])
                power = min(max(power, 1.0), _STEEPEST)
            last = (tried.scale, found) if found < math.inf else None
            step = min((found / mu) ** (1.0 / power), _LONGEST_STEP)
            following = max(tried.scale, 1e-300) * step * (1.0 + 1e-4)
            if below and enough < math.inf and not below < following < enough:
                share = math.log(mu / at_enough) / math.log(at_below / at_enough) if at_below < math.inf else 0.5
                following = enough * (below / enough) ** share * (1.0 + 1e-4)
            if following == scale or following >= enough * (1.0 + 1e-9):
                break
            scale = following
        if enough == math.inf:
            raise reason or ConditionError(f"No scale of {mechanism.name} was found that keeps the target.")
        return enough

    def _smoothed_sensitivity(self, law: Law, mechanism: Mechanism) -> float:
        """The largest S that the smoothed certificate of all rounds together allows."""
        reason: ConditionError | None = None
        for share in SHARES:
            mu = gaussian.gdp_mu(self.epsilon, self.delta * (1.0 - 1.01 * share))
            try:
                return smoothed_sensitivity(
                    law,
                    dim=self.dim,
                    reach=mechanism.extent.reach(self.adjacency),
                    mu=mu,
                    tail=share * self.delta,
                    rounds=self.counted_rounds,
                )
            except ConditionError as error:
                reason = error
        assert reason is not None
        raise reason

    @property
    def _size(self) -> dict[str, Any]:
        """What a sensitivity depends on beside the mechanism."""
        return {
            "dim": self.dim,
            "clip_norm": self.clip_norm,
            "adjacency": self.adjacency,
            "replace_one_distance": self.replace_one_distance,
        }

    def _scale_at(self, mechanism: Mechanism, allowed: float) -> float:
        """The smallest s (rounded up) at which neighbours are at most `allowed` apart in units of the law."""
        scale = self.distance / allowed * (1.0 + 1e-12)
        # A distance that is stated grows by the grid's resolution, hence with s; never beyond 2D, so this ends.
        while (found := mechanism.with_scale(scale).sensitivity(**self._size)) > allowed:
            scale *= found / allowed * (1.0 + 1e-12)
        return scale

    def _gaussian_sensitivity(self, law: Law, levels: int) -> float:
        """The largest S with μ₁ S within what the Gaussian trade-off allows, over a few shares of δ for the tails."""
        deviation = math.sqrt(law.variance)
        best = 0.0
        for share in [SAMPLED_TAIL_SHARE] if self.participation.rate < 1.0 else _shares(law.variance):
            if self.participation.rate < 1.0:
                mu = self._sampled_mu
            else:
                mu = gaussian.gdp_mu(self.epsilon, self.delta * (1.0 - share)) / math.sqrt(self.counted_rounds)
            # μ₁ depends on S only through the unit steps between neighbours, and on those only a little: bounding S by
            # what a Gaussian of the same variance allows is safe and close.
            most = mu * deviation * 1.0001
            tail = self.delta * share / self.counted_rounds / counted_tail(self.participation)
            certificate = gaussian_certificate(law, dim=self.dim, sensitivity=most, levels=levels, tail=min(0.5, tail))
            best = max(best, min(most, mu / certificate.unit_mu))
        return best * (1.0 - 1e-12)

    def _renyi_sensitivity(self, law: Law, levels: int, guess: float) -> float:
        """The largest S that Rényi certificates of all rounds allow, over a few shares of δ for the tails."""
        # A Gaussian of the same variance allows more than any certificate.
        most = max(2.0 * guess, math.sqrt(law.variance) * self.gaussian_mu * 1.0001)
        # A plan has seconds, and this certificate is only worth them where there is little noise.
        meter = Meter(MAX_WORK / 2)
        best, boxes = 0.0, set()
        for share in _RENYI_TAIL_SHARES:
            tail = share * self.delta / self.counted_rounds
            try:
                moments = Moments(law, dim=self.dim, sensitivity=most, levels=levels, tail=tail, meter=meter)
            except ConditionError:
                continue
            if moments.box in boxes:
                continue
            boxes.add(moments.box)
            found = self._best_order_sensitivity(moments)
            if found < best:
                break
            best = found
        return min(best, most)

    def _best_order_sensitivity(self, moments: Moments) -> float:
        """The S for which R κ(α) S² + conversion(α, δ) = ε, at the best order α."""
        rounds = self.counted_rounds
        delta = (self.delta - rounds * moments.tail_mass) * (1.0 - 1e-12)

        def allowed(log_order: float) -> float:
            order = 1.0 + math.exp(log_order)
            if order > moments.largest_order:
                return 0.0
            room = (self.epsilon - rdp_epsilon(0.0, order, delta)) * (1.0 - 1e-12)
            try:
                return math.sqrt(room / (rounds * moments.kappa(order))) if room > 0.0 else 0.0
            except ConditionError:
                return 0.0

        # For a Gaussian ε ≈ √(2 L) μ and the best order is about 1 + 2L/ε, L = log(1/δ).
        centre, step = math.log(2.0 * math.log(1.0 / delta) / self.epsilon), 0.4
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


def _shares(variance: float) -> list[float]:
    """Shares of δ for the tails around the best one, which is about the certificate's excess over a Gaussian."""
    centre = min(0.2, 5.0 / math.sqrt(variance))
    return [0.3 * centre, centre] if variance < 250_000 else [centre]
