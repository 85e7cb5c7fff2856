"""The server's optimizer."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


class Momentum:
    """Momentum 0.8, a little weight decay, and a rate that falls to zero in the second half.

    It sees the private mean only, so it costs no privacy.
    """

    def __init__(self, rate: float, rounds: int, images: float) -> None:
        """Starts with velocity 0; `images` is the (expected) number of images in a silo's sum."""
        self.rate, self.rounds, self.images = rate, rounds, images
        self._velocity: float | np.ndarray = 0.0

    def __call__(self, model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        """Returns the next model, from the mean of the silos' sums of gradients."""
        self._velocity = 0.8 * self._velocity + mean / self.images + 1e-4 * model
        return model - self.rate * min(1.0, 2.0 - 2.0 * (round - 1) / self.rounds) * self._velocity

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the state for a checkpoint."""
        return {"velocity": np.asarray(self._velocity)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the state from a checkpoint."""
        self._velocity = state["velocity"]
