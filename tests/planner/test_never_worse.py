"""Plans are never worse than they were: a table of requirements, a few of which are planned again."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest

from benchmarks.planner_grid import COUNT, key, ratio, requirements, worse

TABLE = Path(__file__).parents[2] / "docs" / "results" / "planner" / "grid.csv"
# Quick ones, of few and many clients and coordinates, one and many rounds, with and without secure aggregation.
AGAIN = (2, 3, 7, 26, 61, 87, 106, 116)


def recorded() -> list[dict[str, str]]:
    with TABLE.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_the_table_is_of_these_requirements() -> None:
    rows, asked = recorded(), list(requirements())
    assert len(rows) == COUNT >= 200
    assert [key(row) for row in rows] == [key(one) for one in asked]
    assert {row["mechanism"] for row in rows} >= {"binomial", "coins", "lazy-coins", "sampled-coins"}


def test_no_plan_of_the_table_is_worse() -> None:
    rows = recorded()
    assert sum(bool(row["before"]) for row in rows) >= 120
    assert not [row for row in rows if worse(row)]


def test_a_worse_plan_would_be_noticed() -> None:
    row = next(row for row in recorded() if row["before"])
    assert worse({**row, "best": str(1.01 * float(row["before"]))})
    assert worse({**row, "best": ""})


@pytest.mark.parametrize("place", AGAIN)
def test_a_plan_of_today(place: int) -> None:
    row = recorded()[place]
    assert row["before"]
    best, _ = ratio(list(requirements())[place], "best")
    assert not worse({**row, "best": best})
