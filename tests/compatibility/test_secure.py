"""Rounds of secure aggregation of release 0.1.0 can be replayed: states, messages, identities and sums."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cpsgd.secagg import (
    SecureClient,
    SecureParameters,
    SecureServer,
    Stage,
    public_line,
    read_identity,
    read_roster,
)

from .recorded import DATA, read

IDENTITIES = DATA / "identities"
ROUNDS = pytest.mark.parametrize("row", read("secure.json"), ids=lambda row: row["name"])


def parameters_of(row: dict[str, Any]) -> SecureParameters:
    return SecureParameters.from_bytes(bytes.fromhex(row["parameters"]))


def signing(row: dict[str, Any], client: int) -> dict[str, Any]:
    if not row["signed"]:
        return {}
    return {
        "identity": read_identity(IDENTITIES / f"client-{client}.key"),
        "roster": read_roster(IDENTITIES / "roster.txt"),
    }


def test_identities_and_the_roster_are_read() -> None:
    recorded = read("identities.json")
    for i, line in enumerate(recorded["lines"]):
        assert public_line(read_identity(IDENTITIES / f"client-{i}.key"), f"client {i}") == line
    assert sorted(key.hex() for key in read_roster(IDENTITIES / "roster.txt")) == recorded["roster"]


@ROUNDS
def test_parameters_are_read_and_written_the_same(row: dict[str, Any]) -> None:
    fields = {**row["fields"], "fingerprint": bytes.fromhex(row["fields"]["fingerprint"])}
    assert parameters_of(row) == SecureParameters(**fields)
    assert SecureParameters(**fields).to_bytes().hex() == row["parameters"]


@ROUNDS
def test_a_server_that_gets_the_same_answers_says_the_same(row: dict[str, Any]) -> None:
    roster = read_roster(IDENTITIES / "roster.txt") if row["signed"] else None
    server = SecureServer(parameters_of(row), session=bytes.fromhex(row["session"]), roster=roster)
    waiting = server.invite()
    for stage in row["stages"]:
        assert server.stage is Stage(stage["stage"])
        assert stage["exchanges"]
        for client, exchange in stage["exchanges"].items():
            assert waiting[int(client)].hex() == exchange["message"]
            server.receive(int(client), bytes.fromhex(exchange["answer"]))
        waiting = server.advance()
    assert server.stage is Stage.DONE
    result = server.result()
    assert result.sums.tolist() == row["sums"]
    assert sorted(result.survivors) == row["survivors"]
    values = np.array(row["values"])[row["survivors"]]
    assert (values.sum(axis=0) % 2 ** row["fields"]["bits"]).tolist() == row["sums"]


@ROUNDS
def test_a_client_is_restored_at_every_stage_and_answers(row: dict[str, Any]) -> None:
    """Exactly the same where nothing is drawn, and with a message of the same length where keys and seeds are."""
    for stage in row["stages"]:
        for number, exchange in stage["exchanges"].items():
            client = SecureClient.restore(
                bytes.fromhex(exchange["state"]), expected=parameters_of(row), **signing(row, int(number))
            )
            assert client.stage is Stage(stage["stage"])
            values = [np.array(row["values"][int(number)], np.uint32)] if stage["stage"] == "mask" else []
            answer = getattr(client, stage["stage"])(bytes.fromhex(exchange["message"]), *values)
            if stage["stage"] in ("advertise", "share"):
                assert len(answer) == len(exchange["answer"]) // 2
            else:
                assert answer.hex() == exchange["answer"]


@ROUNDS
def test_a_saved_state_is_written_the_same(row: dict[str, Any]) -> None:
    for stage in row["stages"]:
        for number, exchange in stage["exchanges"].items():
            state = bytes.fromhex(exchange["state"])
            client = SecureClient.restore(state, expected=parameters_of(row), **signing(row, int(number)))
            assert client.export_state() == state
