"""The best protocol for a run whose noise is correlated over rounds.

All candidates have the same noise z in the vector's units, σs, which the run's (ε, δ) fixes. The bits decide how
many steps that is: a client's own noise of two steps and the rounding are not taken away again, so that the most
steps are best that the window holds, or the modulus. A wider range of coordinates takes room in the window, a narrower
one clips; a few are tried.

The error of the model is judged, not that of a round: the mean over rounds of the squared error of what training has
made of the means so far (`Workload`). Clipping is counted as if it were the same in every round.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, cast

import numpy as np

from cpsgd import _validate
from cpsgd._numbers import bits_of
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.correlated.weights import MAX_BANDS, MAX_ROUNDS, Correlation
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.mechanisms import ExpectedError, Mechanism
from cpsgd.mechanisms.rounded_gaussian import MAX_WINDOW
from cpsgd.neighbours import Participation
from cpsgd.planner.few_bits import MOST_BITS, WINDOWS, FewBits, few_taps, rounding_share
from cpsgd.planner.problem import WHOLE_BITS, Finished, Problem
from cpsgd.planner.requirements import BEST, Requirements
from cpsgd.planner.search import MAX_BITS, AnyDesign, Considered, Design, values_of
from cpsgd.planner.target import Target
from cpsgd.planner.workloads import Workload

RunMechanism = CorrelatedGaussian | ShapedGaussian
"""A mechanism whose noise later rounds of a run take away."""

AUTO = "auto"
"""In place of a number of bands: the fewest that are nearly the best."""

_CHOICES = (2, 4, 8, 16, 32, 64, 128)
# Ranges of coordinates, in standard deviations of a rotated one.
_REACHES = (3.0, 3.5, 4.0, 4.5, 5.0, 6.0, 7.0)
# Share of the sampler's total variation for numbers that leave the window.
_CUT_SHARE = 0.1
# Fewer bands, or bits, are taken where these gain no more than that.
_NEARLY_BANDS, _NEARLY_BITS = 1.05, 1.1
# σ is found within this factor.
_CLOSE = 1.0 + 1e-3
# Longer texts are no numbers of bands.
_LONGEST_NUMBER = 20
# More bits that leave this share of the error are of no use.
_NO_GAIN = 0.999


@dataclass(frozen=True)
class PrefixNoise:
    """The errors of rounds in the model: the mean over rounds of the squared error of the model so far.

    For a learning rate of 1, and with what `workload` says about later rounds; for plain SGD it is that of the sum of
    all means so far.

    Attributes:
        workload: Name of the workload; "own" where its weights were given.
        squared_error: With the plan.
        independent: With the Gaussian mechanism for the same (ε, δ), which has independent noise in every round, and
            real numbers for messages.
    """

    workload: str
    squared_error: float
    independent: float

    @property
    def gain(self) -> float:
        """The factor by which correlation shrinks the error; below 1 it does not pay."""
        return self.independent / self.squared_error

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {**asdict(self), "gain": self.gain}

    def __str__(self) -> str:
        verdict = f"{self.gain:.3g} × less"
        if self.gain < 1.0:
            verdict = f"{1.0 / self.gain:.3g} × more, so that correlated noise does not pay here"
        return (
            f"squared error of the model so far ({self.workload}, rate 1, mean over rounds) {self.squared_error:.4g}, "
            f"with independent Gaussian noise {self.independent:.4g}: {verdict}"
        )


@dataclass(frozen=True)
class CorrelatedPlan:
    """The best protocol with this many bits, a judge of such protocols, and the search for other numbers of bits."""

    bits: float
    design: Finished
    judge: Callable[[Mechanism], PrefixNoise]
    explore: Callable[[], list[tuple[float, Design]]]

    @cached_property
    def prefix(self) -> PrefixNoise:
        """The errors in the model with this protocol."""
        return self.judge(self.design.mechanism)


def correlated_plan(required: Requirements, problem: Problem) -> CorrelatedPlan | None:
    """Returns the best plan with correlated noise; None if `correlated` is "auto" and independent noise is as good.

    Raises:
        InfeasibleError: No protocol has this few bits, or none keeps (ε, δ); the message names the fewest bits.
        ParameterError: There are too few or too many bands.
    """
    rounds = problem.target.conditions.rounds
    auto = required.correlated == AUTO
    choices = [b for b in _CHOICES if b <= rounds] if auto else [checked_bands(required.correlated, rounds)]
    workload, failure = Workload.of(required.workload, rounds), None
    found: list[CorrelatedPlan] = []
    for bands in choices:
        for kind in _kinds(required, problem):
            try:
                found.append(_Run(problem, workload, _name(required), bands, kind).best(required.bits))
                break
            except InfeasibleError as error:
                failure = failure or error
    named = required.mechanism == RoundedCorrelated.name
    # Unless named, only where nothing else fits, and where clients need not trust who chooses the holders of seeds.
    if choices and not found and (named or (required.mechanism == BEST and not problem.conditions.colluding)):
        run = _Run(problem, workload, _name(required), choices[-1], CorrelatedGaussian)
        found = run.few_bits(required.bits)
        failure = failure or run.too_few(required.bits)
    if not found:
        if failure is not None:
            raise failure
        return None  # the run is too short for any
    least = min(each.prefix.squared_error for each in found)
    chosen = next(each for each in found if each.prefix.squared_error <= _NEARLY_BANDS * least)
    return None if auto and chosen.prefix.gain <= 1.0 else chosen


def check_correlated(required: Requirements) -> None:
    """Raises `ParameterError` where nothing is proved about such rounds, or the requirements contradict each other."""
    participation = Participation.parse(required.participation)
    rounds = _validate.integer("rounds", required.rounds, low=1)
    if rounds > MAX_ROUNDS:
        raise ParameterError(
            f"Expected rounds of at most {MAX_ROUNDS} where noise is correlated over them, got rounds={rounds}: plan a "
            "shorter run, or leave correlated out."
        )
    if participation.sampled:
        raise ParameterError(
            f"participation={str(participation)!r}: amplification by sampling is not proved for noise that is "
            "correlated over rounds; use participation 'once' or 'apart:ROUNDS', or leave correlated out."
        )
    if required.max_error is not None:
        raise ParameterError(
            "max_error is about the mean of a round, and noise that is correlated over rounds is about their sums: "
            "give bits, or neither."
        )
    if required.mechanism not in (BEST, CorrelatedGaussian.name, ShapedGaussian.name, RoundedCorrelated.name):
        raise ParameterError(
            f"mechanism={required.mechanism!r} has independent noise in every round: leave it out, or correlated."
        )


def checked_bands(said: int | str | None, rounds: int) -> int:
    """Checks the number of bands, which may be given as text, and returns it."""
    if isinstance(said, str) and not (said.isdecimal() and len(said) < _LONGEST_NUMBER):
        raise ParameterError(f"Expected correlated to be a number of bands from 2 on, or {AUTO!r}, got {said[:50]!r}.")
    said = int(said) if isinstance(said, str) else said
    try:
        bands = _validate.integer("correlated", said, low=2, high=MAX_BANDS)
    except ParameterError as error:
        remedy = (
            "Use fewer bands" if isinstance(said, int) and said > MAX_BANDS else "Leave it out for independent noise"
        )
        raise ParameterError(f"{error} {remedy}, or let {AUTO!r} choose.") from None
    if bands > rounds:
        raise ParameterError(
            f"Expected correlated to be at most rounds={rounds}, got correlated={bands}: noise is taken away by later "
            "rounds of the same run. Use fewer bands, or a longer run."
        )
    return bands


def _kinds(required: Requirements, problem: Problem) -> list[type[RunMechanism]]:
    """Returns the mechanisms to try, the best first: silos that stay can take their rounding errors away, too.

    Raises:
        ParameterError: Shaped rounding is asked for, and clients do not stay.
    """
    if required.mechanism == ShapedGaussian.name and not problem.clients_stay:
        raise ParameterError(
            f"mechanism={required.mechanism!r} is for silos that are in every round: say participation 'every', or "
            "plan for single examples."
        )
    kinds: list[type[RunMechanism]] = [ShapedGaussian] if problem.clients_stay else []
    return [kind for kind in (*kinds, CorrelatedGaussian) if required.mechanism in (BEST, kind.name)]


def _name(required: Requirements) -> str:
    return "sgd" if required.workload is None else required.workload if isinstance(required.workload, str) else "own"


@dataclass(frozen=True)
class _Run:
    problem: Problem
    workload: Workload
    name: str
    bands: int
    kind: type[RunMechanism]
    given: Correlation | None = None

    @cached_property
    def _correlation(self) -> Correlation:
        if self.given is not None:
            return self.given
        rounds, who = self.problem.conditions.rounds, self.problem.conditions.participation
        again = who.counted_rounds(rounds) > 1
        return Correlation(self.bands, rounds, who.separation if again else None)

    @cached_property
    def _target(self) -> Target:
        """The target of one round: the mechanism's own numbers are about the whole run."""
        target = self.problem.target
        once = replace(target.conditions, sizes=((target.conditions.surviving, 1),), participation=Participation.once())
        return replace(target, conditions=once)

    @cached_property
    def _fixed(self) -> dict[str, Any]:
        """Parameters of the mechanism that do not depend on bits or range."""
        correlation = self._correlation
        # Clients that stay keep their seeds; others hand them on, and whoever colludes may hold some.
        handed = {} if self.problem.clients_stay else {"untrusted_holders": self.problem.conditions.colluding}
        return {
            "bands": correlation.bands,
            "run_length": correlation.rounds,
            "separation": correlation.separation,
            **handed,
        }

    @cached_property
    def _cut(self) -> float:
        """Probability with which a message may leave its window."""
        return _CUT_SHARE * self._target.variation / (2 * self._correlation.rounds)

    @cached_property
    def _exposed(self) -> int:
        """Clients of a round whose noise may be known: others had a seed of it before."""
        return (self.bands - 1) * int(self._fixed.get("untrusted_holders", 0))

    @cached_property
    def _weights(self) -> tuple[float, float]:
        """Weights of a round's own noise, and of a bias, in the model."""
        return self.workload.variance(np.ones(1)), self.workload.bias()

    def best(self, bits: float | None) -> CorrelatedPlan:
        """Returns the best plan with these bits; if None, with the fewest whole bits whose error is near the best."""
        if bits is not None:
            bits = _validate.positive("bits", bits, high=MAX_BITS + 1e-9)
            found = self._designed(bits)
            if found is None:
                raise self._infeasible(bits)
            return self._finished(bits, found)
        designs = self._designs
        if not designs:
            raise self._infeasible(MAX_BITS)
        least = min(self._error(mechanism) for mechanism in designs.values())
        chosen = next(b for b, mechanism in designs.items() if self._error(mechanism) <= _NEARLY_BITS * least)
        return self._finished(chosen, designs[chosen])

    def few_bits(self, bits: float | None) -> list[CorrelatedPlan]:
        """Returns plans with randomly rounded noise, if few bits are asked for and a proof covers the run."""
        problem = self.problem
        summed = problem.setting.overflow is not None
        if bits is None or (bits > MOST_BITS and not summed) or self._correlation.separation is not None:
            return []
        most = values_of(bits)
        # Under secure sums the bits are those of the modulus, which a message's own do not fill. Elsewhere fewer values
        # than there is room for may be better: coordinates of many steps cost more.
        fewer = [values for values in WINDOWS if values < most]
        windows = fewer if summed else [*fewer[-1:], most]
        taps = few_taps(self.bands, self._correlation.rounds, self.workload, rounding_share(windows))
        found = []
        for correlation in [self._correlation] if taps is None else [taps]:
            run = replace(self, given=correlation)
            question = FewBits(self._target, correlation, self._fixed["untrusted_holders"], problem.setting.rotate)
            designs = [each for values in windows for each in question.designs(values)]
            fitting = [each for each in designs if (problem.setting.needed_modulus(each) or 0) <= most]
            best = min(fitting, key=run._error, default=None)
            try:
                found += [] if best is None else [run._finished(bits, best)]
            except InfeasibleError:
                continue
        return found

    def too_few(self, bits: float | None) -> InfeasibleError:
        """Returns the error for a mechanism without any design."""
        return InfeasibleError(
            f"No design of {RoundedCorrelated.name} keeps the claim. It needs bits of at most {MOST_BITS:g} (got "
            f"{bits}), clients that take part once, and hundreds of them in every round."
        )

    @cached_property
    def _designs(self) -> dict[float, RunMechanism]:
        """The best mechanism by whole number of bits, in rising order, until more bits gain nothing."""
        found: dict[float, RunMechanism] = {}
        for bits in WHOLE_BITS:
            mechanism = self._designed(bits)
            if mechanism is None:
                continue
            if found and self._error(mechanism) > _NO_GAIN * self._error(list(found.values())[-1]):
                break
            found[bits] = mechanism
        return found

    def _infeasible(self, bits: float) -> InfeasibleError:
        """Returns the error for `bits` that no protocol can do with; it names the nearest that can be had.

        Either colluding clients may know all noise, whatever the bits, or there is too little room in a message.
        """
        problem, target = self.problem, self.problem.target
        if target.honest <= self._exposed:
            most = math.ceil(target.honest / problem.conditions.colluding)
            nearest = f"correlated={most}" if most > 1 else "independent noise, without correlated"
            return InfeasibleError(
                f"With {self.bands} bands clients hand seeds of {self.bands - 1} rounds on, and "
                f"{problem.conditions.colluding:,} colluding clients per round may have held those of "
                f"{self._exposed:,} others; noise that counts is that of {target.honest:,} of "
                f"{problem.setting.clients:,}, so that nobody's is left. The nearest that can be had: {nearest}; or "
                "more clients, or fewer colluding ones."
            )
        more = next((b for b in WHOLE_BITS if b > bits and self._designed(b) is not None), None)
        remedy = "more clients, fewer bands, fewer colluding clients or a larger delta may help"
        if more is not None:
            remedy = f"bits={more:g} is the fewest whole number that will do; fewer bands take less room"
        return InfeasibleError(
            f"No protocol with {bits_of(bits)} per coordinate and {self.bands} bands keeps δ={target.claim.delta:g} "
            f"for {problem.setting.clients:,} clients: a message must have room for the noise of earlier rounds, too, "
            f"of at least {self.kind.step_deviations[0]:g} steps each. The nearest that can be had: {remedy}."
        )

    def _designed(self, bits: float) -> RunMechanism | None:
        """Returns the best mechanism with these bits, None if there is none."""
        setting, root = self.problem.setting, math.sqrt(self.problem.setting.dim)
        reaches = {min(reach, root) for reach in _REACHES} if setting.rotate else {root}
        tried = (self._reaching(setting.clip_norm * reach / root, bits) for reach in sorted(reaches))
        return min((each for each in tried if each is not None), key=self._error, default=None)

    def _reaching(self, coordinate_range: float, bits: float) -> RunMechanism | None:
        """Returns the mechanism with this range, and the most noise that the bits hold."""
        target, values = self._target, values_of(bits)
        distance = target.distance * self._correlation.sensitivity
        if target.honest <= self._exposed:
            return None
        unit = distance / (target.gaussian_mu * math.sqrt(target.honest - self._exposed))
        for _ in range(2):
            found = self._loudest(unit, coordinate_range, values)
            if found is None:
                return None
            try:
                scale = target.smallest_scale(found)
            except ConditionError:
                return None
            # Zero where the range itself keeps neighbours close; less noise is not looked for then.
            unit = max(unit, scale * found.noise.deviation * (1.0 + 1e-9))
        return self._loudest(unit, coordinate_range, values)

    def _loudest(self, unit: float, coordinate_range: float, values: int) -> RunMechanism | None:
        """Returns the mechanism with the smallest step whose window and sums fit, for noise z of deviation `unit`."""

        def fitting(sigma: float) -> RunMechanism | None:
            """Returns the mechanism with σ of this many steps; None if it does not fit the values."""
            try:
                widest = self.kind(
                    noise_deviation=sigma,
                    step=unit / sigma,
                    coordinate_range=coordinate_range,
                    window=MAX_WINDOW,
                    **self._fixed,
                )
                found = replace(widest, window=widest.noise.needs.window(self._cut))
            except ParameterError:
                return None
            needed = self.problem.setting.needed_modulus(found) if found.window <= values else None
            return found if max(found.window, needed or 0) <= values else None

        best, (low, high) = fitting(self.kind.step_deviations[0]), self.kind.step_deviations
        if best is None:
            return None
        if (most := fitting(high)) is not None:
            return most
        while high > _CLOSE * low:
            middle = math.sqrt(low * high)
            tried = fitting(middle)
            if tried is None:
                high = middle
            else:
                low, best = middle, tried
        return best

    def _error(self, mechanism: Mechanism) -> float:
        """Returns the mean over rounds of the squared error of the model so far."""
        of_own, of_bias = self._weights
        setting, noise = self.problem.setting, cast(RunMechanism, mechanism).noise
        of_z = self.workload.variance(noise.factors)
        per_unit = setting.dim * mechanism.scale**2 / setting.surviving
        clipping = setting.error(mechanism).clipping
        return per_unit * (noise.taken_away * of_z + noise.left * of_own) + clipping * of_bias

    def _finished(self, bits: float, mechanism: RunMechanism) -> CorrelatedPlan:
        """Returns the plan with this mechanism; its ε is that of the finished protocol, not of the search."""
        try:
            finished = self.problem.finish(self.problem.setting.design(mechanism), bits)
        except ConditionError as error:
            raise InfeasibleError(f"The best that {bits_of(bits)} hold cannot be accounted for. {error}") from None
        finished = self._settled(finished)
        considered = (Considered(finished.mechanism.name, finished.error.total, proved=True),)
        independent = self.problem.gaussian_squared_error * self._weights[0]
        return CorrelatedPlan(
            bits,
            replace(finished, considered=considered),
            lambda mechanism: PrefixNoise(self.name, self._error(mechanism), independent),
            lambda: [(b, self._settled(self.problem.setting.design(each))) for b, each in self._designs.items()],
        )

    @staticmethod
    def _settled(design: AnyDesign) -> AnyDesign:
        """Returns the design with the error of a round's mean after b rounds, when the noise no longer grows."""
        error, mechanism = design.error, design.mechanism
        grown = mechanism.noise.settled_variance / mechanism.noise.variance
        return replace(design, error=ExpectedError(error.noise * grown, error.rounding, error.clipping))
