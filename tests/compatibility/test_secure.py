"""Identities and rosters of release 0.1.0 are read; its rounds of secure aggregation are refused, with what to do."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from cpsgd.errors import MessageError, SecureVersionError
from cpsgd.secagg import (
    SecureClient,
    SecureParameters,
    SecureServer,
    Stage,
    public_line,
    read_identity,
    read_roster,
)
from cpsgd.secagg.parameters import smallest_threshold

from .recorded import DATA, read

IDENTITIES = DATA / "identities"
ROUNDS = pytest.mark.parametrize("row", read("secure.json"), ids=lambda row: row["name"])


def identity_of(client: int) -> Ed25519PrivateKey:
    """A recorded identity. A checkout's files are open to all, and an identity must not be."""
    with tempfile.NamedTemporaryFile() as private:
        private.write((IDENTITIES / f"client-{client}.key").read_bytes())
        private.flush()
        return read_identity(Path(private.name))


def signing(row: dict[str, Any], client: int) -> dict[str, Any]:
    if not row["signed"]:
        return {}
    return {
        "identity": identity_of(client),
        "roster": read_roster(IDENTITIES / "roster.txt"),
    }


def test_identities_and_the_roster_are_read() -> None:
    recorded = read("identities.json")
    for i, line in enumerate(recorded["lines"]):
        assert public_line(identity_of(i), f"client {i}") == line
    assert sorted(key.hex() for key in read_roster(IDENTITIES / "roster.txt")) == recorded["roster"]


@ROUNDS
def test_parameters_without_a_quorum_are_refused(row: dict[str, Any]) -> None:
    with pytest.raises(MessageError, match="45"):
        SecureParameters.from_bytes(bytes.fromhex(row["parameters"]))


@ROUNDS
def test_messages_are_refused_with_a_remedy(row: dict[str, Any]) -> None:
    """An active server could learn single inputs in rounds of that release, so nobody takes part in one."""
    fields = {**row["fields"], "fingerprint": bytes.fromhex(row["fields"]["fingerprint"])}
    fields["threshold"] = max(fields["threshold"], smallest_threshold(fields["clients"], fields["neighbours"]))
    agreed = SecureParameters(**fields)
    roster = read_roster(IDENTITIES / "roster.txt") if row["signed"] else None
    server = SecureServer(agreed, session=bytes.fromhex(row["session"]), roster=roster)
    server.invite()
    first = row["stages"][0]
    assert first["stage"] == "advertise"
    for number, exchange in first["exchanges"].items():
        with pytest.raises(SecureVersionError, match=r"version 1; .* Install the same release"):
            server.receive(int(number), bytes.fromhex(exchange["answer"]))
        client = SecureClient(expected=None, **signing(row, int(number)))
        with pytest.raises(SecureVersionError, match=r"version 1; .* Install the same release"):
            client.advertise(bytes.fromhex(exchange["message"]))
        assert client.stage is Stage.ADVERTISE


@ROUNDS
def test_a_round_that_was_begun_is_left(row: dict[str, Any]) -> None:
    for stage in row["stages"]:
        for number, exchange in stage["exchanges"].items():
            with pytest.raises(SecureVersionError, match=r"version 1; .* take part in the next"):
                SecureClient.restore(bytes.fromhex(exchange["state"]), **signing(row, int(number)))
