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
from pathlib import Path
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cpsgd.engines.pair.parties import trusted
from cpsgd.engines.pair.servers import Books, Helper, Leader, Prepared, RefusedReportError
from cpsgd.engines.pair.store import Verdict
from cpsgd.engines.pair.task import check_address
from cpsgd.errors import EmptyError, LedgerError, MessageError, StageError, StoreError, ThresholdError
from cpsgd.secagg.pair.upload import Upload, upload_bytes

logger = logging.getLogger("cpsgd.pair")

# Reports in a batch and on their way, at most, and bytes that the shares of a batch and waiting uploads may take.
_BATCH, _BATCH_BYTES = 128, 1 << 26
_WAITING, _WAITING_BYTES = 2048, 1 << 28
_WORKERS = 2
# Seconds: before a client is told to ask again, and between two tries to reach the helper.
_PATIENCE, _PAUSE, _LONGEST_PAUSE = 30.0, 0.2, 10.0
_REQUEST_BYTES = 1 << 28

Handler = Callable[[Request], Awaitable[Response]]


def problem(status: int, kind: str, title: str, **more: object) -> Response:
    """Returns a problem document."""
    body = {"type": f"about:cpsgd:{kind}", "title": title, "status": status, **more}
    headers = {"Retry-After": "2"} if status == 503 else None
    return Response(json.dumps(body), status, headers, "application/problem+json")


def busy() -> Response:
    """Returns the answer that asks a client to try again later."""
    return problem(503, "busy", "The servers are busy; send the same bytes again in a moment.")


def verdict_response(verdict: Verdict) -> Response:
    """Returns the response to a client about its report."""
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
    """The requests that both servers answer."""

    def __init__(self, books: Books, settled: Callable[[int], Awaitable[bool]] | None = None) -> None:
        """Prepares the answers; `settled` is asked before a round is closed, and closes it to new reports."""
        self.books, self.figures, self._settled = books, Figures(), settled

    def routes(self) -> list[Route]:
        """Returns the addresses that both have."""
        collector = self.books.secrets.collector
        return [
            Route("/", refusing(self.page), methods=["GET"]),
            Route("/task", refusing(self.task), methods=["GET"]),
            Route("/round", refusing(self.round), methods=["GET"]),
            Route("/metrics", refusing(self.metrics), methods=["GET"]),
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
        """Returns the task's file."""
        return JSONResponse(self.books.task.to_dict())

    async def round(self, request: Request) -> Response:
        """Returns the open round and its counts; null after the last."""
        books = self.books
        if books.current >= books.task.rounds:
            return JSONResponse({"round": None, "rounds": books.task.rounds})
        state = await run_in_threadpool(books.store.round, books.current)
        counts = {"accepted": state.accepted, "refused": state.refused, "needed": books.task.surviving}
        return JSONResponse({"round": state.round, "rounds": books.task.rounds, **counts})

    async def metrics(self, request: Request) -> Response:
        """Returns the figures for Prometheus."""
        return PlainTextResponse(await run_in_threadpool(self.figures.text, self.books))

    async def page(self, request: Request) -> Response:
        """Returns a page of the progress."""
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
            return busy()
        state = await run_in_threadpool(self.books.close, request.path_params["round"])
        return JSONResponse({"round": state.round, "accepted": state.accepted, "refused": state.refused})

    async def reveal(self, request: Request) -> Response:
        """Returns this server's sum of a round."""
        answer = await run_in_threadpool(self.books.reveal, request.path_params["round"])
        return Response(answer, media_type="application/octet-stream")


def refusing(handler: Handler) -> Handler:
    """Turns errors into problem documents; an unexpected one shows nothing of its own text."""

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
        except StoreError as error:
            logger.error("%s", error)
            return busy()
        except ClientDisconnect:
            return busy()  # nobody hears it
        except Exception:
            logger.exception("A request failed.")
            return problem(500, "failed", "The request failed; the server's log says why.")

    return answer


def application(routes: list[Route], **options: Any) -> Starlette:
    """Returns an application that answers with problem documents also where there is no such address."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 500
        return problem(status, "no-such-address", "There is no such address here, or it is asked for otherwise.")

    return Starlette(routes=routes, exception_handlers={HTTPException: refuse}, **options)


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
    return application([*service.routes(), Route("/verify", guarded, methods=["POST"])])


# ------------------------------------------------------------------ the leader


@dataclass(frozen=True)
class Waiting:
    """An upload whose sender waits for an answer."""

    data: bytes
    answer: asyncio.Future[Verdict]


class Intake:
    """Takes uploads in, gathers them into batches, and asks the helper about each batch.

    Two batches are on their way at once: while the helper works on one, the leader reads the next.
    """

    def __init__(self, leader: Leader, client: httpx.AsyncClient) -> None:
        self.books = leader.books
        self.service = Service(self.books, self.settled)
        self.figures = self.service.figures
        self.leader, self._client = leader, client
        self.size = upload_bytes(self.books.task.shape(0), tokens=self.books.tokens)
        self._batch = max(1, min(_BATCH, _BATCH_BYTES // (4 * self.books.task.protocol.dim)))
        self._most = max(2 * self._batch, min(_WAITING, _WAITING_BYTES // self.size))
        self._queue: asyncio.Queue[Waiting] = asyncio.Queue()
        self._waiting: dict[bytes, Waiting] = {}
        self._closing: set[int] = set()
        self._restored = False

    async def report(self, request: Request) -> Response:
        """Takes one upload, and answers when both servers have decided."""
        data = await body_of(request, self.size)
        upload = Upload.from_bytes(data)
        if upload.round in self._closing:
            return verdict_response(Verdict.ROUND_CLOSED)
        waiting = self._waiting.get(upload.id)
        if waiting is None:
            if len(self._waiting) >= self._most:
                return busy()
            waiting = Waiting(data, asyncio.get_running_loop().create_future())
            self._waiting[upload.id] = waiting
            self._queue.put_nowait(waiting)
        elif waiting.data != data:
            return verdict_response(Verdict.REUSED_ID)
        try:
            return verdict_response(await asyncio.wait_for(asyncio.shield(waiting.answer), _PATIENCE))
        except TimeoutError:
            return busy()

    async def work(self) -> None:
        """Settles batch after batch, for ever; first what was on its way when the leader stopped."""
        await self._restore()
        await asyncio.gather(*(self._batches() for _ in range(_WORKERS)))

    async def _restore(self) -> None:
        """Settles the reports that were under way when the leader stopped; tries until it succeeds."""
        pause = _PAUSE
        while not self._restored:
            try:
                kept = await run_in_threadpool(self.leader.restore)
                for start in range(0, len(kept), self._batch):
                    batch = kept[start : start + self._batch]
                    await self._ask(batch, await run_in_threadpool(self.leader.evaluate, batch))
                self._restored = True
            except Exception:
                logger.exception("What was on its way cannot be restored; trying again.")
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _batches(self) -> None:
        """Settles waiting reports in batches, for ever."""
        while True:
            batch = [await self._queue.get()]
            while len(batch) < self._batch and not self._queue.empty():
                batch.append(self._queue.get_nowait())
            start = time.perf_counter()
            try:
                answers = await self._settle([each.data for each in batch])
            except StoreError as error:
                logger.error("A batch failed: %s", error)
                answers = [error] * len(batch)
            except Exception as error:
                logger.exception("A batch failed.")
                answers = [error] * len(batch)
            self.figures.seconds += time.perf_counter() - start
            for waiting, answer in zip(batch, answers, strict=True):
                self._waiting.pop(waiting.data[16:32], None)
                if isinstance(answer, Verdict):
                    self.figures.verdicts[answer.name.lower()] += 1
                if waiting.answer.done():
                    continue
                if isinstance(answer, Verdict):
                    waiting.answer.set_result(answer)
                else:
                    waiting.answer.set_exception(answer)
                    waiting.answer.exception()  # nobody may be there any more to hear it
            self.figures.waiting = len(self._waiting)

    async def _settle(self, batch: list[bytes]) -> list[Verdict | Exception]:
        """Takes uploads through both servers."""

        def prepare() -> tuple[list[Prepared | Verdict | MessageError], list[Prepared], bytes]:
            found = self.leader.read(batch)
            prepared = [each for each in found if isinstance(each, Prepared)]
            return found, prepared, self.leader.evaluate(prepared) if prepared else b""

        found, prepared, request = await run_in_threadpool(prepare)
        verdicts = iter(await self._ask(prepared, request) if prepared else [])
        return [next(verdicts) if isinstance(each, Prepared) else each for each in found]

    async def _ask(self, batch: list[Prepared], request: bytes) -> list[Verdict]:
        """Asks the helper until it answers, and puts the verdicts on record: what it counted must be counted here."""
        pause = _PAUSE
        while True:
            try:
                response = await self._client.post("/verify", content=request)
                response.raise_for_status()
                return await run_in_threadpool(self.leader.settle, batch, response.content)
            except Exception as error:
                if not isinstance(error, httpx.HTTPError):
                    logger.exception("A batch cannot be settled; trying again.")
                logger.warning("The helper does not answer (%s); asking again.", type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def settled(self, round: int) -> bool:
        """Takes no more uploads of a round, and returns whether all that were on their way arrived in time."""
        if round == self.books.current:
            self._closing.add(round)
        deadline = time.monotonic() + _PATIENCE
        while (self._waiting or not self._restored) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        return self._restored and not self._waiting


def leader_app(
    leader: Leader,
    *,
    trust: Path | None = None,
    insecure: bool = False,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Starlette:
    """Returns the leader as a web application.

    Args:
        leader: What it does.
        trust: File of the certificates that the helper's must be signed by; the system's if not given.
        insecure: Asks the helper also at an http address of another machine.
        transport: Carries requests to the helper, for tests.
    """
    url = check_address(leader.books.task.helper.url, insecure=insecure)
    client = httpx.AsyncClient(
        base_url=url,
        headers={"Authorization": f"Bearer {leader.books.secrets.peer.hex()}"},
        timeout=60.0,
        verify=trusted(trust) if url.startswith("https") else False,
        trust_env=False,
        transport=transport,
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
    return application(routes, lifespan=lifespan)
