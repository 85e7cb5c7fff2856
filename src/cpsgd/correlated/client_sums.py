"""Simulated rounds of clients that round at random: every client is played as it is.

Clipping what is inherited and saturating are not linear, so that the noise of a sum cannot be drawn at once. Lineage i
goes through the i-th client of every round. Its seeds follow from the round's key (`Slots`), so that nothing but keys
is kept, and a run can be resumed.
"""

from __future__ import annotations

import hashlib
import math
import struct
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from cpsgd.correlated.draws import SEED_BYTES
from cpsgd.correlated.run_sums import RunSums, Slots
from cpsgd.mechanisms.memory import Simulated
from cpsgd.mechanisms.noise import FairCoins
from cpsgd.randomness import Keystream

if TYPE_CHECKING:
    from cpsgd._torch import torch
    from cpsgd.correlated.saturating import RoundedCorrelated
    from cpsgd.simulation.device_cuda import PlayedLineages


class SimulatedClients(Simulated):
    """The state of a run whose clients are simulated: keys of its rounds."""

    def __init__(self, mechanism: RoundedCorrelated, seed: int | None, restart_every: int | None) -> None:
        """Begins a run; with a seed, its noise follows from that."""
        self._mechanism, self._slots = mechanism, Slots(mechanism, seed, restart_every)
        self.parts = {"lineages": self._slots}
        self._sums: ClientSums | None = None

    def on_host(self, clients: int, dim: int) -> ClientSums:
        """Returns the clients of rounds of `clients` messages on this machine's processors."""
        if self._sums is None:
            self._sums = ClientSums(self._mechanism, self._slots, clients, dim)
        return self._sums

    def on_device(self, clients: int, dim: int, device: torch.device) -> DeviceClients:
        """Returns the clients of rounds of `clients` messages on a device."""
        if not isinstance(self._sums, DeviceClients):
            self._sums = DeviceClients(self._mechanism, self._slots, clients, dim)
        return self._sums


class ClientSums(RunSums):
    """Sums of messages of a run on this machine, client by client, by the client's own kernel."""

    def __init__(self, mechanism: RoundedCorrelated, slots: Slots, clients: int, dim: int) -> None:
        """Rounds of `clients` messages each."""
        super().__init__(mechanism, slots, clients, dim)
        self.client = mechanism
        self._round, self._keys, self._lock = -1, dict[int, bytes](), Lock()

    def keys(self, round: int) -> dict[int, bytes]:
        """Returns the keys of the noise of a round and of earlier ones; draws the round's own key at the first call."""
        with self._lock:
            if round != self._round:
                self._mechanism.memory.rotation_round(round)
                self._keys, self._round = self._slots.draw(round), round
            return self._keys

    def of_client(self, kernel: Any, number: int, round: int) -> Any:
        """Returns the kernel of one client, with the noise of its lineage."""
        keys = self.keys(round)
        seeds = [_seed(keys[age], number) if age in keys else None for age in range(round, -1, -1)]
        return kernel.after(self.client.lineages.noise(seeds[: self.client.bands], round, self._dim))

    def noisy(self, sums: Any, count: int, round: int, own: Keystream, *, seeded: bool = False) -> Any:
        """Returns the sums unchanged, since every client has added its noise already.

        Raises:
            ParameterError: Another number of messages than in the run's other rounds.
        """
        self.check(round, count)
        return sums


class DeviceClients(ClientSums):
    """The messages of clients on a PyTorch device, in floating point; z comes from a counter, draw by draw again."""

    def messages(self, points: torch.Tensor, first: int, round: int, key: int) -> torch.Tensor:  # type: ignore[override]
        """Returns the sum of the integers of clients `first`, `first` + 1, ..., given their grid points, row by row.

        Without NVIDIA's kernels rows must come in the same parts in every round: the noise of a part follows from the
        number of its first row there.
        """
        from cpsgd._torch import torch
        from cpsgd.simulation.device_kernels import compiles

        factors = self.client.correlation.factors
        held = {number: word for number, word in self.keys(round).items() if factors[round - number]}
        if not compiles(points.device):
            return self._in_torch(points, first, round, key, held)
        sums = torch.zeros(points.shape[1], dtype=torch.int64, device=points.device)
        self._lineages(round, key, held, points.device).add(points, sums, first)
        return sums

    def _lineages(self, round: int, key: int, held: dict[int, bytes], device: torch.device) -> PlayedLineages:
        """Returns the keys, weights and limits of a round's noise, as the device's kernel takes them."""
        from cpsgd.simulation.device import carried
        from cpsgd.simulation.device_cuda import PlayedLineages

        of, numbers = self.client, sorted(held)
        keys = np.array([*(_number(held[number], 0) for number in numbers), key], dtype=np.uint64)
        deviations = [of.noise_deviation * float(of.correlation.factors[round - number]) for number in numbers]
        return PlayedLineages(
            keys=carried(keys.view(np.int64), device),
            deviations=carried(np.array(deviations, dtype=np.float32), device),
            limit=int(of.grid.limit),
            unit=math.ldexp(1.0, -of.fraction_bits),
            inherited=of.inherited_range,
            largest=of.largest,
        )

    def _in_torch(self, points: torch.Tensor, first: int, round: int, key: int, held: dict[int, bytes]) -> torch.Tensor:
        from cpsgd._torch import torch

        of, generator = self.client, torch.Generator(points.device)

        def draw(key: int, what: Any) -> torch.Tensor:
            generator.manual_seed(key % (1 << 63))
            found: torch.Tensor = what(points.shape, generator=generator, device=points.device, dtype=torch.float32)
            return found

        total = torch.zeros_like(points, dtype=torch.float32)
        for number, word in held.items():
            if number < round:
                deviation = of.noise_deviation * float(of.correlation.factors[round - number])
                total += deviation * draw(_number(word, first), torch.randn)
        limit = int(of.grid.limit)
        total.clamp_(-of.inherited_range, of.inherited_range)
        total += points.clamp(-limit, limit).round() * math.ldexp(1.0, -of.fraction_bits)
        total += of.noise_deviation * draw(_number(held[round], first), torch.randn)
        total += of.largest + draw(key + first, torch.rand)
        found: torch.Tensor = total.floor_().clamp_(0, of.window - 1).sum(dim=0, dtype=torch.float64).to(torch.int64)
        return found

    def on_device(self, count: int) -> FairCoins:
        """Describes no noise to add: every client has added its own already."""
        return FairCoins(0)

    def before_rounding(self, round: int, count: int) -> float:
        """Returns 0: the noise of other rounds is in the messages."""
        return 0.0


def _seed(key: bytes, number: int) -> bytes:
    """Returns the seed of a lineage's noise in the round of this key."""
    return hashlib.sha256(b"cpsgd simulated clients v1" + struct.pack("<Q", number) + key).digest()[:SEED_BYTES]


def _number(key: bytes, first: int) -> int:
    return int.from_bytes(_seed(key, first)[:8], "little")
