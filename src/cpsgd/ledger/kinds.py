"""Rounds counted by kind. A kind is all that a round's cost depends on; counts are kept up to date round by round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from typing import Any, Self, cast

from cpsgd import _plain, _validate
from cpsgd.errors import ParameterError
from cpsgd.ledger.entries import RoundEvent, TableUnit, name, read_protocol
from cpsgd.neighbours import Adjacency, Participation, SeenSampling
from cpsgd.privacy.one_example import example_protocol, most_drawn, overflow
from cpsgd.promise import Surviving
from cpsgd.protocol import MAX_CLIENTS, Protocol
from cpsgd.run import Run

LAST_OCTAVE = 62
"""The largest `Entry.octave`."""
_EVERY = Participation.every()


@dataclass(frozen=True, eq=False)
class EntryKind:
    """All that the cost of a round depends on. Made by `kind_of`, so that equal kinds are one object.

    Attributes:
        base: The protocol, without what privacy does not depend on.
        examples: As in `RoundEvent`.
        honest: Messages whose noise counts.
        participation: Who takes part, as colluding clients know it; "every" wherever nobody is sampled.
        overflow: As in `RoundEvent`, with the chance that a client draws too many examples.
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
        """The protocol that is accounted."""
        if self.examples is None:
            return self.base
        return _normal(example_protocol(self.base, most_drawn(self.examples, self.participation)))

    @cached_property
    def order(self) -> tuple[bytes, int, str, float, float, str]:
        """A key for sorting kinds of a planned budget, the same in every process."""
        who = self.participation
        return self.protocol.fingerprint, self.honest, who.scheme, who.rate, self.overflow, repr(who)

    @cached_property
    def apart_from_size(self) -> tuple[object, ...]:
        """A key of everything but the number of messages: rounds with equal keys differ in size only."""
        return self.base, self.examples, self.participation, self.overflow, self.octave, self.reserved

    @property
    def at_least(self) -> EntryKind:
        """This kind with the message count of its reservation, the fewest that a release may have."""
        if self.reserved is None or self.reserved == self.honest:
            return self
        return _unique(replace(self, honest=self.reserved))

    def run(self, adjacency: Adjacency, surviving: Surviving | None = None, rounds: int | None = None) -> Run:
        """Returns rounds of this kind as a run; `surviving` may give them other numbers of messages."""
        sizes = self.honest if surviving is None else surviving
        return Run.of(
            self.protocol, rounds=rounds, participation=self.participation, adjacency=adjacency, surviving=sizes
        )

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {"protocol": self.base.to_dict(), **_plain.to_dict(self, without=["base"])}

    @classmethod
    def from_dict(cls, data: object) -> EntryKind:
        """Returns the kind that `to_dict` wrote; raises `ParameterError` for anything else."""
        values = _plain.named("kind of round", data, ["protocol", *(field.name for field in fields(cls)[1:])])
        known: dict[str, Any] = {"base": _normal(read_protocol(values.pop("protocol"))[0])}
        if isinstance(who := values["participation"], Mapping) and "largest" in who:
            known["participation"] = SeenSampling.from_dict(values.pop("participation"))
        kind = _plain.build(cls, values, **known)
        _validate.integer("honest", kind.honest, low=1, high=MAX_CLIENTS)
        _validate.fraction("overflow", kind.overflow)
        for field, high in (("examples", MAX_CLIENTS), ("octave", LAST_OCTAVE), ("reserved", kind.honest)):
            if (value := getattr(kind, field)) is not None:
                _validate.integer(field, value, low=0 if field == "octave" else 1, high=high)
        return _unique(kind)


Groups = frozenset[tuple[frozenset[EntryKind], int]]
"""Sets of kinds of which a client meets at most one, each with the number of such sets."""


def kind_of(event: RoundEvent, survivors: int, octave: int | None = None) -> EntryKind:
    """Returns the kind of a round with this many messages in its sum."""
    honest = survivors - event.colluding
    # Noise of colluders does not count, and they know of themselves who was drawn, but not of others' examples. The
    # kind has no colluders any more.
    taking_part, lost = event.taking_part, event.overflow
    if event.examples is None:
        most = max(event.most_messages, survivors)
        taking_part = taking_part.known_to(event.colluding, event.survivors, most)
    else:
        lost += overflow(event.examples, taking_part)
    sampled = taking_part.sampled and event.taking_part.rate < 1.0
    # Each size is a certificate of its own, and with sampling a distribution, too. So sizes keep a few binary digits,
    # rounded down; but not below what was reserved, or a release could raise the total.
    step = 1 << max(0, honest.bit_length() - (6 if sampled else 10))
    honest = max(honest // step * step, event.survivors - event.colluding)
    participation = taking_part if sampled else _EVERY
    reserved = None if octave is None else event.survivors - event.colluding
    base = _normal(event.protocol)
    return _unique(EntryKind(base, event.examples, honest, participation, lost, octave, reserved))


@lru_cache(maxsize=256)
def _normal(protocol: Protocol) -> Protocol:
    # Privacy depends on neither the rotation's seed nor a modulus (sums modulo something are post-processing).
    return replace(protocol, rotation_seed=0, modulus=None, promise=None)


def _unique(kind: EntryKind) -> EntryKind:
    """Returns the one object of this kind. There is never a second one: totals would count it apart."""
    return _KINDS.setdefault((kind.honest, *kind.apart_from_size), kind)


_KINDS: dict[tuple[object, ...], EntryKind] = {}


def merged(parts: Iterable[Groups]) -> Groups:
    """Returns the groups of several accounts, merged into one list."""
    found: Counter[frozenset[EntryKind]] = Counter()
    for part in parts:
        found.update(dict(part))
    return frozenset(found.items())


def _worst(kinds: Iterable[EntryKind]) -> frozenset[EntryKind]:
    """For kinds that differ only in their number of messages, keeps the one with the fewest."""
    # Of several with the same key, the last one stays: the one with the fewest messages.
    largest_first = sorted(kinds, key=lambda kind: -kind.honest)
    return frozenset({kind.apart_from_size: kind for kind in largest_first}.values())


def _check_one_run(rounds: Mapping[EntryKind, int]) -> None:
    """Refuses a partition in which a run with correlated noise, which is one event, meets anything else.

    Nor may it have more rounds than its noise is correlated over: its cost is proved for that number.
    """
    memories = [kind.base.mechanism.memory for kind in rounds]
    if not any(memory.one_event for memory in memories):
        return
    if len({(kind.base, kind.examples) for kind in rounds}) > 1:
        raise ParameterError(
            "A partition with correlated noise is one run of one protocol, and this one has rounds of another: name "
            "each run's partition after the run."
        )
    count, most = sum(rounds.values()), memories[0].rounds
    if count > most:
        raise ParameterError(
            f"A partition with correlated noise is one run, here of run_length={most} rounds, and this "
            f"one would have {count}: name each run's partition after the run."
        )


class Tally:
    """Counts of rounds by kind. Adding or removing a round takes the same time however many there are."""

    def __init__(self) -> None:
        """Starts without rounds."""
        self._rounds: dict[str, Counter[EntryKind]] = {}
        self._groups: Counter[frozenset[EntryKind]] = Counter()

    def add(self, kind: EntryKind, partition: str, count: int = 1) -> None:
        """Adds rounds, or removes them where `count` is negative."""
        rounds = self._rounds.get(partition, Counter())
        if partition:
            _check_one_run(rounds + Counter({kind: count}))
        left = rounds[kind] + count
        if left < 0:
            raise ParameterError("there is no such round to remove")
        if partition:
            self._count(_worst(rounds), -1)
        rounds[kind] = left
        if not left:
            del rounds[kind]
        self._rounds[partition] = rounds
        if not rounds:
            del self._rounds[partition]
        if partition:
            self._count(_worst(rounds), 1)
        else:
            self._count(frozenset([kind]), count)

    def _count(self, group: frozenset[EntryKind], change: int) -> None:
        if group:
            self._groups[group] += change
            if not self._groups[group]:
                del self._groups[group]

    def groups(self, further: Iterable[tuple[str, EntryKind, int]] = ()) -> Groups:
        """Returns the rounds as sets; a client takes part in at most one round of each set.

        Args:
            further: Rounds that are not in the tally: partition, kind and count.
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
        """Returns another tally with the same rounds."""
        other = Tally()
        other._rounds = {partition: rounds.copy() for partition, rounds in self._rounds.items()}
        other._groups = self._groups.copy()
        return other

    def items(self) -> list[tuple[str, EntryKind, int]]:
        """Returns partitions, kinds and counts of rounds, in any order."""
        return [(partition, kind, count) for partition, kinds in self._rounds.items() for kind, count in kinds.items()]

    def kinds(self) -> set[EntryKind]:
        """Returns all kinds of rounds in it."""
        return {kind for rounds in self._rounds.values() for kind in rounds}


@dataclass(frozen=True)
class Room:
    """A proof of an upper bound on ε, which covers `rounds` further rounds of a kind."""

    kind: EntryKind
    rounds: int
    epsilon: float
    method: str


class Account:
    """The rounds of a population.

    Attributes:
        tally: The rounds as they are accounted now.
        rounds: Number of rounds, without those that were given up.
        unreleased: Number of rounds that were reserved and not (yet) released.
        reserved: Number of rounds that were ever reserved.
        room: Further rounds that the proof of the last reservation covers; None where it covers no more.
        table_unit: What its statistics of tables protect; empty before the first of those that say it.
    """

    def __init__(self) -> None:
        """Starts without rounds."""
        self.tally = Tally()
        self.table_unit: TableUnit = ""
        self.rounds = 0
        self.unreleased = 0
        self.reserved = 0
        self.room: Room | None = None
        # The changes by releases since the last reservation, with the opposite sign.
        self._since: Counter[tuple[str, EntryKind]] = Counter()

    def reserve(self, event: RoundEvent, room: Room | None = None, octave: int | None = None) -> None:
        """Adds a round, and the further rounds that its proof covers."""
        self.tally.add(kind_of(event, event.survivors, octave), event.partition)
        self.table_unit = event.table_unit or self.table_unit
        self.room = room
        self.rounds += 1
        self.unreleased += 1
        self.reserved += 1
        self._since.clear()

    def release(self, event: RoundEvent, survivors: int, octave: int | None = None) -> None:
        """Replaces a round's reservation by its cost with `survivors` messages; `octave` as when it was reserved."""
        self._close(event, octave)
        after = kind_of(event, survivors, octave)
        self.tally.add(after, event.partition)
        self._changed(event.partition, after, -1)

    def abandon(self, event: RoundEvent, octave: int | None = None) -> None:
        """Removes a reserved round, which then costs nothing; `octave` as when it was reserved."""
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

    def add_copies(self, other: Account) -> None:
        """Adds another account's rounds as they are accounted now; they stay in the other one, too.

        In an adaptive budget they get the octaves that follow this account's rounds.
        """
        for partition, kind, count in other.tally.items():
            adaptive = kind.octave is not None
            for octave, times in Counter(
                octave_of(self.reserved + place) if adaptive else None for place in range(count)
            ).items():
                self.tally.add(_unique(replace(kind, octave=octave)), partition, times)
            self.rounds += count
            self.reserved += count
        self.table_unit = weaker_unit([self, other])
        self.room = None
        self._since.clear()

    def at_the_last_reservation(self) -> Tally:
        """Returns the rounds as they were accounted at the time of the last reservation."""
        if not self._since:
            return self.tally
        tally = self.tally.copy()
        # Removals first: a run with correlated noise never has more rounds than it may have.
        for (partition, kind), change in sorted(self._since.items(), key=lambda item: item[1]):
            tally.add(kind, partition, change)
        return tally

    def to_dict(self, places: Mapping[EntryKind, int]) -> dict[str, Any]:
        """Returns plain JSON values, in which `places` gives the number that stands for each kind."""
        return {
            # Left out where it says nothing, as 0.2.0 writes and reads it.
            **({"table_unit": self.table_unit} if self.table_unit else {}),
            "room": None if self.room is None else {**vars(self.room), "kind": places[self.room.kind]},
            "rounds": self.rounds,
            "unreleased": self.unreleased,
            "reserved": self.reserved,
            "tally": sorted([partition, places[kind], count] for partition, kind, count in self.tally.items()),
            "since": sorted([partition, places[kind], change] for (partition, kind), change in self._since.items()),
        }

    def kinds(self) -> set[EntryKind]:
        """Returns all kinds that `to_dict` refers to."""
        room = set() if self.room is None else {self.room.kind}
        return self.tally.kinds() | {kind for _, kind in self._since} | room

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], kinds: list[EntryKind]) -> Self:
        """Returns the account that `to_dict` wrote."""
        account = cls()
        if "table_unit" in data:
            account.table_unit = cast("TableUnit", _validate.choice("table_unit", data["table_unit"], ("user", "row")))
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
            whole = _validate.integer("change", change, low=-account.rounds)
            account._changed(name("partition", partition, empty=True), kinds[place], whole)
        _check_releases(account._since)
        account.at_the_last_reservation()
        return account


def weaker_unit(accounts: Iterable[Account]) -> TableUnit:
    """Returns what statistics of tables protect in all of these accounts: a row, if it is a row in one of them."""
    known = {account.table_unit for account in accounts}
    return "row" if "row" in known else "user" if "user" in known else ""


def _check_releases(since: Mapping[tuple[str, EntryKind], int]) -> None:
    """Refuses changes since the last reservation that releases cannot make: fewer rounds, or more messages."""
    alike: dict[tuple[object, ...], list[tuple[int, int]]] = {}
    for (partition, kind), change in since.items():
        alike.setdefault((partition, kind.apart_from_size), []).append((kind.honest, change))
    for changes in alike.values():
        if any(sum_so_far < 0 for sum_so_far in accumulate(change for _, change in sorted(changes))):
            raise ParameterError("it has releases that never were")


def octave_of(before: int) -> int:
    """Returns the octave of a round after `before` others, which fixes its share of δ for tails (`Filter.tail`)."""
    return (before + 1).bit_length() - 1
