from __future__ import annotations

from collections.abc import Iterator

import pytest

from cpsgd import Plan, plan

from . import local

DIM = 40


@pytest.fixture(autouse=True)
def identity() -> Iterator[None]:
    with local.task():
        yield


@pytest.fixture(scope="session")
def small_plan() -> Plan:
    """Four clients of whom one may drop out."""
    return plan(4, DIM, 8.0, 1e-5, rounds=3, secure=True, dropout=0.25, colluding=1, bits=14, mechanism="binomial")
