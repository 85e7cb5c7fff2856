"""What error a round is expected to have: the paper's bounds, and the exact expectation for given vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd import _validate
from cpsgd.codec import clip, pipeline, quantize, rotate, wire
from cpsgd.errors import ConditionError, EmptyError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

# Coordinates worked on at a time, so that wide temporaries stay in the cache.
_BLOCK = 1 << 16


@dataclass(frozen=True)
class ErrorBound:
    """An upper bound on E‖estimate - mean‖² and the theorem that gives it."""

    squared_error: float
    theorem: str


@dataclass(frozen=True)
class ExpectedError:
    """E‖estimate - mean‖², the sum of three independent causes.

    Attributes:
        noise: Variance of the noise that was added.
        rounding: Variance of the stochastic rounding.
        clipping: Squared bias: what clipping (to the norm, to the range, to the grid) moved the mean by.
    """

    noise: float
    rounding: float
    clipping: float

    @property
    def total(self) -> float:
        """The expected squared error."""
        return self.noise + self.rounding + self.clipping


def paper_bound(protocol: Protocol) -> ErrorBound:
    """The paper's bound on the expected squared error of the mean of n vectors of norm at most D.

    Raises:
        ConditionError: The theorem does not cover the protocol's range X^max.
    """
    clients, dim, clip_norm = protocol.clients, protocol.dim, protocol.clip_norm
    if protocol.sigma is not None:
        return ErrorBound(dim * protocol.sigma**2 / clients, "cpSGD, Theorem 2 (Gaussian protocol): d σ²/n")
    # With X^max for D, the bound of Theorem 3: (d X²/(n (k-1)²)) (1 + 4 m p (1-p)).
    variance = 4.0 * protocol.trials * protocol.p * (1.0 - protocol.p)
    spread = dim * protocol.coordinate_range**2 / (clients * (protocol.levels - 1) ** 2) * (1.0 + variance)
    # What the codec itself may move a vector by: the margin of clipping and float32 on the way, and the grid.
    grid_step = protocol.scale * 2.0 ** -quantize.fraction_bits(protocol.levels)
    moved = clip_norm * 2.0**-18 + math.sqrt(dim) * grid_step
    if not protocol.rotate:
        if protocol.coordinate_range < clip_norm:
            raise ConditionError(
                f"Theorem 3 needs coordinate_range >= clip_norm={clip_norm:g} (no coordinate is clipped), "
                f"got {protocol.coordinate_range:g}. Widen the range, rotate, or use expected_squared_error."
            )
        return ErrorBound(spread + moved**2, "cpSGD, Theorem 3 (π_sk(Bin)): d X²/(n(k-1)²) + (d/n) 4mp(1-p) X²/(k-1)²")
    # X^max = 2 D √(log(2nd/δ)/d) solved for δ, the probability that the rotation leaves some coordinate outside.
    log_delta = math.log(2.0 * clients * dim) - dim * protocol.coordinate_range**2 / (4.0 * clip_norm**2)
    if log_delta >= 0.0:
        smallest = 2.0 * clip_norm * math.sqrt(math.log(2.0 * clients * dim) / dim)
        raise ConditionError(
            f"Theorem 4 needs coordinate_range > {smallest:g} (X^max = 2 D √(log(2nd/δ)/d) for a δ < 1), "
            f"got {protocol.coordinate_range:g}. Widen the range or use expected_squared_error."
        )
    # The theorem prints 2 log(2nd/δ) D² where Theorem 3 gives d X² = 4 log(2nd/δ) D² for its X^max, and 4 D² δ² for the
    # bad rotations. Here: Theorem 3's terms, and D² with probability δ, since clipping moves no vector by more than
    # itself.
    bias = math.exp(log_delta) * (clip_norm + moved) ** 2
    return ErrorBound(
        spread + moved**2 + bias,
        "cpSGD, Theorem 4 (Rot(π_sk(Bin))), constants corrected: d X²(1 + 4mp(1-p))/(n(k-1)²) + D² δ",
    )


def expected(protocol: Protocol, vectors: Iterable[ArrayLike], round: int) -> ExpectedError:
    """The exact expected squared error of the mean of these vectors, one a client, in the rotation of this round.

    Noise: d s² m p(1-p)/n. Rounding: s² Σ f(1-f)/n², f the fractional parts of the clients' lattice points. Clipping:
    the squared distance of the mean of the clients' grid points, rotated back, from the mean of their vectors.
    """
    expectation = Expectation(protocol, round)
    for vector in vectors:
        expectation.add(vector)
    return expectation.error()


class Expectation:
    """The sums behind `expected`, one vector at a time; `add` may be called from several threads.

    Memory is 16 bytes a coordinate, whatever the number of vectors.
    """

    def __init__(self, protocol: Protocol, round: int) -> None:
        """Starts with no vector."""
        self.protocol = protocol
        self.round = _validate.integer("round", round, low=0, high=wire.MAX_ROUND)
        self.count = 0
        self._true_sum = np.zeros(protocol.dim)
        # In grid units and still rotated; the Gaussian protocol has neither.
        self._sent_sum = np.zeros(protocol.dim)
        self._fractions = 0.0
        self._lock = Lock()

    def add(self, vector: ArrayLike) -> None:
        """Takes one client's vector into account.

        Raises:
            VectorError: It could not be encoded either.
        """
        checked = pipeline.as_vector(vector, self.protocol.dim)
        fractions = 0.0
        sent: NDArray[np.float32] | NDArray[np.float64]
        if self.protocol.sigma is not None:
            sent = checked.astype(np.float64) * clip.factor(checked, self.protocol.clip_norm)
        else:
            limit = quantize.coordinate_limit(self.protocol.levels)
            sent = pipeline.to_grid(self.protocol, checked, self.round)
            np.rint(np.clip(sent, -limit, limit, out=sent), out=sent)
            fractions = _fractions(sent, self.protocol.levels)
        with self._lock:
            self.count += 1
            self._true_sum += checked
            self._sent_sum += sent
            self._fractions += fractions

    def mean(self) -> NDArray[np.float64]:
        """The mean of the vectors, which only a simulation can know.

        Raises:
            EmptyError: No vector was added.
        """
        if self.count == 0:
            raise EmptyError("There is no error to expect: no vector was given.")
        return self._true_sum / self.count

    def error(self) -> ExpectedError:
        """The expected squared error of the mean of the vectors so far.

        Raises:
            EmptyError: No vector was added.
        """
        protocol, count, mean = self.protocol, self.count, self.mean()
        if protocol.sigma is not None:
            bias = mean - self._sent_sum / count
            return ExpectedError(protocol.dim * protocol.sigma**2 / count, 0.0, float(bias @ bias))
        unit = quantize.unit(protocol.coordinate_range, protocol.levels)
        sent = (self._sent_sum / count / unit).astype(np.float32)
        if protocol.rotate:
            sent = rotate.backward(sent, rotate.signs(protocol.dim, protocol.rotation_seed, self.round))
        bias = mean - sent
        variance = protocol.trials * protocol.p * (1.0 - protocol.p)
        return ExpectedError(
            noise=protocol.dim * protocol.scale**2 * variance / count,
            rounding=protocol.scale**2 * self._fractions / count**2,
            clipping=float(bias @ bias),
        )


def _fractions(grid: NDArray[np.float32], levels: int) -> float:
    """Σ f(1-f) over the fractional parts f of a vector of grid points in levels."""
    bits = quantize.fraction_bits(levels)
    one, offset = np.uint32(1 << bits), np.uint32(quantize.coordinate_limit(levels))
    total = 0
    for start in range(0, grid.size, _BLOCK):
        # In 32-bit integers, hence exactly: grid points are below 2^31 and f(1-f) in units of 4^-F is at most 2^30.
        parts = grid[start : start + _BLOCK].astype(np.int32).view(np.uint32)
        parts += offset
        parts &= one - np.uint32(1)
        total += int(np.sum(parts * (one - parts), dtype=np.uint64))
    return total * 2.0 ** (-2 * bits)
