"""Numbers that ride on a client's update as further coordinates: private metrics, and whether the update was clipped.

A client's vector is (u, b, m_1, ..., m_q). u is its update, clipped to the round's norm C and scaled to norm at most ρ
D. b = ±w D says whether the update was within C. m_j is a metric, mapped from its range to ±w D. With ρ² + (q + 1) w² =
1 the whole vector has a norm of at most D, the protocol's clip norm, and the codec enforces it. So the plan's guarantee
covers the metrics and the count of clipped updates, at no further cost. What they cost is accuracy: the update's share
of the norm shrinks to ρ. The plan's dimension is the model's plus `Extras.size`.

The norm C follows the requested quantile of the updates' norms (Andrew, Thakkar, McMahan and Ramaswamy,
"Differentially Private Learning with Adaptive Clipping", 2021): C ← C exp(-η (β - γ)), β the private estimate of the
share of updates within C.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from cpsgd import _plain, _validate
from cpsgd.errors import ParameterError, RoundRefusedError, WireError
from cpsgd.protocol import Protocol

Vector = NDArray[np.float32]

# The factor, either way, by which a norm may adapt unless other limits are set.
_FARTHEST = 10.0


@dataclass(frozen=True, kw_only=True)
class AdaptiveClip:
    """The rule by which the clip norm of updates adapts.

    Attributes:
        initial: The norm of the first round.
        quantile: γ, the share of updates that shall not be clipped.
        rate: η, by which the norm moves.
        lowest: The smallest norm; by default a tenth of the first. The count is of hidden bits: one client that lies
            can move the norm by a factor of e^(±η/2) or so in every round, up to these limits. 0 removes this limit.
        highest: The largest norm; by default ten times the first. Infinity removes the limit.

    Example:
        >>> round(AdaptiveClip(initial=0.5).following(0.5, unclipped=0.9), 4)  # nearly all were within it: smaller
        0.4616
    """

    initial: float
    quantile: float = 0.5
    rate: float = 0.2
    lowest: float | None = None
    highest: float | None = None

    def __post_init__(self) -> None:
        _validate.positive("initial", self.initial)
        _validate.probability("quantile", self.quantile)
        _validate.positive("rate", self.rate)
        low, high = self._limits
        if not 0.0 <= low <= self.initial <= high:
            raise ParameterError(
                f"Expected lowest <= initial <= highest, got {self.lowest}, {self.initial} and {self.highest}."
            )

    @property
    def _limits(self) -> tuple[float, float]:
        low = self.initial / _FARTHEST if self.lowest is None else self.lowest
        return low, self.initial * _FARTHEST if self.highest is None else self.highest

    def following(self, clip: float, unclipped: float) -> float:
        """Returns the next round's norm, from the present norm and the estimated share of updates within it."""
        low, high = self._limits
        return min(max(clip * math.exp(-self.rate * (min(max(unclipped, 0.0), 1.0) - self.quantile)), low), high)


@dataclass(frozen=True, kw_only=True)
class Extras:
    """Extra numbers that are sent as further coordinates of an update.

    Attributes:
        measures: Names of metrics that train functions return, with the range each is clipped to.
        clip: The norm that updates are clipped to, where it adapts; None for the protocol's, and no count.
        weight: w, the share of the clip norm that each of the numbers may take.
    """

    measures: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    clip: float | None = None
    weight: float = 0.1

    def __post_init__(self) -> None:
        if self.clip is not None:
            _validate.positive("clip", self.clip)
        _validate.probability("weight", self.weight)
        for name, (low, high) in self.measures.items():
            if not (math.isfinite(low) and math.isfinite(high) and low < high):
                raise ParameterError(f"Expected the range of {name!r} to be (low, high), got ({low}, {high}).")
        if self.size * self.weight**2 > 0.5:
            raise ParameterError(
                f"{self.size} numbers of weight {self.weight:g} leave the update less than half of the squared norm; "
                "choose fewer, or a smaller weight."
            )

    @property
    def size(self) -> int:
        """Number of coordinates that they take."""
        return len(self.measures) + (self.clip is not None)

    @property
    def share(self) -> float:
        """ρ, the update's share of the clip norm."""
        return math.sqrt(1.0 - self.size * self.weight**2)

    def check(self, protocol: Protocol, examples: int | None) -> None:
        """Checks, on a client, that its accounting covers the extra coordinates of an update.

        Raises:
            RoundRefusedError: Sums of single examples are sent, or updates of a stated distance.
        """
        if examples is not None:
            raise RoundRefusedError("Nothing rides on sums of single examples, which are protected here.")
        if protocol.distance_reason is not None:
            raise RoundRefusedError("Nothing rides on updates that are accounted for by their distance.")

    def encode(self, update: Vector, metrics: Mapping[str, object], clip_norm: float) -> Vector:
        """Returns a client's vector. A metric that is missing or no finite number counts as the middle of its range."""
        norm, most = float(np.linalg.norm(update.astype(np.float64))), self.clip or clip_norm
        scale = self.share * clip_norm / max(norm, most)
        extras = [] if self.clip is None else [1.0 if norm <= most else -1.0]
        for name, (low, high) in self.measures.items():
            value = metrics.get(name)
            known = isinstance(value, int | float) and abs(value) <= sys.float_info.max
            extras.append(min(max(2.0 * (value - low) / (high - low) - 1.0, -1.0), 1.0) if known else 0.0)  # type: ignore[operator]
        return np.concatenate([update * scale, np.array(extras) * (self.weight * clip_norm)]).astype(np.float32)

    def decode(self, mean: Vector, clip_norm: float) -> tuple[Vector, float | None, dict[str, float]]:
        """Returns the mean update, the share of updates within `clip` (None without one), and the means of the metrics.

        All are estimates. With the noise a share may be below 0 or above 1. A metric is cut to its range, within which
        the truth lies; a client that lies moves it no further.
        """
        dim = len(mean) - self.size
        update = mean[:dim] * ((self.clip or clip_norm) / (self.share * clip_norm))
        signs = [float(value) / (self.weight * clip_norm) for value in mean[dim:]]
        unclipped = None if self.clip is None else 0.5 * (signs.pop(0) + 1.0)
        ranges = zip(self.measures.items(), signs, strict=True)
        return (
            update,
            unclipped,
            {
                name: low + 0.5 * (high - low) * (min(max(sign, -1.0), 1.0) + 1.0)
                for (name, (low, high)), sign in ranges
            },
        )

    def to_json(self) -> str:
        """Returns the extras as JSON text, which travels to clients beside the model."""
        return json.dumps(_plain.to_dict(self))

    @classmethod
    def from_json(cls, text: str) -> Extras:
        """Returns what `to_json` wrote.

        Raises:
            WireError: It is something else.
        """
        try:
            return _plain.build(cls, _plain.parse(text, "What is measured"))
        except ParameterError:
            raise WireError("What the server asks to be measured cannot be read.") from None
