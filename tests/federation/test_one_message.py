"""Rounds of one message to two servers, with servers that answer what they are told to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cpsgd.errors import MessageError, SenderError, ThresholdError
from cpsgd.federation import one_message
from cpsgd.federation.one_message import PairServers, PairSum, asks_for, asks_for_one
from cpsgd.federation.terms import Terms


class Servers:
    """Both servers: a report is what it is made of, and `bad` ones are refused."""

    upload_bytes = 3

    def __init__(self) -> None:
        self.task = SimpleNamespace(fingerprint=b"f" * 32, protocol=self)
        self.begun: list[int] = []
        self.settled: list[list[bytes]] = []
        self.good = 0

    def begin(self, round: int) -> None:
        self.begun.append(round)

    def read(self, answer: bytes) -> Any:
        return SimpleNamespace(id=answer)

    def settle(self, reports: list[Any]) -> list[str]:
        self.settled.append([report.id for report in reports])
        reasons = ["It is bad." if report.id == b"bad" else "" for report in reports]
        self.good += reasons.count("")
        return reasons

    def accepted(self, round: int) -> int:
        assert round == self.begun[-1]
        return self.good

    def finish(self, round: int) -> Any:
        return np.arange(2, dtype=np.uint32), self.good

    def decode_sum(self, sums: Any, survivors: int, number: int) -> Any:
        return sums, survivors, number


def opened(servers: Servers, needed: int = 2) -> PairSum[str]:
    terms = SimpleNamespace(surviving=needed, memory=SimpleNamespace(number=lambda round: round + 4))
    return PairSum(cast(PairServers, servers), cast(Terms, terms), 5, list("abc"), lambda payload: b"ask " + payload)


def test_a_round_of_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_message, "_BATCH", 2)
    servers = Servers()
    total = opened(servers)
    assert servers.begun == [4]  # the servers count from 0
    assert total.requests() == dict.fromkeys("abc", b"ask " + asks_for(b"f" * 32))
    assert asks_for_one(asks_for(b"f" * 32))
    assert not asks_for_one(b"f" * 32)
    for wrong in (b"", b"ab", b"abcd", bytearray(b"abc")):
        with pytest.raises(MessageError, match="3 bytes"):
            total.receive("a", cast(bytes, wrong))
    total.receive("a", b"one")
    with pytest.raises(SenderError, match="Another node"):
        total.receive("b", b"one")
    assert servers.settled == []
    total.receive("b", b"bad")
    assert servers.settled == [[b"one", b"bad"]]
    assert total.survivors == 0
    with pytest.raises(ThresholdError, match="1 reports were accepted, and 2 are needed"):
        total.close()
    total.receive("c", b"two")
    assert total.close() == {"b": "It is bad."}
    assert servers.settled == [[b"one", b"bad"], [b"two"]]
    assert total.survivors == 2
    sums, survivors, number = cast(Any, total.mean())
    assert (sums.tolist(), survivors, number) == ([0, 1], 2, 9)
