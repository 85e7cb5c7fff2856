"""A run's page: figures, curves, the table beside the baselines, and all facts by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from cpsgd._durable import write_file
from cpsgd._numbers import power, rounded_up, size
from cpsgd.dashboard import pages, runs, values
from cpsgd.dashboard.charts import Chart, Series, linear, spending_chart
from cpsgd.dashboard.runs import RecordedRun, RunCurve
from cpsgd.errors import CpsgdError
from cpsgd.neighbours import Participation
from cpsgd.reports import run_report

Figure = Literal["loss", "score"]

_MOST_FACTS = 200
REPORT = "report.html"
"""Name of a run's page in its folder."""


def saved_page(run: RecordedRun) -> str:
    """Returns the page of a run as one file, without anything that needs a server or a script."""
    return pages.render_saved("run.html", tab="runs", **view(run))


def write(path: Path) -> Path:
    """Writes the page of the run in a folder into that folder, as `cpsgd train` does at its end."""
    report = path / REPORT
    write_file(report, saved_page(runs.read(path, path.name)).encode())
    return report


def view(run: RecordedRun) -> dict[str, Any]:
    """Returns the values of the template `run.html`."""
    return {
        "run": run,
        "score_name": _score_name(run.private),
        "cards": _cards(run),
        "share": _share(run),
        "nobody": run_report.NOBODY if _simulated(run) else None,
        "charts": [chart for chart in (comparison([run], "score"), comparison([run], "loss"), _spending(run)) if chart],
        "rows": [row(run, curve) for curve in run.curves],
        "facts_of": [(title, rows) for title, rows in _facts(run) if rows],
        "dataset": values.text(run.settings.get("dataset") if run.summary is None else run.summary.get("dataset")),
        "source": None if run.summary is None else values.text(run.summary.get("source")),
        "randomness": _randomness(run),
        "damaged": sum(curve.damaged for curve in run.curves),
    }


def _score_name(curve: RunCurve) -> str:
    return "R²" if curve.regression else "accuracy"


def score_text(curve: RunCurve) -> str:
    """Returns a curve's last accuracy or R² as text."""
    found = curve.last("score")
    if found is None:
        return "–"
    return f"{found:.4f}" if curve.regression else f"{found:.2%}"


def _share(run: RecordedRun) -> tuple[float, float] | None:
    """Returns the spent ε and its limit; None if either is unknown."""
    spent = run.private.last("epsilon")
    return None if spent is None or run.limit is None else (spent, run.limit)


def _cards(run: RecordedRun) -> list[tuple[str, str]]:
    """Returns a run's key figures as (value, label)."""
    private = run.private
    shown = [private, *(curve for curve in run.curves if curve.name == "no privacy")]
    cards = [(score_text(curve), f"test {_score_name(curve)}, {curve.name}") for curve in shown]
    result = _results(run).get(private.name, {})
    bits, floats = values.number(result.get("bits_per_coordinate")), None
    length = private.last("message")
    if run.summary is not None:
        floats = values.number(run.summary.get("float32_bytes"))
    if bits is not None:
        cards.append((f"{bits:.3g}", "bits per coordinate"))
    if length and floats:
        cards.append((f"{floats / length:.1f}×", "shorter than float32"))
    if run.summary is None and (sent := private.last("bytes_total")) is not None:
        cards.append((size(sent), "sent by all clients so far"))
    return cards


def _results(run: RecordedRun) -> dict[str, Mapping[str, Any]]:
    """Returns the summary's results by the name of their curve."""
    found = values.mapping(run.summary).get("results")
    rows = [values.mapping(each) for each in found] if isinstance(found, list) else []
    return {values.text(row.get("name")): row for row in rows}


def row(run: RecordedRun, curve: RunCurve) -> dict[str, str]:
    """Returns the cells of a curve's row in the table."""
    result = _results(run).get(curve.name, {})
    loss, epsilon, total = curve.last("loss"), curve.last("epsilon"), curve.last("bytes_total")
    bits, length = values.number(result.get("bits_per_coordinate")), curve.last("message")
    remark = f"; {run_report.NOBODY}" if _simulated(run) else ""
    return {
        "name": curve.name,
        "rounds": f"{len(curve.rounds):,}",
        "score": score_text(curve),
        "loss": "–" if loss is None else f"{loss:.4f}",
        "epsilon": ("∞" if run.summary is not None else "–") if epsilon is None else rounded_up(epsilon) + remark,
        "bits": "–" if bits is None else f"{bits:.4g}",
        "message": "–" if length is None else size(length),
        "total": "–" if total is None else size(total),
        "seconds": f"{sum(each.seconds for each in curve.rounds):,.0f}",
    }


def comparison(runs: Sequence[RecordedRun], figure: Figure) -> Chart | None:
    """Returns a chart over rounds: all curves of one run, or the private curves of several. None without points."""
    several = len(runs) > 1
    named = [(run.name, run.private) for run in runs] if several else [(each.name, each) for each in runs[0].curves]
    lines = [(name, curve, curve.points(figure)) for name, curve in named]
    lines = [(name, curve, points) for name, curve, points in lines if points]
    if not lines:
        return None
    percent = figure == "score" and not any(curve.regression for _, curve, _ in lines)
    heights = [y for *_, points in lines for _, y in points]
    last = max(points[-1][0] for *_, points in lines)
    name = "loss" if figure == "loss" else _score_name(lines[0][1])
    return Chart(
        title=f"Test {name} against rounds",
        series=[
            Series(name, points, style, broad=style == 0 and not several)
            for style, (name, _, points) in enumerate(lines)
        ],
        x=linear("round", 0.0, max(last, *(float(run.rounds or 0) for run in runs)), "{:,.0f}".format, whole=True),
        y=linear(
            f"test {name}",
            max(0.0, min(heights)) if percent else min(*heights, 0.0 if figure == "loss" else heights[0]),
            min(1.0, max(heights) * 1.03) if percent else max(heights),
            (lambda value: f"{100.0 * value:.3g} %") if percent else "{:.4g}".format,
        ),
        heading=lambda x: f"round {x:,.0f}",
    )


def _spending(run: RecordedRun) -> Chart | None:
    """Returns the chart of ε spent, with the limit."""
    points = run.private.points("epsilon")
    if not points or run.limit is None:
        return None
    rounds = linear("round", 0.0, float(max(run.rounds or 0, points[-1][0])), "{:,.0f}".format, whole=True)
    return spending_chart("ε spent against rounds, with the limit", points, run.limit, rounds, "round {:,.0f}")


def _simulated(run: RecordedRun) -> bool:
    device = values.mapping(run.summary).get("device")
    return run_report.is_simulation(run.settings, device if isinstance(device, str) else None)


def _randomness(run: RecordedRun) -> str | None:
    try:
        return None if run.summary is None else run_report.seed_text(run.summary)
    except (KeyError, TypeError, ValueError):
        return None


def _facts(run: RecordedRun) -> list[tuple[str, list[tuple[str, str]]]]:
    protocol = values.mapping(values.mapping(run.summary).get("protocol"))
    return [("Privacy", _privacy(run)), ("Protocol", _rows(protocol)), ("Settings", _rows(run.settings))]


def _rows(found: Mapping[str, Any]) -> list[tuple[str, str]]:
    first = islice(found.items(), _MOST_FACTS)
    return [(values.text(key), values.text(value)) for key, value in first if value is not None]


def _privacy(run: RecordedRun) -> list[tuple[str, str]]:
    """Returns rows about the guarantee of a finished run."""
    summary = run.summary
    if summary is None or summary.get("guarantee") is None:
        return []
    try:
        guarantee = summary["guarantee"]
        secrecy = Participation.parse(guarantee["participation"]).secrecy
        return [
            ("guarantee", f"ε = {rounded_up(guarantee['epsilon'])}, δ = {power(guarantee['delta'])}"),
            ("neighbours", values.text(guarantee["adjacency"])),
            ("protects", run_report.unit_text(summary)),
            ("randomness", run_report.seed_text(summary)),
            ("participation", f"{guarantee['participation']}, {guarantee['rounds']:,} rounds"),
            *([] if secrecy is None else [("secret", secrecy)]),
            ("proved by", values.text(guarantee["citation"])),
            ("noise of", f"{guarantee['noise_clients']:,} clients per round"),
            ("published bound", run_report.published_text(summary["paper_bound"])),
        ]
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError, CpsgdError):
        return [("guarantee", "the summary is not as `cpsgd train` writes it")]
