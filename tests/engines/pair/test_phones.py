"""The example of phones, shortened: liars are refused, and the mean is as near as planned."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[3] / "examples" / "phones" / "phones.py"


@pytest.mark.slow
def test_a_short_run_is_as_planned_and_refuses_liars(capsys: pytest.CaptureFixture[str]) -> None:
    described = importlib.util.spec_from_file_location("phones", EXAMPLE)
    assert described is not None
    assert described.loader is not None
    phones = importlib.util.module_from_spec(described)
    sys.modules["phones"] = phones
    try:
        described.loader.exec_module(phones)
        found = phones.run(rounds=2, clients=150, seed=5)
    finally:
        del sys.modules["phones"]
    assert found.refused == found.liars > 0
    assert 2 * 90 <= found.accepted <= 2 * 150
    assert found.squared_error < 2 * found.plan.error.total
    assert capsys.readouterr().out.count("phones counted") == 2
