"""All mechanisms in one picture."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest

from cpsgd.privacy.proofs.published_accounting import PROOFS
from cpsgd.registry import MECHANISMS
from reproduction import frontier
from reproduction.frontier import OURS, PUBLISHED, RivalPoint, Scene

SMALL = Scene(clients=200, dim=500, epsilon=2.0, delta=1e-5)


def example_points() -> list[RivalPoint]:
    """Every mechanism, by both accountings, in two scenes."""
    return [
        RivalPoint(**vars(scene), secure=secure, mechanism=name, accounting=accounting, bits=bits, ratio=1.0 + 2 / bits)
        for scene in (SMALL, frontier.SCENES[0])
        for secure in (False, True)
        for name in MECHANISMS
        for accounting in (OURS, PUBLISHED)
        for bits in (1.0, 4.0, 16.0)
    ]


@pytest.mark.thorough
def test_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frontier, "_BITS", {False: (1.0, math.log2(3), 4.0, 8.0), True: (4.0, 10.0, 12.0, 16.0)})
    said: list[tuple[int, int, str]] = []
    names = ("binomial", "gaussian", "skellam", "discrete-gaussian")
    points = frontier.compute([SMALL], names, lambda *words: said.append(words))
    # A Gaussian has nothing to plan, and no published accounting.
    assert [(done, of) for done, of, _ in said] == [(i, 14) for i in range(1, 15)]
    curves: dict[tuple[bool, str, str], list[RivalPoint]] = {}
    for point in points:
        assert Scene(point.clients, point.dim, point.epsilon, point.delta) == SMALL
        curves.setdefault((point.secure, point.mechanism, point.accounting), []).append(point)
    assert len(curves) == 12
    assert not any(name == "gaussian" for _, name, _ in curves)
    for (secure, name, accounting), curve in curves.items():
        assert [point.bits for point in curve] == sorted({point.bits for point in curve})
        assert all(point.ratio > 1.0 for point in curve)
        best = min(point.ratio for point in curve)
        if accounting == OURS:
            # No more bits than were asked for, and within a few per cent of the Gaussian with the most of them.
            assert max(point.bits for point in curve) <= (16.0 if secure else 8.0)
            assert best < min(point.ratio for point in curves[secure, name, PUBLISHED])
            assert best < 1.1
    # Where the planner says that a protocol is impossible the curve ends.
    assert min(point.bits for point in curves[False, "binomial", OURS]) == pytest.approx(math.log2(3))
    assert min(point.bits for point in curves[False, "skellam", OURS]) > 2.0


def test_files(tmp_path: Path) -> None:
    points = example_points()
    svg, png, table = frontier.write(tmp_path / "new", points)
    assert png.read_bytes().startswith(b"\x89PNG")
    picture = svg.read_text(encoding="utf-8")
    # A background of its own, so that it can be read on a dark page.
    assert "fill: #ffffff" in picture
    assert frontier.draw(points, tmp_path / "again.svg").read_bytes() == svg.read_bytes()
    with table.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(points)
    names = ["clients", "dim", "epsilon", "delta", "secure", "mechanism", "accounting", "bits", "ratio"]
    values = ["200", "500", "2.0", "1e-05", "False", "binomial", "ours", "1", "3"]
    assert list(rows[0].items()) == list(zip(names, values, strict=True))


def test_every_mechanism_has_a_colour_of_its_own() -> None:
    planned = {name for name, kind in MECHANISMS.items() if kind.planned}
    assert frontier._STYLES.keys() == planned
    assert len(set(frontier._STYLES.values())) == len(planned)
    assert {proof.mechanism for proof in PROOFS} == frontier._PUBLISHED_NAMES.keys()
