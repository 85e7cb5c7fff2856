"""The dashboard as a web application: five tabs, and streams of their changes."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from cpsgd.dashboard import audits, budgets, pages, plan_page, run_view, runs
from cpsgd.dashboard.folder import Folder, signature
from cpsgd.dashboard.frontier import Frontier
from cpsgd.dashboard.guard import Guard
from cpsgd.dashboard.plan_page import PlanQuestion
from cpsgd.dashboard.worker import Worker
from cpsgd.errors import CpsgdError, DataError

if TYPE_CHECKING:
    from cpsgd.dashboard.pair_page import PairWatch

# Seconds: for a plan with its frontier, for a ledger (no other is begun after as many), and between two looks at a
# run's folder.
_PLANNING, _VERIFYING, _LOOK = 120.0, 60.0, 1.0
_REMEMBERED = 200
_COMPARED = 8

Event = tuple[str, object]


class Dashboard:
    """The pages of a folder, with two worker processes and a memory of answers."""

    def __init__(self, folder: Folder, pair: PairWatch | None = None) -> None:
        self._folder, self._pair = folder, pair
        self._planner, self._verifier = Worker(), Worker()
        self._answers: OrderedDict[PlanQuestion, list[Event]] = OrderedDict()
        self._ending = False
        self._books: dict[str, tuple[object, budgets.Book | str]] = {}

    def end(self) -> None:
        """Tells all open streams to end."""
        self._ending = True
        self._planner.stop()
        self._verifier.stop()

    def app(self, *, token: str, port: int) -> ASGIApp:
        """Returns the application behind its guard."""
        routes = {
            "/": self.planner,
            "/planner/answer": self.answer,
            "/runs": self.all_runs,
            "/run": self.one_run,
            "/run/events": self.run_events,
            "/run/report.html": self.report,
            "/budget": self.budget,
            "/audit": self.audit,
            "/pair": self.two_servers,
            "/pair/events": self.pair_events,
            f"/static/{pages.STYLE}": _static(pages.STYLE, "text/css"),
            f"/static/{pages.SCRIPT}": _static(pages.SCRIPT, "text/javascript"),
        }
        inside = Starlette(
            routes=[Route(path, handler, methods=["GET"]) for path, handler in routes.items()],
            lifespan=self._lifespan,
            exception_handlers={404: _unknown, DataError: _unknown},
        )
        return Guard(inside, token=token, port=port)

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        warming = asyncio.create_task(self._planner.start())
        try:
            yield
        finally:
            await warming
            self._planner.close()
            self._verifier.close()

    # ------------------------------------------------------------------ planner

    async def planner(self, request: Request) -> Response:
        """Shows the form; its answer comes as a stream."""
        try:
            question = PlanQuestion.parse(request.query_params)
        except CpsgdError:
            question = PlanQuestion()  # the stream says what was wrong
        texts = {"python": question.python, "command": question.command, "json": ""}
        return _page("planner.html", tab="planner", q=question, texts=texts)

    async def answer(self, request: Request) -> Response:
        """Streams a plan and its frontier as they are computed."""
        try:
            question = PlanQuestion.parse(request.query_params)
        except CpsgdError as error:
            return _stream(_replayed([*_plan_events(Frontier(refused=str(error))), ("done", "")]))
        known = self._answers.get(question)
        if known is not None:
            self._answers.move_to_end(question)
            return _stream(_replayed(known))
        return _stream(self._found(question))

    async def _found(self, question: PlanQuestion) -> AsyncGenerator[Event, None]:
        """Yields the events of a plan while it is computed, and remembers the last ones."""
        texts: dict[str, str] = {"python": question.python, "command": question.command, "json": ""}
        yield "texts", texts
        frontier = Frontier()
        try:
            async with aclosing(self._planner.run(plan_page.answer, question, limit=_PLANNING)) as parts:
                async for part in parts:
                    frontier.take(part)
                    if isinstance(part, plan_page.Chosen | plan_page.Refused):
                        for event in _plan_events(frontier):
                            yield event
                    if isinstance(part, plan_page.Chosen):
                        texts["json"] = part.protocol
                        yield "texts", texts
                    if not isinstance(part, plan_page.Refused):
                        yield "frontier", pages.render("frontier.html", chart=frontier.chart)
        except CpsgdError as error:
            yield "done", str(error)
            return
        chart = frontier.chart
        last: list[Event] = [
            ("texts", texts),
            *_plan_events(frontier),
            ("frontier", pages.render("frontier.html", chart=chart)),
            ("done", "" if chart is None else "Done: all that is filled is proved."),
        ]
        self._answers[question] = last
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)
        yield last[-1]

    # ------------------------------------------------------------------ runs

    async def all_runs(self, request: Request) -> Response:
        """Shows all runs, and the curves of those that are compared."""
        found, failed = await asyncio.to_thread(runs.read_all, self._folder)
        asked = request.query_params.getlist("run") or [run.name for run in found[:_COMPARED]]
        compared = [run for run in found if run.name in asked][:_COMPARED]
        charts = [run_view.comparison(compared, figure) for figure in ("score", "loss")] if len(compared) > 1 else []
        return _page(
            "runs.html",
            tab="runs",
            folder=str(self._folder.root),
            runs=[(run, run_view.row(run, run.private)) for run in found],
            compared={run.name for run in compared},
            charts=[chart for chart in charts if chart is not None],
            failed=failed,
        )

    async def one_run(self, request: Request) -> Response:
        """Shows one run."""
        return _page("run.html", tab="runs", **run_view.view(await self._run(request)))

    async def report(self, request: Request) -> Response:
        """Sends the run's page as one file."""
        run = await self._run(request)
        name = quote(f"{run.title}-{run_view.REPORT}", safe="")
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
        return HTMLResponse(await asyncio.to_thread(run_view.saved_page, run), headers=headers)

    async def run_events(self, request: Request) -> Response:
        """Streams changes of a run's page until the run is finished."""
        run = await self._run(request)
        return _stream(self._watched(run, request.query_params.get("version", "")))

    async def _run(self, request: Request) -> runs.RecordedRun:
        name = request.query_params.get("name", "")
        path = self._folder.path(name, await asyncio.to_thread(self._folder.runs))
        return await asyncio.to_thread(runs.read, path, name)

    async def _watched(self, run: runs.RecordedRun, shown: str) -> AsyncGenerator[Event, None]:
        """Yields an event whenever the run's files change, until it is finished."""
        path, state = self._folder.root / run.name, run.state
        while not self._ending:
            if run.version != shown or run.state != state:
                yield "update", {"live": pages.render("run_live.html", **run_view.view(run))}
                shown, state = run.version, run.state
            if run.state == "finished":
                yield "done", ""
                return
            await asyncio.sleep(_LOOK)
            try:
                changed = await asyncio.to_thread(runs.version, path) != shown
                run = await asyncio.to_thread(runs.read, path, run.name) if changed else run.at_present()
            except DataError:
                pass  # between two files of a writer; the next look will see

    # ------------------------------------------------------------------ budget and audit

    async def budget(self, request: Request) -> Response:
        """Shows all ledgers, verified."""
        books, failed = [], []
        deadline = time.monotonic() + _VERIFYING
        for name in await asyncio.to_thread(self._folder.ledgers):
            if name not in self._books and time.monotonic() > deadline:
                failed.append((name, "Not verified yet: those before it took long. Reload the page to go on."))
                continue
            book = await self._book(name)
            if isinstance(book, str):
                failed.append((name, book))
            else:
                books.append((name, book, [(each, each.chart) for each in book.populations]))
        return _page("budget.html", tab="budget", folder=str(self._folder.root), books=books, failed=failed)

    async def _book(self, name: str) -> budgets.Book | str:
        """Returns a verified ledger or the reason why it fails; computed again only when its file changes."""
        path = self._folder.root / name
        now = signature(path)
        known = self._books.get(name)
        if known is None or known[0] != now:
            found: budgets.Book | str = "The ledger could not be read."
            try:
                async for book in self._verifier.run(budgets.read, str(path), limit=_VERIFYING):
                    found = book
            except CpsgdError as error:
                found = str(error)
            known = self._books[name] = now, found
        return known[1]

    async def audit(self, request: Request) -> Response:
        """Shows all audits."""
        found, failed = await asyncio.to_thread(audits.read_all, self._folder)
        shown = [(audit, audit.claims_chart, audit.rates_chart) for audit in found]
        return _page("audit.html", tab="audit", folder=str(self._folder.root), audits=shown, failed=failed)

    # ------------------------------------------------------------------ two servers

    async def two_servers(self, request: Request) -> Response:
        """Shows the servers of the task that the dashboard was started with."""
        shown = {"task": None} if self._pair is None else await self._pair.look()
        return _page("pair.html", tab="pair", **shown)

    async def pair_events(self, request: Request) -> Response:
        """Streams both servers' progress."""
        return _stream(_replayed([("done", "")]) if self._pair is None else self._pair_watched(self._pair))

    async def _pair_watched(self, pair: PairWatch) -> AsyncGenerator[Event, None]:
        while not self._ending:
            await asyncio.sleep(_LOOK)
            yield "update", {"live": pages.render("pair_live.html", **await pair.look())}


def _page(template: str, **context: object) -> Response:
    return HTMLResponse(pages.render(template, **context))


def _static(name: str, kind: str) -> Callable[[Request], Response]:
    return lambda request: Response(pages.static(name), media_type=kind)


async def _unknown(request: Request, error: Exception) -> Response:
    text = str(error) if isinstance(error, DataError) else "There is no such page."
    return HTMLResponse(pages.render("refused.html", tab="", title="Not found", text=text), 404)


def _plan_events(frontier: Frontier) -> list[Event]:
    """Returns events with the plan, or with the reason why there is none."""
    plan = pages.render("plan.html", chosen=frontier.chosen, refused=frontier.refused)
    return [("plan", plan), ("proof", pages.render("proof.html", chosen=frontier.chosen))]


def _stream(events: AsyncGenerator[Event, None]) -> Response:
    """Returns a response of server-sent events, each with JSON on one line."""

    async def lines() -> AsyncIterator[str]:
        # When the browser disconnects, its computation is cancelled at once.
        async with aclosing(events):
            async for name, data in events:
                yield f"event: {name}\ndata: {json.dumps(data)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def _replayed(events: list[Event]) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event
