"""Several processes that share a run's clients, one per GPU, connected by `torch.distributed`.

Each process that torchrun starts makes the same `Trainer` and computes its share of a round's clients. The shares are
added as integers, so that the result is exactly that of one process. The first process charges the round, draws the
noise and sends the mean to the others; all take the same step. Only the first writes the run's folder and ledger.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpsgd._torch import torch
from cpsgd.simulation.cpu import FloatMean, RoundSimulator
from cpsgd.simulation.device import DeviceRound

Simulator = RoundSimulator | DeviceRound | FloatMean
"""Adds up a round's vectors and returns their mean."""


@dataclass(frozen=True)
class Processes:
    """The processes of a run.

    Attributes:
        rank: Number of this process, from 0.
        size: Number of processes.
    """

    rank: int
    size: int

    @property
    def is_first(self) -> bool:
        """Whether this process draws the noise and writes files."""
        return self.rank == 0

    def share(self, count: int) -> range:
        """Returns the range of this process's clients, of `count` in all."""
        return range(self.rank * count // self.size, (self.rank + 1) * count // self.size)

    def same(self, value: Any) -> Any:
        """Broadcasts the first process's `value`, and returns it in all processes."""
        values = [value]
        torch.distributed.broadcast_object_list(values, src=0, device=torch.device("cpu"))
        return values[0]

    def add_up(self, simulator: Simulator, count: int) -> SharedRound:
        """Returns the round with the `count` messages of all processes."""
        sums: Any = simulator.sums
        if not isinstance(sums, torch.Tensor):
            # Addition modulo 2^64 is the same with a sign and without one.
            sums = torch.from_numpy(sums.view(np.int64) if sums.dtype == np.uint64 else sums)
        torch.distributed.all_reduce(sums)
        simulator.count = count
        return SharedRound(self, simulator)


class SharedRound:
    """A round whose mean the first process sends to the others."""

    def __init__(self, processes: Processes, simulator: Simulator) -> None:
        """Takes a round with the messages of all processes."""
        self.count = simulator.count
        self._processes = processes
        self._simulator = simulator

    def mean(self) -> torch.Tensor:
        """Returns the mean, with the noise that the first process draws."""
        sums: Any = self._simulator.sums
        if self._processes.is_first:
            mean = torch.as_tensor(self._simulator.mean()).clone()
        else:
            device = sums.device if isinstance(sums, torch.Tensor) else torch.device("cpu")
            mean = torch.empty(len(sums), dtype=torch.float32, device=device)
        torch.distributed.broadcast(mean, src=0)
        return mean

    def noise_norm(self) -> float:
        """Returns √E‖noise‖² of the mean."""
        return self._simulator.noise_norm()


def joined() -> Processes | None:
    """Returns the processes that torchrun started together; None for a single one."""
    size = int(os.environ.get("WORLD_SIZE", "1"))
    if size == 1:
        return None
    if not torch.distributed.is_initialized():
        # NCCL needs a GPU for each process; otherwise they communicate by the CPU.
        own = 0 < int(os.environ.get("LOCAL_WORLD_SIZE", size)) <= torch.cuda.device_count()
        torch.distributed.init_process_group("cpu:gloo,cuda:nccl" if own else "gloo")
    return Processes(torch.distributed.get_rank(), size)


def own_device(name: str, processes: Processes | None) -> str:
    """Returns the device of this process: for a GPU without a number, the process's own GPU."""
    count = torch.cuda.device_count()
    if processes is None or count == 0 or name not in ("cuda", "auto"):
        return name
    return f"cuda:{int(os.environ.get('LOCAL_RANK', processes.rank)) % count}"
