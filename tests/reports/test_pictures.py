"""Pictures of plans, audits and budgets, and the sentence about where noise came from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpsgd import Protocol
from cpsgd.audit import Check, audit
from cpsgd.ledger import Budget, Entry, RoundEvent
from cpsgd.neighbours import Adjacency
from cpsgd.planner import plan
from cpsgd.reports import pictures, plotting
from cpsgd.reports.run_report import seed_text

pytest.importorskip("matplotlib")


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that are saved in a test."""
    figures: list[Any] = []
    real = plotting.save
    monkeypatch.setattr(plotting, "save", lambda figure, path: figures.append(figure) or real(figure, path))
    return figures


# ---------------------------------------------------------------- plans


@pytest.mark.parametrize(
    "requirements",
    [
        {"clients": 1_000, "dim": 1_000, "bits": 4},
        {"clients": 1_000_000, "dim": 16, "bits": 9},  # on a logarithmic axis
        {"clients": 1_000, "dim": 1_000, "bits": 13, "secure": True, "rounds": 3, "participation": "every"},
    ],
)
def test_the_frontier_of_a_plan_in_two_formats(requirements: dict[str, object], tmp_path: Path) -> None:
    best = plan(epsilon=1.0, delta=1e-6, mechanism="binomial", **requirements)  # type: ignore[arg-type]
    for suffix, magic in ((".png", b"\x89PNG"), (".svg", b"<?xml")):
        assert pictures.draw_frontier(best, tmp_path / f"frontier{suffix}").read_bytes().startswith(magic)


def test_with_correlated_noise_it_is_about_the_model_and_fits_the_picture(tmp_path: Path, drawn: list[Any]) -> None:
    best = plan(1000, 100, 2.0, 1e-6, bits=12, rounds=20, participation="once", correlated=4)
    pictures.draw_frontier(best, tmp_path / "frontier.png")
    (figure,) = drawn
    # Warnings are errors here: words that are wider than the picture leave the axes no room.
    figure.draw_without_rendering()
    (axes,) = figure.axes
    assert axes.get_window_extent().width > 0.7 * figure.bbox.width
    assert all(text.get_window_extent().x0 >= 0 for text in axes.texts)
    assert list(axes.lines[1].get_ydata()) == [1 / p.prefix.gain for p in best.frontier if p.prefix is not None]
    assert "model" in axes.get_ylabel()


# --------------------------------------------------------------- audits


@pytest.mark.usefixtures("fixed_seed")
def test_the_verdict_and_both_curves_of_an_audit(tmp_path: Path, drawn: list[Any]) -> None:
    protocol = Protocol.rotated_binomial(clients=2, dim=8, clip_norm=1.0, levels=8, trials=250)
    report = audit(protocol, 1e-3, rounds=1_000, seed=1)
    assert pictures.draw_audit(report, tmp_path / "audit.svg").read_text().startswith("<?xml")
    pictures.draw_audit(replace(report, checks=(Check("law", "question", 2.0, 1.0),)), tmp_path / "failed.png")
    passed, failed = (figure.axes[0] for figure in drawn)
    assert passed.get_title(loc="left").startswith("PASS")
    assert len(passed.lines) == 3
    assert failed.get_title(loc="left").startswith("FAIL")


# -------------------------------------------------------------- budgets


def budget_axes(spent: list[float], folder: Path, drawn: list[Any]) -> Any:
    """The axes of the picture of a budget after rounds that brought ε to each of `spent`."""
    budget = Budget(population="us", epsilon=4.0, delta=1e-6, adjacency=Adjacency.REPLACE_ONE)
    protocol = Protocol.rotated_binomial(clients=10, dim=5, clip_norm=1.0, levels=2, trials=14)
    event = RoundEvent(protocol, survivors=10)
    entries = [
        Entry(i + 1, "us", event, f"2026-01-{i + 1:02}T00:00:00+00:00", epsilon, "method")
        for i, epsilon in enumerate(spent)
    ]
    pictures.draw_spending(budget, entries, folder / "b.png")
    return drawn[0].axes[0]


@pytest.mark.parametrize("spent", [[0.123456], [0.5, 0.75], [0.1 * i for i in range(1, 20)]])
def test_every_round_has_a_mark_and_a_single_one_its_number(
    spent: list[float], tmp_path: Path, drawn: list[Any]
) -> None:
    axes = budget_axes(spent, tmp_path, drawn)
    marks = [line for line in axes.lines if line.get_marker() == "o"]
    assert [list(line.get_ydata()) for line in marks] == [spent]
    assert all(line.get_markersize() > 1 for line in marks)
    low, high = axes.get_xlim()
    assert all(low <= x <= high for x in marks[0].get_xdata())
    assert low < high
    assert ("ε = 0.1235" in [text.get_text() for text in axes.texts]) == (len(spent) == 1)


def test_nothing_spent_is_the_limit_alone(tmp_path: Path, drawn: list[Any]) -> None:
    assert len(budget_axes([], tmp_path, drawn).lines) == 1


# ------------------------------------------------------------ sentences


@pytest.mark.parametrize(
    ("device", "seed", "parts"),
    [
        ("cpu", 3, ("protects nobody",)),
        ("cpu", None, ("not seeded, the noise came from the operating system",)),
        ("cuda", 3, ("seed 3", "protects nobody", "counter (Philox)", "one draw per coordinate")),
        ("cuda", None, ("a seed that was not kept", "protects nobody", "counter (Philox)", "one draw per coordinate")),
    ],
)
def test_the_source_of_noise_is_named(device: str, seed: int | None, parts: tuple[str, ...]) -> None:
    settings = {"seed": "none" if seed is None else seed}
    text = seed_text({"device": device, "seeded": seed is not None, "settings": settings})
    assert all(part in text for part in parts)
