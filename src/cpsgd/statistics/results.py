"""Released statistics: values with their intervals and their cost, as text, frames and pictures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from html import escape
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.promise import Claim

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from cpsgd.planner import Plan
    from cpsgd.privacy import Guarantee

Matrix = NDArray[np.float64]

# Values in a statistic's short text, and in a notebook.
_SHOWN, _SHOWN_IN_NOTEBOOKS = 4, 40
# Shares of users from which on it is said, and warned, that something of theirs was cut off.
_CUT, _MUCH_CUT = 0.005, 0.1


@dataclass(frozen=True, eq=False)
class Reading:
    """Values with their intervals, one row per group.

    Attributes:
        names: Names of the values: columns, bins, categories, or quantiles.
        groups: Names of the groups; None without groups, and then there is one row.
        values: The estimates.
        low: Lower ends of the intervals.
        high: Upper ends.
    """

    names: tuple[str, ...]
    groups: tuple[str, ...] | None
    values: Matrix
    low: Matrix
    high: Matrix


@dataclass(frozen=True)
class CutOff:
    """A private estimate of the share of users for whom something was cut off.

    Example:
        >>> print(CutOff("rows left out", 0.12, 0.1, 0.14))
        rows left out: 12 % of users [10, 14]

    Attributes:
        cut: "rows left out", "values beyond bounds" or "rows in no group or bin".
        share: The estimate, of all users.
        low: Lower end of its interval.
        high: Upper end.
        is_much: Whether it is more than a tenth of the users, with a confidence of 99.9 %.
    """

    cut: str
    share: float
    low: float
    high: float
    is_much: bool = False

    def __str__(self) -> str:
        return f"{self.cut}: {100 * self.share:.3g} % of users [{100 * self.low:.3g}, {100 * self.high:.3g}]"


@dataclass(frozen=True, eq=False)
class Statistic:
    """A released statistic.

    Attributes:
        statistic: "mean", "sum", "count", "histogram", "quantiles", "kmeans" or "pca".
        reading: The values.
        confidence: Probability, over the noise, that an interval holds the value without noise of the table *after*
            cutting off: values beyond bounds moved to them, further rows of a user and rows of no group left out.
            It does not cover that the table may be a sample.
        users: Number of users, where it is public: replace-one neighbours have equally many. None otherwise.
        epsilon: ε, proved.
        delta: δ; 0 where the noise needs none.
        unit: "user" if neighbours differ in all rows of a user, "row" if they differ in one row.
        adjacency: Which tables are neighbours: "replace-one", "add-remove" or "zero-out".
        method: Name of the method that proved ε.
        citation: The theorem behind it.
        assumption: The distance that the proof relies on, with the reason; None if there is no such assumption.
        bits: Bits per coordinate of a message; None where nothing was sent.
        dim: Number of coordinates.
        bounds: The bounds of the columns, given or chosen privately.
        mechanism: Name of the noise.
        group_by: Columns of the groups.
        cut_off: Private estimates of what was cut off, where there are any.
    """

    statistic: str
    reading: Reading
    confidence: float
    users: int | None
    epsilon: float
    delta: float
    unit: str
    adjacency: str
    method: str
    citation: str
    assumption: str | None
    bits: float | None
    dim: int
    bounds: dict[str, tuple[float, float]]
    mechanism: str
    group_by: tuple[str, ...] = ()
    cut_off: tuple[CutOff, ...] = ()

    @property
    def claim(self) -> Claim:
        """The proved (ε, δ)."""
        return Claim(self.epsilon, self.delta)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the values."""
        return self.reading.names

    @property
    def groups(self) -> tuple[str, ...] | None:
        """Names of the groups, if there are groups."""
        return self.reading.groups

    @property
    def values(self) -> Matrix:
        """The estimates: by name, or with groups one row of them per group."""
        return self._shaped(self.reading.values)

    @property
    def low(self) -> Matrix:
        """Lower ends of the intervals, shaped like `values`."""
        return self._shaped(self.reading.low)

    @property
    def high(self) -> Matrix:
        """Upper ends of the intervals."""
        return self._shaped(self.reading.high)

    def _shaped(self, table: Matrix) -> Matrix:
        return table[0] if self.groups is None else table

    @property
    def details(self) -> dict[str, Any]:
        """Further results as plain JSON values: of k-means and principal components."""
        return {}

    @property
    def cautions(self) -> list[str]:
        """Sentences that warn where more than a tenth of the users were cut off; `cut_off` has all estimates."""
        return [
            f"About {100 * cut.share:.3g} % of users ({100 * cut.low:.3g} to {100 * cut.high:.3g} %) had {cut.cut}: "
            "values and intervals are of the table after that, not of all of it."
            for cut in self.cut_off
            if cut.is_much
        ]

    def rows(self) -> list[tuple[str | None, str, float, float, float]]:
        """Returns all values as (group, name, value, low, high)."""
        values, low, high = self.reading.values, self.reading.low, self.reading.high
        return [
            (group, name, float(values[i, j]), float(low[i, j]), float(high[i, j]))
            for i, group in enumerate((None,) if self.groups is None else self.groups)
            for j, name in enumerate(self.names)
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns everything as plain JSON values."""
        plain = {each.name: getattr(self, each.name) for each in fields(Statistic) if each.name != "reading"}
        entries = [
            {**({} if group is None else {"group": group}), "name": name, "value": value, "low": low, "high": high}
            for group, name, value, low, high in self.rows()
        ]
        bounds = {name: list(ends) for name, ends in self.bounds.items()}
        cut_off = [vars(cut) for cut in self.cut_off]
        plain |= {"group_by": list(self.group_by), "cut_off": cut_off, "bounds": bounds, "values": entries}
        return plain | self.details

    # ------------------------------------------------------------------ frames

    def to_columns(self) -> dict[str, list[Any]]:
        """Returns columns of equal length: those of the groups, "name", "value", "low" and "high".

        Example:
            >>> from cpsgd import statistics
            >>> found = statistics.count({"sex": ["f", "m"] * 50}, group_by={"sex": ["f", "m"]}, epsilon=8.0)
            >>> list(found.to_columns()), found.to_columns()["sex"]
            (['sex', 'name', 'value', 'low', 'high'], ['f', 'm'])
        """
        rows = self.rows()
        taken = {"name", "value", "low", "high"}
        titles = [f"group {name}" if name in taken else name for name in self.group_by] or ["group"]
        texts = [[] if group is None else self._texts(group) for group, *_ in rows]
        found: dict[str, list[Any]] = {}
        if self.groups is not None:
            found = {title: [each[i] for each in texts] for i, title in enumerate(titles)}
        for i, title in enumerate(("name", "value", "low", "high"), start=1):
            found[title] = [row[i] for row in rows]
        return found

    def _texts(self, group: str) -> list[str]:
        return group.split(", ", len(self.group_by) - 1) if len(self.group_by) > 1 else [group]

    def to_pandas(self) -> Any:
        """Returns a pandas frame of `to_columns`, one row per value."""
        import pandas

        return pandas.DataFrame(self.to_columns())

    def to_polars(self) -> Any:
        """Returns a polars frame of `to_columns`, one row per value."""
        import polars

        return polars.DataFrame(self.to_columns())

    # ------------------------------------------------------------------ text and pictures

    @property
    def title(self) -> str:
        """One line of text: the statistic, the number of users, and ε."""
        many = "" if self.users is None else f"{self.users:,} "
        return f"{self.statistic} of {many}{self.unit}s; {self.claim} per {self.unit}, {self.adjacency}"

    def __repr__(self) -> str:
        shown = [
            f"{name if group is None else f'{group}/{name}'} {value:.4g} [{low:.4g}, {high:.4g}]"
            for group, name, value, low, high in self.rows()[:_SHOWN]
        ]
        more = ", …" if self.reading.values.size > _SHOWN else ""
        cautions = "".join(f"; {cut}" for cut in self.cut_off if cut.low > _CUT)
        many = "" if self.users is None else f"{self.users:,} "
        return (
            f"<{self.statistic} of {many}{self.unit}s: {', '.join(shown)}{more}{cautions}; "
            f"{self.claim}, {self.adjacency}>"
        )

    def _repr_html_(self) -> str:
        columns = self.to_columns()
        shown = list(zip(*columns.values(), strict=True))[:_SHOWN_IN_NOTEBOOKS]
        cells = "".join(f"<th>{escape(title)}</th>" for title in columns)
        body = "".join("<tr>" + "".join(f"<td>{escape(_text(cell))}</td>" for cell in row) + "</tr>" for row in shown)
        rest = len(columns["value"]) - len(shown)
        notes = [*([f"{rest:,} more"] if rest > 0 else []), *self.cautions]
        return (
            f"<table><caption><b>{escape(self.title)}</b></caption><thead><tr>{cells}</tr></thead>"
            f"<tbody>{body}</tbody></table>" + "".join(f"<p>{escape(note)}</p>" for note in notes)
        )

    def plot(self, axes: Axes | None = None) -> Axes:
        """Draws the values with their intervals, the longer of groups and names on the vertical axis.

        Args:
            axes: Where to draw; None for a new figure, which the axes belong to.
        """
        from cpsgd.statistics.drawing import draw_intervals

        return draw_intervals(self, axes)


def told(
    statistic: str,
    reading: Reading,
    plan: Plan,
    guarantee: Guarantee,
    users: int,
    confidence: float,
    bounds: Mapping[str, tuple[float, float]] | None,
) -> dict[str, Any]:
    """Returns the fields that all statistics of a round between clients share."""
    return {
        "statistic": statistic,
        "reading": reading,
        "confidence": confidence,
        "users": users,
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "unit": "user",
        "adjacency": str(guarantee.adjacency),
        "method": guarantee.method,
        "citation": guarantee.citation,
        "assumption": guarantee.assumption,
        "bits": plan.protocol.bits_per_coordinate,
        "dim": plan.protocol.dim,
        "bounds": dict(bounds or {}),
        "mechanism": plan.protocol.mechanism.name,
    }


def _text(cell: object) -> str:
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def shares(counts: Sequence[float], reach: float, far: float, users: float, cuts: Sequence[str]) -> tuple[CutOff, ...]:
    """Returns noisy numbers of users as shares of all users, with intervals."""

    def share(count: float) -> float:
        return min(max(count / max(users, 1.0), 0.0), 1.0)

    pairs = zip(cuts, counts, strict=True)
    return tuple(
        CutOff(cut, share(count), share(count - reach), share(count + reach), share(count - far) > _MUCH_CUT)
        for cut, count in pairs
    )
