"""What a mechanism must say: all that is particular to one way of turning a coordinate into a few bits.

A mechanism is a frozen dataclass. Nothing outside its own file (and kernels) asks which one it is: the codec, the
aggregator, secure aggregation, simulation, planner, accountant, ledger and auditor ask it the questions below.
To add one, write a file beside this one and name the class in `cpsgd/mechanisms/__init__.py`.

Vectors reach a mechanism clipped to norm D and, if the protocol says so, rotated. A client's *integers* are what it
sends, one per coordinate; `scale` (s) is what one unit of them is worth.
"""

from __future__ import annotations

import dataclasses
import math
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd.codec.formats import Format
from cpsgd.codec.rounding import Grid
from cpsgd.correlation import Correlation
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms.law import Law, Normal, Steps
from cpsgd.mechanisms.sums import Deviation as Deviation
from cpsgd.neighbours import Adjacency
from cpsgd.randomness import Keystream

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol


@dataclass(frozen=True)
class ErrorBound:
    """An upper bound on E‖estimate - mean‖² and the theorem that gives it.

    Example:
        >>> from cpsgd import Protocol
        >>> given = Protocol.rotated_binomial(clients=1000, dim=64, clip_norm=1.0, levels=4, trials=12)
        >>> bound = given.error_bound()
        >>> bound.squared_error > 0, bound.theorem.partition(",")[0]
        (True, 'cpSGD')
    """

    squared_error: float
    theorem: str


@dataclass(frozen=True)
class ExpectedError:
    """E‖estimate - mean‖², the sum of three independent causes.

    Attributes:
        noise: Variance of the noise that was added.
        rounding: Variance of the stochastic rounding.
        clipping: Squared bias: what clipping (to the norm, to the range, to the grid) moved the mean by.

    Example:
        >>> ExpectedError(noise=0.5, rounding=0.25, clipping=0.0).total
        0.75
    """

    noise: float
    rounding: float
    clipping: float

    @property
    def total(self) -> float:
        """The expected squared error."""
        return self.noise + self.rounding + self.clipping


@dataclass(frozen=True)
class FairCoins:
    """Noise that a device's own kernels can draw: the number of heads among so many fair coins."""

    trials: int


@dataclass(frozen=True)
class Rounding:
    """How a device's kernels turn a point g of the grid into an integer.

    g is clipped to ±`limit`. A draw is ⌊(g + offset + u) / 2^F⌋, u uniform on 0, ..., 2^F - 1: one of the two
    neighbouring levels. It is a coin, 0 or 1, where F = 16 and limit <= offset = 2^15; coins may be counted or sampled.

    Attributes:
        limit: The largest |g|.
        offset: What is added to g, at least `limit`.
        fraction_bits: F, at most 16; 0 leaves grid points as they are.
        coins: So many coins are tossed and the integer is the number of heads; None for a single draw.
        rate: Of 2^16: with this probability a coin is tossed, 2 for heads and 0 for tails, otherwise the integer is 1.
            None where every coordinate is included.
    """

    limit: int
    offset: int
    fraction_bits: int
    coins: int | None = None
    rate: int | None = None

    @property
    def largest(self) -> int:
        """The largest integer."""
        draw = (self.limit + self.offset + (1 << self.fraction_bits) - 1) >> self.fraction_bits
        return draw * (self.coins or 1) * (1 if self.rate is None else 2)


@dataclass(frozen=True)
class SumRounding:
    """Noise that comes before the rounding, and is drawn by a device for the sum of all clients' grid points.

    The sum of n points, moved to the middle, gets Gaussian noise of this deviation, and n - 1 numbers uniform on one
    level; then it is rounded to the nearest level, and `centre` is added for every client. That is the law of a sum of
    numbers that are rounded one by one (docs/accounting.md, section 13).

    Attributes:
        deviation: In grid points.
        fraction_bits: F.
        clients: n.
        offset: What `Rounding` added to every grid point.
        centre: The mean of a client's integer whose coordinate is zero.
    """

    deviation: float
    fraction_bits: int
    clients: int
    offset: int
    centre: float


@dataclass(frozen=True)
class RunNoise:
    """What the noise of a run is made of where its rounds are correlated, for whoever simulates its sums.

    A client's number is x + Σ_k g_k z_(t-k) + ξ, before it is rounded: ξ is noise of its own that nobody takes away.

    Attributes:
        correlation: g.
        deviation: σ, the standard deviation of a client's z, in steps.
        own_variance: That of ξ, in squared steps.
        vector_bits: x has 2 to this power of points per step.
        noise_bits: The same for z.
        finest_bits: The same for ξ, and for the whole.
        limit: The largest |x|, in its points.
        window: How many integers a message can hold.
        centre: The mean of a client's integer whose coordinate is zero.
    """

    correlation: Correlation
    deviation: float
    own_variance: float
    vector_bits: int
    noise_bits: int
    finest_bits: int
    limit: int
    window: int
    centre: float

    def rest(self, count: int) -> SumRounding:
        """What the sum of `count` clients' points has beside the noise of lineages: own noise, and the rounding."""
        deviation = math.ldexp(math.sqrt(self.own_variance * count), self.vector_bits)
        return SumRounding(deviation, self.vector_bits, count, self.limit, self.centre)


@dataclass(frozen=True)
class Search:
    """What the planner tells a mechanism that is to name candidates.

    Attributes:
        values: How many values a message may hold.
        honest: Clients whose noise counts.
        variation: The total variation that a client's sampler may have per draw.
        dim: d.
        clip_norm: D.
        rotate: Whether vectors are rotated.
        rough_scale: The scale that a candidate will need for the (ε, δ) asked for, roughly.
        fits: Whether sums of a candidate, at its rough scale, fit the modulus (always, where there is none).
        bits: Bits per coordinate, which may be less than one; None where the values say it all.
    """

    values: int
    honest: int
    variation: float
    dim: int
    clip_norm: float
    rotate: bool
    rough_scale: Callable[[Mechanism], float]
    fits: Callable[[Mechanism], bool]
    bits: float | None = None


class Mechanism(ABC):
    """One way of turning a coordinate into what a client sends."""

    name: ClassVar[str]
    """Its name in protocol files and on the command line."""

    title: ClassVar[str]
    """What it does to a coordinate, in a few words."""

    published: ClassVar[tuple[str, str] | None] = None
    """Name and citation of its authors' own accounting, shown beside ours; None where there is none."""

    sampler_remedy: ClassVar[str] = "add noise"
    """What to do where the resolution of the sampler (`variation`) costs too much of δ."""

    planned: ClassVar[bool] = True
    """Whether the planner is to consider it where no mechanism is named."""

    not_summed: ClassVar[str | None] = None
    """Why clients' integers may not be added up by others (secure aggregation, an all-reduce), and what to use then."""

    caution: ClassVar[str | None] = None
    """What whoever uses it must mind, beyond what holds for all."""

    fewest_values: ClassVar[int] = 3
    """The fewest values of a private message."""

    # ------------------------------------------------------------------ what a coordinate becomes

    @property
    @abstractmethod
    def grid(self) -> Grid | None:
        """The grid that coordinates are put on before they are rounded; None where floats are sent as they are."""

    @property
    @abstractmethod
    def keystream_bytes(self) -> int:
        """Bytes of private randomness per coordinate, rounding and noise together."""

    @abstractmethod
    def kernel(self) -> Any:
        """The kernel for one client's coordinates: a `cpsgd.codec.formats.Kernel`, or `FloatKernel` for floats."""

    def packer(self) -> tuple[Any, int]:
        """The kernel that writes payloads, and its bytes of private randomness per coordinate that is written.

        `kernel` and `keystream_bytes`, unless messages leave coordinates out.
        """
        return self.kernel(), self.keystream_bytes

    # ------------------------------------------------------------------ rounds of a run

    @property
    def correlation(self) -> Correlation | None:
        """How the noise of a run's rounds hangs together; None where rounds are independent.

        With one, all that is said of privacy below is about the whole run: one guarantee pays for all its rounds.
        """
        return None

    def run_noise(self) -> RunNoise | None:
        """What the noise of a run is made of, where its rounds are correlated; None where they are independent."""
        return None

    def continued(self, seeds: Sequence[bytes | None], round: int, dim: int) -> NDArray[np.int64]:
        """The noise of a client's lineage in a round, which its kernel is to add: see `Lineages.noise`.

        Raises:
            ParameterError: Noise is not correlated, or these are no seeds of a lineage.
        """
        raise ParameterError(f"The noise of {self.name} follows from no seeds: leave them out.")

    @property
    def hands_on(self) -> bool:
        """Whether a client may be handed the seeds of another one's noise, which the accounting then allows for."""
        return False

    @property
    def settled_variance(self) -> float:
        """The noise of a client's message in the later rounds of a run, where `noise_variance` is that of its first."""
        return self.noise_variance

    def rotation_round(self, round: int) -> int:
        """The round whose rotation is used in a round.

        Raises:
            ParameterError: There is no such round.
        """
        return round

    def check_messages(self, count: int, clients: int) -> None:
        """Raises `ParameterError` where the accounting covers no round of `count` messages planned for `clients`."""
        return

    def check_honest(self, honest: int, colluding: int, clients: int) -> None:
        """Raises `ConditionError` where the proofs ask more of a round's clients than that one is honest."""
        return

    # ------------------------------------------------------------------ messages and their sums

    @abstractmethod
    def format(self, clip_norm: float, modulus: int | None) -> Format:
        """What a message holds, and how messages are summed."""

    @property
    @abstractmethod
    def values(self) -> int:
        """A client's integers are 0, ..., values - 1; 0 for floats."""

    @property
    @abstractmethod
    def centre(self) -> float:
        """The mean of a client's integer whose coordinate is zero."""

    @property
    @abstractmethod
    def scale(self) -> float:
        """s, what one unit of the integers is worth in the vector's units."""

    @abstractmethod
    def deviations(
        self, *, clients: int, dim: int, clip_norm: float, rotate: bool, mean_norm: float | None = None
    ) -> list[Deviation]:
        """Bounds on the distance of one coordinate of a sum from its centre; each of them holds.

        `mean_norm` bounds the norm of the mean of the vectors, clipped to `clip_norm`.
        """

    # ------------------------------------------------------------------ simulation: rounding and noise apart

    @abstractmethod
    def without_noise(self) -> Mechanism:
        """Rounding to the same range without noise, hence without privacy: what the noise is measured against."""

    def rounding_part(self) -> Mechanism:
        """What each client is simulated by; `sum_noise` is the rest of the sum.

        Rounding without noise; the mechanism itself, where the rounding is the noise.
        """
        return self.without_noise()

    @property
    @abstractmethod
    def is_noisy(self) -> bool:
        """Whether there is noise, hence privacy."""

    @abstractmethod
    def sum_noise(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64] | NDArray[np.float64]:
        """What the noise of `count` clients adds to their sum, drawn in one go."""

    def sum_variation(self, count: int) -> float:
        """An upper bound on the total variation of a coordinate of `sum_noise` from what `law` says of the sum.

        The accounting counts `count` times `variation`. Where this is more, a release takes `clients_noise`.
        """
        return 0.0

    def clients_noise(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.int64] | NDArray[np.float64]:
        """What `sum_noise` draws, by the clients' own sampler, once for each of them."""
        return self.sum_noise(count, dim, keystream)

    @abstractmethod
    def device_rounding(self) -> Rounding | None:
        """What `rounding_part` does, for a device's own kernels; None where floats are sent as they are."""

    def device_noise(self, count: int) -> FairCoins | Normal | SumRounding | None:
        """What `sum_noise` draws as a law that a device draws by itself; None where `sum_noise` is to draw it."""
        return None

    # ------------------------------------------------------------------ error

    @property
    @abstractmethod
    def noise_variance(self) -> float:
        """Variance of one client's noise, in squared integers: what is there whatever the coordinate is."""

    @property
    @abstractmethod
    def largest_rounding_variance(self) -> float:
        """The largest variance of one coordinate's rounding, in squared integers: what is there beyond the noise."""

    def rounding_variance(self, points: NDArray[np.float32]) -> float:
        """The variance of rounding, added up over a vector of grid points within the limit, in squared integers."""
        assert self.grid is not None  # floats are not rounded
        return self.grid.fraction_variance(points)

    @abstractmethod
    def predicted_error(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ExpectedError:
        """The expected squared error of the mean over vectors of norm `clip_norm`, before any is seen."""

    def error_bound(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ErrorBound:
        """The published bound on the expected squared error of the mean, with its theorem.

        Raises:
            ConditionError: There is none, or it does not cover these parameters.
        """
        raise ConditionError(f"There is no published error bound for {self.name}; use expected_squared_error.")

    # ------------------------------------------------------------------ privacy

    @abstractmethod
    def law(self, honest: int) -> Law | Normal | Steps:
        """The law of the noise in one coordinate of a sum, from `honest` clients; of the sum, where rounding is noise.

        Raises:
            ConditionError: There is no noise.
        """

    levels: int
    """k: neighbours' integers differ by at most k - 1 before the noise; 0 for floats."""

    @abstractmethod
    def sensitivity(
        self, *, dim: int, clip_norm: float, adjacency: Adjacency, replace_one_distance: float | None = None
    ) -> float:
        """S, the largest Euclidean distance of two neighbours in units of the law, rounded up.

        `replace_one_distance` is a bound on the distance of two clients' vectors that is stated beside D, if any. What
        the codec's resolution adds to it (`cpsgd.codec.clip.apart`) is for the mechanism to count.
        """

    @abstractmethod
    def reach(self, adjacency: Adjacency) -> float:
        """The largest distance of two neighbours in one coordinate, in units of the law."""

    @property
    @abstractmethod
    def variation(self) -> float:
        """An upper bound on the total variation of one draw of noise from its law; 0 where the sampler is exact."""

    def likelihood_slack(self, honest: int) -> float:
        """λ: up to `variation`, sums have e^±λ times the probabilities of what `law` speaks of, in each coordinate.

        0 where the law is that of the sums.
        """
        return 0.0

    def published_epsilon(self, protocol: Protocol, delta: float, adjacency: Adjacency, honest: int) -> float:
        """ε by its authors' own accounting (see `published`), for comparison.

        Raises:
            ConditionError: A condition of their theorem fails.
        """
        raise ConditionError(f"There is no published accounting for {self.name}.")

    # ------------------------------------------------------------------ planning

    @classmethod
    @abstractmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Mechanisms worth certifying that fit the values, at any scale: the planner finds the scale."""

    @abstractmethod
    def with_scale(self, scale: float) -> Self:
        """The same with another scale. A larger one means more noise in the vector's units, and more privacy."""

    @abstractmethod
    def useful_scales(self, *, dim: int, clip_norm: float, rotate: bool) -> tuple[float, float]:
        """The scales between which clipping and noise are weighed: below too much is clipped, above nothing."""

    @abstractmethod
    def quieter(self, factor: float) -> Self | None:
        """The same with about `factor` < 1 of the noise's variance, and less in any case; None if there is none."""

    # ------------------------------------------------------------------ as data

    @classmethod
    @abstractmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Parameters that are taken where a person names none."""

    @abstractmethod
    def describe(self) -> str:
        """Its parameters in a line."""

    def to_fields(self, clip_norm: float) -> dict[str, Any]:
        """Its part of a protocol file, as plain JSON values."""
        return {"mechanism": self.name, **asdict(self)}  # type: ignore[call-overload]  # every one is a dataclass

    @classmethod
    def of_fields(cls, fields: dict[str, Any], clip_norm: float) -> Self:
        """The mechanism that `to_fields` wrote, its name left out.

        Raises:
            ParameterError: A field is unknown, missing or out of range.
        """
        parameters = dataclasses.fields(cls)  # type: ignore[arg-type]  # every one is a dataclass
        known = sorted(parameter.name for parameter in parameters)
        unknown = sorted(str(name) for name in fields.keys() - set(known))
        if unknown:
            raise ParameterError(
                f"Unknown protocol fields {reprlib.repr(unknown)}; "
                f"beside those of every protocol, {cls.name} has {known}."
            )
        needed = {parameter.name for parameter in parameters if parameter.default is dataclasses.MISSING}
        missing = sorted(needed - fields.keys())
        if missing:
            raise ParameterError(f"Missing protocol fields {missing}.")
        return cls(**fields)
