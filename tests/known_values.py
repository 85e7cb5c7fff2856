"""Numbers that the code has computed before, beside those that it computes now.

Tests with independent references say that a number is right. These say that it has not moved: not a bound that became
looser, nor a search that ends somewhere else. A change that moves one says why, and writes them anew with
`KNOWN_VALUES=write python -m pytest FILE`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

_TESTS = Path(__file__).parent
_WHOLE = 6
"""Longer arrays are kept by some of their numbers and two sums."""


def _kept(value: Any) -> list[float]:
    """Returns the numbers that stand for a value: all of them, or of a long array some and two sums."""
    numbers = np.asarray(value, dtype=np.float64).ravel()
    if len(numbers) <= 2 * _WHOLE:
        return [float(number) for number in numbers]
    places = np.linspace(0, len(numbers) - 1, _WHOLE).round().astype(int)
    weights = 1.0 + np.arange(len(numbers)) % 7
    finite = np.where(np.isfinite(numbers), numbers, 0.0)
    sums = [len(numbers), finite.sum(), np.abs(finite) @ weights]
    return [*(float(number) for number in numbers[places]), *map(float, sums)]


@cache
def _known(path: Path) -> dict[str, Any]:
    """Returns the numbers of a room, read once; what is written is added to them."""
    known: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    return known


def check(name: str, found: Mapping[str, Any], *, rel: float = 1e-9, absolute: float = 0.0) -> None:
    """Compares numbers with those known of `name`, "room/module": in the room's known_values.json.

    Args:
        name: The module that they are of.
        found: Numbers or arrays by what they are.
        rel: Relative difference that floating point may make.
        absolute: The same, for numbers that are near zero.
    """
    room, _, module = name.partition("/")
    path = _TESTS / room / "known_values.json"
    every = _known(path)
    now = {key: _kept(value) for key, value in found.items()}
    if os.environ.get("KNOWN_VALUES") == "write":
        every[module] = {**every.get(module, {}), **{key: [float(f"{x:.13g}") for x in now[key]] for key in now}}
        modules = (
            f"{json.dumps(module)}: {{\n"
            + ",\n".join(f"{json.dumps(key)}: {json.dumps(numbers)}" for key, numbers in sorted(of.items()))
            + "}"
            for module, of in sorted(every.items())
        )
        path.write_text("{" + ",\n".join(modules) + "}\n")
    for key, numbers in now.items():
        assert numbers == pytest.approx(every[module][key], rel=rel, abs=absolute, nan_ok=True), f"{name}: {key}"
