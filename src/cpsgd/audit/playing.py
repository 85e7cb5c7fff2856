"""Plays rounds through the code under audit: every client encodes, the server adds up and releases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from cpsgd.audit.checks import Played
from cpsgd.audit.lattice import RoundLattice
from cpsgd.audit.law import SumLaw
from cpsgd.codec.clip import Vector
from cpsgd.protocol import Protocol

# Rounds between two calls to say how far it is.
_REPORTED = 100


class ServerHalf(Interface):
    """The server's half of a round, such as `Aggregator`."""

    def add(self, message: Any, /) -> None:
        """Takes one client's message."""

    def mean(self) -> NDArray[np.float32]:
        """What is released."""


Encode = Callable[[Vector, int], Any]
"""The client's half: from a vector and the round's number to a message, such as `Protocol.encode`."""

Start = Callable[[Protocol, int], ServerHalf]
"""Starts a round, such as `Aggregator` itself."""


class Player:
    """Plays rounds of the code under audit."""

    def __init__(
        self,
        protocol: Protocol,
        round: int,
        encode: Encode,
        start: Start,
        seed: int | None,
        progress: Callable[[int], None] | None,
    ) -> None:
        self.lattice = RoundLattice(protocol, round)
        self.generator = np.random.default_rng(seed)
        self.played = 0
        self._protocol, self._round = protocol, round
        self._encode, self._start, self._progress = encode, start, progress

    def law(self, clients: Sequence[tuple[Vector, int]]) -> SumLaw:
        """The law of the sums of clients, given as vectors and how many have each."""
        return SumLaw(self._protocol, [(self.lattice.points(vector), number) for vector, number in clients])

    def means(self, worlds: Sequence[Sequence[tuple[Vector, int]]]) -> NDArray[np.float32]:
        """What is released in rounds with these clients, a row each."""
        released = np.empty((len(worlds), self._protocol.dim), dtype=np.float32)
        for row, clients in zip(released, worlds, strict=True):
            server = self._start(self._protocol, self._round)
            for vector, number in clients:
                for _ in range(number):
                    server.add(self._encode(vector, self._round))
            row[:] = server.mean()
            self.played += 1
            if self._progress is not None and self.played % _REPORTED == 0:
                self._progress(_REPORTED)
        return released

    def play(self, name: str, clients: Sequence[tuple[Vector, int]], rounds: int) -> Played:
        """Rounds with the same vectors."""
        times = self.played + np.arange(rounds)
        count = sum(number for _, number in clients)
        exact = self.lattice.sums(self.means([clients] * rounds), count)
        return Played(name, self.law(clients), self.lattice.slack(count), exact, times)
