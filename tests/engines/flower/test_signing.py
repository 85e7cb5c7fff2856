"""Signed rounds: what a client with a roster refuses from a server that does not follow the protocol."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from flwr.app import ConfigRecord, Context, RecordDict

from cpsgd import Plan, plan
from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
from cpsgd.engines.flower._carriers import secure_parameters
from cpsgd.engines.flower._records import RECORD, Request, make_message, read_reply
from cpsgd.engines.flower._signing import Signing, session_identifier
from cpsgd.errors import InvitationError, ParameterError, RoundError, RoundRefusedError, SignatureError, StageError
from cpsgd.secagg import SecureServer, create_identity, public_line, wire
from cpsgd.secagg.advert import Advert
from cpsgd.secagg.identity import public_bytes
from cpsgd.secagg.wire import HEADER_BYTES, Invitation, Kind, Session

from .local import RUN, LocalGrid, Node, adds, model, through_the_wire

DIM, CLIENTS = 40, 4
VECTORS = np.random.default_rng(5).normal(size=(CLIENTS + 1, DIM)).astype(np.float32) * 0.1


class Silos:
    """Identities of four silos and of a stranger, with a roster of the four, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = [create_identity(folder / f"silo-{i}") for i in range(CLIENTS + 1)]
        self.public = [public_bytes(key) for key in self.keys]
        self.roster = frozenset(self.public[:CLIENTS])
        self.write_roster("roster", range(CLIENTS))

    def write_roster(self, name: str, members: Any) -> None:
        lines = [public_line(self.keys[i], f"silo-{i}") for i in members]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def config(self, silo: int, roster: str = "roster") -> dict[str, Any]:
        return {
            "cpsgd-identity": str(self.folder / f"silo-{silo}"),
            "cpsgd-roster": str(self.folder / roster),
            "cpsgd-memory": str(self.folder / f"memory-{silo}"),
        }

    def context(self, silo: int, roster: str = "roster", run: int = RUN) -> Context:
        return Context(run, 100 + silo, self.config(silo, roster), RecordDict(), {})

    def node(self, silo: int, roster: str = "roster", **options: Any) -> Node:
        node = Node(100 + silo, cpsgd_mod(**options), adds(VECTORS[silo]))
        node.context = self.context(silo, roster)
        return node


@pytest.fixture
def silos(tmp_path: Path) -> Silos:
    return Silos(tmp_path)


def run(strategy: CpsgdStrategy, members: list[Node], rounds: int = 1) -> tuple[np.ndarray, LocalGrid]:
    grid = LocalGrid(members)
    result = strategy.start(grid, model(DIM), num_rounds=rounds, timeout=1.0)
    arrays = result.arrays or model(DIM)
    return np.concatenate([array.numpy().reshape(-1) for array in arrays.values()]), grid


# ---------------------------------------------------------------------- honest rounds


def test_signed_rounds_give_the_mean_and_have_a_stage_more(small_plan: Plan, silos: Silos) -> None:
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    # Numbers go to nodes at random, so that the roster's order cannot matter.
    after, grid = run(strategy, [silos.node(i) for i in (2, 0, 3, 1)], rounds=3)
    assert [(report.survivors, report.dropped) for report in strategy.reports] == [(4, {})] * 3
    # 40 coordinates: nine times the expected squared error has a probability below 1e-60.
    assert 0.0 < np.sum((after - 3 * VECTORS[:4].mean(axis=0)) ** 2) < 9 * 3 * small_plan.error.total
    asked = [m.content[RECORD]["stage"] for m in grid.sent if m.metadata.dst_node_id == 100]
    assert asked == ["advertise", "share", "mask", "confirm", "unmask"] * 3


@pytest.mark.parametrize("stage", range(5))
def test_who_falls_silent_costs_nobody_else_the_round(small_plan: Plan, silos: Silos, stage: int) -> None:
    members = [silos.node(i) for i in range(CLIENTS)]
    calls = iter(range(100))
    members[2].tamper = lambda reply: None if next(calls) == stage else reply
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, members)
    (report,) = strategy.reports
    assert (report.released, report.survivors) == (True, 4 if stage > 2 else 3)
    assert list(report.dropped) == [102]


def test_the_round_is_for_everybody_on_the_roster_also_if_one_is_not_connected(small_plan: Plan, silos: Silos) -> None:
    strategy = CpsgdStrategy(small_plan, roster=silos.roster, node_timeout=0.1)
    after, _ = run(strategy, [silos.node(i) for i in (0, 1, 3)])
    assert (strategy.reports[0].released, strategy.reports[0].survivors) == (True, 3)
    assert 0.0 < np.sum((after - VECTORS[[0, 1, 3]].mean(axis=0)) ** 2) < 9 * small_plan.error.total


def test_the_graph_is_complete_however_many_there_are() -> None:
    large = plan(200, DIM, 8.0, 1e-5, secure=True, dropout=0.1, colluding=10, bits=14)
    assert secure_parameters(large, 1, 200, complete=False).neighbours < 199
    signed = secure_parameters(large, 1, 200, complete=True)
    assert (signed.neighbours, signed.threshold) == (199, 106)
    assert signed.threshold <= signed.surviving


# ---------------------------------------------------------------------- who is not one of them


def test_a_node_that_is_not_on_the_roster_is_dropped(small_plan: Plan, silos: Silos) -> None:
    silos.write_roster("with-stranger", [0, 1, 2, 4])
    members = [*(silos.node(i) for i in range(3)), silos.node(4, "with-stranger")]
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, members)
    (report,) = strategy.reports
    assert (report.released, report.survivors) == (True, 3)
    assert list(report.dropped) == [104]
    assert "SignatureError: Client" in report.dropped[104]


def test_a_client_whose_roster_differs_is_dropped_although_it_is_on_both(small_plan: Plan, silos: Silos) -> None:
    silos.write_roster("other", [0, 1, 3, 4])
    members = [*(silos.node(i) for i in range(3)), silos.node(3, "other")]
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, members)
    assert list(strategy.reports[0].dropped) == [103]
    assert "roster is not the same" in strategy.reports[0].dropped[103]


def test_one_identity_on_two_nodes_counts_once(small_plan: Plan, silos: Silos) -> None:
    twin = silos.node(2)
    twin.number = 103
    twin.context.node_config["cpsgd-memory"] = str(silos.folder / "memory of the twin")
    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    run(strategy, [*(silos.node(i) for i in range(3)), twin])
    (report,) = strategy.reports
    assert (report.released, report.survivors, len(report.dropped)) == (True, 3, 1)
    assert "repeats a public key" in next(iter(report.dropped.values()))


def test_both_sides_or_neither(small_plan: Plan, silos: Silos) -> None:
    unsigned = CpsgdStrategy(small_plan)
    run(unsigned, [silos.node(i) for i in range(CLIENTS)])
    assert not unsigned.reports[0].released
    assert all("without signatures" in reason for reason in unsigned.reports[0].dropped.values())
    signed = CpsgdStrategy(small_plan, roster=silos.roster)
    run(signed, [Node(100 + i, cpsgd_mod(), adds(VECTORS[i])) for i in range(CLIENTS)])
    assert not signed.reports[0].released
    assert all(InvitationError.__name__ in reason for reason in signed.reports[0].dropped.values())


def test_the_strategy_takes_a_roster_of_the_plans_clients_only(small_plan: Plan, silos: Silos) -> None:
    with pytest.raises(ParameterError, match="3 are"):
        CpsgdStrategy(small_plan, roster=silos.public[:3])
    with pytest.raises(ParameterError, match="5 are"):
        CpsgdStrategy(small_plan, roster=silos.public)
    with pytest.raises(ParameterError, match="secure=False"):
        CpsgdStrategy(small_plan, roster=silos.roster, secure=False)
    with pytest.raises(ParameterError, match="32 bytes"):
        CpsgdStrategy(small_plan, roster=[b"short"] * 4)


# ---------------------------------------------------------------------- a server that does not follow the protocol


class Server:
    """Talks to silo 0 alone, and plays the other silos with their own keys unless told otherwise."""

    def __init__(self, small_plan: Plan, silos: Silos, *, run: int = RUN, round: int = 1, **changes: Any) -> None:
        self.plan, self.silos, self.round = small_plan, silos, round
        signed = changes.pop("signed", True)
        identifier = changes.pop("identifier", session_identifier(run, round))
        parameters = replace(secure_parameters(small_plan, round, CLIENTS, complete=True), **changes)
        self.session = Session(parameters, identifier, signed)
        self.own, self.mod = silos.context(0), cpsgd_mod()

    def ask(self, stage: Any, payload: bytes) -> bytes:
        protocol = self.plan.protocol.to_json() if stage == "advertise" else ""
        request = Request(stage, self.round, self.plan.rounds, self.plan.surviving, protocol=protocol, payload=payload)
        message = make_message(request, 100, RecordDict({"arrays": model(DIM)}) if stage == "mask" else None)
        message.metadata.__dict__["_message_id"] = "m"
        return read_reply(self.mod(through_the_wire(message), self.own, adds(VECTORS[0])), 10**6)

    def invite(self) -> Advert:
        reply = self.ask("advertise", Invitation(self.session, 0).write())
        return Advert.from_bytes(reply[HEADER_BYTES:], signed=self.session.signed)

    def advert(self, number: int, signer: int | None = None, session: Session | None = None) -> Advert:
        """Fresh keys of client `number`, signed by the silo of that number or another one."""
        public = b"".join(X25519PrivateKey.generate().public_key().public_bytes_raw() for _ in range(2))
        key = self.silos.keys[number if signer is None else signer]
        return Advert.make(session or self.session, number, public, key, self.silos.roster)

    def announce(self, adverts: dict[int, Advert]) -> bytes:
        entries = wire.write_entries({number: advert.to_bytes() for number, advert in adverts.items()})
        return self.ask("share", self.session.write(Kind.KEYS, 0, entries))

    def honest(self) -> dict[int, Advert]:
        return {number: self.advert(number) for number in (1, 2, 3)}


def test_honest_keys_are_taken_in_any_numbering(small_plan: Plan, silos: Silos) -> None:
    server = Server(small_plan, silos)
    assert server.invite().identity == silos.public[0]
    assert server.announce({1: server.advert(1, 3), 2: server.advert(2, 1), 3: server.advert(3, 2)})


def keys_of_the_servers_own(server: Server) -> dict[int, Advert]:
    adverts, own = server.honest(), server.advert(2)
    return {**adverts, 2: replace(adverts[2], keys=own.keys)}


def keys_and_identity_of_the_servers_own(server: Server) -> dict[int, Advert]:
    return {**server.honest(), 2: server.advert(2, 4)}


def a_strangers_signature_under_a_members_name(server: Server) -> dict[int, Advert]:
    return {**server.honest(), 2: replace(server.advert(2, 4), identity=server.silos.public[2])}


def one_member_twice(server: Server) -> dict[int, Advert]:
    return {**server.honest(), 2: server.advert(2, 1)}


def the_client_itself_as_another(server: Server) -> dict[int, Advert]:
    return {**server.honest(), 2: server.advert(2, 0)}


def an_advert_for_another_number(server: Server) -> dict[int, Advert]:
    return {**server.honest(), 2: server.advert(3, 2)}


def an_advert_of_an_earlier_round(server: Server) -> dict[int, Advert]:
    earlier = Server(server.plan, server.silos, round=0)
    return {**server.honest(), 2: server.advert(2, session=earlier.session)}


def an_advert_of_another_run(server: Server) -> dict[int, Advert]:
    other = Server(server.plan, server.silos, run=RUN + 1)
    return {**server.honest(), 2: server.advert(2, session=other.session)}


def an_advert_made_for_other_parameters(server: Server) -> dict[int, Advert]:
    other = replace(server.session, parameters=replace(server.session.parameters, surviving=2))
    return {**server.honest(), 2: server.advert(2, session=other)}


def an_advert_made_with_another_roster(server: Server) -> dict[int, Advert]:
    found = server.advert(2)
    roster = server.silos.roster - {server.silos.public[3]} | {server.silos.public[4]}
    return {**server.honest(), 2: Advert.make(server.session, 2, found.keys, server.silos.keys[2], roster)}


@pytest.mark.parametrize(
    "forge",
    [
        keys_of_the_servers_own,
        keys_and_identity_of_the_servers_own,
        a_strangers_signature_under_a_members_name,
        one_member_twice,
        the_client_itself_as_another,
        an_advert_for_another_number,
        an_advert_of_an_earlier_round,
        an_advert_of_another_run,
        an_advert_made_for_other_parameters,
        an_advert_made_with_another_roster,
    ],
)
def test_keys_that_are_not_a_members_for_this_round_are_refused(
    small_plan: Plan, silos: Silos, forge: Callable[[Server], dict[int, Advert]]
) -> None:
    server = Server(small_plan, silos)
    server.invite()
    with pytest.raises(SignatureError):
        server.announce(forge(server))
    # It has left the round: its keys are gone.
    assert server.own.state[RECORD]["secrets"] == b""


def test_the_same_forgery_succeeds_without_a_roster(small_plan: Plan, silos: Silos) -> None:
    """What the roster is for; if this fails, the tests above show nothing."""
    identifier = b"any session will"
    server = Server(small_plan, silos, signed=False, identifier=identifier)
    server.own = Context(RUN, 100, {}, RecordDict(), {})
    server.invite()
    assert server.announce({number: Advert(server.advert(number).keys) for number in (1, 2, 3)})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"signed": False}, "without signatures"),
        ({"clients": 3, "neighbours": 2}, "for 3 clients, and 4"),
        ({"neighbours": 2}, "some of the others only"),
        ({"identifier": bytes(16)}, "not that of this run"),
        ({"identifier": session_identifier(RUN, 2)}, "not that of this run"),
        ({"identifier": session_identifier(RUN + 1, 1)}, "not that of this run"),
    ],
)
def test_rounds_that_an_active_server_could_make_use_of_are_refused(
    small_plan: Plan, silos: Silos, changes: dict[str, Any], words: str
) -> None:
    server = Server(small_plan, silos, **changes)
    with pytest.raises(RoundRefusedError, match=words):
        server.invite()
    assert RECORD not in server.own.state


def without_asking_for_confirmations(record: ConfigRecord, session: Session) -> None:
    if record["stage"] == "confirm":
        record["stage"] = "unmask"


def without_signatures(record: ConfigRecord, session: Session) -> None:
    if record["stage"] == "unmask":
        number = wire._frame(record["payload"]).client  # type: ignore[arg-type]
        survivors = wire.write_set({0, 1, 2, 3}, CLIENTS)
        record["payload"] = session.write(Kind.REQUEST, number, survivors)


@pytest.mark.parametrize(
    ("alter", "error"),
    [
        (without_asking_for_confirmations, "StageError"),
        (without_signatures, "ThresholdError"),
    ],
)
def test_nothing_is_unmasked_without_confirmations(
    small_plan: Plan, silos: Silos, alter: Callable[[ConfigRecord, Session], None], error: str
) -> None:
    session = Server(small_plan, silos).session

    class Altering(LocalGrid):
        def push_messages(self, messages: Any) -> Any:
            kept = list(messages)
            for message in kept:
                alter(message.content[RECORD], session)
            return super().push_messages(kept)

    strategy = CpsgdStrategy(small_plan, roster=silos.roster)
    strategy.start(Altering([silos.node(i) for i in range(CLIENTS)]), model(DIM), num_rounds=1, timeout=1.0)
    (report,) = strategy.reports
    assert not report.released
    assert len(report.dropped) == CLIENTS
    assert all(reason.startswith(error) for reason in report.dropped.values())


def test_a_client_with_a_roster_uploads_nothing_in_the_servers_sight(small_plan: Plan, silos: Silos) -> None:
    strategy = CpsgdStrategy(small_plan, secure=False)
    members = [silos.node(i, secure=False) for i in range(CLIENTS)]
    run(strategy, members)
    assert not strategy.reports[0].released
    assert all("signed rounds of secure aggregation only" in text for text in strategy.reports[0].dropped.values())
    assert [member.trained for member in members] == [0] * CLIENTS


def test_a_roster_that_changes_within_a_round_ends_it_for_the_client(small_plan: Plan, silos: Silos) -> None:
    server = Server(small_plan, silos)
    server.invite()
    silos.write_roster("roster", [0, 1, 2, 4])
    with pytest.raises(SignatureError):
        server.announce({1: server.advert(1), 2: server.advert(2)})


# ---------------------------------------------------------------------- states that come back


class Round:
    """A signed round of all four silos, carried by hand up to a stage; asks from copies of their states."""

    def __init__(self, small_plan: Plan, silos: Silos, until: str) -> None:
        self.plan, self.mod = small_plan, cpsgd_mod()
        self.contexts = [silos.context(i) for i in range(CLIENTS)]
        parameters = secure_parameters(small_plan, 1, CLIENTS, complete=True)
        self.server = SecureServer(parameters, roster=silos.roster, session=session_identifier(RUN, 1))
        self.session = self.server._session
        self.outgoing = self.server.invite()
        while (stage := self.server.stage.value) != until:
            for silo, payload in self.outgoing.items():
                self.server.receive(silo, self.ask(self.contexts[silo], stage, payload))
            self.outgoing = self.server.advance()

    def ask(self, context: Context, stage: Any, payload: bytes) -> bytes:
        protocol = self.plan.protocol.to_json() if stage == "advertise" else ""
        request = Request(stage, 1, self.plan.rounds, self.plan.surviving, protocol=protocol, payload=payload)
        message = make_message(
            request, context.node_id, RecordDict({"arrays": model(DIM)}) if stage == "mask" else None
        )
        message.metadata.__dict__["_message_id"] = "m"
        reply = self.mod(through_the_wire(message), context, adds(VECTORS[context.node_id - 100]))
        return read_reply(reply, 10**6)

    def copy(self, silo: int) -> Context:
        """What Flower hands to another process that it starts before the first one has ended."""
        found = self.contexts[silo]
        return Context(RUN, found.node_id, found.node_config, deepcopy(found.state), {})


def test_survivors_are_signed_once_also_by_two_processes_with_the_same_state(small_plan: Plan, silos: Silos) -> None:
    """Three silos that sign two sets reveal both secrets of the fourth, and its message lies open."""
    current = Round(small_plan, silos, "confirm")
    for silo in range(3):
        first, second = current.copy(silo), current.copy(silo)
        everybody, without_last = (wire.write_set(numbers, CLIENTS) for numbers in ({0, 1, 2, 3}, {0, 1, 2}))
        assert current.ask(first, "confirm", current.session.write(Kind.SURVIVORS, silo, everybody))
        for again in (everybody, without_last):
            with pytest.raises(StageError, match="'confirm' of round 1 of this run already"):
                current.ask(current.copy(silo), "confirm", current.session.write(Kind.SURVIVORS, silo, again))
        with pytest.raises(StageError):
            current.ask(second, "confirm", current.session.write(Kind.SURVIVORS, silo, without_last))


@pytest.mark.parametrize("stage", ["advertise", "share", "mask", "confirm", "unmask"])
def test_no_stage_is_answered_twice_from_a_state_that_comes_back(small_plan: Plan, silos: Silos, stage: str) -> None:
    current = Round(small_plan, silos, stage)
    first, second, lost = current.copy(0), current.copy(0), silos.context(0)
    payload = current.outgoing[0]
    assert current.ask(first, stage, payload)
    with pytest.raises(RoundError if stage == "mask" else StageError, match="already"):
        current.ask(second, stage, payload)
    # Nor can a client that has forgotten everything begin again.
    begin = Invitation(current.session, 0).write()
    with pytest.raises(StageError, match="'advertise' of round 1 of this run already"):
        current.ask(lost, "advertise", begin)


# ---------------------------------------------------------------------- files


def damaged(silos: Silos, **config: Any) -> Context:
    return Context(RUN, 100, {**silos.config(0), **config}, RecordDict(), {})


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
        assert RECORD not in server.own.state


@pytest.mark.parametrize("missing", ["cpsgd-identity", "cpsgd-roster"])
def test_one_without_the_other_refuses(small_plan: Plan, silos: Silos, missing: str) -> None:
    config = silos.config(0)
    del config[missing]
    with pytest.raises(RoundRefusedError, match="needs both"):
        Signing.of(Context(RUN, 100, config, RecordDict(), {}))


def test_a_roster_needs_a_memory(small_plan: Plan, silos: Silos) -> None:
    server = Server(small_plan, silos)
    del server.own.node_config["cpsgd-memory"]
    with pytest.raises(RoundRefusedError, match="needs cpsgd-memory as well"):
        server.invite()
    assert RECORD not in server.own.state


def test_nothing_of_a_key_shows(silos: Silos) -> None:
    found = Signing.of(silos.context(0))
    assert isinstance(found.identity, Ed25519PrivateKey)
    assert repr(found) == "Signing()"


def test_sessions_differ_by_run_and_round() -> None:
    pairs = [(1, 11), (11, 1), (1, 1), (2**64 - 1, 1), (1, 111), (11, 11)]
    assert len({session_identifier(*pair) for pair in pairs}) == len(pairs)
