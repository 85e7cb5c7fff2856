"""The pages: what each tab shows, streams, and a hostile folder."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncGenerator, Iterable
from pathlib import Path
from typing import Any

import pytest

from cpsgd.dashboard import plan_page
from cpsgd.dashboard.plan_page import Chosen, Estimate, Found, PlanQuestion, Refused, Sketch
from cpsgd.errors import WorkerError
from tests.dashboard.clients import Client, admitted
from tests.dashboard.parsed import check_harmless
from tests.dashboard.samples import report, write_hostile, write_rounds, write_run

CHOSEN = Chosen(
    Estimate("coins", 1.0, 1.1, True), (("1", "bits"),), "In words.", (("Theorem", "7"),), ("Mind.",), "{}\n"
)


class Planner:
    """In place of the process: gives parts that are known, and counts how often it is asked."""

    def __init__(self, *parts: plan_page.Part, failure: Exception | None = None) -> None:
        self.parts, self.failure = parts, failure
        self.asked: list[PlanQuestion] = []

    async def run(self, job: object, question: PlanQuestion, *, limit: float) -> AsyncGenerator[plan_page.Part, None]:
        self.asked.append(question)
        for part in self.parts:
            yield part
        if self.failure is not None:
            raise self.failure


def plain(text: str) -> str:
    """What a person reads."""
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def events(text: str) -> list[tuple[str, Any]]:
    found = re.findall(r"event: (\w+)\ndata: (.*)\n\n", text)
    return [(name, json.loads(data)) for name, data in found]


def asked(client: Client, planner: Planner, place: str) -> list[tuple[str, Any]]:
    client.dashboard._planner = planner  # type: ignore[assignment]
    answer = client.get(place)
    assert answer.headers["content-type"].startswith("text/event-stream")
    return events(answer.text)


# ------------------------------------------------------------------ planner


def test_the_form_shows_what_the_address_asks(client: Client) -> None:
    page = client.get("/", params={"clients": "77", "scheme": "poisson", "secure": "on"}).text
    assert 'name="clients" value="77"' in page
    assert '<option value="poisson" selected>' in page
    assert 'name="secure" checked' in page
    assert "cpsgd plan --clients 77" in page


def test_every_field_has_a_label(client: Client) -> None:
    page = client.get("/").text
    fields = re.findall(r'<(?:input|select)[^>]*\bid="([^"]+)"', page)
    assert {"clients", "dim", "epsilon", "delta", "bits", "rounds", "scheme", "rate", "secure"} <= set(fields)
    for field in fields:
        assert f'for="{field}"' in page or re.search(rf'<label><input[^>]*id="{field}"', page)
    for slider in re.findall(r'<input type="range"[^>]*>', page):
        assert "aria-label=" in slider


def test_an_answer_is_streamed_and_remembered(client: Client) -> None:
    planner = Planner(Sketch((Estimate("coins", 1.0, 1.2),)), CHOSEN, Found(1.0, (CHOSEN.estimate,), ()))
    told = asked(client, planner, "/planner/answer?clients=5")
    assert [name for name, _ in told] == [
        *("texts", "frontier", "plan", "proof", "texts", "frontier", "frontier", "done"),
    ]
    assert "In words." in told[2][1]
    assert "Mind." in told[2][1]
    assert "<dt>Theorem</dt><dd>7</dd>" in told[3][1]
    assert told[4][1]["json"] == "{}\n"
    assert "hollow" in told[1][1]
    assert "hollow" not in told[6][1].replace("hollow ones", "")
    again = asked(client, planner, "/planner/answer?clients=5&rate=0.7")
    assert [name for name, _ in again] == ["texts", "plan", "proof", "frontier", "done"]
    assert again[3] == told[6]
    assert planner.asked == [PlanQuestion(clients=5)]


def test_the_oldest_answers_are_forgotten(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.dashboard.web._REMEMBERED", 2)
    planner = Planner(CHOSEN)
    for clients in (1, 2, 1, 3, 1, 2):
        asked(client, planner, f"/planner/answer?clients={clients}")
    assert [question.clients for question in planner.asked] == [1, 2, 3, 2]


@pytest.mark.parametrize(
    ("planner", "place", "words"),
    [
        (Planner(), "clients=none", "Expected clients to be a number."),
        (Planner(Refused("Nobody is left.")), "clients=5", "Nobody is left."),
        (Planner(failure=WorkerError("Too slow.")), "clients=5", "Too slow."),
    ],
)
def test_what_fails_is_said(client: Client, planner: Planner, place: str, words: str) -> None:
    told = asked(client, planner, f"/planner/answer?{place}")
    assert told[-1][0] == "done"
    assert any(words in str(data) for _, data in told)


# ------------------------------------------------------------------ runs


def test_all_runs_and_their_private_curves(client: Client) -> None:
    page = client.get("/runs").text
    assert "runs/done" in page
    assert "finished" in page
    assert "running" in page
    assert "Test accuracy against rounds" in page
    one = client.get("/runs", params={"run": "runs/done"}).text
    assert "<svg" not in one
    assert re.search(r'value="runs/done"[^>]* checked', one)


def test_a_run_has_a_page_and_a_file(client: Client) -> None:
    page = client.get("/run", params={"name": "runs/going"})
    assert "about 18 s left for all 2 curves" in plain(page.text)
    ((events_of, version),) = re.findall(r'data-events="(/run/events\?name=runs/going)&amp;version=(\w+)"', page.text)
    assert (events_of, len(version)) == ("/run/events?name=runs/going", 64)
    file = client.get("/run/report.html", params={"name": "runs/done"})
    assert file.headers["content-disposition"] == "attachment; filename*=UTF-8''done-report.html"
    assert "<script" not in file.text
    assert "35.00% test accuracy, private" in plain(file.text)


def test_what_happens_is_streamed_until_a_run_is_finished(
    client: Client, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = folder / "runs" / "going"

    def happens() -> Iterable[float]:
        yield 0.0
        write_rounds(path, 6)
        yield 0.0
        write_run(path, 10, finished=True)
        yield 0.0

    steps = iter(happens())

    async def sleep(seconds: float) -> None:
        next(steps)

    monkeypatch.setattr("cpsgd.dashboard.web.asyncio.sleep", sleep)
    told = events(client.get("/run/events", params={"name": "runs/going"}).text)
    assert [name for name, _ in told] == ["update", "update", "update", "done"]
    rounds = [re.findall(r"round (\d+) of 10", plain(data["live"])) for _, data in told[:-1]]
    assert rounds == [["4"], ["6"], ["10"]]


@pytest.mark.parametrize("name", ["", "..", "../shown/runs/done", "/etc", "runs/done/../going", "runs/none", "%2e%2e"])
@pytest.mark.parametrize("place", ["/run", "/run/events", "/run/report.html"])
def test_nothing_else_has_a_page(client: Client, place: str, name: str) -> None:
    answer = client.get(place, params={"name": name})
    assert answer.status_code == 404
    assert "nothing of that name" in answer.text


@pytest.mark.parametrize(
    "place", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/", "/static/guard.py", "/x", "/run/"]
)
def test_there_are_no_other_files(client: Client, place: str) -> None:
    answer = client.get(place)
    assert answer.status_code in (404, 307)
    assert "import" not in answer.text


# ------------------------------------------------------------------ budget and audit


def test_a_ledger_with_its_populations(client: Client, folder: Path) -> None:
    page = plain(client.get("/budget").text)
    assert "study.ledger Chain verified" in page
    assert "patients ε = " in page
    assert "spent of 8" in page
    assert "The latest 2 of 2 rounds" in page
    # It is not computed again while the file is the same; and when it changes, it is.
    known = dict(client.dashboard._books)
    client.get("/budget")
    assert all(client.dashboard._books[name] is book for name, book in known.items())
    (folder / "study.ledger").write_bytes((folder / "study.ledger").read_bytes().replace(b"patients", b"parrents"))
    page = plain(client.get("/budget").text)
    assert "Chain verified" not in page
    assert "study.ledger" in page
    client.dashboard._verifier.close()


def test_many_slow_ledgers_do_not_keep_a_page_waiting(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.dashboard.web._VERIFYING", -1.0)
    page = client.get("/budget").text
    assert "Not verified yet" in page
    assert "Chain verified" not in page


def test_ticks_of_a_budget_are_round(client: Client) -> None:
    """ε is rounded up, and 0.2 as a float is a little more than that; a tick is no ε that was spent."""
    ticks = re.findall(r'text-anchor="end">([^<]+)</text>', client.get("/budget").text)
    assert len(ticks) > 3
    assert all(len(tick) <= 4 for tick in ticks)


def test_audits_with_their_verdicts(client: Client, folder: Path) -> None:
    (folder / "failed.json").write_text(json.dumps(report(passed=False, lower_bound=2.5)))
    (folder / "broken.json").write_text(json.dumps(report(claims=[])))
    page = plain(client.get("/audit").text)
    assert "audit.json Pass Claimed ε ≤ 2 at δ = 0.001, found ε ≥ 1.3 with confidence 0.95" in page
    assert "failed.json Fail" in page
    assert "broken.json : broken.json is not as" in page


def test_empty_folders_say_how_to_fill_them(tmp_path: Path) -> None:
    client = admitted(tmp_path)
    for place, words in (
        ("/runs", "cpsgd train"),
        ("/budget", "cpsgd budget create"),
        ("/audit", "cpsgd audit --json"),
    ):
        assert words in client.get(place).text


# ------------------------------------------------------------------ hostility


def test_a_hostile_folder_gets_nothing_into_any_page(tmp_path: Path) -> None:
    client = admitted(write_hostile(tmp_path / "x"))
    (run,) = client.dashboard._folder.runs()
    pages = [client.get(place).text for place in ("/runs", "/budget", "/audit")]
    pages += [client.get(place, params={"name": run}).text for place in ("/run", "/run/report.html")]
    told = events(client.get("/run/events", params={"name": run}).text)
    pages.append(told[0][1]["live"])
    client.dashboard._verifier.close()
    for page in pages:
        assert "window.hacked" in page  # as text
        check_harmless(page)


def test_names_with_line_breaks_are_not_shown(tmp_path: Path) -> None:
    write_run(tmp_path / "a\nevent: plan")
    assert admitted(tmp_path).dashboard._folder.runs() == []
