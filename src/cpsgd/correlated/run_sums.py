"""The noise of a run whose rounds are correlated, drawn for their sums.

A round's sum of n messages has four parts: the clients' grid points; Σ_k g_k Z_(t-k), Z_t the sum of the noise that n
clients drew in round t; their own noise; and the rounding errors. All of these have laws that can be drawn at once.
Sums of discrete Gaussians are discrete Gaussians, within 1e-40. Given the sum before the rounding, what was rounded off
is n - 1 uniform numbers (docs/proofs/correlated-gaussian.md). Their sum is drawn as a Gaussian where there are more
than 32. Only that messages are cut off at their window's ends, which δ pays for, is left out. Lineages do not break:
every round has the same number of clients.

Z_t follows from a key of its round (`Slots`), so that a run can be resumed. With a seed the keys follow from it.
Without one, each is drawn from the operating system, kept until no later round needs it, and never drawn twice.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.correlated.draws import OWN_BITS, draw, wide_parts
from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.mechanisms.fine_gaussian import DRAW_BYTES
from cpsgd.mechanisms.memory import Simulated
from cpsgd.mechanisms.noise import FEW_CLIENTS
from cpsgd.randomness import Keystream

if TYPE_CHECKING:
    from cpsgd._torch import torch
    from cpsgd.correlated.device_sums import DeviceLineages
    from cpsgd.correlated.mechanism import CorrelatedGaussian

Points = NDArray[np.int64]

# Coordinates that are drawn at a time.
_BLOCK = 1 << 16


class Slots:
    """Keys of the noise Z of the latest rounds of a run, one for each."""

    def __init__(self, mechanism: CorrelatedGaussian, seed: int | None, restart_every: int | None = None) -> None:
        """Begins a run; with a seed, its keys follow from that. Lineages start anew every `restart_every` rounds."""
        self._bands, self._rounds, self._seed = mechanism.bands, mechanism.run_length, seed
        self._restart_every = restart_every or mechanism.run_length
        self._keys: dict[int, bytes] = {}
        self._next = 0

    def draw(self, round: int) -> dict[int, bytes]:
        """Returns the keys of a round and of the rounds whose noise it takes away; draws the round's own key.

        Raises:
            ParameterError: Without a seed: the round's noise was drawn before, or that of a later one.
        """
        first = max(round - round % self._restart_every, round - self._bands + 1)
        if self._seed is not None:
            return {number: self._seeded(number) for number in range(first, round + 1)}
        if round < self._next:
            raise ParameterError(
                f"The noise of round {round} was drawn before, and is never drawn again: go on with round {self._next}."
            )
        self._next = round + 1
        self._keys[round] = os.urandom(16)
        found = {number: key for number, key in self._keys.items() if number >= first}
        # What no later round needs is forgotten, and with the last round everything.
        last = round if self._next == self._rounds else round - self._bands + 1
        self._keys = {number: key for number, key in found.items() if number > last}
        return found

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint; empty where keys follow from a seed."""
        return {"next": self._next, "keys": {number: key.hex() for number, key in self._keys.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            CheckpointError: The state is not one of these.
        """
        try:
            self._next = int(state["next"])
            self._keys = {int(number): bytes.fromhex(key) for number, key in state["keys"].items()}
        except (KeyError, ValueError, TypeError, AttributeError):
            raise CheckpointError("The checkpoint does not hold the keys of a run's correlated noise.") from None

    def _seeded(self, round: int) -> bytes:
        assert self._seed is not None
        return hashlib.sha256(b"cpsgd simulated lineages v1" + struct.pack("<QQ", self._seed, round)).digest()[:16]


class SimulatedLineages(Simulated):
    """The state of a run whose sums are simulated: keys of its rounds, and noise that was drawn from them."""

    def __init__(self, mechanism: CorrelatedGaussian, seed: int | None, restart_every: int | None) -> None:
        """Begins a run; with a seed, its noise follows from that."""
        self._mechanism, self.slots = mechanism, Slots(mechanism, seed, restart_every)
        self.parts = {"lineages": self.slots}
        self._host: SummedLineages | None = None
        self._device: DeviceLineages | None = None

    def on_host(self, clients: int, dim: int) -> SummedLineages:
        """Returns the noise of rounds of `clients` messages on this machine's processors."""
        if self._host is None:
            self._host = SummedLineages(self._mechanism, self.slots, clients, dim)
        return self._host

    def on_device(self, clients: int, dim: int, device: torch.device) -> DeviceLineages:
        """Returns the noise of rounds of `clients` messages on a device."""
        from cpsgd.correlated.device_sums import DeviceLineages

        if self._device is None:
            self._device = DeviceLineages(self._mechanism, self.slots, clients, dim, device)
        return self._device


class RunSums:
    """The part of a run's sums that both simulations share."""

    messages = None

    def __init__(self, mechanism: CorrelatedGaussian, slots: Slots, clients: int, dim: int) -> None:
        """Rounds of `clients` messages each."""
        self.clients = clients
        self._mechanism = mechanism
        self._slots, self._dim = slots, dim

    @property
    def variance(self) -> float:
        """The noise's variance per client in the later rounds of the run."""
        return self._mechanism.noise.settled_variance

    def check(self, round: int, count: int) -> None:
        """Refuses a round that is not in the run, and one whose number of messages differs from the other rounds'."""
        self._mechanism.memory.rotation_round(round)
        if count != self.clients:
            raise ParameterError(
                f"Expected {self.clients} messages, as in the run's other rounds, got {count}: lineages that break are "
                "not simulated where noise is correlated over rounds. Use a dropout of 0, and cohorts of one size."
            )


class SummedLineages(RunSums):
    """Sums of messages of a run on this machine, with noise from a cipher, in integers on the finest grid."""

    def __init__(self, mechanism: CorrelatedGaussian, slots: Slots, clients: int, dim: int) -> None:
        """Rounds of `clients` messages each."""
        super().__init__(mechanism, slots, clients, dim)
        self._drawn: dict[int, Points] = {}

    @property
    def client(self) -> GridPoints:
        """A stand-in for each client's mechanism, with its kernel, values and bytes of randomness."""
        return GridPoints(int(self._mechanism.grid.limit))

    def of_client(self, kernel: Any, number: int, round: int) -> Any:
        """Returns the given kernel, which serves all clients."""
        return kernel

    def noisy(
        self, sums: NDArray[np.uint64], count: int, round: int, own: Keystream, *, seeded: bool = False
    ) -> NDArray[np.uint64]:
        """Converts sums from the stand-in `client` into sums of a round's integers, with all noise.

        Raises:
            ParameterError: Another number of messages, a round outside of the run, or one whose noise was drawn before.
        """
        self.check(round, count)
        mechanism, bits = self._mechanism, self._mechanism.finest_bits
        total = (sums.astype(np.int64) - count * int(mechanism.grid.limit)) << (bits - OWN_BITS)
        total += self._lineages(round)
        variance = count * mechanism.noise.own_variance
        lost = np.zeros(self._dim, dtype=np.int64)  # twice what is rounded off, all but one of the clients
        if count > FEW_CLIENTS:
            variance += (count - 1) / 12.0
            lost += (count - 1) * ((1 << bits) - 1)
        else:
            for _ in range(count - 1):
                lost += 2 * (own.take(8 * self._dim).view(np.uint64) >> np.uint64(64 - bits)).astype(np.int64)
        total += wide_draw(math.ldexp(math.sqrt(variance), bits), own, self._dim)
        total += count * (mechanism.window << (bits - 1))
        return ((2 * total - lost) >> (bits + 1)).astype(np.uint64)

    def _lineages(self, round: int) -> Points:
        """Returns the weighted sum of the noise of all lineages for this round."""
        keys = self._slots.draw(round)
        deviation = math.ldexp(self._mechanism.noise_deviation, self._mechanism.noise_bits) * math.sqrt(self.clients)
        self._drawn = {
            number: self._drawn[number] if number in self._drawn else wide_draw(deviation, Keystream(key), self._dim)
            for number, key in keys.items()
        }
        weights = self._mechanism.correlation.weights
        total = np.zeros(self._dim, dtype=np.int64)
        for number, points in self._drawn.items():
            total += weights[round - number] * points
        return total


class GridPoints:
    """A stand-in for a mechanism that only maps a coordinate to its grid point, counted from the lowest."""

    keystream_bytes = 0

    def __init__(self, limit: int) -> None:
        """Fixes the largest absolute value of a grid point."""
        self.limit = limit
        self.values = 2 * limit + 1

    def kernel(self) -> PointKernel:
        """Returns the kernel that writes the points."""
        return PointKernel(self.limit)


class PointKernel:
    """Writes grid points."""

    def __init__(self, limit: int) -> None:
        """Fixes the largest absolute value of a grid point."""
        self._limit = limit

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes the nearest integer of each coordinate, shifted to be at least 0, into `values`."""
        np.add(np.rint(np.clip(grid, -self._limit, self._limit)), self._limit, out=values, casting="unsafe")


def wide_draw(deviation: float, stream: Keystream, count: int) -> Points:
    """Draws `count` discrete Gaussians with any deviation from 2048 on, by `wide_parts`."""
    parts = wide_parts(deviation)
    found = np.empty(count, dtype=np.int64)
    buffer = stream.buffer(min(_BLOCK, count) * DRAW_BYTES)
    for start in range(0, count, _BLOCK):
        size = min(_BLOCK, count - start)
        found[start : start + size] = sum(
            draw(ratio, stream.fill(buffer, size * DRAW_BYTES), size) << shift for ratio, shift in parts
        )
    return found
