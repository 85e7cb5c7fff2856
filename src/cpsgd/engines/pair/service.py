"""The servers as web applications (Starlette). Refusals are problem documents (RFC 9457) without details of ours.

| address | who | what |
|---|---|---|
| `GET /task` | anybody, both servers | the task's file |
| `GET /round` | anybody, both | the open round, with counts |
| `GET /metrics` | anybody, both | figures as Prometheus text |
| `GET /` | anybody, both | progress and figures as JSON, for `cpsgd dashboard` |
| `POST /reports` | clients, leader | one upload; the answer is its verdict |
| `POST /verify` | the leader, helper | a batch of evaluations; the answer is a verdict for each |
| `POST /rounds/N/close`, `POST /rounds/N/reveal` | the collector, both | ends a round; gives this server's sum |
"""

from __future__ import annotations

import asyncio
import hmac
import json
import logging
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from cpsgd.engines.pair.books import Books, RefusedReportError
from cpsgd.engines.pair.helper import Helper
from cpsgd.engines.pair.progress import Figures
from cpsgd.engines.pair.store import Verdict
from cpsgd.errors import (
    EmptyError,
    LedgerBusyError,
    LedgerError,
    LedgerStorageError,
    MessageError,
    StageError,
    StoreError,
    ThresholdError,
)

logger = logging.getLogger("cpsgd.pair")

# Bytes of a request to the helper, seconds to send it, and requests at a time, at most; the leader has two.
_REQUEST_BYTES, _REQUEST_SECONDS, _REQUESTS = 1 << 28, 60.0, 8

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
    if not (declared.isascii() and declared.isdigit() and len(declared) < 20 and int(declared) <= most):
        raise MessageError(f"Expected at most {most} bytes.")
    found = bytearray()
    async for chunk in request.stream():
        found += chunk
        if len(found) > most:
            raise MessageError(f"Expected at most {most} bytes.")
    return bytes(found)


class Service:
    """The requests that both servers answer."""

    def __init__(self, books: Books, settled: Callable[[int], Awaitable[bool]] | None = None) -> None:
        """Prepares the answers; `settled` is asked before a round is closed, and closes it to new reports."""
        self.books, self.figures, self._settled = books, Figures(), settled

    def routes(self) -> list[Route]:
        """Returns the addresses that both have."""
        collector = self.books.secrets.collector
        return [
            Route("/", refusing(self.progress), methods=["GET"]),
            Route("/task", refusing(self.task), methods=["GET"]),
            Route("/round", refusing(self.round), methods=["GET"]),
            Route("/metrics", refusing(self.metrics), methods=["GET"]),
            Route("/rounds/{round:int}/close", self.guarded(self.close, collector), methods=["POST"]),
            Route("/rounds/{round:int}/reveal", self.guarded(self.reveal, collector), methods=["POST"]),
        ]

    def guarded(self, handler: Handler, secret: bytes) -> Handler:
        """Wraps a handler: only callers who show the secret get in, and refusals become problem documents."""

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
        return PlainTextResponse(await run_in_threadpool(self.figures.prometheus, self.books))

    async def progress(self, request: Request) -> Response:
        """Returns progress and figures as JSON."""
        return JSONResponse(await run_in_threadpool(self.figures.progress, self.books))

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
    """Wraps a handler: errors become problem documents, and unexpected errors show none of their text."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request)
        except RefusedReportError as refusal:
            return verdict_response(refusal.verdict)
        except MessageError:
            return problem(400, "malformed", "The message is malformed, or not for this task.")
        except (StageError, ThresholdError, EmptyError) as error:
            return problem(409, "not-now", str(error))
        except (StoreError, LedgerBusyError, LedgerStorageError) as error:
            logger.error("%s", error)
            return busy()
        except LedgerError:
            return problem(402, "budget", "The privacy budget does not pay for this round.")
        except ClientDisconnect:
            return busy()  # nobody hears it
        except Exception:
            logger.exception("A request failed.")
            return problem(500, "failed", "The request failed; the server's log says why.")

    return answer


def application(routes: list[Route], **options: Any) -> Starlette:
    """Returns an application whose errors are problem documents, also for unknown addresses."""

    async def refuse(request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        return problem(status, "no-such-address", "There is no such address here, or it is asked for otherwise.")

    # An address with a number of thousands of digits is a ValueError of Starlette's.
    return Starlette(routes=routes, exception_handlers={HTTPException: refuse, ValueError: refuse}, **options)


# ------------------------------------------------------------------ the helper


def helper_app(helper: Helper) -> Starlette:
    """Returns the helper as a web application."""
    service = Service(helper.books)

    places = asyncio.Semaphore(_REQUESTS)

    async def verify(request: Request) -> Response:
        if places.locked():
            return busy()
        async with places:
            try:
                async with asyncio.timeout(_REQUEST_SECONDS):
                    data = await body_of(request, _REQUEST_BYTES)
            except TimeoutError:
                return problem(408, "slow", "The request took too long; send it again.")
            start = time.monotonic()
            verdicts = await run_in_threadpool(helper.verify, data)
        service.figures.count(verdicts, start)
        return Response(verdicts, media_type="application/octet-stream")

    guarded = service.guarded(verify, helper.books.secrets.peer)
    return application([*service.routes(), Route("/verify", guarded, methods=["POST"])])
