"""More clients and servers with one thing wrong: bugs that leave most rounds, or most of a round, as they should be."""

from __future__ import annotations

import functools
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
from cpsgd.mechanisms import binomial
from cpsgd.randomness import Keystream

from .faults import Fault, Integers, Values, keyed, keyed_by, noise_of, noiseless, spoiled


def bare(protocol: Protocol, vector: Any, round: int) -> Values:
    """A client's integers before noise."""
    return pipeline.integers(noiseless(protocol), vector, round)


def coins(size: int, trials: int) -> Values:
    """Fresh fair coins, counted."""
    return binomial.sample(trials, 0.5, size, Keystream())


def noisy(protocol: Protocol, drawn: Callable[[Any, Values], Values]) -> tuple[Encode, Start]:
    """A client whose noise is another: a function of the vector and of its rounded integers."""

    def integers(vector: Any, round: int) -> Values:
        values = bare(protocol, vector, round)
        return values + drawn(vector, values).astype(np.uint32)

    return spoiled(protocol, integers)


def skipped_where(condition: Callable[[Any, Values, Protocol], Any]) -> Fault:
    """Where the condition holds, of the vector or of single coordinates, noise is replaced by its mean."""

    def fault(protocol: Protocol) -> tuple[Encode, Start]:
        def drawn(vector: Any, values: Values) -> Values:
            mean = np.uint32(noise_of(protocol).trials // 2)
            return np.where(condition(vector, values, protocol), mean, coins(protocol.dim, noise_of(protocol).trials))

        return noisy(protocol, drawn)

    return fault


# ------------------------------------------------------------------ noise skipped

no_noise_for_zero_vectors = skipped_where(lambda vector, values, protocol: not np.any(vector))
no_noise_for_constant_vectors = skipped_where(lambda vector, values, protocol: np.all(vector == vector[0]))
no_noise_for_one_hot_vectors = skipped_where(lambda vector, values, protocol: np.count_nonzero(vector) == 1)
no_noise_for_tiny_vectors = skipped_where(lambda vector, values, protocol: 0.0 < np.abs(vector).max() < 1e-30)
no_noise_for_single_precision = skipped_where(lambda vector, values, protocol: vector.dtype == np.float32)
no_noise_in_the_last_coordinate = skipped_where(
    lambda vector, values, protocol: np.arange(protocol.dim) == protocol.dim - 1
)
no_noise_beyond_a_block = skipped_where(lambda vector, values, protocol: np.arange(protocol.dim) >= 96)
no_noise_on_the_largest_level = skipped_where(lambda vector, values, protocol: values == protocol.mechanism.levels - 1)


def no_noise_from(silent: Callable[[int, int], bool]) -> Fault:
    """Messages without noise but its mean, chosen by their number in the round and in all."""

    def fault(protocol: Protocol) -> tuple[Encode, Start]:
        every, place = itertools.count(1), {"message": 0}

        def start(protocol: Protocol, round: int) -> Aggregator:
            place["message"] = 0
            return Aggregator(protocol, round)

        def drawn(vector: Any, values: Values) -> Values:
            place["message"] += 1
            trials = noise_of(protocol).trials
            silence = np.full(protocol.dim, trials // 2)
            return silence if silent(place["message"], next(every)) else coins(protocol.dim, trials)

        return noisy(protocol, drawn)[0], start

    return fault


noise_of_one_client = no_noise_from(lambda place, number: place > 1)
no_noise_from_the_first_client = no_noise_from(lambda place, number: place == 1)
no_noise_from_the_last_client = no_noise_from(lambda place, number: place == 4)
no_noise_in_one_message_of_a_hundred = no_noise_from(lambda place, number: number % 100 == 0)


# ------------------------------------------------------------------ noise of another law


def coins_shared_by_neighbours(protocol: Protocol) -> tuple[Encode, Start]:
    """Every coordinate shares 32 of its coins with the one before and 32 with the one after."""

    def drawn(vector: Any, values: Values) -> Values:
        shared = coins(protocol.dim + 1, 32)
        return coins(protocol.dim, noise_of(protocol).trials - 64) + shared[1:] + shared[:-1]

    return noisy(protocol, drawn)


def even_noise(protocol: Protocol) -> tuple[Encode, Start]:
    """The right mean and variance, but every step is of two: whether a sum is odd is not hidden at all."""
    quarter = noise_of(protocol).trials // 4
    constant = np.uint32(noise_of(protocol).trials // 2 - quarter)
    return noisy(protocol, lambda vector, values: 2 * coins(protocol.dim, quarter) + constant)


def uniform_noise(protocol: Protocol) -> tuple[Encode, Start]:
    """The right mean, a variance within a hundredth of the right one, and no tails."""
    generator = np.random.default_rng(7)
    centre, variance = noise_of(protocol).trials // 2, noise_of(protocol).trials / 4
    # Uniform on centre ± w has variance w (w + 1) / 3.
    width = int(np.sqrt(3.0 * variance) - 0.5)
    low, high = (w * (w + 1) / 3.0 for w in (width, width + 1))
    wider = (variance - low) / (high - low)

    def drawn(vector: Any, values: Values) -> Values:
        widths = width + (generator.random(protocol.dim) < wider)
        return np.asarray(centre + generator.integers(-widths, widths + 1), dtype=np.uint32)

    return noisy(protocol, drawn)


def noise_without_tails(protocol: Protocol) -> tuple[Encode, Start]:
    """Drawn again where it is more than three standard deviations out, as from too short a table."""
    reach = 1.5 * np.sqrt(noise_of(protocol).trials)

    def drawn(vector: Any, values: Values) -> Values:
        kept = coins(protocol.dim, noise_of(protocol).trials)
        while (out := np.abs(kept - noise_of(protocol).trials / 2) > reach).any():
            kept = np.where(out, coins(protocol.dim, noise_of(protocol).trials), kept)
        return kept

    return noisy(protocol, drawn)


def whole_words_of_coins(protocol: Protocol) -> tuple[Encode, Start]:
    """Trials rounded down to whole words of 32 bits, the mean corrected."""
    fewer = noise_of(protocol).trials // 32 * 32
    constant = np.uint32((noise_of(protocol).trials - fewer) // 2)
    return noisy(protocol, lambda vector, values: coins(protocol.dim, fewer) + constant)


def less_noise_for_negative_values(protocol: Protocol) -> tuple[Encode, Start]:
    """Half of the coins, and the mean of the others."""
    fewer = noise_of(protocol).trials // 4 * 2
    constant = np.uint32((noise_of(protocol).trials - fewer) // 2)

    def drawn(vector: Any, values: Values) -> Values:
        negative = 2 * values < protocol.mechanism.levels - 1
        return np.where(negative, coins(protocol.dim, fewer) + constant, coins(protocol.dim, noise_of(protocol).trials))

    return noisy(protocol, drawn)


# ------------------------------------------------------------------ noise used twice


one_keystream_for_two_clients = keyed_by(lambda round, message: (round << 64) + max(1, message))
# Rounds 0 and 2, 1 and 3, 4 and 6, 5 and 7 and so on share their noise.
keystream_of_the_round_before_last = keyed_by(lambda round, message: ((round // 4 * 2 + round % 2) << 64) + message)
# A counter that a round advances by one instead of by the number of its messages.
keystream_of_another_client_in_the_round_before = keyed_by(lambda round, message: round + message)
# A round's key is one of 256, in no order.
few_keys = keyed_by(lambda round, message: (hashlib.sha256(b"%d" % round).digest()[0] << 64) + message)


def key_from_the_rotation_seed(protocol: Protocol) -> tuple[Encode, Start]:
    """Noise from the public randomness: the seed, the round's number and the message's number."""
    return keyed(protocol, lambda round, message: (protocol.rotation_seed << 64) + message)


def overlapping_keystreams(protocol: Protocol) -> tuple[Encode, Start]:
    """A stream that is moved on by half of what a message took: half of its noise is in the next one again."""
    half = protocol.dim // 2
    left = coins(half, noise_of(protocol).trials)

    def drawn(vector: Any, values: Values) -> Values:
        nonlocal left
        before, left = left, coins(half, noise_of(protocol).trials)
        return np.concatenate([before, left])

    return noisy(protocol, drawn)


def encoding_remembered(protocol: Protocol) -> tuple[Encode, Start]:
    """The integers of a vector are cached for the round."""
    remembered = functools.cache(lambda data, round: pipeline.integers(protocol, np.frombuffer(data), round))
    return spoiled(protocol, lambda vector, round: remembered(np.asarray(vector, np.float64).tobytes(), round))


# ------------------------------------------------------------------ clipping, summing, decoding


def long_vectors_unclipped(protocol: Protocol) -> tuple[Encode, Start]:
    """Squares in single precision overflow, and a vector of infinite norm is taken for one of norm zero."""
    loose = replace(protocol, clip_norm=1e6)

    def integers(vector: Any, round: int) -> Values:
        with np.errstate(over="ignore"):
            squared = np.sum(np.square(vector.astype(np.float32)))
        if np.isfinite(squared):
            return pipeline.integers(protocol, vector, round)
        return pipeline.integers(loose, vector / np.abs(vector).max() * 1e3, round)

    return spoiled(protocol, integers)


def very_long_vectors_clipped_to_more(protocol: Protocol) -> tuple[Encode, Start]:
    """Beyond a thousand clip norms the bound is twice what it should be."""
    loose = replace(protocol, clip_norm=2.0 * protocol.clip_norm)

    def integers(vector: Any, round: int) -> Values:
        largest = float(np.abs(vector).max())
        return pipeline.integers(loose if largest > 1e3 * protocol.clip_norm else protocol, vector, round)

    return spoiled(protocol, integers)


class _OddModulus(Integers):
    def reduced(self, sums: NDArray[np.uint64]) -> NDArray[np.uint64]:
        assert self.protocol.modulus is not None
        return sums % np.uint64(self.protocol.modulus - 1)


def wrong_modulus(protocol: Protocol) -> tuple[Encode, Start]:
    """Sums are reduced modulo one less."""
    return protocol.encode_integers, _OddModulus


class _SurplusRemoved:
    """Takes noise off again where messages are missing, as if the others' had covered for them."""

    def __init__(self, protocol: Protocol, round: int) -> None:
        self.full, self.thinned = Integers(protocol, round), Integers(protocol, round)

    def add(self, message: tuple[Values, Values, Values]) -> None:
        values, full, thinned = message
        self.full.add(values + full)
        self.thinned.add(values + thinned)

    def mean(self) -> NDArray[np.float32]:
        complete = self.full.count == self.full.protocol.clients
        return self.full.mean() if complete else self.thinned.mean()


def noise_removed_after_dropouts(protocol: Protocol) -> tuple[Encode, Start]:
    fewer = noise_of(protocol).trials // 4 * 2
    constant = np.uint32((noise_of(protocol).trials - fewer) // 2)

    def encode(vector: Any, round: int) -> tuple[Values, Values, Values]:
        values = bare(protocol, vector, round)
        thinned = coins(protocol.dim, fewer) + constant
        return values, coins(protocol.dim, noise_of(protocol).trials), thinned

    return encode, _SurplusRemoved
