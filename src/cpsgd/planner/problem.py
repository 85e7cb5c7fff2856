"""What a person wants of a protocol; how near the planner comes to it, and what it says where it cannot."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from cpsgd import _validate, mechanisms
from cpsgd._numbers import rounded_up
from cpsgd.adjacency import Adjacency
from cpsgd.codec import pack
from cpsgd.distance import check_distance
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.law import Steps
from cpsgd.participation import Participation
from cpsgd.planner import modulus
from cpsgd.planner.search import (
    MAX_BITS,
    Contest,
    Design,
    Setting,
    best_design,
    feasible,
    gaussian_squared_error,
    roughly_feasible,
    values_of,
)
from cpsgd.planner.target import Target
from cpsgd.privacy.guarantees import Guarantee
from cpsgd.privacy.rounds import guarantee_over_rounds
from cpsgd.protocol import NORM_LIMITS, Protocol

# How often X is brought closer to what the finished protocol's own accounting allows.
_ADJUSTMENTS = 2
# Within this of ε a guarantee is as near as the search for its certificate was.
_NEARLY = 0.998
# An ε of zero, as with a huge δ, says nothing of how much smaller the scale may be.
_LEAST_FACTOR = 1e-2
# Bits that are always looked at; sums of very many clients may want more for their modulus.
_USUAL_BITS = 16
_AS_GOOD_AS_GAUSSIAN = 1.001

WHOLE_BITS = tuple(map(float, range(1, MAX_BITS + 1)))
"""The numbers of bits that are looked at where none is asked for."""

# Up to how many times as many clients as would roughly do are tried, until certificates agree.
_MOST_MORE_CLIENTS = 64
# Bits below one that are named where still fewer were asked for.
_SHARES = tuple(2.0**-power for power in range(1, 17))

BEST = "best"
"""In place of a mechanism's name: whichever is the most accurate."""


@dataclass(frozen=True, kw_only=True)
class Requirements:
    """What a protocol must do. Checked by `plan`.

    Attributes:
        clients: n, messages per round.
        dim: d, coordinates of a vector.
        epsilon: ε that all rounds together may cost a client; the smaller, the more private.
        delta: δ of the guarantee, which should be far below 1 / clients.
        clip_norm: D, longer vectors are scaled down to this Euclidean norm.
        bits: Bits per coordinate of a message, up to 31; fractions, too: 1.6 allows the three values of k = 2, m = 1.
        max_error: Instead of `bits`: the expected squared error allowed; the fewest whole bits that meet it are taken.
            With neither, the fewest bits within 10 % of the Gaussian mechanism's error, or as near as can be.
        rounds: Rounds that will be run with the protocol.
        participation: In which rounds a client takes part: "once" (in one at most), "every" (in all), "poisson:RATE" or
            "fixed-size:RATE" (in those it is drawn for, a share RATE of all).
        adjacency: Which data sets are neighbours: "replace-one" (a client's vector becomes any other) or "zero-out" (it
            becomes zero).
        dropout: Share of the clients that may fail to answer; the noise of the others alone keeps the guarantee.
        colluding: Clients per round who may tell their noise to whoever attacks; it does not count.
        secure: For secure aggregation: sums are taken modulo the smallest number that will do, and `bits` must hold
            that.
        rotate: Whether vectors are rotated first. Without, nothing is clipped and the error is a worst case.
        overflow: With `secure`, the probability allowed per round that any coordinate of its sum wraps around.
        mean_norm: With `secure`, a norm that the mean of a round's (clipped) vectors is known not to exceed, at most
            `clip_norm`; a smaller modulus then holds the sums. Accuracy alone rests on it: where the mean is longer,
            sums may wrap around, and privacy is the same.
        mechanism: "best" for whichever is the most accurate, or the name of one (see `cpsgd.mechanisms`) whose
            parameters are to be chosen.
        replace_one_distance: The largest Euclidean distance of any two clients' vectors, where it is known to be less
            than 2D: √2 D for one-hot vectors, for instance. Less noise is then enough. Nothing enforces it, so that the
            guarantee rests on it; needs `distance_reason`, and replace-one neighbours.
        distance_reason: Why no two vectors are further apart, in a sentence that goes into the protocol and into every
            guarantee.
        correlated: In how many rounds a draw of noise is, where later rounds are to take away again what earlier ones
            added; "auto" chooses. The guarantee is then that of the whole run.
        workload: With `correlated`, what training makes of the rounds' means: "sgd" (the default) or "momentum", with a
            schedule as in "momentum-late". In Python also what a round's mean has moved the model by 0, 1, 2, ...
            rounds later, for plain SGD all ones.
    """

    clients: int
    dim: int
    epsilon: float
    delta: float
    clip_norm: float = 1.0
    bits: float | None = None
    max_error: float | None = None
    rounds: int = 1
    participation: str | Participation = "every"
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE
    dropout: float = 0.0
    colluding: int = 0
    secure: bool = False
    rotate: bool = True
    overflow: float = modulus.DEFAULT_OVERFLOW
    mean_norm: float | None = None
    mechanism: str = BEST
    replace_one_distance: float | None = None
    distance_reason: str | None = None
    correlated: int | str | None = None
    workload: str | Sequence[float] | None = None


def surviving(clients: int, dropout: float) -> int:
    """The fewest messages of a round, where this share of the clients may fail to answer."""
    # The tolerance keeps 0.1 of 1000 from being 101 clients.
    return clients - math.ceil(clients * _validate.fraction("dropout", dropout) - 1e-9)


def _asked_for(required: Requirements) -> tuple[type[Mechanism], ...]:
    """The mechanisms to choose among.

    Raises:
        ParameterError: The one that is named does not exist, or does not go with secure aggregation.
    """
    if required.mechanism == BEST:
        kinds = [kind for kind in mechanisms.MECHANISMS.values() if kind.planned]
        return tuple(kind for kind in kinds if not required.secure or kind.not_summed is None)
    kind = mechanisms.MECHANISMS[_validate.choice("mechanism", required.mechanism, (BEST, *mechanisms.MECHANISMS))]
    if required.secure and kind.not_summed is not None:
        raise ParameterError(kind.not_summed)
    return (kind,)


@dataclass(frozen=True)
class Finished(Design):
    """A design as a protocol.

    Attributes:
        protocol: The parameters to run with.
        guarantee: What is proved for it.
    """

    protocol: Protocol = field(kw_only=True)
    guarantee: Guarantee = field(kw_only=True)


@dataclass(frozen=True)
class Problem:
    """Requirements, validated and sorted into what is judged (setting) and what is kept (target)."""

    setting: Setting
    target: Target
    colluding: int
    distance_reason: str | None = None

    @property
    def clients_stay(self) -> bool:
        """Whether the same clients take part in all rounds, and can keep the seeds of their noise to themselves."""
        return self.target.participation.scheme == "every"

    @classmethod
    def of(cls, required: Requirements) -> Problem:
        """Validates requirements.

        Raises:
            InfeasibleError: Nobody is left whose noise protects.
        """
        adjacency = Adjacency.parse(required.adjacency)
        participation = Participation.parse(required.participation)
        clients = _validate.integer("clients", required.clients, low=1)
        arriving = surviving(clients, required.dropout)
        colluding = _validate.integer("colluding", required.colluding, low=0)
        if arriving - colluding < 1:
            raise InfeasibleError(
                f"Of {clients} clients {clients - arriving} may drop out and {colluding} may collude: nobody is left "
                f"whose noise protects. At most {max(0, arriving - 1)} may collude at this dropout."
            )
        participation.check(adjacency)
        low, high = NORM_LIMITS
        clip_norm = _validate.positive("clip_norm", required.clip_norm, low=low, high=high)
        distance = check_distance(required.replace_one_distance, required.distance_reason, clip_norm=clip_norm)
        if distance is not None and adjacency is not Adjacency.REPLACE_ONE:
            raise ParameterError(
                f"replace_one_distance={distance:g} says nothing of {adjacency} neighbours, a vector and zero; leave "
                "it out."
            )
        target = Target(
            epsilon=_validate.positive("epsilon", required.epsilon, high=500.0),
            delta=_validate.probability("delta", required.delta),
            rounds=_validate.integer("rounds", required.rounds, low=1),
            participation=participation,
            adjacency=adjacency,
            dim=_validate.integer("dim", required.dim, low=1),
            clip_norm=clip_norm,
            honest=arriving - colluding,
            replace_one_distance=distance,
        )
        setting = Setting(
            clients=clients,
            surviving=arriving,
            dim=target.dim,
            clip_norm=target.clip_norm,
            rotate=required.rotate,
            overflow=_validate.probability("overflow", required.overflow) if required.secure else None,
            mean_norm=_mean_norm(required),
            mechanisms=_asked_for(required),
        )
        return cls(setting, target, colluding, required.distance_reason)

    @property
    def gaussian_squared_error(self) -> float:
        """Error of the Gaussian protocol whose honest survivors' noise alone keeps the target."""
        return gaussian_squared_error(self.setting, self.target)

    def designs(self, enough: float, bits: Iterable[float]) -> dict[float, Design]:
        """The best design for each number of bits, rising, that has one.

        Beyond the usual numbers of bits more are looked at only while none has an expected squared error of at most
        `enough`. And where one is so near the Gaussian mechanism's that more bits would be wasted, it stands for these,
        too.
        """
        close = _AS_GOOD_AS_GAUSSIAN * self.gaussian_squared_error
        designs: dict[float, Design] = {}
        best: Design | None = None
        for b in bits:
            if b > _USUAL_BITS and best is not None and best.error.total <= max(enough, close):
                break
            if best is None or best.error.total > close:
                found = best_design(self.setting, self.target, b)
                # What fits fewer bits fits these, too.
                if found is not None and (best is None or found.error.total < best.error.total):
                    best = found
            if best is not None:
                designs[b] = best
        return designs

    def at(self, bits: float) -> Finished | None:
        """The best protocol with at most this many bits per coordinate, None if there is none.

        Raises:
            ConditionError: None of them can be accounted for.
        """
        found = self._best(Contest(self.setting, self.target, bits), bits)
        if found is None or self.setting.overflow is None or bits < 2.0:
            return found
        # Designs are searched for that fill the modulus. Where a smaller one does better, it will do.
        fewer = Contest(self.setting, self.target, bits - 1.0)
        if fewer.promise < found.error.total:
            other = self._best(fewer, bits)
            if other is not None and other.error.total < found.error.total:
                return other
        return found

    def _best(self, contest: Contest, bits: float) -> Finished | None:
        return contest.best(lambda design: self.finish(design, bits))

    def fewest_bits(self, enough: float) -> tuple[float, Finished] | None:
        """The fewest whole bits with an expected squared error of at most `enough`, or of the smallest there is.

        Numbers of bits at which nothing could come that near are certified only if no other comes near either.
        """
        found: list[tuple[float, Finished]] = []
        rest: list[tuple[float, float, Contest]] = []
        for b in WHOLE_BITS:
            contest = Contest(self.setting, self.target, b)
            if contest.floor > enough:
                rest.append((contest.floor, b, contest))
            elif (design := self._best(contest, b)) is not None:
                found.append((b, design))
                if design.error.total <= enough:
                    return found[-1]
        for floor, b, contest in sorted(rest, key=lambda each: each[:2]):
            if (
                all(floor < design.error.total for _, design in found)
                and (design := self._best(contest, b)) is not None
            ):
                found.append((b, design))
        return min(found, key=lambda each: (each[1].error.total, each[0]), default=None)

    def finish(self, design: Design, bits: float) -> Finished:
        """The design as a protocol, with nearly the smallest scale whose own guarantee is within ε."""
        design, protocol, guarantee = self._accounted(design, bits)
        modulus = design.modulus
        if modulus is not None:
            modulus = _convenient(modulus, self.setting.dim, values_of(bits))
        # Sums modulo something are post-processing: the guarantee is the same.
        protocol = replace(protocol, modulus=modulus)
        return Finished(design.mechanism, modulus, design.error, protocol=protocol, guarantee=guarantee)

    def _accounted(self, design: Design, bits: float) -> tuple[Design, Protocol, Guarantee]:
        """The design with nearly the smallest scale whose own guarantee is within ε, and that guarantee.

        The search used each certificate in a form that is quick to invert. The accounting of the finished protocol has
        the last word: it may be a little smaller, and then less noise is enough.
        """
        epsilon = self.target.epsilon
        protocol, guarantee = self._account(design)
        while guarantee.epsilon > epsilon:
            design = self._rescaled(design, max(guarantee.epsilon / epsilon, 1.0 + 1e-6))
            protocol, guarantee = self._account(design)
        if self.target.participation.sampled:
            return design, protocol, guarantee  # dp_accounting is slow, and the search was through it already
        if isinstance(design.mechanism.law(self.target.honest), Steps) and guarantee.epsilon > _NEARLY * epsilon:
            return design, protocol, guarantee  # the search was through the same certificate
        # ε is nearly proportional to 1/s.
        factor = max(guarantee.epsilon / epsilon, _LEAST_FACTOR)
        for _ in range(_ADJUSTMENTS):
            closer = self._rescaled(design, factor)
            if closer.error.total > design.error.total * (1.0 - 5e-4) or (closer.modulus or 0) > values_of(bits):
                break
            try:
                tried_protocol, tried_guarantee = self._account(closer)
            except ConditionError:
                # Nothing is proved with so little noise; half the way may do, and what there is stays.
                factor = math.sqrt(factor)
                continue
            if tried_guarantee.epsilon <= epsilon:
                design, protocol, guarantee = closer, tried_protocol, tried_guarantee
                factor = max(guarantee.epsilon / epsilon, _LEAST_FACTOR)
            else:
                # A little too close; what it missed ε by says how much.
                factor *= tried_guarantee.epsilon / epsilon * (1.0 + 5e-4)
        return design, protocol, guarantee

    def _rescaled(self, design: Design, factor: float) -> Design:
        """The design with its scale times `factor`; unrotated vectors stay unclipped."""
        scale = design.mechanism.scale * factor
        if not self.setting.rotate:
            scale = max(scale, self.setting.useful_scales(design.mechanism)[1])
        return self.setting.design(design.mechanism.with_scale(scale))

    def _account(self, design: Design) -> tuple[Protocol, Guarantee]:
        protocol = Protocol(
            clients=self.setting.clients,
            dim=self.setting.dim,
            clip_norm=self.setting.clip_norm,
            mechanism=design.mechanism,
            rotate=self.setting.rotate,
            modulus=design.modulus,
            replace_one_distance=self.target.replace_one_distance,
            distance_reason=self.distance_reason,
        )
        return protocol, self.proved(protocol)

    def proved(self, protocol: Protocol) -> Guarantee:
        """The guarantee that counts: of all rounds, with those whose noise counts."""
        return guarantee_over_rounds(
            protocol,
            self.target.delta,
            rounds=self.target.rounds,
            participation=self.target.participation,
            adjacency=self.target.adjacency,
            surviving=self.setting.surviving,
            colluding=self.colluding,
        )

    def overflow_probability(self, protocol: Protocol) -> float:
        """The proved bound for the protocol's modulus, 0 without one."""
        if protocol.modulus is None:
            return 0.0
        return modulus.overflow_probability(
            protocol.modulus,
            protocol.mechanism,
            clients=protocol.clients,
            dim=protocol.dim,
            clip_norm=protocol.clip_norm,
            rotate=protocol.rotate,
            mean_norm=self.setting.mean_norm,
        )

    # ------------------------------------------------------------------ the nearest feasible requirements

    def too_few_bits(self, bits: float | None) -> InfeasibleError:
        """No design at these bits: names the fewest bits, and the fewest clients at these bits, that have one.

        Both are found roughly, and then certified: what is named can be had.
        """
        asked = f"{bits:g} bits" if bits is not None else f"up to {MAX_BITS} bits"
        reason = "every certificate needs more noise than that holds, whatever ε is"
        fewest = min(kind.fewest_values for kind in self.setting.mechanisms)
        least = math.log2(fewest)
        # Mechanisms that leave coordinates out take less than a bit.
        shares = _SHARES if fewest == 1 else ()
        if self.setting.overflow is None and bits is not None and values_of(bits) < fewest:
            reason = f"rounding and noise need at least {fewest} values, log2({fewest}) = {least:.4g} bits"
        elif self.setting.overflow is not None:
            reason = "the sums of so many clients' noise alone do not fit the modulus, or there is too little noise"
        remedies = []
        more = [b for b in {least, *shares, *WHOLE_BITS} if b > (bits or 0.0)]
        smallest = next((b for b in sorted(more) if self._roughly(b) and self._certainly(b)), None)
        if smallest is not None:
            remedies.append(f"bits={smallest:.4g} is the fewest that will do")
        enough = self._enough_clients(bits if bits is not None else MAX_BITS)
        if enough is not None:
            remedies.append(f"about {enough:,} clients would do at {asked}")
        remedies.append("or a larger delta, which needs less noise")
        return InfeasibleError(
            f"No protocol with {asked} per coordinate keeps δ={self.target.delta:g} for {self.setting.clients:,} "
            f"clients: {reason}. The nearest that can be had: {'; '.join(remedies)}."
        )

    def _enough_clients(self, bits: float) -> int | None:
        """The fewest clients (within a factor 1.1) with a design at these bits, if more of them help at all."""
        clients = self.setting.clients
        rough = _first(clients, 2**32, lambda n: self._scaled(n)._roughly(bits))
        if rough is None:
            return None
        return _first(rough - 1, _MOST_MORE_CLIENTS * rough, lambda n: self._scaled(n)._certainly(bits))

    def _scaled(self, clients: int) -> Problem:
        """The same requirements with more clients, of whom the same share drops out."""
        surviving = self.setting.surviving * clients // self.setting.clients
        return replace(
            self,
            setting=replace(self.setting, clients=clients, surviving=surviving),
            target=replace(self.target, honest=surviving - self.colluding),
        )

    def _roughly(self, bits: float) -> bool:
        return roughly_feasible(self.setting, self.target, bits)

    def _certainly(self, bits: float) -> bool:
        return feasible(self.setting, self.target, bits)

    def too_accurate(self, bits: float, best: Design, max_error: float) -> InfeasibleError:
        """No design is as accurate as that: names the smallest error at this ε and the smallest ε for this error."""
        error = best.error.total
        remedy = f"The smallest error at ε={rounded_up(self.target.epsilon)} is {error:.4g}, with bits={bits:g}"
        needed = self._smallest_epsilon(bits, max_error)
        if needed is not None:
            remedy += f"; max_error={max_error:g} needs about epsilon={rounded_up(needed, 3)}"
        return InfeasibleError(
            f"No protocol was found whose expected squared error is at most {max_error:g} "
            f"(the Gaussian mechanism itself has {self.gaussian_squared_error:.4g}). {remedy}, or more clients."
        )

    def _smallest_epsilon(self, bits: float, max_error: float) -> float | None:
        """The smallest ε (within 2 %, rounded up) at which these bits reach the error."""
        if self.target.participation.rate < 1.0:
            return None  # each trial would be a search through dp_accounting

        def reached(epsilon: float) -> bool:
            design = best_design(self.setting, replace(self.target, epsilon=epsilon), bits)
            return design is not None and design.error.total <= max_error

        low = high = self.target.epsilon
        while not reached(high):
            low, high = high, 2.0 * high
            if high > 100.0:
                return None
        while high > 1.02 * low:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if reached(middle) else (middle, high)
        return high


def _first(low: int, most: int, enough: Callable[[int], bool]) -> int | None:
    """The smallest number above `low` (within a factor 1.1) that is enough, None if none up to `most` is."""
    step = 1
    while not enough(low + step):
        low, step = low + step, max(2 * step, low // 4)
        if low + step > most:
            return None
    high = low + step
    while high > max(1.1 * low, low + 1):
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _convenient(modulus: int, dim: int, values: int) -> int:
    """The next power of two, if the values hold it and messages are as short as with this modulus; else this one.

    It overflows less often and is masked faster, and releases that know no other moduli understand it.
    """
    power = 1 << (modulus - 1).bit_length()
    as_short = pack.payload_bytes(dim, power) <= pack.payload_bytes(dim, modulus)
    return power if as_short and power <= values else modulus


def _mean_norm(required: Requirements) -> float | None:
    """The bound on the mean's norm, checked.

    Raises:
        ParameterError: It is no positive number, more than D, or of no use.
    """
    if required.mean_norm is None:
        return None
    found = _validate.positive("mean_norm", required.mean_norm)
    if found > required.clip_norm:
        raise ParameterError(
            f"Expected mean_norm to be at most clip_norm={required.clip_norm:g}, got mean_norm={found:g}: the mean of "
            "vectors clipped to that norm is never longer. Leave mean_norm out, or clip to a larger norm."
        )
    if not required.secure:
        raise ParameterError(
            f"mean_norm={found:g} is of no use without secure aggregation: it is the modulus that becomes smaller. "
            "Use secure=True, or leave mean_norm out."
        )
    return found
