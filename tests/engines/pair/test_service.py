"""Both servers as web applications in this process: refusals, full disks, and errors of our own."""

from __future__ import annotations

import asyncio
import os
import sqlite3
import threading
import time
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.applications import Starlette

from cpsgd.engines.pair import intake, service
from cpsgd.engines.pair.books import Books
from cpsgd.engines.pair.connections import configured
from cpsgd.engines.pair.intake import leader_app
from cpsgd.engines.pair.leader import Leader
from cpsgd.engines.pair.running import free_port
from cpsgd.engines.pair.service import helper_app
from cpsgd.engines.pair.task import check_address
from cpsgd.errors import LedgerBusyError, LedgerError, LedgerStorageError, ParameterError

from .local import Pair

SECRET = "a text of ours"


class Web:
    """Both servers on threads of this process, and a client of each."""

    def __init__(self, pair: Pair) -> None:
        self.pair = pair
        helper = helper_app(pair.helper)
        carried = httpx.ASGITransport(app=helper)
        self.apps = {"leader": leader_app(pair.leader, transport=carried), "helper": helper}
        self.leader, self.helper = (httpx.Client(trust_env=False, timeout=30.0) for _ in range(2))
        own = pair.secrets["collector"]
        self.collector = {"Authorization": f"Bearer {own.collector_token('leader').hex()}"}
        self.helper_collector = {"Authorization": f"Bearer {own.collector_token('helper').hex()}"}

    def post(self, client: int) -> httpx.Response:
        return self.leader.post("/reports", content=self.pair.upload(client).to_bytes())


@pytest.fixture
def web(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Web]:
    monkeypatch.setattr(intake, "_PATIENCE", 1.0)
    monkeypatch.setattr(intake, "_PAUSE", 0.01)
    found = Web(Pair(tmp_path))
    with ExitStack() as stack:
        for client, app in ((found.leader, found.apps["leader"]), (found.helper, found.apps["helper"])):
            client.base_url = httpx.URL(stack.enter_context(served(app)))
            stack.enter_context(client)
        yield found


@contextmanager
def served(app: Starlette) -> Iterator[str]:
    """The application on a port of this machine."""
    port = free_port()
    server = uvicorn.Server(configured(app, port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(timeout=30)


def is_problem(response: httpx.Response, status: int, kind: str) -> bool:
    """Whether it is a problem document of this kind, without any text of ours."""
    assert response.headers["content-type"] == "application/problem+json"
    assert SECRET not in response.text
    assert "Traceback" not in response.text
    found = response.json()
    return (response.status_code, found["status"], found["type"]) == (status, status, f"about:cpsgd:{kind}")


def test_reports_are_accepted_counted_and_repeated(web: Web) -> None:
    uploads = [web.pair.upload(i).to_bytes() for i in range(8)]
    for upload in uploads * 2:
        assert web.leader.post("/reports", content=upload).json() == {"verdict": "accepted"}
    assert web.leader.get("/round").json() == {"round": 0, "rounds": 2, "accepted": 8, "refused": 0, "needed": 8}
    assert "cpsgd_pair_accepted 8" in web.leader.get("/metrics").text
    assert web.helper.get("/").json()["verdicts"] == {"accepted": 8}
    assert web.helper.get("/task").json() == web.pair.task.to_dict()
    for server, headers in ((web.leader, web.collector), (web.helper, web.helper_collector)):
        assert server.post("/rounds/0/close", headers=headers).json()["accepted"] == 8
        first = server.post("/rounds/0/reveal", headers=headers)
        assert (first.status_code, first.content) == (200, server.post("/rounds/0/reveal", headers=headers).content)
    assert is_problem(web.post(9), 409, "round-closed")
    assert web.leader.post("/reports", content=uploads[0]).json() == {"verdict": "accepted"}
    assert web.leader.get("/round").json()["round"] == 1


def test_a_round_is_closed_while_uploads_for_others_wait(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a stranger who never stops sending, for any round, keeps the collector from closing this one."""
    uploads = [web.pair.upload(0, round=round).to_bytes() for round in range(2)]
    reached, leave, read = threading.Event(), threading.Event(), Leader.read

    def slow(self: Leader, batch: list[bytes]) -> object:
        reached.set()
        assert leave.wait(10.0)
        return read(self, batch)

    monkeypatch.setattr(Leader, "read", slow)

    def waits(upload: bytes) -> threading.Thread:
        reached.clear()
        sender = threading.Thread(target=lambda: web.leader.post("/reports", content=upload))
        sender.start()
        assert reached.wait(10.0)
        return sender

    senders = [waits(uploads[1])]
    try:
        for _ in range(2):  # asked again, when the next round is open
            assert web.leader.post("/rounds/0/close", headers=web.collector).status_code == 200
        senders.append(waits(uploads[0]))
        assert is_problem(web.leader.post("/rounds/0/close", headers=web.collector), 503, "busy")
    finally:
        leave.set()
        for sender in senders:
            sender.join()


def test_what_is_refused_is_a_problem_document_and_stores_nothing(web: Web) -> None:
    upload = web.pair.upload(0).to_bytes()
    for wrong in (b"", b"x" * 100, upload[:-1], upload + b"\0", bytes(len(upload))):
        assert is_problem(web.leader.post("/reports", content=wrong), 400, "malformed")
    assert is_problem(web.leader.post("/reports", content=b"x" * 10**6), 400, "malformed")
    assert is_problem(web.leader.get("/nowhere"), 404, "no-such-address")
    assert is_problem(web.leader.get("/reports"), 405, "no-such-address")
    for number in ("x", "1" * 5000):
        assert is_problem(web.helper.post(f"/rounds/{number}/close"), 404, "no-such-address")
    for headers in ({}, {"Authorization": "Bearer x"}, {"Authorization": "Bearer \xe9".encode("latin-1")}):
        for path in ("/rounds/0/close", "/rounds/0/reveal"):
            assert is_problem(web.leader.post(path, headers=headers), 401, "not-authorized")
        assert is_problem(web.helper.post("/verify", headers=headers), 401, "not-authorized")
    assert is_problem(web.leader.post("/rounds/0/reveal", headers=web.collector), 409, "not-now")
    for path in ("/rounds/5/close", f"/rounds/{2**64}/close", f"/rounds/{2**64}/reveal"):
        assert is_problem(web.leader.post(path, headers=web.collector), 409, "not-now")
    # What one server knows of the collector does not open the other's doors.
    for server, other in ((web.helper, "leader"), (web.leader, "helper")):
        known = {"Authorization": f"Bearer {web.pair.secrets[other].collector.hex()}"}
        assert is_problem(server.post("/rounds/0/close", headers=known), 401, "not-authorized")
    peer = {"Authorization": f"Bearer {web.pair.secrets['leader'].peer.hex()}"}
    assert is_problem(web.helper.post("/verify", content=b"x", headers=peer), 400, "malformed")
    for pair in (web.pair.leader, web.pair.helper):
        assert (pair.books.store.round(0).accepted, pair.books.store.round(0).refused) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["leader", "helper"])
def test_a_full_disk_says_busy_and_the_same_bytes_count_once_later(web: Web, role: str) -> None:
    for index in range(7):
        assert web.post(index).status_code == 200
    store = getattr(web.pair, role).books.store
    upload = web.pair.upload(7).to_bytes()
    # The database may not grow any more, and the table has no room left: SQLite then fails as on a full disk.
    run = store._connection.execute
    run(f"PRAGMA max_page_count = {run('PRAGMA page_count').fetchone()[0] + 2}")
    rows = ((os.urandom(16), os.urandom(32)) for _ in range(10_000))
    with pytest.raises(sqlite3.OperationalError, match="full"):
        deque((run("INSERT INTO reports VALUES (?, 9, NULL, ?, 1)", row) for row in rows), maxlen=0)
    assert is_problem(web.leader.post("/reports", content=upload), 503, "busy")
    run("PRAGMA max_page_count = 1000000")
    assert web.leader.post("/reports", content=upload).json() == {"verdict": "accepted"}
    for each in (web.pair.leader, web.pair.helper):
        assert each.books.store.round(0).accepted == 8


def test_errors_of_our_own_show_nothing(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError(SECRET)

    with monkeypatch.context() as patch:
        patch.setattr(web.pair.leader.books.store, "round", fail)
        patch.setattr(web.pair.leader.books.store, "rounds", fail)
        assert is_problem(web.leader.get("/round"), 500, "failed")
        assert is_problem(web.leader.get("/"), 500, "failed")
        assert is_problem(web.leader.get("/metrics"), 500, "failed")
    with monkeypatch.context() as patch:
        patch.setattr(web.pair.leader, "evaluate", fail)
        assert is_problem(web.post(0), 500, "failed")
    with monkeypatch.context() as patch:
        patch.setattr("cpsgd.engines.pair.leader.open_leader", fail)
        assert is_problem(web.post(0), 400, "malformed")
    with monkeypatch.context() as patch:
        patch.setattr("cpsgd.engines.pair.helper.verify", fail)
        assert is_problem(web.post(0), 422, "unreadable")
    # And the service goes on.
    assert web.post(0).json() == {"verdict": "accepted"}
    with monkeypatch.context() as patch:
        patch.setattr(Books, "close", fail)
        assert is_problem(web.leader.post("/rounds/0/close", headers=web.collector), 500, "failed")
    assert web.leader.post("/rounds/0/close", headers=web.collector).json()["accepted"] == 1


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [(LedgerBusyError, 503, "busy"), (LedgerStorageError, 503, "busy"), (LedgerError, 402, "budget")],
)
def test_a_ledger_that_is_busy_is_asked_again_and_one_that_does_not_pay_is_not(
    web: Web, error: type[LedgerError], status: int, kind: str
) -> None:
    def charge(round: int, accepted: int, reports: bytes) -> None:
        raise error(SECRET)

    web.pair.send(*[web.pair.upload(i) for i in range(8)])
    books = web.pair.helper.books
    books.charge = charge
    books.close(0)
    assert is_problem(web.helper.post("/rounds/0/reveal", headers=web.helper_collector), status, kind)
    assert books.store.answer(0) is None


def test_a_collector_that_vanished_between_two_closes_costs_no_report(web: Web) -> None:
    upload = web.pair.upload(0, round=1).to_bytes()
    assert web.leader.post("/rounds/0/close", headers=web.collector).status_code == 200
    assert is_problem(web.leader.post("/reports", content=upload), 503, "busy")
    app = leader_app(web.pair.leader, transport=httpx.ASGITransport(app=web.apps["helper"]))
    with served(app) as url, httpx.Client(base_url=url, trust_env=False) as again:  # it restores the upload
        assert again.post("/rounds/0/close", headers=web.collector).status_code == 200
        assert web.helper.post("/rounds/0/close", headers=web.helper_collector).status_code == 200
        assert web.leader.post("/reports", content=upload).json() == {"verdict": "accepted"}


def test_requests_of_the_leader_that_never_end_leave_the_helper_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A leader that is cut off, or hostile, leaves requests half sent."""
    monkeypatch.setattr(service, "_REQUEST_SECONDS", 0.2)
    monkeypatch.setattr(service, "_REQUESTS", 2)
    pair = Pair(tmp_path)
    request = pair.leader.evaluate([pair.prepared(pair.upload(0))])
    never = asyncio.Event()

    async def half() -> AsyncIterator[bytes]:
        yield request[:10]
        await never.wait()

    async def ask() -> list[int]:
        headers = {"Authorization": f"Bearer {pair.secrets['helper'].peer.hex()}"}
        transport = httpx.ASGITransport(app=helper_app(pair.helper))
        async with httpx.AsyncClient(transport=transport, base_url="http://b", headers=headers) as client:
            halves = [client.post("/verify", content=half()) for _ in range(3)]
            found = [response.status_code for response in await asyncio.gather(*halves)]
            return [*found, (await client.post("/verify", content=request)).status_code]

    assert asyncio.run(ask()) == [408, 408, 503, 200]


def test_a_helper_that_answers_nonsense_is_asked_again(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = web.pair.upload(0).to_bytes()
    verify, asked = web.pair.helper.verify, []

    def nonsense(request: bytes) -> bytes:
        asked.append(request)
        return verify(request) if len(asked) > 2 else b"\1\1\1"

    monkeypatch.setattr(web.pair.helper, "verify", nonsense)
    assert web.leader.post("/reports", content=upload).json() == {"verdict": "accepted"}
    assert len(asked) == 3
    assert len(set(asked)) == 1
    assert web.pair.helper.books.store.round(0).accepted == 1


@pytest.mark.parametrize("url", ["http://phones.example", "http://10.0.0.1:80", "127.0.0.1:1", "file:///x", ""])
def test_addresses_that_show_secrets_are_refused(url: str) -> None:
    with pytest.raises(ParameterError):
        check_address(url)
    for good in ("https://phones.example", "http://127.0.0.1:1", "http://[::1]:5", "http://localhost"):
        assert check_address(good) == good
    assert check_address("http://phones.example", insecure=True)


def test_uploads_that_never_end_take_bounded_memory_and_time(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that sends a head and then nothing is answered, and is not waited for for ever."""
    monkeypatch.setattr(intake, "_SENDING", 0.2)
    monkeypatch.setattr(intake, "_SLOWEST", 1 << 20)
    upload = web.pair.upload(0).to_bytes()

    def slowly() -> Iterator[bytes]:
        yield upload[:100]
        time.sleep(1.0)
        yield upload[100:]

    assert is_problem(web.leader.post("/reports", content=slowly()), 408, "slow")
    assert web.leader.post("/reports", content=upload).json() == {"verdict": "accepted"}


def test_a_damaged_copy_that_is_being_read_does_not_take_the_id(web: Web, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = web.pair.upload(0).to_bytes()
    damaged = upload[:-1] + bytes([upload[-1] ^ 1])
    begun, go_on, real = threading.Event(), threading.Event(), Leader.read

    def slow(self: Leader, batch: Any) -> Any:
        begun.set()
        assert go_on.wait(20)
        return real(self, batch)

    monkeypatch.setattr(Leader, "read", slow)
    found: list[int] = []
    thread = threading.Thread(target=lambda: found.append(web.leader.post("/reports", content=damaged).status_code))
    thread.start()
    assert begun.wait(20)
    assert web.leader.post("/reports", content=upload).status_code == 503
    go_on.set()
    thread.join()
    assert found[0] in (400, 422, 503)
    assert web.leader.post("/reports", content=upload).json()["verdict"] == "accepted"
