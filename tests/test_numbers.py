"""ε is rounded up wherever it is printed."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import cpsgd
from cpsgd._numbers import rounded_down, rounded_up

ROOT = Path(cpsgd.__file__).parent
NUMBERS = st.floats(0.0, 1e300, allow_nan=False)


@given(NUMBERS)
def test_figures_err_on_the_safe_side(value: float) -> None:
    above, below = Decimal(rounded_up(value)), Decimal(rounded_down(value))
    assert below <= Decimal(value) <= above
    assert above <= Decimal(value) * Decimal("1.0011")
    assert below >= Decimal(value) * Decimal("0.9989")


@pytest.mark.parametrize(
    ("value", "up", "down"),
    [
        (0.0, "0", "0"),
        (1.0, "1", "1"),
        (1.00001, "1.001", "1"),
        (3.6737979, "3.674", "3.673"),
        (13.985555, "13.99", "13.98"),
        (0.1 + 0.2, "0.3001", "0.3"),
        (123456.0, "123500", "123400"),
        (1e-9, "1.001E-9", "1E-9"),
        (math.inf, "∞", "∞"),
    ],
)
def test_figures(value: float, up: str, down: str) -> None:
    assert (rounded_up(value), rounded_down(value)) == (up, down)


def formatted() -> Iterator[tuple[str, str, str]]:
    """Every number that an f-string of the package shows with a format: where, the expression, the format."""
    for path in sorted(ROOT.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
                where = f"{path.relative_to(ROOT)}:{node.lineno}"
                yield where, ast.unparse(node.value), ast.unparse(node.format_spec)


def after_epsilon() -> Iterator[str]:
    """Every value that an f-string of the package shows right after an ε and is not rounded up or down."""
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.JoinedStr):
                continue
            for text, value in zip(node.values, node.values[1:], strict=False):
                if not (isinstance(text, ast.Constant) and isinstance(value, ast.FormattedValue)):
                    continue
                said = str(text.value).rstrip(" =≤≥[]bold")
                if said.endswith("ε") and value.format_spec is not None:
                    yield f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(value.value)}"


def test_no_epsilon_is_shown_to_the_nearest_digit() -> None:
    found = [(where, what) for where, what, _ in formatted() if "epsilon" in what and "rounded" not in what]
    assert found == []
    assert list(after_epsilon()) == []


def test_the_check_sees_anything_at_all() -> None:
    assert any("delta" in what for _, what, _ in formatted())
