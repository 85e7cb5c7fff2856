from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, Protocol
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.plausibility import largest_norm
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms

from .local import RUN, Client, carry

LARGE = 2000


@pytest.fixture(scope="module")
def large_plan(small_plan: Plan) -> Plan:
    return replace(small_plan, protocol=replace(small_plan.protocol, dim=LARGE, promise=None))


def run_round(plan: Plan, clients: dict[str, Client]) -> tuple[np.ndarray | None, RoundSession[str]]:
    session = begin_round(Terms(plan=plan), 1, list(clients), run=RUN)
    return carry(session, clients), session


def test_honest_rounds_are_plausible_also_of_large_vectors(large_plan: Plan) -> None:
    clients = {name: Client(np.full(LARGE, 9.0, np.float32)) for name in "abcd"}
    mean, session = run_round(large_plan, clients)
    assert mean is not None
    assert session.report.survivors == 4
    assert np.linalg.norm(mean) < largest_norm(large_plan.protocol, 4)


def test_one_random_upload_is_withheld(large_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Protocol.encode_integers

    def encode(self: Protocol, vector: Any, round: int) -> Any:
        if vector[0] != 7.0:
            return original(self, vector, round)
        assert self.modulus is not None
        return np.random.default_rng(1).integers(0, self.modulus, LARGE).astype(np.uint32)

    monkeypatch.setattr(Protocol, "encode_integers", encode)
    clients = {name: Client(np.zeros(LARGE, np.float32)) for name in "abc"}
    clients["liar"] = Client(np.full(LARGE, 7.0, np.float32))
    mean, session = run_round(large_plan, clients)
    assert mean is None
    assert not session.report.released
    assert "some client sent what no honest one sends" in session.report.reason


def test_the_bound_grows_with_the_noise_and_holds_for_it(large_plan: Plan) -> None:
    """The noise alone, drawn a hundred times, stays below it; so the bound is no more than a few times too large."""
    protocol = large_plan.protocol
    mechanism: Any = protocol.mechanism
    draws = np.random.default_rng(2).binomial(mechanism.trials * 4, 0.5, (100, LARGE)) - mechanism.trials * 2.0
    norms = np.linalg.norm(draws * protocol.scale / 4, axis=1)
    assert norms.max() + protocol.clip_norm < largest_norm(protocol, 4) < 8.0 * norms.max()
    assert largest_norm(protocol, 3) > largest_norm(protocol, 4)
