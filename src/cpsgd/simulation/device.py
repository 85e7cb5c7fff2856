"""Simulates a round on a PyTorch device such as a GPU, as `cpsgd.simulation.cpu` does on the CPU.

There are two implementations of the kernels: plain PyTorch (`device_plain.py`) for any device, and CUDA C++
(`device_cuda.py`) for NVIDIA GPUs. `device_cuda.py` lists where their integers differ.

The law of the mean is that of `RoundSimulator`: each client's vector is clipped, rotated and rounded, and the noise of
the sum is drawn once, unless rounding is itself the noise. Three things differ.

* Random numbers come from a counter (Philox), not from a cipher. Numbers that can be predicted protect nobody.
* The second check of a vector's norm after the rotation (`cpsgd.codec.clip.enforce`) is left out. It corrects float32
  arithmetic, by which the norm may exceed the bound by a millionth.
* A vector more than 10^18 times too long counts as zero, as one that is not finite does.
"""

from __future__ import annotations

import hashlib
import math
import os
import struct
from collections.abc import Callable
from types import ModuleType
from typing import Any
from typing import Protocol as TypingProtocol

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.codec import clip, wire
from cpsgd.errors import EmptyError, ParameterError, VectorError
from cpsgd.mechanisms.law import Normal
from cpsgd.mechanisms.noise import FEW_CLIENTS, FairCoins, SumRounding
from cpsgd.protocol import Protocol
from cpsgd.randomness import Keystream
from cpsgd.simulation import device_cuda
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.cpu import FloatMean, FreshNoise, noise_norm
from cpsgd.simulation.device_kernels import current
from cpsgd.simulation.products import Layout, Products

# Kernels number coordinates with 32 bits.
_MAX_DIM = 1 << 30


def carried(array: NDArray[Any], device: torch.device) -> torch.Tensor:
    """Returns a copy of an array on a device, without waiting for the device's earlier work."""
    tensor = torch.tensor(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class DeviceSource(TypingProtocol):
    """The source of the noise of a round's sum on a device."""

    @property
    def variance(self) -> float:
        """The noise's variance per client."""

    def on_device(self, count: int) -> FairCoins | Normal | SumRounding | None:
        """Describes the fresh noise of `count` clients to a device; None where the host must draw it."""

    @property
    def messages(self) -> Callable[[torch.Tensor, int, int, int], torch.Tensor] | None:
        """Returns the sum of clients' integers, where a client's noise has a state; None where a sum's is drawn.

        It takes grid points, the first client's number, the round and a key of random numbers.
        """

    def before_rounding(self, round: int, count: int) -> torch.Tensor | float:
        """Returns the noise that other rounds share, to be added before rounding, in grid points."""


class DeviceRound:
    """The sum of one round's messages and its mean, on a device.

    Example:
        >>> protocol = Protocol.rotated_binomial(clients=1000, dim=4, clip_norm=1.0, levels=256, trials=16)
        >>> round_ = DeviceRound(protocol, round=0, seed=1, device="cpu")
        >>> round_.add(torch.tensor([0.5, -0.5, 0.1, 0.0]).repeat(1000, 1))
        >>> round_.count, bool((round_.mean() - torch.tensor([0.5, -0.5, 0.1, 0.0])).abs().max() < 0.05)
        (1000, True)
    """

    def __init__(
        self,
        protocol: Protocol,
        round: int,
        *,
        seed: int | None,
        device: torch.device | str,
        kernels: ModuleType | None = None,
        first: int = 0,
        source: DeviceSource | None = None,
    ) -> None:
        """Starts an empty round.

        Args:
            protocol: The parameters of the round.
            round: Its number, which fixes the rotation.
            seed: Determines the round's random numbers; None takes a seed from the operating system.
            device: The device of the vectors, which computes everything.
            kernels: `device_plain` or `device_cuda`; by default the latter where it runs.
            first: Number of the first client, if several processes share a round's clients.
            source: The source of the sum's noise; by default the mechanism's noise, drawn afresh.

        Raises:
            ParameterError: The protocol has more coordinates than a device computes with, or is for whole levels.
        """
        self.protocol = protocol
        if protocol.dim > _MAX_DIM:
            raise ParameterError(
                f"A device simulates at most {_MAX_DIM:,} coordinates, and the protocol has {protocol.dim:,}: use the "
                "CPU, or several protocols."
            )
        if protocol.mechanism.on_levels:
            raise ParameterError(
                f"A device leaves out the second check of norms, which {protocol.mechanism.name!r} rests on: use the "
                "CPU."
            )
        self.round = _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        self.count = 0
        self._first = first
        chosen = int.from_bytes(os.urandom(7), "little") if seed is None else seed
        self._seed = _validate.integer("seed", chosen, low=0, high=2**64 - 1)
        self._grid, self._rounding = protocol.mechanism.grid, protocol.mechanism.device_rounding()
        dtype = torch.float64 if self._grid is None else torch.int64
        self._sums = torch.zeros(protocol.dim, dtype=dtype, device=device)
        # This device has a number, even if none was given.
        self.device = self._sums.device
        self._kernels = kernels or (device_cuda if device_cuda.runs_on(self.device) else plain)
        self._mean: torch.Tensor | None = None
        self.source: DeviceSource = FreshNoise(protocol.mechanism) if source is None else source
        self.take_inputs(carried(self.inputs(self.round, self._seed), self.device))

    def inputs(self, round: int, seed: int) -> NDArray[np.uint8]:
        """Returns the random keys and the rotation's signs of a round, as bytes for the device."""
        keys = b"".join(_key(purpose, round, seed).to_bytes(8, "little") for purpose in ("rounding", "coins"))
        inputs = np.frombuffer(keys, dtype=np.uint8)
        if not self.protocol.rotate:
            return inputs
        signs = self.protocol.rotation_signs(round)
        return np.concatenate([inputs, signs, np.zeros(-len(signs) % 8, dtype=np.uint8)])

    @property
    def inputs_size(self) -> int:
        """Bytes of `inputs`, a multiple of 8."""
        return len(self._inputs)

    def take_inputs(self, inputs: torch.Tensor) -> None:
        """Takes the `inputs` of a round, on the device. Kernels read them when they run."""
        self._inputs, self._signs = inputs, inputs[16:] if self.protocol.rotate else None
        self._encoding = None
        if self._grid is not None and self._rounding is not None:
            bound = self.protocol.clip_norm * (1.0 - clip.MARGIN)
            self._encoding = plain.Encoding(self._signs, bound, self._grid.unit, inputs[:8], self._rounding)

    def renumber(self, round: int, seed: int) -> None:
        """Sets the number and seed of the round, for noise drawn from now on."""
        self.round, self._seed, self._mean = round, seed, None

    def restart(self) -> None:
        """Forgets all messages."""
        self._sums.zero_()
        self.count, self._mean = 0, None

    def add(self, vectors: torch.Tensor | Products) -> None:
        """Adds the messages of some clients, one row per client. The rows are overwritten.

        Raises:
            VectorError: The rows do not have `dim` coordinates of float32 on the round's device.
        """
        if self._mean is not None:
            raise ParameterError("The round's mean was released: it takes no more messages.")
        protocol = self.protocol
        if isinstance(vectors, torch.Tensor):
            vectors = _rows(vectors, protocol.dim, self.device)
        elif not self.takes(vectors.layout):
            raise VectorError(f"The round takes no products of {vectors.layout.dim} coordinates here: write them out.")
        if self._encoding is None:
            assert isinstance(vectors, torch.Tensor)
            self._sums += _clipped_sum(vectors, protocol.clip_norm)
            self.count += len(vectors)
            return
        first = self._first + self.count
        with current(self.device):
            if isinstance(vectors, torch.Tensor) and self.source.messages is not None:
                self._kernels.to_grid(vectors, self._encoding)
                self._sums += self.source.messages(vectors, first, self.round, _key("silos", self.round, self._seed))
                self.count += len(vectors)
            elif isinstance(vectors, torch.Tensor):
                self._kernels.add_rows(vectors, self._sums, self._encoding, first)
                self.count += len(vectors)
            else:
                self._kernels.add_products(vectors, self._sums, self._encoding, first)
                self.count += len(vectors.factors)

    def add_zeros(self, count: int) -> None:
        """Adds the messages of `count` clients who send the zero vector with their noise, to fill a cohort up."""
        step = max(1, (1 << 24) // self.protocol.dim)
        for start in range(0, count, step):
            size = min(step, count - start), self.protocol.dim
            self.add(torch.zeros(size, dtype=torch.float32, device=self.device))

    def mean(self) -> torch.Tensor:
        """Returns the estimate of the mean, noise included. The first call draws the noise and ends the round.

        Raises:
            EmptyError: No vector was added.
        """
        if self.count == 0:
            raise EmptyError("There is no mean: no vector was added.")
        if self._mean is None:
            with current(self.device):
                self._mean = self._noisy_mean()
        return self._mean

    @property
    def sums(self) -> torch.Tensor:
        """The sums so far, without noise."""
        return self._sums

    def noise_norm(self) -> float:
        """Returns √E‖noise‖² of the mean: the noise added, and rounding at its largest."""
        return noise_norm(self.protocol, self.count, variance=self.source.variance)

    def takes(self, layout: Layout) -> bool:
        """Returns whether `add` takes products of this layout."""
        rounding = self._rounding if self._kernels is device_cuda and self.protocol.rotate else None
        if rounding is None or layout.dim != self.protocol.dim or self.source.messages is not None:
            return False
        return device_cuda.takes(self.device, layout.dim, rounding, layout)

    def _noisy_mean(self) -> torch.Tensor:
        """Returns the mean of the sums with noise, decoded."""
        protocol, mechanism = self.protocol, self.protocol.mechanism
        self._add_noise()
        # As `cpsgd.codec.pipeline.decode`: the mean of the noise is subtracted, in float64.
        middle, sums = self.count * mechanism.centre, self._sums
        if protocol.modulus is not None:
            lowest = math.ceil(middle - 0.5 * protocol.modulus)
            sums = torch.remainder(sums - lowest, protocol.modulus)
            middle -= lowest
        mean = ((sums.to(torch.float64) - middle) * (mechanism.scale / self.count)).to(torch.float32)
        if self._signs is not None:
            self._kernels.rotate_back(mean, self._signs)
        return mean

    def _add_noise(self) -> None:
        """Adds the noise of `count` clients to the sums: drawn here if the device can, else by the exact sampler."""
        noise = self.source.on_device(self.count)
        if isinstance(noise, FairCoins):
            if noise.trials:
                self._kernels.add_coins(self._sums, keys=self._inputs[8:16], trials=noise.trials)
        elif isinstance(noise, Normal):
            generator = torch.Generator(self.device)
            generator.manual_seed(_key("normal", self.round, self._seed))
            normal = torch.randn(self.protocol.dim, generator=generator, device=self.device, dtype=torch.float64)
            self._sums += noise.deviation * normal
        elif isinstance(noise, SumRounding):
            self._round_sums(noise)
        else:
            keystream = Keystream(hashlib.sha256(_text("noise", self.round, self._seed)).digest()[:16])
            drawn = self.protocol.mechanism.noise.of_sum(self.count, self.protocol.dim, keystream)
            self._sums += torch.from_numpy(drawn).to(self.device)

    def _round_sums(self, noise: SumRounding) -> None:
        """Replaces sums of grid points by sums of the integers that noisy grid points are rounded to."""
        generator = torch.Generator(self.device)
        generator.manual_seed(_key("rounding of sums", self.round, self._seed))
        drawn: dict[str, Any] = {"generator": generator, "device": self.device, "dtype": torch.float64}
        level = float(1 << noise.fraction_bits)
        points = (self._sums - noise.clients * noise.offset).to(torch.float64)
        points += noise.deviation * torch.randn(self.protocol.dim, **drawn)
        points += self.source.before_rounding(self.round, self.count)
        levels = points / level
        if noise.clients <= FEW_CLIENTS:
            for _ in range(noise.clients - 1):
                levels += torch.rand(self.protocol.dim, **drawn) - 0.5
        else:  # the sum of many uniform numbers is close to a Gaussian
            levels += math.sqrt((noise.clients - 1) / 12.0) * torch.randn(self.protocol.dim, **drawn)
        levels += noise.clients * noise.centre
        self._sums.copy_(torch.floor(levels + 0.5))


def device_float_mean(dim: int, clip_norm: float, device: torch.device | str) -> FloatMean:
    """Returns an empty round without privacy on a device."""
    bound = _validate.positive("clip_norm", clip_norm)
    sums = torch.zeros(dim, dtype=torch.float64, device=device)
    return FloatMean(sums, lambda vectors: _clipped_sum(_rows(vectors, dim, sums.device), bound))


def _text(purpose: str, round: int, seed: int) -> bytes:
    return f"cpsgd device {purpose} v1".encode() + struct.pack("<QQ", seed, round)


def _key(purpose: str, round: int, seed: int) -> int:
    """Returns the key, 63 bits, of random numbers for one purpose in a round."""
    return int.from_bytes(hashlib.sha256(_text(purpose, round, seed)).digest()[:8], "little") >> 1


def _rows(vectors: torch.Tensor, dim: int, device: torch.device) -> torch.Tensor:
    """Checks the rows. Returns them, or a copy if they overlap or are not contiguous."""
    right = vectors.ndim == 2 and vectors.shape[1] == dim and vectors.dtype == torch.float32
    if not right or vectors.device != device:
        raise VectorError(
            f"Expected rows of {dim} float32 on {device}, got {vectors.dtype} of shape {tuple(vectors.shape)} on "
            f"{vectors.device}."
        )
    contiguous = vectors.stride(1) == 1 and (len(vectors) < 2 or vectors.stride(0) >= dim)
    return vectors if contiguous else vectors.contiguous()


def _clipped_sum(vectors: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Returns the sum of the rows, each clipped to norm `clip_norm`; rows that are not finite are left out."""
    factors = plain.clip_factors(vectors, clip_norm * (1.0 - clip.MARGIN))
    return factors.to(torch.float32) @ vectors
