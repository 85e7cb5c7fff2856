"""Random servers that do not follow the protocol, against clients with a roster: whose sum could they compute?

Such a server gives out numbers, also one of them twice; hides clients from each other; lets members of the roster who
help it stand in for others, under another number before each client; withholds shares; announces different survivors.
What it could compute is worked out from what the clients answered, by counting shares and masks.
"""

from __future__ import annotations

import os
import random
from contextlib import suppress

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd.errors import SecureAggregationError
from cpsgd.secagg import SecureClient, packets
from cpsgd.secagg.cohort import Advert, Cohort, Statement
from cpsgd.secagg.keys import BOX_BYTES, SHARES_BYTES, ChannelKey, Route, public_bytes
from cpsgd.secagg.packets import HEADER_BYTES, Invitation, Kind, Session

from .rounds import keys_message, parameters

IDENTITIES = [Ed25519PrivateKey.from_private_bytes(bytes([i]) * 32) for i in range(6)]


class Helper:
    """A member of the roster who tells the server everything, under any number."""

    def __init__(self, session: Session, person: int, number: int, roster: frozenset[bytes]) -> None:
        self._session, self._person, self._number = session, person, number
        self._channel = ChannelKey(os.urandom(32))
        mask = X25519PrivateKey.generate().public_key().public_bytes_raw()
        public = self._channel.public + mask
        self.advert = Advert.make(session, number, public, IDENTITIES[person], roster)

    def seal(self, receiver: int, advert: Advert) -> bytes:
        route = Route(self._session.context, self._number, receiver, self.advert.keys, advert.keys)
        return self._channel.seal(route, bytes(SHARES_BYTES))

    def confirm(self, statement: Statement) -> bytes:
        return statement.sign(IDENTITIES[self._person])


class Attack:
    """One round with such a server. People are 0..n-1, of whom the first `helpers` help it; others are honest."""

    def __init__(self, seed: int, people: int, helpers: int) -> None:
        self.random = random.Random(seed)
        self.people, self.helpers = people, helpers
        self.honest = range(helpers, people)
        self.threshold = (people + helpers) // 2 + 1
        surviving = self.random.randint(2, people)
        self.parameters = parameters(people, threshold=self.threshold, quorum=self.threshold, surviving=surviving)
        self.session = Session(self.parameters, self.random.randbytes(16), True)
        self.roster = frozenset(public_bytes(key) for key in IDENTITIES[:people])
        self.hides = self.random.choice([0.0, 0.05, 0.2])
        self.clients = {
            i: SecureClient(expected=self.parameters, identity=IDENTITIES[i], roster=self.roster) for i in self.honest
        }
        self.numbers = dict(enumerate(self.random.sample(range(people), people)))
        for _ in range(self.random.choice([0, 1, 2])):
            self.numbers[self.random.choice(self.honest)] = self.random.randrange(people)
        self.stand_ins = {
            (person, number): Helper(self.session, person, number, self.roster)
            for person in range(helpers)
            for number in range(people)
        }
        self.adverts: dict[int, Advert] = {}
        self.shown: dict[int, dict[int, int]] = {}  # to each client: who has which number
        self.cohorts: dict[int, Cohort] = {}
        self.sealed: dict[int, dict[int, bytes]] = {}  # by each client, for numbers
        self.received: dict[int, set[int]] = {}  # by each that uploaded: from which numbers
        self.signed: dict[int, tuple[frozenset[int], bytes]] = {}
        self.revealed: dict[int, frozenset[int]] = {}
        for stage in (self.advertise, self.share, self.deliver, self.confirm, self.unmask):
            stage()

    def advertise(self) -> None:
        for i, client in self.clients.items():
            reply = client.advertise(Invitation(self.session, self.numbers[i]).write())
            self.adverts[i] = Advert.from_bytes(reply[HEADER_BYTES:])

    def share(self) -> None:
        for i, client in self.clients.items():
            shown = self.shown[i] = self._shown(i)
            entries = {number: self._advert(person, number) for number, person in shown.items()}
            with suppress(SecureAggregationError):
                reply = client.share(keys_message(self.session, self.numbers[i], self.adverts[i], entries))
                everybody = {**entries, self.numbers[i]: self.adverts[i]}
                self.cohorts[i] = Cohort.of(self.people, everybody)
                sealed = packets.split_entries(reply[HEADER_BYTES + 32 :], BOX_BYTES, len(shown))
                self.sealed[i] = dict(zip(sorted(shown), sealed, strict=True))

    def deliver(self) -> None:
        values = np.zeros(self.parameters.dim, np.uint32)
        for i in self.sealed:
            delivered: dict[int, bytes] = {}
            for number, person in self.shown[i].items():
                if self.random.random() < self.hides:
                    continue
                if person < self.helpers:
                    helper = self.stand_ins[person, number]
                    delivered[number] = helper.seal(self.numbers[i], self.adverts[i])
                elif person in self.sealed and self.shown[person].get(self.numbers[i]) == i:
                    delivered[number] = self.sealed[person][self.numbers[i]]
            with suppress(SecureAggregationError):
                self.clients[i].mask(self._message(Kind.DELIVERY, i, packets.write_entries(delivered)), values)
                self.received[i] = set(delivered)

    def confirm(self) -> None:
        announced = [self._survivors(), self._survivors()]
        for i in self.received:
            for survivors in self.random.sample(announced, 2):
                body = packets.write_set(survivors, self.people)
                with suppress(SecureAggregationError):
                    reply = self.clients[i].confirm(self._message(Kind.SURVIVORS, i, body))
                    self.signed[i] = survivors, reply[HEADER_BYTES:]

    def unmask(self) -> None:
        for i, (survivors, signature) in self.signed.items():
            body = packets.write_set(survivors, self.people)
            signatures = {self.numbers[i]: signature}
            for number in survivors & self.shown[i].keys():
                person = self.shown[i][number]
                if person < self.helpers:
                    statement = Statement(self.session, self.cohorts[i], survivors)
                    signatures[number] = self.stand_ins[person, number].confirm(statement)
                elif person in self.signed and self._same(person, i):
                    signatures[number] = self.signed[person][1]
            with suppress(SecureAggregationError):
                self.clients[i].unmask(self._message(Kind.REQUEST, i, body + packets.write_entries(signatures)))
                self.revealed[i] = survivors

    def _same(self, one: int, other: int) -> bool:
        """Whether two have signed the same statement."""
        return self.signed[one][0] == self.signed[other][0] and self.cohorts[one] == self.cohorts[other]

    def sums(self) -> list[frozenset[int]]:
        """The smallest groups of honest people whose sum the server can compute; they have nobody in common."""
        known = {i for i in self.received if self._shares(i, alive=True) >= self.threshold}
        opened = {i for i in self.sealed if self._shares(i, alive=False) >= self.threshold}
        assert known.isdisjoint(opened)
        unknown = {
            i: {person for number in self.received[i] if (person := self.shown[i][number]) in self.honest} - opened
            for i in known
        }
        # A message under a mask that is in no other message stays hidden.
        usable = set(known)
        while stuck := {i for i in usable if any(j not in usable or i not in unknown[j] for j in unknown[i])}:
            usable -= stuck
        groups = []
        while usable:
            group, waiting = set[int](), {min(usable)}
            while waiting:
                group.add(person := waiting.pop())
                waiting |= unknown[person] - group
            usable -= group
            groups.append(frozenset(group))
        return groups

    def _shares(self, owner: int, *, alive: bool) -> int:
        """How many shares the server has of a client's seed, or of its mask key."""
        number = self.numbers[owner]
        told = {
            i
            for i, survivors in self.revealed.items()
            if (number in survivors) == alive
            and (i == owner or (self.shown[i].get(number) == owner and number in self.received[i]))
        }
        return len(told) + sum(person < self.helpers for person in self.shown[owner].values())

    def _shown(self, receiver: int) -> dict[int, int]:
        shown: dict[int, int] = {}
        for person in self.random.sample(self.honest, len(self.honest)):
            free = self.numbers[person] != self.numbers[receiver] and self.numbers[person] not in shown
            if person != receiver and free and self.random.random() >= self.hides:
                shown[self.numbers[person]] = person
        others = [number for number in range(self.people) if number != self.numbers[receiver]]
        for person in range(self.helpers):
            home = self.numbers[person] != self.numbers[receiver] and self.random.random() < 0.9
            shown[self.numbers[person] if home else self.random.choice(others)] = person
        return shown

    def _survivors(self) -> frozenset[int]:
        found = {self.numbers[i] for i in (*self.received, *range(self.helpers))}
        change = self.random.choice([0, 0, 1, 2])
        return frozenset(found ^ set(self.random.sample(range(self.people), change)))

    def _advert(self, person: int, number: int) -> Advert:
        return self.stand_ins[person, number].advert if person < self.helpers else self.adverts[person]

    def _message(self, kind: Kind, receiver: int, body: bytes) -> bytes:
        return self.session.write(kind, self.numbers[receiver], body)


@pytest.mark.parametrize(("people", "helpers"), [(3, 0), (4, 0), (5, 0), (4, 1), (5, 1), (6, 1), (6, 2)])
def test_no_server_gets_a_sum_of_fewer_than_agreed(people: int, helpers: int) -> None:
    released = 0
    for seed in range(60):
        attack = Attack(seed, people, helpers)
        uploaded = [attack.numbers[i] for i in attack.received]
        assert len(set(uploaded)) == len(uploaded)
        assert len(set(attack.revealed.values())) <= 1
        groups = attack.sums()
        released += len(groups)
        assert len(groups) <= 1
        assert all(len(group) >= attack.parameters.surviving - helpers for group in groups)
    # Or else the attacks would be so clumsy that they show nothing.
    assert released >= 5
