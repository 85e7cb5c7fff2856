"""Gaussian noise that later rounds take away again, before rounding: accuracy that adds up over a run.

A client belongs to a lineage, one client per round. It adds Σ_k g_k z_(t-k) to its vector: z_t is expanded from a seed
that it draws, the others from its predecessors' seeds (`Correlation` has the weights). It adds a little noise of its
own, which nobody else knows, and rounds to the nearest integer. A client without seeds begins a lineage, which is
always safe: only accuracy is lost by noise that nobody takes away.

Everything that is proved is about the whole run of `run_length` rounds (docs/proofs/correlated-gaussian.md): `law` and
`sensitivity` are such that one guarantee of the Gaussian mechanism is that of all the run's rounds together, for the
participation that `separation` states. The noise's `variation` and `slack` count all its rounds.

The own noise is what makes the rounding harmless: given everybody's z, and whoever tells theirs, it hides what was
rounded, as in `rounded_gaussian`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from cpsgd import _validate
from cpsgd.codec.clip import Grid
from cpsgd.correlated.draws import (
    FINER_BITS,
    OWN_BITS,
    OWN_DEVIATION,
    LineageKernel,
    Lineages,
    farthest_point,
    own_shifts,
)
from cpsgd.correlated.run_gaussian import ROUNDING, RunGaussian, RunNoise, WindowRoom, centre_of, resolution
from cpsgd.correlated.run_memory import MORE, RunMemory
from cpsgd.correlated.weights import WEIGHT_BITS
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.fine_gaussian import CELL
from cpsgd.mechanisms.law import RoundedNormal
from cpsgd.mechanisms.rounded_gaussian import MOST_SIGMA, uniformity, usual_fields

LEAST_SIGMA = 4.0
# The finer draws of a client's own noise add so much to its variance, at most.
_FINER = 1.0 + 2.0 ** (1 - 2 * FINER_BITS)
# The deviation of the own noise, in cells of its grid.
_OWN_RATIO = math.ldexp(OWN_DEVIATION, OWN_BITS) / CELL


def coarse_bits(deviation: float) -> int:
    """Returns G such that a grid of 2^G points per step has 2048 to 4096 points per standard deviation."""
    return math.ceil(math.log2(fine_gaussian.LEAST_RATIO * CELL / deviation))


@dataclass(frozen=True)
class CorrelatedNoise(RunNoise):
    """The noise of a lineage and of each client's own; what is proved is about a whole run."""

    of: CorrelatedGaussian

    @property
    def variance(self) -> float:
        """Variance in a lineage's first round: z and the client's own noise."""
        return self.of.noise_deviation**2 + self.own_variance

    @property
    def settled_variance(self) -> float:
        """Variance after a lineage has lasted for b rounds, which is the largest."""
        return (self.of.noise_deviation * self.of.correlation.spread) ** 2 + self.own_variance

    @property
    def taken_away(self) -> float:
        """Variance per round that later rounds take away, in squared steps."""
        return self.of.noise_deviation**2

    @property
    def left(self) -> float:
        """Variance per round that no later round takes away, in squared steps: own noise and rounding."""
        return self.own_variance + self.of.largest_rounding_variance

    @property
    def own_variance(self) -> float:
        """Variance, in squared steps, of a client's own noise, which no later round takes away."""
        return sum(math.ldexp(OWN_DEVIATION, shift - self.of.finest_bits + OWN_BITS) ** 2 for shift in self.of.shifts)

    @property
    def counted_variance(self) -> float:
        """The variance of the continuous Gaussian, in squared steps, that z on its grid is a rounding of."""
        return self.of.noise_deviation**2 - math.ldexp(fine_gaussian.GRID_VARIANCE, -2 * self.of.noise_bits)

    def law(self, honest: int) -> RoundedNormal:
        """Returns N(0, n σ²), n the number of honest clients whose z stays secret."""
        exposed = self.of.exposed
        if honest <= exposed:
            raise ConditionError(
                f"Of {honest} honest clients the noise of {exposed} may be told by those who hold their seeds: there "
                "is no privacy. Use more clients, fewer bands, or fewer untrusted_holders."
            )
        deviation = math.sqrt((honest - exposed) * self.counted_variance) / ROUNDING
        return RoundedNormal(deviation, math.sqrt(self.variance), self.of.lowest, "correlated-gaussian")

    @property
    def variation(self) -> float:
        """Total variation over all rounds, from cut-off tails, samplers and grids."""
        # A message that arrives may use b draws of z, of which b - 1 came with messages that did not.
        drawn = self.of.bands * (resolution(self.of.noise_ratio) + fine_gaussian.GRID_VARIATION)
        own = len(self.of.shifts) * resolution(_OWN_RATIO) + fine_gaussian.GRID_VARIATION
        return MORE * self.of.run_length * (self.cut + drawn + own) * ROUNDING

    def slack(self, honest: int) -> float:
        """Returns λ over all rounds of the run: of the own noise, given all z; and of z on its grid, given all sums."""
        # Other rounds of the run may have half as many messages, or twice.
        counts = {max(2, -(-honest // MORE)), honest, MORE * honest}
        excess = 2.0 * max(uniformity(OWN_DEVIATION**2, count) for count in counts)
        if excess >= 1.0:
            return math.inf
        weights = 1.0 + self.of.correlation.inherited
        own = math.ldexp(OWN_DEVIATION, self.of.noise_bits) ** 2 / weights**2
        z = math.ldexp(self.counted_variance, 2 * self.of.noise_bits)
        uneven = 2.2 * math.exp(-2.0 * math.pi**2 * (own * z / (own + z)) * (1.0 - 1e-12))
        every = 2.0 * self.of.bands * MORE * honest * uneven
        return self.of.run_length * (-math.log1p(-excess) + every) * (1.0 + 1e-12)

    @property
    def cut(self) -> float:
        """Upper bound on the probability that a message leaves the window, whatever its client was handed."""
        return self.needs.cut(self.of.window)

    @property
    def needs(self) -> WindowRoom:
        """The room that a message needs for the vector, earlier rounds' noise and fresh noise."""
        of = self.of
        inherited = of.correlation.inherited * math.ldexp(farthest_point(of.noise_ratio), -of.noise_bits)
        fresh = math.sqrt(of.noise_deviation**2 + OWN_DEVIATION**2 * _FINER)
        return WindowRoom(of.farthest_point + inherited, fresh)

    @property
    def ripple(self) -> float:
        """Relative size of the periodic term that rounding adds to a moment generating function."""
        return 2.1 * math.exp(-2.0 * math.pi**2 * OWN_DEVIATION**2)


@dataclass(frozen=True, kw_only=True)
class CorrelatedGaussian(RunGaussian):
    """Gaussian noise that is correlated over the rounds of a run, and then rounding to the nearest integer.

    Attributes:
        noise_deviation: σ, standard deviation of the noise z that each client draws, in steps; from 4 to 2047 where
            it is correlated.
        bands: Number of rounds that a draw of noise is in: its own, and those after it that take it away again.
        run_length: Rounds of the run that the noise is correlated over; no others may be run with the protocol.
        separation: The least distance of two rounds of one client, 1 where it may be in all; None where it takes part
            in one round of the run at most.
        untrusted_holders: Clients per round who may tell the seeds that were handed to them; None where clients keep
            their seeds to themselves, and none may be handed on.
    """

    name = "correlated-gaussian"
    title = "Gaussian noise that later rounds take away, before rounding"
    least_deviation = LEAST_SIGMA
    step_deviations: ClassVar[tuple[float, float]] = (LEAST_SIGMA, MOST_SIGMA)
    caution: ClassVar[str | None] = (
        "its guarantee is that of a whole run, which is charged as one; means of single rounds are no more accurate"
    )

    untrusted_holders: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.untrusted_holders is not None:
            holders = _validate.integer("untrusted_holders", self.untrusted_holders, low=0)
            object.__setattr__(self, "untrusted_holders", holders)
        if self.noise_deviation < self.least_deviation:
            raise ParameterError(
                f"Expected noise_deviation in [{self.least_deviation:g}, {MOST_SIGMA:g}] steps where noise is "
                f"correlated, got noise_deviation={self.noise_deviation!r}; use a smaller step: own noise of "
                f"{OWN_DEVIATION:g} steps per round is not taken away again."
            )

    # ------------------------------------------------------------------ the run

    @cached_property
    def lineages(self) -> Lineages:
        """The noise of a client that follows from seeds."""
        return Lineages(self.correlation, self.noise_ratio)

    @cached_property
    def memory(self) -> RunMemory:  # type: ignore[override]
        """The run: its rounds, seeds and participation."""
        return RunMemory(self)

    # ------------------------------------------------------------------ what a coordinate becomes

    @cached_property
    def fraction_bits(self) -> int:
        """Fraction bits of the vector's grid, which the client's own noise shares."""
        return OWN_BITS

    @cached_property
    def noise_bits(self) -> int:
        """Fraction bits G of the noise's grid: z has 2^G points per step."""
        return coarse_bits(self.noise_deviation)

    @property
    def noise_ratio(self) -> float:
        """σ in cells of z's grid."""
        return math.ldexp(self.noise_deviation, self.noise_bits) / CELL

    @property
    def finest_bits(self) -> int:
        """Fraction bits F of the finest grid: everything is a multiple of 2^-F steps."""
        return self.noise_bits + WEIGHT_BITS

    @property
    def centre(self) -> float:
        """The middle of the window, where halves are rounded up."""
        return centre_of(self.window, self.finest_bits)

    @property
    def grid(self) -> Grid:
        """The vector's grid, with 2^`fraction_bits` points per step."""
        limit = max(1.0, math.floor(math.ldexp(self._steps, self.fraction_bits)))
        return Grid(math.ldexp(1.0, self.fraction_bits) / self.step, limit, self.fraction_bits)

    @property
    def keystream_bytes(self) -> int:
        """Bytes of the own noise, and of a lineage that begins."""
        return fine_gaussian.DRAW_BYTES * (len(self.shifts) + 1)

    def kernel(self) -> Any:
        """Returns the kernel that adds noise and rounds."""
        limit = int(self.grid.limit)
        return LineageKernel(self.lineages, limit=limit, window=self.window, fraction_bits=self.finest_bits)

    @property
    def shifts(self) -> tuple[int, ...]:
        """Left shifts of the draws of a client's own noise, coarsest first."""
        return own_shifts(self.finest_bits)

    # ------------------------------------------------------------------ privacy

    @property
    def noise(self) -> CorrelatedNoise:
        """The parts of the noise, for simulations."""
        return CorrelatedNoise(self)

    @property
    def exposed(self) -> int:
        """Honest clients per round whose z may be known: untrusted clients that hold its seed may reveal it."""
        return (self.bands - 1) * (self.untrusted_holders or 0)

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns a σ of 64 in 12 bits, eight bands, and a run of a thousand rounds."""
        noise = usual_fields(64.0, 1 << 12, 600.0, clients=clients, dim=dim, clip_norm=clip_norm, rotate=rotate)
        return {**noise, "bands": 8, "run_length": 1000}
