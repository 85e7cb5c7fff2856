"""Rounds of two servers for an audit: shares, proofs, both servers' checks, and the sum of both servers' sums."""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from cpsgd.audit.playing import Encode, Start
from cpsgd.codec.clip import Vector
from cpsgd.errors import MessageError, ParameterError
from cpsgd.protocol import Protocol
from cpsgd.secagg.pair.extension import modular_sum
from cpsgd.secagg.pair.proof import (
    Basis,
    ReportParts,
    evaluation_message,
    make_report,
    open_helper,
    open_leader,
    prepared,
    verify,
)


def two_servers(protocol: Protocol) -> tuple[Encode, Start]:
    """Returns the client's and the servers' half of rounds by two servers (`cpsgd.audit.surveys.Made`).

    Raises:
        ParameterError: The protocol is not for two servers.

    Example:
        >>> from cpsgd.mechanisms import Coins
        >>> coin = Coins(coins=1, theta=0.25, coordinate_range=0.5)
        >>> encode, start = two_servers(Protocol(clients=4, dim=8, clip_norm=1.0, mechanism=coin, modulus=11))
        >>> server = start(None, 0)
        >>> server.add(encode(np.zeros(8), 0))
        >>> server.mean().shape
        (8,)
    """
    if protocol.modulus is None:
        raise ParameterError("The protocol has no modulus; plan(..., pair=True) chooses one.")
    shape = prepared(protocol.modulus, protocol.dim, b"audit", protocol.mechanism.values)
    key, prime = os.urandom(32), protocol.modulus

    class Servers:
        """Both servers in one round."""

        def __init__(self, _: Protocol, round: int) -> None:
            self._round, self._count = round, 0
            self._leader = self._helper = np.zeros(protocol.dim, np.uint32)

        def add(self, report: ReportParts) -> None:
            """Takes one client's report through both servers."""
            own, other = open_leader(shape, report.id, report.leader), open_helper(shape, report.id, report.helper)
            basis = Basis.of(shape, report.id, key)
            if not verify(shape, report.id, other, basis, evaluation_message(shape, own, basis)):
                raise MessageError("An honest report was refused.")
            self._leader = modular_sum(self._leader, own.values, prime)
            self._helper = modular_sum(self._helper, other.values, prime)
            self._count += 1

        def mean(self) -> NDArray[np.float32]:
            """Returns the mean behind the sum of both servers' sums."""
            return protocol.decode_sum(modular_sum(self._leader, self._helper, prime), self._count, self._round)

    def encode(vector: Vector, round: int) -> ReportParts:
        return make_report(shape, protocol.encode_integers(vector, round))

    return encode, Servers
