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
