"""Clients that never finish: silent connections, heads and uploads without end, and more of them than there is room."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from cpsgd.engines.pair import connections, intake
from cpsgd.engines.pair.intake import leader_app
from cpsgd.engines.pair.service import helper_app

from .local import Pair
from .test_service import served

HEAD = b"POST /reports HTTP/1.1\r\nHost: a\r\nContent-Length: 300\r\n\r\n"


@contextmanager
def leader(folder: Path) -> Iterator[tuple[Pair, str]]:
    """A leader on a port of this machine, with its helper in this process."""
    pair = Pair(folder)
    with served(leader_app(pair.leader, transport=httpx.ASGITransport(app=helper_app(pair.helper)))) as url:
        yield pair, url


def connected(url: str) -> socket.socket:
    place = httpx.URL(url)
    return socket.create_connection((place.host, place.port), timeout=20.0)


def ended(connection: socket.socket, piece: bytes = b"", pause: float = 0.02) -> bool:
    """Sends the same piece again and again, until the other end has closed the connection; gives up after 10 s."""
    connection.settimeout(pause)
    deadline = time.monotonic() + 10.0
    while time.monotonic() < deadline:
        try:
            connection.sendall(piece)
            if connection.recv(1 << 16) == b"":
                return True
        except TimeoutError:
            continue
        except OSError:
            return True
    return False


@pytest.mark.parametrize(
    ("first", "piece", "pause"),
    [
        (b"", b"", 0.02),
        (b"GET /round HTTP/1.1\r\nA: ", b"a", 0.02),
        (b"GET /round HTTP/1.1\r\nA: ", bytes(1 << 18).replace(b"\0", b"a"), 1e-4),
        (b"POST /rounds/0/close HTTP/1.1\r\nContent-Length: 99999999\r\n\r\n", b"a", 0.02),
        (b"GET /round HTTP/1.1\r\n\r\n", b"GET /round HTTP/1.1\r\n\r\n" * 500, 1e-4),
        (b"GET /round HTTP/1.1\r\n", b"a:\r\n" * 20, 1e-4),
    ],
    ids=["silent", "slow head", "endless head", "slow body of a refused request", "requests without end", "headers"],
)
def test_connections_without_a_request_are_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes, piece: bytes, pause: float
) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with leader(tmp_path) as (_, url), closing(connected(url)) as connection:
        connection.sendall(first)
        assert ended(connection, piece, pause)
        assert httpx.get(f"{url}/round", trust_env=False).status_code == 200


def test_what_one_connection_sends_at_once_becomes_few_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A megabyte of short headers took 25 MB of a server's memory, on each of 4,096 connections."""
    most = {"headers": 0, "pipeline": 0}
    received = connections.PatientConnection.data_received

    def watched(self: connections.PatientConnection, data: bytes) -> None:
        received(self, data)
        for name in most:
            most[name] = max(most[name], len(getattr(self, name) or ()))

    monkeypatch.setattr(connections.PatientConnection, "data_received", watched)
    with leader(tmp_path) as (_, url):
        for sent in (b"GET /round HTTP/1.1\r\n" + b"a:\r\n" * 10_000, b"GET /round HTTP/1.1\r\n\r\n" * 1_000):
            with closing(connected(url)) as connection, suppress(OSError):
                connection.sendall(sent)
                assert ended(connection)
    assert most == {"headers": 100, "pipeline": 8}


def test_a_connection_that_does_not_read_its_answer_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    lost, forget = threading.Event(), HttpToolsProtocol.connection_lost

    def ending(self: HttpToolsProtocol, error: Exception | None) -> None:
        lost.set()
        forget(self, error)

    monkeypatch.setattr(HttpToolsProtocol, "connection_lost", ending)
    page = Route("/", lambda request: Response(bytes(1 << 23)))
    with served(Starlette(routes=[page])) as url, closing(connected(url)) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n" * 2)
        assert lost.wait(10.0)


def test_a_connection_that_is_used_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)
    with leader(tmp_path) as (_, url), closing(connected(url)) as connection:
        for _ in range(8):
            connection.sendall(b"GET /round HTTP/1.1\r\nHost: a\r\nContent-Length: 200000\r\n\r\n" + bytes(200_000))
            assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
            time.sleep(0.1)


def test_more_connections_than_there_is_room_for_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST_CONNECTIONS", 3)
    with leader(tmp_path) as (_, url):
        with ExitStack() as stack:
            for _ in range(3):
                stack.enter_context(closing(connected(url)))
            assert ended(stack.enter_context(closing(connected(url))))
        deadline, status = time.monotonic() + 10.0, 0
        while status != 200 and time.monotonic() < deadline:
            with suppress(httpx.HTTPError):
                status = httpx.get(f"{url}/round", trust_env=False).status_code
        assert status == 200


def test_slow_uploads_give_way_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "_SENDING", 1.0)
    monkeypatch.setattr(intake, "_SLOWEST", 10)
    monkeypatch.setattr(intake, "_WAITING", 1)
    monkeypatch.setattr(intake, "_BATCH", 1)
    with leader(tmp_path) as (pair, url), ExitStack() as stack:
        slow = [stack.enter_context(closing(connected(url))) for _ in range(2)]
        for each in slow:
            each.sendall(HEAD + b"some")
        time.sleep(0.2)
        upload = pair.upload(0).to_bytes()
        found = httpx.post(f"{url}/reports", content=upload, trust_env=False)
        assert (found.status_code, found.headers["retry-after"]) == (503, "2")
        time.sleep(1.0)
        assert httpx.post(f"{url}/reports", content=upload, trust_env=False).json() == {"verdict": "accepted"}
        assert slow[0].recv(1 << 16).startswith(b"HTTP/1.1 408")


def test_a_flood_is_answered_within_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """More uploads at once than may wait: each is accepted or told to come again, and none is lost or counted twice."""
    monkeypatch.setattr(intake, "_WAITING", 1)
    monkeypatch.setattr(intake, "_BATCH", 1)
    with leader(tmp_path) as (pair, url):
        uploads, verdicts = [pair.upload(client).to_bytes() for client in range(10)], []

        def send(upload: bytes) -> None:
            for _ in range(200):
                found = httpx.post(f"{url}/reports", content=upload, trust_env=False, timeout=30.0)
                verdicts.append(found.status_code)
                if found.status_code == 200:
                    return
                time.sleep(0.01)

        threads = [threading.Thread(target=send, args=(each,)) for each in uploads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert set(verdicts) == {200, 503}
        assert verdicts.count(200) == len(uploads)
        assert pair.leader.books.store.round(0).accepted == len(uploads)
