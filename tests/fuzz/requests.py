"""What a server may send to a client's session, and what a client may have kept between two requests."""

from __future__ import annotations

import struct

import numpy as np

from cpsgd.codec.wire import checksum
from cpsgd.federation.answering import ClientSession, SessionState
from cpsgd.federation.limits import Limits
from cpsgd.federation.messages import HEADER_BYTES, Request
from cpsgd.protocol import Protocol
from cpsgd.secagg import SecureParameters, SecureServer, Stage

ROUND = 7
PROTOCOL = Protocol.rotated_binomial(clients=3, dim=33, clip_norm=1.0, levels=5, trials=11, modulus=256)


def ask(data: bytes) -> None:
    """A request to a client that is in no round yet."""
    ClientSession(Limits(), "1", secure=False).answer(data, lambda protocol: np.zeros(33, np.float32))


def request_seeds() -> list[bytes]:
    """A request of each kind that begins a round, and one that does not."""
    parameters = SecureParameters.for_protocol(PROTOCOL, round=ROUND, dropout=0.0)
    invitation = SecureServer(parameters).invite()[0]
    text, surviving = PROTOCOL.to_json(), parameters.surviving
    return [
        Request(Stage.UPLOAD, ROUND, 9, surviving, text).to_bytes(),
        Request(Stage.ADVERTISE, ROUND, 9, surviving, text, invitation).to_bytes(),
        Request(Stage.SHARE, ROUND, 9, surviving, payload=b"keys").to_bytes(),
    ]


def seal_request(data: bytes) -> bytes:
    """The checksum that fits."""
    fields, body = data[: HEADER_BYTES - 4], data[HEADER_BYTES:]
    return data if len(data) < HEADER_BYTES else fields + struct.pack("<I", checksum(fields, body)) + body


def go_on(data: bytes) -> None:
    """A client's state, and a request after it."""
    ClientSession(Limits(), "1", data)


def progress_seeds() -> list[bytes]:
    """A state between two rounds, and one within a round."""
    return [
        SessionState("1", 4, 9, 3, "ab" * 16).to_bytes(),
        SessionState("1", 4, 9, 3, "ab", protocol="{}", secrets=b"secret").to_bytes(),
    ]
