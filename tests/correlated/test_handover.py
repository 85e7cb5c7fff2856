"""Who hands a lineage to whom: of those that are there, those that leave and hold one, to those that come."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from cpsgd.correlated.batons import Place
from cpsgd.correlated.handover import Handing, Handover, HandoverStep, read_answer
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import BatonError, VersionError


def asked(exchange: object) -> dict[str, HandoverStep]:
    return {node: Handover.from_bytes(data, "run").step for node, data in exchange.requests().items()}  # type: ignore[attr-defined]


def answer_to(asked: Handover) -> bytes:
    lengths = {HandoverStep.KEY: 32, HandoverStep.GIVE: asked.place.baton_bytes, HandoverStep.TAKE: 0}
    return b"cpsh\x01" + bytes([asked.step]) + bytes(lengths[asked.step])


def reader(asked: Handover) -> Callable[[bytes], object]:
    return lambda data: read_answer(data, asked)


def test_whoever_leaves_with_a_lineage_hands_it_to_whoever_comes() -> None:
    handing: Handing[str] = Handing("run", bytes(16), bands=3)
    assert handing.before(1, "abcd", "ab") == []
    handing.trained("ab", 1)
    # c has no lineage to give, b stays, and a is not to be found.
    assert handing.before(2, "bcd", "bd") == []
    assert handing.before(2, "abc", "ab") == []
    key, give, take = handing.before(2, "cabd", "bd")
    assert asked(key) == {"d": HandoverStep.KEY}
    key.receive("d", b"cpsh\x01\x00" + bytes(range(32)))
    key.close()
    assert asked(give) == {"a": HandoverStep.GIVE}
    # After three rounds a lineage has nothing left that a later round takes away; a may have handed its own on.
    assert handing.before(3, "abcd", "cd") != []
    assert handing.before(4, "abcd", "cd") == []
    # Nobody has answered this step: there is no baton to be taken.
    give.close()
    assert asked(take) == {}


@pytest.mark.parametrize("step", HandoverStep)
def test_what_no_peer_sends_is_refused(step: HandoverStep) -> None:
    """Requests and answers of another version, cut short, or too long."""
    place = Place("run", bytes(16), bands=3, round=2, lineage=1)
    body = bytes({HandoverStep.KEY: 0, HandoverStep.GIVE: 32, HandoverStep.TAKE: place.baton_bytes}[step])
    asked = Handover(step, place, body)
    reply = answer_to(asked)
    for data, read in ((asked.to_bytes(), lambda data: Handover.from_bytes(data, "run")), (reply, reader(asked))):
        read(data)
        for size in range(len(data)):
            with pytest.raises(BatonError):
                read(data[:size])
        with pytest.raises(BatonError):
            read(data + b"\0")
        with pytest.raises(BatonError, match=r"first four bytes|Not an answer about"):
            read(b"cpsx" + data[4:])
        for version in (0, 2):
            for end in (5, len(data)):
                with pytest.raises(VersionError, match=f"version {version}"):
                    read(data[:4] + bytes([version]) + data[5:end])


def test_where_nothing_is_handed_on_nobody_is_asked() -> None:
    mechanism = CorrelatedGaussian(
        noise_deviation=8.0, step=0.25, window=512, coordinate_range=0.5, bands=3, run_length=10, untrusted_holders=None
    )
    assert mechanism.memory.handing("run", bytes(16)) is None
    assert isinstance(replace(mechanism, untrusted_holders=0).memory.handing("run", bytes(16)), Handing)
