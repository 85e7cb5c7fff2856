"""What was recorded with release 0.1.0; `tests/data/README.md` says how."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "data" / "v0_1_0"


def read(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def same(found: float, recorded: dict[str, str], tolerance: float = 1e-12) -> bool:
    """Whether it is the same number, but for the last digits of a floating-point library."""
    expected = float.fromhex(recorded["hex"])
    return found == expected or abs(found - expected) <= tolerance * abs(expected)


def no_larger(found: float, recorded: dict[str, str]) -> bool:
    """Whether it is the same number or a smaller one: an upper bound that was proved to be lower."""
    return found <= float.fromhex(recorded["hex"]) or same(found, recorded)


def better(found: float, recorded: dict[str, str]) -> bool:
    """Whether it is a smaller number, by more than the last digits."""
    return found < float.fromhex(recorded["hex"]) and not same(found, recorded)
