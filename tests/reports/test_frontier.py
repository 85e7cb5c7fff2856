"""The frontier's picture, also on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpsgd.planner import plan
from cpsgd.reports.numbers import power
from cpsgd.reports.pictures import draw_frontier


@pytest.mark.slow
@pytest.mark.parametrize(
    "wishes",
    [
        {"clients": 1_000, "dim": 1_000, "bits": 4},
        {"clients": 1_000_000, "dim": 16, "bits": 9},
        {"clients": 1_000, "dim": 1_000, "bits": 13, "secure": True, "rounds": 3, "participation": "every"},
    ],
)
def test_draws(wishes: dict[str, object], tmp_path: Path) -> None:
    found = plan(epsilon=1.0, delta=1e-6, mechanism="binomial", **wishes)  # type: ignore[arg-type]
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        assert draw_frontier(found, tmp_path / f"frontier{suffix}").read_bytes().startswith(magic)


def test_powers_of_ten() -> None:
    assert power(1e-9) == "10⁻⁹"
    assert power(2e-9) == "2e-09"
    assert power(0.05) == "0.05"
