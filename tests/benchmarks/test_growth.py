"""`benchmarks/growth.py`: its tables hold what was run and say what was not."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import growth

SMALL = (10, 100)


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    """Tiny sizes."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(growth, "REPEATED", 1_000)
        patched.setattr(growth, "MOST_TURNS", 2)
        return {"device": None, **growth.measured_here(SMALL, SMALL, limit=math.inf, dim=8)}


def test_every_size_is_measured_beside_memcpy(report: dict[str, Any]) -> None:
    for axis in ("clients", "coordinates"):
        rows = report["tables"][axis]
        assert [row[axis] for row in rows] == list(SMALL)
        assert all(row["seconds"] > 0 and row["memcpy"] > 0 and row["turns"] >= 1 for row in rows)
    assert all(row["add"] > 0 and row["decode"] > 0 for row in report["tables"]["coordinates"])


def test_a_billion_clients_are_extrapolated_and_say_so(report: dict[str, Any]) -> None:
    found, last = report["billion clients"], report["tables"]["clients"][-1]
    assert found["measured"] is False
    assert found["from_clients"] == 100
    assert found["seconds"] == pytest.approx(last["seconds"] * 1e7)
    assert "not run, at the cost per client of 100" in growth.markdown(report)


def test_a_size_over_the_limit_is_not_run_and_has_no_time() -> None:
    asked = []

    def measure(size: int) -> tuple[dict[str, float], int]:
        asked.append(size)
        time.sleep(0.01 * size)
        return {"seconds": 0.9 * size, "memcpy": 0.1 * size}, 1

    rows = growth.grow("clients", (1, 10, 1_000_000), measure, limit=20.0, free=0.0)
    assert asked == [1, 10]
    assert "seconds" not in rows[2]
    assert rows[2]["not_run"].startswith("longer than 20 s")
    found = growth.billion(rows)
    assert found is not None
    assert (found["from_clients"], found["seconds"]) == (10, pytest.approx(0.9e9))


def test_what_does_not_fit_or_is_refused_is_not_run() -> None:
    def measure(size: int) -> tuple[dict[str, float], int]:
        raise growth.NotRunError("refused")

    rows = growth.grow("coordinates", (1, 100), measure, limit=1.0, free=2.0 * growth.BYTES * 10)
    assert [row["not_run"] for row in rows] == ["refused", "memory"]
    assert growth.billion(rows) is None


def test_tables_are_whole(report: dict[str, Any]) -> None:
    tables = re.findall(r"(?:^\|.*\n)+", growth.markdown(report), flags=re.MULTILINE)
    assert len(tables) == 2
    for table in tables:
        lines = table.splitlines()
        assert len(lines) == 2 + len(SMALL)
        assert len({line.count("|") for line in lines}) == 1


def test_a_row_that_was_not_run_is_as_wide(report: dict[str, Any]) -> None:
    rows = {axis: [*found[:1], {axis: 100, "not_run": "memory"}] for axis, found in report["tables"].items()}
    text = growth.markdown({**report, "tables": rows})
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert "not run: memory" in table
        assert len({line.count("|") for line in table.splitlines()}) == 1


def test_the_picture_and_json(report: dict[str, Any], tmp_path: Path) -> None:
    growth.draw(report, tmp_path / "growth.svg")
    assert "<svg" in (tmp_path / "growth.svg").read_text(encoding="utf-8")
    assert json.loads(json.dumps(report)) == report


def test_a_device_has_columns_of_its_own(
    report: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("torch")
    monkeypatch.setattr(growth, "AT_ONCE", 400)  # so that the larger sizes come in several parts
    monkeypatch.setattr(growth, "MOST_TURNS", 1)
    report = {**report, "device": growth.measured_on("cpu", SMALL, SMALL, limit=math.inf, dim=8)}
    for axis in ("clients", "coordinates"):
        assert [row[axis] for row in report["device"][axis]] == list(SMALL)
        assert all(row["seconds"] > 0 < row["memcpy"] for row in report["device"][axis])
    assert report["device"]["billion clients"]["from_clients"] == 100
    text = growth.markdown(report)
    assert text.count("on the device |") == 2
    assert len(re.findall("A billion clients would take", text)) == 2
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        assert len({line.count("|") for line in table.splitlines()}) == 1
    growth.draw(report, tmp_path / "growth.svg")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(3e-7, "0.3 µs"), (0.05, "50 ms"), (1.5, "1.5 s"), (0.002, "2 ms"), (90.0, "90 s"), (9e3, "2.5 h")],
)
def test_seconds_are_told_in_fitting_units(seconds: float, text: str) -> None:
    assert growth.seconds_text(seconds) == text
