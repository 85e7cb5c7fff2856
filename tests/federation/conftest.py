from __future__ import annotations

import pytest

from cpsgd import Plan, plan

from .local import DIM


@pytest.fixture(scope="session")
def small_plan() -> Plan:
    """Four clients of whom one may drop out."""
    return plan(4, DIM, 8.0, 1e-5, rounds=3, secure=True, dropout=0.25, colluding=1, bits=14, mechanism="binomial")
