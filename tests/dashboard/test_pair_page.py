"""The page of two servers: nothing is asked that was not named, and what servers answer is checked."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from cpsgd.dashboard import pages, pair_page
from cpsgd.dashboard.pair_page import PairWatch, checked
from cpsgd.engines.pair.progress import Figures
from cpsgd.engines.pair.task import PairTask, create_task
from cpsgd.errors import DataError
from tests.dashboard.clients import Client
from tests.dashboard.parsed import check_harmless
from tests.engines.pair.local import Pair, protocol

HOSTILE = "<script>window.hacked=1</script>"


@contextmanager
def answering(*answers: Callable[[], bytes]) -> Iterator[list[str]]:
    """Web servers that answer anything with these bytes; their addresses."""

    def handler(answer: Callable[[], bytes]) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                data = answer()
                self.send_response(200)
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    running = [ThreadingHTTPServer(("127.0.0.1", 0), handler(answer)) for answer in answers]
    threads = [threading.Thread(target=server.serve_forever) for server in running]
    for thread in threads:
        thread.start()
    try:
        yield [f"http://127.0.0.1:{server.server_port}" for server in running]
    finally:
        for server, thread in zip(running, threads, strict=True):
            server.shutdown()
            thread.join()
            server.server_close()


def progress(pair: Pair, role: str) -> dict[str, Any]:
    found = Figures().progress((pair.leader if role == "leader" else pair.helper).books)
    return dict(json.loads(json.dumps(found)))


def page(task: PairTask) -> str:
    shown = asyncio.run(PairWatch(task).look())
    return pages.render("pair.html", tab="pair", **shown)


def test_what_a_server_says_is_what_is_shown(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(8)))
    good = progress(pair, "leader")
    assert checked(good, pair.task, "leader")["states"] == [
        {"round": 0, "state": "open", "accepted": 8, "refused": 0},
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"task": "0" * 32},
        {"role": "helper"},
        {"round": -1},
        {"round": 2},
        {"round": True},
        {"states": None},
        {"states": [{"round": 0, "state": HOSTILE, "accepted": 0, "refused": 0}]},
        {"states": [{"round": 0, "state": "open", "accepted": HOSTILE, "refused": 0}]},
        {"states": [{"round": 0, "state": "open", "accepted": 1}] * 101},
        {"states": [[]]},
        {"verdicts": {HOSTILE: 1}},
        {"verdicts": {"accepted": 10**30}},
        {"verdicts": []},
        {"waiting": None},
        {"per_second": float("nan")},
        {"busy_seconds": float("inf")},
        {"seconds": "1"},
    ],
)
def test_answers_that_no_server_gives_are_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    pair = Pair(tmp_path)
    with pytest.raises(DataError):
        checked({**progress(pair, "leader"), **change}, pair.task, "leader")
    with pytest.raises(DataError):
        checked([], pair.task, "leader")


def test_hostile_servers_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair_page, "_PATIENCE", 1.0)
    endless, stop = b"[" * (1 << 20), threading.Event()

    def silent() -> bytes:
        stop.wait(10.0)
        return b""

    pairs: list[tuple[Callable[[], bytes], Callable[[], bytes]]] = [
        (lambda: endless, lambda: HOSTILE.encode()),
        (lambda: b"[" * 60_000, silent),
    ]
    said = [("too long", "not JSON"), ("not JSON", "does not answer")]
    for answers, words in zip(pairs, said, strict=True):
        stop.clear()
        with answering(*answers) as (leader, helper):
            task, _ = create_task(protocol(), leader=leader, helper=helper, rounds=2)
            text = page(task)
            stop.set()
        check_harmless(text)
        assert HOSTILE not in text
        for word in words:
            assert word in text


def test_servers_that_closed_a_round_with_other_counts_are_named(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    pair.send(*(pair.upload(i) for i in range(8)))
    pair.helper.verify(pair.leader.evaluate([pair.prepared(pair.upload(8))]))
    for books in (pair.leader.books, pair.helper.books):
        books.close(0)
    both = {role: progress(pair, role) for role in ("leader", "helper")}
    with answering(*((lambda role=role: json.dumps(both[role]).encode()) for role in both)) as (leader, helper):  # type: ignore[misc]
        task, _ = create_task(protocol(), leader=leader, helper=helper, rounds=2)
        for each in both.values():
            each["task"] = task.id.hex()
        text = page(task)
    assert "other numbers of reports" in text
    assert "round 2 of 2: 0 reports of at least 8" in text


def test_http_to_other_machines_is_not_asked() -> None:
    task, _ = create_task(protocol(), leader="http://phones.example", helper="ftp://a", rounds=2)
    text = page(task)
    assert "is not encrypted" in text
    assert "begins with https" in text


def test_without_a_task_nobody_is_asked(client: Client, folder: Path) -> None:
    """A folder may be hostile: a task in it is not a reason to send requests."""
    task, _ = create_task(protocol(), leader="http://127.0.0.1:1", helper="http://127.0.0.1:2", rounds=2)
    (folder / "task.json").write_text(json.dumps(task.to_dict()))
    assert "cpsgd dashboard --pair task.json" in client.get("/pair").text
    assert "done" in client.get("/pair/events").text
