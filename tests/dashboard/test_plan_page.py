"""The planner's questions as the form asks them, and the parts of an answer."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from itertools import dropwhile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cpsgd.dashboard.frontier import Frontier
from cpsgd.dashboard.plan_page import Chosen, Estimate, Found, PlanQuestion, Refused, Sketch, answer
from cpsgd.errors import ParameterError
from cpsgd.planner import plan
from cpsgd.protocol import Protocol

ASKED = PlanQuestion(bits=4.0)


def test_a_form_left_empty_is_the_first_question() -> None:
    assert PlanQuestion.parse({}) == PlanQuestion.parse({"clients": "", "bits": " "}) == PlanQuestion()


def test_fields_are_read_as_people_write_them() -> None:
    form = {"clients": "1e4", "dim": " 200 ", "epsilon": "0.5", "delta": "1e-9", "bits": "1.6", "rounds": "7"}
    asked = PlanQuestion.parse({**form, "scheme": "poisson", "rate": "0.02", "secure": "on"})
    assert asked == PlanQuestion(10_000, 200, 0.5, 1e-9, 1.6, 7, "poisson", 0.02, True)
    assert (asked.participation, str(asked.adjacency)) == ("poisson:0.02", "zero-out")
    # A rate that does not count makes no other question.
    assert PlanQuestion.parse({"scheme": "once", "rate": "nonsense"}) == PlanQuestion(scheme="once")


@pytest.mark.parametrize(
    "form",
    [
        {"clients": "many"},
        {"clients": "0"},
        {"clients": "2.5"},
        {"clients": "1e99"},
        {"dim": "-1"},
        {"epsilon": "nan"},
        {"epsilon": "inf"},
        {"delta": "<b>"},
        {"rounds": "1e9"},
        {"bits": "0x10"},
        {"scheme": "twice"},
        {"scheme": "poisson", "rate": "all"},
    ],
)
def test_what_is_no_number_is_refused_without_repeating_it(form: dict[str, str]) -> None:
    with pytest.raises(ParameterError, match="Expected") as refusal:
        PlanQuestion.parse(form)
    assert "<b>" not in str(refusal.value)


@pytest.mark.parametrize(
    "question",
    [
        ASKED,
        PlanQuestion(),
        PlanQuestion(bits=None, secure=True, rounds=3, scheme="once"),
        PlanQuestion(scheme="poisson", rounds=10),
        PlanQuestion(scheme="fixed-size", rate=0.5),
    ],
)
def test_the_copied_texts_ask_the_same(question: PlanQuestion, cpsgd_options: Any) -> None:
    said: dict[str, Any] = {}

    def remembered(**options: Any) -> SimpleNamespace:
        said.update(options)
        return SimpleNamespace(protocol=None)

    exec(question.python.replace("from cpsgd import plan", ""), {"plan": remembered})
    ours = {**vars(plan_defaults()), **said}
    theirs = vars(question.requirements)
    for name in ("clients", "dim", "epsilon", "delta", "bits", "rounds", "secure"):
        assert ours[name] == theirs[name]
    assert str(ours["participation"]) == str(theirs["participation"])
    assert str(ours["adjacency"]) == str(theirs["adjacency"])
    options = cpsgd_options(question.command)
    assert {name: options[name] for name in ("clients", "dim", "epsilon", "delta", "bits", "rounds", "secure")} == {
        name: theirs[name] for name in ("clients", "dim", "epsilon", "delta", "bits", "rounds", "secure")
    }
    assert str(options["participation"]) == str(theirs["participation"])
    assert str(options["adjacency"]) == str(theirs["adjacency"])


def plan_defaults() -> Any:
    from cpsgd.planner import Requirements

    return Requirements(clients=1, dim=1, epsilon=1.0, delta=0.5)


@pytest.fixture
def cpsgd_options(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """What `cpsgd plan` understands of a command."""
    from cpsgd.cli import app

    def understood(command: str) -> dict[str, Any]:
        program, *words = shlex.split(command)
        assert program == "cpsgd"
        _, bound, _ = app.app.parse_args(words, print_error=False, exit_on_error=False)
        return vars(bound.kwargs["required"])

    return understood


def test_an_answer_comes_in_parts_the_quick_ones_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd.dashboard.plan_page._BITS", (1.0, 4.0))
    first, *others = answer(ASKED)
    assert isinstance(first, Sketch)
    kinds = [type(part) for part in others]
    at = kinds.index(Chosen)
    assert set(kinds[:at]) <= {Sketch}
    assert kinds[-2:] == [Found, Found]
    assert set(kinds[at + 1 : -2]) <= {Sketch}
    sketches = [part for part in (first, *others) if isinstance(part, Sketch)]
    estimates = [each for part in sketches for each in part.estimates]
    assert len({each.mechanism for each in estimates}) >= 5
    assert all(not each.proved and each.ratio > 0.99 for each in estimates)
    chosen, last = others[at], others[-1]
    assert isinstance(chosen, Chosen)
    assert isinstance(last, Found)
    # The frontier is certified by drafts: proofs too, whose errors are up to 4 % larger than the plan's.
    assert 1.0 - 2e-3 < min(each.ratio for each in last.proved) / chosen.estimate.ratio < 1.04
    # Estimates are worth showing: what is proved is near.
    best = min(each.ratio for each in estimates if each.bits == 4.0)
    assert chosen.estimate.ratio == pytest.approx(best, rel=0.02)
    check_plan(chosen)


def check_plan(chosen: Chosen) -> None:
    best = plan(clients=10_000, dim=65_536, epsilon=2.0, delta=1e-6, bits=4)
    assert Protocol.from_json(chosen.protocol) == best.protocol
    assert (chosen.estimate.bits, chosen.estimate.ratio, chosen.estimate.proved) == (4.0, best.ratio, True)
    facts = dict(chosen.facts)
    assert facts["Theorem"] == best.guarantee.citation
    assert facts["Promise"] == str(best.protocol.promise)
    assert json.loads(chosen.protocol)["promise"]["epsilon"] == 2.0
    # An upper bound is never shown smaller than it is.
    assert "at most e^ε = 7.39" in chosen.privacy


def test_what_cannot_be_had_is_said() -> None:
    assert list(answer(replace(ASKED, epsilon=-1.0))) == [Refused("Expected epsilon in (0, 500), got epsilon=-1.0.")]
    # The frontier is worth a look all the same.
    parts = dropwhile(lambda part: isinstance(part, Sketch), answer(replace(ASKED, bits=40.0)))
    refused = next(parts)
    assert isinstance(refused, Refused)
    assert "bits" in refused.reason
    assert isinstance(next(parts), Sketch | Found)


def test_the_frontier_replaces_what_was_estimated() -> None:
    assert Frontier().chart is None
    frontier = Frontier()
    frontier.take(Sketch((Estimate("coins", 1.0, 1.2), Estimate("coins", 2.0, 1.1), Estimate("skellam", 2.0, 50.0))))
    chart = frontier.chart
    assert chart is not None
    (coins,) = chart.series  # 50 times the Gaussian's error is not worth a place
    assert coins.hollow == {1.0, 2.0}
    frontier.take(Found(1.0, (Estimate("coins", 1.0, 1.25, proved=True),), ()))
    frontier.take(Found(2.0, (), ("coins",)))
    chart = frontier.chart
    assert chart is not None
    assert [(series.points, series.hollow) for series in chart.series] == [([(1.0, 1.25)], frozenset())]
    frontier.take(Refused("no"))
    assert frontier.refused == "no"
