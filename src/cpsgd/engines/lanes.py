"""Several small sums in one 64-bit integer, for transports that add whole machine integers.

A collective like an all-reduce adds integers of 8, 32 or 64 bits and knows nothing between. Where a coordinate's sum
stays below R, c coordinates share a lane as the digits Σ v_j R^j of a number below R^c <= 2^63: adding lanes adds the
digits, and no digit ever carries into the next. That takes 64/c bits per coordinate.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate

_LANE_BITS = 63


@dataclass(frozen=True)
class Lanes:
    """How `dim` digits below `radix` are laid out.

    Attributes:
        dim: d, how many digits.
        radix: R; sums of digits must stay below it.

    Example:
        >>> lanes = Lanes(dim=5, radix=1000)
        >>> lanes.digits, lanes.count, lanes.size_bytes
        (6, 1, 8)
        >>> one, two = (lanes.forward(np.array(v, np.uint32)) for v in ([1, 2, 3, 4, 5], [600, 0, 7, 0, 994]))
        >>> lanes.backward(one + two).tolist()
        [601, 2, 10, 4, 999]
    """

    dim: int
    radix: int

    def __post_init__(self) -> None:
        _validate.integer("dim", self.dim, low=1)
        _validate.integer("radix", self.radix, low=2, high=2**62)

    @property
    def digits(self) -> int:
        """c, digits a lane."""
        digits, power = 1, self.radix * self.radix
        while power <= 2**_LANE_BITS:
            digits, power = digits + 1, power * self.radix
        return digits

    @property
    def count(self) -> int:
        """Lanes that hold all digits."""
        return -(-self.dim // self.digits)

    @property
    def size_bytes(self) -> int:
        """Bytes of all lanes."""
        return 8 * self.count

    def forward(self, values: NDArray[np.uint32]) -> NDArray[np.int64]:
        """The lanes; digit j of lane i is value j · `count` + i."""
        lanes = np.zeros(self.count, dtype=np.int64)
        for start in reversed(range(0, self.dim, self.count)):
            part = values[start : start + self.count]
            lanes *= self.radix
            lanes[: part.size] += part
        return lanes

    def backward(self, lanes: NDArray[np.int64]) -> NDArray[np.uint64]:
        """The digits of lanes, or of a sum of lanes."""
        rest = lanes.astype(np.uint64)
        values = np.empty(self.dim, dtype=np.uint64)
        for start in range(0, self.dim, self.count):
            part = values[start : start + self.count]
            rest, digits = np.divmod(rest, np.uint64(self.radix))
            part[:] = digits[: part.size]
        return values
