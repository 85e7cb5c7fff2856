"""An audit of several protocols, round numbers, dimensions and SIMD levels.

Each protocol is attacked at this process's SIMD level (`audit`). At every level, the law of its sums is checked in
several rounds, even and odd, with vectors that show what an attack does not: all clients too long, all a little above a
level. Levels are chosen when the kernels are imported, so the others run in processes of their own. From the same
keystream all levels must make the same integers.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cpsgd import _plain, _validate
from cpsgd.aggregator import Aggregator
from cpsgd.audit import checks, exact_checks, levels
from cpsgd.audit.auditing import FALSE_ALARM, AuditReport, audit, check_size
from cpsgd.audit.cases import Case
from cpsgd.audit.checks import Check, Played
from cpsgd.audit.playing import Encode, Player, RoundLattice, Start, rounded, too_long
from cpsgd.codec import pipeline
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol
from cpsgd.randomness import Keystream

Made = Callable[[Protocol], tuple[Encode, Start]]
"""The code under audit for a protocol: the client's half and the server's."""

# Fractions of a level at which rounding is checked: no two or three random bits have their odds.
_FRACTIONS = (0.11, 0.36)
# The checks of the law that chance can fail.
_RANDOM_CHECKS = 6
# Rounds of the law's checks, over those of the attack.
LAW_SHARE = 0.5


@dataclass(frozen=True)
class Coverage:
    """The checks of one protocol at one SIMD level.

    Attributes:
        case: The protocol.
        level: The SIMD level.
        rounds: Number of rounds played.
        numbers: The numbers of these rounds.
        checks: The checks, the attack's first.
        digest: Digest of the integers that a fixed keystream makes.
        report: The attack's own report; None where there is no claim to attack, and at other levels.
    """

    case: Case
    level: str
    rounds: int
    numbers: tuple[int, ...]
    checks: tuple[Check, ...]
    digest: str
    report: AuditReport | None = None

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return all(check.passed for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        mechanism = self.case.protocol.mechanism
        return {
            "protocol": self.case.name,
            "mechanism": mechanism.name,
            "parameters": mechanism.describe(),
            "dim": self.case.protocol.dim,
            "modulus": self.case.protocol.modulus,
            "level": self.level,
            "rounds": self.rounds,
            "round_numbers": list(self.numbers),
            "passed": self.passed,
            "claimed": None if self.report is None else self.report.claimed.epsilon,
            "found": None if self.report is None else self.report.lower_bound,
            "checks": _plain.plain(self.checks),
        }


@dataclass(frozen=True)
class Survey:
    """The result of a survey.

    Attributes:
        covered: Every protocol at every level.
        agreement: Check that all levels make the same integers.
        false_alarm: Probability that honest code fails any check.
    """

    covered: tuple[Coverage, ...]
    agreement: Check
    false_alarm: float

    @property
    def passed(self) -> bool:
        """Whether all checks passed."""
        return self.agreement.passed and all(each.passed for each in self.covered)

    @property
    def levels(self) -> tuple[str, ...]:
        """The SIMD levels, this process's first."""
        return tuple(dict.fromkeys(each.level for each in self.covered))

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {
            "passed": self.passed,
            "false_alarm": self.false_alarm,
            "levels": list(self.levels),
            "levels_agree": self.agreement.passed,
            "covered": _plain.plain(self.covered),
        }


def survey(
    cases: Sequence[Case],
    delta: float,
    *,
    rounds: int,
    adjacency: Adjacency | str = Adjacency.REPLACE_ONE,
    surviving: int | None = None,
    made: Made | None = None,
    seed: int | None = None,
    progress: Callable[[int], None] | None = None,
) -> Survey:
    """Audits protocols at every SIMD level there is; honest code fails with probability at most `FALSE_ALARM` in all.

    Args:
        cases: The protocols.
        delta: δ of the claims.
        rounds: Rounds of each attack; the checks of the law play half as many, at each level.
        adjacency: Which data sets are neighbours.
        surviving: Messages of a round; all of a protocol's if None.
        made: The code under audit; the product's if None. Other code is audited at this process's level alone.
        seed: Makes the auditor's own choices repeatable, not the noise.
        progress: Called with 1 for every protocol that is done at a level.

    Example:
        >>> from cpsgd.audit.cases import all_cases
        >>> found = survey(all_cases()[3:4], 1e-3, rounds=1_000, made=lambda protocol: (protocol.encode, Aggregator))
        >>> found.passed, found.covered[0].numbers[:2]
        (True, (0, 1))
    """
    for case in cases:
        count = case.protocol.clients if surviving is None else _validate.integer("surviving", surviving, low=1)
        check_size(case.protocol, count, _validate.integer("rounds", rounds, low=1))
    others = levels.others() if made is None else ()
    share = FALSE_ALARM / (len(cases) * (1 + len(others)))
    advance = progress or (lambda done: None)
    law_rounds = int(LAW_SHARE * rounds)
    with levels.started(others, cases, rounds=law_rounds, surviving=surviving, share=share) as running:
        covered = []
        for case in cases:
            covered.append(_attacked(case, delta, adjacency, rounds, law_rounds, surviving, share, made, seed))
            advance(1)
        for level in others:
            for case, found in zip(cases, running(level), strict=True):
                asked = tuple(Check(**check) for check in found["checks"])
                covered.append(Coverage(case, level, found["rounds"], case.rounds, asked, found["digest"]))
                advance(1)
    digests = {case: {each.digest for each in covered if each.case is case} for case in cases}
    differ = sum(len(found) > 1 for found in digests.values())
    agreement = Check("levels", "protocols whose integers differ from one SIMD level to another", float(differ), 0.0)
    return Survey(tuple(covered), agreement, FALSE_ALARM)


def _attacked(
    case: Case,
    delta: float,
    adjacency: Adjacency | str,
    rounds: int,
    law_rounds: int,
    surviving: int | None,
    share: float,
    made: Made | None,
    seed: int | None,
) -> Coverage:
    """Attacks a protocol if it has a claim, and checks the law of its sums."""
    protocol = replace(case.protocol, promise=None)
    law = law_checked(case, rounds=law_rounds, surviving=surviving, share=0.5 * share, made=made, seed=seed)
    if not case.claimed:
        return law
    encode, start = (None, Aggregator) if made is None else made(protocol)
    report = audit(
        protocol,
        delta,
        adjacency=adjacency,
        rounds=rounds,
        surviving=surviving,
        round=case.rounds[0],
        encode=encode,
        start=start,
        seed=seed,
        false_alarm=0.5 * share,
    )
    claim = exact_checks.claim(protocol, report.claims, Adjacency.parse(adjacency), report.surviving)
    asked = (*report.checks, claim, *law.checks)
    return replace(law, rounds=law.rounds + report.rounds, checks=asked, report=report)


def law_checked(
    case: Case,
    *,
    rounds: int,
    surviving: int | None,
    share: float,
    made: Made | None = None,
    seed: int | None = None,
) -> Coverage:
    """Checks the law of the sums in all of a case's rounds, with vectors that an attack does not play.

    Honest code fails with probability at most `share`.
    """
    protocol = replace(case.protocol, promise=None)
    count = protocol.clients if surviving is None else surviving
    encode, start = (protocol.encode, Aggregator) if made is None else made(protocol)
    batches: list[Played] = []
    generator = np.random.default_rng(seed)
    for number in case.rounds:
        player = Player(protocol, number, encode, start, seed, None)
        vectors = [("all too long", too_long(player.lattice), count)]
        vectors += [(f"{part} above a level", rounded(player.lattice, part), count) for part in _FRACTIONS]
        vectors.append(("one message", rounded(player.lattice, _FRACTIONS[0]), 1))
        each = max(1, rounds // (len(case.rounds) * len(vectors)))
        batches += [player.play(f"{name}, round {number}", [(vector, n)], each) for name, vector, n in vectors]
    uniforms = [batch.law.uniform(batch.sums, generator) for batch in batches]
    part = share / _RANDOM_CHECKS
    asked = (
        *checks.of_law(batches, uniforms, part),
        exact_checks.variance(batches, part),
        exact_checks.wraparound(protocol, case.rounds, (1, count)),
    )
    named = tuple(replace(check, name=f"{check.name} in several rounds") for check in asked)
    played = sum(len(batch.exact) for batch in batches)
    return Coverage(case, levels.current(), played, case.rounds, named, digest_of(case))


def digest_of(case: Case) -> str:
    """Returns a hash of the integers that a fixed keystream makes of fixed vectors: the same at every SIMD level."""
    protocol, found = replace(case.protocol, promise=None), hashlib.sha256()
    for number in case.rounds:
        lattice = RoundLattice(protocol, number)
        for vector in (too_long(lattice), rounded(lattice, _FRACTIONS[0]), np.zeros(protocol.dim)):
            keystream = Keystream(number.to_bytes(16, "little"))
            found.update(pipeline.integers(protocol, vector, number, keystream).tobytes())
    return found.hexdigest()
