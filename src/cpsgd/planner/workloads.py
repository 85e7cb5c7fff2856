"""`Workload`: what training makes of the rounds' means, and so of their noise.

In round t the model moves by η_t Σ_k p_k m_(t-k). m are the rounds' means, and η_t is the round's learning rate. p_k is
the part of a mean that is left k rounds later: for plain SGD only p_0 = 1; with momentum β, β^k.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self, get_args

import numpy as np
from numpy.typing import NDArray

from cpsgd._lazy import Late
from cpsgd.errors import ParameterError

if TYPE_CHECKING:
    from scipy import fft
else:
    fft = Late("scipy.fft")

Array = NDArray[np.float64]
Schedule = Literal["constant", "linear", "late"]

MOMENTUM = 0.9
"""β."""

# The part of a run in which the schedule "late" lowers the rate.
_LATE = 0.3
# Rounds that are looked at, at equal distances.
_ROUNDS = 64
_NAMES = ("sgd", "momentum")


def rate_factor(schedule: Schedule, round: int, rounds: int) -> float:
    """Returns the factor of the learning rate in a round, a function of its number alone so that runs can be resumed.

    Example:
        >>> [rate_factor("linear", round, 4) for round in range(4)]
        [1.0, 0.75, 0.5, 0.25]
        >>> [round_ for round_ in range(10) if rate_factor("late", round_, 10) < 1.0]
        [8, 9]
    """
    left = 1.0 - round / rounds
    return {"constant": 1.0, "linear": left, "late": min(1.0, left / _LATE)}[schedule]


@dataclass(frozen=True, eq=False)
class Workload:
    """Weights of the rounds' means in the model.

    Attributes:
        rates: η, one for each round.
        steps: p, for as many rounds.
    """

    rates: Array
    steps: Array

    @classmethod
    def of(cls, said: str | Sequence[float] | None, rounds: int) -> Self:
        """Reads "sgd" (the default) or "momentum", with a schedule as in "momentum-late".

        Or from p_0, p_0 + p_1, ..., what a mean has moved the model by 0, 1, ... rounds later.

        Raises:
            ParameterError: It is none of these.

        Example:
            >>> Workload.of("momentum-linear", 3).steps.round(2).tolist()
            [1.0, 0.9, 0.81]
        """
        if said is None or isinstance(said, str):
            name, _, schedule = (said or "sgd").partition("-")
            schedule = schedule or "constant"
            if name not in _NAMES or schedule not in get_args(Schedule):
                raise ParameterError(
                    f"Expected workload to be sgd or momentum, or one of them with a schedule as in sgd-linear or "
                    f"momentum-late, got workload={said!r}."
                )
            rates = np.array([rate_factor(schedule, round, rounds) for round in range(rounds)])  # type: ignore[arg-type]
            powers: Array = np.power(MOMENTUM, np.arange(float(rounds))) if name == "momentum" else np.eye(1, rounds)[0]
            return cls(rates, powers)
        try:
            response = np.asarray(said, dtype=np.float64)
        except (TypeError, ValueError):
            raise ParameterError("Expected workload to be a name, or what a mean weighs in later rounds.") from None
        if response.shape != (rounds,) or not np.isfinite(response).all() or not response.any():
            raise ParameterError(
                f"Expected workload to be {rounds:,} finite numbers, one for each round, got shape {response.shape}."
            )
        return cls(np.ones(rounds), np.diff(response, prepend=0.0))

    def variance(self, factors: Array) -> float:
        """Returns the mean over rounds of the noise's variance in the model, where a round's noise is Σ_k g_k z_(t-k).

        Args:
            factors: g; only a one for independent noise.
        """
        key = factors.tobytes()
        if key not in self._variances:
            found = [self._variance(np.convolve(seen, factors[::-1]), len(factors)) for seen in self._seen]
            self._variances[key] = float(np.mean(found))
        return self._variances[key]

    @cached_property
    def _variances(self) -> dict[bytes, float]:
        """Variances computed so far, by factors: a search asks for the same ones again and again."""
        return {}

    def products(self, ages: Sequence[int]) -> Array:
        """Returns the matrix M for which `variance` of weights g at these ages is g·M g, all other weights zero."""
        found = np.zeros((len(ages), len(ages)))
        for weights in self._seen:
            # What z of a round weighs in the model through the round that uses it at each age.
            moved = np.array([np.concatenate([weights[age:], np.zeros(min(age, len(weights)))]) for age in ages])
            found += moved @ moved.T
        return found / len(self._seen)

    def bias(self) -> float:
        """Returns the mean over rounds of the squared sum of weights: the factor of an error equal in all rounds."""
        return float(np.mean([seen.sum() ** 2 for seen in self._seen]))

    @staticmethod
    def _variance(found: Array, bands: int) -> float:
        """Returns the variance of Σ_i v_i N_i, z by z, without the b - 1 draws of rounds before the first."""
        return float(np.sum(found[bands - 1 :] ** 2))

    @cached_property
    def _seen(self) -> list[Array]:
        """Weights of all rounds' means in the model after selected rounds."""
        rounds = len(self.rates)
        chosen = sorted({int((i + 0.5) * rounds / min(rounds, _ROUNDS)) for i in range(min(rounds, _ROUNDS))})
        return [_convolved(self.rates[t::-1], self.steps[: t + 1])[t::-1] for t in chosen]


def _convolved(one: Array, other: Array) -> Array:
    """Returns the convolution by FFT; `scipy.signal` would take half a second to import."""
    size = len(one) + len(other) - 1
    length = fft.next_fast_len(size, real=True)
    found: Array = fft.irfft(fft.rfft(one, length) * fft.rfft(other, length), length)
    return found[:size]
