"""The baseline: clipped floats plus Gaussian noise per client (the paper's section 5.1).

Unlike the integers of the other mechanisms, floating-point noise is only close to the law that is analysed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NoReturn, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd.codec.pack import Floats
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.mechanisms.interface import RANGES, ErrorBound, Extent, Mechanism, Search
from cpsgd.mechanisms.law import Normal
from cpsgd.mechanisms.noise import Noise
from cpsgd.paper import bounds
from cpsgd.randomness import Keystream

# A float message of an honest client is outside D + 40 σ with probability below 1e-340 per coordinate.
_REACH = 40.0
# Coordinates worked on at a time, so that wide temporaries stay small.
_CHUNK = 1 << 10
_NOT_PLANNED = "The Gaussian baseline sends floats of 32 bits: there is nothing to plan. Choose its sigma yourself."


@dataclass(frozen=True)
class GaussianNoise(Noise):
    """A client's noise: N(0, σ²), in floats."""

    sigma: float

    @property
    def variance(self) -> float:
        """Variance of a client's noise: σ²."""
        return self.sigma**2

    def law(self, honest: int) -> Normal:
        """Returns N(0, honest σ²), its deviation rounded down."""
        if honest == 0:
            raise ConditionError("No noise arrived, so there is no privacy: raise honest clients.")
        return Normal(self.sigma * math.sqrt(honest) * (1.0 - 2.0**-52))

    def of_sum(self, count: int, dim: int, keystream: Keystream) -> NDArray[np.float64]:
        """Draws N(0, count σ²)."""
        entropy = int.from_bytes(keystream.take(32).tobytes(), "little")
        normal = np.random.Generator(np.random.PCG64(entropy)).standard_normal(dim)
        return self.sigma * math.sqrt(count) * normal

    def on_device(self, count: int) -> Normal:
        """Returns N(0, count σ²), the noise of a sum of `count` clients, for a device to draw."""
        return Normal(self.sigma * math.sqrt(count))


@dataclass(frozen=True, kw_only=True)
class Gaussian(Mechanism):
    """Floats plus N(0, σ²).

    Attributes:
        sigma: σ, standard deviation of the noise that each client adds.

    Example:
        >>> from cpsgd.mechanisms import Gaussian
        >>> print(Gaussian(sigma=0.5).describe())
        σ = 0.5 per client
    """

    name = "gaussian"
    planned = False
    title = "Gaussian protocol (floats, the baseline)"
    summary = "σ = {sigma:g} per client"
    grid = None
    keystream_bytes = 16
    values = 0
    centre = 0.0
    scale = 1.0
    coordinate_range = math.inf
    widest_range = math.inf
    extent = Extent(1.0, math.inf)

    sigma: float

    def __post_init__(self) -> None:
        low, high = RANGES
        object.__setattr__(self, "sigma", _validate.positive("sigma", self.sigma, low=low, high=high))

    @property
    def noise(self) -> GaussianNoise:
        """A client's noise: N(0, σ²)."""
        return GaussianNoise(self.sigma)

    def kernel(self) -> Gaussian:
        """Returns the mechanism itself: its own method is the kernel that adds the noise."""
        return self

    def floats(self, vector: NDArray[np.float32], keystream: NDArray[np.uint8], out: NDArray[np.float32]) -> None:
        """Adds Gaussian noise, made from the keystream by the transform of Box and Muller."""
        words = keystream.view(np.uint64).reshape(2, -1)
        for start in range(0, vector.size, _CHUNK):
            part = slice(start, start + _CHUNK)
            first, second = words[:, part] >> np.uint64(11)
            # Uniform in (0, 1], so that the logarithm is finite.
            radius = np.sqrt(-2.0 * np.log((first + np.uint64(1)) * 2.0**-53))
            out[part] = vector[part] + self.sigma * radius * np.cos(second * (2.0**-52 * math.pi))

    def format(self, clip_norm: float, modulus: int | None) -> Floats:
        """Returns the layout of float32 numbers, limited to values that an honest client can send."""
        return Floats(clip_norm + _REACH * self.sigma, "D + 40 σ")

    def without_noise(self) -> NoReturn:
        """Raises `ParameterError`: floats without noise are no mechanism."""
        raise ParameterError("Floats without noise are no mechanism; use NoPrivacy.")

    def error_bound(self, *, clients: int, dim: int, clip_norm: float, rotate: bool) -> ErrorBound:
        """Returns the bound of the paper's Theorem 2."""
        return ErrorBound(*bounds.gaussian_error(clients=clients, dim=dim, sigma=self.sigma))

    # ------------------------------------------------------------------ planning

    @classmethod
    def candidates(cls, search: Search) -> Iterator[Self]:
        """Raises `InfeasibleError`: this is the baseline that others are compared with."""
        raise InfeasibleError(_NOT_PLANNED)

    def with_scale(self, scale: float) -> Self:
        """Returns a copy with σ multiplied by `scale`."""
        return replace(self, sigma=self.sigma * scale)

    def quieter(self, factor: float) -> None:
        """Returns None: floats always fit, so the noise need not shrink."""
        return

    # ------------------------------------------------------------------ as data

    @classmethod
    def usual(cls, *, clients: int, dim: int, clip_norm: float, rotate: bool, delta: float) -> dict[str, Any]:
        """Returns parameters whose noise in the sum has about the norm of one vector."""
        return {"sigma": clip_norm / math.sqrt(clients)}

    def to_fields(self, clip_norm: float) -> dict[str, Any]:
        """Returns the fields of protocol files since 0.1.0, which name no mechanism."""
        return {"coordinate_range": clip_norm, "levels": 0, "trials": 0, "p": 0.5, "sigma": self.sigma}

    @classmethod
    def of_fields(cls, fields: dict[str, Any], clip_norm: float) -> Self:
        """Returns the mechanism that `to_fields` wrote."""
        unused = {"coordinate_range": clip_norm, "levels": 0, "trials": 0, "p": 0.5}
        if any(fields.get(name, value) != value for name, value in unused.items()):
            raise ParameterError(
                "The Gaussian protocol has no levels, trials, rotation or modulus; use Protocol.gaussian(...)."
            )
        return super().of_fields({name: value for name, value in fields.items() if name not in unused}, clip_norm)
