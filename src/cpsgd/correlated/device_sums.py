"""`DeviceLineages`: `cpsgd.correlated.run_sums` for rounds that stay on a PyTorch device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from cpsgd._torch import torch
from cpsgd.correlated.draws import OWN_BITS
from cpsgd.correlated.run_sums import RunSums, Slots
from cpsgd.mechanisms.noise import SumRounding

if TYPE_CHECKING:
    from cpsgd.correlated.mechanism import CorrelatedGaussian


class DeviceLineages(RunSums):
    """The noise of lineages in a run's sums on a PyTorch device, b vectors of it, from a counter."""

    def __init__(
        self, mechanism: CorrelatedGaussian, slots: Slots, clients: int, dim: int, device: torch.device
    ) -> None:
        """Rounds of `clients` messages each."""
        super().__init__(mechanism, slots, clients, dim)
        bands = mechanism.bands
        deviation = math.ldexp(mechanism.noise_deviation, OWN_BITS) * math.sqrt(clients)
        ages = (np.arange(bands)[:, None] - np.arange(bands)) % bands
        weights = torch.from_numpy(deviation * mechanism.correlation.factors[ages])
        # Z of round t, over its deviation, is in row t mod b; what a round weighs them with, in a row of its own.
        self._rows = torch.zeros(bands, dim, dtype=torch.float64, device=device)
        self._weights = weights.to(device)
        self._held: dict[int, int] = {}
        self._generator = torch.Generator(self._rows.device)

    def on_device(self, count: int) -> SumRounding:
        """Describes the noise that belongs to one round only: the clients' own noise, and rounding."""
        mechanism, count = self._mechanism, self.clients
        deviation = math.ldexp(math.sqrt(mechanism.noise.own_variance * count), OWN_BITS)
        return SumRounding(deviation, OWN_BITS, count, int(mechanism.grid.limit), mechanism.centre)

    def before_rounding(self, round: int, count: int) -> torch.Tensor:
        """Returns Σ_k g_k Z_(round-k), in points of the vector's grid.

        Raises:
            ParameterError: Another number of messages, a round outside of the run, or one whose noise was drawn before.
        """
        self.check(round, count)
        bands, keys = self._mechanism.bands, self._slots.draw(round)
        for row, number in list(self._held.items()):
            if number not in keys:
                del self._held[row]
                if number + bands != round:  # nobody knows it any more; otherwise it is written over
                    self._rows[row].zero_()
        for number, key in keys.items():
            if self._held.get(number % bands) != number:
                self._generator.manual_seed(int.from_bytes(key[:8], "little") >> 1)
                self._rows[number % bands].normal_(generator=self._generator)
                self._held[number % bands] = number
        return self._weights[round % bands] @ self._rows
