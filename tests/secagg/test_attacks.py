"""Attacks by servers that pass keys on as they are and lie about everything else.

Each was once successful. It is carried out twice: against clients as they are, and against clients that lack the check
which stops it. The second shows that the first is an attack.
"""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from numpy.typing import NDArray

from cpsgd.errors import ParameterError, SecureAggregationError, SignatureError, ThresholdError
from cpsgd.secagg import SecureClient, SecureParameters, Stage, cohort, keys, packets, parameters, shamir
from cpsgd.secagg.cohort import Advert
from cpsgd.secagg.keys import public_bytes
from cpsgd.secagg.packets import HEADER_BYTES, Invitation, Kind, Session

from .rounds import FINGERPRINT, Round, keys_message, new_round


def chosen(clients: int, dropout: float = 0.1, colluding: int = 0) -> SecureParameters:
    return SecureParameters.choose(
        clients, 6, 8, fingerprint=FINGERPRINT, round=0, dropout=dropout, colluding=colluding
    )


def without_quorum() -> mock._patch[mock.MagicMock]:
    """Clients that reveal whatever they have signed themselves."""
    return mock.patch.object(cohort.Statement, "check")


# ---------------------------------------------------------------------- one client's integers


class Isolation:
    """Takes one client's integers out of a round.

    The victim gets the shares of as few neighbours as it agrees to, and is told that the others dropped out. The others
    are told that the victim is there and that its remaining neighbours are not, each of them of as many as it believes.
    So the seed of the victim's own mask is revealed, and the mask keys of all with whom it shares a mask.
    """

    def __init__(self, current: Round) -> None:
        self.current, agreed = current, current.server.parameters
        self.server, self.session = self.current.server, self.current.server._session
        self.everybody, self.victim = set(range(agreed.clients)), 0
        spare = agreed.clients - agreed.surviving
        near = self.near = self.server._neighbours
        self.kept = near[0][: max(agreed.threshold - 1, agreed.neighbours - spare)]
        self.believed = min(spare, agreed.neighbours + 1 - agreed.threshold)
        self.views = self._views()
        self.shares: dict[tuple[int, bool], dict[int, bytes]] = {}  # by owner and whether it counts as there

    def _views(self) -> dict[int, set[int]]:
        threshold = self.server.parameters.threshold
        dropped: dict[int, set[int]] = {client: set() for client in self.everybody - {self.victim}}
        for owner in self.kept:
            holders = [i for i in self.near[owner] if i != self.victim and len(dropped[i]) < self.believed]
            for client in sorted(holders, key=lambda i: len(dropped[i]))[:threshold]:
                dropped[client].add(owner)
        views = {client: self.everybody - lost for client, lost in dropped.items()}
        return {**views, self.victim: self.everybody - set(self.near[self.victim]) | set(self.kept)}

    def run(self) -> list[SecureAggregationError]:
        """All stages that are left; returns what clients objected to."""
        clients, errors = self.current.clients, list[SecureAggregationError]()
        sealed = self.server._sealed
        listed = {client: self.kept if client == self.victim else self.near[client] for client in self.everybody}
        for client, others in listed.items():
            entries = packets.write_entries({other: sealed[other][client] for other in others})
            message = self.session.write(Kind.DELIVERY, client, entries)
            self.upload = clients[client].mask(message, self.current.values[client])
            if client == self.victim:
                self.taken = self.upload
        signed = {}
        for client, view in self.views.items():
            body = packets.write_set(view, len(self.everybody))
            signed[client] = clients[client].confirm(self.session.write(Kind.SURVIVORS, client, body))[HEADER_BYTES:]
        for client, view in self.views.items():
            alike = {other: signed[other] for other in view if self.views[other] == view}
            body = packets.write_set(view, len(self.everybody)) + packets.write_entries(alike)
            try:
                reply = clients[client].unmask(self.session.write(Kind.REQUEST, client, body))
            except SecureAggregationError as error:
                errors.append(error)
                continue
            owners = sorted((*listed[client], client))
            shares = packets.split_entries(reply[HEADER_BYTES:], shamir.SHARE_BYTES, len(owners))
            for owner, share in zip(owners, shares, strict=True):
                self.shares.setdefault((owner, owner in view), {})[client] = share
        return errors

    def integers(self) -> NDArray[np.uint32]:
        """The victim's integers."""
        context, victim = self.session.context, self.victim
        masks = [(keys.self_mask_key(self._secret(victim, there=True), context, victim), -1)]
        public = self.server._adverts[victim].mask_key
        for other in self.kept:
            private = X25519PrivateKey.from_private_bytes(self._secret(other, there=False))
            masks.append((keys.pair_mask_key(private, public, context, victim, other), -1 if victim < other else 1))
        words = self.server._masks.from_bytes(self.taken[HEADER_BYTES:], self.server.parameters.dim)
        self.server._masks.apply(words, masks)
        return self.server._masks.integers(words)

    def _secret(self, owner: int, *, there: bool) -> bytes:
        found = self.shares[owner, there]
        return shamir.combine({client: found[client] for client in sorted(found)[: self.server.parameters.threshold]})


@pytest.mark.parametrize(
    ("clients", "dropout"),
    [
        (65, 0.1),
        *(pytest.param(clients, 0.1, marks=pytest.mark.thorough) for clients in (100, 300)),
        *((5, 0.4), (7, 0.4), (10, 0.4), (20, 0.4)),
    ],
)
def test_nobodys_integers_can_be_taken_out_of_a_round(clients: int, dropout: float) -> None:
    current = new_round(chosen(clients, dropout)).until(Stage.MASK)
    attack = Isolation(current.copied())
    errors = attack.run()
    assert len(errors) == clients
    assert all(isinstance(error, ThresholdError) and "quorum" in str(error) for error in errors)
    assert not attack.shares

    unprotected = Isolation(current)
    with without_quorum():
        assert unprotected.run() == []
    np.testing.assert_array_equal(unprotected.integers(), unprotected.current.values[0])


# ---------------------------------------------------------------------- the sum of a stretch of the circle


class Arc:
    """Gets the sum of some clients next to each other on the circle, who are told that many more are there.

    Nobody else need answer. Half a neighbourhood on either side of them is said to have dropped out.
    """

    def __init__(self, agreed: SecureParameters, length: int) -> None:
        people = [Ed25519PrivateKey.from_private_bytes(i.to_bytes(32, "big")) for i in range(agreed.clients)]
        roster = frozenset(map(public_bytes, people))
        self.agreed, self.session = agreed, Session(agreed, bytes(range(16)), True)
        self.clients = [SecureClient(expected=agreed, identity=key, roster=roster) for key in people]
        replies = [client.advertise(Invitation(self.session, i).write()) for i, client in enumerate(self.clients)]
        self.adverts = {i: Advert.from_bytes(reply[HEADER_BYTES:]) for i, reply in enumerate(replies)}
        self.everybody = cohort.Cohort.of(agreed.clients, self.adverts)
        circle, _ = cohort._circle(agreed.clients, self.everybody.graph_seed(self.session))
        order, row = [int(i) for i in circle], agreed.neighbours // 2
        self.arc = order[100 : 100 + length]
        self.dropped = {*order[100 - row : 100], *order[100 + length : 100 + length + row]}
        self.near = {i: self.everybody.neighbours(self.session, i) for i in self.arc}

    def run(self) -> tuple[int, list[SecureAggregationError]]:
        """How many revealed, and what the others objected to."""
        errors, sealed = list[SecureAggregationError](), dict[int, dict[int, bytes]]()
        everybody = self.everybody.to_bytes()
        for i in self.arc:
            listed = packets.write_entries({other: self.adverts[other].to_bytes() for other in self.near[i]})
            try:
                reply = self.clients[i].share(self.session.write(Kind.KEYS, i, everybody, listed))
            except SecureAggregationError as error:
                errors.append(error)
                continue
            shares = packets.split_entries(reply[HEADER_BYTES + 32 :], 146, len(self.near[i]))
            sealed[i] = dict(zip(self.near[i], shares, strict=True))
        survivors = set(range(self.agreed.clients)) - self.dropped - (set(self.arc) - sealed.keys())
        body = packets.write_set(survivors, self.agreed.clients)
        signatures = {}
        for i in sealed:
            entries = packets.write_entries({other: sealed[other][i] for other in self.near[i] if other in sealed})
            try:
                self.clients[i].mask(self.session.write(Kind.DELIVERY, i, entries), np.ones(6, np.uint32))
                signatures[i] = self.clients[i].confirm(self.session.write(Kind.SURVIVORS, i, body))[HEADER_BYTES:]
            except SecureAggregationError as error:
                errors.append(error)
        revealed = 0
        for i in signatures:
            request = self.session.write(Kind.REQUEST, i, body + packets.write_entries(signatures))
            try:
                revealed += bool(self.clients[i].unmask(request))
            except SecureAggregationError as error:
                errors.append(error)
        return revealed, errors


@pytest.mark.parametrize("length", [26, pytest.param(60, marks=pytest.mark.thorough)])
def test_the_sum_of_a_stretch_of_the_circle_cannot_be_had(length: int) -> None:
    agreed = chosen(1000)
    assert agreed.neighbours < 999
    attack = Arc(agreed, length)
    revealed, errors = attack.run()
    assert revealed == 0
    assert errors
    assert all(isinstance(error, ThresholdError) for error in errors)


def test_a_threshold_that_let_a_stretch_be_summed_is_refused_and_did_let_it() -> None:
    agreed = chosen(500)
    half = agreed.neighbours // 2 + 1
    with pytest.raises(ParameterError, match=f"threshold in .{half + 1}"):
        replace(agreed, threshold=half)
    with mock.patch.object(parameters, "smallest_threshold", return_value=half):
        attack = Arc(replace(agreed, threshold=half), half)
        # The quorum stands in the way, too.
        assert attack.run()[0] == 0
        # Without either check the stretch is unmasked, and its clients have signed that some 450 survived.
        with without_quorum():
            assert Arc(replace(agreed, threshold=half), half).run() == (half, [])
    assert 500 - len(attack.dropped) >= agreed.surviving


def test_a_stretch_that_everybody_signs_is_not_unmasked_by_itself() -> None:
    """Survivors that really are in two parts: all sign them, and nobody at an end of a part has shares enough."""
    agreed = replace(chosen(100), surviving=70, quorum=0)
    current = new_round(agreed).until(Stage.MASK)
    seed = current.server._cohort.graph_seed(current.server._session)
    order = [int(i) for i in cohort._circle(100, seed)[0]]
    row = agreed.neighbours // 2
    gaps = {*order[:row], *order[40 : 40 + row]}
    current.collect(frozenset(gaps))
    with pytest.raises(ThresholdError):
        current.server.advance()
    survivors = set(range(100)) - gaps
    body = packets.write_set(survivors, 100)
    refused = []
    for client in survivors:
        try:
            current.clients[client].confirm(current.server._session.write(Kind.SURVIVORS, client, body))
        except ThresholdError:
            refused.append(client)
    # So many on each side of each gap; the seeds of the outermost cannot be put together, whoever else signs.
    assert len(refused) == 4 * (agreed.threshold - row - 1)
    for client in (order[row], order[39], order[40 + row], order[99]):
        holders = survivors.intersection(current.server._neighbours[client])
        assert len(holders) + 1 < agreed.threshold


# ---------------------------------------------------------------------- lists that differ


def test_clients_that_were_shown_different_clients_do_not_unmask_together() -> None:
    """Without a roster: two halves of the clients are each told that one of the other half does not take part."""
    agreed = chosen(8, 0.25)
    current: Round = new_round(agreed).until(Stage.SHARE)
    server, session = current.server, current.server._session
    hidden = {client: 7 if client < 4 else 0 for client in range(8)}
    sealed: dict[int, dict[int, bytes]] = {}
    for client in range(8):
        others = {i: server._adverts[i] for i in range(8) if i not in (client, hidden[client])}
        reply = current.clients[client].share(keys_message(session, client, server._adverts[client], others))
        sealed[client] = dict(
            zip(sorted(others), packets.split_entries(reply[HEADER_BYTES + 32 :], 146, 6), strict=True)
        )
    survivors = set(range(1, 7))
    body, signatures = packets.write_set(survivors, 8), {}
    for client in survivors:
        entries = {i: sealed[i][client] for i in range(8) if i not in (client, hidden[client]) and client in sealed[i]}
        message = session.write(Kind.DELIVERY, client, packets.write_entries(entries))
        current.clients[client].mask(message, current.values[client])
        signatures[client] = current.clients[client].confirm(session.write(Kind.SURVIVORS, client, body))[HEADER_BYTES:]
    for client in survivors:
        request = session.write(Kind.REQUEST, client, body + packets.write_entries(signatures))
        with pytest.raises(SignatureError):
            current.clients[client].unmask(request)
