"""Clients and servers that get one thing wrong where the rounding is the noise. All go through real messages."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd import Aggregator, Protocol
from cpsgd.audit import Encode, Start
from cpsgd.codec import pipeline
from cpsgd.codec.pack import Sampled
from cpsgd.mechanisms import Coins, SampledCoins
from cpsgd.mechanisms.tilted import FRACTION_BITS, Tilted
from cpsgd.randomness import Keystream

from .faults import Fault, keyed

Points = NDArray[np.float32]
# Grid points from even odds to certainty.
HALF = 1 << (FRACTION_BITS - 1)
_LOOSE = 1e6


def tilted(protocol: Protocol) -> Tilted:
    """The mechanism of a protocol whose rounding is the noise."""
    assert isinstance(protocol.mechanism, Tilted)
    return protocol.mechanism


class Decoded:
    """Adds up messages of one protocol, and decodes the sums by another."""

    def __init__(self, messages: Protocol, protocol: Protocol, round: int) -> None:
        self.protocol, self.aggregator = protocol, Aggregator(messages, round)

    def add(self, message: bytes) -> None:
        self.aggregator.add(message)

    def mean(self) -> NDArray[np.float32]:
        adding = self.aggregator
        return pipeline.decode(self.protocol, adding.sums, adding.count, adding.round)


def through(messages: Protocol) -> tuple[Encode, Start]:
    """Clients follow another protocol than the server."""
    return messages.encode, lambda protocol, round: Decoded(messages, protocol, round)


# ------------------------------------------------------------------ coins of another law


def moved(change: Callable[[Points], Points]) -> Fault:
    """Coins that see other grid points than the codec's."""

    def fault(protocol: Protocol) -> tuple[Encode, Start]:
        mechanism = tilted(protocol)
        grid = mechanism.grid
        # As many grid points per unit, but nothing in the way of any of them.
        widest = mechanism.most_theta / mechanism.theta * mechanism.coordinate_range
        bare = replace(
            protocol,
            rotate=False,
            clip_norm=_LOOSE,
            mechanism=replace(mechanism, theta=mechanism.most_theta, coordinate_range=widest),
        )
        encode, start = through(bare)

        def other(vector: Any, round: int) -> Any:
            points = np.clip(np.rint(pipeline.to_grid(protocol, vector, round)), -grid.limit, grid.limit)
            return encode(change(points) / bare.mechanism.grid.unit, round)  # type: ignore[union-attr]

        return other, start

    return fault


def in_the_last_coordinate(change: Callable[[Points], Points]) -> Fault:
    return moved(lambda points: np.where(np.arange(points.size) == points.size - 1, change(points), points))


biased_coins = moved(lambda points: points + np.float32(0.01 * 2 * HALF))
larger_theta = moved(lambda points: np.float32(1.2) * points)
# Zero is rounded up.
noise_free_coordinate = in_the_last_coordinate(lambda points: np.where(points < 0, -HALF, HALF).astype(np.float32))
deterministic_rounding = moved(lambda points: np.where(points < 0, -HALF, HALF).astype(np.float32))


def loose_clip(protocol: Protocol) -> tuple[Encode, Start]:
    """Vectors may be 1.3 times as long as agreed."""
    return through(replace(protocol, clip_norm=1.3 * protocol.clip_norm))


def one_word_for_all_coins(protocol: Protocol) -> tuple[Encode, Start]:
    """The coins of a coordinate are all compared with the same word: none of them adds anything to the first."""
    mechanism = protocol.mechanism
    assert isinstance(mechanism, Coins)
    coins = mechanism.coins
    single = replace(protocol, mechanism=replace(mechanism, coins=1))

    class Repeated(Decoded):
        def mean(self) -> NDArray[np.float32]:
            adding = self.aggregator
            return pipeline.decode(self.protocol, adding.sums * np.uint32(coins), adding.count, adding.round)

    return single.encode, lambda protocol, round: Repeated(single, protocol, round)


class _OffCentre(Aggregator):
    """Counts from one instead of from zero."""

    def mean(self, *, accept_epsilon: float | None = None) -> NDArray[np.float32]:
        sums = self.sums + np.uint32(self.count)
        return pipeline.decode(self.protocol, sums, self.count, self.round)


def wrong_centre(protocol: Protocol) -> tuple[Encode, Start]:
    """The server takes one less from every integer than it should."""
    return protocol.encode, _OffCentre


# ------------------------------------------------------------------ coins that are tossed for the same coordinates


def numbered(pattern: Callable[[int, int], int]) -> Fault:
    """Sampled coins: coordinates are chosen by a number that follows from the round's and the message's."""

    def fault(protocol: Protocol) -> tuple[Encode, Start]:
        mechanism = protocol.mechanism
        assert isinstance(mechanism, SampledCoins)
        rounds, place = itertools.count(), {"round": 0, "message": 0}

        class Numbered(Sampled):
            def chosen(self, message_id: bytes, dim: int) -> NDArray[np.uint32]:
                number = pattern(place["round"], place["message"])
                return super().chosen(hashlib.sha256(b"%d" % number).digest()[:16], dim)

        class Reused(SampledCoins):
            def format(self, clip_norm: float, modulus: int | None) -> Sampled:
                agreed = super().format(clip_norm, modulus)
                assert isinstance(agreed, Sampled)
                return Numbered(agreed.radix, agreed.values, agreed.below)

        fields = {"rate": mechanism.rate, "theta": mechanism.theta, "coordinate_range": mechanism.coordinate_range}
        reused = replace(protocol, mechanism=Reused(**fields))

        class Counting(Aggregator):
            def add(self, message: Any) -> None:
                super().add(message)
                place["message"] += 1

        def start(protocol: Protocol, round: int) -> Aggregator:
            place.update(round=next(rounds), message=0)
            return Counting(reused, round)

        return reused.encode, start

    return fault


honest_patterns = numbered(lambda round, message: (round << 32) + message)
one_pattern_for_all_clients = numbered(lambda round, message: round)
one_pattern_for_all_rounds = numbered(lambda round, message: message)
one_pattern_for_two_rounds = numbered(lambda round, message: (round // 2 << 32) + message)
pattern_of_another_client_in_the_round_before = numbered(lambda round, message: round + message)


class _HalfFresh(Keystream):
    """The first words, which choose coordinates, from a key; the others from the operating system."""

    __slots__ = ("_choice", "_choosing")

    def __init__(self, key: bytes, choosing: int) -> None:
        super().__init__()
        self._choice, self._choosing = Keystream(key), choosing

    def fill(self, buffer: NDArray[np.uint8], size: int) -> NDArray[np.uint8]:
        words = super().fill(buffer, size)
        words[: self._choosing] = self._choice.take(self._choosing)
        return words


def private_choice(pattern: Callable[[int, int], int]) -> Fault:
    """Lazy coins: the same, where clients choose by private randomness."""
    return lambda protocol: keyed(protocol, pattern, lambda key: _HalfFresh(key, 2 * protocol.dim))


honest_choice = private_choice(lambda round, message: (round << 32) + message)
one_choice_for_all_clients = private_choice(lambda round, message: round)
one_choice_for_all_rounds = private_choice(lambda round, message: message)
one_choice_for_two_rounds = private_choice(lambda round, message: (round // 2 << 32) + message)
