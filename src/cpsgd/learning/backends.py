"""What rounds are computed by: `CpuBackend`, or `GpuBackend` for an NVIDIA GPU.

The trainer asks a backend for a round's clients, for the sum of their messages and for the test examples, and whether
it is asynchronous: a GPU works on while the CPU prepares the next round, unless it is asked for a result.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning import devices, mechanisms
from cpsgd.learning.architecture import Loss
from cpsgd.learning.clipping import Clipping
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets.base import Dataset, PartedDataset
from cpsgd.learning.datasets.device import DeviceInfinite, on_device
from cpsgd.learning.devices import enough_memory, own_code
from cpsgd.learning.gradients import ClientUpdates, ExampleSums
from cpsgd.learning.mechanisms import Mechanism, Simulator
from cpsgd.learning.options import ClientOptions, RunOptions
from cpsgd.learning.parallel import Processes, SharedRound, own_device
from cpsgd.learning.recorded import RecordedRound
from cpsgd.simulation.correlated import SummedLineages
from cpsgd.simulation.device import DeviceRound
from cpsgd.simulation.device_correlated import DeviceLineages

_EXAMPLES_BYTES = 1 << 26
# MiB that the clients computed together may take.
_CPU_MEMORY, _GPU_MEMORY = 1024, 4096
# A GPU's rounds are shorter than the time it takes to draw their clients: several blocks of rounds are drawn at once.
_BLOCKS, _BLOCK_ROUNDS, _BLOCK_CLIENTS = 4, 16, 1 << 18


def start(
    model: torch.nn.Module,
    loss: Loss,
    dataset: Dataset,
    mechanism: Mechanism,
    clients: ClientOptions,
    run: RunOptions,
    processes: Processes | None = None,
) -> CpuBackend:
    """Moves the model to the device that the options name, and makes the backend for it.

    Where there are several `processes`, each computes its share of the clients.

    Raises:
        ParameterError: There is no such device, it has too little memory, or it cannot compute such updates.
    """
    device = devices.resolve(own_device(run.device, processes))
    gpu = devices.is_gpu(device)
    memory = run.memory_limit or (_GPU_MEMORY if gpu else _CPU_MEMORY)
    with enough_memory("the model", "use a smaller one."):
        model.to(device)
        updates = ClientUpdates(model, loss, clients, memory_limit=memory << 20)
    return (GpuBackend if gpu else CpuBackend)(dataset, updates, mechanism, run.seed, device, clients, processes)


class CpuBackend:
    """Rounds on the CPU, by the codec's own kernels and with noise from a cipher."""

    asynchronous = False

    def __init__(
        self,
        dataset: Dataset,
        updates: ClientUpdates,
        mechanism: Mechanism,
        seed: int | None,
        device: torch.device,
        clients: ClientOptions,
        processes: Processes | None = None,
    ) -> None:
        """Takes clients' rows from `updates`, whose memory is bounded; the examples of some are held beside it."""
        self.updates = updates
        self.device = device
        self._dataset = dataset
        self._rows: ClientUpdates | ExampleSums = updates
        if clients.examples is not None:
            self._rows = ExampleSums(updates, mechanisms.clip_norm(mechanism), clients.examples)
        self.clipping = Clipping(clients, mechanisms.clip_norm(mechanism))
        protocol = mechanisms.protocol_of(mechanism)
        self.clipping.check(protocol)
        if protocol is not None and protocol.dim != self.dim:
            more = f", and one for clip_quantile makes {self.dim:,}" if self.clipping.size else ""
            raise ParameterError(
                f"The model has {updates.dim:,} trainable parameters{more}, the protocol is for {protocol.dim:,} "
                "coordinates; plan with dim equal to the former."
            )
        self._mechanism = mechanism
        self._seed = seed
        self.slots = mechanisms.slots_of(mechanism, seed)
        self._lineages: SummedLineages | DeviceLineages | None = None
        self._processes = processes
        self._slice = self._examples_held(dataset.feature_dim)

    @property
    def dim(self) -> int:
        """Coordinates of a client's vector: the model's, and what rides on them."""
        return self.updates.dim + self.clipping.size

    def clients(self, cohorts: Cohorts, number: int, rounds: int) -> NDArray[np.int64]:
        """The clients of one of `rounds` rounds."""
        return cohorts.clients(number)

    def summed(self, number: int, clients: NDArray[np.int64], zeros: int) -> Simulator | RecordedRound | SharedRound:
        """The round with the messages of these clients, and of `zeros` more who send the zero vector."""
        on, others = self.device if self.asynchronous else None, self._processes
        own = range(len(clients)) if others is None else others.share(len(clients))
        with self._enough_memory():
            if self.slots is not None and self._lineages is None:
                count = len(clients) + zeros
                self._lineages = mechanisms.lineages_of(self._mechanism, self.slots, count, self.dim, on)
            simulator = mechanisms.start_round(
                self._mechanism, self.dim, number, self._seed, on, self._lineages, own.start
            )
            for some, examples in self._groups(clients[own.start : own.stop]):
                chunks = self._chunks(some, simulator)
                if examples > self._slice and isinstance(self._dataset, PartedDataset):
                    chunks = self._large(self._dataset, int(some[0]), examples)
                while True:
                    with own_code("The model, the loss or the data set"):
                        chunk = next(chunks, None)
                    if chunk is None:
                        break
                    simulator.add(self.clipping.rows(chunk))
            # They are numbered after all others.
            if others is None or others.rank == others.size - 1:
                simulator.add_zeros(zeros)
        return simulator if others is None else others.add_up(simulator, len(clients) + zeros)

    def _examples_held(self, numbers: int) -> int:
        """How many examples are held at a time, each with so many numbers."""
        return max(1, min(_EXAMPLES_BYTES, self.updates.memory_limit // 8) // (4 * numbers))

    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of the test set."""
        test = self._dataset.test_set()
        return torch.from_numpy(test.features), torch.from_numpy(test.labels)

    def _enough_memory(self) -> AbstractContextManager[None]:
        return enough_memory(
            f"{self.updates.memory_limit / 2**20:,.0f} MiB of clients at a time",
            "give a smaller memory_limit (for commands --memory-limit). The round was not charged.",
        )

    def _groups(self, clients: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Clients whose examples are held at a time, and how many these are; one alone may have too many."""
        counts = np.ones(len(clients), dtype=np.int64)
        if isinstance(self._dataset, PartedDataset):
            with own_code("The data set"):
                counts = self._dataset.counts(clients)
        ends, start = np.cumsum(counts), 0
        while start < len(clients):
            before = int(ends[start - 1]) if start else 0
            stop = max(start + 1, int(np.searchsorted(ends, before + self._slice, side="right")))
            yield clients[start:stop], int(ends[stop - 1]) - before
            start = stop

    def _large(self, dataset: PartedDataset, client: int, examples: int) -> Iterator[Any]:
        """The row of a client with so many examples."""

        def parts() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
            for start in range(0, examples, self._slice):
                part = dataset.part(client, start, start + self._slice)
                yield torch.from_numpy(part.features).to(self.device), torch.from_numpy(part.labels).to(self.device)

        row = self._rows.large(parts, examples)
        yield row if self.asynchronous else row.numpy()

    def _chunks(self, clients: NDArray[np.int64], simulator: Simulator) -> Iterator[Any]:
        yield from self._rows.chunks(self._dataset.batch(clients))


class GpuBackend(CpuBackend):
    """Rounds on a GPU, by `cpsgd.simulation.device`."""

    asynchronous = True

    def __init__(self, dataset: Dataset, *arguments: Any) -> None:
        """Moves what the data set needs to the device; `ParameterError` where it has too little memory for it."""
        super().__init__(dataset, *arguments)
        with enough_memory("the data set", "use a smaller one."):
            self._data = on_device(dataset, self.device)
        if self.updates.layout is not None:
            self._slice = self._examples_held(max(dataset.feature_dim, self.updates.layout.factors))
        self._recorded: RecordedRound | None = None
        self._ahead: dict[int, Future[list[NDArray[np.int64]]]] = {}
        self._drawing = ThreadPoolExecutor(_BLOCKS)

    def clients(self, cohorts: Cohorts, number: int, rounds: int) -> NDArray[np.int64]:
        """The clients of one of `rounds` rounds; those of the next ones are drawn meanwhile, in blocks of rounds."""
        size = max(1, min(_BLOCK_ROUNDS, _BLOCK_CLIENTS // cohorts.cohort))
        own = number // size
        self._ahead = {block: drawn for block, drawn in self._ahead.items() if block >= own}
        for block in range(own, own + _BLOCKS):
            wanted = range(block * size, min((block + 1) * size, rounds))
            if block not in self._ahead and wanted:
                self._ahead[block] = self._drawing.submit(cohorts.several, wanted)
        return self._ahead[own].result()[number % size]

    def summed(self, number: int, clients: NDArray[np.int64], zeros: int) -> Simulator | RecordedRound | SharedRound:
        """As on the CPU. Rounds as large as the one before are replayed, so that their many launches cost one."""
        recorded = self._recorded
        if zeros == 0 and recorded is not None and recorded.size == len(clients):
            recorded.start(number, clients)
            return recorded
        simulator = super().summed(number, clients, zeros)
        plain = zeros == 0 and self._sends_gradients
        if plain and isinstance(self._data, DeviceInfinite) and isinstance(simulator, DeviceRound):
            with self._enough_memory():
                self._recorded = RecordedRound.of(simulator, self._data, self.updates, self._seed)
        return simulator

    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Features and labels of the test set."""
        return self._data.test.features, self._data.test.labels

    def _chunks(self, clients: NDArray[np.int64], simulator: Simulator) -> Iterator[Any]:
        batch, products, layout = self._data.batch(clients), None, self.updates.layout
        if isinstance(simulator, DeviceRound) and layout and simulator.takes(layout) and self._sends_gradients:
            products = self.updates.products(*batch)
        yield from self._rows.tensors(*batch) if products is None else [products]

    @property
    def _sends_gradients(self) -> bool:
        """Whether clients' vectors are their updates, and nothing else."""
        return self.clipping.size == 0 and self._rows is self.updates
