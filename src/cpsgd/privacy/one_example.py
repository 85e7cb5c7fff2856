"""The privacy of one example where a client sends the sum of several clipped gradients.

A client with at most E examples sends u = Σ_j clip_D(g_j). Its norm is at most B = E D, but replacing one example moves
it by at most 2D (zeroing one, by D). The protocol's `clip_norm` C bounds the client's sum; the accounting needs the
distance of two neighbours *on the grid that rounding starts from*. With `unit` grid points to 1 and F fractional bits:

1. C = B (1 + 2^-10), so that the encoder neither clips the norm nor shrinks the grid point: both would be functions of
   the whole sum. That the room suffices for the roundings below is checked (`example_protocol` refuses otherwise).
2. The float32 operations from the exact sum to the rotated vector are at most 2 (j + 4) + 1 roundings deep, where 2^j
   <= d. The first is the sum itself. Each of two passes then has the factor and the normalisation (a cast and a product
   each) and j stages of sums and differences. Stages are orthogonal up to a factor, so the result is off by at most η =
   (1 + 2^-24)^(2j+9) - 1 relative to B, for each neighbour. The sum before them is taken in float64, one product and
   one addition per example, which adds E 2^-52 to η.
3. Clipping coordinates to ±X^max is 1-Lipschitz. Rounding to the grid moves each coordinate of the difference by at
   most 1, together √d.

A gradient is taken to depend on its own example, its place and the model only, as it does without layers that mix
examples; places and their number are the same for neighbours (docs/threat-model.md). So neighbours' grid points are
within Δ unit + 2 η B unit + √d, Δ = 2D or D. The certificates depend on that distance and on the largest one in a
coordinate, which is the whole range for both adjacencies; where the sums lie does not matter to them, nor whether noise
is added or the rounding is the noise. So they hold for a client bound of

    D' = D + 2 η B + √d / unit

in place of C. The paper's own theorem is not shown: its condition on X^max is about the norm of the whole vector.

Each example may also be drawn for a round, by its own client and in secret, with probability q (participation
"poisson:RATE"). A sum then has at most `most_drawn` of a client's N examples, except with the probability `overflow`;
that takes the place of E above. docs/proofs/sampled-examples.md has the proof.

Sampling of *clients* is not combined with this. Its amplification theorems compare the round with one in which the
client is absent, or replaced by another. That moves the sum by up to B, and not by one example's share.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.protocol import Protocol

HEADROOM = 2.0**-10
"""Relative room of a client's clip norm above the largest sum."""


_OVERFLOW = 2.0**-100
# A little more than its logarithm, for roundings of the divergence below.
_OVERFLOW_NATS = 69.4


def most_drawn(examples: int, participation: Participation) -> int:
    """Returns E, the most examples of a client's sum: all N, or the most of N that are drawn.

    By Chernoff's bound P[Bin(N, q) >= E] <= exp(-N KL(E/N, q)) for E/N > q, here at most 2^-100. Where only E = N will
    do, there is no overflow.

    Example:
        >>> most_drawn(5000, Participation.every()), most_drawn(5000, Participation.poisson(0.02))
        (5000, 237)
    """
    count = _validate.integer("examples", examples, low=1)
    mean, low = count * participation.rate, math.floor(count * participation.rate)
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        rest = (count - middle) * math.log1p((mean - middle) / (count - mean))
        if middle * math.log1p((middle - mean) / mean) + rest >= _OVERFLOW_NATS:
            high = middle
        else:
            low = middle
    return high


def overflow(examples: int, participation: Participation) -> float:
    """Returns the chance per round, added to δ, that a client draws so many examples that some are left out."""
    return 0.0 if most_drawn(examples, participation) == examples else _OVERFLOW


def example_norm(clip_norm: float, examples: int) -> float:
    """Returns D, the norm that one example's gradient is clipped to: `examples` of them stay within `clip_norm`."""
    return clip_norm / (_validate.integer("examples", examples, low=1) * (1.0 + HEADROOM)) * (1.0 - 2.0**-50)


@dataclass(frozen=True, repr=False)
class OneExample(Protocol):
    """A stand-in for a protocol in the accounting of single examples; see `example_protocol`."""

    @property
    def largest_norm(self) -> float:
        """Always infinite: the norm of a client's sum says nothing about how far one example moves it."""
        return math.inf

    def reach(self, adjacency: Adjacency) -> float:
        """Returns the whole range, also for zero-out: a sum without one example may be anything, not only zero."""
        return super().reach(Adjacency.REPLACE_ONE)


def example_protocol(protocol: Protocol, examples: int) -> OneExample:
    """Returns the protocol whose clients are as far apart as one example moves a sum; for the accounting only.

    Raises:
        ParameterError: The grid is too coarse for the proof.
    """
    bound = example_norm(protocol.clip_norm, examples)
    total = bound * examples
    stages = protocol.dim.bit_length() - 1
    error = (math.expm1((2 * stages + 9) * math.log1p(2.0**-24)) + examples * 2.0**-52) * (1.0 + 1e-9)
    moved = 2.0 * error * total
    grid = protocol.mechanism.grid
    if grid is not None:
        diagonal = math.sqrt(protocol.dim) * (1.0 + 1e-6)
        largest = (total * grid.unit * (1.0 + error) + 0.5 * diagonal) * (1.0 + (protocol.dim + 16) * 2.0**-51)
        if largest > protocol.clip_norm * grid.unit * (1.0 - 2.0**-40):
            raise ParameterError(
                "The grid is too coarse to tell one example's share of a client's sum; use more levels or a smaller "
                "range of coordinates."
            )
        moved += diagonal / grid.unit
        # The accounting also bounds distances by the cube the coordinates are clipped to, for zero-out by half of its
        # diagonal. Two sums may lie in opposite corners, so that bound must not be the smaller one.
        reach = grid.limit / grid.unit
        if bound + moved > 0.999 * math.sqrt(protocol.dim) * reach:
            raise ParameterError(
                f"The range of coordinates, ±{reach:g}, is too small for the proof: one example's share may fill it. "
                f"Use at least {1.01 * (bound + moved) / math.sqrt(protocol.dim):.4g}."
            )
    # A distance that is stated is that of whole sums, of which one example moves a part.
    norm = (bound + moved) * (1.0 + 1e-12)
    kept = {each.name: getattr(protocol, each.name) for each in fields(protocol)}
    stated = ("replace_one_distance", "replace_one_l1_distance", "distance_reason", "promise")
    return OneExample(**{**kept, **dict.fromkeys(stated), "clip_norm": norm})
