"""A server with an accomplice that splits the clients: some upload in a round as it was prepared, others from anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpsgd import Plan
from cpsgd.errors import RoundError, SecureAggregationError, SignatureError, StageError, ThresholdError
from cpsgd.federation.answering import SessionState
from cpsgd.federation.choreography import MaskedSum, begin_round
from cpsgd.federation.client_files import Signing
from cpsgd.federation.messages import Pair, Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.secagg import SecureClient, Stage
from cpsgd.secagg.cohort import Statement
from cpsgd.secagg.coordinator import SecureServer
from cpsgd.secagg.keys import SIGNATURE_BYTES
from cpsgd.secagg.packets import Kind, write_entries, write_set

from .local import RUN
from .silos import Silos

NODES = list("abcd")


class Split:
    """Silo a uploads in the round as it was prepared, b and c from the beginning, and d, the accomplice, in both."""

    def __init__(self, plan: Plan, silos: Silos) -> None:
        self.plan, self.silos = plan, silos
        self.clients = {node: silos.client(i) for i, node in enumerate(NODES)}
        terms = Terms(plan=plan, roster=silos.roster)
        first = begin_round(terms, 1, NODES, run=RUN, prepares=True)
        while first.stage is not None:
            self.exchange(first)
        prepared = first.prepared
        assert prepared is not None
        prepared.charge(NODES)
        self.prepared, self.states = prepared, {node: client.state for node, client in self.clients.items()}
        self.full: RoundSession[str] = begin_round(terms, 2, NODES, run=RUN)
        while self.full.stage is not Stage.MASK:
            self.exchange(self.full)

    def exchange(self, session: RoundSession[str], nodes: str = "abcd") -> dict[str, bytes]:
        requests = session.requests()
        answers = {node: self.clients[node].ask(requests[node]) for node in nodes}
        for node, answer in answers.items():
            session.receive(node, answer)
        session.close()
        return answers

    def upload(self) -> bytes:
        """All upload; returns what b has signed from the beginning."""
        self.exchange(self.full, "bcd")
        signed = self.exchange(self.full, "bcd")["b"]
        self.back("abcd")
        for node in "ad":
            if node == "d":
                Path(str(self.clients["d"].settings["cpsgd-memory"])).unlink()  # it forgets what it likes
            self.prepared.receive(node, self.clients[node].ask(self.prepared.requests()[node]))
        return Pair.from_bytes(signed).first if Pair.begins(signed) else signed

    def back(self, nodes: str) -> None:
        for node in nodes:
            self.clients[node].state = self.states[node]

    @property
    def server(self) -> SecureServer:
        """What the server knows of the prepared round."""
        settlement = self.prepared._settlement
        assert settlement is not None
        assert isinstance(settlement.total, MaskedSum)
        return settlement.total.server

    def ask(self, node: str, stage: Stage, kind: Kind, body: bytes) -> bytes:
        payload = self.server._session.write(kind, NODES.index(node), body)
        return self.clients[node].ask(Request(stage, 2, self.plan.rounds, self.plan.surviving, payload=payload))


@pytest.fixture
def split(small_plan: Plan, tmp_path: Path) -> Split:
    return Split(small_plan, Silos(tmp_path))


def test_one_of_two_attempts_has_a_quorum(split: Split) -> None:
    foreign = split.upload()[-SIGNATURE_BYTES:]
    survivors = frozenset({0, 1, 3})
    announced = write_set(survivors, 4)
    own = split.ask("a", Stage.CONFIRM, Kind.SURVIVORS, announced)[-SIGNATURE_BYTES:]
    statement = Statement(split.server._session, split.server._cohort, survivors)
    signatures = {0: own, 3: statement.sign(split.silos.keys[3])}
    # Silo b has uploaded elsewhere. It does not upload here, and what it has not uploaded for it does not sign.
    b = split.clients["b"]
    with pytest.raises(RoundError, match="answered round 2 of this run already"):
        b.ask(split.prepared.requests()["b"])
    split.back("b")
    for kind, stage in ((Kind.SURVIVORS, Stage.CONFIRM), (Kind.REQUEST, Stage.UNMASK)):
        with pytest.raises((RoundError, StageError)):
            split.ask("b", stage, kind, announced)
    # So a reveals nothing: neither for two signatures of three, nor for what b has signed in the other attempt.
    a = split.clients["a"]
    client = SecureClient.restore(SessionState.from_bytes(a.state).secrets, **vars(Signing.of(a.settings)))
    for found, error in ((signatures, ThresholdError), ({**signatures, 1: foreign}, SignatureError)):
        payload = split.server._session.write(Kind.REQUEST, 0, announced + write_entries(found))
        with pytest.raises(error):
            client.unmask(payload)
    with pytest.raises(SecureAggregationError):
        split.ask("a", Stage.UNMASK, Kind.REQUEST, announced + write_entries(signatures))


def test_the_other_attempt_ends_with_those_who_are_in_it(split: Split) -> None:
    split.exchange(split.full, "bcd")
    while split.full.stage is not None:
        split.exchange(split.full, "bcd")
    assert split.full.release() is not None
    assert split.full.report.survivors == 3
