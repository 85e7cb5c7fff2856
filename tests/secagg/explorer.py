"""All that a server can do to a few clients: an exhaustive search over the real state machines.

The server relays keys as they are (without a roster it is trusted to, with one it must) and may do everything else:
show each client another list of who takes part, withhold shares, announce other survivors to each, hand over messages
again, early or late, show any signatures it has, and stop talking to anybody at any time. Colluding clients tell it all
they know, deal out whatever they like and sign everything.

The search has two parts. `Machine` hands every list, delivery and set of survivors to a real `SecureClient` in every
state that it can get into, and what was accepted once more; it notes what is accepted, which depends on what *this*
client has seen only. (Messages of other stages, damaged ones and those of other attempts are in other tests.)
`Explorer` then goes through all combinations of what the clients have accepted, and works out from the answers what the
server knows, by counting shares and masks. Sets of clients are bits of an integer.

What is not searched: keys that the server replaced, wrong shares, which spoil sums and open nothing, and five clients
of whom fewer than four may be summed, which would take hours.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import combinations, product
from typing import NamedTuple

import numpy as np

from cpsgd.errors import SecureAggregationError
from cpsgd.secagg import SecureClient, SecureParameters, packets
from cpsgd.secagg.cohort import Advert, Cohort
from cpsgd.secagg.packets import HEADER_BYTES, Invitation, Kind, Session


def members(bits: int) -> list[int]:
    """The clients in a set."""
    return [i for i in range(bits.bit_length()) if bits >> i & 1]


def subsets(bits: int) -> Iterator[int]:
    """All subsets of a set."""
    part = bits
    while True:
        yield part
        if not part:
            return
        part = (part - 1) & bits


class Path(NamedTuple):
    """How far a client was led.

    Attributes:
        cohort: Who it was told takes part, and it dealt shares to; 0 if it was not.
        delivered: Whose shares it got before it uploaded; None if it did not.
        survivors: What it signed; None if it did not.
    """

    cohort: int = 0
    delivered: int | None = None
    survivors: int | None = None


@dataclass
class Machine:
    """One client, and all ways it can be led. `states` has what it remembers at the end of each."""

    session: Session
    number: int
    advert: Advert
    states: dict[Path, bytes]
    sealed: dict[int, dict[int, bytes]] = field(default_factory=dict)
    signatures: dict[tuple[int, int], bytes] = field(default_factory=dict)
    refused: int = 0

    @classmethod
    def invited(cls, session: Session, number: int) -> Machine:
        client = SecureClient(expected=session.parameters)
        reply = client.advertise(Invitation(session, number).write())
        return cls(session, number, Advert.from_bytes(reply[HEADER_BYTES:]), {Path(): client.export_state()})

    def lead(self, path: Path, further: Path, method: str, message: bytes) -> bytes | None:
        """Hands over one message; notes where it leads to, or checks that it changes nothing."""
        client = SecureClient.restore(self.states[path])
        extra = [np.zeros(1, np.uint32)] if method == "mask" else []
        try:
            reply: bytes = getattr(client, method)(message, *extra)
        except SecureAggregationError:
            assert client.export_state() == self.states[path]
            self.refused += 1
            return None
        # The same again, or anything of an earlier stage, leads nowhere.
        for earlier in ("share", "mask", "confirm")[: ("share", "mask", "confirm", "unmask").index(method) + 1]:
            try:
                getattr(client, earlier)(message, *([np.zeros(1, np.uint32)] if earlier == "mask" else []))
            except SecureAggregationError:
                continue
            raise AssertionError(f"{earlier} was answered after {method}")
        self.states[further] = client.export_state()
        return reply

    def write(self, kind: Kind, *body: bytes) -> bytes:
        return self.session.write(kind, self.number, *body)


class Explorer:
    """All rounds between some honest clients and a server with accomplices, who have the largest numbers."""

    def __init__(self, parameters: SecureParameters, colluding: int = 0) -> None:
        self.parameters, n = parameters, parameters.clients
        self.honest = range(n - colluding)
        self.accomplices = sum(1 << i for i in range(n - colluding, n))
        self.everybody = (1 << n) - 1
        self.session = Session(parameters, bytes(16), False)
        self.machines = [Machine.invited(self.session, i) for i in range(n)]
        for step in (self._share, self._mask, self._confirm):
            for machine in self.machines:
                step(machine)

    @cache  # noqa: B019
    def near(self, cohort: int, client: int) -> int:
        """Whom a client is tied to in this cohort."""
        return sum(1 << j for j in self._cohort(cohort).neighbours(self.session, client))

    # ------------------------------------------------------------------ the machines

    def _cohort(self, bits: int) -> Cohort:
        return Cohort.of(self.parameters.clients, {i: self.machines[i].advert for i in members(bits)})

    def _share(self, machine: Machine) -> None:
        for view in subsets(self.everybody):
            for shown in subsets(view & self.near(view, machine.number)):
                adverts = packets.write_entries({i: self.machines[i].advert.to_bytes() for i in members(shown)})
                message = machine.write(Kind.KEYS, self._cohort(view).to_bytes(), adverts)
                reply = machine.lead(Path(), Path(view), "share", message)
                if reply is not None:
                    parts = packets.split_entries(reply[HEADER_BYTES + 32 :], 146, len(members(shown)))
                    machine.sealed[view] = dict(zip(members(shown), parts, strict=True))

    def _mask(self, machine: Machine) -> None:
        for path in [path for path in machine.states if path.cohort and path.delivered is None]:
            for delivered in subsets(self.everybody & ~(1 << machine.number)):
                # What a neighbour sealed after it had seen whatever list: the first that this client is on.
                sources = {i: self._sealed(i, machine.number) for i in members(delivered)}
                body = packets.write_entries({i: source for i, source in sources.items() if source is not None})
                if None not in sources.values():
                    machine.lead(path, Path(path.cohort, delivered), "mask", machine.write(Kind.DELIVERY, body))

    def _sealed(self, sender: int, receiver: int) -> bytes | None:
        found = self.machines[sender].sealed.values()
        return next((sealed[receiver] for sealed in found if receiver in sealed), None)

    def _confirm(self, machine: Machine) -> None:
        for path in [path for path in machine.states if path.delivered is not None and path.survivors is None]:
            for survivors in subsets(self.everybody):
                body = packets.write_set(frozenset(members(survivors)), self.parameters.clients)
                further = Path(path.cohort, path.delivered, survivors)
                reply = machine.lead(path, further, "confirm", machine.write(Kind.SURVIVORS, body))
                if reply is not None:
                    machine.signatures[path.cohort, survivors] = reply[HEADER_BYTES:]

    def try_requests(self) -> tuple[int, int]:
        """Asks every client in every state to unmask, with every set of signatures; counts what was and was not."""
        accepted = refused = 0
        for machine in self.machines:
            for path in [path for path in machine.states if path.survivors is not None]:
                assert path.survivors is not None
                body = packets.write_set(frozenset(members(path.survivors)), self.parameters.clients)
                signed = {i: m.signatures.get((path.cohort, path.survivors)) for i, m in enumerate(self.machines)}
                other = {i: next(iter(m.signatures.values())) for i, m in enumerate(self.machines) if m.signatures}
                for size in range(self.parameters.clients + 1):
                    for signers in combinations(range(self.parameters.clients), size):
                        right = {i: signature for i in signers if (signature := signed[i]) is not None}
                        mixed = {i: right.get(i, other.get(i, bytes(64))) for i in signers}
                        message = machine.write(Kind.REQUEST, body, packets.write_entries(mixed))
                        reply = machine.lead(path, Path(-1), "unmask", message)
                        enough = right == mixed and len(right) >= self.parameters.quorum
                        assert (reply is not None) == enough
                        accepted, refused = accepted + enough, refused + (not enough)
        return accepted, refused

    # ------------------------------------------------------------------ what a server knows

    def check(self, paths: dict[int, Path], revealing: frozenset[int]) -> int:
        """Works out which sums of honest clients the server can compute; returns how many contributions one has."""
        dealt = {i: path.cohort for i, path in paths.items() if path.cohort}
        uploaded = {i: path.delivered for i, path in paths.items() if path.delivered is not None}
        known, opened = 0, 0
        for owner, cohort in dealt.items():
            helped = (cohort & self.near(cohort, owner) & self.accomplices).bit_count()
            seeds = keys = helped
            for i in revealing:
                if i == owner or uploaded[i] >> owner & 1:
                    there = (paths[i].survivors or 0) >> owner & 1
                    seeds, keys = seeds + there, keys + (1 - there)
            both = min(seeds, keys) >= self.parameters.threshold
            assert not both, f"both secrets of client {owner} are open: {paths}"
            known |= (seeds >= self.parameters.threshold) << owner
            opened |= (keys >= self.parameters.threshold) << owner
        usable = {i: masks & ~self.accomplices & ~opened for i, masks in uploaded.items() if known >> i & 1}
        # A message under a mask that is in no other message stays hidden.
        while stuck := {i for i, masks in usable.items() if not all(usable.get(j, 0) >> i & 1 for j in members(masks))}:
            usable = {i: masks for i, masks in usable.items() if i not in stuck}
        if not usable:
            return 0
        group, edge = 0, 1 << min(usable)
        while edge:
            group |= edge
            edge = sum({1 << j for i in members(edge) for j in members(usable[i])}) & ~group
        least = self.parameters.surviving - self.accomplices.bit_count()
        assert group.bit_count() >= least, f"the sum of clients {members(group)} is open: {paths}"
        assert group == sum(1 << i for i in usable), f"the sums of several groups are open: {paths}"
        return group.bit_count()

    # ------------------------------------------------------------------ all rounds

    def rounds(self) -> tuple[int, int]:
        """Checks all rounds in which somebody reveals; counts them, and those in which there is a sum.

        Who reveals has signed a statement with a quorum. As honest clients sign one statement, there is no room for
        another quorum, so that of the others it only matters how far they were led before they sign.
        """
        accomplices = self.accomplices.bit_count()
        assert 2 * (self.parameters.quorum - accomplices) > len(self.honest)
        total = released = 0
        for cohort, survivors in sorted({key for machine in self.machines for key in machine.signatures}):
            able = [i for i in self.honest if (cohort, survivors) in self.machines[i].signatures]
            helping = (survivors & cohort & self.accomplices).bit_count()
            for size in range(max(0, self.parameters.quorum - helping), len(able) + 1):
                for signers in combinations(able, size):
                    for paths in self._led(cohort, survivors, frozenset(signers)):
                        total += 1
                        released += self.check(paths, frozenset(signers)) > 0
        return total, released

    def _led(self, cohort: int, survivors: int, signers: frozenset[int]) -> Iterator[dict[int, Path]]:
        """All ways to lead the clients such that these sign."""
        choices = [
            [
                path
                for path in self._paths(i)
                if (i not in signers and path.survivors is None)
                or (i in signers and (path.cohort, path.survivors) == (cohort, survivors))
            ]
            for i in self.honest
        ]
        for chosen in product(*choices):
            paths = dict(zip(self.honest, chosen, strict=True))
            if self._possible(paths):
                yield paths

    def everything(self) -> Iterator[dict[int, Path]]:
        """All ways to lead the clients."""
        for chosen in product(*(self._paths(i) for i in self.honest)):
            paths = dict(zip(self.honest, chosen, strict=True))
            if self._possible(paths):
                yield paths

    @cache  # noqa: B019
    def _paths(self, client: int) -> list[Path]:
        return sorted((path for path in self.machines[client].states if path.cohort >= 0), key=str)

    def _possible(self, paths: dict[int, Path]) -> bool:
        """Whether everybody whose shares were delivered had dealt them to the one who got them."""
        return all(
            j not in paths or paths[j].cohort >> i & 1
            for i, path in paths.items()
            for j in members(path.delivered or 0)
        )
