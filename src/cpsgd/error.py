"""What error a round is expected to have: the paper's bounds, and the exact expectation for given vectors."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from cpsgd.codec import clip, pipeline, quantize, rotate
from cpsgd.errors import ConditionError, EmptyError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol


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
    if not protocol.rotate:
        if protocol.coordinate_range < clip_norm:
            raise ConditionError(
                f"Theorem 3 needs coordinate_range >= clip_norm={clip_norm:g} (no coordinate is clipped), "
                f"got {protocol.coordinate_range:g}. Widen the range, rotate, or use expected_squared_error."
            )
        return ErrorBound(spread, "cpSGD, Theorem 3 (π_sk(Bin)): d X²/(n(k-1)²) + (d/n) 4mp(1-p) X²/(k-1)²")
    # X^max = 2 D √(log(2nd/δ)/d) solved for δ, the probability that the rotation leaves some coordinate outside.
    log_delta = math.log(2.0 * clients * dim) - dim * protocol.coordinate_range**2 / (4.0 * clip_norm**2)
    if log_delta >= 0.0:
        smallest = 2.0 * clip_norm * math.sqrt(math.log(2.0 * clients * dim) / dim)
        raise ConditionError(
            f"Theorem 4 needs coordinate_range > {smallest:g} (X^max = 2 D √(log(2nd/δ)/d) for a δ < 1), "
            f"got {protocol.coordinate_range:g}. Widen the range or use expected_squared_error."
        )
    # The theorem prints 2 log(2nd/δ) D² for d X²/(k-1)² here; with its X^max that is 4 log(2nd/δ) D², as its own proof
    # has it.
    bias = 4.0 * clip_norm**2 * math.exp(2.0 * log_delta)
    return ErrorBound(
        spread + bias, "cpSGD, Theorem 4 (Rot(π_sk(Bin))), as proved: d X²(1 + 4mp(1-p))/(n(k-1)²) + 4 D² δ²"
    )


def expected(protocol: Protocol, vectors: Iterable[ArrayLike], round: int) -> ExpectedError:
    """The exact expected squared error of the mean of these vectors, one a client, in the rotation of this round.

    Noise: d s² m p(1-p)/n. Rounding: s² Σ f(1-f)/n², f the fractional parts of the clients' lattice points. Clipping:
    the squared distance of the mean of the clients' grid points, rotated back, from the mean of their vectors.
    """
    count = 0
    fractional = 0.0
    true_sum = np.zeros(protocol.dim)
    sent_sum = np.zeros(protocol.dim)
    for vector in vectors:
        count += 1
        checked = pipeline.as_vector(vector, protocol.dim)
        true_sum += checked
        if protocol.sigma is not None:
            sent_sum += checked.astype(np.float64) * clip.factor(checked, protocol.clip_norm)
            continue
        limit = quantize.coordinate_limit(protocol.levels)
        grid = np.rint(np.clip(pipeline.to_grid(protocol, checked, round), -limit, limit).astype(np.float64))
        sent_sum += grid
        fraction = np.mod((grid + limit) * 2.0 ** -quantize.fraction_bits(protocol.levels), 1.0)
        fractional += float(np.sum(fraction * (1.0 - fraction)))
    if count == 0:
        raise EmptyError("There is no error to expect: no vector was given.")
    if protocol.sigma is not None:
        bias = (true_sum - sent_sum) / count
        return ExpectedError(protocol.dim * protocol.sigma**2 / count, 0.0, float(bias @ bias))
    sent = (sent_sum / count / quantize.unit(protocol.coordinate_range, protocol.levels)).astype(np.float32)
    if protocol.rotate:
        sent = rotate.backward(sent, rotate.signs(protocol.dim, protocol.rotation_seed, round))
    bias = true_sum / count - sent
    variance = protocol.trials * protocol.p * (1.0 - protocol.p)
    return ExpectedError(
        noise=protocol.dim * protocol.scale**2 * variance / count,
        rounding=protocol.scale**2 * fractional / count**2,
        clipping=float(bias @ bias),
    )
