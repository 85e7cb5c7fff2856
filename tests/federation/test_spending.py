"""What a client's own count of runs costs."""

from __future__ import annotations

import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import RoundRefusedError
from cpsgd.federation.limits import Limits, RoundKind, check_affordable
from cpsgd.privacy.guarantees import guarantee
from cpsgd.protocol import Protocol


@pytest.mark.parametrize("separation", [1, 5, None])
def test_a_client_that_paid_for_a_run_pays_for_the_next_one(separation: int | None) -> None:
    mechanism = CorrelatedGaussian(
        noise_deviation=64.0,
        step=0.01,
        window=1 << 12,
        coordinate_range=1.0,
        bands=4,
        run_length=10,
        separation=separation,
    )
    protocol = Protocol(clients=4000, dim=16, clip_norm=1.0, mechanism=mechanism)
    one, two = (guarantee(protocol, delta, colluding=1).epsilon for delta in (1e-6, 0.5e-6))
    limits = Limits(epsilon=1.1 * one, delta=1e-6, colluding=1)
    kind = RoundKind.of(limits, protocol, 4000)
    check_affordable(limits, {}, kind, 1)
    with pytest.raises(RoundRefusedError, match="one more would bring"):
        check_affordable(limits, {kind: 1}, kind, 1)
    check_affordable(Limits(epsilon=2.1 * two, delta=1e-6, colluding=1), {kind: 1}, kind, 1)
