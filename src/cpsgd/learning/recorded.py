"""A round on a GPU recorded as CUDA graphs: two launches instead of dozens, or a few if noise is Gaussian.

Everything that changes from round to round is on the device: the clients' numbers, the keys of random numbers, the
rotation's signs, and the model. Results equal those of the recorded launches bit for bit.
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
    """Rounds of `size` clients each, one after the other, in place of their `DeviceRound`.

    `start` computes the sum and `mean` draws the noise, so that a round can be charged in between.
    """

    def __init__(
        self, template: DeviceRound, data: DeviceInfinite, updates: ClientUpdates, seed: int | None, size: int
    ) -> None:
        """Records a round of the template; all rounds are computed in its tensors."""
        self.size = self.count = size
        self._template = template
        self._seed = seed
        self._released = True
        self._round = 0, 0
        # One copy for both: the round's inputs and the clients' numbers.
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
        """Records rounds like `round_`, to which messages were added already.

        Returns None if a round needs the CPU, or if all of its clients at once take more memory than allowed.
        """
        noise, layout = round_.protocol.mechanism.noise.on_device(round_.count), updates.layout
        drawn = isinstance(noise, FairCoins | SumRounding)
        if layout is None or not (round_.takes(layout) and drawn and round_.count):
            return None
        # Features and factors, those of the first round below and those of the recording.
        if 4 * round_.count * 2 * (layout.layers[0][1] + layout.factors) > updates.memory_limit:
            return None
        # A first round compiles everything: nothing may be compiled while launches are recorded.
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
        """Returns the mean of the round's vectors with noise. The next round overwrites it."""
        if not self._released:
            if self._finish is not None:
                self._finish.replay()
            else:
                self._template.renumber(*self._round)
                self._mean = self._template.mean()
            self._released = True
        return self._mean

    def noise_norm(self) -> float:
        """Returns √E‖noise‖² of the mean."""
        return self._template.noise_norm()
