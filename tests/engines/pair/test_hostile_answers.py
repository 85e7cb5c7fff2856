"""Answers of a hostile server: of any length, speed and type, they are bounded and refused by an error of ours."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import httpx
import pytest

from cpsgd.engines.pair import intake, parties
from cpsgd.engines.pair.intake import Intake
from cpsgd.engines.pair.parties import Collector, Sender
from cpsgd.errors import MessageError, RoundRefusedError, TransportError

from .local import Pair


class Endless(httpx.SyncByteStream, httpx.AsyncByteStream):
    """An answer that does not end, and counts the pieces that were taken."""

    taken = 0

    def __iter__(self) -> Iterator[bytes]:
        while self.taken < 1000:
            self.taken += 1
            yield bytes(1 << 16)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self:
            await asyncio.sleep(0)
            yield piece


def answering(answer: Callable[[], httpx.Response]) -> httpx.MockTransport:
    return httpx.MockTransport(lambda request: answer())


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@pytest.mark.parametrize("status", [200, 409])
def test_an_endless_answer_is_not_read(pair: Pair, status: int) -> None:
    stream = Endless()
    with Sender(pair.task) as sender, Collector(pair.task, pair.secrets["collector"]) as collector:
        transport = answering(lambda: httpx.Response(status, stream=stream))
        sender._client = collector._servers[0] = httpx.Client(transport=transport, base_url="http://a")
        for ask in (sender.open_round, lambda: sender.deliver(b""), collector.progress, lambda: collector.collect(0)):
            with pytest.raises(TransportError, match="more than"):
                ask()
    assert stream.taken <= 8


def test_an_answer_that_drips_is_given_up(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parties, "_LONGEST", -1.0)
    with Sender(pair.task) as sender:
        sender._client = httpx.Client(
            transport=answering(lambda: httpx.Response(200, stream=Once(b"{"))), base_url="http://a"
        )
        with pytest.raises(TransportError, match="too long"):
            sender.open_round()


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 60_000,
        b'{"round": ' + b"9" * 5000 + b"}",
        b"\xff",
        gzip.compress(b'{"round": 0}', mtime=0),
        b"null",
        b'{"round": NaN}',
        b'{"round": true}',
        b'{"round": 0, "accepted": "many", "verdict": ["accepted"]}',
        b'{"round": 0, "accepted": NaN}',
        b'{"round": 0}',
    ],
    ids=lambda body: repr(body[:20]),
)
def test_answers_of_another_type_are_refused(pair: Pair, body: bytes) -> None:
    headers = {"Content-Encoding": "gzip"} if body.startswith(b"\x1f") else {}
    client = httpx.Client(transport=answering(lambda: httpx.Response(200, headers=headers, stream=Once(body))))
    client.base_url = httpx.URL("http://a")
    with Sender(pair.task) as sender, Collector(pair.task, pair.secrets["collector"]) as collector:
        sender._client = collector._servers[0] = client
        with pytest.raises(TransportError):
            sender.deliver(b"")
        if not body.startswith(b'{"round": 0'):
            with pytest.raises((TransportError, RoundRefusedError)):
                sender.open_round()
        else:
            with pytest.raises(TransportError, match="counts"):
                collector.wait(0, count=1, seconds=5.0)


class Once(httpx.SyncByteStream):
    """An answer as it is on the wire."""

    def __init__(self, body: bytes) -> None:
        self._body = body

    def __iter__(self) -> Iterator[bytes]:
        yield self._body


def test_the_leader_reads_no_more_of_the_helpers_answer_than_verdicts(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = Endless()

    async def ask() -> None:
        transport = answering(lambda: httpx.Response(200, stream=stream))
        async with httpx.AsyncClient(transport=transport, base_url="http://b") as client:
            asked = Intake(pair.leader, client)
            with pytest.raises(MessageError, match="longer"):
                await asked._answer(b"", 3)
            monkeypatch.setattr(intake, "_LONGEST_ANSWER", -1.0)
            with pytest.raises(TimeoutError):
                await asked._answer(b"", 1 << 40)

    asyncio.run(ask())
    assert stream.taken <= 2
