"""From a plan through secure aggregation to a mean and its guarantee, with clients who drop out."""

from __future__ import annotations

import numpy as np

from cpsgd import Protocol, guarantee, plan
from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage

from .rounds import Round, play


def test_a_planned_round_with_dropouts_keeps_its_guarantee() -> None:
    best = plan(clients=12, dim=64, epsilon=6.0, delta=1e-5, bits=10, secure=True, dropout=0.25)
    protocol = best.protocol
    agreed = SecureParameters.for_protocol(protocol, round=5, dropout=0.25, surviving=best.surviving)
    vectors = np.random.default_rng(1).normal(0.0, 0.1, size=(12, 64)).astype(np.float32)
    values = np.stack([protocol.encode_integers(vector, round=5) for vector in vectors])
    server = SecureServer(agreed)
    started = Round(server, [SecureClient(expected=agreed) for _ in range(12)], values, server.invite())
    found = play(started, {Stage.SHARE: frozenset({3}), Stage.MASK: frozenset({7}), Stage.UNMASK: frozenset({0})})

    survivors = list(found.survivors)
    assert survivors == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11]
    mean = protocol.decode_sum(found.sums, len(survivors), round=5)
    plain = Protocol.from_dict({**protocol.to_dict(), "modulus": None})
    sums = values[survivors].sum(axis=0, dtype=np.uint32)
    np.testing.assert_allclose(mean, plain.decode_sum(sums, len(survivors), round=5), atol=1e-5)

    # More survivors than planned for mean more noise than planned for; the plan covers down to best.surviving.
    achieved = guarantee(protocol, 1e-5, surviving=len(survivors))
    assert achieved.epsilon <= best.guarantee.epsilon <= 6.0
    assert achieved.epsilon > guarantee(protocol, 1e-5).epsilon
    assert len(survivors) >= best.surviving == agreed.surviving


def test_whatever_is_uploaded_the_mean_stays_within_the_window_of_the_modulus() -> None:
    protocol = Protocol.rotated_binomial(clients=20, dim=300, clip_norm=1.0, levels=8, trials=24, modulus=2**9)
    limit = (2**9 / 2 + 1) * protocol.scale / 20
    random = np.random.default_rng(3)
    middle = 20 * (24 / 2 + 7 / 2)
    for sums in (
        random.integers(0, 2**9, 300, dtype=np.uint32),
        np.full(300, (int(middle) + 2**8) % 2**9, np.uint32),
        np.full(300, (int(middle) - 2**8 + 1) % 2**9, np.uint32),
    ):
        mean = protocol.decode_sum(sums, 20, round=0)
        assert float(np.linalg.norm(mean)) <= 300**0.5 * limit * (1 + 1e-5)
    # The ends of the window are reached: the bound is not idle.
    assert float(np.linalg.norm(mean)) >= 300**0.5 * limit * 0.98
