"""Messages of all stages, changed at random: each is refused by a typed error that changes nothing, or is in order."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass
from functools import cache

import pytest

from cpsgd.errors import SecureAggregationError
from cpsgd.secagg import SecureParameters, SecureServer, Stage, packets

from .rounds import Round, new_round, parameters
from .test_tampering import resealed

STAGES = (Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK)
ROUNDS: dict[str, tuple[SecureParameters, bool]] = {
    "complete": (parameters(4), False),
    "roster": (parameters(4), True),
    "sparse": (parameters(7, neighbours=4, threshold=4), False),
    "modulus": (parameters(3, modulus=200), False),
}
SECONDS = 2.0
"""The longest that a message may take; a round of so few clients takes milliseconds."""


@dataclass
class Moment:
    """A round at one stage, when only client 0 has not answered, with the messages from and to it."""

    untouched: Round
    current: Round
    genuine: bytes
    answer: bytes

    @classmethod
    def at(cls, stage: Stage, name: str) -> Moment:
        agreed, signed = ROUNDS[name]
        current = new_round(agreed, signed=signed).until(stage)
        current.collect(frozenset({0}))
        return cls(current, current.copied(), current.waiting[0], current.copied().answer(0))

    def to_client(self, message: bytes) -> bool:
        """Whether client 0 answered; if not, it has forgotten and learnt nothing."""
        state = self.current.clients[0]._state
        assert state is not None
        before = remembered(self.current)
        try:
            self.current.answer(0, message)
        except SecureAggregationError:
            assert remembered(self.current) == before
            return False
        self.current = self.untouched.copied()
        return True

    def to_server(self, message: bytes) -> bool:
        """Whether the server took the answer; if not, it is still waiting and has changed nothing."""
        before = learnt(self.current.server)
        try:
            self.current.server.receive(0, message)
        except SecureAggregationError:
            assert learnt(self.current.server) == before
            return False
        try:
            self.current.server.advance()
        except SecureAggregationError:
            assert self.current.server._result is None
        self.current = self.untouched.copied()
        return True


def remembered(current: Round) -> tuple[object, ...]:
    state = current.clients[0]._state
    assert state is not None
    return (state.stage, state.invitation, *(getattr(state, name) for name in ("seed", "survivors", "cohort")),
            *(dict(getattr(state, name)) for name in ("adverts", "received")), state.mask_private,
            state.channel_private, state.signing_private, state.own_share)  # fmt: skip


def learnt(server: SecureServer) -> tuple[object, ...]:
    counts = [len(kept) for kept in (server._adverts, server._public, server._sealed, server._commitments)]
    return (
        *(server.stage, server.missing, server._words.tobytes(), *counts),
        *(len(server._signatures), sum(map(len, server._shares.values()))),
    )


def changed(message: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """One to three changes; nearly always with a checksum that fits, which is no secret."""
    data = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 3))):
        place = rng.randrange(len(data) + 1)
        match rng.randrange(7):
            case 0 if place < len(data):
                data[place] ^= 1 << rng.randrange(8)
            case 1:
                data[place : place + 4] = rng.choice((0, 1, 2**31, 2**32 - 1)).to_bytes(4, "little")
            case 2:
                del data[place : place + rng.choice((1, 8, 32, 33, 64, 68, 82, 146, 168, 172))]
            case 3:
                data[place:place] = rng.randbytes(rng.choice((1, 32, 64, 4096)))
            case 4:
                length = rng.choice((4, 32, 64, 86, 164))
                start = rng.randrange(len(data) + 1)
                data[place : place + length] = data[start : start + length]
            case 5:
                other = rng.choice(others)
                data[place:] = other[place:]
            case _:
                data = bytearray(data[: packets.HEADER_BYTES] + rng.choice(others)[packets.HEADER_BYTES :])
    if rng.random() < 0.9 and len(data) >= packets.HEADER_BYTES:
        return resealed(bytes(data))
    return bytes(data)


@cache
def moments() -> list[Moment]:
    return [Moment.at(stage, name) for name in ROUNDS for stage in STAGES]


def fuzz(count: int, seed: int) -> tuple[int, int]:
    """Hands over so many messages; returns how many were refused, and how many not."""
    rng, tally = random.Random(seed), [0, 0]
    messages = [message for moment in moments() for message in (moment.genuine, moment.answer)]
    for _ in range(count):
        moment, to_client = rng.choice(moments()), rng.random() < 0.5
        message = changed(moment.genuine if to_client else moment.answer, messages, rng)
        start = time.process_time()
        accepted = moment.to_client(message) if to_client else moment.to_server(message)
        assert time.process_time() - start < SECONDS
        tally[accepted] += 1
    return tally[0], tally[1]


def test_changed_messages_are_refused_and_change_nothing() -> None:
    refused, accepted = fuzz(2000, seed=1)
    assert refused > 10 * accepted > 0


@pytest.mark.thorough
def test_a_hundred_thousand_changed_messages_are_refused_and_change_nothing() -> None:
    refused, accepted = fuzz(100_000, seed=2)
    assert refused > 10 * accepted > 0


def test_rounds_end_well_after_all_that() -> None:
    fuzz(200, seed=3)
    for moment in moments():
        current = moment.current.copied()
        current.server.receive(0, current.answer(0))
        current.waiting = current.server.advance()
        found = current.finish()
        assert (found.sums == current.expected(found.survivors)).all()
