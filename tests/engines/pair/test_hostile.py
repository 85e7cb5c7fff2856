"""Thousands of hostile requests to both servers as processes, while honest clients send: refusals are typed."""

from __future__ import annotations

import http.client
import json
import threading
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from cpsgd.engines.pair.parties import Collector, Sender

from .local import CLIENTS, DIM
from .processes import Servers, servers

pytestmark = pytest.mark.slow
REQUESTS, THREADS, HONEST = 3_000, 8, 9
PLACES = (
    "/reports",
    "/verify",
    "/rounds/0/close",
    "/rounds/0/reveal",
    "/rounds/-1/close",
    "/",
    "/nowhere",
    "/%2e%2e/x",
)


def hostile(running: Servers, seed: int, templates: list[bytes], found: list[str]) -> None:
    """Sends its share of the requests over connections that stay open, and notes what is wrong with the answers."""
    generator = np.random.default_rng(seed)
    connections = [
        http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)
        for place in map(urlsplit, (running.task.leader.url, running.task.helper.url))
    ]
    for _ in range(REQUESTS // THREADS):
        body = bytearray(templates[generator.integers(len(templates))])
        kind = generator.integers(6)
        if kind == 0:
            body[generator.integers(len(body))] ^= 1 << int(generator.integers(8))
        elif kind == 1:
            del body[generator.integers(len(body)) :]
        elif kind == 2:
            body += generator.bytes(int(generator.integers(2_000)))
        elif kind == 3:
            body[16:32] = generator.bytes(16)
        elif kind == 4:
            body = bytearray(generator.bytes(int(generator.integers(3_000))))
        method = ("POST", "POST", "POST", "GET", "PUT")[generator.integers(5)]
        headers = [{}, {"Authorization": "Bearer " + "0" * 64}, {"Content-Type": "text/html"}][generator.integers(3)]
        connection = connections[generator.integers(2)]
        try:
            connection.request(method, PLACES[generator.integers(len(PLACES))], bytes(body), headers)
            answer = connection.getresponse()
            text = answer.read()
        except (http.client.HTTPException, OSError) as error:
            found.append(f"no answer: {error!r}")
            connection.close()
            continue
        if answer.status == 200:
            # Only what is public, and the same bytes that were accepted before or are accepted now.
            json.loads(text)
        elif answer.status not in (400, 401, 404, 405, 409, 422, 503):
            found.append(f"status {answer.status}")
        elif (
            answer.getheader("content-type") != "application/problem+json"
            or json.loads(text)["status"] != answer.status
        ):
            found.append(f"no problem document: {text[:100]!r}")
    for connection in connections:
        connection.close()


def test_hostile_requests_change_nothing_and_hear_typed_refusals(tmp_path: Path) -> None:
    with servers(tmp_path) as running:
        with Sender(running.task) as sender:
            honest = [sender.prepare([0.1] * DIM, 0) for _ in range(HONEST)]
        found: list[str] = []
        # The last honest upload is nobody's to send but its client's: the others are replayed, whole and damaged.
        threads = [
            threading.Thread(target=hostile, args=(running, seed, honest[:-1], found)) for seed in range(THREADS)
        ]
        for thread in threads:
            thread.start()
        with Sender(running.task) as sender:
            for upload in honest:
                assert sender.deliver(upload) == "accepted"
        for thread in threads:
            thread.join()
        assert found == []
        with Collector(running.task, running.secrets["collector"]) as collector:
            mean, count = collector.collect(0)
        assert HONEST <= CLIENTS
        assert count == HONEST
        assert np.isfinite(mean).all()
        for role in ("leader", "helper"):
            assert "Traceback" not in (tmp_path / f"{role}.log").read_text()
