"""What every mechanism computes, as it was: numbers of its interface, of its noise, of its laws and of its plans."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd.codec.clip import MAX_LEVELS
from cpsgd.errors import ConditionError
from cpsgd.mechanisms import (
    Binomial,
    Coins,
    DiscreteGaussian,
    Gaussian,
    LazyCoins,
    Mechanism,
    RoundedGaussian,
    SampledCoins,
    Skellam,
    binomial,
    discrete_gaussian,
    fine_gaussian,
    lattice,
    skellam,
)
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.interface import Search
from cpsgd.mechanisms.law import Law, Normal, SlotsAndCoins
from cpsgd.neighbours import Adjacency
from cpsgd.randomness import Keystream
from tests import known_values as known

EXAMPLES: list[Mechanism] = [
    Binomial(levels=4, trials=20, coordinate_range=0.5),
    Binomial(levels=5, trials=300, p=0.3, coordinate_range=0.4),
    Binomial(levels=2, trials=500, coordinate_range=3.0),
    Gaussian(sigma=0.7),
    Skellam(levels=4, variance=5.0, coordinate_range=0.5),
    Skellam(levels=9, variance=0.3, coordinate_range=2.5, noise_limit=12),
    DiscreteGaussian(levels=4, sigma_squared=5.0, coordinate_range=0.5),
    DiscreteGaussian(levels=3, sigma_squared=0.4, coordinate_range=0.5),
    Coins(coins=1, theta=0.2, coordinate_range=0.5),
    Coins(coins=7, theta=0.05, coordinate_range=0.4),
    SampledCoins(rate=0.3, theta=0.4, coordinate_range=0.5),
    LazyCoins(rate=0.6, theta=0.2, coordinate_range=2.0),
    RoundedGaussian(noise_deviation=1.5, step=0.25, window=15, coordinate_range=0.5),
    RoundedGaussian(noise_deviation=7.0, step=0.1, window=200, coordinate_range=0.5),
    DiscreteLaplace(levels=5, spread=4, shares=8, window=1024, coordinate_range=0.5),
    DiscreteLaplace(levels=4, spread=3, shares=1, window=4096, coordinate_range=0.5),
    Binomial(levels=3, trials=33, p=0.8, coordinate_range=0.4),
    RoundedGaussian(noise_deviation=0.8, step=0.25, window=9, coordinate_range=0.37),
]
PLANNED = (Binomial, Skellam, DiscreteGaussian, Coins, SampledCoins, LazyCoins, RoundedGaussian, DiscreteLaplace)
SLOPES = (0.0, 1e-8, 0.003, 0.02, 0.2, 1.1, 9.0, 700.0, 800.0)


def numbers(value: Any) -> Iterator[float]:
    """Flattens dataclasses, mappings, sequences and arrays; what is no number is left out."""
    if dataclasses.is_dataclass(value):
        value = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        value = value.values()
    if isinstance(value, Iterable) and not isinstance(value, str):
        for each in value:
            yield from numbers(each)
    elif isinstance(value, int | float | np.number):
        yield float(value)
    elif value is None:
        yield math.nan


def stream(number: int) -> Keystream:
    return Keystream(number.to_bytes(16, "little"))


def fields_of(mechanism: Mechanism) -> dict[str, Any]:
    return {name: value for name, value in mechanism.to_fields(1.5).items() if name != "mechanism"}


def values_of(mechanism: Mechanism) -> Iterator[tuple[str, Any]]:
    """Yields numbers of a mechanism's interface."""
    yield (
        "properties",
        [
            *(mechanism.values, mechanism.centre, mechanism.scale, mechanism.widest_range, mechanism.coordinate_range),
            *(mechanism.keystream_bytes, mechanism.is_noisy, mechanism.largest_rounding_variance),
        ],
    )
    yield "fields", [mechanism.grid, mechanism.extent, mechanism.to_fields(1.5), mechanism.device_rounding()]
    if mechanism.device_rounding() is not None:
        yield "largest on a device", mechanism.device_rounding().largest  # type: ignore[union-attr]
    for dim, clip_norm, rotate in ((1, 1.5, False), (7, 0.3, False), (100, 1.5, True), (3000, 20.0, True)):
        setting: dict[str, Any] = {"dim": dim, "clip_norm": clip_norm, "rotate": rotate}
        usual = type(mechanism).usual(clients=30, delta=1e-6, **setting)
        yield f"usual {dim}", usual
        yield f"usual of many {dim}", type(mechanism).usual(clients=10**6, delta=1e-6, **setting)
        yield f"error {dim}", mechanism.predicted_error(clients=9, **setting)
        yield f"rounding {dim}", mechanism.expected_rounding(**setting)
        yield f"scales {dim}", mechanism.useful_scales(**setting)
        for adjacency in Adjacency:
            for stated in (None, 0.4 * clip_norm):
                apart = {"dim": dim, "clip_norm": clip_norm, "adjacency": adjacency, "replace_one_distance": stated}
                found = mechanism.sensitivity(**apart)
                yield (
                    f"distances {dim} {adjacency} {stated}",
                    [
                        found,
                        mechanism.extent.reach(adjacency),
                        mechanism.extent.l1_sensitivity(mechanism.grid, found, dim, adjacency, stated),
                    ],
                )
        for mean_norm in (None, 0.1 * clip_norm):
            for number, each in enumerate(mechanism.deviations(clients=12, mean_norm=mean_norm, **setting)):
                bounds = [each.at(slope) for slope in SLOPES]
                yield f"deviation {dim} {mean_norm} {number}", [each.offset, each.steepest, *bounds]
    if mechanism.grid is not None:
        points = np.linspace(-mechanism.grid.limit, mechanism.grid.limit, 97).round().astype(np.float32)
        yield "rounding", mechanism.rounding_variance(points)
    for scale in (0.01, 0.3, 2.0):
        yield f"scale {scale}", mechanism.with_scale(scale).to_fields(1.0)
    for factor in (0.02, 0.7, 0.9999, 1.0):
        quieter = mechanism.quieter(factor)
        yield f"quieter {factor}", None if quieter is None else quieter.to_fields(1.0)
    quieter, times = mechanism, 0
    while (less := quieter.quieter(0.8)) is not None:
        quieter, times = less, times + 1
    yield "quietest", [times, quieter.to_fields(1.0)]
    for rotate in (False, True):
        with contextlib.suppress(ConditionError):
            yield f"bound {rotate}", mechanism.error_bound(clients=9, dim=100, clip_norm=1.5, rotate=rotate)
    if mechanism.grid is not None:
        yield "without noise", mechanism.without_noise().to_fields(1.0)
    assert type(mechanism).of_fields(fields_of(mechanism), 1.5) == mechanism


def values_of_noise(mechanism: Mechanism) -> Iterator[tuple[str, Any]]:
    """Yields numbers of a mechanism's noise, with draws by fixed keystreams."""
    noise = mechanism.noise
    yield "moments", [noise.variance, noise.settled_variance, noise.variation, *(noise.slack(n) for n in (2, 5, 40))]
    yield "cumulant", [noise.cumulant(slope) for slope in SLOPES]
    yield "device", noise.on_device(3)
    if noise.separate:
        yield "variation", [noise.sum_variation(count) for count in (1, 5, 1000)]
        yield "sum", noise.of_sum(19, 40, stream(1))
        yield "clients", noise.of_clients(5, 40, stream(2))
    if mechanism.grid is None:
        floats = np.empty(1500, dtype=np.float32)
        vector = np.linspace(-1.0, 1.0, 1500, dtype=np.float32)
        mechanism.kernel().floats(vector, stream(4).take(1500 * mechanism.keystream_bytes), floats)
        yield "floats", [*floats[:5], *floats[1020:1030], float(floats.astype(float) @ vector)]
        return
    points = np.linspace(-mechanism.grid.limit, mechanism.grid.limit, 97).round().astype(np.float32)
    for number, (kernel, size) in enumerate([(mechanism.kernel(), mechanism.keystream_bytes), mechanism.packer()]):
        values = np.empty(points.size, dtype=np.uint32)
        kernel.values(points, stream(3).take(size * points.size), values)
        yield f"kernel {number}", values


def values_of_law(mechanism: Mechanism) -> Iterator[tuple[str, Any]]:
    """Yields numbers of the law of sums."""
    for honest in (1, 3, 30):
        try:
            law = mechanism.noise.law(honest)
        except ConditionError:
            yield f"no law {honest}", [0.0]
            continue
        if isinstance(law, Normal):
            yield f"law {honest}", law
        if isinstance(law, SlotsAndCoins):
            yield f"law {honest}", [law.saturating(margin) for margin in (0.0, 1.0, 9.0, 30.0)]
            yield f"slots {honest}", [law.untold, law.told, law.deviation, law.point, law.room, law.farther]
        if isinstance(law, Law):
            yield f"law {honest}", [law.variance, law.lowest, law.highest, law.mirror, law.parts]
            middle = round(mechanism.noise.mean * honest)  # type: ignore[attr-defined]
            for direction in (1, -1):
                yield f"step {honest} {direction}", law.step(middle + np.arange(-3.0, 4.0), direction)
            for nats, margin in ((5.0, 0), (40.0, 3)):
                yield f"window {honest} {nats}", law.window(nats, margin)
        if type(law) not in (Normal, SlotsAndCoins):
            parts = law.summands(20.0)
            yield f"summands {honest}", [parts.copies, parts.first, parts.largest, parts.narrowing]
            yield f"masses {honest}", parts.mass
            points = (0.0, 0.3, 1.0) if mechanism.levels == 2 else (0.0, 0.3, 1.0, 1.7)
            yield f"client {honest}", [parts.client(point) for point in points]


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=lambda number: f"{number}-{EXAMPLES[number].name}")
@pytest.mark.parametrize("of", [values_of, values_of_noise, values_of_law], ids=["interface", "noise", "law"])
def test_known_numbers(of: Any, number: int) -> None:
    mechanism = replace(EXAMPLES[number])  # type: ignore[type-var]  # every one is a dataclass; nothing is cached yet
    found = {f"{number} {key}": list(numbers(value)) for key, value in of(mechanism)}
    known.check(f"mechanisms/{mechanism.name}", found)


@pytest.mark.parametrize("kind", PLANNED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("room", [3.0, 40.0, 1e9], ids=str)
def test_known_candidates(kind: type[Mechanism], room: float) -> None:
    def fits(candidate: Mechanism) -> bool:
        spread = candidate.noise.variance + candidate.largest_rounding_variance
        return math.sqrt(50.0 * spread) + 0.1 * candidate.levels <= room

    def rough_scale(candidate: Mechanism) -> float:
        return (2.5 + getattr(candidate, "theta", 0.0)) / math.sqrt(candidate.noise.variance)

    found: dict[str, Any] = {}
    for values, bits, dim, rotate, variation in (
        *((2, 0.25, 30, True, 2.0**-90), (16, 4.0, 3, False, 2.0**-90), (300, 8.2, 500, True, 2.0**-90)),
        *((5000, None, 20, True, 1e-6), (5000, 9.0, 20, False, 1e-36), (3, 0.1, 9, True, 1e-36)),
    ):
        search = Search(values, 50, variation, dim, 1.5, rotate, rough_scale, fits, bits)
        candidates = [candidate.to_fields(1.5) for candidate in kind.candidates(search)]
        found[f"candidates {room} {values} {variation}"] = [len(candidates), *(numbers(list(candidates)))]
    known.check(f"mechanisms/{kind.name}", found)


def test_known_tables() -> None:
    found: dict[str, Any] = {}
    for name, table in {
        **{
            f"binomial {trials} {p}": binomial.table(trials, p)
            for trials, p in ((1, 0.3), (40, 0.9), (300, 0.5), (7, 1e-60), (9, 1.0 - 2.0**-53))
        },
        **{f"skellam {size} {limit}": skellam.table(size, limit) for size, limit in ((0.01, 3), (5.0, 40), (90.0, 70))},
        **{f"gaussian {size} {limit}": discrete_gaussian.table(size, limit) for size, limit in ((0.1, 3), (5.0, 40))},
        **{f"sum {size}": discrete_gaussian.sum_table(size, 4) for size in (0.1, 5.0)},
        **{f"fine {ratio} {limit}": fine_gaussian.table(ratio, limit) for ratio, limit in ((8.0, 108), (11.0, 5))},
    }.items():
        # Every digit counts: messages of the same keystream are the same for ever.
        digest = hashlib.sha256(table.high.tobytes() + table.low.tobytes()).hexdigest()[:12]
        found[name] = [int(digest, 16), table.base, len(table.high), table.rounding]
    known.check("mechanisms/tables", found, rel=1e-12)


def test_known_ladders() -> None:
    found = {f"ladder {values}": lattice._ladder(values) for values in (2, 3, 10, 200, MAX_LEVELS, MAX_LEVELS + 2)}
    found["coin bytes"] = [lattice.coin_bytes(trials) for trials in (0, 16, 17, 48, 49, 256)]
    found["farthest"] = [fine_gaussian.farthest(ratio) for ratio in (8.0, 11.0, 15.9)]
    known.check("mechanisms/lattice", found)
    assert max(lattice._ladder(MAX_LEVELS + 2)) == MAX_LEVELS
