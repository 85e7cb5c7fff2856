"""The picture of an audit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from cpsgd import Protocol
from cpsgd.audit import Check, audit
from cpsgd.reports import plotting
from cpsgd.reports.pictures import draw_audit

pytest.importorskip("matplotlib")


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_seed")
def test_the_verdict_and_both_curves_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = Protocol.rotated_binomial(clients=2, dim=8, clip_norm=1.0, levels=8, trials=250)
    report = audit(protocol, 1e-3, rounds=1_000, seed=1)
    figures = []
    real = plotting.new_figure
    monkeypatch.setattr(plotting, "new_figure", lambda *size: figures.append(real(*size)) or figures[-1])
    path = draw_audit(report, tmp_path / "audit.svg")
    assert path.read_text().startswith("<?xml")
    axes = figures[0].axes[0]
    assert axes.get_title(loc="left").startswith("PASS")
    assert len(axes.lines) == 3
    draw_audit(replace(report, checks=(Check("law", "question", 2.0, 1.0),)), tmp_path / "failed.png")
    assert figures[1].axes[0].get_title(loc="left").startswith("FAIL")
