"""The audit itself: plays rounds, attacks them, checks them, and compares what was found with what is claimed."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.aggregator import Aggregator
from cpsgd.codec import wire
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.privacy.adjacency import Adjacency, check_adjacency
from cpsgd.privacy.audit import _checks
from cpsgd.privacy.audit._bound import Attacker, Promise, best_promise
from cpsgd.privacy.audit._canaries import Canary, canaries, resting, rounded
from cpsgd.privacy.audit._checks import Batch, Check
from cpsgd.privacy.audit._lattice import Array, Lattice
from cpsgd.privacy.audit._law import Law, LikelihoodRatio
from cpsgd.privacy.guarantee import Guarantee, guarantee
from cpsgd.protocol import Protocol

FALSE_ALARM = 1e-6
"""The probability that an honest carrier fails an audit is at most this."""

CONFIDENCE = 0.95
"""Of the lower bound that is shown beside the claim. The verdict asks for far more."""

SMALLEST_ROUNDS = 1_000
_MAX_DIM = 2048
_MAX_NUMBERS = 2**27
# Further from the middle, a released float32 might no longer tell one integer from the next.
_MAX_SUM = 2.0**17
# Besides the δ asked for: claims are tested where samples can see something.
_DELTAS = (1e-4, 0.001, 0.003, 0.01, 0.03, 0.05, 0.1, 0.2, 0.3, 0.5)
# Shares of the rounds: to find the best canary and its thresholds, and to check the law of honest vectors.
_EXPLORING, _ROUNDING, _FEW = 0.2, 0.1, 0.1
# The checks that chance can fail.
_RANDOM_CHECKS = 6
_CURVE_POINTS = 200
# Rounds to prepare an attack with, drawn from the law.
_SIMULATED, _MAX_SIMULATED_NUMBERS = 40_000, 2**23
# Rounds between two calls to say how far it is.
_REPORTED = 100


class Carrier(Interface):
    """The server's half of a round, such as `Aggregator`."""

    def add(self, message: Any, /) -> None:
        """Takes one client's message."""

    def mean(self) -> NDArray[np.float32]:
        """What is released."""


Encode = Callable[[Array, int], Any]
"""The client's half: from a vector and the round's number to a message, such as `Protocol.encode`."""

Start = Callable[[Protocol, int], Carrier]
"""Starts a round, such as `Aggregator` itself."""


@dataclass(frozen=True)
class Claim:
    """What is claimed and what was found at one δ.

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
    """What an audit found.

    Attributes:
        claimed: The guarantee under audit.
        lower_bound: ε at the guarantee's δ that the attack proves with `confidence`.
        confidence: Of `lower_bound`.
        claims: Claimed and found ε at several δ, the guarantee's first. These decide.
        canary: The canary that did best.
        promises: For every canary, ε that it promised when canaries were compared.
        rounds: Rounds played in all.
        attacked_rounds: Rounds behind the lower bounds.
        surviving: Messages of a round.
        false_alarm: Probability that an honest carrier fails.
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
        """Whether nothing speaks against the claim."""
        return all(check.passed for check in self.checks)

    def claimed_misses(self, false_alarms: Array) -> Array:
        """The claimed trade-off: the least share of misses at these shares of false alarms.

        Of every (ε, δ) that is claimed, 1 - δ - e^ε α and e^-ε (1 - δ - α) (Dong, Roth and Su, "Gaussian Differential
        Privacy", 2022, Proposition 3).
        """
        lines = [np.zeros_like(false_alarms)]
        for claim in self.claims:
            lines.append(1.0 - claim.delta - math.exp(claim.claimed) * false_alarms)
            lines.append(math.exp(-claim.claimed) * (1.0 - claim.delta - false_alarms))
        highest: Array = np.max(lines, axis=0)
        return highest

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "passed": self.passed,
            **vars(self),
            "claimed": self.claimed.to_dict(),
            "claims": [vars(claim) for claim in self.claims],
            "promises": dict(self.promises),
            "error_rates": [list(pair) for pair in self.error_rates],
            "checks": [{**vars(check), "passed": check.passed} for check in self.checks],
        }


def audit(
    protocol: Protocol,
    delta: float,
    *,
    adjacency: Adjacency = "replace-one",
    rounds: int = 20_000,
    surviving: int | None = None,
    few: int = 1,
    round: int = 0,
    encode: Encode | None = None,
    start: Start = Aggregator,
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> AuditReport:
    """Attacks rounds of a protocol as they are really carried out, and compares with the ε that is claimed.

    Args:
        protocol: A Binomial protocol.
        delta: δ of the claim.
        adjacency: Which data sets are neighbours.
        rounds: Rounds to play; the more, the closer the lower bound comes to the truth.
        surviving: Messages of a round; all of the protocol's if None. The claim is for as many.
        few: Messages of the rounds in which most clients drop out.
        round: Number of the round that is played again and again; it fixes the rotation.
        encode: The client's half of the carrier under audit; the product's if None.
        start: Starts the server's half.
        seed: Makes the auditor's own choices repeatable, not the noise.
        progress: Called with the number of rounds just played.

    Returns:
        The report; `passed` is the verdict.

    Raises:
        ConditionError: There is no claim to audit: no theorem applies to so little noise.
        ParameterError: The protocol is too large to audit, or a Gaussian one.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=2, dim=8, clip_norm=1.0, levels=8, trials=250)
        >>> report = audit(protocol, delta=1e-3, rounds=1_000, seed=1)
        >>> report.passed, [check.name for check in report.checks][:3]
        (True, ['privacy', 'integers', 'unbiased'])
    """
    count = protocol.clients if surviving is None else _validate.integer("surviving", surviving, low=1)
    _check_size(protocol, count, _validate.integer("rounds", rounds, low=SMALLEST_ROUNDS))
    _validate.integer("few", few, low=1, high=count)
    _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
    claimed = guarantee(protocol, delta, adjacency=check_adjacency(adjacency), surviving=count)
    claims = _claims(protocol, claimed, count)
    stage = _Stage(protocol, round, encode or protocol.encode, start, seed, progress)
    share = FALSE_ALARM / _RANDOM_CHECKS
    error = share / len(claims)

    # Which canary, and which attacker, promises most.
    choices = canaries(stage.lattice, adjacency)
    attacked = rounds - int(_EXPLORING * rounds) - int(_ROUNDING * rounds) - int(_FEW * rounds)
    explored = [_explore(stage, canary, count, int(_EXPLORING * rounds) // len(choices)) for canary in choices]
    batches = [batch for lesson in explored for batch in lesson.batches]

    def promised(lesson: _Lesson) -> float:
        return _excess(
            [Claim(delta_, epsilon, lesson.promise(attacked, delta_, error).epsilon) for delta_, epsilon in claims]
        )

    best = max(explored, key=promised)

    # Fresh rounds decide.
    played, scores, worlds = _attack(stage, best.canary, count, attacked)
    batches += played

    def proved(delta: float, error: float) -> float:
        return best.attacker(attacked, delta, error).lower_bound(scores, worlds, delta, error)

    found = tuple(Claim(delta_, epsilon, proved(delta_, error)) for delta_, epsilon in claims)
    vector = rounded(stage.lattice)
    batches.append(stage.play("between levels", [(vector, count)], int(_ROUNDING * rounds)))
    batches.append(stage.play("few messages", [(vector, few)], int(_FEW * rounds)))
    return AuditReport(
        claimed=claimed,
        lower_bound=proved(delta, 1.0 - CONFIDENCE),
        confidence=CONFIDENCE,
        claims=found,
        canary=best.canary.name,
        promises=tuple(
            (lesson.canary.name, lesson.promise(attacked, delta, 1.0 - CONFIDENCE).epsilon) for lesson in explored
        ),
        rounds=stage.played,
        attacked_rounds=attacked,
        surviving=count,
        false_alarm=FALSE_ALARM,
        error_rates=_error_rates(scores, worlds),
        checks=(_privacy(found), *_law_checks(batches, stage.generator, share)),
    )


class _Stage:
    """Plays rounds of a carrier."""

    def __init__(
        self,
        protocol: Protocol,
        round: int,
        encode: Encode,
        start: Start,
        seed: int | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.lattice = Lattice(protocol, round)
        self.generator = np.random.default_rng(seed)
        self.played = 0
        self._protocol, self._round = protocol, round
        self._encode, self._start, self._progress = encode, start, progress

    def law(self, clients: Sequence[tuple[Array, int]]) -> Law:
        """The law of the sums of clients, given as vectors and how many have each."""
        return Law(self._protocol, [(self.lattice.points(vector), number) for vector, number in clients])

    def means(self, worlds: Sequence[Sequence[tuple[Array, int]]]) -> NDArray[np.float32]:
        """What is released in rounds with these clients, a row each."""
        released = np.empty((len(worlds), self._protocol.dim), dtype=np.float32)
        for row, clients in zip(released, worlds, strict=True):
            carrier = self._start(self._protocol, self._round)
            for vector, number in clients:
                for _ in range(number):
                    carrier.add(self._encode(vector, self._round))
            row[:] = carrier.mean()
            self.played += 1
            if self._progress is not None and self.played % _REPORTED == 0:
                self._progress(_REPORTED)
        return released

    def play(self, name: str, clients: Sequence[tuple[Array, int]], rounds: int) -> Batch:
        """Rounds with the same vectors."""
        times = self.played + np.arange(rounds)
        count = sum(number for _, number in clients)
        exact = self.lattice.sums(self.means([clients] * rounds), count)
        return Batch(name, self.law(clients), self.lattice.slack(count), exact, times)


@dataclass(frozen=True)
class _Lesson:
    """What is known about a canary before the attack: scores and worlds of real rounds, and of simulated honest ones.

    The simulated ones, of which there are many, show how an honest carrier is best attacked; the real ones how this
    carrier may be worse.
    """

    canary: Canary
    batches: Sequence[Batch]
    real: tuple[Array, NDArray[np.bool_]]
    simulated: tuple[Array, NDArray[np.bool_]]

    def promise(self, rounds: int, delta: float, error: float) -> Promise:
        """The attack that promises most."""
        promises = [
            best_promise(*sample, rounds=rounds, delta=delta, error=error) for sample in (self.real, self.simulated)
        ]
        return max(promises, key=lambda promise: promise.epsilon)

    def attacker(self, rounds: int, delta: float, error: float) -> Attacker:
        """Who makes that promise. Its threshold always comes from real rounds, whatever law these have."""
        best = self.promise(rounds, delta, error)
        return Attacker.answering(self.real[0], best.sign, best.share)


def _explore(stage: _Stage, canary: Canary, count: int, rounds: int) -> _Lesson:
    batches, scores, worlds = _attack(stage, canary, count, rounds)
    laws = [batch.law for batch in batches]
    size = min(_SIMULATED, _MAX_SIMULATED_NUMBERS // stage.lattice.protocol.dim) // 2
    ratio = LikelihoodRatio(*laws)
    simulated = np.concatenate([ratio.score(law.sample(size, stage.generator)) for law in laws])
    return _Lesson(canary, batches, (scores, worlds), (simulated, np.repeat([False, True], size)))


def _attack(stage: _Stage, canary: Canary, count: int, rounds: int) -> tuple[list[Batch], Array, NDArray[np.bool_]]:
    """Plays rounds in which a coin decides which neighbour takes part; the attacker's scores, and the coins."""
    others = (resting(stage.lattice), count - 1)
    zero, one = [(canary.zero, 1), others], [(canary.one, 1), others]
    worlds = stage.generator.random(rounds) < 0.5
    times = stage.played + np.arange(rounds)
    exact = stage.lattice.sums(stage.means([one if world else zero for world in worlds]), count)
    slack = stage.lattice.slack(count)
    batches = [
        Batch(f"{canary.name}, {label}", stage.law(clients), slack, exact[worlds == world], times[worlds == world])
        for label, clients, world in (("zero", zero, False), ("one", one, True))
    ]
    ratio = LikelihoodRatio(batches[0].law, batches[1].law)
    scores = np.empty(rounds)
    for batch, world in zip(batches, (False, True), strict=True):
        scores[worlds == world] = ratio.score(batch.sums)
    return batches, scores, worlds


def _claims(protocol: Protocol, claimed: Guarantee, count: int) -> list[tuple[float, float]]:
    """The claimed (δ, ε), at the δ asked for and at those where samples see most."""
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


def _privacy(claims: Sequence[Claim]) -> Check:
    """Whether the attack stays within every claim."""
    return Check("privacy", "largest excess of the ε found over the ε claimed", _excess(claims), 0.0)


def _excess(claims: Sequence[Claim]) -> float:
    """How far the attack goes beyond a claim at most; below zero where it stays within all."""
    # Nothing found where nothing is claimed is no near miss.
    excesses = [claim.found - claim.claimed for claim in claims if claim.found > 0.0]
    return max(excesses, default=-claims[0].claimed)


def _law_checks(batches: Sequence[Batch], generator: np.random.Generator, share: float) -> list[Check]:
    uniforms = [batch.law.uniform(batch.sums, generator) for batch in batches]
    ordered = _checks.in_order(batches, uniforms)
    return [
        _checks.integers(batches),
        _checks.unbiased(batches, share),
        _checks.distribution(batches, uniforms, share),
        _checks.coordinates(ordered, share),
        _checks.successive(ordered, share),
        _checks.repeats(batches, share),
    ]


def _error_rates(scores: Array, worlds: NDArray[np.bool_]) -> tuple[tuple[float, float], ...]:
    """Shares of false alarms and of misses of the attacker who says "one" above a threshold, for many thresholds."""
    zero, one = np.sort(scores[~worlds]), np.sort(scores[worlds])
    thresholds = np.quantile(scores, np.linspace(0.0, 1.0, _CURVE_POINTS), method="lower")
    alarms = 1.0 - np.searchsorted(zero, thresholds, side="right") / len(zero)
    misses = np.searchsorted(one, thresholds, side="right") / len(one)
    return ((1.0, 0.0), *((float(a), float(b)) for a, b in zip(alarms, misses, strict=True)))


def _check_size(protocol: Protocol, count: int, rounds: int) -> None:
    if protocol.sigma is not None:
        raise ParameterError("The Gaussian protocol sends floats and is a baseline; only Binomial ones are audited.")
    if protocol.dim > _MAX_DIM:
        raise ParameterError(
            f"Expected at most {_MAX_DIM} coordinates to audit, got {protocol.dim}; audit the same protocol with fewer."
        )
    if rounds * protocol.dim > _MAX_NUMBERS:
        raise ParameterError(f"Expected rounds times dim <= {_MAX_NUMBERS}, got {rounds} times {protocol.dim}.")
    reach = 0.5 * count * protocol.levels + 8.0 * math.sqrt(count * protocol.trials * protocol.p * (1.0 - protocol.p))
    if reach > _MAX_SUM:
        raise ParameterError(
            "The sums are too large to be told apart in a released mean of float32; audit fewer surviving messages."
        )
