"""Simulates a round on this machine: each client's vector is clipped, rotated and rounded, the noise is drawn once.

Only the sum of a round is released, and the noise of n clients can be drawn at once: the sum of n independent
Binomial(m, p) is Binomial(nm, p). The simulator rounds each client's vector by itself and asks the mechanism for the
noise of the whole sum. The law of the mean is that of n encoded messages in an `Aggregator`, which the tests verify;
noise per client, packing and headers are saved. Where the rounding is the noise, as with biased coins, each client's
coins are tossed by its own kernel and there is nothing left to draw.

Noise of a sum is as close to its law as the table it is drawn from. A client that counts coins draws exactly; the sum
of all coins comes from a table of 128-bit numbers, within about 1e-35 per coordinate. Times e^ε that may exceed δ if ε
is large. So, without a seed, noise is drawn at once only where that is no further from the law than the accounting
counts for the clients' own samplers, and otherwise client by client. With a seed nothing is protected.

A vector with NaN or infinity counts as the zero vector, silently. To stop instead would be an answer that depends on
one client's data and that no guarantee covers.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any
from typing import Protocol as TypingProtocol

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec import clip, pipeline, wire
from cpsgd.codec.pack import Sums
from cpsgd.errors import EmptyError, InfeasibleError, NonFiniteError, ParameterError, VectorError
from cpsgd.mechanisms import Mechanism
from cpsgd.mechanisms.law import Normal
from cpsgd.mechanisms.noise import FairCoins, SumRounding
from cpsgd.protocol import Protocol
from cpsgd.randomness import Keystream

# Rows that a thread takes at a time.
_ROWS = 16
# Number of the draw for the noise of the sum, beyond any client's.
_NOISE = 2**64 - 1


class SumSource(TypingProtocol):
    """The source of the noise of a round's sum."""

    @property
    def client(self) -> Any:
        """A stand-in for each client's mechanism, with `kernel()`, `values` and `keystream_bytes`."""

    @property
    def variance(self) -> float:
        """The noise's variance per client."""

    def of_client(self, kernel: Any, number: int, round: int) -> Any:
        """Returns the kernel for one client of a round: the same for all, unless a client's noise has a state."""

    def noisy(self, sums: Any, count: int, round: int, own: Keystream, *, seeded: bool = False) -> Any:
        """Returns the sums of `count` clients with their noise, which may come from the stream `own`."""


class FreshNoise:
    """A mechanism's noise, drawn afresh for every sum."""

    messages = None

    def __init__(self, mechanism: Mechanism) -> None:
        """Prepares fresh noise of a mechanism."""
        self._mechanism, self._noise = mechanism, mechanism.noise

    @cached_property
    def client(self) -> Mechanism:
        """A stand-in for each client's mechanism, without its noise if that is separate from rounding."""
        apart = self._noise.separate and self._mechanism.grid is not None
        return self._mechanism.without_noise() if apart else self._mechanism

    @property
    def variance(self) -> float:
        """The noise's variance per client."""
        return self._noise.variance

    def of_client(self, kernel: Any, number: int, round: int) -> Any:
        """Returns the given kernel: clients have no state."""
        return kernel

    def on_device(self, count: int) -> FairCoins | Normal | SumRounding | None:
        """Describes the noise of `count` clients to a device; None where the host must draw it."""
        return self._noise.on_device(count)

    def before_rounding(self, round: int, count: int) -> float:
        """Returns 0: there is no noise of other rounds in the sum of grid points."""
        return 0.0

    def noisy(self, sums: Sums, count: int, round: int, own: Keystream, *, seeded: bool = False) -> Sums:
        """Adds the noise of all clients in one draw if that is as exact as accounted for, or if `seeded`."""
        at_once = seeded or self._noise.sum_variation(count) <= count * self._noise.variation
        draw = self._noise.of_sum if at_once else self._noise.of_clients
        total: Sums = sums + draw(count, len(sums), own).astype(sums.dtype)
        return total


class RoundSimulator:
    """The sum of one round's messages, and its mean.

    Takes 12 bytes of memory per coordinate and thread, and nothing per client.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=1000, dim=4, clip_norm=1.0, levels=256, trials=16)
        >>> simulator = RoundSimulator(protocol, round=0, seed=1)
        >>> simulator.add(np.tile(np.array([0.5, -0.5, 0.1, 0.0], dtype=np.float32), (1000, 1)))
        >>> simulator.count, np.round(simulator.mean(), 1).tolist()
        (1000, [0.5, -0.5, 0.10000000149011612, 0.0])
    """

    def __init__(
        self,
        protocol: Protocol,
        round: int,
        *,
        seed: int | None = None,
        threads: int = 2,
        source: SumSource | None = None,
        first: int = 0,
    ) -> None:
        """Starts an empty round.

        Args:
            protocol: The parameters of the round.
            round: Its number, which fixes the rotation.
            seed: None for randomness from the operating system. A number makes the round repeatable, for any chunks
                and threads; noise that can be repeated protects nobody.
            threads: Threads that share the rows of a chunk.
            source: The source of the sum's noise; by default the mechanism's noise, drawn afresh.
            first: Number of the first client, if several processes share a round's clients.

        Raises:
            InfeasibleError: The promise of the protocol is about fewer rounds.
        """
        self.protocol = protocol
        self.round = _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        if protocol.promise is not None and round >= protocol.promise.conditions.rounds:
            rounds = protocol.promise.conditions.rounds
            raise InfeasibleError(
                f"The protocol's promise is about {rounds:,} rounds, of which the last is number {rounds - 1:,}, and "
                f"this would be number {round:,}. Plan for more rounds, with rounds={round + 1}."
            )
        self.count = 0
        self._seed = None if seed is None else _validate.integer("seed", seed, low=0, high=2**64 - 1)
        self._threads = _validate.integer("threads", threads, low=1)
        self._first = first
        self._floats = protocol.mechanism.grid is None
        self._sums: Sums = np.zeros(protocol.dim, dtype=np.float64 if self._floats else np.uint64)
        self._source: SumSource = FreshNoise(protocol.mechanism) if source is None else source
        client = self._source.client
        self._rounder, self._values, self._keystream_bytes = client.kernel(), client.values, client.keystream_bytes
        self._mean: NDArray[np.float32] | None = None

    def add(self, vectors: NDArray[np.float32]) -> None:
        """Adds the messages of some clients, one row per client; a row with NaN or infinity counts as zeros.

        Raises:
            VectorError: The rows do not have `dim` coordinates of float32.
        """
        if self._mean is not None:
            raise ParameterError("The round's mean was released: it takes no more messages.")
        dim = self.protocol.dim
        if vectors.ndim != 2 or vectors.shape[1] != dim or vectors.dtype != np.float32:
            raise VectorError(f"Expected rows of {dim} float32, got {vectors.dtype} of shape {vectors.shape}.")
        vectors = np.ascontiguousarray(vectors)
        if self._floats:
            self._sums += clipped_sum(vectors, self.protocol.clip_norm)
            self.count += len(vectors)
            return
        starts = range(0, len(vectors), _ROWS)
        shares = [starts[thread :: self._threads] for thread in range(self._threads)]
        with ThreadPoolExecutor(self._threads) as pool:
            for sums in pool.map(lambda share: self._rounded_sum(vectors, share), shares):
                self._sums += sums
        self.count += len(vectors)

    def add_zeros(self, count: int) -> None:
        """Adds the messages of `count` clients who send the zero vector with their noise, to fill a cohort up."""
        zero = np.zeros((min(count, _ROWS), self.protocol.dim), dtype=np.float32)
        for start in range(0, count, _ROWS):
            self.add(zero[: count - start])

    def mean(self, *, accept_epsilon: float | None = None) -> NDArray[np.float32]:
        """Returns the estimate of the mean, noise included. The first call draws the noise and ends the round.

        A protocol made by `plan` promises an ε for a number of messages; with fewer the mean is refused.

        Args:
            accept_epsilon: Release the mean nevertheless if the true ε is at most this.

        Raises:
            EmptyError: No vector was added.
            GuaranteeError: There are too few messages for the promised ε and for `accept_epsilon`.
        """
        if self.count == 0:
            raise EmptyError("There is no mean: no vector was added.")
        if self._mean is None:
            self.protocol.release(self.count, accept_epsilon=accept_epsilon)
            self._mean = pipeline.decode(self.protocol, self._noisy_sums(), self.count, self.round)
        return self._mean

    @property
    def sums(self) -> Sums:
        """The sums so far, without noise."""
        return self._sums

    def noise_norm(self) -> float:
        """Returns √E‖noise‖² of the mean: the noise added, and rounding at its largest."""
        return noise_norm(self.protocol, self.count, variance=self._source.variance)

    def _noisy_sums(self) -> Sums:
        keystream, seeded = self._keystream(_NOISE), self._seed is not None
        noisy: Sums = self._source.noisy(self._sums, self.count, self.round, keystream, seeded=seeded)
        return noisy

    def _rounded_sum(self, vectors: NDArray[np.float32], starts: range) -> NDArray[np.uint64]:
        """Returns the sum of rows, each rounded with the randomness of its client."""
        protocol = self.protocol
        sums = np.zeros(protocol.dim, dtype=np.uint64)
        # Adding to 32-bit sums is twice as fast; they are emptied before they could overflow.
        small = np.zeros(protocol.dim, dtype=np.uint32)
        room = (2**32 - 1) // (self._values - 1)
        values = np.empty(protocol.dim, dtype=np.uint32)
        size = self._keystream_bytes * protocol.dim
        buffer = Keystream.buffer(size)
        held = 0
        for start in starts:
            # Without a seed rows share a stream, as making one takes as long as rounding a short vector.
            shared = Keystream() if self._seed is None else None
            for row in range(start, min(start + _ROWS, len(vectors))):
                try:
                    grid = pipeline.to_grid(protocol, vectors[row], self.round)
                except NonFiniteError:
                    grid = np.zeros(protocol.dim, dtype=np.float32)
                number = self._first + self.count + row
                words = (shared or self._keystream(number)).fill(buffer, size)
                self._source.of_client(self._rounder, number, self.round).values(grid, words, values)
                if held == room:
                    sums += small
                    small[:] = 0
                    held = 0
                small += values
                held += 1
        sums += small
        return sums

    def _keystream(self, number: int) -> Keystream:
        """Returns the keystream of one client, or of the sum's noise."""
        if self._seed is None:
            return Keystream()
        text = b"cpsgd simulation v1" + struct.pack("<QQQ", self._seed, self.round, number)
        return Keystream(hashlib.sha256(text).digest()[:16])


class FloatMean:
    """The mean of clipped vectors in floats, without noise or rounding: a round without privacy.

    It has the methods of `RoundSimulator`. Made by `float_mean` on the CPU, by `device_float_mean` on a device.
    """

    def __init__(self, sums: Any, clipped_sum: Callable[[Any], Any]) -> None:
        """Starts an empty round.

        Args:
            sums: An array or tensor of zeros.
            clipped_sum: Returns the sum of rows, each clipped.
        """
        self.count = 0
        self.sums = sums
        self._clipped_sum = clipped_sum

    def add(self, vectors: Any) -> None:
        """Adds some clients' vectors, one row per client; a row with NaN or infinity counts as zeros."""
        self.sums += self._clipped_sum(vectors)
        self.count += len(vectors)

    def add_zeros(self, count: int) -> None:
        """Adds `count` zero vectors."""
        self.count += count

    def mean(self) -> Any:
        """Returns the mean of the clipped vectors, in float32.

        Raises:
            EmptyError: No vector was added.
        """
        if self.count == 0:
            raise EmptyError("There is no mean: no vector was added.")
        mean = self.sums / self.count
        return mean.astype(np.float32) if isinstance(mean, np.ndarray) else mean.float()

    def noise_norm(self) -> float:
        """Returns zero: there is no noise."""
        return 0.0


def float_mean(dim: int, clip_norm: float) -> FloatMean:
    """Returns an empty round without privacy on the CPU."""
    bound = _validate.positive("clip_norm", clip_norm)
    return FloatMean(np.zeros(dim), lambda vectors: clipped_sum(vectors, bound))


def clipped_sum(vectors: NDArray[np.float32], clip_norm: float) -> NDArray[np.float64]:
    """Returns the sum of the rows, each clipped to norm `clip_norm`. A row with NaN or infinity adds nothing."""
    # A row at a time: a matrix product would start BLAS's threads, which compete with PyTorch's for the processor.
    # In float64, so that one row's contribution depends on the others in the last digits only.
    sums = np.zeros(vectors.shape[1])
    scaled = np.empty(vectors.shape[1], dtype=np.float32)
    for row in vectors:
        try:
            factor = clip.factor(row, clip_norm)
        except NonFiniteError:
            continue
        np.multiply(row, np.float32(factor), out=scaled)
        sums += scaled
    return sums


def noise_norm(protocol: Protocol, count: int, *, variance: float | None = None) -> float:
    """Returns √E‖noise‖² of the mean of `count` messages: the noise added, and rounding at its largest.

    `variance` is that of a client's noise; by default that of a round whose noise is fresh.
    """
    mechanism = protocol.mechanism
    variance = mechanism.noise.variance if variance is None else variance
    variance += mechanism.largest_rounding_variance
    return mechanism.scale * math.sqrt(protocol.dim * variance / count)
