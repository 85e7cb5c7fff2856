"""What rounds of different kinds cost together. docs/accounting.md, section 9, has the proofs.

Fix one client (or example) of the population. What it contributes to is a sequence of rounds, each of them μ-GDP but
for its tails:

* Every round that is not in a partition is one of the sequence, sampled or not.
* Of a partition (rounds with disjoint cohorts) the client is in at most one round, so the partition counts as one round
  with the largest μ and the largest tail of its rounds.

Rounds of one protocol and one participation go to `guarantee_over_rounds`. Otherwise one accountant composes the
equivalent Gaussians (`accountant.mixed_epsilon`). Where a round has no Gaussian certificate, or a poor one among few
rounds, basic composition is left: kinds of rounds have their ε and their share of δ each, and these add up.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from cpsgd.adjacency import Adjacency
from cpsgd.errors import ConditionError
from cpsgd.ledger.events import Budget, Entry, RoundEvent, Unit
from cpsgd.mechanisms.law import Steps
from cpsgd.participation import Participation
from cpsgd.privacy.accountant import LARGEST_EPSILON, Part, Rounds, mixed_epsilon
from cpsgd.privacy.examples import example_protocol
from cpsgd.privacy.rounds import (
    SAMPLED_TAIL_SHARE,
    TAIL_SHARES,
    composition_citation,
    guarantee_over_rounds,
    joint_cost,
    round_cost,
)
from cpsgd.protocol import Protocol

BASIC = "basic composition"
_BASIC_CITATION = (
    "basic composition, ε and δ added over kinds of rounds: Dwork and Roth, "
    '"The Algorithmic Foundations of Differential Privacy", 2014, Theorem 3.16 and Appendix B'
)
_EVERY = Participation.every()
_FEW = 8
# The share of δ for the tails of rounds that are smoothed together; more of it would gain next to nothing.
_JOINT_SHARE = 0.003


@dataclass(frozen=True)
class Total:
    """What is proved about all rounds charged to a population, those included that were reserved and never released.

    Attributes:
        population: Whose budget.
        epsilon: ε, rounded up.
        delta: δ in total, everything included.
        adjacency: Which data sets are neighbours.
        unit: What neighbours differ in.
        limit: ε that may be spent.
        method: Name of the method that proved it; "nothing spent" before the first round.
        citation: The theorem behind it.
        tail: The part of δ that pays for outputs far out in the noise's tails, and for other rare events.
        rounds: How many rounds.
        unreleased: How many of them were reserved and not (yet) released.
        assumptions: What it takes on trust about vectors (`Protocol.assumption`), each once.
    """

    population: str
    epsilon: float
    delta: float
    adjacency: Adjacency
    unit: Unit
    limit: float
    method: str
    citation: str
    tail: float
    rounds: int
    unreleased: int
    assumptions: tuple[str, ...]

    @property
    def left(self) -> float:
        """ε between what is spent and the limit. What a further round costs is not its own ε: see `Ledger.quote`."""
        return max(0.0, self.limit - self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {**vars(self), "left": self.left}


def total(budget: Budget, entries: Sequence[Entry], further: Sequence[RoundEvent] = ()) -> Total:
    """What the entries cost, together with further rounds that are not on record.

    Raises:
        ConditionError: Nothing is proved about them.
    """
    rounds = [(entry.event, entry.survivors) for entry in entries]
    rounds += [(event, event.survivors) for event in further]
    ways = [_groups(rounds)]
    if entries and not further:
        # Bounds are not monotone in the number of messages, and rounds of more sizes are harder to compose. But noise
        # may be left out of account: what the last reservation was allowed for holds whatever was released since, so no
        # release brings the total over the limit.
        ways.append(_groups((entry.event, _survivors(entry, before=entries[-1].number)) for entry in entries))
    found = _cheapest(ways, budget)
    return Total(
        **{**vars(budget), **vars(found)},
        limit=budget.epsilon,
        rounds=len(rounds),
        unreleased=sum(not entry.released for entry in entries),
        assumptions=_assumptions((event for event, _ in rounds), budget.adjacency),
    )


def _assumptions(events: Iterable[RoundEvent], adjacency: Adjacency) -> tuple[str, ...]:
    """What the accounting takes on trust; that of single examples rests on no distance of whole sums."""
    stated = {event.protocol.assumption(adjacency) for event in events if event.examples is None}
    return tuple(sorted(text for text in stated if text is not None))


def _survivors(entry: Entry, *, before: int) -> int:
    """Messages it was accounted with when the record of this number was made."""
    later = entry.released_as is not None and entry.released_as > before
    return entry.event.survivors if later else entry.survivors


def _cheapest(ways: Sequence[_Groups], budget: Budget) -> _Proof:
    """The best proof about any of these, each of which describes all rounds."""
    found: list[_Proof] = []
    failures: list[ConditionError] = []
    for groups in dict.fromkeys(ways):
        try:
            found.append(_composed(groups, budget.delta, budget.adjacency))
        except ConditionError as error:
            failures.append(error)
    if not found:
        raise failures[0]
    return min(found, key=lambda proof: proof.epsilon)


# ------------------------------------------------------------------ rounds sorted by kind


@dataclass(frozen=True)
class _Kind:
    """All that the cost of a round depends on."""

    protocol: Protocol
    honest: int
    participation: Participation
    overflow: float


_Groups = frozenset[tuple[frozenset[_Kind], int]]
"""Sets of kinds of which a client meets at most one, and how many such sets there are."""


def _groups(rounds: Iterable[tuple[RoundEvent, int]]) -> _Groups:
    single: Counter[_Kind] = Counter()
    partitions: dict[str, set[_Kind]] = {}
    for event, survivors in rounds:
        kind = _kind(event, survivors)
        if event.partition:
            partitions.setdefault(event.partition, set()).add(kind)
        else:
            single[kind] += 1
    groups: Counter[frozenset[_Kind]] = Counter({frozenset([kind]): count for kind, count in single.items()})
    groups.update(_worst(kinds) for kinds in partitions.values())
    return frozenset(groups.items())


def _worst(kinds: set[_Kind]) -> frozenset[_Kind]:
    """Of the kinds that differ in the number of messages only, the one with the fewest."""
    fewest: dict[_Kind, int] = {}
    for kind in kinds:
        rest = replace(kind, honest=1)
        fewest[rest] = min(fewest.get(rest, kind.honest), kind.honest)
    return frozenset(replace(rest, honest=honest) for rest, honest in fewest.items())


def _kind(event: RoundEvent, survivors: int) -> _Kind:
    honest = survivors - event.colluding
    taking_part = event.taking_part
    sampled = taking_part.sampled and taking_part.rate < 1.0
    # Each size is a certificate of its own, and with sampling a distribution, too. So sizes keep a few binary digits,
    # rounded down; but not below what was reserved, or a release could raise the total.
    step = 1 << max(0, honest.bit_length() - (6 if sampled else 10))
    honest = max(honest // step * step, event.survivors - event.colluding)
    protocol = _accounted(event.protocol, event.examples)
    return _Kind(protocol, honest, taking_part if sampled else _EVERY, event.overflow)


@lru_cache(maxsize=256)
def _accounted(protocol: Protocol, examples: int | None) -> Protocol:
    """The protocol the accounting is about."""
    if examples is not None:
        protocol = example_protocol(protocol, examples)
    # Privacy depends on neither the rotation's seed nor a modulus (sums modulo something are post-processing).
    return replace(protocol, rotation_seed=0, modulus=None, promise=None)


# ------------------------------------------------------------------ what they cost


@dataclass(frozen=True)
class _Proof:
    epsilon: float
    method: str
    citation: str
    tail: float


@lru_cache(maxsize=256)
def _composed(groups: _Groups, delta: float, adjacency: Adjacency) -> _Proof:
    if not groups:
        return _Proof(0.0, "nothing spent", "nothing was released", 0.0)
    overflow = math.fsum(count * max(kind.overflow for kind in kinds) for kinds, count in groups) * (1.0 + 1e-12)
    left = (delta - overflow) * (1.0 - 1e-15) if overflow else delta
    if left <= 0.0:
        raise ConditionError(f"The rounds' chances of drawing too many clients alone spend δ={delta:g}.")
    found = _proved(groups, left, adjacency)
    if not found.epsilon < LARGEST_EPSILON:
        raise ConditionError("Nothing worth the name is proved about these rounds; run fewer or add noise.")
    return replace(found, tail=found.tail + overflow)


def _proved(groups: _Groups, delta: float, adjacency: Adjacency) -> _Proof:
    if len(groups) == 1 or _alike(groups):
        try:
            return _of_one_kind(groups, delta, adjacency)
        except ConditionError:
            if all(len(kinds) == 1 for kinds, _ in groups):
                raise
    try:
        found = _of_gaussians(groups, delta, adjacency)
    except ConditionError:
        # At least one round has no Gaussian certificate at its share of δ.
        return _added_up(groups, delta, adjacency)
    if sum(count for _, count in groups) > _FEW or _sampled(groups):
        return found
    # Of a few rounds, one may be so much better by the Rényi certificate that adding up is worth it.
    with contextlib.suppress(ConditionError):
        found = min(found, _added_up(groups, delta, adjacency), key=lambda proof: proof.epsilon)
    return found


def _alike(groups: _Groups) -> bool:
    """Whether all rounds differ in the number of messages only."""
    return len({(kind.protocol, kind.participation) for kinds, _ in groups for kind in kinds}) == 1 and all(
        len(kinds) == 1 for kinds, _ in groups
    )


def _ordered(groups: _Groups) -> list[tuple[frozenset[_Kind], int]]:
    """In an order that is the same in every process, so that roundings are, too: what one reserves, others verify."""
    return sorted(groups, key=lambda group: (sorted(map(_sort_key, group[0])), group[1]))


@lru_cache(maxsize=4096)
def _sort_key(kind: _Kind) -> tuple[bytes, int, str, float, float]:
    participation = kind.participation
    return kind.protocol.fingerprint, kind.honest, participation.scheme, participation.rate, kind.overflow


def _sampled(groups: _Groups) -> bool:
    return any(kind.participation.rate < 1.0 for kinds, _ in groups for kind in kinds)


def _of_one_kind(groups: _Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """`guarantee_over_rounds`, for the costliest kind where there is one set of several kinds."""
    ((kinds, count), *_) = groups
    if len(groups) == 1 and len(kinds) > 1:
        if count > 1:
            raise ConditionError("There are several partitions of several kinds each.")
        proofs = [_of_one_kind(frozenset([(frozenset([kind]), 1)]), delta, adjacency) for kind in kinds]
        return max(proofs, key=lambda proof: proof.epsilon)
    if next(iter(kinds)).protocol.mechanism.correlation is not None and sum(count for _, count in groups) > 1:
        return _of_gaussians(groups, delta, adjacency)  # each is a whole run, and not a round of one
    pairs = [(kind, count) for kinds, count in _ordered(groups) for kind in kinds]
    found = guarantee_over_rounds(
        pairs[0][0].protocol,
        delta,
        participation=pairs[0][0].participation,
        adjacency=adjacency,
        surviving=[kind.honest for kind, count in pairs for _ in range(count)],
    )
    return _Proof(found.epsilon, found.method, found.citation, found.tail)


def _of_gaussians(groups: _Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """All rounds as equivalent Gaussians in one accountant, over a few shares of δ for the tails."""
    count = sum(count for _, count in groups)
    # Certificates are kept, and asked for again with every round that is added; so their tails change rarely.
    rounded = 1 << (count - 1).bit_length()
    found: list[tuple[float, list[Part]]] = []
    failures: list[ConditionError] = []
    for share in [SAMPLED_TAIL_SHARE] if _sampled(groups) else TAIL_SHARES:
        try:
            parts = [_part(kinds, count, delta / rounded, share, adjacency) for kinds, count in _ordered(groups)]
            found.append((mixed_epsilon(parts, delta=delta), parts))
        except ConditionError as error:
            failures.append(error)
    if not found:
        raise failures[-1]
    epsilon, parts = min(found, key=lambda pair: pair[0])
    tail = math.fsum(r.count * (r.tail_mass + r.variation * (1.0 + math.exp(epsilon))) for r, _ in parts)
    return _Proof(epsilon, "gaussian composition", composition_citation({p.scheme for _, p in parts}), tail)


def _part(kinds: frozenset[_Kind], count: int, delta: float, share: float, adjacency: Adjacency) -> Part:
    """One of these kinds, `count` times: the largest μ and the largest tails of them. `delta` is that of a round."""
    (participation,) = {kind.participation for kind in kinds}
    joint: Rounds | None = None
    if len(kinds) == 1 and participation.rate == 1.0:
        # Repetitions of one kind are smoothed together; of several kinds, a client may meet each once.
        (kind,) = kinds
        joint = _joint_cost(kind, count, _JOINT_SHARE * delta, adjacency)
        if joint is not None and isinstance(kind.protocol.mechanism.law(kind.honest), Steps):
            return joint, participation
    costs = [_cost(kind, share * delta, adjacency) for kind in kinds]
    if joint is not None and joint.mu < costs[0].mu:
        return joint, participation
    worst = {name: max(getattr(cost, name) for cost in costs) for name in ("mu", "tail_mass", "variation", "slack")}
    return Rounds(count=count, **worst), participation


@lru_cache(maxsize=4096)
def _cost(kind: _Kind, tail: float, adjacency: Adjacency) -> Rounds:
    return round_cost(kind.protocol, adjacency, kind.honest, 0, 1, tail, kind.participation)


@lru_cache(maxsize=4096)
def _joint_cost(kind: _Kind, count: int, tail: float, adjacency: Adjacency) -> Rounds | None:
    try:
        return joint_cost(kind.protocol, adjacency, kind.honest, count, tail)
    except ConditionError:
        return None


def _added_up(groups: _Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """ε and δ of each kind of round, and of each partition that has several kinds, added up."""
    terms = [(kinds, count) for kinds, count in groups if len(kinds) == 1]
    # A client may meet one kind in one partition and another in the next, so these are not repetitions of each other.
    terms += [(kinds, 1) for kinds, count in groups if len(kinds) > 1 for _ in range(count)]
    share = delta / len(terms) * (1.0 - 1e-12)
    proofs = [_of_one_kind(frozenset([term]), share, adjacency) for term in terms]
    citations = list(dict.fromkeys(proof.citation for proof in proofs))
    return _Proof(
        math.fsum(proof.epsilon for proof in proofs) * (1.0 + 1e-15),
        BASIC,
        "; ".join([_BASIC_CITATION, *citations]),
        math.fsum(proof.tail for proof in proofs),
    )
