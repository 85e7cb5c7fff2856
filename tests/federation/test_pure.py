"""Rounds with pure differential privacy (δ = 0): real secure sums, a ledger, and clients that hold a server to it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cpsgd import Plan, guarantee, plan
from cpsgd.errors import RoundRefusedError
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger

from .local import RUN, Client, carry, opening

NODES = [f"node-{i}" for i in range(4)]
VECTOR = np.array([0.5, 0.0, -0.5], dtype=np.float32)


@pytest.fixture(scope="module")
def pure_plan() -> Plan:
    return plan(clients=4, dim=3, epsilon=6.0, delta=0.0, bits=16, rounds=2, secure=True, colluding=1)


def test_a_secure_round_is_charged_and_released_at_delta_zero(pure_plan: Plan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "budgets.ledger")
    ledger.create(Budget(population="people", epsilon=6.0, delta=0.0))
    terms = Terms(plan=pure_plan, secure=True, ledger=ledger, population="people")
    clients = {node: Client(VECTOR, epsilon=6.0, delta=0.0) for node in NODES}
    for round in (1, 2):
        found = carry(begin_round(terms, round, NODES, run=RUN), clients)
        assert found is not None
        # Beyond 40 deviations of Laplace noise: less than e^-56.
        assert np.sum((found - VECTOR) ** 2) < 1600 * pure_plan.error.total
        total = ledger.total("people")
        assert total.claim.delta == 0.0
        assert total.epsilon == pytest.approx(round * 3.0, rel=1e-9)


def test_a_client_refuses_more_than_its_pure_epsilon(pure_plan: Plan) -> None:
    assert Client(VECTOR, epsilon=6.0, delta=0.0).ask(opening(pure_plan))
    with pytest.raises(RoundRefusedError, match="at δ = 0"):
        Client(VECTOR, epsilon=5.9, delta=0.0).ask(opening(pure_plan))
    # With a second colluder the noise of two is left, which costs more.
    assert (
        guarantee(replace(pure_plan.run, conditions=replace(pure_plan.run.conditions, colluding=2)), 0.0).epsilon > 6.0
    )
    with pytest.raises(RoundRefusedError, match="at δ = 0"):
        Client(VECTOR, epsilon=6.0, delta=0.0, colluding=2).ask(opening(pure_plan))
    noisy = plan(clients=4, dim=3, epsilon=6.0, delta=1e-6, bits=16, rounds=2, secure=True)
    with pytest.raises(RoundRefusedError):
        Client(VECTOR, epsilon=6.0, delta=0.0).ask(opening(noisy))
