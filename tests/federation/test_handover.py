"""Rounds with correlated noise: silos that stay, lineages that are handed on, and servers that carry batons wrongly."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, get_ident
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from cpsgd import Plan, Protocol
from cpsgd.codec import rotate
from cpsgd.correlated.batons import Place, open_baton, seal
from cpsgd.correlated.draws import Lineages
from cpsgd.correlated.handover import Handover, HandoverStep, read_answer
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.seeds import SeedFile
from cpsgd.errors import BatonError, CpsgdError, ParameterError, RoundRefusedError, VersionError
from cpsgd.federation.client_files import Memory
from cpsgd.federation.course import Course
from cpsgd.federation.messages import Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger
from cpsgd.privacy.guarantees import guarantee
from cpsgd.privacy.one_example import example_protocol
from cpsgd.secagg import Stage

from .correlated import correlated_plan, remembering
from .local import DIM, RUN, Client, plain
from .silos import Silos

Drawn = list[tuple[int, tuple[bytes | None, ...]]]
Tamper = Callable[[str, Handover, bytes], bytes | None]


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """Rounds and the seeds that clients use in them, in the order in which they do."""
    found: Drawn = []
    draw = SeedFile.draw

    def recorded(self: SeedFile, place: Place, **options: Any) -> tuple[bytes | None, ...]:
        found.append((place.round, draw(self, place, **options)))
        return found[-1][1]

    monkeypatch.setattr(SeedFile, "draw", recorded)
    return found


@pytest.fixture
def staying(small_plan: Plan) -> Plan:
    """Silos whose examples are in one round each."""
    return correlated_plan(small_plan)


@pytest.fixture
def passing(small_plan: Plan) -> Plan:
    """Five clients of whom one may drop out, each in one round; lineages are handed on."""
    return correlated_plan(small_plan, clients=5, surviving=4, bands=2, untrusted_holders=1)


class Federation:
    """A course and its clients; `asked` has the stages of each round, and `handed` the requests about lineages."""

    def __init__(self, plan: Plan, clients: dict[str, Client], **terms: Any) -> None:
        self.course: Course[str] = Course(Terms(plan=plan, **terms), np.zeros(DIM, np.float32), run=RUN)
        self.clients, self.asked, self.handed = clients, list[list[Stage]](), list[tuple[str, Handover]]()

    def round(self, connected: str, tamper: Tamper = lambda node, asked, answer: answer) -> RoundSession[str]:
        session = self.course.begin(connected)
        self.asked.append([])
        while (stage := session.stage) is not None:
            self.asked[-1].append(stage)
            for node, request in session.requests().items():
                try:
                    answer: bytes | None = self.clients[node].ask(request)
                    if stage is Stage.RELAY:
                        self.handed.append((node, Handover.from_bytes(request, RUN)))
                        answer = tamper(node, self.handed[-1][1], answer or b"")
                    if answer is not None:
                        session.receive(node, answer)
                except CpsgdError as error:
                    session.drop(node, f"{type(error).__name__}: {error}")
            session.close()
        self.course.finish(session)
        return session


def silos(folder: Path, names: str, **limits: Any) -> dict[str, Client]:
    return {name: remembering(folder, name, **limits) for name in names}


def used_twice(drawn: Drawn) -> bool:
    """Whether two messages of a round use one seed, or a seed is the own one of two messages."""
    uses = Counter((round, seed) for round, seeds in drawn for seed in seeds if seed is not None)
    own = Counter(seeds[0] for _, seeds in drawn)
    return max(uses.values()) > 1 or max(own.values()) > 1


# ---------------------------------------------------------------------- silos that stay


@pytest.mark.parametrize("secure", [True, False])
def test_what_silos_send_takes_away_what_they_sent_before(
    staying: Plan, secure: bool, drawn: Drawn, tmp_path: Path
) -> None:
    clients = silos(tmp_path, "abcd", examples=5, disjoint=True, secure=secure)
    federation = Federation(staying, clients, examples=5, secure=secure)
    mechanism = staying.protocol.mechanism
    assert isinstance(mechanism, CorrelatedGaussian)
    for round in (1, 2, 3, 4):
        before = federation.course.model.copy()
        session = federation.round("abcd")
        assert session.report.released, session.report.reason
        seeds = [seeds for at, seeds in drawn if at == round]
        assert [sum(seed is not None for seed in each) for each in seeds] == [min(round, 3)] * 4
        noise = sum(mechanism.lineages.noise(each, round - 1, DIM) for each in seeds) * 2.0**-mechanism.finest_bits
        got = rotate.forward(federation.course.model - before, staying.protocol.rotation_signs(0))
        # What is left is the clients' own noise, of two steps each, and rounding.
        left = got * 4 / mechanism.step - noise
        assert np.abs(left).max() < 10 * 2 * 2.1
        assert np.abs(noise).std() > 40
    assert not used_twice(drawn)
    assert {stage for stages in federation.asked for stage in stages} >= ({Stage.MASK} if secure else {Stage.UPLOAD})
    assert all(Stage.RELAY not in stages for stages in federation.asked)


def test_a_silo_that_was_away_goes_on_with_what_it_has(staying: Plan, drawn: Drawn, tmp_path: Path) -> None:
    federation = Federation(staying, silos(tmp_path, "abcd", examples=5, disjoint=True), examples=5)
    for connected in ("abcd", "abc", "abcd"):
        assert federation.round(connected).report.released
    lengths = sorted(sum(seed is not None for seed in seeds) for round, seeds in drawn if round == 3)
    assert lengths == [2, 3, 3, 3]
    assert not used_twice(drawn)


def test_a_round_that_is_asked_for_again_draws_nothing(staying: Plan, drawn: Drawn, tmp_path: Path) -> None:
    """Neither from an older state nor from none does a client send another vector under the same noise."""
    client = remembering(tmp_path, "a", examples=5, disjoint=True, secure=False)
    asked = Request(Stage.UPLOAD, 1, staying.rounds, staying.surviving, staying.protocol.to_json(), examples=5)
    first = client.ask(asked)
    for state in (b"", client.state):
        client.state = state
        client.vector = np.ones(DIM, np.float32)
        with pytest.raises(CpsgdError):
            client.ask(asked)
    assert len(first) == staying.protocol.message_bytes
    assert (client.trained, len(drawn)) == (1, 1)


@pytest.mark.parametrize("damage", ["nonsense", "beyond"])
def test_a_round_whose_noise_cannot_be_drawn_is_not_counted(passing: Plan, damage: str, tmp_path: Path) -> None:
    client = remembering(tmp_path, "a", secure=False)
    asked = Request(Stage.UPLOAD, 1, passing.rounds, passing.surviving, passing.protocol.to_json())
    memory = Memory(tmp_path / "a")
    if damage == "nonsense":
        (tmp_path / "a.lineages").write_bytes(b"nonsense")
    else:  # the server has it take over a lineage for a later round
        later = Place(RUN, passing.protocol.fingerprint, 2, 5)
        memory.seeds.take(later, seal([os.urandom(16)], memory.seeds.key(later), later))
    for state in (b"", client.state):
        client.state = state
        with pytest.raises(CpsgdError, match="lineage"):
            client.ask(asked)
    assert memory.rounds() == []
    assert client.trained == 0


def test_noise_is_expanded_while_a_client_trains(
    staying: Plan, drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another thread, once, and a training that fails leaves no trace of it."""
    client = remembering(tmp_path, "a", examples=5, disjoint=True, secure=False)
    asked = Request(Stage.UPLOAD, 1, staying.rounds, staying.surviving, staying.protocol.to_json(), examples=5)
    client.ask(asked)
    expanding, expanded, train = Event(), [], client.train
    noise = Lineages.noise

    def recorded(self: Lineages, seeds: Any, round: int, dim: int) -> Any:
        expanded.append((get_ident(), tuple(seeds), round, dim))
        expanding.set()
        return noise(self, seeds, round, dim)

    def waiting(protocol: Protocol) -> np.ndarray:
        assert expanding.wait(30.0)
        return train(protocol)

    def failing(protocol: Protocol) -> np.ndarray:
        waiting(protocol)
        raise ValueError("no")

    monkeypatch.setattr(Lineages, "noise", recorded)
    kept = (tmp_path / "a.lineages").read_bytes()
    monkeypatch.setattr(client, "train", failing)
    with pytest.raises(ValueError, match="no"):
        client.ask(replace(asked, round=2))
    assert (tmp_path / "a.lineages").read_bytes() == kept
    monkeypatch.setattr(client, "train", waiting)
    client.ask(replace(asked, round=3))
    (failed, unused, *_), (thread, used, *place) = expanded
    assert get_ident() not in (failed, thread)
    assert place == [2, DIM]
    assert used == drawn[-1][1]
    assert used[0] != unused[0]
    assert used[2] == drawn[0][1][0]


def test_seeds_that_are_handed_on_while_a_client_trains_are_not_used(
    passing: Plan, drawn: Drawn, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = remembering(tmp_path, "a", secure=False)
    place = Place(RUN, passing.protocol.fingerprint, 2, 2)
    lineages = Memory(tmp_path / "a").seeds
    lineages.take(place, seal([os.urandom(16)], lineages.key(place), place))
    train, noise, expanded = client.train, Lineages.noise, []

    def giving(protocol: Protocol) -> np.ndarray:
        lineages.give(place, X25519PrivateKey.generate().public_key().public_bytes_raw())
        return train(protocol)

    def recorded(self: Lineages, seeds: Any, round: int, dim: int) -> Any:
        expanded.append(tuple(seeds))
        return noise(self, seeds, round, dim)

    monkeypatch.setattr(client, "train", giving)
    monkeypatch.setattr(Lineages, "noise", recorded)
    client.ask(plain(passing, 2))
    ((_, (own, earlier)),) = drawn
    assert earlier is None
    assert [each[0] for each in expanded] == [own, own]
    assert [each[1] is None for each in expanded] == [False, True]


def test_silos_that_keep_their_seeds_are_given_none(staying: Plan, drawn: Drawn, tmp_path: Path) -> None:
    """Nor does a baton for a late round, from a server that makes one up, keep them from the rounds before it."""
    client = remembering(tmp_path, "a", examples=5, disjoint=True, secure=False)
    lineages = Memory(tmp_path / "a").seeds
    late = Place(RUN, staying.protocol.fingerprint, 3, 6)
    lineages.take(late, seal([os.urandom(16), None], lineages.key(late), late))
    asked = Request(Stage.UPLOAD, 1, staying.rounds, staying.surviving, staying.protocol.to_json(), examples=5)
    client.ask(asked)
    with pytest.raises(BatonError, match="its own"):
        lineages.key(Place(RUN, staying.protocol.fingerprint, 1, 6))
    client.ask(replace(asked, round=2))
    (_, (first, *none)), (_, (_, *before)) = drawn
    assert none == [None, None]
    assert before == [first, None]


def test_without_a_memory_there_is_no_correlated_noise(staying: Plan) -> None:
    client = Client(secure=False, examples=5, disjoint=True)
    with pytest.raises(RoundRefusedError, match="cpsgd-memory"):
        client.ask(Request(Stage.UPLOAD, 1, 6, 3, staying.protocol.to_json(), examples=5))
    assert client.trained == 0


def test_a_client_takes_part_as_the_noise_is_correlated_for(small_plan: Plan, tmp_path: Path) -> None:
    once, apart = correlated_plan(small_plan), correlated_plan(small_plan, separation=3)
    client = remembering(tmp_path, "a", secure=False)
    client.ask(plain(once, 2))
    with pytest.raises(RoundRefusedError, match="one round of a run"):
        client.ask(plain(once, 4))
    other = remembering(tmp_path, "b", secure=False)
    other.ask(plain(apart, 1))
    with pytest.raises(RoundRefusedError, match="at least 3 apart"):
        other.ask(plain(apart, 3))
    other.ask(plain(apart, 4))
    assert (client.trained, other.trained) == (1, 2)
    for round in (0, 7):
        with pytest.raises(RoundRefusedError, match="round"):
            remembering(tmp_path, "c", secure=False).ask(plain(apart, round))
    examples = Request(Stage.UPLOAD, 1, 6, 3, once.protocol.to_json(), examples=5)
    with pytest.raises(RoundRefusedError, match="disjoint=True"):
        remembering(tmp_path, "d", secure=False, examples=5).ask(examples)
    with pytest.raises(RoundRefusedError, match="correlated over 6"):
        remembering(tmp_path, "d", secure=False).ask(Request(Stage.UPLOAD, 1, 7, 3, once.protocol.to_json()))
    with pytest.raises(ParameterError, match="examples"):
        remembering(tmp_path, "d", disjoint=True)


def test_a_run_is_paid_for_once_and_another_one_again(staying: Plan, tmp_path: Path) -> None:
    spent = guarantee(example_protocol(staying.protocol, 5), 1e-5, surviving=3, colluding=1).epsilon
    limits: dict[str, Any] = {"examples": 5, "disjoint": True, "secure": False, "epsilon": 1.05 * spent, "delta": 1e-5}

    def ask(run: str, round: int) -> None:
        request = Request(Stage.UPLOAD, round, 6, 3, staying.protocol.to_json(), examples=5)
        remembering(tmp_path, "a", run=run, **limits).ask(request)

    for round in (1, 2, 3):
        ask("1", round)
    # The server was stopped, and goes on under another name: other examples' turn.
    ask("2", 4)
    with pytest.raises(RoundRefusedError, match=r"Nothing is proved|would bring their cost"):
        ask("3", 4)
    ask("4", 5)


def test_the_ledger_is_charged_for_a_run_once(staying: Plan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.create(Budget(population="p", epsilon=50.0, delta=1e-5, unit="example"))
    federation = Federation(
        staying,
        silos(tmp_path, "abcd", examples=5, disjoint=True),
        examples=5,
        ledger=ledger,
        population="p",
    )
    spent = []
    for _ in range(3):
        assert federation.round("abcd").report.released
        spent.append(ledger.total("p").epsilon)
    assert spent[0] > 0.0
    assert spent == [spent[0]] * 3


# ---------------------------------------------------------------------- lineages that are handed on


def test_clients_that_come_take_over_from_those_that_leave(passing: Plan, drawn: Drawn, tmp_path: Path) -> None:
    federation = Federation(passing, silos(tmp_path, "abcdefghij"))
    for connected in ("abcde", "abcdefghij"):
        session = federation.round(connected)
        assert session.report.released, session.report.reason
        assert session.report.survivors == 5
    first, second = ([seeds for at, seeds in drawn if at == round] for round in (1, 2))
    assert {seeds[1] for seeds in second} == {seeds[0] for seeds in first}
    assert not used_twice(drawn)
    assert federation.asked[1][:3] == [Stage.RELAY] * 3
    assert Stage.RELAY not in federation.asked[0]
    steps = {step: {node for node, asked in federation.handed if asked.step is step} for step in HandoverStep}
    assert steps == {HandoverStep.KEY: set("fghij"), HandoverStep.GIVE: set("abcde"), HandoverStep.TAKE: set("fghij")}
    assert session.report.relay_bytes == {}


def test_who_took_part_once_is_not_asked_again(passing: Plan, tmp_path: Path) -> None:
    federation = Federation(passing, silos(tmp_path, "abcdef"))
    assert federation.round("abcde").report.released
    assert "1 nodes are connected" in federation.round("abcdef").report.reason


@pytest.mark.parametrize("step", list(HandoverStep))
@pytest.mark.parametrize("what", ["silence", "garbage", "another's", "cut"])
def test_whoever_fails_costs_a_lineage_and_not_the_round(
    passing: Plan, step: HandoverStep, what: str, drawn: Drawn, tmp_path: Path
) -> None:
    def tamper(node: str, asked: Handover, answer: bytes) -> bytes | None:
        if asked.step is not step or asked.place.lineage:
            return answer
        wrong = answer[:6] + os.urandom(len(answer) - 6)
        return {"silence": None, "garbage": wrong, "another's": b"cpsh\1\3", "cut": answer[:-1]}[what]

    federation = Federation(passing, silos(tmp_path, "abcdefghij"))
    federation.round("abcde")
    report = federation.round("abcdefghij", tamper).report
    assert report.released
    assert report.survivors == 5
    linked = sum(seeds[1] is not None for round, seeds in drawn if round == 2)
    # Who has taken a baton has it, whatever becomes of the answer.
    assert linked == (5 if step is HandoverStep.TAKE else 4)
    assert not used_twice(drawn)


def handover(client: Client, step: HandoverStep, place: Place, body: bytes = b"") -> bytes:
    asked = Handover(step, place, body)
    return read_answer(client.ask(asked.to_bytes()), asked)


def test_a_server_that_carries_batons_wrongly_costs_lineages_only(passing: Plan, drawn: Drawn, tmp_path: Path) -> None:
    """Each thing that a server can do with batons, one after the other."""
    protocol, clients = passing.protocol, silos(tmp_path, "abcdef", secure=False)
    a, b, c, d, e, f = clients.values()
    for client in (a, b):
        client.ask(plain(passing, 1))

    def place(lineage: int = 0, round: int = 2, run: str = RUN) -> Place:
        return Place(run, protocol.fingerprint, 2, round, lineage)

    keys = {client: handover(client, HandoverStep.KEY, place(i)) for i, client in enumerate((c, d, e))}
    baton = handover(a, HandoverStep.GIVE, place(0), keys[c])
    # Duplicated: a client has nothing left to seal for a second successor.
    for lineage, client in ((0, c), (1, d)):
        with pytest.raises(BatonError, match="no noise"):
            handover(a, HandoverStep.GIVE, place(lineage), keys[client])
    # Swapped, of another lineage, round, or run.
    for client, at in ((d, place(1)), (c, place(1)), (c, place(0, 3)), (d, place(0))):
        with pytest.raises(BatonError):
            handover(client, HandoverStep.TAKE, at, baton)
    foreign = seal((b"x" * 16,), keys[e], place(2, run="78"))
    with pytest.raises(BatonError, match="not sealed for this client"):
        handover(e, HandoverStep.TAKE, place(2), foreign)
    # Two lineages for one client; and one for a client that has its own.
    with pytest.raises(BatonError, match="before"):
        handover(c, HandoverStep.KEY, place(1))
    with pytest.raises(BatonError, match="no second one"):
        handover(b, HandoverStep.KEY, place(1))
    handover(c, HandoverStep.TAKE, place(0), baton)
    # Repeated.
    with pytest.raises(BatonError, match="awaits no baton"):
        handover(c, HandoverStep.TAKE, place(0), baton)
    # Forged, of zeros: it is taken, and adds what the server knows to what it does not.
    handover(d, HandoverStep.TAKE, place(1), seal((bytes(16),), keys[d], place(1)))
    for client in (c, d, e, f):
        client.ask(plain(passing, 2))
    own = {seeds[0] for round, seeds in drawn if round == 1}
    olds = [seeds[1] for round, seeds in drawn if round == 2]
    assert olds[0] in own
    assert olds[1:] == [bytes(16), None, None]
    assert len({seeds[0] for _, seeds in drawn}) == 6
    assert not used_twice(drawn)


def test_a_server_that_names_its_own_key_learns_noise_which_the_plan_allows_for(passing: Plan, tmp_path: Path) -> None:
    client = remembering(tmp_path, "a", secure=False)
    client.ask(plain(passing, 1))
    key, place = X25519PrivateKey.generate(), Place(RUN, passing.protocol.fingerprint, 2, 2)
    baton = handover(client, HandoverStep.GIVE, place, key.public_key().public_bytes_raw())
    assert open_baton(baton, key, place)[0] is not None
    mechanism = passing.protocol.mechanism
    assert isinstance(mechanism, CorrelatedGaussian)
    # Of five clients one colludes, and another one's noise may be known to it.
    assert mechanism.noise.law(4).deviation < 64.0 * 3**0.5 * (1.0 + 1e-9)


def test_what_stays_is_not_handed_on(small_plan: Plan, tmp_path: Path) -> None:
    stays = correlated_plan(small_plan)
    client = remembering(tmp_path, "a", secure=False)
    client.ask(plain(stays, 1))
    with pytest.raises(BatonError):
        handover(client, HandoverStep.GIVE, Place(RUN, stays.protocol.fingerprint, 3, 2), os.urandom(32))


def test_with_a_roster_or_without_a_memory_nothing_is_handed_on(passing: Plan, tmp_path: Path) -> None:
    place = Place(RUN, passing.protocol.fingerprint, 2, 2)
    for client, reason in ((Silos(tmp_path).client(0), "keeps its noise"), (Client(), "cpsgd-memory")):
        for step, body in (
            (HandoverStep.KEY, b""),
            (HandoverStep.GIVE, os.urandom(32)),
            (HandoverStep.TAKE, bytes(place.baton_bytes)),
        ):
            with pytest.raises(RoundRefusedError, match=reason):
                handover(client, step, place, body)
    assert not (tmp_path / "memory-0.lineages").exists()


def test_arbitrary_requests_are_refused_and_change_nothing(passing: Plan, tmp_path: Path) -> None:
    client = remembering(tmp_path, "a", secure=False)
    client.ask(plain(passing, 1))
    files = {path: path.read_bytes() for path in tmp_path.iterdir()}
    state, rng = client.state, np.random.default_rng(6)
    place = Place(RUN, passing.protocol.fingerprint, 2, 2)
    right = Handover(HandoverStep.GIVE, place, X25519PrivateKey.generate().public_key().public_bytes_raw()).to_bytes()
    cases = [right[:length] for length in range(4, len(right))] + [right + b"\0"]
    cases += [b"cpsh" + rng.bytes(int(rng.integers(120))) for _ in range(200)]
    for _ in range(300):
        damaged = bytearray(right)
        damaged[rng.integers(4, len(right))] ^= 1 << rng.integers(8)
        cases.append(bytes(damaged))
    for case in cases:
        with pytest.raises(CpsgdError) as caught:
            client.ask(case)
        assert str(tmp_path) not in str(caught.value)
    with pytest.raises(VersionError, match="version 9"):
        client.ask(b"cpsh\x09")
    for step, body in ((HandoverStep.KEY, b"x"), (HandoverStep.GIVE, b""), (HandoverStep.TAKE, b"short")):
        with pytest.raises(BatonError, match="bytes of content"):
            client.ask(Handover(step, place, body).to_bytes())
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == files
    assert client.state == state


def test_a_server_takes_answers_to_its_own_requests_only() -> None:
    place = Place(RUN, bytes(16), 2, 2)
    asked = Handover(HandoverStep.KEY, place)
    for reply in (b"", b"cpsh", b"cpsh\1\1" + bytes(32), b"cpsh\1\0" + bytes(31), b"cpsh\1\0" + bytes(33), bytes(38)):
        with pytest.raises(BatonError):
            read_answer(reply, asked)
    with pytest.raises(VersionError):
        read_answer(b"cpsh\2\0" + bytes(32), asked)
    assert read_answer(b"cpsh\1\0" + bytes(32), asked) == bytes(32)
