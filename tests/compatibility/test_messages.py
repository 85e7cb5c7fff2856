"""Protocol files, messages and saved aggregators of release 0.1.0 are read, and give the same sums and means."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

import cpsgd

from .recorded import read

PROTOCOLS: dict[str, dict[str, Any]] = read("protocols.json")


def protocol_named(name: str) -> cpsgd.Protocol:
    return cpsgd.Protocol.from_json(PROTOCOLS[name]["json"])


@pytest.mark.parametrize("name", PROTOCOLS)
def test_a_protocol_file_means_the_same(name: str) -> None:
    recorded, protocol = PROTOCOLS[name], protocol_named(name)
    assert json.loads(protocol.to_json()) == json.loads(recorded["json"])
    assert protocol.fingerprint.hex() == recorded["fingerprint"]
    assert (protocol.name, protocol.radix) == (recorded["kind"], recorded["radix"])
    assert protocol.message_bytes == recorded["message_bytes"]
    assert len(protocol.encode(np.zeros(protocol.dim), 0)) == recorded["message_bytes"]


@pytest.mark.parametrize("row", read("messages.json"), ids=lambda row: f"{row['protocol']}-{row['round']}")
def test_messages_add_up_to_the_same_mean(row: dict[str, Any]) -> None:
    protocol = protocol_named(row["protocol"])
    messages = [bytes.fromhex(message) for message in row["messages"]]
    fresh = cpsgd.Aggregator(protocol, row["round"])
    for message in messages[:2]:
        fresh.add(message)
    half = bytes.fromhex(row["state_after_two"])
    assert fresh.save() == half
    restored = cpsgd.Aggregator.restore(protocol, half)
    assert (restored.count, restored.round) == (2, row["round"])
    whole = cpsgd.Aggregator.restore(protocol, bytes.fromhex(row["state"]))
    for aggregator in (fresh, restored):
        aggregator.add(messages[2])
    for aggregator in (fresh, restored, whole):
        assert aggregator.count == 3
        assert str(aggregator.sums.dtype) == row["sums_dtype"]
        assert aggregator.sums.tobytes().hex() == row["sums"]
        assert aggregator.mean().tobytes().hex() == row["mean"]
        assert aggregator.save().hex() == row["state"]


@pytest.mark.parametrize("row", read("decode_sum.json"), ids=lambda row: f"{row['protocol']}-{row['round']}")
def test_a_sum_of_integers_is_decoded_to_the_same_mean(row: dict[str, Any]) -> None:
    sums = np.frombuffer(bytes.fromhex(row["sums"]), row["dtype"])
    mean = protocol_named(row["protocol"]).decode_sum(sums, row["count"], row["round"])
    assert mean.dtype == np.float32
    assert mean.tobytes().hex() == row["mean"]
