"""A run read from its folder: settings, the rounds of its curves, its progress and the time left."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from cpsgd.dashboard import folder, values
from cpsgd.dashboard.folder import BASELINES, CONFIG, METRICS, SUMMARY
from cpsgd.errors import DataError

PRIVATE = "private"
"""Name of the curve that the others are compared with."""

# Silence after which a run that is not finished is taken to be stopped: seconds, and times what a checkpoint takes.
_SILENCE, _TIMES = 60.0, 4.0
# Rounds whose seconds say how long the others will take.
_RECENT = 50
_MOST_CURVES = 12
# Bytes of settings and of a summary, lines of a run's metrics, and bytes and lines that are read to list all runs.
_LARGEST, _MOST_LINES, _MOST_LISTED, _MOST_LISTED_LINES = 4 << 20, 500_000, 512 << 20, 1_000_000
# Seconds that a run is read for, and all of them where they are listed.
_LONGEST, _LONGEST_LIST = 10.0, 20.0

Figure = Literal["loss", "score", "epsilon", "message", "bytes_total"]
State = Literal["running", "stopped", "finished"]


@dataclass(frozen=True)
class Round:
    """One round's figures; None where a figure is missing. `number` counts from 1; `message` is bytes per message."""

    number: int
    loss: float | None
    score: float | None
    epsilon: float | None
    message: float | None
    bytes_total: float | None
    seconds: float


@dataclass(frozen=True)
class RunCurve:
    """The rounds of the private training or of a baseline.

    Attributes:
        name: Name for people.
        rounds: The recorded rounds so far.
        regression: Whether its score is R² and not accuracy.
        damaged: Lines that could not be read.
        lines: Lines of its file.
        written: When its file was last written to, in seconds since 1970.
    """

    name: str
    rounds: tuple[Round, ...]
    regression: bool
    damaged: int
    lines: int
    written: float

    def last(self, figure: Figure) -> float | None:
        """Returns the latest value of a figure; None if there is none."""
        found = (getattr(each, figure) for each in reversed(self.rounds))
        return next((value for value in found if value is not None), None)

    def points(self, figure: Figure) -> list[tuple[float, float]]:
        """Returns (round number, value) of the rounds that have this figure."""
        found = ((float(each.number), getattr(each, figure)) for each in self.rounds)
        return [(number, value) for number, value in found if value is not None]

    @property
    def pace(self) -> float | None:
        """Seconds per round, over the latest rounds."""
        recent = self.rounds[-_RECENT:]
        return sum(each.seconds for each in recent) / len(recent) if recent else None


@dataclass(frozen=True)
class RecordedRun:
    """A run as far as its files tell.

    Attributes:
        name: Its name in the folder that is shown.
        title: Title for people.
        settings: Settings that it was started with.
        summary: The output of `cpsgd train --json` at its end; None before that.
        curves: The private one first.
        now: Time at which it was read.
        version: A digest that changes whenever the files change.
    """

    name: str
    title: str
    settings: Mapping[str, Any]
    summary: Mapping[str, Any] | None
    curves: tuple[RunCurve, ...]
    now: float
    version: str

    @property
    def private(self) -> RunCurve:
        """The curve of the private training."""
        return self.curves[0]

    @property
    def current(self) -> RunCurve:
        """The first curve that is not complete; the private one where all are."""
        return next((curve for curve in self.curves if len(curve.rounds) < (self.rounds or 0)), self.private)

    @property
    def rounds(self) -> int | None:
        """Number of rounds in the settings."""
        return values.whole(self.settings.get("rounds"), low=1)

    @property
    def limit(self) -> float | None:
        """Limit of ε in the settings."""
        return values.number(self.settings.get("epsilon"))

    @property
    def state(self) -> State:
        """Whether the run is running, stopped or finished, as far as its files tell."""
        if self.summary is not None:
            return "finished"
        every = values.whole(self.settings.get("evaluate_every"), low=1) or 1
        patience = max(_SILENCE, *(_TIMES * every * (curve.pace or 0.0) for curve in self.curves))
        return "running" if self.now - max(curve.written for curve in self.curves) < patience else "stopped"

    @property
    def seconds_left(self) -> float | None:
        """Estimated seconds for the missing rounds of all curves; None if unknown."""
        pace = next((curve.pace for curve in self.curves if curve.pace is not None), None)
        if self.rounds is None or pace is None or self.state != "running":
            return None
        return sum(
            max(0, self.rounds - len(curve.rounds)) * (pace if curve.pace is None else curve.pace)
            for curve in self.curves
        )

    def at_present(self) -> RecordedRun:
        """Returns a copy of the run with the present time."""
        return replace(self, now=time.time())

    @property
    def seconds(self) -> float:
        """Seconds that all rounds took together."""
        return sum(each.seconds for curve in self.curves for each in curve.rounds)


def _places(path: Path) -> list[tuple[str, Path]]:
    """Returns the names of a run's curves and their files."""
    compared = folder.subfolders(path / BASELINES)[: _MOST_CURVES - 1]
    others = [(name.replace("-", " "), path / BASELINES / name / METRICS) for name in compared]
    return [(PRIVATE, path / METRICS), *others]


def version(path: Path) -> str:
    """Returns a digest that changes whenever there is something new to read."""
    files = [path / CONFIG, path / SUMMARY, *(place for _, place in _places(path))]
    return hashlib.sha256(repr([folder.signature(file) for file in files]).encode()).hexdigest()


def read(path: Path, name: str, seconds: float = _LONGEST) -> RecordedRun:
    """Reads a run's folder, for at most `seconds` seconds.

    Raises:
        DataError: Its files are not as `cpsgd train` writes them, or take too long to read.
    """
    until = time.monotonic() + seconds
    seen = version(path)  # before its files are read, so that nothing that comes later is missed
    summary = folder.read_object(path / SUMMARY, _LARGEST) if folder.signature(path / SUMMARY) is not None else None
    curves: list[RunCurve] = []
    for place in _places(path):
        curves.append(_curve(*place, _MOST_LINES - sum(curve.lines for curve in curves), until))
    return RecordedRun(
        name=name,
        title=path.name,
        settings=folder.read_object(path / CONFIG, _LARGEST),
        summary=summary,
        curves=_ordered(curves, summary),
        now=time.time(),
        version=seen,
    )


def _ordered(curves: list[RunCurve], summary: Mapping[str, Any] | None) -> tuple[RunCurve, ...]:
    """Returns the private curve first, and the others in the order of the summary."""
    results = values.mapping(summary).get("results")
    names = [values.mapping(each).get("name") for each in results] if isinstance(results, list) else []
    rest = sorted(curves[1:], key=lambda curve: names.index(curve.name) if curve.name in names else len(names))
    return (curves[0], *rest)


def _curve(name: str, path: Path, most: int, until: float) -> RunCurve:
    """Reads the rounds of one run from its metrics; damaged lines are counted and left out."""
    signature = folder.signature(path)
    if signature is None:
        return RunCurve(name, (), regression=False, damaged=0, lines=0, written=0.0)
    data = folder.read_bytes(path)
    lines = data.count(b"\n")
    if lines > most:
        raise DataError(f"The run's {METRICS} have more than {_MOST_LINES:,} lines.")
    rounds: dict[int, Round] = {}
    damaged, regression = 0, False
    # A line without an end is still being written. (`splitlines` would make lines of "\r" as well, without a limit.)
    for place, line in enumerate(data[: data.rfind(b"\n") + 1].split(b"\n")[:-1]):
        if not place % 1024 and time.monotonic() > until:
            raise DataError(f"The run's {METRICS} take too long to read.")
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        number = values.whole(row.get("round")) if isinstance(row, dict) else None
        if number is None:
            damaged += 1
            continue
        squared = values.number(row.get("r_squared"))
        regression = regression or squared is not None
        rounds[number + 1] = Round(
            number=number + 1,
            loss=values.number(row.get("loss")),
            score=values.number(row.get("accuracy")) if squared is None else squared,
            epsilon=values.number(row.get("epsilon")),
            message=values.number(row.get("bytes_per_client")),
            bytes_total=values.number(row.get("bytes_total")),
            seconds=max(0.0, values.number(row.get("seconds")) or 0.0),
        )
    ordered = tuple(rounds[number] for number in sorted(rounds))
    return RunCurve(name, ordered, regression, damaged, lines, signature[0] / 1e9)


def read_all(root: folder.Folder) -> tuple[list[RecordedRun], list[tuple[str, str]]]:
    """Reads all runs of a folder; also returns (name, reason) of those that cannot be read."""
    found, failed = [], []
    left, lines, until = _MOST_LISTED, _MOST_LISTED_LINES, time.monotonic() + _LONGEST_LIST
    for name in root.runs():
        left -= sum(size for _, place in _places(root.root / name) for _, size in [folder.signature(place) or (0, 0)])
        seconds = min(_LONGEST, until - time.monotonic())
        if left < 0 or lines <= 0 or seconds <= 0.0:
            failed.append((name, "It and those after it are left out: there is too much to be read at once."))
            break
        try:
            found.append(read(root.root / name, name, seconds))
            lines -= sum(curve.lines for curve in found[-1].curves)
        except DataError as error:
            failed.append((name, str(error)))
    return found, failed
