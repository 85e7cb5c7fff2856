"""Audited rounds by two servers: the mean behind the reports' integers, and no report that was tampered with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.audit import pair_rounds
from cpsgd.errors import MessageError, ParameterError
from cpsgd.mechanisms import Coins
from cpsgd.secagg.pair.proof import make_report

PROTOCOL = Protocol(
    clients=4, dim=8, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.25, coordinate_range=0.5), modulus=11
)


def test_the_mean_is_that_of_the_reports_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def noted(shape: Any, integers: Any) -> Any:
        made.append(integers)
        return make_report(shape, integers)

    monkeypatch.setattr("cpsgd.audit.pair_rounds.make_report", noted)
    encode, start = pair_rounds.two_servers(PROTOCOL)
    server = start(PROTOCOL, 5)
    for number in range(3):
        server.add(encode(np.full(8, 0.1 * number), 5))
    sums = np.sum(made, axis=0, dtype=np.uint64) % np.uint64(11)
    np.testing.assert_array_equal(server.mean(), PROTOCOL.decode_sum(sums, 3, 5))


def test_a_report_that_was_tampered_with_is_refused() -> None:
    encode, start = pair_rounds.two_servers(PROTOCOL)
    server: Any = start(PROTOCOL, 0)
    one, other = (encode(np.zeros(8), 0) for _ in range(2))
    with pytest.raises(MessageError, match="refused"):
        server.add(replace(one, leader=other.leader))
    server.add(one)


def test_a_protocol_without_a_modulus_is_not_for_two_servers() -> None:
    with pytest.raises(ParameterError, match="no modulus"):
        pair_rounds.two_servers(replace(PROTOCOL, modulus=None))
