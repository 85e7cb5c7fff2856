"""`Problem`: requirements, validated, and the best protocols for them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from cpsgd import _validate
from cpsgd.codec import pack
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.neighbours import Adjacency
from cpsgd.planner import modulus
from cpsgd.planner.requirements import (
    Requirements,
    checked_levels,
    checked_mean_norm,
    checked_server_messages,
    mechanisms_for,
    surviving,
)
from cpsgd.planner.search import MAX_BITS, Contest, Design, Setting, gaussian_squared_error, values_of
from cpsgd.planner.target import Target
from cpsgd.privacy.guarantees import Guarantee, guarantee
from cpsgd.promise import Claim, Conditions
from cpsgd.protocol import MAX_CLIENTS, NORM_LIMITS, Protocol, check_distance, check_l1_distance
from cpsgd.run import Run
from cpsgd.secagg.pair.shape import most_levels

# How often X is brought closer to what the finished protocol's own accounting allows.
_ADJUSTMENTS = 2
# Within this of ε a guarantee is as near as the search for its certificate was.
_NEARLY = 0.998
# The same for sampled rounds; what to aim at; and d log ε / d log(1/s), about, to begin with.
_SAMPLED_NEARLY = 0.998
_SAMPLED_AIM = 0.9995
# Of sampled rounds whose ε is too large by a factor, s grows by this power of it.
_SAMPLED_POWER = 0.9
_STEEPNESS = 2.0
# An ε of zero, as with a huge δ, says nothing of how much smaller the scale may be.
_LEAST_FACTOR = 1e-2
# Bits that are always looked at; sums of very many clients may want more for their modulus.
_USUAL_BITS = 16
_AS_GOOD_AS_GAUSSIAN = 1.001
# The same for the frontier, of which no point need be the very best.
_FRONTIER = 1.01

WHOLE_BITS = tuple(map(float, range(1, MAX_BITS + 1)))
"""The numbers of bits that are looked at where none is asked for."""


@dataclass(frozen=True)
class Finished(Design):
    """A design as a protocol.

    Attributes:
        protocol: The parameters to run with.
        guarantee: The guarantee of the protocol.
    """

    protocol: Protocol = field(kw_only=True)
    guarantee: Guarantee = field(kw_only=True)


@dataclass(frozen=True)
class Problem:
    """Validated requirements, split into the setting (vectors, transport) and the target (privacy).

    Where single examples are protected, `of_examples` has the rounds as they are. The target is then about whole
    clients that hold one example each, and its D is that of an example.
    """

    setting: Setting
    target: Target
    distance_reason: str | None = None
    of_examples: Conditions | None = None
    _contests: dict[float, Contest] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def clients_stay(self) -> bool:
        """Whether the same clients take part in all rounds, and can keep the seeds of their noise to themselves."""
        return self.of_examples is not None or self.target.conditions.participation.scheme == "every"

    @property
    def conditions(self) -> Conditions:
        """The rounds that a guarantee is about."""
        return self.target.conditions if self.of_examples is None else self.of_examples

    @classmethod
    def of(cls, required: Requirements) -> Problem:
        """Validates requirements.

        Raises:
            InfeasibleError: Nobody is left whose noise protects.
        """
        clients = _validate.integer("clients", required.clients, low=1, high=MAX_CLIENTS)
        arriving = reports = surviving(clients, required.dropout)
        colluding = _validate.integer("colluding", required.colluding, low=0, high=MAX_CLIENTS)
        mean_norm = checked_mean_norm(required)
        if own := checked_server_messages(required):
            # Both servers' messages are in the sum. Those of a dishonest one do not count, nor do other clients'.
            mean_norm = (required.clip_norm if mean_norm is None else mean_norm) * clients / (clients + 2 * own)
            clients, arriving, colluding = clients + 2 * own, reports + 2 * own, reports + own - 1
        if arriving - colluding < 1:
            raise InfeasibleError(
                f"Of {clients} clients {clients - arriving} may drop out and {colluding} may collude: nobody is left "
                f"whose noise protects. At most {max(0, arriving - 1)} may collude at this dropout."
            )
        conditions = Conditions.of(
            arriving,
            rounds=required.rounds,
            participation=required.participation,
            adjacency=required.adjacency,
            colluding=colluding,
        )
        low, high = NORM_LIMITS
        clip_norm = _validate.positive("clip_norm", required.clip_norm, low=low, high=high)
        l1 = check_l1_distance(required.replace_one_l1_distance, clip_norm=clip_norm, rotate=required.rotate)
        distance = check_distance(required.replace_one_distance, required.distance_reason, clip_norm=clip_norm, l1=l1)
        if required.distance_reason is not None and conditions.adjacency is not Adjacency.REPLACE_ONE:
            raise ParameterError(
                f"A replace-one distance says nothing of {conditions.adjacency} neighbours, a vector and zero; leave "
                "it out."
            )
        epsilon = _validate.positive("epsilon", required.epsilon, high=500.0)
        target = Target(
            claim=Claim(epsilon, _validate.fraction("delta", required.delta)),
            conditions=conditions,
            dim=_validate.integer("dim", required.dim, low=1),
            clip_norm=clip_norm,
            replace_one_distance=distance,
            replace_one_l1_distance=l1,
            levels=checked_levels(required),
        )
        kinds = mechanisms_for(required)
        wraps = any(kind.wraps for kind in kinds)
        setting = Setting(
            clients=clients,
            surviving=arriving,
            dim=target.dim,
            clip_norm=target.clip_norm,
            rotate=required.rotate,
            overflow=_validate.probability("overflow", required.overflow) if required.modular or wraps else None,
            mean_norm=mean_norm,
            mechanisms=kinds,
            added=2 * own,
            most_values=most_levels(target.dim) if required.pair else None,
        )
        return cls(setting, target, required.distance_reason)

    @property
    def gaussian_squared_error(self) -> float:
        """Error of the Gaussian protocol whose honest survivors' noise alone keeps the target."""
        return gaussian_squared_error(self.setting, self.target)

    def designs(self, enough: float, bits: Iterable[float]) -> dict[float, Design]:
        """Maps each number of bits that has a design, in rising order, to approximately the best one.

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
                found = self._contest(b).draft(_FRONTIER * self.gaussian_squared_error)
                # What fits fewer bits fits these, too.
                if found is not None and (best is None or found.error.total < best.error.total):
                    best = found
            if best is not None:
                designs[b] = best
        return designs

    def at(self, bits: float) -> Finished | None:
        """Returns the best protocol with at most this many bits per coordinate, None if there is none.

        Raises:
            ConditionError: None of them can be accounted for.
        """
        found = self._best(self._contest(bits), bits)
        if found is None or self.setting.overflow is None or bits < 2.0:
            return found
        # Designs are searched for that fill the modulus. Where a smaller one does better, it will do.
        fewer = self._contest(bits - 1.0)
        if fewer.promise < found.error.total:
            other = self._best(fewer, bits)
            if other is not None and other.error.total < found.error.total:
                return other
        return found

    def _contest(self, bits: float) -> Contest:
        """Returns the ranked candidates of all mechanisms at these bits, from a cache."""
        if bits not in self._contests:
            self._contests[bits] = Contest(self.setting, self.target, bits)
        return self._contests[bits]

    def promising(self, bits: float, enough: float) -> bool:
        """Returns whether an expected squared error of `enough` may be reached with these bits, or one bit fewer."""
        contests = [self._contest(each) for each in (bits, bits - 1.0) if each >= 1.0]
        return any(contest.promising(enough) for contest in contests)

    def _best(self, contest: Contest, bits: float) -> Finished | None:
        return contest.best(lambda design: self.finish(design, bits))

    def fewest_bits(self, enough: float) -> tuple[float, Finished] | None:
        """Returns the fewest whole bits with an expected squared error of at most `enough`, or the smallest error.

        Numbers of bits at which nothing could come that near are certified only if no other comes near either.
        """
        found: list[tuple[float, Finished]] = []
        rest = set(WHOLE_BITS)
        # What fits few bits fits more, so that promising ones follow those that are not. Two servers need many.
        last = 0 if self.setting.most_values is None else _USUAL_BITS
        start = bisect_left(WHOLE_BITS, True, hi=last, key=lambda b: self._contest(b).promising(enough))
        for b in WHOLE_BITS[start:]:
            if (contest := self._contest(b)).promising(enough):
                rest.discard(b)
                if (design := self._best(contest, b)) is not None:
                    found.append((b, design))
                    if design.error.total <= enough:
                        return found[-1]
        for floor, b in sorted((self._contest(b).floor, b) for b in rest):
            if (
                all(floor < design.error.total for _, design in found)
                and (design := self._best(self._contest(b), b)) is not None
            ):
                found.append((b, design))
        return min(found, key=lambda each: (each[1].error.total, each[0]), default=None)

    def finish(self, design: Design, bits: float) -> Finished:
        """Returns the design as a protocol, with nearly the smallest scale whose own guarantee is within ε."""
        design, protocol, proved = self._accounted(design, bits)
        modulus = design.modulus
        if modulus is not None and self.setting.most_values is None:
            modulus = _convenient(modulus, self.setting.dim, values_of(bits))
        # Sums modulo something are post-processing: the guarantee is the same.
        protocol = replace(protocol, modulus=modulus)
        return Finished(design.mechanism, modulus, design.error, protocol=protocol, guarantee=proved)

    def _accounted(self, design: Design, bits: float) -> tuple[Design, Protocol, Guarantee]:
        """Returns the design with nearly the smallest scale whose own guarantee is within ε, and that guarantee.

        The search used each certificate in a form that is quick to invert. The accounting of the finished protocol has
        the last word: it may be a little smaller, and then less noise is enough.
        """
        epsilon, over = self.target.claim.epsilon, None
        # ε falls about as 1/s does, and faster in sampled rounds.
        power = _SAMPLED_POWER if self.target.conditions.participation.sampled else 1.0
        protocol, proved = self._account(design)
        while proved.epsilon > epsilon:
            over = design.mechanism.scale, proved.epsilon
            design = self._rescaled(design, max((proved.epsilon / epsilon) ** power, 1.0 + 1e-6))
            if design.mechanism.scale <= over[0]:
                raise ConditionError(f"No scale of {design.mechanism.name} keeps the ε that is asked for.")
            protocol, proved = self._account(design)
        if self.target.conditions.participation.sampled:
            return self._narrowed((design, protocol, proved), over, bits)
        if proved.epsilon > _NEARLY * epsilon and self.target.found_by_trying(design.mechanism):
            return design, protocol, proved  # the search was through the same certificate
        # ε is nearly proportional to 1/s.
        factor = max(proved.epsilon / epsilon, _LEAST_FACTOR)
        for _ in range(_ADJUSTMENTS):
            closer = self._rescaled(design, factor)
            if closer.error.total > design.error.total * (1.0 - 5e-4) or (closer.modulus or 0) > values_of(bits):
                break
            try:
                tried_protocol, tried_proof = self._account(closer)
            except ConditionError:
                # Nothing is proved with so little noise; half the way may do, and what there is stays.
                factor = math.sqrt(factor)
                continue
            if tried_proof.epsilon <= epsilon:
                design, protocol, proved = closer, tried_protocol, tried_proof
                factor = max(proved.epsilon / epsilon, _LEAST_FACTOR)
            else:
                # A little too close; what it missed ε by says how much.
                factor *= tried_proof.epsilon / epsilon * (1.0 + 5e-4)
        return design, protocol, proved

    def _narrowed(
        self, found: tuple[Design, Protocol, Guarantee], over: tuple[float, float] | None, bits: float
    ) -> tuple[Design, Protocol, Guarantee]:
        """Returns a design of sampled rounds whose ε is only slightly below the allowed one.

        Between a scale that is enough and one that is `over` ε, log ε is about linear in log s.
        """
        epsilon = self.target.claim.epsilon
        for _ in range(_ADJUSTMENTS):
            design, _, proved = found
            scale, spent = design.mechanism.scale, max(proved.epsilon / epsilon, _LEAST_FACTOR)
            if spent > _SAMPLED_NEARLY:
                break
            steepness = _STEEPNESS if over is None else math.log(over[1] / proved.epsilon) / math.log(scale / over[0])
            closer = self._rescaled(design, (spent / _SAMPLED_AIM) ** (1.0 / steepness))
            if closer.mechanism.scale >= scale or (closer.modulus or 0) > values_of(bits):
                break
            try:
                protocol, tried = self._account(closer)
            except ConditionError:
                break
            if tried.epsilon <= epsilon:
                found = closer, protocol, tried
            else:
                over = closer.mechanism.scale, tried.epsilon
        return found

    def _rescaled(self, design: Design, factor: float) -> Design:
        """Returns the design with its scale times `factor`; unrotated vectors stay unclipped."""
        scale = design.mechanism.scale * factor
        if not self.setting.rotate:
            scale = max(scale, self.setting.useful_scales(design.mechanism)[1])
        return self.setting.design(design.mechanism.with_scale(scale))

    def _account(self, design: Design) -> tuple[Protocol, Guarantee]:
        """Returns the design as a protocol, and its guarantee."""
        protocol = self.protocol(design)
        return protocol, self.proved(protocol)

    def protocol(self, design: Design) -> Protocol:
        """Returns the design as a protocol, without a promise."""
        return Protocol(
            clients=self.setting.clients,
            dim=self.setting.dim,
            clip_norm=self.setting.clip_norm,
            mechanism=design.mechanism,
            rotate=self.setting.rotate,
            modulus=design.modulus,
            replace_one_distance=self.target.replace_one_distance,
            replace_one_l1_distance=self.target.replace_one_l1_distance,
            distance_reason=self.distance_reason,
        )

    def proved(self, protocol: Protocol) -> Guarantee:
        """Returns the proved guarantee of a protocol under the problem's conditions."""
        return guarantee(Run(protocol, self.conditions), self.target.claim.delta)

    def overflow_probability(self, protocol: Protocol) -> float:
        """Returns the proved bound on the probability that a sum wraps around; 0 without a modulus."""
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


def _convenient(modulus: int, dim: int, values: int) -> int:
    """Returns the next power of two if it keeps values and message length; else this modulus.

    A power of two overflows less often and is masked faster. Older releases know no other moduli.
    """
    power = 1 << (modulus - 1).bit_length()
    as_short = pack.payload_bytes(dim, power) <= pack.payload_bytes(dim, modulus)
    return power if as_short and power <= values else modulus
