"""Computes rounds: `CpuBackend`, or `GpuBackend` for an NVIDIA GPU.

The trainer asks a backend for a round's clients, for the sum of their messages and for the test examples. A GPU is
asynchronous: it works on while the CPU prepares the next round, until it is asked for a result.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.federation.extras import AdaptiveClip, Extras
from cpsgd.learning import devices, estimators
from cpsgd.learning.canaries import CanaryClients
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.coordinate_scales import CoordinateScales
from cpsgd.learning.datasets.device_data import DeviceInfinite, on_device
from cpsgd.learning.datasets.populations import Dataset, PartedDataset
from cpsgd.learning.devices import enough_memory, own_code
from cpsgd.learning.estimators import Estimator
from cpsgd.learning.example_sums import ExampleSums
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import Loss
from cpsgd.learning.option_groups import ClientOptions, RunOptions
from cpsgd.learning.parallel import Processes, SharedRound, Simulator, own_device
from cpsgd.learning.recorded import RecordedRound
from cpsgd.mechanisms.memory import Simulated
from cpsgd.simulation.cpu import FloatMean, RoundSimulator, float_mean
from cpsgd.simulation.device import DeviceRound, device_float_mean
from cpsgd.simulation.products import Products

_EXAMPLES_BYTES = 1 << 26
# MiB that the clients computed together may take.
_CPU_MEMORY, _GPU_MEMORY = 1024, 4096
# A GPU's rounds are shorter than the time it takes to draw their clients: several blocks of rounds are drawn at once.
_BLOCKS, _BLOCK_ROUNDS, _BLOCK_CLIENTS = 4, 16, 1 << 18


class Clipping:
    """The norm that updates are clipped to: the protocol's norm D, or a norm C that follows a quantile of their norms.

    C follows Andrew, Thakkar, McMahan and Ramaswamy, "Differentially Private Learning with Adaptive Clipping" (2021);
    the formulas are in `cpsgd.federation.extras`. A client's vector has one more coordinate, which says whether its
    update was within C. With it the norm is still at most D, so that the protocol's guarantee covers this count: it
    costs accuracy and no ε.

    Attributes:
        norm: C; None if updates are clipped to the protocol's norm and nothing is counted.
    """

    def __init__(self, options: ClientOptions, clip_norm: float) -> None:
        """Starts with C = D, the protocol's `clip_norm`."""
        self._most = clip_norm
        self._adaptive: AdaptiveClip | None = None
        self.norm: float | None = None
        if options.clip_quantile is not None:
            self._adaptive = AdaptiveClip(
                initial=clip_norm, quantile=options.clip_quantile, lowest=0.0, highest=math.inf
            )
            self.norm = self._adaptive.initial

    @property
    def size(self) -> int:
        """Coordinates added to an update."""
        return 0 if self.norm is None else 1

    @property
    def scale(self) -> float:
        """Factor that a decoded mean and its noise are multiplied by."""
        return 1.0 if self.norm is None else self.norm / (self._extras.share * self._most)

    def rows(self, updates: Any) -> Any:
        """Returns clients' vectors for their updates, row by row; a row with NaN keeps its NaN."""
        if self.norm is None:
            return updates
        given = torch.as_tensor(updates)
        norms = torch.linalg.vector_norm(given, dim=1, dtype=torch.float64)
        extras = self._extras
        vectors = torch.empty((len(given), given.shape[1] + 1), device=given.device)
        vectors[:, :-1] = given * (extras.share * self._most / norms.clamp(min=self.norm))[:, None].float()
        vectors[:, -1] = torch.where(norms <= self.norm, 1.0, -1.0) * (extras.weight * self._most)
        return vectors if isinstance(updates, torch.Tensor) else vectors.numpy()

    def read(self, mean: torch.Tensor) -> torch.Tensor:
        """Returns the mean update, and sets the next norm from the estimated share of updates within this one."""
        if self._adaptive is None or self.norm is None:
            return mean
        unclipped = 0.5 * (float(mean[-1]) / (self._extras.weight * self._most) + 1.0)
        update = mean[:-1] * self.scale
        self.norm = self._adaptive.following(self.norm, unclipped)
        return update

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"norm": self.norm}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self.norm = float(state["norm"])

    @property
    def _extras(self) -> Extras:
        return Extras(clip=self.norm)


def _check_distance(clients: ClientOptions) -> None:
    """Raises `ParameterError` if vectors are further apart than the updates whose distance a plan counts on."""
    for name in ("clip_quantile", "rescale_every"):
        if getattr(clients, name) is not None:
            raise ParameterError(
                f"The plan has a replace_one_distance, and with {name} vectors are further apart than updates are: "
                "plan without one."
            )


def start(
    model: torch.nn.Module,
    loss: Loss,
    dataset: Dataset,
    estimator: Estimator,
    clients: ClientOptions,
    run: RunOptions,
    processes: Processes | None = None,
) -> CpuBackend:
    """Moves the model to the device that the options name, and makes the backend for it.

    If there are several `processes`, each computes its share of the clients.
    """
    device = devices.resolve(own_device(run.device, processes))
    gpu = devices.is_gpu(device)
    memory = run.memory_limit or (_GPU_MEMORY if gpu else _CPU_MEMORY)
    with enough_memory("the model", "use a smaller one."):
        model.to(device)
        updates = ClientUpdates(model, loss, clients, memory_limit=memory << 20)
        if clients.rescale_every is not None:
            updates.scales = CoordinateScales(model, every=clients.rescale_every)
    return (GpuBackend if gpu else CpuBackend)(dataset, updates, estimator, run.seed, device, clients, processes)


class CpuBackend:
    """Rounds on the CPU, by the codec's own kernels and with noise from a cipher."""

    asynchronous = False
    canaries: CanaryClients | None = None

    def __init__(
        self,
        dataset: Dataset,
        updates: ClientUpdates,
        estimator: Estimator,
        seed: int | None,
        device: torch.device,
        clients: ClientOptions,
        processes: Processes | None = None,
    ) -> None:
        """Checks that the model, as `updates` knows it, fits the estimator's protocol."""
        self.updates = updates
        self.device = device
        self._dataset = dataset
        self._rows: ClientUpdates | ExampleSums = updates
        self._clip_norm = estimators.clip_norm(estimator)
        if clients.examples is not None:
            self._rows = ExampleSums(updates, self._clip_norm, clients.examples)
        self.clipping = Clipping(clients, self._clip_norm)
        protocol = estimators.protocol_of(estimator)
        if protocol is not None and protocol.distance_reason is not None:
            _check_distance(clients)
        if protocol is not None and protocol.dim != self.dim:
            more = f", and one for clip_quantile makes {self.dim:,}" if self.clipping.size else ""
            raise ParameterError(
                f"The model has {updates.dim:,} trainable parameters{more}, the protocol is for {protocol.dim:,} "
                "coordinates; plan with dim equal to the former."
            )
        # Without its promise: the run's own account knows how many messages each of its rounds had.
        self._protocol = None if protocol is None else replace(protocol, promise=None)
        self.message_bytes = estimators.message_bytes(estimator, self.dim)
        self._seed = seed
        self._noise = Simulated()
        if protocol is not None:
            self._noise = protocol.mechanism.memory.simulated(seed, restart_every=clients.rescale_every)
        self._processes = processes
        self._slice = self._examples_held(dataset.feature_dim)

    @property
    def dim(self) -> int:
        """Coordinates of a client's vector: the model's, and one more for adaptive clipping."""
        return self.updates.dim + self.clipping.size

    @property
    def parts(self) -> dict[str, Any]:
        """Objects whose state a checkpoint holds, by name: the clip norm, scales, canaries and the noise's memory."""
        clip = {} if self.clipping.norm is None else {"clip": self.clipping}
        scales = {} if self.updates.scales is None else {"scales": self.updates.scales}
        canaries = {} if self.canaries is None else {"canaries": self.canaries}
        return {**clip, **scales, **canaries, **self._noise.parts}

    def clients(self, cohorts: Cohorts, number: int, rounds: int) -> NDArray[np.int64]:
        """Returns the clients of round `number` of `rounds`."""
        return cohorts.clients(number)

    def summed(self, number: int, clients: NDArray[np.int64], zeros: int) -> Simulator | RecordedRound | SharedRound:
        """Returns the round with the messages of these clients, and of `zeros` more who send the zero vector."""
        others = self._processes
        own = range(len(clients)) if others is None else others.share(len(clients))
        with self._enough_memory():
            simulator = self._start(number, len(clients) + zeros, own.start)
            canaries, exact = self.canaries, None if self.canaries is None else self._exact()
            held = np.zeros(len(clients), dtype=bool) if canaries is None else canaries.holds(clients)
            # Canaries last, so that messages are numbered alike for any number of processes.
            order = np.argsort(held, kind="stable")[own.start : own.stop]
            mine, held = clients[order], held[order]
            for some, examples in self._groups(mine[~held]):
                chunks = self._chunks(some, simulator)
                if examples > self._slice and isinstance(self._dataset, PartedDataset):
                    chunks = self._large(self._dataset, int(some[0]), examples)
                while True:
                    with own_code("The model, the loss or the data set"):
                        chunk = next(chunks, None)
                    if chunk is None:
                        break
                    if self.updates.scales is not None and not isinstance(chunk, Products):
                        chunk = self.updates.scales.divide(chunk)
                    vectors = self.clipping.rows(chunk)
                    if exact is not None:
                        exact.add(vectors)
                    simulator.add(vectors)
            for made in () if canaries is None else canaries.rows(mine[held]):
                sent: Any = torch.from_numpy(made).to(self.device) if self.asynchronous else made
                simulator.add(sent)
            # The last process adds them: they are numbered after all others.
            if others is None or others.rank == others.size - 1:
                simulator.add_zeros(zeros)
        if canaries is not None and exact is not None:
            if others is not None:
                others.add_up(exact, len(clients) + zeros)
            canaries.others = torch.as_tensor(exact.sums) / (len(clients) + zeros)
        return simulator if others is None else others.add_up(simulator, len(clients) + zeros)

    def _start(self, number: int, count: int, first: int) -> Simulator:
        """Starts the simulation of a round of `count` messages; this process' clients are numbered from `first` on."""
        protocol = self._protocol
        if protocol is None:
            return self._exact()
        source = self._noise.on_host(count, self.dim)
        return RoundSimulator(protocol, number, seed=self._seed, source=source, first=first)

    def _exact(self) -> FloatMean:
        """Starts a round of floats, without noise."""
        return float_mean(self.dim, self._clip_norm)

    def _examples_held(self, numbers: int) -> int:
        """Returns the number of examples, each of `numbers` numbers, that fit into memory at a time."""
        return max(1, min(_EXAMPLES_BYTES, self.updates.memory_limit // 8) // (4 * numbers))

    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns features and labels of the test set."""
        test = self._dataset.test_set()
        return torch.from_numpy(test.features), torch.from_numpy(test.labels)

    def _enough_memory(self) -> AbstractContextManager[None]:
        return enough_memory(
            f"{self.updates.memory_limit / 2**20:,.0f} MiB of clients at a time",
            "give a smaller memory_limit (for commands --memory-limit). The round was not charged.",
        )

    def _groups(self, clients: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], int]]:
        """Yields clients whose examples are held in memory together, and the number of these examples."""
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
        """Yields the row of a client with more examples than are held in memory."""

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
        """Moves the data set to the device; raises `ParameterError` if it has too little memory."""
        super().__init__(dataset, *arguments)
        with enough_memory("the data set", "use a smaller one."):
            self._data = on_device(dataset, self.device)
        if self.updates.layout is not None:
            self._slice = self._examples_held(max(dataset.feature_dim, self.updates.layout.factors))
        self._recorded: RecordedRound | None = None
        self._ahead: dict[int, Future[list[NDArray[np.int64]]]] = {}
        self._drawing = ThreadPoolExecutor(_BLOCKS)

    def clients(self, cohorts: Cohorts, number: int, rounds: int) -> NDArray[np.int64]:
        """Returns the clients of round `number`; threads draw those of later rounds meanwhile, in blocks of rounds."""
        size = max(1, min(_BLOCK_ROUNDS, _BLOCK_CLIENTS // cohorts.cohort))
        own = number // size
        self._ahead = {block: drawn for block, drawn in self._ahead.items() if block >= own}
        for block in range(own, own + _BLOCKS):
            numbers = range(block * size, min((block + 1) * size, rounds))
            if block not in self._ahead and numbers:
                self._ahead[block] = self._drawing.submit(cohorts.several, numbers)
        return self._ahead[own].result()[number % size]

    def summed(self, number: int, clients: NDArray[np.int64], zeros: int) -> Simulator | RecordedRound | SharedRound:
        """Returns the round with these clients' messages and `zeros` zero vectors; replays rounds of unchanged size."""
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

    def _start(self, number: int, count: int, first: int) -> Simulator:
        protocol = self._protocol
        if protocol is None:
            return self._exact()
        source = self._noise.on_device(count, self.dim, self.device)
        return DeviceRound(protocol, number, seed=self._seed, device=self.device, first=first, source=source)

    def _exact(self) -> FloatMean:
        return device_float_mean(self.dim, self._clip_norm, self.device)

    def test_examples(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns features and labels of the test set."""
        return self._data.test.features, self._data.test.labels

    def _chunks(self, clients: NDArray[np.int64], simulator: Simulator) -> Iterator[Any]:
        batch, products, layout = self._data.batch(clients), None, self.updates.layout
        if isinstance(simulator, DeviceRound) and layout and simulator.takes(layout) and self._sends_gradients:
            products = self.updates.products(*batch)
        yield from self._rows.tensors(*batch) if products is None else [products]

    @property
    def _sends_gradients(self) -> bool:
        """Whether clients' vectors are plain gradients that nothing else needs."""
        return self.clipping.size == 0 and self._rows is self.updates and self.canaries is None
