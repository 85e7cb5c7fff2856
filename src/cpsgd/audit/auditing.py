"""The audit: plays rounds, attacks them, checks them, and reports the ε found beside the ε claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import _plain, _validate
from cpsgd.aggregator import Aggregator
from cpsgd.audit import checks
from cpsgd.audit.bound import Attacker, Prospect, Rehearsal
from cpsgd.audit.checks import Check, Played
from cpsgd.audit.playing import Canary, Encode, Player, Start, canaries_of, peculiar, resting, rounded
from cpsgd.audit.sum_law import Array, LikelihoodRatio
from cpsgd.codec import wire
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.neighbours import Adjacency
from cpsgd.privacy.guarantees import Guarantee, guarantee
from cpsgd.protocol import Protocol

FALSE_ALARM = 1e-6
"""The probability that honest code fails an audit is at most this, unless another is asked for."""

CONFIDENCE = 0.95
"""Confidence of the lower bound that is shown beside the claim. The verdict asks for far more."""

SMALLEST_ROUNDS = 1_000
_MAX_DIM = 2048
_MAX_NUMBERS = 2**27
# Further from the middle, a released float32 might no longer tell one integer from the next.
_MAX_SUM = 2.0**17
# Besides the δ asked for: claims are tested where samples can see something.
_DELTAS = (1e-4, 0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5)
# Shares of the rounds: to find the best canary and its thresholds, and to check the law of other vectors, in full
# rounds and in those with few messages.
_EXPLORING, _ROUNDING, _FEW = 0.2, 0.1, 0.1
# The checks that chance can fail: all but that of the integers.
_RANDOM_CHECKS = 10
_CURVE_POINTS = 200
# Rounds to prepare an attack with, drawn from the law.
_SIMULATED, _MAX_SIMULATED_NUMBERS = 40_000, 2**23


@dataclass(frozen=True)
class Claim:
    """The ε claimed and the ε found at one δ.

    Attributes:
        delta: δ.
        claimed: ε that is proved, an upper bound.
        found: ε that the attack proves, a lower bound that holds for all δ at once but for the audit's false-alarm
            probability.
    """

    delta: float
    claimed: float
    found: float


@dataclass(frozen=True)
class AuditReport:
    """The result of an audit.

    Attributes:
        claimed: The guarantee under audit.
        lower_bound: ε at the guarantee's δ that the attack proves with `confidence`.
        confidence: Confidence of `lower_bound`.
        claims: Claimed and found ε at several δ, the guarantee's first. These decide.
        canary: The canary that did best.
        promises: For every canary, the lower bound on ε that was predicted for it when canaries were compared.
        rounds: Rounds played in all.
        attacked_rounds: Rounds behind the lower bounds.
        surviving: Messages of a round.
        false_alarm: Probability that honest code fails.
        error_rates: The attacker's two error rates, (false alarms, misses), from one end to the other.
        checks: The attack's verdict and the checks of the law.
    """

    claimed: Guarantee
    lower_bound: float
    confidence: float
    claims: tuple[Claim, ...]
    canary: str
    promises: tuple[tuple[str, float], ...]
    rounds: int
    attacked_rounds: int
    surviving: int
    false_alarm: float
    error_rates: tuple[tuple[float, float], ...]
    checks: tuple[Check, ...]

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def claimed_misses(self, false_alarms: Array) -> Array:
        """Returns the claimed trade-off: the least share of misses at these shares of false alarms.

        For every (ε, δ) that is claimed it is at least 1 - δ - e^ε α and e^-ε (1 - δ - α) (Dong, Roth and Su, "Gaussian
        Differential Privacy", 2022, Proposition 3).
        """
        lines = [np.zeros_like(false_alarms)]
        for claim in self.claims:
            lines.append(1.0 - claim.delta - math.exp(claim.claimed) * false_alarms)
            lines.append(math.exp(-claim.claimed) * (1.0 - claim.delta - false_alarms))
        highest: Array = np.max(lines, axis=0)
        return highest

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {"passed": self.passed, **_plain.to_dict(self), "promises": dict(self.promises)}


def audit(
    protocol: Protocol,
    delta: float,
    *,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    rounds: int = 20_000,
    surviving: int | None = None,
    few: int = 1,
    round: int = 0,
    encode: Encode | None = None,
    start: Start = Aggregator,
    seed: int | None = None,
    false_alarm: float = FALSE_ALARM,
    progress: Callable[[int], None] | None = None,
) -> AuditReport:
    """Attacks rounds of a protocol as they are really carried out, and compares with the ε that is claimed.

    Args:
        protocol: A protocol whose messages are integers.
        delta: δ of the claim.
        adjacency: Which data sets are neighbours.
        rounds: Rounds to play; the more, the closer the lower bound comes to the truth.
        surviving: Number of messages in a round, for which ε is claimed; all of the protocol's clients if None.
        few: Number of messages in the rounds in which most clients drop out.
        round: Number of the round that is played again and again; it fixes the rotation.
        encode: The client's half of the code under audit; the package's own if None.
        start: Starts the server's half.
        seed: Makes the auditor's own choices repeatable, not the noise.
        false_alarm: Largest probability with which honest code may fail.
        progress: Called with the number of rounds just played.

    Returns:
        The report; `passed` is the verdict.

    Raises:
        ConditionError: There is no claim to audit: no theorem applies to so little noise.
        ParameterError: The protocol is too large to audit, or a Gaussian one; or it has a promise that `encode` and
            `start` would keep.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=2, dim=8, clip_norm=1.0, levels=8, trials=250)
        >>> report = audit(protocol, delta=1e-3, rounds=1_000, seed=1)
        >>> report.passed, [check.name for check in report.checks][:3]
        (True, ['privacy', 'integers', 'unbiased'])
    """
    if protocol.promise is not None and encode is not None:
        raise ParameterError(
            "An audit plays rounds of single messages, which code that keeps the protocol's promise would refuse: "
            "audit dataclasses.replace(protocol, promise=None), and encode with that."
        )
    # The claim is computed here, for the messages that are played, and not read off a promise.
    protocol = replace(protocol, promise=None)
    count = protocol.clients if surviving is None else _validate.integer("surviving", surviving, low=1)
    check_size(protocol, count, _validate.integer("rounds", rounds, low=SMALLEST_ROUNDS))
    _validate.integer("few", few, low=1, high=count)
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    neighbours = Adjacency.parse(adjacency)
    claimed = guarantee(protocol, delta, adjacency=neighbours, surviving=count)
    claims = _claims(protocol, claimed, count)
    player = Player(protocol, round, encode or protocol.encode, start, seed, progress)
    share = _validate.probability("false_alarm", false_alarm) / _RANDOM_CHECKS
    error = share / len(claims)

    # Which canary, and which attacker, promises most.
    choices = canaries_of(player.lattice, neighbours)
    attacked = rounds - int(_EXPLORING * rounds) - int(_ROUNDING * rounds) - int(_FEW * rounds)
    explored = [_explore(player, canary, count, int(_EXPLORING * rounds) // len(choices)) for canary in choices]
    batches = [batch for lesson in explored for batch in lesson.batches]

    def promised(lesson: _Lesson) -> float:
        return _excess(
            [Claim(delta_, epsilon, lesson.prospect(attacked, delta_, error).epsilon) for delta_, epsilon in claims]
        )

    best = max(explored, key=promised)

    # Fresh rounds decide.
    played, scores, worlds = _attack(player, best.canary, count, attacked)
    batches += played

    def proved(delta: float, error: float) -> float:
        return best.attacker(attacked, delta, error).lower_bound(scores, worlds, delta, error)

    found = tuple(Claim(delta_, epsilon, proved(delta_, error)) for delta_, epsilon in claims)
    batches.append(player.play("between levels", [(rounded(player.lattice), count)], int(_ROUNDING * rounds)))
    vectors = peculiar(player.lattice)
    ends = np.linspace(0, int(_FEW * rounds), len(vectors) + 1).astype(int)
    for (name, vector), number in zip(vectors.items(), np.diff(ends), strict=True):
        batches.append(player.play(f"few messages, {name}", [(vector, few)], int(number)))
    privacy = Check("privacy", "largest excess of the ε found over the ε claimed", _excess(found), 0.0)
    return AuditReport(
        claimed=claimed,
        lower_bound=proved(delta, 1.0 - CONFIDENCE),
        confidence=CONFIDENCE,
        claims=found,
        canary=best.canary.name,
        promises=tuple(
            (lesson.canary.name, lesson.prospect(attacked, delta, 1.0 - CONFIDENCE).epsilon) for lesson in explored
        ),
        rounds=player.played,
        attacked_rounds=attacked,
        surviving=count,
        false_alarm=false_alarm,
        error_rates=_error_rates(scores, worlds),
        checks=(privacy, *_law_checks(batches, player.generator, share)),
    )


@dataclass(frozen=True)
class _Lesson:
    """Rounds to prepare the attack on a canary with: real ones, and simulated honest ones.

    The simulated ones, of which there are many, show how honest code is best attacked. The real ones show how the code
    under audit may be worse.
    """

    canary: Canary
    batches: Sequence[Played]
    real: Rehearsal
    simulated: Rehearsal

    def prospect(self, rounds: int, delta: float, error: float) -> Prospect:
        """Returns the prospect of the attack that promises the largest ε."""
        promises = [rehearsal.best_prospect(rounds, delta, error) for rehearsal in (self.real, self.simulated)]
        return max(promises, key=lambda promise: promise.epsilon)

    def attacker(self, rounds: int, delta: float, error: float) -> Attacker:
        """Returns the attacker with the best prospect. Its threshold comes from real rounds, whatever their law."""
        best = self.prospect(rounds, delta, error)
        return Attacker.answering(self.real.scores, best.sign, best.share)


def _explore(player: Player, canary: Canary, count: int, rounds: int) -> _Lesson:
    batches, scores, worlds = _attack(player, canary, count, rounds)
    laws = [batch.law for batch in batches]
    size = min(_SIMULATED, _MAX_SIMULATED_NUMBERS // player.lattice.protocol.dim) // 2
    ratio = LikelihoodRatio(*laws)
    simulated = np.concatenate([ratio.score(law.sample(size, player.generator)) for law in laws])
    return _Lesson(canary, batches, Rehearsal(scores, worlds), Rehearsal(simulated, np.repeat([False, True], size)))


def _attack(player: Player, canary: Canary, count: int, rounds: int) -> tuple[list[Played], Array, NDArray[np.bool_]]:
    """Plays rounds in which a coin picks the neighbour that takes part; returns the rounds, scores and coins."""
    others = (resting(player.lattice), count - 1)
    zero, one = [(canary.zero, 1), others], [(canary.one, 1), others]
    worlds = player.generator.random(rounds) < 0.5
    times = player.played + np.arange(rounds)
    exact = player.lattice.sums(player.means([one if world else zero for world in worlds]), count)
    slack = player.lattice.slack(count)
    batches = [
        Played(f"{canary.name}, {label}", player.law(clients), slack, exact[worlds == world], times[worlds == world])
        for label, clients, world in (("zero", zero, False), ("one", one, True))
    ]
    ratio = LikelihoodRatio(batches[0].law, batches[1].law)
    scores = np.empty(rounds)
    for batch, world in zip(batches, (False, True), strict=True):
        scores[worlds == world] = ratio.score(batch.sums)
    return batches, scores, worlds


def _claims(protocol: Protocol, claimed: Guarantee, count: int) -> list[tuple[float, float]]:
    """Returns claimed (δ, ε): at the requested δ, and at those δ where samples reveal most."""
    claims = [(claimed.delta, claimed.epsilon)]
    for delta in _DELTAS:
        if delta <= claimed.delta:
            continue
        try:
            found = guarantee(protocol, delta, adjacency=claimed.adjacency, surviving=count)
        except ConditionError:
            continue  # no claim, nothing to audit
        # What is proved at a smaller δ holds here too.
        claims.append((delta, min(found.epsilon, claimed.epsilon)))
    return claims


def _excess(claims: Sequence[Claim]) -> float:
    """Returns the largest difference between found and claimed ε; negative if no claim is exceeded."""
    # Nothing found where nothing is claimed is no near miss.
    excesses = [claim.found - claim.claimed for claim in claims if claim.found > 0.0]
    return max(excesses, default=-claims[0].claimed)


def _law_checks(batches: Sequence[Played], generator: np.random.Generator, share: float) -> list[Check]:
    """Returns the checks that the sums follow their exact law."""
    uniforms = [batch.law.uniform(batch.sums, generator) for batch in batches]
    ordered = checks.in_order(batches, uniforms)
    return [
        *checks.of_law(batches, uniforms, share),
        checks.quiet(ordered, share),
        checks.coordinates(ordered, share),
        checks.rounds(ordered, share),
        checks.repeats(batches, share),
    ]


def _error_rates(scores: Array, worlds: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    """Returns the shares of false alarms and misses of the attacker, for many thresholds."""
    zero, one = np.sort(scores[~worlds]), np.sort(scores[worlds])
    thresholds = np.quantile(scores, np.linspace(0.0, 1.0, _CURVE_POINTS), method="lower")
    alarms = 1.0 - np.searchsorted(zero, thresholds, side="right") / len(zero)
    misses = np.searchsorted(one, thresholds, side="right") / len(one)
    return ((1.0, 0.0), *((float(a), float(b)) for a, b in zip(alarms, misses, strict=True)))


def check_size(protocol: Protocol, count: int, rounds: int) -> None:
    """Refuses a protocol that sends floats, and sizes that are too large to audit."""
    mechanism = protocol.mechanism
    grid = mechanism.grid
    if grid is None:
        raise ParameterError(
            f"The {protocol.name} protocol sends floats: there is no lattice to bring its sums back to. "
            "Audit one that sends integers."
        )
    if protocol.dim > _MAX_DIM:
        raise ParameterError(
            f"Expected at most {_MAX_DIM} coordinates to audit, got {protocol.dim}; audit the same protocol with fewer."
        )
    if rounds * protocol.dim > _MAX_NUMBERS:
        raise ParameterError(f"Expected rounds times dim <= {_MAX_NUMBERS}, got {rounds} times {protocol.dim}.")
    variance = mechanism.noise.variance + mechanism.largest_rounding_variance
    reach = count * grid.limit / grid.unit / mechanism.scale + 8.0 * math.sqrt(count * variance)
    if reach > _MAX_SUM:
        raise ParameterError(
            "The sums are too large to be told apart in a released mean of float32; audit fewer surviving messages."
        )
