"""A changed byte anywhere is refused, or does no harm: the sum is right or there is none."""

from __future__ import annotations

import numpy as np
import pytest

from cpsgd.codec.wire import checksum
from cpsgd.errors import SecureAggregationError
from cpsgd.secagg import Stage, packets

from .rounds import Round, new_round, parameters

STAGES = [Stage.ADVERTISE, Stage.SHARE, Stage.MASK, Stage.CONFIRM, Stage.UNMASK]
VICTIM = 1


def cases() -> list[tuple[Stage, bool, bool]]:
    """Every stage, to the client and to the server, with and without a roster."""
    return [(stage, to_client, signed) for signed in (False, True) for stage in STAGES for to_client in (True, False)]


def resealed(message: bytes) -> bytes:
    """The message with a checksum that fits, as somebody sends it who changes it on purpose."""
    fields = message[: packets.HEADER_BYTES - 4]
    body = message[packets.HEADER_BYTES :]
    return fields + packets._CHECKSUM.pack(checksum(fields, body)) + body


def with_changed_byte(message: bytes, position: int, flip: int) -> bytes:
    changed = bytearray(message)
    changed[position] ^= flip
    return bytes(changed)


def remembered(current: Round) -> bytes:
    """All that the victim knows."""
    state = current.clients[VICTIM]._state
    assert state is not None
    return b"" if state.stage is Stage.ADVERTISE else state.to_bytes()


def deliver(current: Round, to_client: bool, genuine: bytes, changed: bytes) -> bool:
    """Hands over the changed message, and the genuine one if that is refused; says whether it was accepted."""
    server = current.server
    current.collect(frozenset({VICTIM}))
    assert server.missing == {VICTIM}, "only the victim's message is changed"
    accepted = True
    if to_client:
        before = remembered(current)
        try:
            answer = current.answer(VICTIM, changed)
        except SecureAggregationError:
            accepted = False
            assert remembered(current) == before
            answer = current.answer(VICTIM, genuine)
    else:
        answer = changed
    try:
        server.receive(VICTIM, answer)
    except SecureAggregationError:
        accepted = False
        if not to_client:
            server.receive(VICTIM, genuine)
    return accepted


@pytest.mark.parametrize(("stage", "to_client", "signed"), cases())
def test_a_damaged_byte_is_refused_and_changes_nothing(stage: Stage, to_client: bool, signed: bool) -> None:
    current = new_round(parameters(3), signed=signed).until(stage)
    genuine = current.waiting[VICTIM]
    if to_client:
        method = getattr(current.clients[VICTIM], stage.value)
        extra = [current.values[VICTIM]] if stage is Stage.MASK else []
        for position in range(len(genuine)):
            with pytest.raises(SecureAggregationError):
                method(with_changed_byte(genuine, position, 1 << position % 8), *extra)
    else:
        answer = current.answer(VICTIM)
        for position in range(len(answer)):
            with pytest.raises(SecureAggregationError):
                current.server.receive(VICTIM, with_changed_byte(answer, position, 1 << position % 8))
        current.server.receive(VICTIM, answer)
        current.waiting.pop(VICTIM)
    found = current.finish()
    assert found.survivors == (0, 1, 2)
    np.testing.assert_array_equal(found.sums, current.expected((0, 1, 2)))


@pytest.mark.parametrize(("stage", "to_client", "signed"), cases())
def test_a_byte_changed_on_purpose_never_makes_a_wrong_sum(stage: Stage, to_client: bool, signed: bool) -> None:
    started = new_round(parameters(3), signed=signed).until(stage)
    genuine = started.waiting[VICTIM] if to_client else started.answer(VICTIM)
    end = len(genuine)
    if stage is Stage.MASK and not to_client:
        end = packets.HEADER_BYTES  # the integers themselves are the client's choice
    outcomes = set()
    for position in range(end):
        current = started.copied()
        changed = resealed(with_changed_byte(genuine, position, 1 << (position * 5) % 8))
        if changed == genuine:  # only the checksum was changed, and is right again
            continue
        accepted = deliver(current, to_client, genuine, changed)
        if not accepted and position % 16:
            continue  # what was refused left no trace, and most of those rounds would end alike
        try:
            current.waiting = current.server.advance()
            found = current.finish()
        except SecureAggregationError:
            assert accepted, "a refused message must not spoil the round"
            outcomes.add("no sum")
        else:
            outcomes.add("right sum")
            np.testing.assert_array_equal(found.sums, current.expected(found.survivors))
    assert outcomes
