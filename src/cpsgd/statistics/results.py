"""What a private statistic says: named values with intervals, and what it cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._numbers import rounded_up
from cpsgd.neighbours import Adjacency

Values = NDArray[np.float64]

# Values that a short text shows.
_SHOWN = 4


@dataclass(frozen=True, eq=False)
class Reading:
    """Values with their intervals, one row per group.

    Attributes:
        names: What the values are: columns, bins, categories, or quantiles.
        groups: The groups' names; None where there are none, and then there is one row.
        values: The estimates.
        low: Lower ends of the intervals.
        high: Upper ends.
    """

    names: tuple[str, ...]
    groups: tuple[str, ...] | None
    values: Values
    low: Values
    high: Values


@dataclass(frozen=True, eq=False)
class Statistic:
    """A released statistic.

    Attributes:
        statistic: "mean", "sum", "count", "histogram" or "quantiles".
        reading: The values.
        confidence: With this probability, over the noise, the interval of a value holds what the table's value would be
            without noise (values beyond their bounds moved to them). That the table is a sample of something larger is
            not in it.
        users: How many users' vectors are in it. Public: replace-one neighbours have equally many.
        epsilon: ε, proved.
        delta: δ.
        unit: Whose data may change between neighbours: a user's (all their rows), or one row's.
        adjacency: Which tables are neighbours.
        method: Name of the method that proved it.
        citation: The theorem behind it.
        assumption: What it takes on trust about the vectors: here they are made by the library, for the reason given.
        bits: Bits per coordinate of a message.
        dim: Coordinates of a message.
        bounds: The bounds of the columns, given or chosen privately.
    """

    statistic: str
    reading: Reading
    confidence: float
    users: int
    epsilon: float
    delta: float
    unit: str
    adjacency: Adjacency
    method: str
    citation: str
    assumption: str | None
    bits: float
    dim: int
    bounds: dict[str, tuple[float, float]]

    @property
    def names(self) -> tuple[str, ...]:
        """What the values are."""
        return self.reading.names

    @property
    def groups(self) -> tuple[str, ...] | None:
        """The groups' names, if there are groups."""
        return self.reading.groups

    @property
    def values(self) -> Values:
        """The estimates: by name, or with groups one row of them per group."""
        return self._shaped(self.reading.values)

    @property
    def low(self) -> Values:
        """Lower ends of the intervals, shaped like `values`."""
        return self._shaped(self.reading.low)

    @property
    def high(self) -> Values:
        """Upper ends of the intervals."""
        return self._shaped(self.reading.high)

    def _shaped(self, table: Values) -> Values:
        return table[0] if self.groups is None else table

    def rows(self) -> list[tuple[str | None, str, float, float, float]]:
        """All values as (group, name, value, low, high)."""
        found: list[tuple[str | None, str, float, float, float]] = []
        for i, group in enumerate(self.groups or (None,)):
            for j, name in enumerate(self.names):
                values, low, high = self.reading.values, self.reading.low, self.reading.high
                found.append((group, name, float(values[i, j]), float(low[i, j]), float(high[i, j])))
        return found

    def to_dict(self) -> dict[str, Any]:
        """Everything as plain JSON values."""
        plain = {name: value for name, value in vars(self).items() if name != "reading"}
        entries = [
            {**({} if group is None else {"group": group}), "name": name, "value": value, "low": low, "high": high}
            for group, name, value, low, high in self.rows()
        ]
        return plain | {
            "adjacency": str(self.adjacency),
            "bounds": {name: list(ends) for name, ends in self.bounds.items()},
            "values": entries,
        }

    def __repr__(self) -> str:
        shown = []
        for group, name, value, low, high in self.rows()[:_SHOWN]:
            label = name if group is None else f"{group}/{name}"
            shown.append(f"{label} {value:.4g} [{low:.4g}, {high:.4g}]")
        more = ", …" if self.reading.values.size > _SHOWN else ""
        return (
            f"<{self.statistic} of {self.users:,} {self.unit}s: {', '.join(shown)}{more}; "
            f"ε = {rounded_up(self.epsilon)}, δ = {self.delta:g}, {self.adjacency}>"
        )
