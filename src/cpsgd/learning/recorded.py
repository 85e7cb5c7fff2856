"""A round on a GPU recorded as CUDA graphs: what takes dozens of launches takes two, or a few where noise is Gaussian.

Everything that changes from round to round is on the device: the clients' numbers, the keys of random numbers, the
rotation's signs, and the model. Results are those of the launches that were recorded, bit for bit.
"""

from __future__ import annotations

import os

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.learning.datasets.device_data import DeviceInfinite
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.mechanisms.noise import FairCoins, SumRounding
from cpsgd.simulation.device import DeviceRound, carried


class RecordedRound:
    """Rounds of `size` clients each, one after the other; a stand-in for their `DeviceRound`.

    The sum is computed by `start` and the noise is drawn by `mean`, so that a round is charged in between as ever.
    """

    def __init__(
        self, template: DeviceRound, data: DeviceInfinite, updates: ClientUpdates, seed: int | None, size: int
    ) -> None:
        """Records a round of the template, whose own tensors all rounds are computed in."""
        self.size = self.count = size
        self._template = template
        self._seed = seed
        self._released = True
        self._round = 0, 0
        # One copy brings both: what tells the round from others, and the clients' numbers.
        self._inputs = torch.zeros(template.inputs_size + 8 * size, dtype=torch.uint8, device=template.device)
        template.take_inputs(self._inputs[: template.inputs_size])
        numbers = self._inputs[template.inputs_size :].view(torch.int64)
        self._sum = torch.cuda.CUDAGraph()
        # Gaussian noise is drawn by PyTorch, whose generators take no keys from the device.
        coins = isinstance(template.protocol.mechanism.noise.on_device(size), FairCoins)
        self._finish = torch.cuda.CUDAGraph() if coins else None
        with torch.cuda.device(template.device):
            with torch.cuda.graph(self._sum, capture_error_mode="thread_local"):
                template.restart()
                products = updates.products(*data.made(numbers))
                assert products is not None
                template.add(products)
            if self._finish is not None:
                with torch.cuda.graph(self._finish, capture_error_mode="thread_local"):
                    self._mean = template.mean()

    @classmethod
    def of(
        cls, round_: DeviceRound, data: DeviceInfinite, updates: ClientUpdates, seed: int | None
    ) -> RecordedRound | None:
        """Records rounds like one whose messages were added.

        None where a round needs the CPU on its way, or where all of its clients at once take more memory than allowed.
        """
        noise, layout = round_.protocol.mechanism.noise.on_device(round_.count), updates.layout
        drawn = isinstance(noise, FairCoins | SumRounding)
        if layout is None or not (round_.takes(layout) and drawn and round_.count):
            return None
        # Features and factors, those of the first round below and those of the recording.
        if 4 * round_.count * 2 * (layout.layers[0][1] + layout.factors) > updates.memory_limit:
            return None
        # Everything is compiled by a first round: nothing may be, while launches are recorded.
        template = DeviceRound(round_.protocol, 0, seed=0, device=round_.device)
        clients = carried(np.arange(round_.count), round_.device)
        products = updates.products(*data.made(clients))
        assert products is not None
        template.add(products)
        template.mean()
        del products
        # Only now: noise that a run remembers is drawn for its own rounds alone.
        template.source = round_.source
        return cls(template, data, updates, seed, round_.count)

    def start(self, number: int, clients: NDArray[np.int64]) -> None:
        """Adds the messages of a round's clients."""
        seed = int.from_bytes(os.urandom(7), "little") if self._seed is None else self._seed
        inputs = np.concatenate([self._template.inputs(number, seed), clients.view(np.uint8)])
        self._inputs.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        self._sum.replay()
        self._round = number, seed
        self._released = False

    def mean(self) -> torch.Tensor:
        """The mean of the round's vectors, noise included. It is overwritten by the next round's."""
        if not self._released:
            if self._finish is not None:
                self._finish.replay()
            else:
                self._template.renumber(*self._round)
                self._mean = self._template.mean()
            self._released = True
        return self._mean

    def noise_norm(self) -> float:
        """√E‖noise‖² of the mean."""
        return self._template.noise_norm()
