"""Data sets on a PyTorch device: examples are moved there, or made there."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from cpsgd._torch import torch
from cpsgd.learning import cuda
from cpsgd.learning.datasets.infinite import FIELD_COUNT, MOVES, InfiniteDataset
from cpsgd.learning.datasets.populations import Batch, Dataset
from cpsgd.simulation.device import carried
from cpsgd.simulation.device_kernels import compiles, current


class DeviceBatch(NamedTuple):
    """A `Batch` on a device; `counts` stay on the CPU."""

    features: torch.Tensor
    labels: torch.Tensor
    counts: NDArray[np.int64]


class DeviceData:
    """The examples of any data set, moved to a device."""

    def __init__(self, dataset: Dataset, device: torch.device) -> None:
        """Moves the test examples at once."""
        self._dataset = dataset
        self._device = device
        self.test = self._transferred(dataset.test_set())

    def batch(self, clients: NDArray[np.int64]) -> DeviceBatch:
        """Returns the examples of these clients."""
        return self._transferred(self._dataset.batch(clients))

    def _transferred(self, batch: Batch) -> DeviceBatch:
        features, labels = carried(batch.features, self._device), carried(batch.labels, self._device)
        return DeviceBatch(features, labels, batch.counts)


class DeviceInfinite(DeviceData):
    """An infinite data set whose samples are made on the device, equal to those of `InfiniteDataset` bit for bit.

    Its images and displacement fields are on the device; a round transfers only its clients' numbers.
    """

    def __init__(self, dataset: InfiniteDataset, device: torch.device) -> None:
        """Moves images and fields to the device."""
        super().__init__(dataset, device)
        base = dataset.base
        self._side = base.images.shape[1]
        self._first = len(base.test_images) + len(base.images)
        self._test = len(base.test_images)
        self._images = torch.tensor(base.images, device=device)
        self._train_labels = torch.tensor(base.labels.astype(np.int64), device=device)
        fields = torch.tensor(dataset.fields.astype(np.float32), device=device)
        # Central differences are halved in the fields, as `InfiniteDataset` does.
        self._fields = fields if dataset.tangents is not None else fields * 0.5
        self._tangents = None if dataset.tangents is None else torch.tensor(dataset.tangents, device=device)
        self._white = torch.tensor(255.0, device=device)
        self._moves = torch.tensor(MOVES * dataset.shift, device=device)
        self._compiled = dataset.tangents is None and compiles(device)

    def batch(self, clients: NDArray[np.int64]) -> DeviceBatch:
        """Returns the samples of these clients, with shades divided by 255."""
        return self.made(carried(clients, self._device))

    def made(self, clients: torch.Tensor) -> DeviceBatch:
        """Returns the samples of clients whose numbers are on the device, as `batch` does."""
        numbers = clients + self._first
        counts = np.ones(len(clients), dtype=np.int64)
        if self._compiled:
            with current(self._device):
                features, labels = cuda.samples(
                    self._images, self._train_labels, self._fields, self._moves, numbers, self._test
                )
            return DeviceBatch(features, labels, counts)
        base = (numbers - self._test) % len(self._images)
        # As `recipe`: 64 bits that wrap around still hold the product modulo 2^32.
        k1 = ((numbers * 131071) & 0xFFFFFFFF) % 1521
        k2 = (k1 + 1 + 2 * numbers) % FIELD_COUNT
        down, right = self._moves[k1 % len(self._moves)].unbind(1)
        # The divisor is a tensor: a GPU would multiply by the rounded inverse of a plain number.
        features = self._moved(self._deformed(base, k1, k2), down, right).flatten(1) / self._white
        return DeviceBatch(features, self._train_labels[base], counts)

    def _deformed(self, base: torch.Tensor, k1: torch.Tensor, k2: torch.Tensor) -> torch.Tensor:
        """Returns the deformed images before they are moved, as float32."""
        shades = self._images[base].to(torch.float32)
        if self._tangents is None:
            around = torch.nn.functional.pad(shades, (1, 1, 1, 1))
            right = around[:, 1:-1, 2:] - around[:, 1:-1, :-2]
            down = around[:, 2:, 1:-1] - around[:, :-2, 1:-1]
        else:
            right, down = self._tangents[base].unbind(1)
        value = shades - (right * self._fields[k1] - down * self._fields[k2])
        return value.clamp_(0.0, 255.0).trunc_()

    def _moved(self, images: torch.Tensor, down: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """Moves images by at most one pixel; new pixels are zero."""
        around = torch.nn.functional.pad(images, (1, 1, 1, 1))
        width = self._side + 2
        inside = torch.arange(self._side, device=images.device)
        places = (1 + inside)[:, None] * width + (1 + inside)[None, :]
        begin = down * width + right
        chosen = (places[None] - begin[:, None, None]).flatten(1)
        return around.flatten(1).gather(1, chosen).reshape(images.shape)


def on_device(dataset: Dataset, device: torch.device) -> DeviceData:
    """Returns the data set on a device; samples of infinite data sets are made there."""
    kind = DeviceInfinite if isinstance(dataset, InfiniteDataset) else DeviceData
    return kind(dataset, device)  # type: ignore[arg-type]
