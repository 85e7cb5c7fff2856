"""A run's curves as a picture, and a report that is one HTML file and needs nothing else."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cpsgd.participation import Participation
from cpsgd.reports import plotting
from cpsgd.reports.numbers import power, rounded_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.learning.experiment import Result

CURVES, REPORT = "curves.png", "report.html"

_STYLES: dict[str, dict[str, Any]] = {
    # Broad and below the others: where all agree, all are seen.
    "private": {"color": plotting.ACCENT, "linewidth": 5.0, "alpha": 0.5, "solid_capstyle": "butt", "zorder": 1},
    "4 bits": {"color": plotting.SEQUENCE[2], "linewidth": 1.4},
    "no privacy": {"color": plotting.INK, "linewidth": 1.4},
    "gaussian": {"color": plotting.SEQUENCE[1], "linewidth": 1.4, "linestyle": (0, (4, 2))},
    "quantized": {"color": plotting.SEQUENCE[3], "linewidth": 1.4, "linestyle": (0, (1, 1.5))},
}


def check() -> None:
    """Raises `CpsgdError` where nothing could be drawn, so that this is known before a long run."""
    plotting.check()


def write(folder: Path, summary: Mapping[str, Any], results: Sequence[Result]) -> list[Path]:
    """Writes the curves and the report (of what `cpsgd train --json` prints) into a run's folder; returns the files."""
    picture = draw(folder / CURVES, results)
    report = folder / REPORT
    report.write_text(page(summary, picture.read_bytes()), encoding="utf-8")
    return [picture, report]


def draw(path: Path, results: Sequence[Result]) -> Path:
    """Test accuracy, or R², and loss against rounds."""
    last = results[0].to_dict()
    percent = last["accuracy"] is not None
    figure = plotting.new_figure(10.4, 4.2)
    left, right = figure.subplots(1, 2)
    _curves(left, results, "accuracy" if percent else "r_squared", 100.0 if percent else 1.0)
    _curves(right, results, "loss", 1.0)
    plotting.tidy(left, title=f"Test {score_name(last)}", xlabel="round", ylabel="%" if percent else None)
    plotting.tidy(right, title="Test loss", xlabel="round", ylabel=None)
    left.legend(frameon=False, fontsize=9, labelcolor=plotting.INK, loc="lower right")
    return plotting.save(figure, path)


def score_name(result: Mapping[str, Any]) -> str:
    """What is measured beside the loss."""
    return "accuracy" if result.get("r_squared") is None else "R²"


def score_text(result: Mapping[str, Any]) -> str:
    """A run's accuracy, or R²; nothing where the model was no longer finite."""
    if result.get("r_squared") is not None:
        return f"{result['r_squared']:.4f}"
    return f"{result['accuracy']:.2%}" if result["accuracy"] is not None else "-"


def _curves(axes: Axes, results: Sequence[Result], figure: str, factor: float) -> None:
    from matplotlib.ticker import MaxNLocator

    for result in results:
        measured = ((metrics.round + 1, getattr(metrics, figure)) for metrics in result.history)
        points = [(round, value * factor) for round, value in measured if value is not None]
        axes.plot(*zip(*points, strict=True), label=result.name, **_STYLES.get(result.name, {}))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def page(summary: Mapping[str, Any], picture: bytes) -> str:
    """The report as HTML."""
    private, *others = summary["results"]
    guarantee, bound = summary["guarantee"], summary["paper_bound"]
    floats, score = summary["float32_bytes"], score_name(private)
    cards = [
        (score_text(private), f"test {score}, private"),
        *[(score_text(result), f"test {score}, no privacy") for result in others if result["name"] == "no privacy"],
        (f"{private['bits_per_coordinate']:.3g}", "bits per coordinate"),
        (f"{floats / private['bytes_per_client']:.1f}×", "shorter than float32"),
    ]
    privacy = []
    if guarantee is not None:
        secrecy = Participation.parse(guarantee["participation"]).secrecy
        cards.insert(0, (f"{rounded_up(guarantee['epsilon'])}", f"ε at δ = {power(guarantee['delta'])}"))
        privacy = [
            ("guarantee", f"ε = {rounded_up(guarantee['epsilon'])}, δ = {guarantee['delta']:g}"),
            ("neighbours", guarantee["adjacency"]),
            ("protects", unit_text(summary)),
            ("randomness", seed_text(summary)),
            ("participation", f"{guarantee['participation']}, {guarantee['rounds']:,} rounds"),
            *([] if secrecy is None else [("secret", secrecy)]),
            ("proved by", guarantee["citation"]),
            ("noise of", f"{guarantee['noise_clients']:,} clients per round"),
            ("published bound", published_text(bound)),
        ]
    runs = "".join(
        f"<tr{' class=first' if index == 0 else ''}><th>{escape(result['name'])}</th>"
        f"<td>{score_text(result)}</td><td>{result['loss']:.4f}</td>"
        f"<td>{'∞' if result['epsilon'] is None else rounded_up(result['epsilon'])}</td>"
        f"<td>{result['bits_per_coordinate']:.4g}</td><td>{result['bytes_per_client'] / 1e6:.4f}</td>"
        f"<td>{result['bytes_total'] / 1e6:,.0f}</td><td>{result['seconds']:.0f}</td></tr>"
        for index, result in enumerate(summary["results"])
    )
    shown = "".join(f"<div><b>{escape(value)}</b><span>{escape(text)}</span></div>" for value, text in cards)
    encoded = base64.b64encode(picture).decode()
    title = escape(f"{summary['run']}: private training on {summary['dataset']}")
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{_CSS}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p class="note">All clients lived on one machine: {escape(seed_text(summary))}.</p>
<section class="cards">{shown}</section>
<h2>Beside the baselines</h2>
<div class="wide"><table class="runs">
<thead><tr><th>run</th><th>{score}</th><th>loss</th><th>ε</th><th>bits per coordinate</th>
<th>MB per client and round</th><th>MB in all</th><th>seconds</th></tr></thead>
<tbody>{runs}</tbody>
</table></div>
<p class="note">Data: {escape(summary["source"])}. Accuracy and loss are on test images that no client holds. A float32
update takes {floats / 1e6:.4f} MB.</p>
<img alt="Test {score} and loss of every run against rounds" src="data:image/png;base64,{encoded}">
{_facts("Privacy", privacy)}
{_facts("Protocol", [(key, _value(value)) for key, value in summary["protocol"].items() if value is not None])}
{_facts("Settings", [(key, _value(value)) for key, value in summary["settings"].items()])}
</main>
</body>
</html>
"""


def _facts(title: str, rows: Sequence[tuple[str, str]]) -> str:
    if not rows:
        return ""
    body = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in rows)
    return f'<h2>{escape(title)}</h2>\n<table class="facts"><tbody>{body}</tbody></table>'


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def unit_text(summary: Mapping[str, Any]) -> str:
    """What the guarantee is about."""
    if summary["unit"] == "client":
        return "all that one client holds"
    return f"one example of a client, who sends at most {summary['settings']['examples']:,}"


def seed_text(summary: Mapping[str, Any]) -> str:
    """Where the noise came from, and what that means."""
    if summary["device"] != "cpu":
        start = f"seed {summary['settings']['seed']}" if summary["seeded"] else "a seed that was not kept"
        return (
            "a simulation that protects nobody: on a GPU random numbers come from a counter (Philox), here with "
            f"{start}, and the noise of a round's sum is one draw per coordinate"
        )
    if summary["seeded"]:
        return f"a simulation that protects nobody, since its noise follows from seed {summary['settings']['seed']}"
    return "not seeded, the noise came from the operating system"


def published_text(bound: Mapping[str, Any]) -> str:
    """What the published accounting of its mechanism says of a run, in words."""
    if bound["epsilon"] is not None:
        return f"ε = {rounded_up(bound['epsilon'])} for the same protocol, by {bound['method']}"
    text = f"none for this protocol: {bound['reason']}"
    if bound.get("epsilon_at_paper_range") is not None:
        text += (
            f" With the paper's X = {bound['paper_range']:.4g} and the same k and m: "
            f"ε = {rounded_up(bound['epsilon_at_paper_range'])}."
        )
    return text


_CSS = """
:root { color-scheme: light dark; --ink: #1b1f24; --muted: #6b7280; --line: #e5e7eb; --paper: #fff; --accent: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e8eaed; --muted: #9aa3af; --line: #30363d; --paper: #14171b; --accent: #fb923c; }
}
body { margin: 0; background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 60rem; margin: 0 auto; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0 0 .5rem; }
h2 { font-size: 1.1rem; margin: 2.5rem 0 .75rem; }
.note { color: var(--muted); font-size: .92rem; max-width: 46rem; }
.cards { display: flex; flex-wrap: wrap; gap: .75rem; margin-top: 1.5rem; }
.cards div { flex: 1 1 8rem; border: 1px solid var(--line); border-radius: .6rem; padding: .8rem 1rem; }
.cards b { display: block; font-size: 1.5rem; font-variant-numeric: tabular-nums; }
.cards span { color: var(--muted); font-size: .85rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th { text-align: left; font-weight: 500; }
th, td { padding: .4rem .75rem .4rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { color: var(--muted); font-size: .82rem; }
.runs td, .runs thead th:not(:first-child) { text-align: right; }
.runs .first { color: var(--accent); font-weight: 600; }
.facts th { width: 12rem; color: var(--muted); }
img { display: block; width: 100%; height: auto; margin-top: 1.5rem; border-radius: .4rem; background: #fff; }
"""
