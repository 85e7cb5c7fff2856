"""The walks of a mean and of a statistic; see `tests.walks`."""

from __future__ import annotations

import numpy as np

from cpsgd import Aggregator, Protocol, plan, statistics
from tests.walks import walk


def test_from_vectors_to_their_mean() -> None:
    protocol = Protocol.rotated_binomial(clients=10, dim=650, clip_norm=1.0, levels=16, trials=100)
    promised = plan(clients=10, dim=650, epsilon=4.0, delta=1e-5).protocol

    def round_of(protocol: Protocol) -> None:
        server = Aggregator(protocol, round=1)
        for _ in range(10):
            server.add(protocol.encode(np.full(650, 0.01, np.float32), round=1))
        server.mean()

    for each in (protocol, promised):
        files = walk(lambda each=each: round_of(each))  # type: ignore[misc]
        assert "protocol.py" in files
        assert len(files) <= 12, files


def test_the_mean_of_a_column() -> None:
    table = {"age": np.random.default_rng(0).uniform(0, 90, 1000)}
    files = walk(lambda: statistics.mean(table, bounds={"age": (0, 100)}, epsilon=1.0, delta=1e-6))
    assert "statistics/rows.py" in files
    assert len(files) <= 19, files
