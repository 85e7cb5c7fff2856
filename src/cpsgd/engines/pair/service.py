"""The servers as web applications (Starlette). Refusals are problem documents (RFC 9457) without details of ours.

| address | who | what |
|---|---|---|
| `GET /task` | anybody, both servers | the task's file |
| `GET /round` | anybody, both | the open round, with counts |
| `GET /metrics` | anybody, both | figures as Prometheus text |
| `GET /` | anybody, both | progress for people |
| `POST /reports` | clients, leader | one upload; the answer is its verdict |
| `POST /verify` | the leader, helper | a batch of evaluations; the answer is a verdict for each |
| `POST /rounds/N/close`, `POST /rounds/N/reveal` | the collector, both | ends a round; gives this server's sum |
"""

from __future__ import annotations

import asyncio
import hmac
import html
import json
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cpsgd.engines.pair.servers import Books, Helper, Leader, Prepared, RefusedReportError
from cpsgd.engines.pair.store import Verdict
from cpsgd.errors import CpsgdError, EmptyError, LedgerError, MessageError, StageError, ThresholdError
from cpsgd.secagg.pair.upload import upload_bytes

logger = logging.getLogger("cpsgd.pair")

_BATCH = 128
_WAITING = 2048
# Seconds: before a client is told to ask again, and between two tries to reach the helper.
_PATIENCE, _PAUSE, _LONGEST_PAUSE = 30.0, 0.2, 10.0
_REQUEST_BYTES = 1 << 28

Handler = Callable[[Request], Awaitable[Response]]


def problem(status: int, kind: str, title: str, **more: object) -> Response:
    """Returns a problem document."""
    body = {"type": f"about:cpsgd:{kind}", "title": title, "status": status, **more}
    headers = {"Retry-After": "2"} if status == 503 else None
    return Response(json.dumps(body), status, headers, "application/problem+json")


def verdict_response(verdict: Verdict) -> Response:
    """Returns what a client hears about its report."""
    if verdict is Verdict.ACCEPTED:
        return JSONResponse({"verdict": "accepted"})
    kind = verdict.name.lower().replace("_", "-")
    status = 409 if verdict in (Verdict.ROUND_CLOSED, Verdict.SENT_BEFORE, Verdict.REUSED_ID) else 422
    return problem(status, kind, f"The report is refused: {kind.replace('-', ' ')}.", verdict=kind)


async def body_of(request: Request, most: int) -> bytes:
    """Reads a request's body.

    Raises:
        MessageError: It is longer than it may be.
    """
    declared = request.headers.get("content-length", "0")
    if not declared.isdigit() or int(declared) > most:
        raise MessageError(f"Expected at most {most} bytes.")
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise MessageError(f"Expected at most {most} bytes.")
    return bytes(found)


@dataclass
class Figures:
    """Counters of this process."""

    verdicts: Counter[str] = field(default_factory=Counter)
    waiting: int = 0
    seconds: float = 0.0

    def text(self, books: Books) -> str:
        """Returns the figures as Prometheus reads them."""
        number = min(books.current, books.task.rounds - 1)
        state = books.store.round(number)
        lines = [
            "# TYPE cpsgd_pair_round gauge",
            f"cpsgd_pair_round {books.current}",
            "# TYPE cpsgd_pair_accepted gauge",
            f"cpsgd_pair_accepted {state.accepted}",
            "# TYPE cpsgd_pair_refused gauge",
            f"cpsgd_pair_refused {state.refused}",
            "# TYPE cpsgd_pair_waiting gauge",
            f"cpsgd_pair_waiting {self.waiting}",
            "# TYPE cpsgd_pair_busy_seconds counter",
            f"cpsgd_pair_busy_seconds {self.seconds:.6f}",
            "# TYPE cpsgd_pair_reports counter",
            *(f'cpsgd_pair_reports{{verdict="{name}"}} {count}' for name, count in sorted(self.verdicts.items())),
        ]
        return "\n".join(lines) + "\n"


class Service:
    """What both servers answer."""

    def __init__(self, books: Books, settled: Callable[[int], Awaitable[bool]] | None = None) -> None:
        """Prepares the answers; `settled` is asked before a round is closed, and closes it to new reports."""
        self.books, self.figures, self._settled = books, Figures(), settled

    def routes(self) -> list[Route]:
        """Returns the addresses that both have."""
        collector = self.books.secrets.collector
        return [
            Route("/", self.page, methods=["GET"]),
            Route("/task", self.task, methods=["GET"]),
            Route("/round", self.round, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/rounds/{round:int}/close", self.guarded(self.close, collector), methods=["POST"]),
            Route("/rounds/{round:int}/reveal", self.guarded(self.reveal, collector), methods=["POST"]),
        ]

    def guarded(self, handler: Handler, secret: bytes) -> Handler:
        """Lets only those in who show a secret; turns refusals into problem documents."""

        async def guard(request: Request) -> Response:
            shown = request.headers.get("authorization", "")
            if not hmac.compare_digest(shown.encode(), f"Bearer {secret.hex()}".encode()):
                return problem(401, "not-authorized", "This address is for another party of the task.")
            return await refusing(handler)(request)

        return guard

    async def task(self, request: Request) -> Response:
        """The task's file."""
        return JSONResponse(self.books.task.to_dict())

    async def round(self, request: Request) -> Response:
        """The open round and its counts; null after the last."""
        books = self.books
        if books.current >= books.task.rounds:
            return JSONResponse({"round": None, "rounds": books.task.rounds})
        state = await run_in_threadpool(books.store.round, books.current)
        counts = {"accepted": state.accepted, "refused": state.refused, "needed": books.task.surviving}
        return JSONResponse({"round": state.round, "rounds": books.task.rounds, **counts})

    async def metrics(self, request: Request) -> Response:
        """Figures for Prometheus."""
        return PlainTextResponse(await run_in_threadpool(self.figures.text, self.books))

    async def page(self, request: Request) -> Response:
        """Progress for people."""
        books = self.books
        number = min(books.current, books.task.rounds - 1)
        state = await run_in_threadpool(books.store.round, number)
        share = min(1.0, state.accepted / books.task.surviving)
        rows = {
            "task": books.task.id.hex(),
            "round": f"{number + 1} of {books.task.rounds}, {state.state}",
            "accepted": f"{state.accepted:,} of at least {books.task.surviving:,}",
            "refused": f"{state.refused:,}",
            "waiting": f"{self.figures.waiting:,}",
            "protects": str(books.task.protocol.promise),
        }
        table = "".join(f"<tr><th>{html.escape(k)}<td>{html.escape(v)}" for k, v in rows.items())
        return HTMLResponse(
            "<!doctype html><html lang=en><meta charset=utf-8><meta http-equiv=refresh content=2>"
            "<meta name=viewport content='width=device-width'><title>cpsgd pair</title>"
            "<style>body{font:16px system-ui;max-width:42em;margin:2em auto;padding:0 1em;color-scheme:light dark}"
            "th{text-align:left;padding-right:1em}progress{width:100%}</style>"
            f"<h1>{books.role}</h1><progress value={share:.4f}></progress><table>{table}</table></html>"
        )

    async def close(self, request: Request) -> Response:
        """Ends a round."""
        if self._settled is not None and not await self._settled(request.path_params["round"]):
            return problem(503, "busy", "Reports are on their way; ask again.")
        state = await run_in_threadpool(self.books.close, request.path_params["round"])
        return JSONResponse({"round": state.round, "accepted": state.accepted, "refused": state.refused})

    async def reveal(self, request: Request) -> Response:
        """This server's sum of a round."""
        answer = await run_in_threadpool(self.books.reveal, request.path_params["round"])
        return Response(answer, media_type="application/octet-stream")


def refusing(handler: Handler) -> Handler:
    """Turns what is refused into problem documents; an error of ours becomes one without any text of ours."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedReportError as refusal:
            return verdict_response(refusal.verdict)
        except MessageError:
            return problem(400, "malformed", "The message is malformed, or not for this task.")
        except (StageError, ThresholdError, EmptyError) as error:
            return problem(409, "not-now", str(error))
        except LedgerError:
            return problem(402, "budget", "The privacy budget does not pay for this round.")
        except CpsgdError:
            logger.exception("A request failed.")
            return problem(500, "failed", "The request failed; the server's log says why.")

    return answer


# ------------------------------------------------------------------ the helper


def helper_app(helper: Helper) -> Starlette:
    """Returns the helper as a web application."""
    service = Service(helper.books)

    async def verify(request: Request) -> Response:
        data = await body_of(request, _REQUEST_BYTES)
        start = time.perf_counter()
        verdicts = await run_in_threadpool(helper.verify, data)
        service.figures.seconds += time.perf_counter() - start
        service.figures.verdicts.update(Verdict(code).name.lower() for code in verdicts)
        return Response(verdicts, media_type="application/octet-stream")

    guarded = service.guarded(verify, helper.books.secrets.peer)
    return Starlette(routes=[*service.routes(), Route("/verify", guarded, methods=["POST"])])


# ------------------------------------------------------------------ the leader


class Intake:
    """Takes uploads in, gathers them into batches, and asks the helper about each batch."""

    def __init__(self, leader: Leader, client: httpx.AsyncClient) -> None:
        self.books = leader.books
        self.service = Service(self.books, self.settled)
        self.figures = self.service.figures
        self.leader, self._client = leader, client
        self._queue: asyncio.Queue[tuple[Prepared, asyncio.Future[Verdict]]] = asyncio.Queue()
        self._waiting: dict[bytes, tuple[bytes, asyncio.Future[Verdict]]] = {}
        self._closing: set[int] = set()

    async def report(self, request: Request) -> Response:
        """Takes one upload, and answers when both servers have decided."""
        if len(self._waiting) >= _WAITING:
            return problem(503, "busy", "The servers are busy; send the same bytes again in a moment.")
        data = await body_of(request, upload_bytes(self.books.task.shape(0), tokens=self.books.tokens))
        prepared = await run_in_threadpool(self.leader.read, data)
        if isinstance(prepared, Verdict):
            return verdict_response(prepared)
        if prepared.upload.round in self._closing:
            return verdict_response(Verdict.ROUND_CLOSED)
        future = self._enqueue(prepared)
        try:
            return verdict_response(await asyncio.wait_for(asyncio.shield(future), _PATIENCE))
        except TimeoutError:
            return problem(503, "busy", "The servers are busy; send the same bytes again in a moment.")

    def _enqueue(self, prepared: Prepared) -> asyncio.Future[Verdict]:
        """Queues an upload; one that waits already is not queued again, and another with its id is refused."""
        before = self._waiting.get(prepared.upload.id)
        if before is not None:
            if before[0] != prepared.digest:
                raise RefusedReportError(Verdict.REUSED_ID)
            return before[1]
        future: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._waiting[prepared.upload.id] = (prepared.digest, future)
        self._queue.put_nowait((prepared, future))
        self.figures.waiting = len(self._waiting)
        return future

    async def work(self) -> None:
        """Settles batch after batch, for ever; first what was on its way when the leader stopped."""
        for prepared in await run_in_threadpool(self.leader.restore):
            self._enqueue(prepared)
        while True:
            batch = [await self._queue.get()]
            while len(batch) < _BATCH and not self._queue.empty():
                if self._queue._queue[0][0].upload.round != batch[0][0].upload.round:  # type: ignore[attr-defined]
                    break
                batch.append(self._queue.get_nowait())
            uploads = [prepared for prepared, _ in batch]
            start = time.perf_counter()
            verdicts = await self._ask(uploads)
            self.figures.seconds += time.perf_counter() - start
            for (prepared, future), verdict in zip(batch, verdicts, strict=True):
                del self._waiting[prepared.upload.id]
                self.figures.verdicts[verdict.name.lower()] += 1
                if not future.done():
                    future.set_result(verdict)
            self.figures.waiting = len(self._waiting)

    async def _ask(self, batch: list[Prepared]) -> list[Verdict]:
        """Asks the helper until it answers, and puts the verdicts on record."""
        request = await run_in_threadpool(self.leader.evaluate, batch)
        pause = _PAUSE
        while True:
            try:
                response = await self._client.post("/verify", content=request)
                response.raise_for_status()
                return await run_in_threadpool(self.leader.settle, batch, response.content)
            except (httpx.HTTPError, MessageError) as error:
                logger.warning("The helper does not answer (%s); asking again.", type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def settled(self, round: int) -> bool:
        """Takes no more uploads of a round, and returns whether all that were on their way arrived in time."""
        if round == self.books.current:
            self._closing.add(round)
        deadline = time.monotonic() + _PATIENCE
        while self._waiting and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return not self._waiting


def leader_app(
    leader: Leader, *, verify: str | bool = True, transport: httpx.AsyncBaseTransport | None = None
) -> Starlette:
    """Returns the leader as a web application.

    Args:
        leader: What it does.
        verify: File of the certificates that the helper's must be signed by; True for the system's.
        transport: Carries requests to the helper, for tests.
    """
    client = httpx.AsyncClient(
        base_url=leader.books.task.helper.url,
        headers={"Authorization": f"Bearer {leader.books.secrets.peer.hex()}"},
        timeout=60.0,
        verify=verify,
        trust_env=False,
    )
    intake = Intake(leader, client)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        worker = asyncio.create_task(intake.work())
        try:
            yield
        finally:
            worker.cancel()
            with suppress(asyncio.CancelledError):
                await worker
            await client.aclose()

    routes = [*intake.service.routes(), Route("/reports", refusing(intake.report), methods=["POST"])]
    return Starlette(routes=routes, lifespan=lifespan)
