"""Reports that `cpsgd audit --json` printed, read from files that anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from cpsgd._numbers import power
from cpsgd.audit import Claim
from cpsgd.dashboard import folder, values
from cpsgd.dashboard.charts import Axis, Chart, Series, linear
from cpsgd.errors import CpsgdError, DataError
from cpsgd.protocol import Protocol

_MOST_ROWS = 500


class CheckShown(NamedTuple):
    """One of the checks, and whether the code passed it."""

    name: str
    question: str
    passed: bool


@dataclass(frozen=True)
class Audit:
    """The result of an audit.

    Attributes:
        name: The file's name.
        passed: Whether every check passed.
        claims: ε claimed and found at several δ; the δ that was asked about comes first.
        lower_bound: ε that the attack proves with `confidence` at that δ.
        confidence: Probability that `lower_bound` holds.
        rounds: Number of attacked rounds.
        adjacency: Which data sets are neighbours.
        citation: The theorem behind the claim.
        mechanism: Name and parameters of the mechanism.
        error_rates: The attacker's false alarms and misses.
        checks: All checks.
    """

    name: str
    passed: bool
    claims: tuple[Claim, ...]
    lower_bound: float
    confidence: float
    rounds: int
    adjacency: str
    citation: str
    mechanism: str
    error_rates: tuple[tuple[float, float], ...]
    checks: tuple[CheckShown, ...]

    def claimed_misses(self, false_alarms: float) -> float:
        """Returns the smallest share of misses that the claims allow an attacker with this share of false alarms.

        Of every (ε, δ) that is claimed, 1 - δ - e^ε α and e^-ε (1 - δ - α), as in `AuditReport.claimed_misses`.
        """
        found = [0.0]
        for claim in self.claims:
            factor = math.exp(min(max(claim.claimed, 0.0), 700.0))
            found += [1.0 - claim.delta - factor * false_alarms, (1.0 - claim.delta - false_alarms) / factor]
        return max(found)

    @property
    def claims_chart(self) -> Chart:
        """ε claimed and ε found at every δ."""
        claims = sorted((claim for claim in self.claims if claim.delta > 0.0), key=lambda claim: claim.delta)
        deltas = {float(index): claim.delta for index, claim in enumerate(claims)}
        claimed, found = (
            [*zip(deltas, ends, strict=True)] for ends in ([c.claimed for c in claims], [c.found for c in claims])
        )
        return Chart(
            title="ε claimed and ε found at several δ",
            series=[
                Series("claimed, at most", claimed, 1, marks=True),
                Series("found beyond doubt, at least", found, self._style, marks=True),
            ],
            x=Axis("δ", -0.3, len(claims) - 0.7, [*deltas], lambda index: power(deltas[index])),
            y=linear("ε", 0.0, 1.08 * max([y for _, y in claimed + found], default=1.0) or 1.0, "{:.3g}".format),
            heading=lambda index: f"δ = {power(deltas[index])}",
        )

    @property
    def rates_chart(self) -> Chart:
        """The attacker's errors over the region that the claims rule out."""
        alarms = [index / 200.0 for index in range(201)]
        return Chart(
            title="The attacker's misses against its false alarms; the shaded region is ruled out by the claims",
            series=[
                Series("measured", self.error_rates, self._style),
                Series("guessing", [(0.0, 1.0), (1.0, 0.0)], 1),
            ],
            x=linear("false alarms", 0.0, 1.0),
            y=linear("misses", 0.0, 1.0, "{:.3g}".format),
            region=[(alarm, self.claimed_misses(alarm)) for alarm in alarms],
            heading=lambda x: f"false alarms {x:.3g}",
        )

    @property
    def _style(self) -> int:
        return 4 if self.passed else 6


def read(path: Path, name: str) -> Audit | None:
    """Reads a report; returns None for a file that does not look like one.

    Raises:
        DataError: It looks like a report but is not a valid one.
    """
    try:
        data = folder.read_object(path)
    except DataError:
        return None
    if not {"claims", "lower_bound", "error_rates", "checks"} <= data.keys():
        return None
    try:
        return _audit(data, name)
    except (LookupError, TypeError, ValueError):
        raise DataError(f"{path.name} is not as `cpsgd audit --json` writes it.") from None


def read_all(root: folder.Folder) -> tuple[list[Audit], list[tuple[str, str]]]:
    """Reads all audits of a folder; also returns (name, reason) of those that cannot be read."""
    found, failed = [], []
    for name in root.reports():
        try:
            audit = read(root.root / name, name)
        except DataError as error:
            failed.append((name, str(error)))
        else:
            found += [] if audit is None else [audit]
    return found, failed


def _audit(data: Mapping[str, Any], name: str) -> Audit:
    """Returns the audit in a report, or raises an error if a part is missing."""
    claims = tuple(
        Claim(*(_number(each[key]) for key in ("delta", "claimed", "found"))) for each in data["claims"][:_MOST_ROWS]
    )
    if not claims:
        raise ValueError("claims")
    claimed = values.mapping(data.get("claimed"))
    checks = tuple(
        CheckShown(values.text(each["name"]), values.text(each["question"]), each["passed"] is True)
        for each in data["checks"][:_MOST_ROWS]
    )
    return Audit(
        name=name,
        # What the file says of itself does not outweigh what it says in detail.
        passed=data.get("passed") is True and all(check.passed for check in checks),
        claims=claims,
        lower_bound=_number(data["lower_bound"]),
        confidence=_number(data["confidence"]),
        rounds=int(_number(data["attacked_rounds"])),
        adjacency=values.text(claimed.get("adjacency", "?")),
        citation=values.text(claimed.get("citation", "?")),
        mechanism=_mechanism(data.get("protocol")),
        error_rates=tuple(sorted((_share(pair[0]), _share(pair[1])) for pair in data["error_rates"][:_MOST_ROWS])),
        checks=checks,
    )


def _mechanism(protocol: object) -> str:
    try:
        found = Protocol.from_dict(values.mapping(protocol)).mechanism
    except CpsgdError:
        return "not said"
    return values.shortened(f"{found.name}: {found.describe()}")


def _number(value: object) -> float:
    found = values.number(value)
    if found is None:
        raise ValueError("number")
    return found


def _share(value: object) -> float:
    return min(max(_number(value), 0.0), 1.0)
