"""Charts: where things lie, how many there are, and what is said of them."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cpsgd.dashboard import pages
from cpsgd.dashboard.charts import SIZES, Axis, Chart, Series, linear


def chart(points: list[tuple[float, float]], **options: object) -> Chart:
    series = [Series("one", points, 0, **options)]
    return Chart("Title", series, linear("x", 0.0, 10.0), linear("y", 0.0, 1.0))


@pytest.mark.parametrize(
    ("low", "high"), [(0.0, 1.0), (0.3, 0.31), (0.0, 1e-9), (0.0, 1e12), (-5.0, 5.0), (2.0, 2.0), (0.0, 0.0)]
)
def test_axes_have_a_few_round_ticks_inside(low: float, high: float) -> None:
    axis = linear("x", low, high)
    assert 2 <= len(axis.ticks) <= 8
    assert axis.low <= low
    assert axis.high >= high
    assert all(axis.low - 1e-9 <= tick <= axis.high * (1 + 1e-9) + 1e-9 for tick in axis.ticks)
    assert axis.place(axis.low) == 0.0
    assert axis.place(axis.high) == 1.0


SIZES_OF_NUMBERS = st.floats(-1e100, 1e100)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(SIZES_OF_NUMBERS, SIZES_OF_NUMBERS), min_size=1, max_size=5))
@example([(0.0, 5e-324)])
def test_any_numbers_can_be_drawn(points: list[tuple[float, float]]) -> None:
    points.sort()
    x, y = zip(*points, strict=True)
    wild = Chart("t", [Series("a", points, 0, marks=True)], linear("x", min(x), max(x)), linear("y", min(y), max(y)))
    drawn = wild.drawn("narrow")
    assert all(drawn.left <= mark.x <= drawn.right and drawn.top <= mark.y <= drawn.bottom for mark in drawn.marks)
    assert len(wild.y.ticks) <= 12


def test_rounds_are_whole() -> None:
    assert linear("round", 0.0, 3.0, whole=True).ticks == [0.0, 1.0, 2.0, 3.0]


@pytest.mark.parametrize("kind", SIZES)
def test_everything_lies_within_the_frame(kind: str) -> None:
    wild = [(-100.0, -5.0), (0.0, 0.0), (5.0, 0.5), (10.0, 1.0), (1e300, 1e300)]
    drawn = chart(wild, marks=True).drawn(kind)
    for mark in drawn.marks:
        assert drawn.left <= mark.x <= drawn.right
        assert drawn.top <= mark.y <= drawn.bottom
    for column in drawn.columns:
        assert column.width >= 0.0
        assert 0.0 <= column.box[0] <= column.box[0] + column.box[2] <= drawn.width


def test_columns_cover_the_chart_without_gaps_and_say_all_values() -> None:
    points = [(0.0, 0.0), (5.0, 0.5), (10.0, 1.0)]
    both = Chart("t", [Series("a", points, 0), Series("b", points[:2], 1)], linear("x", 0, 10), linear("y", 0, 1))
    drawn = both.drawn("wide")
    edge = drawn.left
    for column in drawn.columns:
        assert column.left == pytest.approx(edge, abs=0.2)
        edge = column.left + column.width
    assert edge == pytest.approx(drawn.right, abs=0.2)
    assert [text for _, text in drawn.columns[1].lines] == ["x 5", "a 0.5", "b 0.5"]
    assert [text for _, text in drawn.columns[2].lines] == ["x 10", "a 1"]
    assert both.rows == [("0", ["0", "0"]), ("5", ["0.5", "0.5"]), ("10", ["1", ""])]


def test_long_lines_are_thinned_and_keep_their_ends() -> None:
    long = [(i / 1000.0, 0.5) for i in range(10_001)]
    drawn = chart(long).drawn("wide")
    assert len(drawn.columns) <= 80
    (_, _, path) = drawn.paths[0]
    assert path.count("L") < 400
    assert path.startswith(f"M{drawn.left},")
    assert f"L{drawn.right}," in path


def test_steps_hold_their_value_in_between() -> None:
    steps = Chart(
        "t",
        [Series("a", [(0.0, 0.0), (10.0, 1.0)], 0, steps=True), Series("b", [(5.0, 0.5)], 1)],
        linear("x", 0, 10),
        linear("y", 0, 1),
    )
    assert [text for _, text in steps.drawn("wide").columns[1].lines] == ["x 5", "a 0", "b 0.5"]
    assert "H" in steps.drawn("wide").paths[0][2]


def test_names_of_ticks_do_not_touch() -> None:
    axis = Axis("x", 0.0, 1.0, [i / 50 for i in range(51)], lambda value: f"{value:.6f}")
    drawn = Chart("t", [Series("a", [(0.0, 0.0), (1.0, 1.0)], 0)], axis, linear("y", 0, 1)).drawn("narrow")
    places = [place for place, _ in drawn.x_ticks]
    assert 2 <= len(places) < 10
    assert min(b - a for a, b in pairwise(places)) > 40


def test_other_scales() -> None:
    axis = Axis("x", 1.0, 100.0, [1.0, 10.0, 100.0], scale=math.log)
    assert axis.place(10.0) == pytest.approx(0.5)


def test_long_names_are_cut_in_the_middle() -> None:
    long = Chart("t", [Series("n" * 300, [(0.0, 0.0), (1.0, 1.0)], 0)], linear("x", 0, 1), linear("y", 0, 1))
    drawn = long.drawn("narrow")
    for column in drawn.columns:
        ((_, _), (_, text)) = column.lines
        assert len(text) * 6.6 < column.box[2]
        assert text.startswith("nnn")
        assert text.endswith((" 0", " 1"))


def test_labels_are_escaped() -> None:
    evil = "<script>"
    picture = Chart(
        evil, [Series(evil, [(0.0, 0.0), (1.0, 1.0)], 0)], linear(evil, 0, 1), linear(evil, 0, 1), limit=(1.0, evil)
    )
    text = pages.render("frontier.html", chart=picture)
    assert "<script" not in text
    assert "&lt;script&gt;" in text
