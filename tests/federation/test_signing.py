"""Signed rounds: what a client with a roster refuses from a server that does not follow the protocol."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd import Plan, plan
from cpsgd.errors import RoundError, RoundRefusedError, SignatureError, StageError
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.client_files import Signing, session_identifier
from cpsgd.federation.messages import Request
from cpsgd.federation.terms import Terms
from cpsgd.secagg import SecureServer, Stage, packets
from cpsgd.secagg.cohort import Advert, Cohort
from cpsgd.secagg.packets import HEADER_BYTES, Invitation, Kind, Session

from .local import DIM, RUN, Client, carry
from .silos import CLIENTS, VECTORS, Silos


@pytest.fixture
def silos(tmp_path: Path) -> Silos:
    return Silos(tmp_path)


def test_the_graph_is_complete_however_many_there_are() -> None:
    large = plan(200, DIM, 8.0, 1e-5, secure=True, dropout=0.1, colluding=10, bits=14)
    assert Terms(plan=large).parameters(1, 200).neighbours < 199
    roster = [number.to_bytes(32, "little") for number in range(200)]
    signed = Terms(plan=large, roster=roster).parameters(1, 200)
    assert (signed.neighbours, signed.threshold) == (199, 106)
    assert signed.threshold <= signed.surviving


# ---------------------------------------------------------------------- a server that does not follow the protocol


def request(plan: Plan, stage: Stage, payload: bytes, round: int = 1) -> Request:
    protocol = plan.protocol.to_json() if stage is Stage.ADVERTISE else ""
    return Request(stage, round, plan.rounds, plan.surviving, protocol=protocol, payload=payload)


class Server:
    """Talks to silo 0 alone, and plays the other silos with their own keys unless told otherwise."""

    def __init__(self, small_plan: Plan, silos: Silos, *, run: str = RUN, round: int = 1, **changes: Any) -> None:
        self.plan, self.silos, self.round = small_plan, silos, round
        signed = changes.pop("signed", True)
        identifier = changes.pop("identifier", session_identifier(run, round))
        terms = Terms(plan=small_plan, roster=silos.roster)
        parameters = replace(terms.parameters(round, CLIENTS), **changes)
        self.session = Session(parameters, identifier, signed)
        self.own = silos.client(0)

    def ask(self, stage: Stage, payload: bytes) -> bytes:
        return self.own.ask(request(self.plan, stage, payload, self.round))

    def invite(self) -> Advert:
        reply = self.ask(Stage.ADVERTISE, Invitation(self.session, 0).write())
        self.invited = Advert.from_bytes(reply[HEADER_BYTES:])
        return self.invited

    def advert(self, number: int, signer: int | None = None, session: Session | None = None) -> Advert:
        """Fresh keys of client `number`, signed by the silo of that number or another one."""
        public = b"".join(X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(2))
        key = self.silos.keys[number if signer is None else signer]
        return Advert.make(session or self.session, number, public, key, self.silos.roster)

    def announce(self, adverts: dict[int, Advert]) -> bytes:
        everybody = Cohort.of(CLIENTS, {**adverts, 0: self.invited}).to_bytes()
        entries = packets.write_entries({number: advert.to_bytes() for number, advert in adverts.items()})
        return self.ask(Stage.SHARE, self.session.write(Kind.KEYS, 0, everybody, entries))

    def honest(self) -> dict[int, Advert]:
        return {number: self.advert(number) for number in (1, 2, 3)}


def test_honest_keys_are_taken_in_any_numbering(small_plan: Plan, silos: Silos) -> None:
    server = Server(small_plan, silos)
    assert server.invite().identity == silos.public[0]
    assert server.announce({1: server.advert(1, 3), 2: server.advert(2, 1), 3: server.advert(3, 2)})


def elsewhere(server: Server, **changes: Any) -> Session:
    return Server(server.plan, server.silos, **changes).session


def with_another_roster(server: Server) -> Advert:
    roster = server.silos.roster - {server.silos.public[3]} | {server.silos.public[4]}
    return Advert.make(server.session, 2, server.advert(2).keys, server.silos.keys[2], roster)


FORGERIES: dict[str, Callable[[Server], Advert]] = {
    "keys of the server's own": lambda server: replace(server.advert(2), keys=server.advert(2).keys),
    "keys and identity of the server's own": lambda server: server.advert(2, 4),
    "a stranger's under a member's name": lambda server: replace(server.advert(2, 4), identity=server.silos.public[2]),
    "one member twice": lambda server: server.advert(2, 1),
    "the client itself as another": lambda server: server.advert(2, 0),
    "an advert for another number": lambda server: server.advert(3, 2),
    "an advert of an earlier round": lambda server: server.advert(2, session=elsewhere(server, round=0)),
    "an advert of another run": lambda server: server.advert(2, session=elsewhere(server, run=RUN + "1")),
    "an advert for other parameters": lambda server: server.advert(2, session=elsewhere(server, surviving=2)),
    "an advert made with another roster": with_another_roster,
}


@pytest.mark.parametrize("forged", FORGERIES)
def test_keys_that_are_not_a_members_for_this_round_are_refused(small_plan: Plan, silos: Silos, forged: str) -> None:
    server = Server(small_plan, silos)
    server.invite()
    with pytest.raises(SignatureError):
        server.announce({**server.honest(), 2: FORGERIES[forged](server)})
    # It has left the round: its keys are gone.
    assert server.own.secrets == b""


def test_the_same_forgery_succeeds_without_a_roster(small_plan: Plan, silos: Silos) -> None:
    """What the roster is for; if this fails, the tests above show nothing."""
    identifier = b"any session will"
    server = Server(small_plan, silos, signed=False, identifier=identifier)
    server.own = Client(VECTORS[0])
    server.invite()
    made = {number: Ed25519PrivateKey.generate() for number in (1, 2, 3)}
    keys = {number: server.advert(number).keys for number in made}
    assert server.announce({n: Advert.make(server.session, n, keys[n], made[n], None) for n in made})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signed": False}, "without signatures"),
        ({"clients": 3, "neighbours": 2}, "for 3 clients, and 4"),
        ({"neighbours": 2}, "some of the others only"),
        ({"identifier": bytes(16)}, "not that of this run"),
        ({"identifier": session_identifier(RUN, 2)}, "not that of this run"),
        ({"identifier": session_identifier(RUN + "1", 1)}, "not that of this run"),
    ],
)
def test_rounds_that_an_active_server_could_make_use_of_are_refused(
    small_plan: Plan, silos: Silos, changes: dict[str, Any], words: str
) -> None:
    server = Server(small_plan, silos, **changes)
    with pytest.raises(RoundRefusedError, match=words):
        server.invite()
    assert server.own.state == b""


def without_asking_for_confirmations(asked: Request, session: Session) -> Request:
    return replace(asked, stage=Stage.UNMASK) if asked.stage is Stage.CONFIRM else asked


def without_signatures(asked: Request, session: Session) -> Request:
    if asked.stage is not Stage.UNMASK:
        return asked
    survivors = packets.write_set({0, 1, 2, 3}, CLIENTS)
    number = packets._frame(asked.payload).client
    return replace(asked, payload=session.write(Kind.REQUEST, number, survivors))


@pytest.mark.parametrize(
    ("alter", "error"),
    [
        (without_asking_for_confirmations, "StageError"),
        (without_signatures, "ThresholdError"),
    ],
)
def test_nothing_is_unmasked_without_confirmations(
    small_plan: Plan, silos: Silos, alter: Callable[[Request, Session], Request], error: str
) -> None:
    session = Server(small_plan, silos).session

    class Altered(Client):
        def ask(self, request: Request | bytes) -> bytes:
            assert isinstance(request, bytes)
            return super().ask(alter(Request.from_bytes(request), session))

    clients = {f"silo-{i}": Altered(VECTORS[i], settings=silos.config(i)) for i in range(CLIENTS)}
    server = begin_round(Terms(plan=small_plan, roster=silos.roster), 1, list(clients), run=RUN)
    assert carry(server, clients) is None
    assert not server.report.released
    assert len(server.report.dropped) == CLIENTS
    assert all(reason.startswith(error) for reason in server.report.dropped.values())


def test_a_client_with_a_roster_uploads_nothing_in_the_servers_sight(small_plan: Plan, silos: Silos) -> None:
    clients = {f"silo-{i}": silos.client(i, secure=False) for i in range(CLIENTS)}
    server = begin_round(Terms(plan=small_plan, secure=False), 1, list(clients), run=RUN)
    assert carry(server, clients) is None
    assert not server.report.released
    assert all("signed rounds of secure aggregation only" in text for text in server.report.dropped.values())
    assert [client.trained for client in clients.values()] == [0] * CLIENTS


def test_a_roster_that_changes_within_a_round_ends_it_for_the_client(small_plan: Plan, silos: Silos) -> None:
    server = Server(small_plan, silos)
    server.invite()
    silos.write_roster("roster", [0, 1, 2, 4])
    with pytest.raises(SignatureError):
        server.announce({1: server.advert(1), 2: server.advert(2)})


# ---------------------------------------------------------------------- states that come back


class Round:
    """A signed round of all four silos, carried by hand up to a stage; asks from copies of their states."""

    def __init__(self, small_plan: Plan, silos: Silos, until: Stage) -> None:
        self.plan = small_plan
        self.clients = [silos.client(i) for i in range(CLIENTS)]
        parameters = Terms(plan=small_plan, roster=silos.roster).parameters(1, CLIENTS)
        self.server = SecureServer(parameters, roster=silos.roster, session=session_identifier(RUN, 1))
        self.session = self.server._session
        self.outgoing = self.server.invite()
        while (stage := self.server.stage) is not until:
            for silo, payload in self.outgoing.items():
                self.server.receive(silo, self.ask(self.clients[silo], stage, payload))
            self.outgoing = self.server.advance()

    def ask(self, client: Client, stage: Stage, payload: bytes) -> bytes:
        return client.ask(request(self.plan, stage, payload))

    def copy(self, silo: int) -> Client:
        """What an engine hands to another process that it starts before the first one has ended."""
        return copy(self.clients[silo])


def test_survivors_are_signed_once_also_by_two_processes_with_the_same_state(small_plan: Plan, silos: Silos) -> None:
    """Three silos that sign two sets reveal both secrets of the fourth, and its message lies open."""
    current = Round(small_plan, silos, Stage.CONFIRM)
    for silo in range(3):
        first, second = current.copy(silo), current.copy(silo)
        everybody, without_last = (packets.write_set(numbers, CLIENTS) for numbers in ({0, 1, 2, 3}, {0, 1, 2}))
        assert current.ask(first, Stage.CONFIRM, current.session.write(Kind.SURVIVORS, silo, everybody))
        for again in (everybody, without_last):
            with pytest.raises(StageError, match="'confirm' of round 1 of this run already"):
                current.ask(current.copy(silo), Stage.CONFIRM, current.session.write(Kind.SURVIVORS, silo, again))
        with pytest.raises(StageError):
            current.ask(second, Stage.CONFIRM, current.session.write(Kind.SURVIVORS, silo, without_last))


@pytest.mark.parametrize("stage", [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK])
def test_no_stage_is_answered_twice_from_a_state_that_comes_back(small_plan: Plan, silos: Silos, stage: Stage) -> None:
    current = Round(small_plan, silos, stage)
    first, second, lost = current.copy(0), current.copy(0), silos.client(0)
    payload = current.outgoing[0]
    assert current.ask(first, stage, payload)
    with pytest.raises(RoundError if stage is Stage.MASK else StageError, match="already"):
        current.ask(second, stage, payload)
    # Nor can a client that has forgotten everything begin again.
    begin = Invitation(current.session, 0).write()
    with pytest.raises(StageError, match="'advertise' of round 1 of this run already"):
        current.ask(lost, Stage.ADVERTISE, begin)


def test_without_a_roster_a_memory_keeps_a_client_from_signing_twice(small_plan: Plan, tmp_path: Path) -> None:
    """It signs with a key of the round, which is in a state that may come back."""
    clients = [Client(VECTORS[i], settings={"cpsgd-memory": str(tmp_path / f"memory-{i}")}) for i in range(CLIENTS)]
    server = SecureServer(Terms(plan=small_plan).parameters(1, CLIENTS))
    outgoing = server.invite()
    while (stage := server.stage) is not Stage.CONFIRM:
        for silo, payload in outgoing.items():
            server.receive(silo, clients[silo].ask(request(small_plan, stage, payload)))
        outgoing = server.advance()
    everybody, without_last = (packets.write_set(numbers, CLIENTS) for numbers in ({0, 1, 2, 3}, {0, 1, 2}))
    first, second = copy(clients[0]), copy(clients[0])
    assert first.ask(request(small_plan, Stage.CONFIRM, server._session.write(Kind.SURVIVORS, 0, everybody)))
    with pytest.raises(StageError, match="'confirm' of round 1 of this run already"):
        second.ask(request(small_plan, Stage.CONFIRM, server._session.write(Kind.SURVIVORS, 0, without_last)))


# ---------------------------------------------------------------------- files


def damaged(silos: Silos, **config: Any) -> Client:
    return Client(settings={**silos.config(0), **config})


def test_files_that_cannot_be_used_refuse_every_round(small_plan: Plan, silos: Silos) -> None:
    (silos.folder / "nonsense").write_bytes(b"\x00secret text\xff")
    silos.write_roster("without-me", [1, 2, 3])
    for wrong in (
        {"cpsgd-identity": str(silos.folder / "none")},
        {"cpsgd-identity": str(silos.folder)},
        {"cpsgd-identity": str(silos.folder / "nonsense")},
        {"cpsgd-identity": str(silos.folder / "roster")},
        {"cpsgd-identity": "with a \0 inside"},
        {"cpsgd-roster": str(silos.folder / "nonsense")},
        {"cpsgd-roster": str(silos.folder / "silo-0")},
        {"cpsgd-roster": str(silos.folder / "without-me")},
        {"cpsgd-roster": ""},
        {"cpsgd-roster": 7},
    ):
        server = Server(small_plan, silos)
        server.own = damaged(silos, **wrong)
        with pytest.raises(RoundRefusedError) as caught:
            server.invite()
        # The server reads this.
        assert str(silos.folder) not in str(caught.value)
        assert "secret" not in str(caught.value)
        assert server.own.state == b""


@pytest.mark.parametrize("missing", ["cpsgd-identity", "cpsgd-roster"])
def test_one_without_the_other_refuses(small_plan: Plan, silos: Silos, missing: str) -> None:
    config = silos.config(0)
    del config[missing]
    with pytest.raises(RoundRefusedError, match="needs both"):
        Signing.of(config)


def test_a_roster_needs_a_memory(small_plan: Plan, silos: Silos) -> None:
    server = Server(small_plan, silos)
    del server.own.settings["cpsgd-memory"]
    with pytest.raises(RoundRefusedError, match="needs cpsgd-memory as well"):
        server.invite()
    assert server.own.state == b""


def test_counters_of_the_others_are_in_the_memory_before_shares_are_sent(small_plan: Plan, silos: Silos) -> None:
    clients = {str(i): silos.client(i) for i in range(CLIENTS)}
    session = begin_round(Terms(plan=small_plan, roster=silos.roster), 1, list(clients), run=RUN)
    seen = []
    while session.stage is not None:
        for node, request in session.requests().items():
            session.receive(node, clients[node].ask(request))
        session.close()
        seen.append([(silos.folder / f"memory-{i}").read_text().count("#peers 3 ") for i in range(CLIENTS)])
    assert seen == [[0] * 4, *([[1] * 4] * 4)]


def test_nothing_of_a_key_shows(silos: Silos) -> None:
    found = Signing.of(silos.config(0))
    assert isinstance(found.identity, Ed25519PrivateKey)
    assert repr(found) == "Signing()"


def test_sessions_differ_by_run_and_round() -> None:
    pairs = [(1, 11), (11, 1), (1, 1), (2**64 - 1, 1), (1, 111), (11, 11)]
    assert len({session_identifier(str(run), round) for run, round in pairs}) == len(pairs)
