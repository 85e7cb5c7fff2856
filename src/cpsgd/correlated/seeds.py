"""The seeds that a client holds, in a file beside its memory: written before they are used, forgotten when handed on.

The rule that privacy rests on (docs/proofs/seeds.md): *at any time at most one honest client holds a seed,
and it uses it at most once in a round*. So a client removes seeds from its disk before the baton with them leaves. A
baton opens with a key that serves once. A client that took over a lineage for a round uses it in no earlier one. A
fresh seed is drawn from the operating system for each round. It may be expanded before, in memory alone, and is on the
disk before a message is made with it. Nothing is ever drawn from a seed again as a round's own noise, whatever is
killed when.

The file holds secrets that are to be forgotten, and a memory only ever grows: so it is a file of its own, replaced as a
whole, under the memory's lock. If it is lost, lineages begin anew, which costs accuracy alone. It may be an older copy,
restored by somebody or by a disk that lost the last change, with seeds that were handed on since. So the memory records
how often seeds were handed on, and nothing is used from a file with a smaller number.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd._durable import is_sealed, seal, unseal, write_file
from cpsgd.correlated import batons
from cpsgd.correlated.batons import Place, Slots
from cpsgd.correlated.draws import SEED_BYTES
from cpsgd.correlated.run_memory import RunMemory
from cpsgd.correlated.silo_files import SiloFile
from cpsgd.errors import BatonError, RoundError, RoundRefusedError
from cpsgd.mechanisms.memory import ClientNoise, Result

MOST_FEDERATIONS = 16
"""Number of federations whose lineages a file keeps; the one that was used longest ago goes first."""

_FORMAT = "cpsgd lineages 1"
_KIND = "seeds"
_LONGEST = 1 << 22


@dataclass(frozen=True)
class Held:
    """The seeds that a client holds in one federation.

    Attributes:
        used: The last round in which seeds may have been used, by this client or by those who handed them over.
        seeds: Seeds by round.
        key: The round, the lineage and the private key of a baton that is awaited.
        handed: Whether the protocol lets seeds pass from client to client; otherwise they never leave this file.
        given: Number of times that this client had handed seeds on in the run when this was written.
    """

    used: int = -1
    seeds: dict[int, bytes] = field(default_factory=dict, repr=False)
    key: tuple[int, int, bytes] | None = field(default=None, repr=False)
    handed: bool = True
    given: int = 0

    def slots(self, place: Place) -> Slots:
        """Returns the seeds that a message of this round needs beside its own, newest first."""
        return tuple(self.seeds.get(place.round - age) for age in range(1, place.bands))


class Journal(Protocol):
    """The records of a locked memory about seeds that were handed on; they only grow."""

    def given(self, run: str) -> int:
        """Returns the number of times that seeds were handed on in this run."""

    def give(self, run: str, number: int) -> None:
        """Records that seeds were handed on for the `number`-th time; returns when it is on the disk."""

    def answered(self, run: str) -> list[int]:
        """Returns the rounds of a run that were answered."""


class SeedFile:
    """The file of a client's seeds. If it cannot be read or written, every round is refused, as a memory does."""

    def __init__(self, path: Path, lock: Callable[[], AbstractContextManager[Journal]]) -> None:
        """Stores the path and the memory's lock; opens no file yet."""
        self._path, self._lock = path, lock

    @property
    def rows(self) -> SiloFile:
        """The files beside this one with the rows that a silo takes away itself, under the same lock."""
        return SiloFile(self._path.with_suffix(".rows"), self._lock)

    def draw(self, place: Place, *, handed: bool = False, own: bytes | None = None) -> tuple[bytes | None, ...]:
        """Returns `place.bands` seeds, newest first: a fresh one for this round, then those of the rounds before.

        None stands where there is none. The fresh one is `own`, if given: 16 bytes that were drawn at random for this
        call. It is on the disk before this returns.

        `handed` says whether the protocol passes lineages between clients; seeds kept under the other rule are dropped.

        Raises:
            RoundError: Seeds were used in this round before, or taken over for a later one.
        """
        with self._lock() as journal:
            everything = self._read()
            held = _usable(_current(everything, place, journal), place, handed)
            slots = held.slots(place)
            own = os.urandom(SEED_BYTES) if own is None else own
            seeds = {place.round - age: seed for age, seed in enumerate(slots, start=1) if seed is not None}
            seeds = _recent({**seeds, place.round: own}, place.bands)
            self._write(everything, place, Held(place.round, seeds, handed=handed, given=held.given))
        return own, *slots

    def earlier(self, place: Place, *, handed: bool = False) -> Slots:
        """Returns the seeds of earlier rounds that `draw` would return, without drawing or writing anything.

        A client asks before it counts the round: what `draw` would refuse is refused.

        Raises:
            RoundError: Seeds were used in this round before, or taken over for a later one.
        """
        with self._lock() as journal:
            return _usable(_current(self._read(), place, journal), place, handed).slots(place)

    def key(self, place: Place) -> bytes:
        """Returns the public key that a baton for this round is to be sealed to; the private one is on the disk then.

        Raises:
            BatonError: This client has a lineage already, or keeps its noise to itself, or was asked for a key of this
                round before.
        """
        with self._lock() as journal:
            everything = self._read()
            held = _current(everything, place, journal)
            if not held.handed:
                raise BatonError("This client's noise is its own in this federation: nothing is handed on.")
            if place.round <= held.used or any(held.slots(place)):
                raise BatonError("This client has a lineage, and takes part in no second one.")
            if held.key is not None and place.round <= held.key[0]:
                raise BatonError(f"This client was asked for a key of round {held.key[0]} before.")
            private = X25519PrivateKey.generate()
            self._write(everything, place, replace(held, key=(place.round, place.lineage, private.private_bytes_raw())))
        return private.public_key().public_bytes_raw()

    def give(self, place: Place, public: bytes) -> bytes:
        """Returns the baton for the holder of the private half of `public`. This client then has no lineage.

        Before this returns, its seeds are gone from the file, and the memory has recorded that they were handed on.

        Raises:
            BatonError: There is nothing to hand on, or the seeds were used in this round or a later one.
            MessageError: The key is one that no honest client can have.
        """
        with self._lock() as journal:
            everything = self._read()
            held = _current(everything, place, journal)
            if not held.handed or place.round <= held.used or not any(slots := held.slots(place)):
                raise BatonError(f"This client has no noise that round {place.round} could take away.")
            baton = batons.seal(slots, public, place)
            self._write(everything, place, replace(held, seeds={}, given=held.given + 1))
            journal.give(place.run, held.given + 1)
        return baton

    def take(self, place: Place, baton: bytes) -> None:
        """Takes over the lineage in a baton: writes its seeds to the file, without the key that opened it.

        Raises:
            BatonError: No baton is awaited for this lineage and round, or it is another one.
            VersionError: It is of another version.
        """
        with self._lock() as journal:
            everything = self._read()
            held = _current(everything, place, journal)
            if held.key is None or held.key[:2] != (place.round, place.lineage) or place.round <= held.used:
                raise BatonError(f"This client awaits no baton for round {place.round} and lineage {place.lineage}.")
            slots = batons.open_baton(baton, X25519PrivateKey.from_private_bytes(held.key[2]), place)
            seeds = {place.round - age: seed for age, seed in enumerate(slots, start=1) if seed is not None}
            # Whoever had them may have used them up to the round before.
            self._write(everything, place, Held(place.round - 1, seeds, given=held.given))

    # ------------------------------------------------------------------ the file

    def _read(self) -> dict[str, Held]:
        try:
            with self._path.open("rb") as file:
                data = file.read(_LONGEST)
        except FileNotFoundError:
            return {}
        try:
            # Files of release 0.2.0 have no seal.
            content: dict[str, Any] = json.loads(unseal(_KIND, data) if is_sealed(data) else data)
            if content["format"] == _FORMAT:
                return {bytes.fromhex(name).hex(): _held(**fields) for name, fields in content["lineages"].items()}
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, RecursionError, OverflowError):
            pass
        raise RoundRefusedError(
            "This client cannot read the file of its lineages. Its operator may remove it: lineages then begin anew."
        )

    def _write(self, everything: dict[str, Held], place: Place, held: Held) -> None:
        """Replaces the file; it is on the disk when this returns."""
        name = place.federation.hex()
        others = {other: kept for other, kept in everything.items() if other != name}
        recent = dict(list(others.items())[-(MOST_FEDERATIONS - 1) :])
        content = {"format": _FORMAT, "lineages": {each: _plain(kept) for each, kept in {**recent, name: held}.items()}}
        write_file(self._path, seal(_KIND, json.dumps(content).encode()), mode=0o600)


def _current(everything: dict[str, Held], place: Place, journal: Journal) -> Held:
    """Returns the client's seeds in a federation: none, and no key, if the file is older than the memory."""
    held, given = everything.get(place.federation.hex(), Held()), journal.given(place.run)
    return held if held.given >= given else replace(held, seeds={}, key=None, given=given)


def _usable(held: Held, place: Place, handed: bool) -> Held:
    """Returns the seeds that a message of this round may use; none from a baton if the protocol hands none on.

    Raises:
        RoundError: Seeds were used in this round before, or taken over for a later one.
    """
    if held.handed != handed:
        return Held(given=held.given)
    if place.round <= held.used:
        raise RoundError(f"This client's noise of round {place.round} is drawn, or its lineage is beyond it.")
    return held


def _recent(seeds: dict[int, bytes], bands: int) -> dict[int, bytes]:
    """Returns the seeds that a later round can still need."""
    newest = max(seeds)
    return {round: seed for round, seed in seeds.items() if round > newest + 1 - bands}


def _plain(held: Held) -> dict[str, Any]:
    key = None if held.key is None else [*held.key[:2], held.key[2].hex()]
    seeds = [[round, seed.hex()] for round, seed in held.seeds.items()]
    return {"used": held.used, "seeds": seeds, "key": key, "handed": held.handed, "given": held.given}


def _held(used: int, seeds: list[tuple[int, str]], key: tuple[int, int, str] | None, handed: bool, given: int) -> Held:
    found = {int(round): bytes.fromhex(seed) for round, seed in seeds}
    if any(len(seed) != SEED_BYTES for seed in found.values()):
        raise ValueError("seed")
    awaited = None if key is None else (int(key[0]), int(key[1]), bytes.fromhex(key[2]))
    return Held(int(used), found, awaited, bool(handed), int(given))


@dataclass(frozen=True)
class CarriedNoise(ClientNoise):
    """The state of a client's noise, which is carried from round to round of a run.

    Attributes:
        memory: The memory of the run's noise.
        seeds: The file that the state is in.
        run: The engine's name of the run.
        fingerprint: Of the protocol.
    """

    memory: RunMemory
    seeds: SeedFile
    run: str
    fingerprint: bytes

    def _place(self, round: int) -> Place:
        return Place(self.run, self.fingerprint, self.memory.bands, round)

    def check(self, round: int) -> None:
        """Raises `RoundError`, and changes nothing, if the round's noise cannot be drawn."""
        if not self.memory.keeps_rows:
            self.seeds.earlier(self._place(round), handed=self.memory.hands_on)

    def meanwhile(self, round: int, dim: int, train: Callable[[], Result]) -> tuple[Result, Mapping[str, Any]]:
        """Calls `train`; returns its result, and the noise arguments of `Protocol.encode`.

        While `train` runs, another thread expands the seeds. Files change only when `train` has succeeded; the state is
        then the next round's.
        """
        place, number, handed = self._place(round), self.memory.number(round), self.memory.hands_on
        if self.memory.keeps_rows:
            found = train()
            return found, {"seeds": self.seeds.rows.state(place, number, last=number + 1 >= self.memory.rounds)}
        seeds = os.urandom(SEED_BYTES), *self.seeds.earlier(place, handed=handed)
        with ThreadPoolExecutor(max_workers=1) as pool:
            expanding = pool.submit(self.memory.expanded, seeds, number, dim)
            found = train()
        drawn = self.seeds.draw(place, handed=handed, own=seeds[0])
        expanded = expanding.result()
        # Seeds of earlier rounds may have been handed on while the client trained.
        return found, {"seeds": expanded if expanded == drawn else drawn}
