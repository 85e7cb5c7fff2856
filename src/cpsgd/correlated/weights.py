"""`Correlation`: noise of a run whose rounds take away again what earlier rounds added.

Training adds the rounds' means up, and with them their noise. So round t carries N_t = g_0 z_t + g_1 z_(t-1) + ... with
independent z, where g_0 = 1 and all other weights are negative: the matrix mechanism with C^-1 banded and Toeplitz,
N = C^-1 z (Denisov, McMahan, Rush, Smith, Thakurta 2022; banded inverse square roots: Kalinin, McKenna, Upadhyay,
Lampert 2025). The weights are the first b coefficients of √(1 - x) = 1 - x/2 - x²/8 - x³/16 - ..., rounded towards zero
to multiples of 2^-14, so that clients compute with integers. C, its inverse, has the coefficients c_0 = 1 >= c_k >= 0.

The price is sensitivity: a client whose vector moves by Δ in one round moves C x by Δ ‖c‖, and not by Δ. For a client
in one round of a long run ‖c‖² is 1.33, 1.88 and 2.34 with 2, 8 and 32 bands.
docs/proofs/correlated-gaussian.md has the proofs, for lineages that break, adaptive rounds and seeds that are told.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.errors import ParameterError

Array = NDArray[np.float64]

WEIGHT_BITS = 14
"""Weights are multiples of 2^-WEIGHT_BITS."""

MAX_BANDS = 256
"""Further weights are hardly a multiple of 2^-14 any more, and gain next to nothing."""

MAX_ROUNDS = 2**20
_UNIT = 2.0**-53
_TAPS = re.compile(r"[1-9][0-9]{0,2}:[1-9][0-9]{0,4}(,[1-9][0-9]{0,2}:[1-9][0-9]{0,4})*")


def read_taps(text: str) -> dict[int, int]:
    """Returns the weights in units of 2^-14, by age, of a text such as "1:8118,2:2490,32:1145".

    Raises:
        ParameterError: It is not such a text, ages do not rise, or the weights take away more than was added.
    """
    pairs = [pair.split(":") for pair in text.split(",")] if _TAPS.fullmatch(text) else []
    found = {int(age): int(weight) for age, weight in pairs}
    ages = list(found)
    if not found or len(found) < len(pairs) or ages != sorted(ages) or ages[-1] >= MAX_BANDS:
        raise ParameterError(
            f"Expected taps as in '1:8118,32:1145', with rising ages below {MAX_BANDS}, got {text[:60]!r}."
        )
    if sum(found.values()) >= 1 << WEIGHT_BITS:
        raise ParameterError(f"Expected taps whose weights add up to less than {1 << WEIGHT_BITS}, got {text[:60]!r}.")
    return found


@dataclass(frozen=True)
class Correlation:
    """The weights of earlier rounds' noise in a round, and the participation of clients.

    Attributes:
        bands: b, the number of rounds that a draw of noise is in: its own, and the b - 1 that take it away; 1 for
            independent noise.
        rounds: T, the rounds of the run.
        separation: s, the least distance of two rounds of one client, 1 where it may be in all; None where it takes
            part in one round at most.
        taps: Weights of a few ages in place of √(1 - x): "1:8118,32:1145" takes 8118/2^14 of the last round's z away,
            and 1145/2^14 of that 32 rounds ago. Empty for all ages below `bands`.

    Example:
        >>> eight = Correlation(bands=8, rounds=2500)
        >>> round(eight.sensitivity**2, 2), round(eight.gain, 2)
        (1.88, 11.86)
        >>> round(Correlation(bands=8, rounds=2500, separation=1).gain, 2)  # does not pay
        0.98
    """

    bands: int
    rounds: int
    separation: int | None = None
    taps: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", _validate.integer("rounds", self.rounds, low=1, high=MAX_ROUNDS))
        bands = _validate.integer("bands", self.bands, low=1, high=MAX_BANDS)
        if bands > self.rounds:
            raise ParameterError(
                f"Expected bands of at most rounds={self.rounds}, got bands={bands}: noise is taken away by later "
                "rounds of the same run. Use fewer bands, or a longer run."
            )
        object.__setattr__(self, "bands", bands)
        if self.separation is not None:
            object.__setattr__(self, "separation", _validate.integer("separation", self.separation, low=1))
        if self.taps and max(read_taps(self.taps)) != bands - 1:
            raise ParameterError(f"Expected the last of taps={self.taps[:60]!r} to be of age bands - 1 = {bands - 1}.")

    @cached_property
    def weights(self) -> tuple[int, ...]:
        """g_0, ..., g_(b-1) in units of 2^-14: the first is 2^14, the others are at most zero."""
        if self.taps:
            given = read_taps(self.taps)
            return 1 << WEIGHT_BITS, *(-given.get(age, 0) for age in range(1, self.bands))
        exact, found = 1 << 200, [1 << WEIGHT_BITS]
        # With 200 bits, of which each step loses less than one: nothing near a multiple of 2^-14 is mistaken.
        for k in range(1, self.bands):
            exact = exact * (2 * k - 3) // (2 * k)
            found.append(-((-exact) >> (200 - WEIGHT_BITS)))
        return tuple(found)

    @property
    def factors(self) -> Array:
        """The weights as floats, exactly."""
        return np.array(self.weights, dtype=np.float64) * 2.0**-WEIGHT_BITS

    @cached_property
    def spread(self) -> float:
        """√Σg², rounded up: the standard deviation of a round's noise divided by that of z."""
        return math.sqrt(sum(w * w for w in self.weights)) * 2.0**-WEIGHT_BITS * (1.0 + 4 * _UNIT)

    @cached_property
    def inherited(self) -> float:
        """Σ|g_k| over k >= 1, exactly: the most inherited noise in a message, in units of the largest z."""
        return -sum(self.weights[1:]) * 2.0**-WEIGHT_BITS

    @cached_property
    def coefficients(self) -> Array:
        """The first T coefficients of C: c_0 = 1, c_k = Σ_(j>=1) |g_j| c_(k-j). Each is exact within `_error`."""
        steps = -self.factors[1:][::-1]
        found = np.zeros(self.rounds)
        found[0] = 1.0
        for k in range(1, self.rounds):
            width = min(k, len(steps))
            found[k] = steps[len(steps) - width :] @ found[k - width : k]
        return found

    @property
    def _error(self) -> float:
        """Bound on the relative rounding error of `coefficients`: T nested sums of up to b positive products."""
        return (self.bands + 2) * self.rounds * _UNIT

    @cached_property
    def column_norm(self) -> float:
        """‖c‖, rounded up: the factor of the sensitivity for a client in one round."""
        return math.sqrt(math.fsum(self.coefficients**2)) * (1.0 + self._error + 8 * _UNIT)

    @cached_property
    def sensitivity(self) -> float:
        """The largest norm of C x over all x with ‖x_t‖ <= 1 that the participation allows, rounded up.

        Rounds 0, s, 2s, ... are the worst, with the same x_t in each (docs/proofs/correlated-gaussian.md). The proof
        wants coefficients that do not rise; where rounding made one rise, it counts for those before, too.
        """
        if self.separation is None or self.separation >= self.rounds:
            return self.column_norm
        falling = np.maximum.accumulate(self.coefficients[::-1])[::-1]
        total = falling.copy()
        for start in range(self.separation, self.rounds):
            total[start] += total[start - self.separation]
        return math.sqrt(math.fsum(total**2)) * (1.0 + self._error + (self.rounds + 8) * _UNIT)

    @property
    def participations(self) -> int:
        """The largest number of rounds of a client."""
        return 1 if self.separation is None else -(-self.rounds // self.separation)

    # ------------------------------------------------------------------ what it is worth

    def prefix_variance(self, workload: Array | None = None) -> Array:
        """Returns, for each t, the variance of the summed noise of rounds 0, ..., t, in units of the variance of z.

        Args:
            workload: Weight of a round's mean in the model k rounds later, for k = 0, 1, ...; all 1 if not given
                (plain SGD).
        """
        response = np.ones(self.rounds) if workload is None else np.asarray(workload, dtype=np.float64)[: self.rounds]
        return np.cumsum(np.convolve(self.factors, response)[: self.rounds] ** 2)

    def prefix_error(self, workload: Array | None = None) -> float:
        """Returns √ of the mean of `prefix_variance`, times the sensitivity: the noise of a prefix sum at equal ε.

        In units of Δ/μ of the Gaussian mechanism; comparable between correlations of the same run.
        """
        return math.sqrt(float(np.mean(self.prefix_variance(workload)))) * self.sensitivity

    @property
    def independent(self) -> Correlation:
        """A copy of the run with independent noise (b = 1)."""
        return Correlation(1, self.rounds, self.separation)

    @property
    def gain(self) -> float:
        """Mean variance of prefix sums with independent noise, divided by that with correlated noise, at equal ε.

        A value below 1 is a loss. That is so if clients take part in every round: sensitivities add up faster than
        noise is taken away.
        """
        return (self.independent.prefix_error() / self.prefix_error()) ** 2
