"""Designs of `RoundedCorrelated`: correlated noise in few bits, with weights of a few ages chosen for the training.

σ is as many steps as the window holds beside the range of coordinates and what a message inherits. How many steps the
vectors are long follows from the proof.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.weights import WEIGHT_BITS, Correlation
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.rounded_gaussian import LEAST_SIGMA, MOST_SIGMA
from cpsgd.planner.target import Target
from cpsgd.planner.workloads import Workload

Array = NDArray[np.float64]

MOST_BITS = 8.0
"""With more bits than this, noise of a client's own costs next to nothing, and `CorrelatedGaussian` is as good."""

WINDOWS = (8, 16, 32, 64)
"""Numbers of values that are tried where the bits are those of a modulus."""

# Deviations of z, and of what is inherited, that a message has room for: more where there is more room.
_ROOMS = {8: (1.8, 1.9), 16: (2.1, 2.3), 32: (2.5, 2.8), 64: (2.9, 3.2)}
# Ranges of coordinates, in standard deviations of a rotated one.
_REACHES = (5.0, 5.25, 5.75)
_TRIES = 2
# About σ in steps, for each value of a message.
_STEPS = 0.11
# Ages whose noise is taken away: each is an expansion of a seed.
_TAPS = 7
# Points of the frequency axis on which weights are judged.
_FREQUENCIES = 2048


@dataclass(frozen=True)
class FewBits:
    """The requirements of a design: a target for the whole run, its weights, and untrusted holders of seeds."""

    target: Target
    weighting: Correlation
    untrusted_holders: int | None
    rotate: bool

    def designs(self, values: int) -> Iterator[RoundedCorrelated]:
        """Yields mechanisms with this many values that keep the claim."""
        root = math.sqrt(self.target.dim)
        nearest = min(_ROOMS, key=lambda each: abs(math.log(each / values)))
        for reach in sorted({min(each, root) for each in _REACHES}) if self.rotate else [root]:
            found = self._reaching(self.target.clip_norm * reach / root, values, *_ROOMS[nearest])
            if found is not None:
                yield found

    def _reaching(self, coordinate_range: float, values: int, room: float, kept: float) -> RoundedCorrelated | None:
        """Returns the mechanism with this range of coordinates, or None."""
        inherits = math.sqrt(max(0.0, self.weighting.spread**2 - 1.0))
        honest = self.target.honest - (self.weighting.bands - 1) * (self.untrusted_holders or 0) - 1
        if honest < 1:
            return None
        # σ in the vector's units, by the noise of slots alone; the proof then says what it must be.
        unit = self.target.distance * self.weighting.column_norm / (self.target.gaussian_mu * math.sqrt(honest))
        found = None
        for _ in range(_TRIES):
            sigma = 0.5 * (values - 1) / (room + kept * inherits + coordinate_range / unit)
            if not LEAST_SIGMA <= sigma <= MOST_SIGMA:
                return found
            try:
                tried = RoundedCorrelated(
                    noise_deviation=sigma,
                    step=unit / sigma,
                    window=values,
                    coordinate_range=coordinate_range,
                    bands=self.weighting.bands,
                    run_length=self.weighting.rounds,
                    untrusted_holders=self.untrusted_holders,
                    inherited_range=kept * inherits * sigma,
                    taps=self.weighting.taps,
                )
                scale = self.target.smallest_scale(tried)
                found = replace(tried, step=scale)
            except (ConditionError, ParameterError):
                return found
            unit = scale * sigma
        return found


def rounding_share(windows: Sequence[int]) -> float:
    """Returns the approximate ratio of rounding variance to the variance of z, for these window sizes."""
    return 1.0 / (6.0 * (_STEPS * max(windows, default=WINDOWS[0])) ** 2)


def few_taps(bands: int, rounds: int, workload: Workload, left: float) -> Correlation | None:
    """Returns the best weights for at most seven ages, from 1 to `bands` - 1 in a geometric row; None for one age.

    The weights minimise the variance in the model times the squared sensitivity of a client in one round. `left` is the
    variance that is not taken away, relative to that of z; it protects as well.

    Example:
        >>> found = few_taps(33, 1000, Workload.of("sgd", 1000), left=1e-3)
        >>> found.bands, round(found.gain / Correlation(32, 1000).gain, 1)
        (33, 1.6)
    """
    ages = sorted({round((bands - 1) ** (i / (_TAPS - 1))) for i in range(_TAPS)})
    if len(ages) < 2:
        return None
    products = workload.products([0, *ages])
    turns = np.exp(-1j * np.outer(ages, (np.arange(_FREQUENCIES) + 0.5) * math.pi / _FREQUENCIES))

    def cost(logits: Array) -> float:
        # Weights are shares of a number below one, so that C exists.
        shares = np.exp(np.append(logits, 0.0) - np.max(np.append(logits, 0.0)))
        weights = shares[:-1] / shares.sum()
        spectrum = np.abs(1.0 - weights @ turns) ** 2
        g = np.concatenate([[1.0], -weights])
        remaining = float(g @ products @ g + left * products[0, 0])
        # [(LLᵀ + v)⁻¹]₀₀ = (1 - [(LᵀL + v)⁻¹]₀₀)/v, and LᵀL + v is Toeplitz: by Szegő's theorem.
        protected = -math.expm1(-float(np.mean(np.log(spectrum + left)))) / left
        return math.log(protected) + math.log(remaining)

    from scipy.optimize import minimize  # late: who only encodes does without SciPy

    start = np.log(0.55 / np.array(ages, dtype=np.float64) / 0.05)
    best = minimize(cost, start, method="L-BFGS-B", bounds=[(-6.0, 8.0)] * len(ages))
    shares = np.exp(np.append(best.x, 0.0))
    chosen = shares[:-1] / shares.sum()
    weights = [max(1, math.floor(share * (1 << WEIGHT_BITS))) for share in chosen]
    taps = ",".join(f"{age}:{weight}" for age, weight in zip(ages, weights, strict=True))
    return Correlation(ages[-1] + 1, rounds, None, taps)
