"""The paper's range X^max and its bounds on the error of the mean: Theorems 2, 3 and 4.

Each bound is returned with its name. All are on E‖estimate - mean‖² for n vectors of norm at most D.
"""

from __future__ import annotations

import math

from cpsgd import _validate
from cpsgd.errors import ConditionError


def coordinate_range(*, clients: int, dim: int, clip_norm: float, delta: float) -> float:
    """Returns X^max = 2 D √(log(2nd/δ)/d), the paper's range for Rot(π_sk(Bin(m, p))) (Theorem 4).

    Example:
        >>> round(coordinate_range(clients=10_000, dim=65_536, clip_norm=1.0, delta=1e-9), 4)
        0.0505
    """
    _validate.probability("delta", delta)
    _validate.integer("clients", clients, low=1)
    _validate.integer("dim", dim, low=1)
    _validate.positive("clip_norm", clip_norm)
    return 2.0 * clip_norm * math.sqrt(math.log(2.0 * clients * dim / delta) / dim)


def gaussian_error(*, clients: int, dim: int, sigma: float) -> tuple[float, str]:
    """Returns the bound of Theorem 2, for the Gaussian protocol.

    Example:
        >>> gaussian_error(clients=1000, dim=100, sigma=0.5)[0]
        0.025
    """
    return dim * sigma**2 / clients, "cpSGD, Theorem 2 (Gaussian protocol): d σ²/n"


def rounding_error(
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    coordinate_range: float,
    levels: int,
    noise_variance: float,
    grid_step: float,
) -> tuple[float, str]:
    """Returns the bound of Theorem 3, for π_sk(Bin(m, p)).

    Args:
        clients: n.
        dim: d.
        clip_norm: D.
        coordinate_range: X^max; the theorem takes D, and a larger one is as good.
        levels: k.
        noise_variance: m p (1 - p).
        grid_step: The largest change of a coordinate by the codec, beside clipping.

    Raises:
        ConditionError: Coordinates would be clipped.

    Example:
        >>> error, theorem = rounding_error(clients=1000, dim=100, clip_norm=1.0, coordinate_range=1.0, levels=16,
        ...                                noise_variance=3.5, grid_step=0.0)
        >>> f"{error:.4f}"
        '0.0067'
    """
    if coordinate_range < clip_norm:
        raise ConditionError(
            f"Theorem 3 needs coordinate_range >= clip_norm={clip_norm:g} (no coordinate is clipped), "
            f"got {coordinate_range:g}. Widen the range, rotate, or use expected_squared_error."
        )
    spread = _spread(clients, dim, coordinate_range, levels, noise_variance)
    moved = _moved(dim, clip_norm, grid_step)
    return spread + moved**2, "cpSGD, Theorem 3 (π_sk(Bin)): d X²/(n(k-1)²) + (d/n) 4mp(1-p) X²/(k-1)²"


def rotated_error(
    *,
    clients: int,
    dim: int,
    clip_norm: float,
    coordinate_range: float,
    levels: int,
    noise_variance: float,
    grid_step: float,
) -> tuple[float, str]:
    """Returns the bound of Theorem 4, for Rot(π_sk(Bin(m, p))), with corrected constants; see `rounding_error`.

    The theorem prints 2 log(2nd/δ) D² where Theorem 3 gives d X² = 4 log(2nd/δ) D² for its X^max, and 4 D² δ² for
    rotations that leave a coordinate outside. This bound has Theorem 3's terms, and D² with probability δ.

    Raises:
        ConditionError: X^max is too small for any δ < 1.

    Example:
        >>> error, theorem = rotated_error(clients=1000, dim=100, clip_norm=1.0, coordinate_range=0.8, levels=16,
        ...                                noise_variance=3.5, grid_step=0.0)
        >>> f"{error:.4f}"
        '0.0268'
    """
    # X^max = 2 D √(log(2nd/δ)/d) solved for δ, the probability that the rotation leaves some coordinate outside.
    log_delta = math.log(2.0 * clients * dim) - dim * coordinate_range**2 / (4.0 * clip_norm**2)
    if log_delta >= 0.0:
        smallest = 2.0 * clip_norm * math.sqrt(math.log(2.0 * clients * dim) / dim)
        raise ConditionError(
            f"Theorem 4 needs coordinate_range > {smallest:g} (X^max = 2 D √(log(2nd/δ)/d) for a δ < 1), "
            f"got {coordinate_range:g}. Widen the range or use expected_squared_error."
        )
    spread = _spread(clients, dim, coordinate_range, levels, noise_variance)
    moved = _moved(dim, clip_norm, grid_step)
    bias = math.exp(log_delta) * (clip_norm + moved) ** 2
    return (
        spread + moved**2 + bias,
        "cpSGD, Theorem 4 (Rot(π_sk(Bin))), constants corrected: d X²(1 + 4mp(1-p))/(n(k-1)²) + D² δ",
    )


def _spread(clients: int, dim: int, coordinate_range: float, levels: int, noise_variance: float) -> float:
    """Returns (d X²/(n (k-1)²)) (1 + 4 m p (1-p)), Theorem 3 with X^max for D."""
    return dim * coordinate_range**2 / (clients * (levels - 1) ** 2) * (1.0 + 4.0 * noise_variance)


def _moved(dim: int, clip_norm: float, grid_step: float) -> float:
    """Returns the largest change of a vector by the codec: the margin of clipping, float32 and the grid."""
    return clip_norm * 2.0**-18 + math.sqrt(dim) * grid_step
