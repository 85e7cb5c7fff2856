"""The report of an audit as `cpsgd audit --json` prints it, read from a file that anybody may have written."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpsgd.audit import Claim
from cpsgd.dashboard import folder, values
from cpsgd.errors import CpsgdError, DataError
from cpsgd.protocol import Protocol

_MOST_ROWS = 500


@dataclass(frozen=True)
class CheckShown:
    """One of the checks, and whether nothing speaks against the code by it."""

    name: str
    question: str
    passed: bool


@dataclass(frozen=True)
class Audit:
    """What an audit found.

    Attributes:
        name: Its file.
        passed: Whether nothing speaks against the claim.
        claims: At several δ, the one that was asked about first.
        lower_bound: ε that the attack proves with `confidence` at that δ.
        confidence: Of that.
        rounds: Rounds that were attacked.
        adjacency: Which data sets are neighbours.
        citation: The theorem behind the claim.
        mechanism: Whose code it was.
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
        """The least share of misses that the claims allow an attacker with so many false alarms.

        Of every (ε, δ) that is claimed, 1 - δ - e^ε α and e^-ε (1 - δ - α), as in `AuditReport.claimed_misses`.
        """
        found = [0.0]
        for claim in self.claims:
            factor = math.exp(min(max(claim.claimed, 0.0), 700.0))
            found += [1.0 - claim.delta - factor * false_alarms, (1.0 - claim.delta - false_alarms) / factor]
        return max(found)


def read(path: Path, name: str) -> Audit | None:
    """Reads a file; None where it does not look like an audit.

    Raises:
        DataError: It looks like one and is none.
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
    """The audits of a folder that can be read, and why others cannot."""
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
