"""The paper's Figure 1: error against ε for the Gaussian mechanism and for Binomial mechanisms of several scales s.

A query with sensitivities Δ₂ = Δ∞ = 1 and Δ₁ = √d is answered with noise s (Binomial(N, ½) - N/2) in each of d
coordinates. For every ε and s the smallest N that is proved to suffice is found, once by the paper's Theorem 1 and
once by the certificates; the error is d s² N/4.

    python reproduction/error_vs_epsilon.py --out DIR
"""

from __future__ import annotations

import json as json_module
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter
from rich.markup import escape

from cpsgd._numbers import power
from cpsgd.cli import options, output
from cpsgd.cli.frame import WHOLE, launch, new_app
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.paper.theorem import Sensitivities, binomial_mechanism_trials
from cpsgd.privacy import analytic_sigma, classical_sigma
from cpsgd.privacy.gaussian import gdp_mu
from cpsgd.privacy.proofs.certified_gaussian import certified_epsilon
from cpsgd.privacy.proofs.certified_renyi import renyi_certificate, renyi_floor
from cpsgd.reports import plotting

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCALES = (1.0, 1 / 4, 1 / 16, 1 / 64)
EPSILONS = tuple(0.1 * 100.0 ** (i / 14) for i in range(15))  # 0.1 to 10
# With more trials the Rényi certificate is slow and not better.
_RENYI_TRIALS = 40_000


@dataclass(frozen=True)
class Series:
    """One line: the error at each ε, None where nothing is proved."""

    method: str
    label: str
    scale: float | None
    squared_error: tuple[float | None, ...]


@dataclass(frozen=True)
class ErrorFigure:
    """The figure's data and the files that were written."""

    dim: int
    delta: float
    epsilon: tuple[float, ...]
    series: tuple[Series, ...]
    files: tuple[Path, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values."""
        return {**asdict(self), "files": [str(file) for file in self.files]}


def compute(*, dim: int, delta: float, epsilons: tuple[float, ...]) -> ErrorFigure:
    """Returns the errors of all mechanisms at all ε."""

    def line(method: str, label: str, scale: float | None, error: Callable[[float], float]) -> Series:
        values: list[float | None] = []
        for epsilon in epsilons:
            try:
                values.append(error(epsilon))
            except ConditionError:
                values.append(None)
        return Series(method, label, scale, tuple(values))

    def exact(epsilon: float) -> float:
        return dim * analytic_sigma(epsilon=epsilon, sensitivity=1.0, delta=delta) ** 2

    def classical(epsilon: float) -> float:
        return dim * classical_sigma(epsilon=epsilon, sensitivity=1.0, delta=delta) ** 2

    series = [
        line("gaussian-analytic", "Gaussian, exact", None, exact),
        line("gaussian-classical", "Gaussian, classical lemma", None, classical),
    ]
    for scale in SCALES:
        label = "Binomial, s = 1" if scale == 1.0 else f"Binomial, s = 1/{round(1 / scale)}"

        def by_theorem(epsilon: float, scale: float = scale) -> float:
            norms = Sensitivities(l1=math.sqrt(dim), l2=1.0, linf=1.0)
            trials = binomial_mechanism_trials(
                epsilon=epsilon, p=0.5, dim=dim, delta=delta, sensitivities=norms, scale=scale
            )
            return dim * scale * scale * trials / 4.0

        def by_certificate(epsilon: float, scale: float = scale) -> float:
            return dim * scale * scale * certified_trials(epsilon, delta, dim, scale) / 4.0

        series.append(line("paper-theorem", label, scale, by_theorem))
        series.append(line("certificate", label, scale, by_certificate))
    return ErrorFigure(dim, delta, epsilons, tuple(series))


def certified_trials(epsilon: float, delta: float, dim: int, scale: float) -> int:
    """Returns the smallest N (within 1 %, rounded up) with which a certificate proves this ε."""
    sensitivity = 1.0 / scale
    query: dict[str, Any] = {
        "dim": dim,
        "delta": delta,
        "levels": math.ceil(sensitivity) + 1,
        "sensitivity": sensitivity,
    }

    def gaussian(trials: int) -> bool:
        return certified_epsilon(BinomialLaw(trials, 0.5), **query)[0] <= epsilon

    def renyi(trials: int) -> bool:
        if renyi_floor(2.0 * sensitivity * sensitivity / trials, delta) > epsilon:
            return False
        return renyi_certificate(BinomialLaw(trials, 0.5), **query).epsilon <= epsilon

    # A Binomial needs at least the variance of a Gaussian.
    least = math.floor(4.0 * (sensitivity / gdp_mu(epsilon, delta)) ** 2)
    most = max(least, 1)
    while not _proved(gaussian, most):
        most = math.ceil(1.1 * most)
    found = _bisect(gaussian, max(least, math.floor(most / 1.1)), most)
    return _bisect(renyi, least, found) if found <= _RENYI_TRIALS else found


def _proved(enough: Callable[[int], bool], trials: int) -> bool:
    try:
        return enough(trials)
    except ConditionError:
        return False


def _bisect(enough: Callable[[int], bool], low: int, high: int) -> int:
    """Returns the smallest sufficient number in (low, high], within 1 %; `high` if there is none."""
    while high - low > max(1, 0.01 * high):
        middle = (low + high) // 2
        low, high = (low, middle) if _proved(enough, middle) else (middle, high)
    return high


def write_figure(out: Path, *, dim: int = 1024, delta: float = 1e-9) -> ErrorFigure:
    """Computes and draws; writes `error-vs-epsilon.png` and the numbers behind it as `error-vs-epsilon.json`."""
    figure = plotting.new_figure(10.4, 4.6)
    data = compute(dim=dim, delta=delta, epsilons=EPSILONS)
    left, right = figure.subplots(1, 2, sharey=True)
    _panel(left, data, "paper-theorem", "By the paper's Theorem 1, as published", "expected squared error, Δ₂ = 1")
    _panel(right, data, "certificate", "By the certificates", None)
    figure.suptitle(
        f"Error against privacy of the Gaussian and Binomial mechanisms, d = {dim:,}, δ = {power(delta)}",
        x=0.01,
        ha="left",
        fontsize=12,
        color=plotting.INK,
    )
    picture = plotting.save(figure, out / "error-vs-epsilon.png")
    numbers = out / "error-vs-epsilon.json"
    written = ErrorFigure(data.dim, data.delta, data.epsilon, data.series, (picture, numbers))
    numbers.write_text(json_module.dumps(written.to_dict(), indent=2) + "\n", encoding="utf-8")
    return written


def _panel(axes: Axes, data: ErrorFigure, method: str, title: str, ylabel: str | None) -> None:
    colours = iter(plotting.SEQUENCE)
    for series in data.series:
        values = [math.nan if value is None else value for value in series.squared_error]
        if series.method == "gaussian-analytic":
            axes.plot(data.epsilon, values, color=plotting.INK, linewidth=1.6, label=series.label, zorder=4)
        elif series.method == "gaussian-classical" and method == "paper-theorem":
            axes.plot(
                data.epsilon, values, color=plotting.INK, linewidth=1.2, linestyle=(0, (4, 3)), label=series.label
            )
        elif series.method == method:
            axes.plot(data.epsilon, values, color=next(colours), linewidth=2.0, label=series.label, zorder=3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xticks([0.1, 0.3, 1, 3, 10], ["0.1", "0.3", "1", "3", "10"])
    axes.minorticks_off()
    axes.legend(frameon=False, fontsize=9, labelcolor=plotting.INK, loc="lower left")
    plotting.tidy(axes, title=title, xlabel="ε", ylabel=ylabel)


app = new_app("error_vs_epsilon.py")


@app.default
def main(
    *,
    out: Annotated[Path, Parameter(metavar="FOLDER", help="Where the figure and its data go.")],
    dim: Annotated[int, WHOLE, Parameter(help="d, coordinates of the query.")] = 1024,
    delta: Annotated[float, Parameter(help="δ of the guarantees.")] = 1e-9,
    json: options.Json = False,
) -> None:
    """Draws the paper's Figure 1: error against ε of the Gaussian and Binomial mechanisms, by its theorem and ours."""
    figure = write_figure(out, dim=dim, delta=delta)
    if json:
        output.show_json(figure.to_dict())
        return
    output.console().print(output.facts([("written", escape(str(file))) for file in figure.files]))


if __name__ == "__main__":
    launch(app)
