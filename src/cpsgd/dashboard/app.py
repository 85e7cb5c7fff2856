"""The dashboard as a web application: four tabs, and streams of what changes on them."""

from __future__ import annotations

import asyncio
import json
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from urllib.parse import quote

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp

from cpsgd.dashboard import audits, budgets, pages, planning, run_view, runs, saved
from cpsgd.dashboard.charts import Axis, Chart, Series, linear
from cpsgd.dashboard.folder import Folder, signature
from cpsgd.dashboard.frontier import Frontier
from cpsgd.dashboard.guard import Guard
from cpsgd.dashboard.planning import PlanQuestion
from cpsgd.dashboard.worker import Worker
from cpsgd.errors import CpsgdError, DataError
from cpsgd.reports.numbers import power, rounded_up

# Seconds: for a plan with its frontier, for a ledger (no other is begun after as many), and between two looks at a
# run's folder.
_PLANNING, _VERIFYING, _LOOK = 120.0, 60.0, 1.0
_REMEMBERED = 200
_COMPARED = 8

Event = tuple[str, object]


class Dashboard:
    """What the pages are made from: a folder, two processes that compute, and answers that were given before."""

    def __init__(self, folder: Folder) -> None:
        self._folder = folder
        self._planner, self._verifier = Worker(), Worker()
        self._answers: OrderedDict[PlanQuestion, list[Event]] = OrderedDict()
        self._ending = False
        self._books: dict[str, tuple[object, budgets.Book | str]] = {}

    def end(self) -> None:
        """Makes all streams end soon."""
        self._ending = True
        self._planner.stop()
        self._verifier.stop()

    def app(self, *, token: str, port: int) -> ASGIApp:
        """The application behind its guard."""
        routes = {
            "/": self.planner,
            "/planner/answer": self.answer,
            "/runs": self.all_runs,
            "/run": self.one_run,
            "/run/events": self.run_events,
            "/run/report.html": self.report,
            "/budget": self.budget,
            "/audit": self.audit,
            f"/static/{pages.STYLE}": self.style,
            f"/static/{pages.SCRIPT}": self.script,
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

    async def style(self, request: Request) -> Response:
        """The style sheet."""
        return Response(pages.static(pages.STYLE), media_type="text/css")

    async def script(self, request: Request) -> Response:
        """The script."""
        return Response(pages.static(pages.SCRIPT), media_type="text/javascript")

    # ------------------------------------------------------------------ planner

    async def planner(self, request: Request) -> Response:
        """The form; its answer comes as a stream."""
        try:
            question = PlanQuestion.parse(request.query_params)
        except CpsgdError:
            question = PlanQuestion()  # the stream says what was wrong
        texts = {"python": question.python, "command": question.command, "json": ""}
        return _page("planner.html", tab="planner", q=question, texts=texts)

    async def answer(self, request: Request) -> Response:
        """A plan and its frontier, as they are found."""
        try:
            question = PlanQuestion.parse(request.query_params)
        except CpsgdError as error:
            return _stream(_told([*_plan_events(Frontier(refused=str(error))), ("done", "")]))
        known = self._answers.get(question)
        if known is not None:
            self._answers.move_to_end(question)
            return _stream(_told(known))
        return _stream(self._found(question))

    async def _found(self, question: PlanQuestion) -> AsyncGenerator[Event, None]:
        texts: dict[str, str] = {"python": question.python, "command": question.command, "json": ""}
        yield "texts", texts
        frontier, words = Frontier(), "Done: all that is filled is proved."
        try:
            async with aclosing(self._planner.run(planning.answer, question, limit=_PLANNING)) as parts:
                async for part in parts:
                    frontier.take(part)
                    if isinstance(part, planning.Chosen | planning.Refused):
                        for event in _plan_events(frontier):
                            yield event
                    if isinstance(part, planning.Chosen):
                        texts["json"] = part.protocol
                        yield "texts", texts
                    if not isinstance(part, planning.Refused):
                        yield "frontier", pages.render("frontier.html", chart=frontier.chart)
        except CpsgdError as error:
            yield "done", str(error)
            return
        if frontier.chart is None:
            words = ""
        last: list[Event] = [
            ("texts", texts),
            *_plan_events(frontier),
            ("frontier", pages.render("frontier.html", chart=frontier.chart)),
            ("done", words),
        ]
        self._answers[question] = last
        if len(self._answers) > _REMEMBERED:
            self._answers.popitem(last=False)
        yield last[-1]

    # ------------------------------------------------------------------ runs

    async def all_runs(self, request: Request) -> Response:
        """All runs, and the curves of those that are compared."""
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
        """One run, which changes while it is looked at."""
        return _page("run.html", tab="runs", **run_view.view(await self._run(request)))

    async def report(self, request: Request) -> Response:
        """The run's page as one file."""
        run = await self._run(request)
        name = quote(f"{run.title}-{saved.REPORT}", safe="")
        headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{name}"}
        return HTMLResponse(await asyncio.to_thread(saved.page, run), headers=headers)

    async def run_events(self, request: Request) -> Response:
        """What changes on a run's page, until it is finished."""
        run = await self._run(request)
        return _stream(self._watched(run, request.query_params.get("version", "")))

    async def _run(self, request: Request) -> runs.RecordedRun:
        name = request.query_params.get("name", "")
        path = self._folder.path(name, await asyncio.to_thread(self._folder.runs))
        return await asyncio.to_thread(runs.read, path, name)

    async def _watched(self, run: runs.RecordedRun, shown: str) -> AsyncGenerator[Event, None]:
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
        """All ledgers, verified."""
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
                books.append((name, book, [(each, _spending(each)) for each in book.populations]))
        return _page("budget.html", tab="budget", folder=str(self._folder.root), books=books, failed=failed)

    async def _book(self, name: str) -> budgets.Book | str:
        """What a ledger holds, or why it does not; not computed again while its file is the same."""
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
        """All audits."""
        found, failed = await asyncio.to_thread(audits.read_all, self._folder)
        shown = [(audit, _claims(audit), _rates(audit)) for audit in found]
        return _page("audit.html", tab="audit", folder=str(self._folder.root), audits=shown, failed=failed)


def _page(template: str, **context: object) -> Response:
    return HTMLResponse(pages.render(template, **context))


async def _unknown(request: Request, error: Exception) -> Response:
    text = str(error) if isinstance(error, DataError) else "There is no such page."
    return HTMLResponse(pages.render("refused.html", tab="", title="Not found", text=text), 404)


def _plan_events(frontier: Frontier) -> list[Event]:
    """The plan, or why there is none."""
    plan = pages.render("plan.html", chosen=frontier.chosen, refused=frontier.refused)
    return [("plan", plan), ("proof", pages.render("proof.html", chosen=frontier.chosen))]


def _stream(events: AsyncGenerator[Event, None]) -> Response:
    """Server-sent events, each with JSON on one line."""

    async def lines() -> AsyncIterator[str]:
        # Whoever goes away lets go of what is being computed at once.
        async with aclosing(events):
            async for name, data in events:
                yield f"event: {name}\ndata: {json.dumps(data)}\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


async def _told(events: list[Event]) -> AsyncGenerator[Event, None]:
    for event in events:
        yield event


def _spending(population: budgets.Population) -> Chart | None:
    """ε after each round, and the limit."""
    total = population.total
    if not population.spending:
        return None
    points = [(float(index), spent) for index, spent in enumerate(population.spending, 1)]
    return Chart(
        title=f"ε spent by {total.population} after each round, with the limit",
        series=[Series("ε spent", points, 0, steps=True)],
        x=linear("round on record", 0.0, float(len(points)), "{:,.0f}".format, whole=True),
        y=linear("ε spent", 0.0, 1.15 * max(total.limit, *population.spending), rounded_up, mark="{:g}".format),
        limit=(total.limit, f"limit ε = {rounded_up(total.limit)}"),
        heading=lambda x: f"round {x:,.0f} on record",
    )


def _claims(audit: audits.Audit) -> Chart:
    """ε that is claimed and ε that was found, at every δ."""
    claims = sorted((claim for claim in audit.claims if claim.delta > 0.0), key=lambda claim: claim.delta)
    spread = [(float(index), claim) for index, claim in enumerate(claims)]
    highest = max((max(claim.claimed, claim.found) for claim in claims), default=1.0)
    deltas = {index: claim.delta for index, claim in spread}
    return Chart(
        title="ε claimed and ε found at several δ",
        series=[
            Series("claimed, at most", [(index, claim.claimed) for index, claim in spread], 1, marks=True),
            Series(
                "found beyond doubt, at least",
                [(index, claim.found) for index, claim in spread],
                4 if audit.passed else 6,
                marks=True,
            ),
        ],
        x=Axis("δ", -0.3, len(claims) - 0.7, [*deltas], lambda index: power(deltas[index])),
        y=linear("ε", 0.0, 1.08 * highest or 1.0, "{:.3g}".format),
        heading=lambda index: f"δ = {power(deltas[index])}",
    )


def _rates(audit: audits.Audit) -> Chart:
    """The attacker's errors over the region that the claims rule out."""
    alarms = [index / 200.0 for index in range(201)]
    return Chart(
        title="The attacker's misses against its false alarms; the shaded region is ruled out by the claims",
        series=[
            Series("measured", audit.error_rates, 4 if audit.passed else 6),
            Series("guessing", [(0.0, 1.0), (1.0, 0.0)], 1),
        ],
        x=linear("false alarms", 0.0, 1.0),
        y=linear("misses", 0.0, 1.0, "{:.3g}".format),
        region=[(alarm, audit.claimed_misses(alarm)) for alarm in alarms],
        heading=lambda x: f"false alarms {x:.3g}",
    )
