"""Every order in which a server can lead one client through two rounds, from any state that the client has had.

The server plays the other clients. At each step it hands over any request it has for either round, by itself or as
either half of a pair, to the client in any of its states. Round 2 may be prepared, or begun from the beginning, or
both: with two sessions, or with one that the server announces twice. The client has a memory. What it refuses leads
nowhere; all that it answers is followed up. The search goes through every set of answers that can be had, which the
client's memory keeps small.
"""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

import numpy as np
import pytest

from cpsgd import Plan, Protocol, plan
from cpsgd.errors import CpsgdError
from cpsgd.federation.answering import ClientSession, SessionState
from cpsgd.federation.client_files import Memory
from cpsgd.federation.limits import Limits
from cpsgd.federation.messages import AHEAD, Pair, Request
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage

CLIENTS, VICTIM = 3, 0
STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)
Attempt = tuple[int, int]  # a round, and which attempt at it


@pytest.fixture(scope="module")
def tiny() -> Plan:
    return plan(CLIENTS, 2, 8.0, 1e-5, rounds=2, secure=True, colluding=1, bits=14, mechanism="binomial")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memories need not survive a crash here, and thousands are written."""
    monkeypatch.setattr("os.fsync", lambda file: None)


@dataclass
class Game:
    """One attempt at a round: the server, the other clients, and the request for the victim at each stage so far."""

    server: SecureServer
    others: dict[int, bytes]
    requests: dict[Stage, bytes]
    answered: set[Stage] = field(default_factory=set)

    @classmethod
    def begin(cls, parameters: SecureParameters) -> Game:
        server, others = SecureServer(parameters), {}
        invitations = server.invite()
        for i in range(1, CLIENTS):
            client = SecureClient(expected=parameters)
            server.receive(i, client.advertise(invitations[i]))
            others[i] = client.export_state()
        return cls(server, others, {Stage.ADVERTISE: invitations[VICTIM]})

    def answer(self, stage: Stage, reply: bytes) -> None:
        """Takes the victim's answer, and brings everybody to the next stage."""
        self.answered.add(stage)
        self.server.receive(VICTIM, reply)
        messages = self.server.advance()
        if self.server.stage is Stage.DONE:
            return
        self.requests[self.server.stage] = messages[VICTIM]
        for i in range(1, CLIENTS):
            client = SecureClient.restore(self.others[i])
            extra = [np.zeros(self.server.parameters.dim, np.uint32)] if self.server.stage is Stage.MASK else []
            self.server.receive(i, getattr(client, self.server.stage.value)(messages[i], *extra))
            self.others[i] = client.export_state()


@dataclass
class World:
    """What the server has, and all states that the client has had."""

    games: dict[Attempt, Game]
    states: list[bytes]
    lines: bytes = b""  # of the client's memory
    trained: int = 0

    @property
    def key(self) -> tuple[frozenset[tuple[Attempt, Stage]], object]:
        """What was answered, and between which states the server can choose, whatever the keys are."""
        return self.answered, frozenset(outline(state) for state in self.states)

    @property
    def answered(self) -> frozenset[tuple[Attempt, Stage]]:
        return frozenset((attempt, stage) for attempt, game in self.games.items() for stage in game.answered)

    def count(self, round: int, stage: Stage) -> int:
        """How often a stage of a round was answered, in whichever attempt."""
        return sum(attempt[0] == round and what is stage for attempt, what in self.answered)


def outline(state: bytes) -> tuple[tuple[object, ...], ...]:
    """How far a state has come in which rounds, and in which sessions."""
    if not state:
        return ()
    found = SessionState.from_bytes(state)
    parts = [found, *([SessionState.from_bytes(found.prepared.encode())] if found.prepared else [])]
    inner = [SecureClient.restore(part.secrets)._state if part.secrets else None for part in parts]
    return tuple(
        (part.round, one.stage, one.invitation.session.identifier) if one and one.invitation else (part.round,)
        for part, one in zip(parts, inner, strict=True)
    )


class Search:
    def __init__(self, agreed: Plan, folder: Path, *, sessions: int = 1, remembers: bool = True) -> None:
        self.plan, self.path, self.sessions, self.remembers = agreed, folder / "memory", sessions, remembers
        self.answers = self.refusals = 0
        self.shapes: set[tuple[int, Stage, int, Stage]] = set()
        self.seen: set[tuple[frozenset[tuple[Attempt, Stage]], object]] = set()

    def run(self) -> None:
        attempts = [(1, 0), *((2, i) for i in range(self.sessions))]
        self.fresh = {attempt: Game.begin(self.parameters(attempt[0])) for attempt in attempts}
        self.explore(World(deepcopy(self.fresh), [b""]))

    def parameters(self, round: int) -> SecureParameters:
        protocol, surviving = self.plan.protocol, self.plan.surviving
        return SecureParameters.for_protocol(protocol, round=round, dropout=0.0, colluding=1, surviving=surviving)

    def request(self, attempt: Attempt, stage: Stage, world: World) -> bytes:
        text = self.plan.protocol.to_json() if stage is Stage.ADVERTISE else ""
        payload = world.games[attempt].requests[stage]
        return Request(stage, attempt[0], self.plan.rounds, self.plan.surviving, text, payload).to_bytes()

    def moves(self, world: World) -> Iterator[tuple[tuple[Attempt, Stage], ...]]:
        """All requests that the server has, and all pairs of them; of those that never go together, one of each."""
        single = [
            (attempt, stage)
            for attempt, game in world.games.items()
            for stage in game.requests
            if stage is not Stage.ADVERTISE or attempt in self.fresh  # an invitation is the same in both attempts
        ]
        yield from ((one,) for one in single)
        for one, other in product(single, single):
            shape = (one[0][0], one[1], other[0][0], other[1])
            fits = AHEAD.get(one[1]) is other[1] and other[0][0] == one[0][0] + 1
            if fits or shape not in self.shapes:
                self.shapes.add(shape)
                yield one, other

    def explore(self, world: World) -> None:
        if world.key in self.seen:
            return
        self.seen.add(world.key)
        for state in list(dict.fromkeys(world.states)):
            for move in self.moves(world):
                found = self.make(world, state, move)
                if found is not None:
                    self.check(found)
                    self.explore(found)

    def make(self, world: World, state: bytes, move: tuple[tuple[Attempt, Stage], ...]) -> World | None:
        """What comes of a move; None if the client has answered nothing."""
        parts = [self.request(attempt, stage, world) for attempt, stage in move]
        self.path.write_bytes(world.lines)
        memory = Memory(self.path) if self.remembers else None
        session = ClientSession(Limits(), "run", state, memory=memory)
        trained = []

        def train(protocol: Protocol) -> np.ndarray:
            trained.append(1)
            return np.zeros(protocol.dim, np.float32)

        try:
            reply = session.answer(parts[0] if len(parts) == 1 else Pair(*parts).to_bytes(), train)
        except CpsgdError:
            self.refusals += 1
            return None
        self.answers += 1
        replies = [reply]
        if len(parts) == 2:
            pair = Pair.from_bytes(reply)
            replies = [pair.first] if pair.refused else [pair.first, pair.second]
        following = deepcopy(world)
        for (asked, stage), one in zip(move, replies, strict=False):
            attempt = asked
            if stage is Stage.ADVERTISE and stage in following.games[asked].answered:
                # Other keys in the same session: another attempt with it.
                attempt = (asked[0], len(following.games))
                following.games[attempt] = deepcopy(self.fresh[asked])
            game = following.games[attempt]
            assert stage not in game.answered, f"{stage} of {attempt} was answered twice"
            game.answer(stage, one)
        following.states.append(session.state)
        following.lines, following.trained = self.path.read_bytes(), world.trained + len(trained)
        return following

    def check(self, world: World) -> None:
        for stage, round in product(STAGES, (1, 2)):
            # Keys and shares of round 2 ahead and from the beginning; all that is about the data once.
            most = 2 if round == 2 and stage in (Stage.ADVERTISE, Stage.SHARE) else 1
            assert world.count(round, stage) <= most, f"{stage} of round {round} was answered too often"
        for attempt, game in world.games.items():
            come = [stage in game.answered for stage in STAGES]
            assert come == sorted(come, reverse=True), f"{attempt} was answered out of order"
        assert world.trained == world.count(1, Stage.MASK) + world.count(2, Stage.MASK)
        rounds = [part[0] for part in outline(world.states[-1]) if len(part) > 1]
        assert len(rounds) == len(set(rounds)) <= 2


@pytest.mark.parametrize("sessions", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_whatever_a_server_does_a_client_uploads_signs_and_reveals_once_in_a_round(
    tiny: Plan, tmp_path: Path, sessions: int
) -> None:
    search = Search(tiny, tmp_path, sessions=sessions)
    search.run()
    assert search.refusals > search.answers > 0
    answered = [found for found, _ in search.seen]
    both = [found for found in answered if sum(stage is Stage.SHARE and at[0] == 2 for at, stage in found) == 2]
    # Among what was found: that it prepared the round and began it as well, and came to the end of either.
    ends = {at for found in both for at, stage in found if at[0] == 2 and stage is Stage.UNMASK}
    assert len(ends) >= 2


def test_without_a_memory_the_search_finds_two_answers(tiny: Plan, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"answered twice|too often"):
        Search(tiny, tmp_path, remembers=False).run()
