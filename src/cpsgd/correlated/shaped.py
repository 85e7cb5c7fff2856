"""Gaussian noise that a silo takes away again in later rounds, together with the error of its rounding.

A silo that stays for the run keeps w of the last b - 1 rounds. In round t it computes

    a   = x + z + Σ_(j>=1) g_j w_(t-j),
    Y   = the integer nearest to a, which it sends,
    w_t = Y - x - Σ_(j>=1) g_j w_(t-j).

So w = z + e with the rounding error e, and Y = x + Σ_j g_j w_(t-j): the weights that take noise away take rounding
errors away, too. No other noise is needed to hide the rounding. A few steps of noise are enough, and five or six bits
hold a message.

Everything that is proved is about the whole run (docs/proofs/shaped-rounding.md): silos may drop out, lose their state
and begin anew. A silo's w is secret, and depends on its data: it is never handed on.

x, z, w and the correction are integers on one grid of 2^-F steps, with F near 54, which z fills. The correction
is rounded to that grid; what this moves is a total variation that δ pays for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.clip import Grid
from cpsgd.codec.rounding import PythonKernel
from cpsgd.correlated.draws import Points, draw, farthest_point, wide_parts
from cpsgd.correlated.run_gaussian import ROUNDING, RunGaussian, RunNoise, WindowRoom, centre_of, resolution
from cpsgd.correlated.run_memory import MORE, RunMemory
from cpsgd.correlated.shaped_sums import SimulatedSilos
from cpsgd.correlated.uniform_fractions import excess
from cpsgd.correlated.weights import WEIGHT_BITS, Correlation
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import DRAW_BYTES
from cpsgd.mechanisms.law import RoundedNormal
from cpsgd.mechanisms.rounded_gaussian import usual_fields
from cpsgd.neighbours import Participation

LEAST_SIGMA, MOST_SIGMA = 1.0, 64.0
# No draw of z is further out than this many deviations.
_FARTHEST = 15.5
# The vector's grid has 2^23 points either way, for a range of as many steps or more: at most 16 bits per step.
_POINT_BITS, _LEAST_STEPS = 23, 128.0
_HALF_WORD = 32


@dataclass(eq=False)
class SiloState:
    """The w of a silo's last rounds, which it takes away in later rounds of a run. Secret, and of this silo alone.

    Attributes:
        rows: w by round, in points of the finest grid.
        keep: Called when a message was made, before it leaves, with this state; it writes the state down.
    """

    rows: dict[int, Points] = field(default_factory=dict, repr=False)
    keep: Callable[[SiloState], None] | None = field(default=None, repr=False)
    _open: tuple[int, Points] | None = field(default=None, repr=False)

    def begin(self, round: int, dim: int, correlation: Correlation) -> Points:
        """Returns the correction Σ_(j>=1) g_j w_(t-j); the kernel replaces it, in place, by the round's w.

        Raises:
            ParameterError: A message of this round, or of a later one, was made with this state.
        """
        if self.rows and round <= max(self.rows):
            raise ParameterError(
                f"A message of round {max(self.rows)} was made with this state, and this would be round {round}: a "
                "silo takes its noise away once in a round, in rising rounds."
            )
        past = {round - number: row for number, row in self.rows.items() if round - number < correlation.bands}
        if any(row.shape != (dim,) for row in past.values()):
            raise ParameterError(f"This state is not one of {dim} coordinates; begin anew with memory.init().")
        found = correction(past, correlation.weights, dim)
        self._open = round, found
        return found

    def commit(self, round: int, bands: int) -> None:
        """Notes that the message of a round was made: its w is taken away in later rounds."""
        if self._open is None or self._open[0] != round:
            raise ParameterError(f"No message of round {round} was begun with this state.")
        rows = {number: row for number, row in self.rows.items() if number > round + 1 - bands}
        self.rows, self._open = {**rows, round: self._open[1]}, None
        if self.keep is not None:
            self.keep(self)


def correction(past: dict[int, Points], weights: tuple[int, ...], dim: int) -> Points:
    """Returns the correction Σ_j g_j w_(t-j), rounded to the grid. `past` has w by age; weights are in units of 2^-14.

    Words are multiplied in halves: a product with a weight has 14 bits more than int64 holds.
    """
    high, low = np.zeros(dim, dtype=np.int64), np.zeros(dim, dtype=np.int64)
    for age, row in past.items():
        high += weights[age] * (row >> _HALF_WORD)
        low += weights[age] * (row & ((1 << _HALF_WORD) - 1))
    return (high << (_HALF_WORD - WEIGHT_BITS)) + ((low + (1 << (WEIGHT_BITS - 1))) >> WEIGHT_BITS)


class SiloKernel(PythonKernel):
    """Adds noise and a correction to grid points, rounds, and writes w in the correction's place.

    Without a correction a silo begins anew, and keeps nothing.
    """

    def __init__(self, mechanism: ShapedGaussian, taken: Points | None = None) -> None:
        """Fixes the parameters; `taken` is the correction of the coordinates that will be asked for."""
        self._mechanism, self._taken = mechanism, taken

    def after(self, taken: Points) -> SiloKernel:
        """Returns the kernel with this correction, which it replaces by w."""
        return SiloKernel(self._mechanism, taken)

    def values(self, grid: NDArray[np.float32], keystream: NDArray[np.uint8], values: NDArray[np.uint32]) -> None:
        """Writes grid, correction and noise as integers into `values`, and replaces the correction."""
        of = self._mechanism
        limit, width = int(of.grid.limit), DRAW_BYTES * grid.size
        base = np.rint(np.clip(grid, -limit, limit)).astype(np.int64) << (of.finest_bits - of.fraction_bits)
        if self._taken is not None:
            base += self._taken
        points = base + (of.window << (of.finest_bits - 1))
        for number, (ratio, shift) in enumerate(of.draws):
            points += draw(ratio, keystream[number * width :], grid.size) << shift
        found = np.clip(points >> of.finest_bits, 0, of.window - 1)
        values[:] = found
        if self._taken is not None:
            self._taken[:] = (found << of.finest_bits) - ((of.window - 1) << (of.finest_bits - 1)) - base


@dataclass(frozen=True)
class SiloMemory(RunMemory):
    """The memory of a run whose silos keep their noise and rounding errors, to subtract them in later rounds."""

    of: ShapedGaussian  # type: ignore[assignment]
    keeps_rows = True
    echo = None

    @property
    def hands_on(self) -> bool:  # type: ignore[override]
        """False: w depends on the silo's data."""
        return False

    def init(self) -> SiloState:  # type: ignore[override]
        """Returns the empty state of a silo that starts, or starts again."""
        return SiloState()

    def update(self, state: SiloState) -> SiloState:  # type: ignore[override]
        """Returns the state unchanged: encoding a message changes it."""
        return state

    def expanded(self, state: SiloState, round: int, dim: int) -> SiloState:  # type: ignore[override]
        """Returns the state unchanged: nothing is worth computing in advance."""
        return state

    def inherited(self, seeds: Any, round: int, dim: int) -> Points | None:
        """Returns the correction from a silo's state for a round; None without a state, to start again.

        Raises:
            ParameterError: It is no such state, or was used in this round.
        """
        self.rotation_round(round)
        if seeds is None:
            return None
        if not isinstance(seeds, SiloState):
            raise ParameterError(
                "A silo with shaped rounding has a state of its own, memory.init(), and no seeds. For clients that "
                "keep seeds plan with mechanism='correlated-gaussian'."
            )
        return seeds.begin(round, dim, self.of.correlation)

    def encoded(self, seeds: Any, round: int) -> None:
        """Notes that the message of a round was made."""
        if seeds is not None:
            seeds.commit(round, self.bands)

    def simulated(self, seed: int | None, *, restart_every: int | None = None) -> SimulatedSilos:  # type: ignore[override]
        """Returns the states of a run's silos, whose messages are simulated one by one.

        Raises:
            ParameterError: `restart_every` is given: silos with shaped rounding cannot start anew within a run.
        """
        if restart_every is not None:
            raise ParameterError(
                "Silos with shaped rounding do not start anew within a run: leave out rescale_every, or name "
                'mechanism="correlated-gaussian".'
            )
        return SimulatedSilos(self.of)

    def check_honest(self, honest: int, colluding: int, clients: int) -> None:
        """Raises `ConditionError` if fewer than half of the silos, or fewer than two, are honest and arrived."""
        super().check_honest(honest, colluding, clients)
        if honest < 2:
            raise ConditionError("With shaped rounding a sum needs two honest silos or more.")

    def check_steady(self, rounds: int, dropout: float, participation: Participation) -> None:
        """Raises `ParameterError` for more rounds than the run has, for dropouts, and where others come each round."""
        super().check_steady(rounds, dropout, participation)
        if participation.scheme != "every":
            raise ParameterError(
                f"participation={str(participation)!r}: with shaped rounding the same silos take part in every round. "
                "Use participation 'every'."
            )


@dataclass(frozen=True)
class ShapedNoise(RunNoise):
    """A silo's noise z and its rounding errors, all of which later rounds take away."""

    of: ShapedGaussian

    @property
    def variance(self) -> float:
        """Variance in a silo's first round: z and the rounding."""
        return self.of.noise_deviation**2 + 1.0 / 12.0

    @property
    def settled_variance(self) -> float:
        """Variance after b rounds: the largest."""
        return self.variance * self.of.correlation.spread**2

    @property
    def taken_away(self) -> float:
        """Variance per round that later rounds take away, in squared steps: all of it."""
        return self.variance

    @property
    def left(self) -> float:
        """Variance per round that no later round takes away: zero."""
        return 0.0

    @property
    def counted_variance(self) -> float:
        """The variance of the continuous Gaussian, in squared steps, that z on its grid is a rounding of."""
        return self.of.noise_deviation**2 - math.ldexp(fine_gaussian.GRID_VARIANCE, -2 * self.of.finest_bits)

    def law(self, honest: int) -> RoundedNormal:
        """Returns N(0, n σ²), n the number of honest silos."""
        if honest < 1:
            raise ConditionError("No honest silo's noise is in the sum: there is no privacy.")
        deviation = math.sqrt(honest * self.counted_variance) / ROUNDING
        return RoundedNormal(deviation, math.sqrt(self.variance), self.of.lowest, self.of.name)

    @property
    def variation(self) -> float:
        """Total variation over all rounds, from cut-off tails, samplers and grids.

        Rounding of the correction comes on top (`state_variation`).
        """
        drawn = sum(resolution(ratio) for ratio, _ in self.of.draws)
        return MORE * self.of.run_length * (self.cut + drawn + fine_gaussian.GRID_VARIATION) * ROUNDING

    def state_variation(self, honest: int, dim: int) -> float:
        """Returns the total variation, over all messages of the run, that rounding corrections to the grid causes.

        A message's mean moves by at most Γ 2^-(F+1), Γ = Σc. The relative entropies of all messages add up.
        """
        of = self.of
        messages = MORE * honest * of.run_length * dim
        spread = math.fsum(of.correlation.coefficients) * math.sqrt(messages) * (1.0 + 1e-9)
        return math.ldexp(spread, -of.finest_bits) / (4.0 * math.sqrt(self.counted_variance)) * (1.0 + 1e-9)

    def slack(self, honest: int) -> float:
        """Returns infinity: only `run_slack`, which knows how many silos may drop out, gives a bound."""
        return math.inf

    def run_slack(self, honest: int, silos: int) -> float:
        """Returns λ of the whole run per coordinate: given all sums, fractional parts are uniform within 1 ± τ."""
        found = excess(self.counted_variance, self.of.correlation, honest=honest, silos=silos)
        return -math.log1p(-found) * (1.0 + 1e-12) if found < 1.0 else math.inf

    @property
    def cut(self) -> float:
        """Upper bound on the probability that a message leaves the window."""
        return self.needs.cut(self.of.window)

    @property
    def needs(self) -> WindowRoom:
        """The room for the vector and rounding errors, and for the noise of this and earlier rounds."""
        of = self.of
        taken = of.farthest_point + 0.5 * (1.0 + of.correlation.inherited) + 2.0**-20
        return WindowRoom(taken, of.noise_deviation * of.correlation.spread)

    @property
    def ripple(self) -> float:
        """The rounding's periodic part in a moment generating function: errors of b rounds, each uniform within it."""
        return 2.1 * self.of.bands * math.exp(-2.0 * math.pi**2 * self.of.noise_deviation**2)


@dataclass(frozen=True, kw_only=True)
class ShapedGaussian(RunGaussian):
    """Gaussian noise and rounding errors that later rounds of the same silo take away, for silos that stay.

    Attributes:
        noise_deviation: σ, standard deviation of the noise z that each silo draws in a round, in steps; from 1 to 64.
    """

    name = "shaped-gaussian"
    title = "Gaussian noise and rounding that later rounds take away, for silos that stay"
    least_deviation = LEAST_SIGMA
    step_deviations: ClassVar[tuple[float, float]] = (LEAST_SIGMA, MOST_SIGMA)
    untrusted_holders: ClassVar[int | None] = None
    caution: ClassVar[str | None] = (
        "its guarantee is that of a whole run, which is charged as one; silos keep a secret state from round to round"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not LEAST_SIGMA <= self.noise_deviation <= MOST_SIGMA:
            raise ParameterError(
                f"Expected noise_deviation in [{LEAST_SIGMA:g}, {MOST_SIGMA:g}] steps where rounding is shaped, got "
                f"noise_deviation={self.noise_deviation!r}: with less, rounding could be told from noise, and more is "
                "of no use. Change the step instead."
            )

    # ------------------------------------------------------------------ the run

    @cached_property
    def memory(self) -> SiloMemory:  # type: ignore[override]
        """The run: its rounds and states."""
        return SiloMemory(self)

    # ------------------------------------------------------------------ what a coordinate becomes

    @cached_property
    def fraction_bits(self) -> int:
        """Fraction bits of the vector's grid."""
        return _POINT_BITS - math.ceil(math.log2(max(_LEAST_STEPS, self._steps)))

    @property
    def centre(self) -> float:
        """The middle of the window, where halves are rounded up."""
        return centre_of(self.window, self.finest_bits)

    @cached_property
    def finest_bits(self) -> int:
        """F: everything is a multiple of 2^-F steps, and the largest number that occurs is below 2^62 of them."""
        largest = self._steps + 2.0 * (_FARTHEST * self.noise_deviation + 1.0) + 0.5 * self.window + 2.0
        return 62 - math.ceil(math.log2(largest))

    @cached_property
    def draws(self) -> tuple[tuple[float, int], ...]:
        """The draws that make z, as ratios and left shifts: together a discrete Gaussian on the finest grid."""
        return tuple(wide_parts(math.ldexp(self.noise_deviation, self.finest_bits)))

    @property
    def farthest_draw(self) -> int:
        """The largest |z| in points."""
        return sum(farthest_point(ratio) << shift for ratio, shift in self.draws)

    @property
    def grid(self) -> Grid:
        """2^16 points per step for the vector, or fewer where its range is wide."""
        limit = max(1.0, math.floor(math.ldexp(self._steps, self.fraction_bits)))
        return Grid(math.ldexp(1.0, self.fraction_bits) / self.step, limit, self.fraction_bits)

    @property
    def keystream_bytes(self) -> int:
        """Bytes of a round's z."""
        return DRAW_BYTES * len(self.draws)

    def kernel(self) -> Any:
        """Returns the kernel that adds noise and rounds."""
        return SiloKernel(self)

    @property
    def largest_rounding_variance(self) -> float:
        """Zero: the rounding is part of the noise that is taken away."""
        return 0.0

    def rounding_variance(self, points: NDArray[np.float32]) -> float:
        """Returns zero: rounding is part of the noise that is taken away."""
        return 0.0

    # ------------------------------------------------------------------ privacy

    @property
    def noise(self) -> ShapedNoise:
        """The noise of a silo."""
        return ShapedNoise(self)

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns a σ of 3 in 6 bits, eight bands, and a run of a hundred rounds."""
        noise = usual_fields(3.0, 1 << 6, 1.0, clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)
        return {**noise, "bands": 8, "run_length": 100}
