"""Ways to round, the exact laws of the integers that come of them, and what kernels are called with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from cpsgd.codec import rotate
from cpsgd.mechanisms import Binomial
from cpsgd.mechanisms.interface import Rounding
from cpsgd.simulation import device_plain as plain
from cpsgd.simulation.device_plain import Encoding
from cpsgd.simulation.products import Products

from ..exact_law import goodness_of_fit as goodness_of_fit  # noqa: TID252 - tests are no package

HALF = 1 << 15

COIN = {
    "one": Rounding(7_838, HALF, 16, coins=1),
    "three": Rounding(4_614, HALF, 16, coins=3),
    "many": Rounding(1_000, HALF, 16, coins=70),
    "sampled": Rounding(30_000, HALF, 16, rate=13_107),
}
"""Coins of all kinds; those that are tossed one by one, and those that are too many for it."""


def rounding_to(levels: int) -> Rounding:
    found = Binomial(levels=levels, trials=0, coordinate_range=1.0).device_rounding()
    assert found is not None
    return found


def exact_coins(rounding: Rounding, points: Sequence[int]) -> np.ndarray:
    """The law of the sum of clients' integers, one client at each of these grid points."""
    law = np.ones(1)
    for point in points:
        heads = 0.5 + min(max(point, -rounding.limit), rounding.limit) / 2**16
        if rounding.rate is None:
            coins = rounding.coins or 0
            client = binom.pmf(np.arange(coins + 1), coins, heads)
        else:
            rate = rounding.rate / 2**16
            client = np.array([rate * (1.0 - heads), 1.0 - rate, rate * heads])
        law = np.convolve(law, client)
    return law


LEVELS = {"two": rounding_to(2), "three": rounding_to(3), "thirty": rounding_to(30), "hundred": rounding_to(100)}
SMALL = {
    **LEVELS,
    "grid points": Rounding(36_447, 36_447, 0),
    "one coin": COIN["one"],
    "three coins": COIN["three"],
    "sampled": COIN["sampled"],
}
"""Roundings that the kernels do together with the rotation, as the plain ones do."""
FIFTEEN = Rounding(2_548, HALF, 16, coins=15)
DRAWN = {"four coins": Rounding(4_000, HALF, 16, coins=4), "fifteen coins": FIFTEEN}
"""Coins that are drawn by inversion."""
KEY = 2**62 + 12345


def rows_of(count: int, dim: int, device: torch.device) -> torch.Tensor:
    """Rows that do not follow each other in memory."""
    generator = torch.Generator().manual_seed(dim)
    return torch.randn(count, dim + 22, generator=generator).to(device)[:, :dim]


def signs_of(dim: int, device: torch.device) -> torch.Tensor:
    """A rotation's signs, and zeros up to a whole number of words."""
    signs = rotate.signs(dim, 3, 4)
    return torch.from_numpy(np.pad(signs, (0, -len(signs) % 8))).to(device)


def keys_of(device: torch.device, key: int = KEY) -> torch.Tensor:
    return torch.tensor([key]).view(torch.uint8).to(device)


def sums_of(points: torch.Tensor, rounding: Rounding, first: int) -> torch.Tensor:
    """The sums that the plain kernels round points of the grid to."""
    sums = zeros(points.shape[1], points.device)
    plain.round_and_sum(points, sums, **options_of(rounding, points.device, first))
    return sums


def sums_by(kernels: Any, vectors: Any, bound: float, unit: float, rounding: Rounding, first: int = 0) -> torch.Tensor:
    """The sums of rows, or of products, by some kernels."""
    if isinstance(vectors, Products):
        device, dim, add = vectors.factors.device, vectors.layout.dim, kernels.add_products
    else:
        device, dim, add = vectors.device, vectors.shape[1], kernels.add_rows
        # A view whose rows do not follow each other, which the kernels overwrite.
        vectors = torch.cat([vectors, vectors[:, :5]], dim=1)[:, :dim]
    sums = zeros(dim, device)
    add(vectors, sums, Encoding(signs_of(dim, device), bound, unit, keys_of(device), rounding), first)
    return sums


def options_of(rounding: Rounding, device: torch.device, first: int = 0) -> dict[str, Any]:
    return {"keys": keys_of(device), "first": first, "rounding": rounding}


def zeros(dim: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(dim, dtype=torch.int64, device=device)
