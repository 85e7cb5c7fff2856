"""`benchmarks/pair.py`: every figure is there and of the right size."""

from __future__ import annotations

import sys

import pytest

from benchmarks import pair


def test_the_parts_of_a_report_are_measured() -> None:
    found = pair.parts(1_000, 200, turns=1)
    assert (found["prime"], found["dim"]) == (337, 200)
    assert found["upload_bytes"] < 4 * 200
    assert all(found[f"{party}_ms"] > 0 for party in ("client", "leader", "helper"))


@pytest.mark.slow
def test_a_liar_moves_the_mean_as_far_as_the_formula_says_and_no_farther() -> None:
    found = pair.liar(1_000, tries=3)
    assert found["by_attack"] == pytest.approx(found["by_formula"], rel=1e-3)
    assert found["by_formula"] < 32.5
    assert found["out_of_range_refused"] == 3


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_reports_are_counted_per_second() -> None:
    found = pair.load(100, 40, at_once=4)
    assert found["per_second"] > 1
    assert found["leader_cpu_ms"] >= 0
    assert 10 < found["helper_mb"] < 1000


def test_a_million_reports_cost_what_their_parts_do() -> None:
    row = {"dim": 1000, "prime": 8191, "levels": 2, "upload_bytes": 2441, "leader_cpu_ms": 0.36, "helper_cpu_ms": 0.18}
    leader, helper = pair.million(row)
    assert (leader["core_hours"], helper["core_hours"]) == (pytest.approx(0.1), pytest.approx(0.05))
    assert leader["gb_in"] == pytest.approx(2.441)
    assert leader["gb_out"] == helper["gb_in"] > 0.5
    assert leader["dollars"] == pytest.approx(0.005 + 0.09 * leader["gb_out"])
    pair.show("costs", [leader, helper])
