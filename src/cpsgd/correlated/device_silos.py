"""`DeviceSilos`: `cpsgd.correlated.shaped_sums` for rounds that stay on a PyTorch device."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cpsgd._torch import torch
from cpsgd.correlated.shaped_sums import SiloRows
from cpsgd.correlated.weights import WEIGHT_BITS
from cpsgd.errors import ParameterError
from cpsgd.mechanisms.noise import FairCoins

if TYPE_CHECKING:
    from cpsgd.correlated.shaped import ShapedGaussian

_HALF_WORD = 32


class DeviceSilos:
    """The messages of silos on a device, one by one, in integers on the finest grid; z comes from a counter."""

    def __init__(self, mechanism: ShapedGaussian, rows: SiloRows, clients: int, dim: int, device: torch.device) -> None:
        """Rounds of `clients` messages each."""
        self._mechanism, self._rows = mechanism, rows
        self._shape, self._device = (clients, dim), device

    @property
    def variance(self) -> float:
        """The noise's variance per client in the later rounds of the run."""
        return self._mechanism.noise.settled_variance

    def messages(self, points: torch.Tensor, first: int, round: int, key: int) -> torch.Tensor:
        """Returns the sum of the integers of silos `first`, `first` + 1, ..., given their grid points, row by row.

        Keeps the noise and rounding error of each silo, which its later messages take away.

        Raises:
            ParameterError: There are more rows than silos, or the run has no such round.
        """
        of, bits = self._mechanism, self._mechanism.finest_bits
        if first + len(points) > self._shape[0]:
            raise ParameterError(f"Expected the messages of {self._shape[0]} silos, got {first + len(points)}.")
        mine = self._rows.open(round, torch.zeros(self._shape, dtype=torch.int64, device=self._device))
        ours = slice(first, first + len(points))
        generator = torch.Generator(self._device).manual_seed((key + first) % (1 << 63))
        limit = int(of.grid.limit)
        base = points.clamp(-limit, limit).round_().to(torch.int64) << (bits - of.fraction_bits)
        base += self._correction(round, ours)
        normal = torch.randn(points.shape, generator=generator, device=self._device, dtype=torch.float64)
        noisy = base + (normal * math.ldexp(of.noise_deviation, bits)).round_().to(torch.int64)
        found = ((noisy + (of.window << (bits - 1))) >> bits).clamp_(0, of.window - 1)
        mine[ours] = (found << bits) - ((of.window - 1) << (bits - 1)) - base
        return found.sum(dim=0)

    def _correction(self, round: int, ours: slice) -> torch.Tensor:
        """Returns the corrections of some silos; see `cpsgd.correlated.shaped.correction`."""
        weights = self._mechanism.correlation.weights
        shape = ours.stop - ours.start, self._shape[1]
        high = torch.zeros(shape, dtype=torch.int64, device=self._device)
        low = torch.zeros_like(high)
        for age, rows in self._rows.past(round).items():
            row = torch.as_tensor(rows, device=self._device)[ours]
            high += weights[age] * (row >> _HALF_WORD)
            low += weights[age] * (row & ((1 << _HALF_WORD) - 1))
        return (high << (_HALF_WORD - WEIGHT_BITS)) + ((low + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS)

    def on_device(self, count: int) -> FairCoins:
        """Describes no noise to add: every silo has added its own already."""
        return FairCoins(0)

    def before_rounding(self, round: int, count: int) -> float:
        """Returns 0: the noise of other rounds is in the messages."""
        return 0.0
