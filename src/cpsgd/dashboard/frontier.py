"""The frontier of a plan as a chart: each mechanism's error over bits, estimated or proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from cpsgd.dashboard.charts import Axis, Chart, Series
from cpsgd.dashboard.plan_page import Chosen, Estimate, Found, Part, Refused, Sketch
from cpsgd.registry import MECHANISMS

# The axis has log(ratio - 0.9), which spreads what lies near 1; larger errors are not shown.
_ORIGIN, _LOWEST, _HIGHEST = 0.9, 0.985, 12.0
_HEIGHTS = (1.0, 1.05, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
_WIDTHS = (0.1, 0.25, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0)


@dataclass
class Frontier:
    """The parts of an answer that have arrived so far."""

    estimates: dict[tuple[str, float], Estimate] = field(default_factory=dict)
    chosen: Chosen | None = None
    refused: str | None = None

    def take(self, part: Part) -> None:
        """Adds a part of the answer. What is proved takes the place of what was estimated."""
        match part:
            case Sketch(estimates):
                self._put(*estimates)
            case Chosen(estimate=estimate):
                self.chosen = part
                self._put(estimate)
            case Found(bits, proved, without):
                for mechanism in without:
                    self.estimates.pop((mechanism, bits), None)
                self._put(*proved)
            case Refused(reason):
                self.refused = reason

    def _put(self, *estimates: Estimate) -> None:
        self.estimates |= {(each.mechanism, each.bits): each for each in estimates}

    @property
    def chart(self) -> Chart | None:
        """The chart; None while there is nothing to draw."""
        shown = [each for each in self.estimates.values() if each.ratio <= _HIGHEST]
        if not shown:
            return None
        series = []
        for style, name in enumerate(name for name, kind in MECHANISMS.items() if kind.planned):
            mine = sorted((each for each in shown if each.mechanism == name), key=lambda each: each.bits)
            if mine:
                hollow = frozenset(each.bits for each in mine if not each.proved)
                series.append(Series(name, [(each.bits, each.ratio) for each in mine], style, hollow, marks=True))
        bits = [each.bits for each in shown]
        low, high = min(bits) / 1.15, max(bits) * 1.15
        highest = min(_HIGHEST, max(1.06, 1.1 * max(each.ratio for each in shown)))
        place = self.chosen.estimate if self.chosen is not None else None
        return Chart(
            title="Squared error over the exact Gaussian mechanism's against bits per coordinate, for every mechanism",
            series=series,
            x=Axis("bits per coordinate", low, high, _within(_WIDTHS, low, high), "{:.3g}".format, math.log),
            y=Axis(
                "error ÷ the Gaussian's",
                _LOWEST,
                highest,
                _within(_HEIGHTS, _LOWEST, highest),
                "{:.3g}".format,
                _stretched,
            ),
            limit=(1.0, "exact Gaussian mechanism, real numbers for messages"),
            chosen=None if place is None or place.ratio > _HIGHEST else (place.bits, place.ratio),
            note=lambda series, x: " (estimate)" if x in series.hollow else "",
            heading=lambda x: f"{x:.3g} bits per coordinate",
        )


def _within(values: tuple[float, ...], low: float, high: float) -> list[float]:
    return [value for value in values if low <= value <= high]


def _stretched(ratio: float) -> float:
    return math.log(ratio - _ORIGIN)
