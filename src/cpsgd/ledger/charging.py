"""The cost of rounds of different kinds together. docs/proofs/composition.md has the proofs.

Fix one client (or example) of the population. It contributes to a sequence of rounds, each of them μ-GDP but for its
tails:

* Every round that is not in a partition is one of the sequence, sampled or not.
* Of a partition (rounds with disjoint cohorts) the client is in at most one round. So the partition counts as one round
  with the largest μ and the largest tail of its rounds.
* Where noise is correlated over the rounds of a run, each of them has the μ and the tail of the whole run. A run is a
  partition, whoever is in its rounds; rounds without one are a run each.

Rounds of one protocol and one participation are one `Run`. Otherwise one accountant composes the
equivalent Gaussians (`accountant.mixed_epsilon`). Where a round has no Gaussian certificate, or a poor one among few
rounds, basic composition is left: each kind of round has its ε and its share of δ, and these add up.
"""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

from cpsgd import _plain
from cpsgd.errors import ConditionError
from cpsgd.ledger.entries import Budget, RoundEvent, Unit
from cpsgd.ledger.kinds import Account, EntryKind, Groups, Room, kind_of, merged, octave_of, weaker_unit
from cpsgd.neighbours import Adjacency
from cpsgd.privacy.accountant import LARGEST_EPSILON, Part, Rounds, costliest, mixed_epsilon, pure_epsilon
from cpsgd.privacy.filters import GAUSSIAN_CITATION, READING_DELTAS, RENYI_CITATION, Cost, Filter, largest, summed
from cpsgd.privacy.guarantees import guarantee
from cpsgd.privacy.proofs import composition_citation, joint_cost, joint_suffices, round_cost
from cpsgd.privacy.proofs.argument import SAMPLED_TAIL_SHARE, TAIL_SHARES
from cpsgd.promise import Claim, Sense

BASIC = "basic composition"
_BASIC_CITATION = (
    "basic composition, ε and δ added over kinds of rounds: Dwork and Roth, "
    '"The Algorithmic Foundations of Differential Privacy", 2014, Theorem 3.16 and Appendix B'
)
_FEW = 8
# For every this many rounds, a charge may count one more; see `affordable`.
_PLENTY = 128
# The share of δ for the tails of rounds that are smoothed together; more of it would gain next to nothing.
_JOINT_SHARE = 0.003


@dataclass(frozen=True)
class Total:
    """The proved cost of all rounds charged to a population, with those that were reserved and never released.

    Attributes:
        population: Population whose budget pays.
        claim: The proved (ε, δ), ε rounded up and everything included in δ, and its sense. Of an adaptive budget it is
            the odometer's reading, "ex post", at three times the budget's δ.
        adjacency: Which data sets are neighbours.
        unit: Data in which neighbours differ: that of the budget, or "row" where statistics per row were paid.
        limit: ε that may be spent.
        limit_delta: δ of that limit. All rounds together are always (limit, limit_delta)-private.
        method: Name of the method that proved it; "nothing spent" before the first round.
        citation: The theorem behind it.
        tail: The part of δ that pays for outputs far out in the noise's tails, and for other rare events.
        rounds: Number of rounds.
        unreleased: Number of rounds that were reserved and not (yet) released.
        assumptions: What it takes on trust about vectors (`Protocol.assumption`), each once.
    """

    population: str
    claim: Claim
    adjacency: Adjacency
    unit: Unit | Literal["row"]
    limit: float
    limit_delta: float
    method: str
    citation: str
    tail: float
    rounds: int
    unreleased: int
    assumptions: tuple[str, ...]

    @property
    def epsilon(self) -> float:
        """ε, rounded up."""
        return self.claim.epsilon

    @property
    def delta(self) -> float:
        """δ in total, everything included."""
        return self.claim.delta

    @property
    def left(self) -> float:
        """ε between what is spent and the limit. The cost of a further round is not its own ε: see `Ledger.quote`."""
        return max(0.0, self.limit - self.epsilon)

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {**_plain.to_dict(self.claim), **_plain.to_dict(self, "left", without=["claim"])}


def spent(budget: Budget, accounts: Sequence[Account]) -> Total:
    """Returns the cost of all rounds of these accounts, for a member whose data is in all of them."""
    now = _groups(accounts)
    if budget.filter is not None:
        return _total(budget, accounts, _cheapest([now], budget))
    # Bounds are not monotone in the number of messages, and rounds of more sizes are harder to compose. But noise need
    # not be counted: the proof of the last reservation holds whatever was released since. So no release brings the
    # total over the limit.
    tallies = [account.at_the_last_reservation() for account in accounts]
    allowed = merged(tally.groups() for tally in tallies)
    found = _cheapest([now, allowed], budget)
    room = accounts[0].room
    if found.epsilon > budget.epsilon and room is not None and len(accounts) == 1:
        # Nor are bounds quite monotone in the number of rounds, and it was allowed together with more of them.
        found = _cheapest([allowed, tallies[0].groups([("", room.kind, room.rounds)])], budget)
    return _total(budget, accounts, found)


def over_periods(budget: Budget, accounts: Sequence[Account]) -> Total:
    """Returns the cost of the rounds of all periods for somebody who is in all of them.

    Where rounds are chosen by results and the budget's filter does not allow all of them, a filter made afterwards
    proves nothing. Then ε and δ of the periods that have rounds are added up.
    """
    limits = budget.filter
    if limits is None:
        return spent(budget, accounts)
    if _filter_sum(budget, limits, _groups(accounts)).within(limits.limit):
        return spent(budget, accounts)
    periods = sum(account.rounds > 0 for account in accounts)
    found = _total(budget, accounts, _Proof(periods * budget.epsilon, BASIC, _BASIC_CITATION, 0.0, "filter"))
    return replace(found, claim=replace(found.claim, delta=periods * budget.delta))


def priced(
    budget: Budget, accounts: Sequence[Account], further: Sequence[RoundEvent], reserved: int | None = None
) -> Total:
    """Returns the cost of the rounds of these accounts together with further ones of the first account.

    Args:
        budget: The budget that pays.
        accounts: The accounts that count towards it.
        further: The further rounds.
        reserved: Number of rounds before these, for a filter (`State.reserved`); by default that of the accounts.
    """
    before = sum(account.reserved for account in accounts) if reserved is None else reserved
    octaves = [None if budget.filter is None else octave_of(before + place) for place in range(len(further))]
    kinds = [kind_of(event, event.survivors, octave) for event, octave in zip(further, octaves, strict=True)]
    groups = _groups(accounts, [(event.partition, kind, 1) for event, kind in zip(further, kinds, strict=True)])
    return _total(budget, accounts, _cheapest([groups], budget), kinds)


def affordable(
    budget: Budget, accounts: Sequence[Account], event: RoundEvent, reserved: int | None = None
) -> Room | None:
    """Returns a proof about one more round of the first account; None where that costs more than the budget.

    A proof about more rounds is one about these. So beyond 128 rounds a few more of the same kind are counted, 1 % at
    most, where the budget allows it, and there is nothing to prove for the next ones. A filter needs none of this: it
    adds up.
    """
    first, *others = accounts
    kind, room = kind_of(event, event.survivors), first.room
    if budget.filter is not None:
        found = priced(budget, accounts, [event], reserved)
        return Room(kind, 0, found.epsilon, found.method) if found.epsilon <= budget.epsilon else None
    # Records of 0.2.0 prove too little about sampled rounds with colluding clients; nothing rests on those.
    alone = not event.partition and not others and not (event.colluding and event.taking_part.sampled)
    if room is not None and alone and room.kind is kind and room.rounds and room.epsilon <= budget.epsilon:
        return replace(room, rounds=room.rounds - 1)
    more = most_covered(first.rounds) if alone else 0
    while True:
        try:
            proof = _cheapest([_groups(accounts, [(event.partition, kind, 1 + more)])], budget)
        except ConditionError:
            if not more:
                raise
        else:
            if proof.epsilon <= budget.epsilon:
                return Room(kind, more, proof.epsilon, proof.method)
            if not more:
                return None
        more //= 8


def _groups(accounts: Sequence[Account], further: Sequence[tuple[str, EntryKind, int]] = ()) -> Groups:
    """Returns the rounds of all accounts in groups, with further rounds added to the first account."""
    first, *others = accounts
    return merged([first.tally.groups(further), *(account.tally.groups() for account in others)])


def most_covered(before: int) -> int:
    """Returns the number of further rounds that one proof may cover, for a round after `before` others."""
    return (before + 1) // _PLENTY


def _total(budget: Budget, accounts: Sequence[Account], found: _Proof, further: Sequence[EntryKind] = ()) -> Total:
    """Wraps a proof as the `Total` of a budget."""
    kinds = {kind for account in accounts for kind in account.tally.kinds()} | set(further)
    return Total(
        population=budget.population,
        claim=_claim(budget, found),
        adjacency=budget.adjacency,
        unit="row" if weaker_unit(accounts) == "row" else budget.unit,
        limit=budget.epsilon,
        limit_delta=budget.delta,
        method=found.method,
        citation=found.citation,
        tail=found.tail,
        rounds=sum(account.rounds for account in accounts) + len(further),
        unreleased=sum(account.unreleased for account in accounts),
        assumptions=_assumptions(kinds, budget.adjacency),
    )


def _claim(budget: Budget, found: _Proof) -> Claim:
    """Returns the proved claim. A reading below the budget's own ε holds ex post, at a larger δ."""
    if found.sense != "ex post":
        return Claim(found.epsilon, budget.delta, found.sense)
    if (delta := READING_DELTAS * budget.delta) >= 1.0:
        return Claim(budget.epsilon, budget.delta, "filter")
    return Claim(found.epsilon, delta, found.sense)


def _assumptions(kinds: Iterable[EntryKind], adjacency: Adjacency) -> tuple[str, ...]:
    """Returns the assumptions that the accounting trusts; none for single examples."""
    stated = {kind.base.assumption(adjacency) for kind in kinds if kind.examples is None}
    return tuple(sorted(text for text in stated if text is not None))


def _cheapest(ways: Sequence[Groups], budget: Budget) -> _Proof:
    """Returns the best proof over several descriptions of the same rounds."""
    if budget.filter is not None:
        return _filtered(budget, budget.filter, ways[0])
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


# ------------------------------------------------------------------ proofs


@dataclass(frozen=True)
class _Proof:
    epsilon: float
    method: str
    citation: str
    tail: float
    sense: Sense = "fixed in advance"


def _filtered(budget: Budget, limits: Filter, groups: Groups) -> _Proof:
    """Returns the odometer's reading; if the rounds exceed the filter, the ε of a filter that allows them."""
    if not groups:
        return _Proof(0.0, "nothing spent", "nothing was released", 0.0, "filter")
    cost = _filter_sum(budget, limits, groups)
    method = "gaussian-filter" if limits.order is None else "renyi-filter"
    citation = GAUSSIAN_CITATION if limits.order is None else RENYI_CITATION
    tail = cost.tail + cost.variation * (1.0 + math.exp(limits.epsilon))
    if cost.within(limits.limit):
        reading = limits.reading(cost)
        return _Proof(reading, method, citation, tail, "ex post" if reading < limits.epsilon else "filter")
    if math.isinf(needed := limits.enough(cost)):
        raise ConditionError(
            f"Tails (δ={cost.tail:.2g} of {limits.limit.tail:.2g}), samplers and windows (variation "
            f"{cost.variation:.2g} of {limits.limit.variation:.2g}) or rounding (Λ={cost.slack:.2g} of "
            f"{limits.limit.slack:.2g}) would take more than an adaptive budget has for them; plan the rounds for a "
            "smaller delta or more bits."
        )
    return _Proof(max(needed, math.nextafter(limits.epsilon, math.inf)), method, citation, tail, "filter")


def _filter_sum(budget: Budget, limits: Filter, groups: Groups) -> Cost:
    """Returns the total cost of these rounds in a filter."""
    each = [(largest(_filter_cost(kind, limits, budget.adjacency) for kind in kinds), count) for kinds, count in groups]
    return summed(each)


@lru_cache(maxsize=1 << 16)
def _filter_cost(kind: EntryKind, limits: Filter, adjacency: Adjacency) -> Cost:
    """Returns the cost of a round in a filter, which is never more than was reserved for it."""
    if kind.octave is None:
        raise ConditionError("The round was not charged to an adaptive budget.")
    reserved = kind.at_least
    if reserved is not kind:
        least = _filter_cost(reserved, limits, adjacency)
        with contextlib.suppress(ConditionError):
            found = _single_cost(kind, limits, adjacency)
            return found if found.within(least) else least
        return least
    return _single_cost(kind, limits, adjacency)


def _single_cost(kind: EntryKind, limits: Filter, adjacency: Adjacency) -> Cost:
    """Returns the cost of one round by the better of its two certificates."""
    assert kind.octave is not None
    target = limits.tail(kind.octave)
    best = _joint_cost(kind, 1, target, adjacency) if kind.participation.rate == 1.0 else None
    try:
        rounds = _cost(kind, target, adjacency)
        best = rounds if best is None or rounds.mu <= best.mu else best
    except ConditionError:
        if best is None:
            raise
    return limits.cost(best, kind.participation, kind.overflow)


@lru_cache(maxsize=256)
def _composed(groups: Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """Returns the ε of all rounds, after paying for cohorts that overflow out of δ."""
    if not groups:
        return _Proof(0.0, "nothing spent", "nothing was released", 0.0)
    overflow = math.fsum(count * max(kind.overflow for kind in kinds) for kinds, count in groups) * (1.0 + 1e-12)
    left = (delta - overflow) * (1.0 - 1e-15) if overflow else delta
    if overflow and left <= 0.0:
        raise ConditionError(f"The rounds' chances of drawing too many clients alone spend δ={delta:g}.")
    found = _proved(groups, left, adjacency)
    if not found.epsilon < LARGEST_EPSILON:
        raise ConditionError(f"Their ε would be over {LARGEST_EPSILON:g}; run fewer rounds or add noise.")
    return replace(found, tail=found.tail + overflow)


def _proved(groups: Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """Returns the smallest ε over several ways of composing the rounds."""
    if (len(groups) == 1 or _alike(groups)) and not _several_runs(groups):
        with contextlib.suppress(ConditionError):
            return _of_one_kind(groups, delta, adjacency)
    try:
        found = _of_gaussians(groups, delta, adjacency)
    except ConditionError:
        # At least one round has no Gaussian certificate at its share of δ.
        return _added_up(groups, delta, adjacency)
    many = sum(count for _, count in groups) > _FEW
    if _sampled(groups) or (many and math.isfinite(found.epsilon)):
        return found
    # Of a few rounds, one may be so much better by the Rényi certificate that adding up is worth it. And windows may
    # take a share of δ that is small enough for each ε by itself, and too large for the ε of all.
    with contextlib.suppress(ConditionError):
        found = min(found, _added_up(groups, delta, adjacency), key=lambda proof: proof.epsilon)
    return found


def _alike(groups: Groups) -> bool:
    """Returns whether the rounds differ only in their numbers of messages."""
    alike = len({(kind.protocol, kind.participation) for kinds, _ in groups for kind in kinds}) == 1
    return alike and all(len(kinds) == 1 for kinds, _ in groups)


def _whole_run(kinds: frozenset[EntryKind]) -> bool:
    return any(kind.base.mechanism.memory.one_event for kind in kinds)


def _several_runs(groups: Groups) -> bool:
    """Returns whether there are several runs with correlated noise, each of which counts as one event."""
    return sum(count for _, count in groups) > 1 and any(_whole_run(kinds) for kinds, _ in groups)


def _ordered(groups: Groups) -> list[tuple[frozenset[EntryKind], int]]:
    """Returns the groups in an order that is the same in every process.

    Roundings are then the same, too, and others can verify what one process reserved.
    """
    return sorted(groups, key=lambda group: (sorted(kind.order for kind in group[0]), group[1]))


def _sampled(groups: Groups) -> bool:
    return any(kind.participation.rate < 1.0 for kinds, _ in groups for kind in kinds)


def _of_one_kind(groups: Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """Returns the guarantee of a single run; for one set with several kinds, that of the costliest kind."""
    ((kinds, count), *_) = groups
    if len(groups) == 1 and len(kinds) > 1:
        if count > 1:
            raise ConditionError("There are several partitions of several kinds each.")
        proofs = [_of_one_kind(frozenset([(frozenset([kind]), 1)]), delta, adjacency) for kind in kinds]
        return max(proofs, key=lambda proof: proof.epsilon)
    sizes: Counter[int] = Counter()
    for kinds, count in _ordered(groups):
        (kind,) = kinds
        sizes[kind.honest] += count
    found = guarantee(kind.run(adjacency, sizes), delta)
    return _Proof(found.epsilon, found.method, found.citation, found.tail)


def _of_gaussians(groups: Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """Composes all rounds as equivalent Gaussians, for the best of a few shares of δ for the tails."""
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
    if math.isfinite(epsilon) and epsilon == pure_epsilon(parts):
        pure = {guarantee(kind.run(adjacency), 0.0).citation for kinds, _ in groups for kind in kinds}
        return _Proof(epsilon, BASIC, "; ".join([_BASIC_CITATION, *sorted(pure)]), 0.0)
    tail = math.fsum(r.count * (r.tail_mass + r.variation * (1.0 + math.exp(epsilon))) for r, _ in parts)
    return _Proof(epsilon, "gaussian composition", composition_citation({p.scheme for _, p in parts}), tail)


def _part(kinds: frozenset[EntryKind], count: int, delta: float, share: float, adjacency: Adjacency) -> Part:
    """Returns `count` rounds with the largest μ and the largest tails of these kinds. `delta` is that of one round."""
    (participation,) = {kind.participation for kind in kinds}
    joint: Rounds | None = None
    if len(kinds) == 1 and participation.rate == 1.0:
        # Repetitions of one kind are smoothed together; of several kinds, a client may meet each once.
        (kind,) = kinds
        joint = _joint_cost(kind, count, _JOINT_SHARE * delta, adjacency)
        if joint is not None and joint_suffices(kind.run(adjacency)):
            return joint, participation
    costs = [_cost(kind, share * delta, adjacency) for kind in kinds]
    if joint is not None and joint.mu < costs[0].mu:
        return joint, participation
    return costliest(costs, count), participation


@lru_cache(maxsize=4096)
def _cost(kind: EntryKind, tail: float, adjacency: Adjacency) -> Rounds:
    return round_cost(kind.run(adjacency), tail)


@lru_cache(maxsize=4096)
def _joint_cost(kind: EntryKind, count: int, tail: float, adjacency: Adjacency) -> Rounds | None:
    try:
        return joint_cost(kind.run(adjacency, rounds=count), tail)
    except ConditionError:
        return None


def _added_up(groups: Groups, delta: float, adjacency: Adjacency) -> _Proof:
    """Adds up ε and δ of each kind of round, and of each partition that has several kinds."""
    # A client may meet one kind in one partition and another in the next, so these are not repetitions of each other.
    # Nor are runs that are one event each rounds of one run.
    single = {kinds for kinds, _ in groups if len(kinds) > 1 or _whole_run(kinds)}
    terms = [(kinds, count) for kinds, count in groups if kinds not in single]
    terms += [(kinds, 1) for kinds, count in groups if kinds in single for _ in range(count)]
    share = delta / len(terms) * (1.0 - 1e-12)
    proofs = [_of_one_kind(frozenset([term]), share, adjacency) for term in terms]
    citations = list(dict.fromkeys(proof.citation for proof in proofs))
    return _Proof(
        math.fsum(proof.epsilon for proof in proofs) * (1.0 + 1e-15),
        BASIC,
        "; ".join([_BASIC_CITATION, *citations]),
        math.fsum(proof.tail for proof in proofs),
    )
