"""`cpsgd table report`: questions as texts, one budget for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpsgd.cli.report import read_question
from cpsgd.errors import ParameterError
from cpsgd.ledger import Budget, Ledger

QUESTIONS = (
    "mean age=0:100",
    "sum age=0:100",
    "count smokes by sex=f,m",
    "histogram age=0,40,100",
    "histogram city in Bern,Basel",
    "quantiles age=0:100 at 0.5",
)
COST = ("--epsilon", 8, "--delta", 1e-6)


def save_people() -> None:
    rows = [f"{i // 2},{20 + i % 60},{'fm'[i % 2]},{int(i % 3 == 0)},{('Bern', 'Basel')[i % 2]}" for i in range(1200)]
    Path("people.csv").write_text("id,age,sex,smokes,city\n" + "\n".join(rows) + "\n")


def test_all_questions_share_a_budget(cpsgd: Any) -> None:
    save_people()
    ledger = Ledger("b.ledger")
    ledger.create(Budget(population="all", epsilon=9.0, delta=2e-6))
    paid = (*COST, "--user", "id", "--rows-per-user", 2, "--ledger", "b.ledger", "--population", "all")
    found = cpsgd.json("table report", "people.csv", *QUESTIONS, *paid)
    assert found["epsilon"] <= 8
    assert tuple(found["results"]) == QUESTIONS == tuple(found["split"])
    assert abs(found["results"]["mean age=0:100"]["values"][0]["value"] - 49.5) < 10
    assert [each["group"] for each in found["results"]["count smokes by sex=f,m"]["values"]] == ["f", "m"]
    assert found["results"]["quantiles age=0:100 at 0.5"]["unit"] == "user"
    assert ledger.total("all").rounds >= len(QUESTIONS)
    cpsgd.refuses("is left", "table report", "people.csv", *QUESTIONS, *paid)


def test_errors_that_are_wanted_split_it(cpsgd: Any) -> None:
    save_people()
    text = cpsgd("table report", "people.csv", "mean age=0:100 within 1", "count smokes within 50", *COST).stdout
    assert "1 wanted" in text
    assert "50 wanted" in text
    assert "per row for all together, replace-one neighbours" in text
    # Labels and numbers do not run into each other.
    assert any(line.split()[:1] == ["age"] and "  [" in line for line in text.splitlines())


@pytest.mark.parametrize(
    ("questions", "options", "words"),
    [
        (("median age",), (), "a question such as"),
        (("mean age",), (), "LOW:HIGH"),
        (("mean",), (), "Expected bounds"),
        (("mean age=0:100 at 0.5",), (), "Expected bounds"),
        (("histogram age",), (), "separated by commas"),
        (("histogram age=a,b",), (), "numbers"),
        (("count smokes by sex",), (), "List the groups"),
        (("count smokes within much",), (), "numbers"),
        (("count smokes within -1",), (), "wanted error"),
        (("count smokes", "count smokes"), (), "asked twice"),
        (("count smokes",), ("--user", "id"), "--rows-per-user"),
        (("mean id=0:9",), ("--user", "id"), "is the column of users"),
        (("mean age=0:100 within 1", "count smokes"), (), "or of no question"),
        ((), (), "QUESTION"),
    ],
)
def test_wrong_questions_are_refused(
    cpsgd: Any, questions: tuple[str, ...], options: tuple[object, ...], words: str
) -> None:
    save_people()
    cpsgd.refuses(words, "table report", "people.csv", *questions, *COST, *options)


def test_a_question_is_read_however_it_is_spaced() -> None:
    for text in ("mean  age=0:100  by sex=f,m within 0.5", " mean age=0:100 by sex=f,m   within 0.5 "):
        question, wanted = read_question(text, 1, "drop")
        assert (question.bounds, question.group_by, question.missing, wanted) == (
            {"age": (0.0, 100.0)},
            ("sex",),
            "drop",
            0.5,
        )
    with pytest.raises(ParameterError):
        read_question("", 1, None)
