"""The client's kernel runs the same instructions on the same addresses, whatever it draws and whatever it rounds.

Slow, and so left out where the kernels are instrumented: those instructions are not the ones that are shipped.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

from cpsgd.codec._kernels import _native

FORBIDDEN = 77  # as in stepper.py

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or platform.machine() != "x86_64", reason="reads x86-64 registers with Linux's ptrace"
    ),
]


def traces(level: str, kind: str, trials: int | str, p: float) -> tuple[set[str], set[str]]:
    """Digests of the instructions, and of the addresses, for the smallest values, the largest and random ones."""
    script = Path(__file__).with_name("stepper.py")
    environment = {**os.environ, "CPSGD_SIMD": level}
    command = [sys.executable, str(script), kind, str(trials), str(p)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    if result.returncode == FORBIDDEN:
        pytest.skip("this system does not let one process trace another")
    assert result.returncode == 0, result.stdout + result.stderr
    steps, instructions, addresses = zip(*map(str.split, result.stdout.splitlines()), strict=True)
    assert len(steps) == 3
    assert int(steps[0]) > 1000  # the module was traced at all
    return set(instructions), set(addresses)


CASES: list[tuple[str, int | str, float]] = [
    *(("values", 100, 0.5), ("values", 14, 0.3), ("values", 300, 0.5), ("packed", 14, 0.5), ("packed", 300, 0.5)),
    *(("values", "coins", 3), ("packed", "coins", 1), ("packed", "coins", 3), ("values", "gaussian", 1.5)),
    ("packed", "gaussian", 1.5),
    ("values", "lineage", 3.9),
    ("sum", "gaussian", 1.5),
]
# Of the level that is used here; of each other one, the last.
FEW = [("values", 14, 0.3), ("packed", 300, 0.5), ("packed", "coins", 3), ("packed", "gaussian", 1.5)]
FEW += [("values", "lineage", 3.9), ("sum", "gaussian", 1.5)]


@pytest.mark.parametrize(
    ("level", "kind", "trials", "p"),
    [
        pytest.param(
            level,
            *case,
            marks=() if case in (FEW if level == _native.simd_level() else FEW[-1:]) else pytest.mark.thorough,
        )
        for level in _native.supported_levels()
        for few in [FEW if level == _native.simd_level() else FEW[-1:]]
        for case in CASES
    ],
)
def test_instructions_and_addresses_are_the_same_whatever_is_drawn(
    level: str, kind: str, trials: int | str, p: float
) -> None:
    instructions, addresses = traces(level, kind, trials, p)
    assert len(instructions) == 1
    assert len(addresses) == 1


def test_other_addresses_show() -> None:
    instructions, addresses = traces(_native.simd_level(), "elsewhere", 14, 0.5)
    assert len(instructions) == 1
    assert len(addresses) == 3


def test_other_instructions_show() -> None:
    fewer, same, more = (traces(_native.simd_level(), "values", trials, 0.5)[0] for trials in (15, 16, 17))
    assert fewer == same
    assert same != more  # the first coin that the rounding words have no bit for
