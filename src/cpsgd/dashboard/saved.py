"""A run's page as one file that needs nothing else: `cpsgd train` leaves it in the run's folder."""

from __future__ import annotations

from pathlib import Path

from cpsgd.dashboard import pages, run_view, runs

REPORT = "report.html"
"""Name of the file."""


def page(run: runs.RecordedRun) -> str:
    """The page of a run, without anything that needs a server or a script."""
    return pages.render_saved("run.html", tab="runs", **run_view.view(run))


def write(path: Path) -> Path:
    """Writes the page of the run in a folder into that folder."""
    report = path / REPORT
    report.write_text(page(runs.read(path, path.name)), encoding="utf-8")
    return report
