"""Where rounds are computed: `Processors`, this machine's CPU, or `Accelerator`, a GPU.

The trainer asks a place for a round's clients, for the sum of their messages and for the test examples, and whether to
look at a number costs something: a GPU works on while the CPU prepares the next round, unless it is asked for a result.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.learning import devices, mechanisms
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.base import Dataset
from cpsgd.learning.datasets.on_device import on_device
from cpsgd.learning.examples import ExampleSums
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.mechanisms import Mechanism
from cpsgd.simulation.cpu import FloatMean, RoundSimulator
from cpsgd.simulation.device import DeviceFloatMean, DeviceRound

_EXAMPLES_BYTES = 1 << 26


class Processors:
    """Rounds on the CPU, by the codec's own kernels and with noise from a cipher."""

    waits_to_look = False

    def __init__(self, dataset: Dataset, rows: ClientUpdates | ExampleSums, memory_limit: int) -> None:
        """Takes clients' rows from `rows`, whose memory is bounded; the examples of some clients are held beside it."""
        self._dataset = dataset
        self._rows = rows
        self._slice = _clients_at_a_time(dataset, memory_limit)

    def clients(self, cohorts: Cohorts, number: int, rounds: int) -> NDArray[np.int64]:
        """The clients of one of `rounds` rounds."""
        return cohorts.clients(number)

    def summed(
        self, mechanism: Mechanism, number: int, seed: int | None, clients: NDArray[np.int64], zeros: int
    ) -> RoundSimulator | FloatMean:
        """The round with the messages of these clients, and of `zeros` more who send the zero vector."""
        engine = mechanisms.start_round(mechanism, self._rows.dim, number, seed)
        for start in range(0, len(clients), self._slice):
            for chunk in self._rows.chunks(self._dataset.batch(clients[start : start + self._slice])):
                engine.add(chunk)
        engine.add_zeros(zeros)
        return engine

    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of the test set."""
        test = self._dataset.test_set()
        return torch.from_numpy(test.features), torch.from_numpy(test.labels)


class Accelerator:
    """Rounds on a GPU, by `cpsgd.simulation.device`."""

    waits_to_look = True

    def __init__(self, dataset: Dataset, updates: ClientUpdates, memory_limit: int, device: torch.device) -> None:
        """Carries what the data set needs to the device.

        Raises:
            ParameterError: The GPU has too little memory for it.
        """
        with devices.enough_memory("the data set", "use a smaller one."):
            self._data = on_device(dataset, device)
        self._updates = updates
        self._device = device
        self._slice = _clients_at_a_time(dataset, memory_limit)
        self._ahead: dict[int, Future[NDArray[np.int64]]] = {}
        self._drawing = ThreadPoolExecutor(1)

    def clients(self, cohorts: Cohorts, number: int, rounds: int) -> NDArray[np.int64]:
        """The clients of one of `rounds` rounds; the next round's are drawn meanwhile."""
        found = self._ahead.pop(number, None)
        if number + 1 < rounds:
            self._ahead = {number + 1: self._drawing.submit(cohorts.clients, number + 1)}
        return cohorts.clients(number) if found is None else found.result()

    def summed(
        self, mechanism: Mechanism, number: int, seed: int | None, clients: NDArray[np.int64], zeros: int
    ) -> DeviceRound | DeviceFloatMean:
        """The round with the messages of these clients, and of `zeros` more who send the zero vector.

        Raises:
            ParameterError: The GPU has too little memory.
        """
        with devices.enough_memory(
            f"{self._updates.memory_limit / 2**20:,.0f} MiB of clients at a time",
            "give a smaller memory_limit (for commands --memory-limit). The round was not charged.",
        ):
            engine = mechanisms.start_device_round(mechanism, self._updates.dim, number, seed, self._device)
            for start in range(0, len(clients), self._slice):
                batch = self._data.batch(clients[start : start + self._slice])
                for chunk in self._updates.tensors(batch.features, batch.labels, batch.counts):
                    engine.add(chunk)
            engine.add_zeros(zeros)
        return engine

    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of the test set."""
        return self._data.test.features, self._data.test.labels


def _clients_at_a_time(dataset: Dataset, memory_limit: int) -> int:
    """Clients whose examples are held together."""
    return max(1, min(_EXAMPLES_BYTES, memory_limit // 8) // (4 * dataset.feature_dim))
