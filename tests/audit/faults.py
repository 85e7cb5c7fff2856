"""Clients and servers that get one thing wrong, built from the real code. They exist to be found out."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import Aggregator, Protocol
from cpsgd.audit import Encode, Start
from cpsgd.codec import clip, pack, pipeline, rotate, wire
from cpsgd.mechanisms import Binomial, binomial
from cpsgd.randomness import Keystream

Fault = Callable[[Protocol], tuple[Encode, Start]]
Values = NDArray[np.uint32]


def noise_of(protocol: Protocol) -> Binomial:
    """The mechanism of a protocol that adds coins."""
    assert isinstance(protocol.mechanism, Binomial)
    return protocol.mechanism


def noiseless(protocol: Protocol) -> Protocol:
    """The same without coins."""
    return replace(protocol, mechanism=replace(noise_of(protocol), trials=0))


def message(protocol: Protocol, values: Values, round: int) -> bytes:
    """A message that the aggregator accepts, with any integers in it."""
    out = np.empty(protocol.message_bytes, dtype=np.uint8)
    out[wire.HEADER_BYTES :] = np.frombuffer(pack.forward(values, protocol.radix), dtype=np.uint8)
    wire.write_header(
        out,
        radix=protocol.radix,
        fingerprint=protocol.fingerprint,
        round=round,
        message_id=os.urandom(16),
        dim=protocol.dim,
    )
    return out.tobytes()


def spoiled(protocol: Protocol, integers: Callable[[Any, int], Values]) -> tuple[Encode, Start]:
    """A client with other integers; an honest server."""
    return lambda vector, round: message(protocol, integers(vector, round), round), Aggregator


def wrong_noise(constant: int = 0, **changes: Any) -> Fault:
    """A client whose noise has other parameters than agreed, and who perhaps adds a constant."""

    def fault(protocol: Protocol) -> tuple[Encode, Start]:
        other = replace(protocol, mechanism=replace(noise_of(protocol), **changes))
        return spoiled(protocol, lambda vector, round: pipeline.integers(other, vector, round) + np.uint32(constant))

    return fault


no_noise = wrong_noise(trials=0)
no_noise_but_its_mean = wrong_noise(trials=0, constant=125)
half_the_trials = wrong_noise(trials=125)
half_the_trials_but_all_of_the_mean = wrong_noise(trials=124, constant=63)
biased_coins = wrong_noise(p=0.6)
slightly_biased_coins = wrong_noise(p=0.51)


def missing_clip(protocol: Protocol) -> tuple[Encode, Start]:
    loose = replace(protocol, clip_norm=1e6)
    return spoiled(protocol, lambda vector, round: pipeline.integers(loose, vector, round))


def clip_before_scaling(protocol: Protocol) -> tuple[Encode, Start]:
    """The vector is clipped, and then weighted with the number of the client's examples."""
    loose = replace(protocol, clip_norm=1e6)

    def integers(vector: Any, round: int) -> Values:
        clipped = vector * clip.factor(vector, protocol.clip_norm)
        return pipeline.integers(loose, 3.0 * clipped, round)

    return spoiled(protocol, integers)


def clip_by_the_largest_coordinate(protocol: Protocol) -> tuple[Encode, Start]:
    """The wrong norm: each coordinate is clipped to D, the vector as a whole is not."""
    loose = replace(protocol, clip_norm=1e6)

    def integers(vector: Any, round: int) -> Values:
        return pipeline.integers(loose, np.clip(vector, -protocol.clip_norm, protocol.clip_norm), round)

    return spoiled(protocol, integers)


def keyed(
    protocol: Protocol, key: Callable[[int, int], int], stream: Callable[[bytes], Keystream] = Keystream
) -> tuple[Encode, Start]:
    """Keystreams with keys that depend on the number of the round that is played and of the message in it."""
    rounds, number = itertools.count(), {"round": 0, "message": 0}

    def start(protocol: Protocol, round: int) -> Aggregator:
        number.update(round=next(rounds), message=0)
        return Aggregator(protocol, round)

    def encode(vector: Any, round: int) -> bytes:
        secret = key(number["round"], number["message"]).to_bytes(16, "little")
        number["message"] += 1
        return pipeline.encode(protocol, vector, round, stream(secret))

    return encode, start


def keyed_by(key: Callable[[int, int], int]) -> Fault:
    """Keys by the numbers of round and message."""
    return lambda protocol: keyed(protocol, key)


# No fault: a key of its own for every message.
honest = keyed_by(lambda round, message: (round << 64) + message)
one_keystream_for_all_clients = keyed_by(lambda round, message: round)
one_keystream_for_all_rounds = keyed_by(lambda round, message: message)
one_keystream_for_two_rounds = keyed_by(lambda round, message: (round // 2 << 64) + message)
# After 333 rounds the keys begin again.
keystream_that_comes_back = keyed_by(lambda round, message: (round % 333 << 64) + message)


def keystream_used_twice_in_a_message(protocol: Protocol) -> tuple[Encode, Start]:
    """The second half of the coordinates gets the noise of the first."""
    half = protocol.dim // 2
    noise = noise_of(protocol)

    def integers(vector: Any, round: int) -> Values:
        sent = pipeline.integers(noiseless(protocol), vector, round)
        return sent + np.tile(binomial.sample(noise.trials, noise.p, half, Keystream()), 2)

    return spoiled(protocol, integers)


def deterministic_rounding(protocol: Protocol) -> tuple[Encode, Start]:
    """To the nearest level, always."""
    noise = noise_of(protocol)
    grid = noise.grid

    def integers(vector: Any, round: int) -> Values:
        points = np.clip(pipeline.to_grid(protocol, vector, round), -grid.limit, grid.limit)
        nearest = np.floor((points + grid.limit) / 2.0**grid.fraction_bits + 0.5).astype(np.uint32)
        return nearest + binomial.sample(noise.trials, noise.p, protocol.dim, Keystream())

    return spoiled(protocol, integers)


class Integers:
    """No fault: a server that adds integers up, as secure aggregation would."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        self.protocol, self.round, self.count = protocol, round, 0
        self.sums = np.zeros(protocol.dim, dtype=np.uint64)

    def add(self, message: Values) -> None:
        self.sums = self.reduced(self.sums + message)
        self.count += 1

    def reduced(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        return sums if self.protocol.modulus is None else sums % np.uint64(self.protocol.modulus)

    def mean(self) -> NDArray[np.float32]:
        return self.protocol.decode_sum(self.sums, self.count, self.round)


def served_by(server: Start) -> Fault:
    """An honest client, and another server."""
    return lambda protocol: (protocol.encode, server)


class _PlannedAggregator(Aggregator):
    """Subtracts the noise of all clients planned for, also where fewer answered."""

    def mean(self, *, accept_epsilon: float | None = None) -> NDArray[np.float32]:
        missing = self.protocol.clients - self.count
        shift = missing * noise_of(self.protocol).noise.mean * self.protocol.scale / self.count
        everywhere = np.full(self.protocol.dim, shift, dtype=np.float32)
        signs = rotate.signs(self.protocol.dim, self.protocol.rotation_seed, self.round)
        return super().mean() - rotate.backward(everywhere, signs)


planned_noise_subtracted = served_by(_PlannedAggregator)


class _PlannedDivisor(Aggregator):
    """Divides by the number of clients planned for."""

    def mean(self, *, accept_epsilon: float | None = None) -> NDArray[np.float32]:
        return super().mean() * np.float32(self.count / self.protocol.clients)


planned_clients_divided_by = served_by(_PlannedDivisor)


class _FloatingAggregator(Aggregator):
    """Blurs what it releases."""

    def mean(self, *, accept_epsilon: float | None = None) -> NDArray[np.float32]:
        return super().mean() + np.float32(0.4 * self.protocol.scale)


off_the_lattice = served_by(_FloatingAggregator)
