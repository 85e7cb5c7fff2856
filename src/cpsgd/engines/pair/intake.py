"""`Intake`: takes clients' uploads in, and asks the helper about them in batches; the leader as a web application."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cpsgd.engines.pair.leader import Leader, Prepared
from cpsgd.engines.pair.parties import trusted
from cpsgd.engines.pair.service import Service, application, body_of, busy, problem, refusing, verdict_response
from cpsgd.engines.pair.store import Verdict
from cpsgd.engines.pair.task import check_address
from cpsgd.errors import MessageError, StoreError
from cpsgd.secagg.pair.upload import ID, Upload, upload_bytes

logger = logging.getLogger("cpsgd.pair")

# Reports in a batch and on their way, at most, and bytes that the shares of a batch and waiting uploads may take.
_BATCH, _BATCH_BYTES = 128, 1 << 26
_WAITING, _WAITING_BYTES = 2048, 1 << 28
_WORKERS = 2
# Seconds: before a client is told to ask again, and between two tries to reach the helper.
_PATIENCE, _PAUSE, _LONGEST_PAUSE = 30.0, 0.2, 10.0
# Seconds for the helper's whole answer: it may send a byte now and then.
_LONGEST_ANSWER = 300.0
# Seconds, and bytes per second beyond, for a client to send its upload. After the seconds it gives way to others.
_SENDING, _SLOWEST = 10.0, 8192


@dataclass(frozen=True)
class Waiting:
    """An upload for a round, whose sender waits for an answer."""

    round: int
    data: bytes
    answer: asyncio.Future[Verdict]


class Intake:
    """Takes uploads in, gathers them into batches, and asks the helper about each batch.

    Two batches are on their way at once (one where there are tokens): while the helper works on one, the leader reads
    the next.
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
        self._closing: int | None = None
        self._arriving: dict[asyncio.Timeout, float] = {}
        self._restored = False

    async def report(self, request: Request) -> Response:
        """Takes one upload, and answers when both servers have decided."""
        now = asyncio.get_running_loop().time()
        if len(self._arriving) >= self._most:
            first = next(iter(self._arriving))
            if now - self._arriving[first] < _SENDING:
                return busy()
            del self._arriving[first]
            with suppress(RuntimeError):  # it is at its end already
                first.reschedule(now)
        limit = asyncio.timeout_at(now + _SENDING + self.size / _SLOWEST)
        self._arriving[limit] = now
        try:
            async with limit:
                data = await body_of(request, self.size)
        except TimeoutError:
            return problem(408, "slow", "The upload took too long; send the same bytes again.")
        finally:
            self._arriving.pop(limit, None)
        upload = Upload.from_bytes(data)
        waiting = self._waiting.get(upload.id)
        if waiting is None:
            # A round that is being closed takes none, but its reports are to hear their verdicts when it is closed.
            if len(self._waiting) >= self._most or upload.round == self._closing == self.books.current:
                return busy()
            waiting = Waiting(upload.round, data, asyncio.get_running_loop().create_future())
            self._waiting[upload.id] = waiting
            self._queue.put_nowait(waiting)
        elif waiting.data != data:
            # Nobody knows yet which of the two is a damaged copy: who sends again hears what is on record then.
            return busy()
        try:
            return verdict_response(await asyncio.wait_for(asyncio.shield(waiting.answer), _PATIENCE))
        except TimeoutError:
            return busy()

    async def work(self) -> None:
        """Settles batches in an endless loop; first the reports that were pending when the leader stopped."""
        await self._restore()
        # By its tokens the helper does not see that two reports are of one sender: none may be asked about meanwhile.
        await asyncio.gather(*(self._batches() for _ in range(1 if self.books.tokens else _WORKERS)))

    async def _restore(self) -> None:
        """Settles the reports that were under way when the leader stopped; tries until it succeeds."""
        pause = _PAUSE
        while not self._restored:
            try:
                kept = await run_in_threadpool(self.leader.restore)
                for start in range(0, len(kept), self._batch):
                    batch = kept[start : start + self._batch]
                    await self._ask(batch, await run_in_threadpool(self.leader.evaluate, batch, restored=True))
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
            start = time.monotonic()
            try:
                answers = await self._settle([each.data for each in batch])
            except Exception as error:
                # A store's failure is said once, without where it happened.
                logger.error("A batch failed: %s", error, exc_info=not isinstance(error, StoreError))
                answers = [error] * len(batch)
            self.figures.count((each for each in answers if isinstance(each, Verdict)), start)
            for waiting, answer in zip(batch, answers, strict=True):
                self._waiting.pop(waiting.data[ID], None)
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
        """Asks the helper until it answers, and records its verdicts: what it counted must be counted here."""
        pause = _PAUSE
        while True:
            try:
                answer = await self._answer(request, len(batch))
                return await run_in_threadpool(self.leader.settle, batch, answer)
            except Exception as error:
                if not isinstance(error, httpx.HTTPError):
                    logger.exception("A batch cannot be settled; trying again.")
                logger.warning("The helper does not answer (%s); asking again.", type(error).__name__)
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)

    async def _answer(self, request: bytes, most: int) -> bytes:
        """Returns the helper's answer, read within bounds."""
        found = bytearray()
        async with (
            asyncio.timeout(_LONGEST_ANSWER),
            self._client.stream("POST", "/verify", content=request) as response,
        ):
            response.raise_for_status()
            async for chunk in response.aiter_raw():
                found += chunk
                if len(found) > most:
                    raise MessageError("The helper's answer is longer than one verdict for each report.")
        return bytes(found)

    async def settled(self, round: int) -> bool:
        """Stops taking uploads of a round; returns whether all pending ones were settled in time."""
        if round == self.books.current:
            self._closing = round
        deadline = time.monotonic() + _PATIENCE
        # What is restored may be of the next round, and the helper takes that when this one is closed there, too.
        while not (
            there := (self._restored or round < self.books.current)
            and all(each.round != round for each in self._waiting.values())
        ):
            if time.monotonic() > deadline:
                break
            await asyncio.sleep(0.02)
        return there


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
