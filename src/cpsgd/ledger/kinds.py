"""Rounds sorted by kind: all that the cost of rounds depends on, kept up to date one round at a time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import accumulate
from typing import Any, Self

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.ledger.events import RoundEvent, exactly, name, read_protocol
from cpsgd.neighbours import Participation
from cpsgd.privacy.examples import example_protocol
from cpsgd.protocol import MAX_CLIENTS, Protocol

LAST_OCTAVE = 62
"""Of rounds of a ledger."""
_EVERY = Participation.every()


@dataclass(frozen=True, eq=False)
class EntryKind:
    """All that the cost of a round depends on. Made by `kind_of`, so that equal kinds are one object.

    Attributes:
        base: The protocol, without what privacy does not depend on.
        examples: As in `RoundEvent`.
        honest: Messages whose noise counts.
        participation: Who takes part; "every" wherever nobody is sampled.
        overflow: As in `RoundEvent`.
        octave: As in `Entry`.
        reserved: For adaptive budgets: the fewest such messages that were reserved for.
    """

    base: Protocol
    examples: int | None
    honest: int
    participation: Participation
    overflow: float
    octave: int | None
    reserved: int | None

    @cached_property
    def protocol(self) -> Protocol:
        """The protocol the accounting is about."""
        if self.examples is None:
            return self.base
        return replace(example_protocol(self.base, self.examples), rotation_seed=0, modulus=None, promise=None)

    @cached_property
    def order(self) -> tuple[bytes, int, str, float, float, int, int]:
        """For sorting, the same in every process."""
        octave = -1 if self.octave is None else self.octave
        who = self.participation
        return self.protocol.fingerprint, self.honest, who.scheme, who.rate, self.overflow, octave, self.reserved or 0

    @property
    def at_least(self) -> EntryKind:
        """The same round with the fewest messages that were reserved for."""
        if self.reserved is None or self.reserved == self.honest:
            return self
        return _interned(
            self.base, self.examples, self.reserved, self.participation, self.overflow, self.octave, self.reserved
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        return {
            "protocol": self.base.to_dict(),
            "examples": self.examples,
            "honest": self.honest,
            "participation": asdict(self.participation),
            "overflow": self.overflow,
            "octave": self.octave,
            "reserved": self.reserved,
        }

    @classmethod
    def from_dict(cls, data: object) -> EntryKind:
        """What `to_dict` gave; anything else is refused with `ParameterError`."""
        names = {"protocol", "examples", "honest", "participation", "overflow", "octave", "reserved"}
        if not isinstance(data, Mapping) or set(data) != names:
            raise ParameterError(f"Expected an object with the fields {sorted(names)} for a kind of round.")
        examples = data["examples"]
        if examples is not None:
            _validate.integer("examples", examples, low=1, high=MAX_CLIENTS)
        honest = _validate.integer("honest", data["honest"], low=1, high=MAX_CLIENTS)
        return _interned(
            _normal(read_protocol(data["protocol"])[0]),
            examples,
            honest,
            Participation(**exactly(Participation, data["participation"])),
            _validate.fraction("overflow", data["overflow"]),
            None if data["octave"] is None else _validate.integer("octave", data["octave"], low=0, high=LAST_OCTAVE),
            None if data["reserved"] is None else _validate.integer("reserved", data["reserved"], low=1, high=honest),
        )


Groups = frozenset[tuple[frozenset[EntryKind], int]]
"""Sets of kinds of which a client meets at most one, and how many such sets there are."""


def kind_of(event: RoundEvent, survivors: int, octave: int | None = None) -> EntryKind:
    """The kind of a round with this many messages in its sum."""
    honest = survivors - event.colluding
    taking_part = event.taking_part
    sampled = taking_part.sampled and taking_part.rate < 1.0
    # Each size is a certificate of its own, and with sampling a distribution, too. So sizes keep a few binary digits,
    # rounded down; but not below what was reserved, or a release could raise the total.
    step = 1 << max(0, honest.bit_length() - (6 if sampled else 10))
    honest = max(honest // step * step, event.survivors - event.colluding)
    participation = taking_part if sampled else _EVERY
    reserved = None if octave is None else event.survivors - event.colluding
    return _interned(_normal(event.protocol), event.examples, honest, participation, event.overflow, octave, reserved)


@lru_cache(maxsize=256)
def _normal(protocol: Protocol) -> Protocol:
    # Privacy depends on neither the rotation's seed nor a modulus (sums modulo something are post-processing).
    return replace(protocol, rotation_seed=0, modulus=None, promise=None)


# Never emptied: a kind that were made a second time would not be the first, and totals would count it apart.
@cache
def _interned(
    base: Protocol,
    examples: int | None,
    honest: int,
    participation: Participation,
    overflow: float,
    octave: int | None,
    reserved: int | None,
) -> EntryKind:
    return EntryKind(base, examples, honest, participation, overflow, octave, reserved)


def merged(parts: Iterable[Groups]) -> Groups:
    """All of several."""
    first, *others = parts
    if not others:
        return first
    found = Counter(dict(first))
    for part in others:
        found.update(dict(part))
    return frozenset(found.items())


def _worst(kinds: Iterable[EntryKind]) -> frozenset[EntryKind]:
    """Of the kinds that differ in the number of messages only, the one with the fewest."""
    fewest: dict[tuple[object, ...], EntryKind] = {}
    for kind in kinds:
        rest = (kind.base, kind.examples, kind.participation, kind.overflow, kind.octave, kind.reserved)
        if (known := fewest.get(rest)) is None or kind.honest < known.honest:
            fewest[rest] = kind
    return frozenset(fewest.values())


def _check_one_run(rounds: Mapping[EntryKind, int]) -> None:
    """Refuses a partition in which a run with correlated noise, which is one event, meets anything else.

    Nor has it more rounds than its noise is correlated over: what it costs is proved for so many.
    """
    runs = [kind.base.mechanism.correlation for kind in rounds]
    if not any(runs):
        return
    if len({(kind.base, kind.examples) for kind in rounds}) > 1:
        raise ParameterError(
            "A partition with correlated noise is one run of one protocol, and this one has rounds of another: name "
            "each run's partition after the run."
        )
    count, correlation = sum(rounds.values()), runs[0]
    if correlation is not None and count > correlation.rounds:
        raise ParameterError(
            f"A partition with correlated noise is one run, here of run_length={correlation.rounds} rounds, and this "
            f"one would have {count}: name each run's partition after the run."
        )


class Tally:
    """How many rounds of which kind. Adding a round, or taking one away, costs the same however many there are."""

    def __init__(self) -> None:
        """Without rounds."""
        self._rounds: dict[str, Counter[EntryKind]] = {}
        self._groups: Counter[frozenset[EntryKind]] = Counter()

    def add(self, kind: EntryKind, partition: str, count: int = 1) -> None:
        """Adds rounds, or takes them away where `count` is negative.

        Raises:
            ParameterError: There are not so many to take away, or the partition is a run of another protocol or of
                fewer rounds. Nothing was changed.
        """
        rounds = self._rounds.get(partition, Counter())
        if partition:
            _check_one_run(rounds + Counter({kind: count}))
        left = rounds[kind] + count
        if left < 0:
            raise ParameterError("there is no such round to take away")
        before = _worst(rounds) if partition else frozenset([kind])
        self._rounds[partition] = rounds
        if left:
            rounds[kind] = left
        else:
            del rounds[kind]
            if not rounds:
                del self._rounds[partition]
        if partition:
            self._count(before, -1 if before else 0)
            after = _worst(rounds)
            self._count(after, 1 if after else 0)
        else:
            self._count(before, count)

    def _count(self, group: frozenset[EntryKind], change: int) -> None:
        if not change:
            return
        self._groups[group] += change
        if not self._groups[group]:
            del self._groups[group]

    def groups(self, further: Iterable[tuple[str, EntryKind, int]] = ()) -> Groups:
        """The rounds in sets of which a client meets at most one, with further ones: partition, kind and how many.

        Raises:
            ParameterError: In a further one's partition a run with correlated noise meets another protocol, or has more
                rounds than it may have.
        """
        groups = self._groups.copy()
        partitions: dict[str, Counter[EntryKind]] = {}
        for partition, kind, count in further:
            if partition:
                partitions.setdefault(partition, Counter())[kind] += count
            else:
                groups[frozenset([kind])] += count
        for partition, kinds in partitions.items():
            known = self._rounds.get(partition, Counter())
            _check_one_run(known + kinds)
            if known:
                groups[_worst(known)] -= 1
            groups[_worst({*known, *kinds})] += 1
        return frozenset((group, count) for group, count in groups.items() if count)

    def copy(self) -> Tally:
        """Another with the same rounds."""
        other = Tally()
        other._rounds = {partition: rounds.copy() for partition, rounds in self._rounds.items()}
        other._groups = self._groups.copy()
        return other

    def items(self) -> list[tuple[str, EntryKind, int]]:
        """Partition, kind and how many rounds, in an order that is the same in every process."""
        found = [
            (partition, kind, count) for partition, rounds in self._rounds.items() for kind, count in rounds.items()
        ]
        return sorted(found, key=lambda item: (item[0], item[1].order, item[1].examples or 0))

    def kinds(self) -> set[EntryKind]:
        """All kinds that there are."""
        return {kind for rounds in self._rounds.values() for kind in rounds}


@dataclass(frozen=True)
class Room:
    """A proof about more rounds than there are: with so many more of a kind, ε is at most this."""

    kind: EntryKind
    rounds: int
    epsilon: float
    method: str


class Account:
    """What is known of a population's rounds.

    Attributes:
        tally: The rounds as they are accounted now.
        rounds: How many there are, without those that were given up.
        unreleased: How many of them were reserved and not (yet) released.
        reserved: How many were ever reserved.
        room: What the last reservation was allowed with; None where that was nothing more.
    """

    def __init__(self) -> None:
        """Without rounds."""
        self.tally = Tally()
        self.rounds = 0
        self.unreleased = 0
        self.reserved = 0
        self.room: Room | None = None
        # What releases since the last reservation changed, with the opposite sign.
        self._since: Counter[tuple[str, EntryKind]] = Counter()

    def reserve(self, event: RoundEvent, room: Room | None = None, octave: int | None = None) -> None:
        """One more round, and what it was allowed with."""
        self.tally.add(kind_of(event, event.survivors, octave), event.partition)
        self.room = room
        self.rounds += 1
        self.unreleased += 1
        self.reserved += 1
        self._since.clear()

    def release(self, event: RoundEvent, survivors: int, octave: int | None = None) -> None:
        """A round that was reserved has this many messages.

        Raises:
            ParameterError: There is no such round. Nothing was changed.
        """
        self._close(event, octave)
        after = kind_of(event, survivors, octave)
        self.tally.add(after, event.partition)
        self._changed(event.partition, after, -1)

    def abandon(self, event: RoundEvent, octave: int | None = None) -> None:
        """A round that was reserved is given up.

        Raises:
            ParameterError: There is no such round. Nothing was changed.
        """
        self._close(event, octave)
        self.rounds -= 1

    def _close(self, event: RoundEvent, octave: int | None) -> None:
        before = kind_of(event, event.survivors, octave)
        if self.unreleased < 1:
            raise ParameterError("there is no such round that is open")
        self.tally.add(before, event.partition, -1)
        self.unreleased -= 1
        self._changed(event.partition, before, 1)

    def _changed(self, partition: str, kind: EntryKind, change: int) -> None:
        self._since[partition, kind] += change
        if not self._since[partition, kind]:
            del self._since[partition, kind]

    def at_the_last_reservation(self) -> Tally:
        """The rounds as they were accounted when the last of them was reserved."""
        if not self._since:
            return self.tally
        tally = self.tally.copy()
        # First what is taken away: a run with correlated noise never has more rounds than it may have.
        for (partition, kind), change in sorted(self._since.items(), key=lambda item: item[1]):
            tally.add(kind, partition, change)
        return tally

    def to_dict(self, places: Mapping[EntryKind, int]) -> dict[str, Any]:
        """Plain JSON values, with kinds by their places."""
        since = sorted([partition, places[kind], change] for (partition, kind), change in self._since.items())
        room = None if self.room is None else {**vars(self.room), "kind": places[self.room.kind]}
        return {
            "room": room,
            "rounds": self.rounds,
            "unreleased": self.unreleased,
            "reserved": self.reserved,
            "tally": sorted([partition, places[kind], count] for partition, kind, count in self.tally.items()),
            "since": since,
        }

    def kinds(self) -> set[EntryKind]:
        """All kinds that `to_dict` refers to."""
        room = set() if self.room is None else {self.room.kind}
        return self.tally.kinds() | {kind for _, kind in self._since} | room

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], kinds: list[EntryKind]) -> Self:
        """What `to_dict` gave."""
        account = cls()
        account.rounds = _validate.integer("rounds", data["rounds"], low=0)
        account.unreleased = _validate.integer("unreleased", data["unreleased"], low=0, high=account.rounds)
        account.reserved = _validate.integer("reserved", data["reserved"], low=account.rounds)
        if (room := data["room"]) is not None:
            rounds, epsilon = _validate.integer("room", room["rounds"], low=0), _validate.positive("ε", room["epsilon"])
            account.room = Room(kinds[room["kind"]], rounds, epsilon, name("method", room["method"], empty=False))
        counted = 0
        for partition, place, count in data["tally"]:
            counted += _validate.integer("count", count, low=1)
            account.tally.add(kinds[place], name("partition", partition, empty=True), count)
        if counted != account.rounds:
            raise ParameterError("its rounds are not those of its kinds")
        for partition, place, change in data["since"]:
            account._changed(name("partition", partition, empty=True), kinds[place], _whole(change))
        _check_releases(account._since)
        account.at_the_last_reservation()
        return account


def _check_releases(since: Mapping[tuple[str, EntryKind], int]) -> None:
    """Refuses releases that no reservations lead to: without them there are no fewer rounds, nor more messages."""
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for (partition, kind), change in since.items():
        rest = partition, kind.base, kind.examples, kind.participation, kind.overflow, kind.octave, kind.reserved
        alike.setdefault(rest, []).append((kind.honest, change))
    for changes in alike.values():
        if any(sum_so_far < 0 for sum_so_far in accumulate(change for _, change in sorted(changes))):
            raise ParameterError("it has releases that never were")


def _whole(value: object) -> int:
    return _validate.integer("change", value, low=-(1 << 62))


def octave_of(before: int) -> int:
    """Which share of δ the tails of a round get that comes after so many others; see `Filter.tail`."""
    return (before + 1).bit_length() - 1
