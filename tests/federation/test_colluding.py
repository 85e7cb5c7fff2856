"""Clients see the released models and know their own noise: no guarantee may count on it."""

from __future__ import annotations

import pytest

from cpsgd import plan
from cpsgd.errors import ParameterError, RoundRefusedError
from cpsgd.federation.limits import Limits
from cpsgd.federation.server import Terms
from cpsgd.privacy import guarantee_over_rounds

from .local import DIM


@pytest.mark.parametrize(("clients", "least"), [(10, 4.2), (3, 4.9), (2, 5.6)])
def test_a_plan_that_counts_every_clients_noise_is_refused(clients: int, least: float) -> None:
    wishes = {"clients": clients, "dim": DIM, "epsilon": 4.0, "delta": 1e-6, "rounds": 5, "secure": True, "bits": 14}
    for_outsiders = plan(**wishes, mechanism="binomial")
    # What one of the clients can tell, who subtracts its own noise, is more than what was asked for.
    among_clients = {"rounds": 5, "surviving": clients, "colluding": 1}
    assert guarantee_over_rounds(for_outsiders.protocol, 1e-6, **among_clients).epsilon > least
    with pytest.raises(ParameterError, match="plan with colluding=1"):
        Terms(plan=for_outsiders)
    with pytest.raises(RoundRefusedError, match="this client's limit is 4"):
        Limits(epsilon=4.0, delta=1e-6).check(for_outsiders.protocol, rounds=5, surviving=clients)

    for_all = plan(**wishes, mechanism="binomial", colluding=1)
    assert guarantee_over_rounds(for_all.protocol, 1e-6, **among_clients).epsilon <= 4.0
    assert Terms(plan=for_all).plan.guarantee.epsilon <= 4.0
    Limits(epsilon=4.0, delta=1e-6).check(for_all.protocol, rounds=5, surviving=clients)


def test_a_client_cannot_count_on_anothers_noise() -> None:
    assert Limits().colluding == 1
    with pytest.raises(ParameterError, match="colluding"):
        Limits(colluding=0)
