from __future__ import annotations

import json
from pathlib import Path

import pytest

from reproduction.accuracy_vs_bytes import Point, papers_own, points


def test_bytes_are_those_of_all_passes(tmp_path: Path) -> None:
    """A client that takes part ten times sends ten messages."""
    for folder in ("passes", "one-bit"):
        (tmp_path / folder).mkdir()
    run = {"epsilon": 2.0, "bands": 32, "passes": 10, "bits": 14.0, "bytes_per_client": 1000}
    runs = [{**run, "seed": seed, "curve": [[50, 0.5], [100, accuracy]]} for seed, accuracy in enumerate((0.97, 0.99))]
    (tmp_path / "passes" / "runs.jsonl").write_text("\n".join(map(json.dumps, runs)))
    (tmp_path / "one-bit" / "summary.csv").write_text(
        "method,bits_per_coordinate,accuracy_mean\ncoins,1.0,0.9712\ngaussian,32.0,0.9724\n"
    )
    passes, coins = points(tmp_path)
    assert passes == Point(2.0, "cancelling noise, many passes", 10_000, pytest.approx(98.0))
    assert coins == Point(2.0, "independent noise", 51_370 / 8, pytest.approx(97.12))


def test_the_papers_points_have_its_own_epsilon() -> None:
    own = [(point.epsilon, point.bytes_up) for point in papers_own()]
    assert own == [(4.0, 38527.5), (4.0, 51370.0), (2.0, 38527.5), (2.0, 51370.0)]
