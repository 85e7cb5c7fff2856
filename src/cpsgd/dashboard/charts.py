"""Charts as SVG, drawn by the server: lines with marks, and the numbers at each place.

Geometry is computed here, and `chart.html` writes it down. A chart is drawn twice, for large pages and for small ones,
and the style sheet shows one of them. Numbers appear where one points: a chart is cut into columns, each with a text
that the style sheet shows while the pointer is over it, so that no script is needed.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

from cpsgd._numbers import rounded_up

_Any = TypeVar("_Any")
Point = tuple[float, float]

# Points of a line that are drawn, and columns that one can point at.
_MOST_POINTS, _MOST_COLUMNS = 400, 80
_LINE_HEIGHT, _LETTER = 16.0, 6.6
SIZES = {"wide": (800.0, 300.0), "half": (540.0, 290.0), "narrow": (310.0, 235.0)}
"""Widths and heights of charts: across a page, beside another one, and on a telephone or in three columns."""
STYLES = 8
"""How many ways there are to draw a line; later ones repeat."""


@dataclass(frozen=True)
class Series:
    """A line of a chart.

    Attributes:
        label: Name of the line.
        points: Its places, from left to right.
        style: Number of its colour and mark.
        hollow: x of the places whose marks are not filled.
        marks: Whether places are marked.
        steps: Whether the value stays until the next place.
        broad: Whether the line is broad, so that it stays visible below lines that cover it.
    """

    label: str
    points: Sequence[Point]
    style: int
    hollow: frozenset[float] = frozenset()
    marks: bool = False
    steps: bool = False
    broad: bool = False


@dataclass(frozen=True)
class Axis:
    """A horizontal or vertical axis.

    Attributes:
        label: Name of the quantity, with its unit.
        low: Lower end.
        high: Upper end.
        ticks: Values with a label.
        show: Formats a value.
        scale: Maps a value to its position; linear if not given.
        mark: Formats a tick; like `show` if not given.
    """

    label: str
    low: float
    high: float
    ticks: Sequence[float]
    show: Callable[[float], str] = "{:g}".format
    scale: Callable[[float], float] = float
    mark: Callable[[float], str] | None = None

    def place(self, value: float) -> float:
        """Returns the position of a value along the axis, between 0 and 1."""
        low, high = self.scale(self.low), self.scale(self.high)
        found = (self.scale(min(max(value, self.low), self.high)) - low) / (high - low)
        return min(max(found, 0.0), 1.0)


def linear(
    label: str,
    low: float,
    high: float,
    show: Callable[[float], str] = "{:g}".format,
    *,
    mark: Callable[[float], str] | None = None,
    whole: bool = False,
) -> Axis:
    """Returns an axis with about five round ticks; it begins and ends at ticks unless values are `whole`."""
    low, high = min(low, high), max(low, high)  # bounds of figures that make no sense may be in any order
    largest = max(abs(low), abs(high))
    if not high - low > max(1e-9 * largest, 1e-100):
        margin = 0.5 * (largest if largest > 1e-100 else 1.0)
        low, high = low - margin, high + margin
    step = 10.0 ** math.floor(math.log10(high - low))
    step = next(step * part for part in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0) if (high - low) / (step * part) <= 6.0)
    if whole:
        step = max(1.0, math.ceil(step))
    else:
        low, high = step * math.floor(low / step + 1e-9), step * math.ceil(high / step - 1e-9)
    ticks = [round(i * step, 12) for i in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]
    return Axis(label, low, high, ticks, show, mark=mark)


def spending_chart(title: str, points: Sequence[Point], limit: float, rounds: Axis, heading: str) -> Chart:
    """Returns a chart of ε after each round, with the limit; `heading` is a format of the round number."""
    return Chart(
        title=title,
        series=[Series("ε spent", points, 0, steps=True)],
        x=rounds,
        y=linear("ε spent", 0.0, 1.1 * max(limit, *(y for _, y in points)), rounded_up, mark="{:g}".format),
        limit=(limit, f"limit ε = {rounded_up(limit)}"),
        heading=heading.format,
    )


@dataclass(frozen=True)
class Mark:
    """A mark at one place of a line."""

    x: float
    y: float
    style: int
    hollow: bool


@dataclass(frozen=True)
class Column:
    """A column that shows its numbers while the pointer is over it."""

    left: float
    width: float
    x: float
    dots: list[Mark]
    lines: list[tuple[int | None, str]]
    box: tuple[float, float, float, float]


@dataclass(frozen=True)
class Drawing:
    """A chart drawn at one size, wide or narrow: its frame, ticks, paths and marks in pixels."""

    kind: str
    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    x_ticks: list[tuple[float, str]]
    y_ticks: list[tuple[float, str]]
    paths: list[tuple[int, bool, str]]
    marks: list[Mark]
    chosen: tuple[float, float] | None
    limit: tuple[float, str] | None
    region: str | None
    columns: list[Column]


@dataclass(frozen=True)
class Chart:
    """A chart of one or several lines.

    Attributes:
        title: Title, which screen readers say in place of the chart.
        series: The lines.
        x: The axis below.
        y: The axis to the left.
        limit: A value of y that is drawn across, and its name.
        chosen: A place that is highlighted.
        region: Places under which the area is shaded.
        note: Returns an additional text for a series at a value of x.
        heading: Returns a column's heading from its x.
    """

    title: str
    series: Sequence[Series]
    x: Axis
    y: Axis
    limit: tuple[float, str] | None = None
    chosen: Point | None = None
    region: Sequence[Point] = ()
    note: Callable[[Series, float], str] = lambda series, x: ""
    heading: Callable[[float], str] | None = None

    @property
    def rows(self) -> list[tuple[str, list[str]]]:
        """The chart as a table: for each x its heading and every line's value there, "" where it has none.

        Of long lines only some places are in it.
        """
        heading = self.heading or self.x.show
        found: dict[float, dict[str, str]] = {}
        for series in self.series:
            for x, y in _every(series.points, _MOST_COLUMNS):
                found.setdefault(x, {})[series.label] = self.y.show(y) + self.note(series, x)
        return [
            (heading(x), [values.get(series.label, "") for series in self.series])
            for x, values in sorted(found.items())
        ]

    def drawn(self, kind: str) -> Drawing:
        """Returns the chart drawn at one of the `SIZES`."""
        width, height = SIZES[kind]
        left, right, top, bottom = 52.0, width - 14.0, 14.0, height - 42.0

        def across(value: float) -> float:
            return round(left + (right - left) * self.x.place(value), 1)

        def up(value: float) -> float:
            return round(bottom - (bottom - top) * self.y.place(value), 1)

        y_ticks = [(up(tick), (self.y.mark or self.y.show)(tick)) for tick in self.y.ticks]
        x_ticks = _apart([(across(tick), (self.x.mark or self.x.show)(tick)) for tick in self.x.ticks], right)
        drawn = [(series, _every(series.points, _MOST_POINTS)) for series in self.series]
        return Drawing(
            kind=kind,
            width=width,
            height=height,
            left=left,
            right=right,
            top=top,
            bottom=bottom,
            x_ticks=x_ticks,
            y_ticks=y_ticks,
            paths=[
                (
                    series.style % STYLES,
                    series.broad,
                    _path([(across(x), up(y)) for x, y in points], steps=series.steps),
                )
                for series, points in drawn
                if len(points) > 1
            ],
            marks=[
                Mark(across(x), up(y), series.style % STYLES, x in series.hollow)
                for series, points in drawn
                if series.marks or len(points) == 1
                for x, y in points
            ],
            chosen=None if self.chosen is None else (across(self.chosen[0]), up(self.chosen[1])),
            limit=None if self.limit is None else (up(self.limit[0]), self.limit[1]),
            region=self._region(across, up, bottom) if self.region else None,
            columns=self._columns(
                across, up, (left, right, top, bottom), most=40 if kind == "narrow" else _MOST_COLUMNS
            ),
        )

    def _region(self, across: Callable[[float], float], up: Callable[[float], float], bottom: float) -> str:
        places = [(across(x), up(y)) for x, y in _every(self.region, _MOST_POINTS)]
        return f"M{places[0][0]},{bottom} L" + " ".join(f"{x},{y}" for x, y in places) + f" L{places[-1][0]},{bottom} Z"

    def _columns(
        self, across: Callable[[float], float], up: Callable[[float], float], frame: tuple[float, ...], *, most: int
    ) -> list[Column]:
        """Returns the columns that show all numbers at a place when pointed at."""
        left, right, top, _ = frame
        places = _every(sorted({x for series in self.series for x, _ in series.points}), most)
        shown = [across(x) for x in places]
        edges = [left, *((a + b) / 2 for a, b in pairwise(shown)), right]
        heading = self.heading or (lambda x: f"{self.x.label} {self.x.show(x)}")
        found = []
        for index, (x, middle) in enumerate(zip(places, shown, strict=True)):
            lines: list[tuple[int | None, str]] = [(None, heading(x))]
            dots = []
            for series in self.series:
                y = _at(series, x)
                if y is not None:
                    lines.append((series.style % STYLES, f"{series.label} {self.y.show(y)}{self.note(series, x)}"))
                    dots.append(Mark(middle, up(y), series.style % STYLES, False))
            wide = 18.0 + _LETTER * max(len(line) + (style is not None) * 2 for style, line in lines)
            wide = min(wide, right - left)
            lines = [
                (style, _cut(line, round((wide - 18.0) / _LETTER) - (style is not None) * 2)) for style, line in lines
            ]
            box_left = middle + 10.0 if middle + 10.0 + wide <= right + 8.0 else max(middle - 10.0 - wide, 2.0)
            box = (round(box_left, 1), top + 2.0, round(wide, 1), 10.0 + _LINE_HEIGHT * len(lines))
            width = round(edges[index + 1] - edges[index], 1)
            found.append(Column(round(edges[index], 1), width, middle, dots, lines, box))
        return found


def _cut(text: str, most: int) -> str:
    """Shortens a text in its middle: names differ at the ends, and numbers come last."""
    if len(text) <= most:
        return text
    end = most // 2
    return f"{text[: most - end - 1]}…{text[-end:]}"


def _at(series: Series, x: float) -> float | None:
    """Returns the value of a line at x, or None; steps also have values between their places."""
    index = bisect_left(series.points, (x, -math.inf))
    if index < len(series.points) and series.points[index][0] == x:
        return series.points[index][1]
    return series.points[index - 1][1] if series.steps and index > 0 else None


def _path(places: Sequence[Point], *, steps: bool) -> str:
    """Returns the path of an SVG line through these places."""
    (first_x, first_y), *rest = places
    parts = [f"M{first_x},{first_y}"]
    parts += [f"H{x} V{y}" if steps else f"L{x},{y}" for x, y in rest]
    return " ".join(parts)


def _every(values: Sequence[_Any], most: int) -> Sequence[_Any]:
    """Returns at most `most` of the values, evenly spread and with the last one."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _apart(ticks: list[tuple[float, str]], right: float) -> list[tuple[float, str]]:
    """Returns the ticks whose labels do not overlap."""
    kept: list[tuple[float, str]] = []
    end = -math.inf
    for place, name in ticks:
        half = _LETTER * len(name) / 2 + 3.0
        if place - half > end and place + half <= right + 14.0:
            kept.append((place, name))
            end = place + half
    return kept
