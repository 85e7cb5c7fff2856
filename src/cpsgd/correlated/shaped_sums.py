"""Simulated rounds of silos that take their noise and rounding errors away themselves: each silo is played as it is.

There are few silos, so that nothing is drawn for a sum at once. Every silo has its own rows w, its own noise and its
own rounding, and a round's sum has exactly the law of life. Silo i is the i-th client of every round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from cpsgd.correlated.draws import Points
from cpsgd.errors import CheckpointError, ParameterError
from cpsgd.mechanisms.memory import Simulated
from cpsgd.randomness import Keystream

if TYPE_CHECKING:
    from cpsgd._torch import torch
    from cpsgd.correlated.device_silos import DeviceSilos
    from cpsgd.correlated.shaped import ShapedGaussian


class SiloRows:
    """The rows w of all silos in the last rounds: one array of silos by coordinates for each round."""

    def __init__(self, mechanism: ShapedGaussian) -> None:
        """Begins a run: no round has an array yet."""
        self._bands, self._mechanism = mechanism.bands, mechanism
        self.rounds: dict[int, Any] = {}

    def open(self, round: int, new: Any) -> Any:
        """Returns the round's array, or stores `new` as its array; drops rounds that later ones do not need.

        Raises:
            ParameterError: The run has no such round, or a later one was begun.
        """
        self._mechanism.memory.rotation_round(round)
        if self.rounds and round < max(self.rounds):
            raise ParameterError(f"Round {max(self.rounds)} was begun, so that round {round} is not run again.")
        self.rounds = {number: rows for number, rows in self.rounds.items() if number > round - self._bands}
        return self.rounds.setdefault(round, new)

    def past(self, round: int) -> dict[int, Any]:
        """Returns the arrays of earlier rounds by their age."""
        return {round - number: rows for number, rows in self.rounds.items() if number < round}

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        from cpsgd._torch import torch

        return {"rounds": {number: torch.as_tensor(rows).cpu() for number, rows in self.rounds.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state that `state_dict` returned.

        Raises:
            CheckpointError: The state is not one of these.
        """
        try:
            self.rounds = {int(number): rows.numpy() for number, rows in state["rounds"].items()}
        except (KeyError, ValueError, TypeError, AttributeError):
            raise CheckpointError("The checkpoint does not hold the rows that silos take away.") from None


class SimulatedSilos(Simulated):
    """The state of a run whose silos are simulated."""

    def __init__(self, mechanism: ShapedGaussian) -> None:
        """Begins a run: no silo has anything to take away yet."""
        self._mechanism, self._rows = mechanism, SiloRows(mechanism)
        self.parts = {"silos": self._rows}

    def on_host(self, clients: int, dim: int) -> SiloSums:
        """Returns the silos of rounds of `clients` messages on this machine's processors."""
        return SiloSums(self._mechanism, self._rows, clients, dim)

    def on_device(self, clients: int, dim: int, device: torch.device) -> DeviceSilos:
        """Returns the silos of rounds of `clients` messages on a device."""
        from cpsgd.correlated.device_silos import DeviceSilos

        return DeviceSilos(self._mechanism, self._rows, clients, dim, device)


class SiloSums:
    """Sums of messages of a run on this machine, silo by silo, by the client's own kernel."""

    def __init__(self, mechanism: ShapedGaussian, rows: SiloRows, clients: int, dim: int) -> None:
        """Rounds of `clients` messages each."""
        self.client, self._rows = mechanism, rows
        self._shape = clients, dim

    @property
    def variance(self) -> float:
        """The noise's variance per client in the later rounds of the run."""
        return self.client.noise.settled_variance

    def of_client(self, kernel: Any, number: int, round: int) -> Any:
        """Returns the kernel of one silo, which replaces its correction by the round's w."""
        from cpsgd.correlated.shaped import correction

        mine: Points = self._rows.open(round, np.zeros(self._shape, dtype=np.int64))[number]
        past = {age: rows[number] for age, rows in self._rows.past(round).items()}
        mine[:] = correction(past, self.client.correlation.weights, len(mine))
        return kernel.after(mine)

    def noisy(self, sums: Any, count: int, round: int, own: Keystream, *, seeded: bool = False) -> Any:
        """Returns the sums unchanged, since every silo has added its noise already.

        Raises:
            ParameterError: Another number of messages than in the run's other rounds.
        """
        if count != self._shape[0]:
            raise ParameterError(f"Expected the messages of all {self._shape[0]} silos, got {count}.")
        return sums
