"""The frontier's picture, also on a logarithmic axis."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cpsgd.planner import plan
from cpsgd.reports import plotting
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


def test_with_correlated_noise_it_is_about_the_model_and_fits_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plotting, "save", lambda figure, path: figure)
    found = plan(1000, 100, 2.0, 1e-6, bits=12, rounds=20, participation="once", correlated=4)
    figure: Any = draw_frontier(found, tmp_path / "frontier.png")
    # Warnings are errors here: words that are wider than the picture leave the axes no room.
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_window_extent().width > 0.7 * figure.bbox.width
    assert all(text.get_window_extent().x0 >= 0 for text in axes.texts)
    assert list(axes.lines[1].get_ydata()) == [1 / p.prefix.gain for p in found.frontier if p.prefix is not None]
    assert "model" in axes.get_ylabel()


def test_powers_of_ten() -> None:
    assert power(1e-9) == "10⁻⁹"
    assert power(2e-9) == "2e-09"
    assert power(0.05) == "0.05"
