"""A ledger with one budget, and ways to damage its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from cpsgd.ledger import Budget, Ledger


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    """With ε = 1 for "people"."""
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    return ledger
