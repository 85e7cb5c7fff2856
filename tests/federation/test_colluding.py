"""Clients see the released models and know their own noise: no guarantee may count on it."""

from __future__ import annotations

import pytest

from cpsgd import Plan
from cpsgd.errors import ParameterError, RoundRefusedError
from cpsgd.federation.limits import Limits
from cpsgd.federation.terms import Terms
from cpsgd.privacy import guarantee_over_rounds

from .local import with_run


def test_a_plan_that_counts_every_clients_noise_is_refused(small_plan: Plan) -> None:
    protocol, rounds = small_plan.protocol, {"rounds": 3, "surviving": small_plan.surviving}
    outsiders = guarantee_over_rounds(protocol, 1e-5, **rounds).epsilon
    # What one of the three others can tell, who subtracts its own noise, is more.
    among_clients = guarantee_over_rounds(protocol, 1e-5, **rounds, colluding=1).epsilon
    assert among_clients > 1.2 * outsiders
    with pytest.raises(ParameterError, match="plan with colluding=1"):
        Terms(plan=with_run(small_plan, colluding=0))
    assert among_clients <= Terms(plan=small_plan).plan.guarantee.epsilon <= 8.0
    with pytest.raises(RoundRefusedError, match="costs ε = "):
        Limits(epsilon=0.5 * (outsiders + among_clients), delta=1e-5).check(protocol, **rounds)
    Limits(epsilon=8.0, delta=1e-5).check(protocol, **rounds)


def test_a_client_cannot_count_on_anothers_noise() -> None:
    assert Limits().colluding == 1
    with pytest.raises(ParameterError, match="colluding"):
        Limits(colluding=0)
