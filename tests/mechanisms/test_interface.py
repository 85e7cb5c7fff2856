"""What every mechanism promises to those who ask it: the codec, simulation, accountant, planner and protocol files."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from cpsgd.codec import pipeline
from cpsgd.codec.clip import Grid
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.errors import ConditionError, ParameterError
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
)
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.interface import Extent
from cpsgd.mechanisms.law import Law, Normal, Steps
from cpsgd.mechanisms.noise import FairCoins, SumRounding
from cpsgd.mechanisms.whole_laplace import WholeLaplace
from cpsgd.neighbours import Adjacency
from cpsgd.protocol import Protocol
from cpsgd.randomness import Keystream
from cpsgd.registry import MECHANISMS

EXAMPLES: dict[str, list[Mechanism]] = {
    "binomial": [
        Binomial(levels=4, trials=20, coordinate_range=0.5),  # coins
        Binomial(levels=5, trials=30, p=0.3, coordinate_range=0.4),  # inversion
    ],
    "gaussian": [Gaussian(sigma=0.7)],
    "skellam": [Skellam(levels=4, variance=5.0, coordinate_range=0.5)],
    "discrete-gaussian": [
        DiscreteGaussian(levels=4, sigma_squared=5.0, coordinate_range=0.5),
        DiscreteGaussian(levels=3, sigma_squared=0.4, coordinate_range=0.5),  # sums by convolution
    ],
    "coins": [
        Coins(coins=1, theta=0.2, coordinate_range=0.5),
        Coins(coins=7, theta=0.05, coordinate_range=0.4),
    ],
    "sampled-coins": [SampledCoins(rate=0.3, theta=0.4, coordinate_range=0.5)],
    "lazy-coins": [
        LazyCoins(rate=0.3, theta=0.4, coordinate_range=0.5),
        LazyCoins(rate=0.6, theta=0.2, coordinate_range=0.5),
    ],
    "rounded-gaussian": [
        RoundedGaussian(noise_deviation=1.5, step=0.25, window=45, coordinate_range=0.5),
        RoundedGaussian(noise_deviation=7.0, step=0.1, window=200, coordinate_range=0.5),
    ],
    "rounded-correlated": [
        RoundedCorrelated(
            noise_deviation=1.8,
            step=0.25,
            window=32,
            coordinate_range=0.5,
            bands=3,
            run_length=40,
            inherited_range=3.0,
        ),
    ],
    "correlated-gaussian": [
        CorrelatedGaussian(noise_deviation=8.0, step=0.25, window=512, coordinate_range=0.5, bands=3, run_length=40),
    ],
    "shaped-gaussian": [
        ShapedGaussian(noise_deviation=3.0, step=0.25, window=128, coordinate_range=0.5, bands=3, run_length=40),
    ],
    "discrete-laplace": [
        DiscreteLaplace(levels=5, spread=4, shares=40, window=1024, coordinate_range=0.5),
        DiscreteLaplace(levels=4, spread=3, shares=1, window=4096, coordinate_range=0.5),  # all of it at one client
    ],
    "whole-laplace": [
        WholeLaplace(levels=3, spread=3, divisor=2, shares=40, window=1024, coordinate_range=0.5),
        WholeLaplace(levels=2, spread=1, divisor=2, shares=1, window=4096, coordinate_range=0.5),
    ],
}
"""Every mechanism by its name, in each of its kinds."""

ALL = [mechanism for examples in EXAMPLES.values() for mechanism in examples]
INTEGER = [mechanism for mechanism in ALL if mechanism.grid is not None]
FLOAT = [mechanism for mechanism in ALL if mechanism.grid is None]
# Those whose noise is drawn apart from the rounding, and those whose rounding is the noise.
ADDED = [mechanism for mechanism in INTEGER if mechanism.noise.separate]
TILTED = [mechanism for mechanism in INTEGER if isinstance(mechanism.noise.law(1), Steps)]
every = pytest.mark.parametrize("mechanism", ALL, ids=str)
every_integer = pytest.mark.parametrize("mechanism", INTEGER, ids=str)
every_added = pytest.mark.parametrize("mechanism", ADDED, ids=str)
every_tilted = pytest.mark.parametrize("mechanism", TILTED, ids=str)
# Other laws have tests of their own.
LOG_CONCAVE = [mechanism for mechanism in ADDED if isinstance(mechanism.noise.law(1), Law)]
every_log_concave = pytest.mark.parametrize("mechanism", LOG_CONCAVE, ids=str)
every_with_noise = pytest.mark.parametrize("mechanism", [*LOG_CONCAVE, *FLOAT], ids=str)

# One test in a million at most fails by chance: 5.4 standard errors on both sides are 7e-8.
ERRORS = 5.4
FALSE_ALARM = 1e-6
DRAWS = 40_000


def protocol_of(mechanism: Mechanism, **options: Any) -> Protocol:
    shared: dict[str, Any] = {"clients": 40, "dim": 6, "clip_norm": 1.5, "rotate": mechanism.grid is not None}
    return Protocol(**{**shared, **options}, mechanism=mechanism)


def stream(number: int) -> Keystream:
    """A fixed keystream."""
    return Keystream(number.to_bytes(16, "little"))


def single_draws(mechanism: Mechanism, points: NDArray[np.float32], keystream: NDArray[np.uint8]) -> NDArray[Any]:
    """What one client sends for coordinates that are prepared already."""
    if mechanism.grid is None:
        floats = np.empty(points.size, dtype=np.float32)
        mechanism.kernel().floats(points, keystream, floats)
        return floats
    values = np.empty(points.size, dtype=np.uint32)
    mechanism.kernel().values(points, keystream, values)
    return values


def encoded_zeros(mechanism: Mechanism, number: int) -> NDArray[np.float64]:
    keystream = stream(number).take(DRAWS * mechanism.keystream_bytes)
    return single_draws(mechanism, np.zeros(DRAWS, dtype=np.float32), keystream).astype(np.float64)


def test_there_is_an_example_of_every_mechanism() -> None:
    assert EXAMPLES.keys() == MECHANISMS.keys()
    for name, examples in EXAMPLES.items():
        assert examples
        assert all(type(mechanism) is MECHANISMS[name] for mechanism in examples)
        assert all(mechanism.name == name for mechanism in examples)


# ------------------------------------------------------------------ as data


@every
def test_protocol_files_round_trip(mechanism: Mechanism) -> None:
    protocols = [protocol_of(mechanism)]
    if mechanism.grid is not None:
        modulus = None if mechanism.not_summed or mechanism.wraps else 2 * mechanism.values
        protocols.append(protocol_of(mechanism, rotate=False, modulus=modulus))
    for protocol in protocols:
        again = Protocol.from_json(protocol.to_json())
        assert again == protocol
        assert again.fingerprint == protocol.fingerprint
        assert type(again.mechanism) is type(mechanism)
        assert json.loads(protocol.to_json()) == protocol.to_dict()


def another(value: object) -> object:
    """A value that a field can have, too."""
    assert not isinstance(value, bool)
    if value is None:
        return 1
    if isinstance(value, int):
        return value + 1
    if value == "":
        return "1:8192,2:2048"  # taps, for three bands
    assert isinstance(value, float)
    return 0.875 * value


@every
def test_the_fingerprint_stands_for_every_field(mechanism: Mechanism) -> None:
    names = [field.name for field in dataclasses.fields(mechanism)]  # type: ignore[arg-type]
    assert names
    changed = [
        dataclasses.replace(mechanism, **{name: another(getattr(mechanism, name))})  # type: ignore[type-var]
        for name in names
    ]
    protocols = [protocol_of(mechanism), *map(protocol_of, changed)]
    protocols += [protocol_of(mechanism, **{name: value}) for name, value in [("clients", 41), ("dim", 7)]]
    protocols += [protocol_of(mechanism, clip_norm=1.25), protocol_of(mechanism, rotation_seed=1)]
    if mechanism.grid is not None:
        protocols.append(protocol_of(mechanism, rotate=False))
        if mechanism.not_summed is None and not mechanism.wraps:
            protocols.append(protocol_of(mechanism, modulus=1 << 20))
    assert len({protocol.fingerprint for protocol in protocols}) == len(protocols)
    assert len({protocol.to_json() for protocol in protocols}) == len(protocols)


@every
def test_describes_itself_in_a_line(mechanism: Mechanism) -> None:
    assert mechanism.describe()
    assert "\n" not in mechanism.describe()


@every
def test_an_unknown_mechanism_names_the_known_ones(mechanism: Mechanism) -> None:
    with pytest.raises(ParameterError, match="mechanism") as caught:
        Protocol.from_dict({**protocol_of(mechanism).to_dict(), "mechanism": "laplace"})
    assert all(repr(name) in str(caught.value) for name in MECHANISMS)
    assert "'laplace'" in str(caught.value)
    with pytest.raises(ParameterError) as caught:
        Protocol.from_dict({**protocol_of(mechanism).to_dict(), "mechanism": "x" * 10**6})
    assert len(str(caught.value)) < 1_000


@every
@pytest.mark.parametrize("value", [1, 0.5, None, "red"])
def test_an_unknown_field_names_the_known_ones(mechanism: Mechanism, value: object) -> None:
    with pytest.raises(ParameterError, match=r"Unknown protocol fields \['colour'\]") as caught:
        Protocol.from_dict({**protocol_of(mechanism).to_dict(), "colour": value})
    for field in dataclasses.fields(mechanism):  # type: ignore[arg-type]
        assert repr(field.name) in str(caught.value)
    with pytest.raises(ParameterError) as caught:
        Protocol.from_dict({**protocol_of(mechanism).to_dict(), "x" * 10**6: value})
    assert len(str(caught.value)) < 1_000


@every
def test_a_missing_field_is_named(mechanism: Mechanism) -> None:
    whole = {**protocol_of(mechanism).to_dict(), "mechanism": mechanism.name}
    assert Protocol.from_dict(whole) == protocol_of(mechanism)
    for field in dataclasses.fields(mechanism):  # type: ignore[arg-type]
        if field.default is not dataclasses.MISSING:
            continue
        with pytest.raises(ParameterError, match=field.name):
            Protocol.from_dict({name: value for name, value in whole.items() if name != field.name})


@every
def test_fields_of_another_mechanism_are_not_passed_over(mechanism: Mechanism) -> None:
    for other in ALL:
        # Sampled and lazy coins have the same parameters, and correlated noise has those of independent noise.
        if not dataclasses.asdict(other).keys() >= dataclasses.asdict(mechanism).keys():  # type: ignore[call-overload]
            mixed = {**protocol_of(other).to_dict(), **protocol_of(mechanism).to_dict(), "mechanism": other.name}
            with pytest.raises(ParameterError):
                Protocol.from_dict(mixed)


# ------------------------------------------------------------------ rounds of a run


@every
def test_a_clients_state_is_a_line_more_and_empty_for_independent_noise(mechanism: Mechanism) -> None:
    protocol, memory = protocol_of(mechanism), mechanism.memory
    state, states = memory.init(), []
    assert memory.keeps_rows or state == ()
    for round_ in range(4):
        state = memory.update(state)
        states.append(state)
        assert len(protocol.encode(np.zeros(6), round_, seeds=state)) <= protocol.longest_message_bytes
    if not memory.one_event:
        assert states == [()] * 4
        with pytest.raises(ParameterError, match="seeds"):
            protocol.encode(np.zeros(6), 0, seeds=(b"s" * 16,))
        return
    if memory.keeps_rows:
        return  # one state, which encoding changes
    # A fresh seed in front of those of the rounds before, as many as there are bands.
    assert [len(seeds) for seeds in states] == [min(number, memory.bands) for number in range(1, 5)]
    assert all(later[1:] == earlier[: memory.bands - 1] for earlier, later in itertools.pairwise(states))
    assert len({seed for seeds in states for seed in seeds}) == 4


# ------------------------------------------------------------------ what a coordinate becomes


@every
def test_honest_messages_are_within_what_is_accepted(mechanism: Mechanism) -> None:
    count, width = 1024, mechanism.keystream_bytes
    limit = 1.5 if mechanism.grid is None else mechanism.grid.limit
    random = stream(1).take(count * width)
    form = mechanism.format(1.5, None)
    packer, packer_width = mechanism.packer()
    for edge in (-limit, 0.0, limit):
        points = np.full(count, edge, dtype=np.float32)
        # The keystream's extremes draw the most extreme noise.
        for keystream in (random, np.zeros_like(random), np.full_like(random, 255)):
            payload = np.zeros(form.payload_bytes(count), dtype=np.uint8)
            form.write(packer, points, keystream[: count * packer_width], payload)
            form.check(payload, count)
            if mechanism.grid is not None:
                assert int(single_draws(mechanism, points, keystream).max()) < mechanism.values


@every_added
def test_the_ends_of_the_range_become_the_outer_levels(mechanism: Mechanism) -> None:
    assert mechanism.grid is not None
    assert mechanism.values >= mechanism.levels
    for edge, lowest in ((-mechanism.grid.limit, True), (mechanism.grid.limit, False)):
        values = single_draws(
            mechanism, np.full(64, edge, dtype=np.float32), stream(2).take(64 * mechanism.keystream_bytes)
        )
        rest = (0, mechanism.values - mechanism.levels) if lowest else (mechanism.levels - 1, mechanism.values - 1)
        assert rest[0] <= int(values.min()) <= int(values.max()) <= rest[1]


def kurtosis(mechanism: Mechanism) -> float:
    """That of one client's noise, and at least 4: a share of Laplace noise is mostly zero, and sometimes large."""
    if not mechanism.pure:
        return 4.0
    summands = mechanism.noise.law(1).summands(60.0)
    points = summands.first + np.arange(len(summands.mass), dtype=np.float64)
    return max(4.0, float(points**4 @ summands.mass) / float(points**2 @ summands.mass) ** 2)


@every
def test_zero_coordinates_become_the_centre(mechanism: Mechanism) -> None:
    draws = encoded_zeros(mechanism, 3)
    largest = mechanism.noise.variance + mechanism.largest_rounding_variance
    assert abs(draws.mean() - mechanism.centre) <= ERRORS * math.sqrt(largest / DRAWS)
    # The variance lies between that of the noise and that with the largest rounding; its error goes by the kurtosis.
    slack = ERRORS * math.sqrt((kurtosis(mechanism) - 1) / DRAWS)
    assert mechanism.noise.variance * (1 - slack) <= draws.var() <= largest * (1 + slack)


@every_tilted
def test_coordinates_tilt_the_mean_and_the_variance_as_is_said(mechanism: Mechanism) -> None:
    grid = mechanism.grid
    assert grid is not None
    for number, share in enumerate((-1.0, -0.61, 0.07, 0.5, 1.0)):
        point = round(share * grid.limit)
        keystream = stream(10 + number).take(DRAWS * mechanism.keystream_bytes)
        points = np.full(DRAWS, point, dtype=np.float32)
        draws = single_draws(mechanism, points, keystream).astype(np.float64)
        variance = mechanism.noise.variance + mechanism.rounding_variance(points[:1])
        assert mechanism.noise.variance <= variance * (1 + 1e-12)
        assert variance <= (mechanism.noise.variance + mechanism.largest_rounding_variance) * (1 + 1e-12)
        expected = mechanism.centre + point / grid.unit / mechanism.scale
        assert abs(draws.mean() - expected) <= ERRORS * math.sqrt(variance / DRAWS)
        # The variance of a squared deviation is at most its mean times its largest value.
        squares = (draws - expected) ** 2
        assert abs(squares.mean() - variance) <= ERRORS * math.sqrt(variance * mechanism.values**2 / DRAWS)


@every_added
def test_coordinates_are_rounded_without_bias(mechanism: Mechanism) -> None:
    silent = mechanism.without_noise()
    assert silent.grid is not None
    for number, share in enumerate((-1.0, -0.61, 0.07, 0.5, 1.0)):
        point = round(share * silent.grid.limit)
        keystream = stream(10 + number).take(DRAWS * silent.keystream_bytes)
        draws = single_draws(silent, np.full(DRAWS, point, dtype=np.float32), keystream).astype(np.float64)
        expected = silent.centre + point / 2.0**silent.grid.fraction_bits
        fraction = expected % 1.0
        assert fraction * (1 - fraction) <= silent.largest_rounding_variance
        assert abs(draws.mean() - expected) <= ERRORS * math.sqrt(fraction * (1 - fraction) / DRAWS)
        assert draws.max() - draws.min() <= 1


@every_integer
def test_the_scale_is_what_a_unit_is_worth(mechanism: Mechanism) -> None:
    grid = mechanism.grid
    assert grid is not None
    if mechanism in ADDED:
        assert grid.unit * mechanism.scale == pytest.approx(2.0**grid.fraction_bits, rel=1e-15)
    for scale in (1e-6, 0.3, 1.0, 17.5):
        changed = mechanism.with_scale(scale)
        if mechanism.on_levels:  # which have a scale already
            assert changed == mechanism
            continue
        assert changed.scale == pytest.approx(scale, rel=1e-15)
        assert (changed.levels, changed.values, changed.centre) == (
            mechanism.levels,
            mechanism.values,
            mechanism.centre,
        )
        if mechanism in ADDED:
            assert changed.noise.variance == mechanism.noise.variance
        # Where the coordinate tilts the odds more there is less noise for every coordinate, and more for zero alone.
        zero = mechanism.noise.variance + mechanism.largest_rounding_variance
        assert changed.noise.variance + changed.largest_rounding_variance == pytest.approx(zero, rel=1e-12)
    assert mechanism.with_scale(mechanism.scale).scale == mechanism.scale


# ------------------------------------------------------------------ rounding and noise apart


@every
def test_without_noise(mechanism: Mechanism) -> None:
    assert mechanism.is_noisy
    if mechanism.grid is None:
        with pytest.raises(ParameterError, match="no mechanism"):
            mechanism.without_noise()
        return
    silent = mechanism.without_noise()
    assert not silent.is_noisy
    assert (silent.noise.variance, silent.noise.variation) == (0.0, 0.0)
    assert silent.grid is not None
    assert silent.grid.limit / silent.grid.unit == pytest.approx(mechanism.grid.limit / mechanism.grid.unit, rel=1e-12)
    if mechanism in ADDED:
        assert (silent.levels, silent.scale, silent.grid) == (mechanism.levels, mechanism.scale, mechanism.grid)
    assert silent.values == silent.levels
    assert np.all(silent.noise.of_sum(5, 9, stream(20)) == 0)
    with pytest.raises(ConditionError, match="no noise"):
        silent.noise.law(10)


def noise_mean(mechanism: Mechanism) -> float:
    """The mean of one client's noise, as it is added."""
    return mechanism.centre - 0.5 * (mechanism.levels - 1)


def chi_square(draws: NDArray[np.int64], first: int, mass: NDArray[np.float64]) -> float:
    """The p-value of draws under a law on first, first + 1, ..., in cells of at least 20 expected draws."""
    expected = mass * draws.size
    # The law has one peak: what is rarer lies at both ends, and is counted with the outermost cells.
    low, high = np.flatnonzero(expected >= 20.0)[[0, -1]]
    assert high - low >= 3
    cells = np.clip(draws - first, low, high) - low
    observed = np.bincount(cells, minlength=high - low + 1)
    inner = expected[low : high + 1].copy()
    inner[0], inner[-1] = expected[: low + 1].sum(), expected[high:].sum()
    return float(stats.chisquare(observed, inner * draws.size / inner.sum()).pvalue)


@every_tilted
def test_where_rounding_is_the_noise_nothing_is_added(mechanism: Mechanism) -> None:
    assert np.all(mechanism.noise.of_sum(5, 9, stream(20)) == 0)
    # No coins: with None a device would have zeros drawn for it elsewhere, and wait for them in every round.
    assert mechanism.noise.on_device(5) == FairCoins(0)


@every_with_noise
@pytest.mark.parametrize("count", [1, 3, 40])
@pytest.mark.parametrize("at_once", [True, False])
def test_the_noise_of_many_clients_at_once_has_the_law_of_as_many_draws(
    mechanism: Mechanism, count: int, at_once: bool
) -> None:
    draw = mechanism.noise.of_sum if at_once else mechanism.noise.of_clients
    draws = draw(count, DRAWS, stream(30 + count))
    law = mechanism.noise.law(count)
    assert draws.shape == (DRAWS,)
    if isinstance(law, Normal):
        assert stats.kstest(draws / law.deviation, "norm").pvalue > FALSE_ALARM
        return
    window = law.summands(60.0)
    # The law's own mean may be another one: it is about differences.
    points = window.first + np.arange(len(window.mass))
    shift = round(count * noise_mean(mechanism) - float(points @ window.mass))
    assert draws.dtype == np.int64
    assert count * noise_mean(mechanism) - float(points @ window.mass) == pytest.approx(shift, abs=1e-6)
    assert chi_square(draws.astype(np.int64), window.first + shift, window.mass) > FALSE_ALARM


@every_tilted
@pytest.mark.parametrize("share", [-1.0, -0.3, 1.0])
def test_one_client_draws_its_steps_from_the_law(mechanism: Mechanism, share: float) -> None:
    law, grid = mechanism.noise.law(1), mechanism.grid
    assert isinstance(law, Steps)
    assert grid is not None
    point = round(share * grid.limit)
    x = point / grid.limit
    step = 0.5 * ((1 - x) * np.array(law.low) + (1 + x) * np.array(law.high))
    mass = np.ones(1)
    for _ in range(law.copies):
        mass = np.convolve(mass, step)
    keystream = stream(5).take(DRAWS * mechanism.keystream_bytes)
    draws = single_draws(mechanism, np.full(DRAWS, point, dtype=np.float32), keystream)
    assert mass.size == mechanism.values
    observed = np.bincount(draws, minlength=mechanism.values)
    assert observed.size == mechanism.values
    assert stats.chisquare(observed, mass * DRAWS).pvalue > FALSE_ALARM


@every_with_noise
def test_one_client_draws_its_noise_from_the_law(mechanism: Mechanism) -> None:
    law = mechanism.noise.law(1)
    if isinstance(law, Normal):
        draws = encoded_zeros(mechanism, 4)
        assert stats.kstest(draws / law.deviation, "norm").pvalue > FALSE_ALARM
        return
    assert isinstance(law, Law)
    assert mechanism.grid is not None
    # On the lowest level nothing is rounded: what remains is the noise.
    keystream = stream(5).take(DRAWS * mechanism.keystream_bytes)
    draws = single_draws(mechanism, np.full(DRAWS, -mechanism.grid.limit, dtype=np.float32), keystream)
    window = law.window(60.0)
    points = np.arange(window.first, window.last + 1)
    shift = round(noise_mean(mechanism) - float(points @ window.mass))
    assert chi_square(draws.astype(np.int64), window.first + shift, window.mass) > FALSE_ALARM


@every
def test_what_a_device_draws_by_itself_is_the_same_noise(mechanism: Mechanism) -> None:
    found = mechanism.noise.on_device(7)
    if isinstance(found, Normal):
        assert found.deviation**2 == pytest.approx(7 * mechanism.noise.variance, rel=1e-12)
    elif isinstance(found, SumRounding):
        levels = found.deviation / 2**found.fraction_bits
        assert levels**2 == pytest.approx(7 * mechanism.noise.variance, rel=1e-12)
        assert (found.clients, found.centre) == (7, mechanism.centre)
    elif found is not None:
        if not mechanism.noise.separate:  # its rounding is the noise
            assert found.trials == 0
            return
        assert found.trials / 4 == pytest.approx(7 * mechanism.noise.variance, rel=1e-12)
        assert found.trials / 2 == pytest.approx(7 * noise_mean(mechanism), rel=1e-12)


# ------------------------------------------------------------------ the law


@every_tilted
@pytest.mark.parametrize("honest", [1, 3, 1000])
def test_the_steps_have_the_mean_and_variance_of_so_many_clients(mechanism: Mechanism, honest: int) -> None:
    law, grid = mechanism.noise.law(honest), mechanism.grid
    assert isinstance(law, Steps)
    assert grid is not None
    assert law.clients == honest
    reach = grid.limit / grid.unit / mechanism.scale
    for masses, end in ((np.array(law.low), -reach), (np.array(law.high), reach)):
        points = np.arange(masses.size)
        mean = float(points @ masses)
        assert masses.sum() == pytest.approx(1.0, rel=1e-15)
        assert law.copies * mean == pytest.approx(mechanism.centre + end, rel=1e-12)
        variance = law.copies * float((points - mean) ** 2 @ masses)
        assert variance == pytest.approx(mechanism.noise.variance, rel=1e-12)
        assert np.all(masses[1:-1] ** 2 >= masses[2:] * masses[:-2])  # log-concave
    # A larger coordinate makes larger integers likelier, in the order of likelihood ratios.
    ratios = np.array(law.high) / np.array(law.low)
    assert np.all(np.diff(ratios) > 0)


@every_tilted
def test_no_clients_no_law(mechanism: Mechanism) -> None:
    with pytest.raises(ConditionError, match="No noise arrived"):
        mechanism.noise.law(0)


@every_with_noise
@pytest.mark.parametrize("honest", [1, 3, 1000])
def test_the_law_has_the_variance_of_so_many_clients(mechanism: Mechanism, honest: int) -> None:
    law = mechanism.noise.law(honest)
    if isinstance(law, Normal):
        assert law.deviation**2 <= honest * mechanism.noise.variance
        assert law.deviation**2 == pytest.approx(honest * mechanism.noise.variance, rel=1e-12)
        return
    assert isinstance(law, Law)
    window = law.window(80.0)
    points = np.arange(window.first, window.last + 1) - window.first
    mean = float(points @ window.mass)
    assert float(window.mass.sum()) == pytest.approx(1.0, rel=1e-12)
    assert window.outside_below + window.outside_above < 1e-30
    assert law.variance == pytest.approx(honest * mechanism.noise.variance, rel=1e-9)
    assert float((points - mean) ** 2 @ window.mass) == pytest.approx(law.variance, rel=1e-9)
    assert law.lowest <= window.first
    assert window.last <= law.highest


@every_log_concave
def test_the_law_of_a_sum_is_a_convolution(mechanism: Mechanism) -> None:
    one, three = mechanism.noise.law(1), mechanism.noise.law(3)
    assert isinstance(one, Law)
    assert isinstance(three, Law)
    single, triple = one.window(80.0), three.window(60.0)
    mass = np.convolve(np.convolve(single.mass, single.mass), single.mass)
    start = triple.first - 3 * single.first
    assert mass[start : start + len(triple.mass)] == pytest.approx(triple.mass, rel=1e-8, abs=1e-22)
    # More clients, or more parts of the same kind: one and the same law.
    assert one.with_parts(3 * one.parts).window(60.0).mass == pytest.approx(triple.mass, rel=1e-12)


@every_log_concave
def test_the_law_is_log_concave_and_knows_its_steps(mechanism: Mechanism) -> None:
    law = mechanism.noise.law(10)
    assert isinstance(law, Law)
    window = law.window(60.0)
    ratios = window.mass[1:] / window.mass[:-1]
    assert np.all(ratios[1:] <= ratios[:-1] * (1 + 1e-12))
    points = np.arange(window.first, window.last + 1, dtype=np.float64)
    for direction, inner, expected in ((1, points[1:], 1.0 / ratios), (-1, points[:-1], ratios)):
        step, units = law.step(inner, direction)
        assert 1.0 + step == pytest.approx(expected, rel=1e-9)
        assert np.all(units > 0.0)
    if law.mirror is not None:
        assert window.first + window.last == law.mirror
        assert window.mass == pytest.approx(window.mass[::-1], rel=1e-12)
    assert str(law)


# ------------------------------------------------------------------ privacy


def worth(mechanism: Mechanism) -> float:
    """What a unit of the sensitivity is worth: a level, or the range where steps are affine in the coordinate."""
    assert mechanism.grid is not None
    if mechanism.noise.separate:
        return mechanism.scale
    return mechanism.grid.limit / mechanism.grid.unit


@every
def test_sensitivity_grows_with_what_neighbours_may_change(mechanism: Mechanism) -> None:
    def of(dim: int = 400, clip_norm: float = 1.0, adjacency: str = "replace-one", **changes: float) -> float:
        changed = mechanism.with_scale(changes["scale"]) if changes else mechanism
        return changed.sensitivity(dim=dim, clip_norm=clip_norm, adjacency=Adjacency.parse(adjacency))

    assert of(adjacency="zero-out") < of(adjacency="replace-one")
    norms = [of(clip_norm=norm) for norm in (1e-3, 0.5, 1.0, 2.0, 1e6)]
    assert norms == sorted(norms)
    assert norms[0] < norms[1] < norms[2]
    dims = [of(dim=dim, clip_norm=100.0) for dim in (1, 2, 50, 10**6)]
    assert dims == sorted(dims)
    if mechanism.grid is not None:
        # In integers: where steps are affine in the coordinate the range may change instead of the distance.
        at = {scale: worth(mechanism.with_scale(scale)) / scale for scale in (0.01, 0.1, 1.0, 10.0)}
        scales = [of(scale=scale) * unit for scale, unit in at.items()]
        assert scales == pytest.approx(sorted(scales, reverse=True), rel=1e-12)
        if mechanism in ADDED:
            assert scales == sorted(scales, reverse=True)
        # Never below the distance in units of the scale, unless the range of coordinates is the limit.
        assert of(dim=10**6) >= 2.0 / worth(mechanism)
        side = mechanism.levels - 1 if mechanism in ADDED else mechanism.extent.reach(Adjacency.REPLACE_ONE)
        assert mechanism not in TILTED or side == 2.0
        assert of(dim=1, clip_norm=1e6) == pytest.approx(side, rel=1e-12)


@every
def test_prepared_neighbours_are_within_the_sensitivity(mechanism: Mechanism) -> None:
    protocol = protocol_of(mechanism, dim=64)
    grid = mechanism.grid
    unit = 1.0 if grid is None else grid.limit if mechanism in TILTED else 2.0**grid.fraction_bits
    generator = np.random.default_rng(6)
    for adjacency, size in itertools.product(Adjacency, (0.5, 1.5, 1e3)):
        bound = mechanism.sensitivity(dim=64, clip_norm=protocol.clip_norm, adjacency=adjacency)
        for round_ in range(20):
            first = generator.standard_normal(64) * generator.exponential(size=64) ** 3
            first *= size / np.linalg.norm(first)
            second = -first if adjacency is Adjacency.REPLACE_ONE else np.zeros(64)
            one, other = (pipeline.to_grid(protocol, v, round_).astype(np.float64) for v in (first, second))
            distance = float(np.linalg.norm(one - other)) / unit
            # The baseline's floats are only nearly what is analysed.
            assert distance <= bound * (1.0 if grid is not None else 1.0 + 1e-6)


@every
def test_the_samplers_variation_is_next_to_nothing(mechanism: Mechanism) -> None:
    # That of correlated noise is for the draws of all rounds of a run, of up to forty per message and coordinate.
    draws = 40 * mechanism.memory.rounds if mechanism.memory.one_event else 1
    assert 0.0 <= mechanism.noise.variation < 1e-30 * draws


# ------------------------------------------------------------------ planning


@every
def test_quieter_has_less_noise(mechanism: Mechanism) -> None:
    for factor in (0.999999, 0.5, 0.01):
        before = mechanism
        # Down to where there is no less, or at least a good way.
        for _ in range(100):
            quiet = before.quieter(factor)
            if quiet is None:
                break
            assert 0.0 < quiet.noise.variance < before.noise.variance
            assert quiet.noise.variance <= factor * before.noise.variance + mechanism.noise.variance / 10
            assert quiet.levels == mechanism.levels
            # A range that was changed to keep the scale keeps it within roundings.
            assert quiet.scale == (
                pytest.approx(mechanism.scale, rel=1e-12) if mechanism in TILTED else mechanism.scale
            )
            before = quiet


@every_integer
def test_an_integer_mechanism_can_be_quieter(mechanism: Mechanism) -> None:
    # But for a single coin, which is either flipped or not, and noise that privacy fixes together with the scale.
    alone = mechanism == Coins(coins=1, theta=0.2, coordinate_range=0.5) or mechanism.on_levels
    assert (mechanism.quieter(0.5) is None) == alone


@every
def test_useful_scales_are_in_order(mechanism: Mechanism) -> None:
    for dim, rotate in itertools.product((1, 50, 10**6), (True, False)):
        least, widest = mechanism.useful_scales(dim=dim, clip_norm=2.0, rotate=rotate)
        assert 0.0 <= least <= widest
        if mechanism.on_levels:
            assert least == widest == mechanism.scale
            continue
        twice = mechanism.useful_scales(dim=dim, clip_norm=4.0, rotate=rotate)
        assert twice == pytest.approx((2 * least, 2 * widest))


@every
def test_the_predicted_error_is_the_noise_and_more(mechanism: Mechanism) -> None:
    error = mechanism.predicted_error(clients=40, dim=64, clip_norm=1.5, rotate=mechanism.grid is not None)
    assert error.noise == pytest.approx(64 * mechanism.noise.variance * mechanism.scale**2 / 40)
    worst = 64 * mechanism.largest_rounding_variance * mechanism.scale**2 / 40
    assert 0.0 <= error.rounding <= worst * (1 + 1e-12)
    assert error.total == error.noise + error.rounding + error.clipping
    fewer = mechanism.predicted_error(clients=20, dim=64, clip_norm=1.5, rotate=mechanism.grid is not None)
    assert (fewer.noise, fewer.rounding) == pytest.approx((2 * error.noise, 2 * error.rounding))


# ------------------------------------------------------------------ sums


@every_tilted
@pytest.mark.parametrize("rotate", [True, False])
def test_deviations_cover_the_moments_of_the_steps(mechanism: Mechanism, rotate: bool) -> None:
    law = mechanism.noise.law(1)
    assert isinstance(law, Steps)
    found = mechanism.deviations(clients=1, dim=64, clip_norm=1.5, rotate=rotate)
    assert len(found) == 1 + rotate
    # A coordinate anywhere up to its largest; rotated, that of a vector of one coordinate, which is 1.5/8 or -1.5/8.
    most = min(1.5, mechanism.grid.limit / mechanism.grid.unit)  # type: ignore[union-attr]  # tilts are on a grid
    largest = most * mechanism.grid.unit / mechanism.grid.limit  # type: ignore[union-attr]
    typical = min(1.0, 1.5 / 8 / most * largest)
    places = [[(-largest, 1.0)], [(0.4 * largest, 1.0)], [(0.0, 1.0)], [(largest, 1.0)]]
    for deviation, mixtures in zip(found, (places, [[(-typical, 0.5), (typical, 0.5)]]), strict=False):
        for mixture, slope in itertools.product(mixtures, np.linspace(-2.0, 2.0, 41)):
            moment = -math.inf
            for share, weight in mixture:
                step = 0.5 * ((1 - share) * np.array(law.low) + (1 + share) * np.array(law.high))
                points = np.arange(step.size) - mechanism.centre / law.copies
                one = law.copies * np.logaddexp.reduce(np.log(step) + slope * points)
                moment = np.logaddexp(moment, one + math.log(weight))
            assert moment <= deviation.at(abs(slope)) * (1 + 1e-9) + 1e-12


@every_log_concave
@pytest.mark.parametrize("rotate", [True, False])
@pytest.mark.parametrize("clients", [1, 30])
def test_deviations_cover_the_moments_of_the_noise(mechanism: Mechanism, clients: int, rotate: bool) -> None:
    law = mechanism.noise.law(clients)
    assert isinstance(law, Law)
    window = law.window(600.0)
    points = np.arange(window.first, window.last + 1) - window.first
    centred = points - float(points @ window.mass)
    found = mechanism.deviations(clients=clients, dim=64, clip_norm=1.5, rotate=rotate)
    assert found
    for deviation in found:
        for slope in np.linspace(0.01, min(deviation.steepest, 2.0), 40):
            for sign in (1.0, -1.0):
                moment = np.logaddexp.reduce(np.log(window.mass) + sign * slope * centred)
                assert moment <= deviation.at(slope) * (1 + 1e-9) + 1e-12


@every_integer
@pytest.mark.parametrize("rotate", [True, False])
def test_deviations_cover_the_sums_of_clients_who_hold_the_same(mechanism: Mechanism, rotate: bool) -> None:
    clients, dim, rounds = 300, 64, 3
    protocol = protocol_of(mechanism, clients=clients, dim=dim, rotate=rotate)
    vector, keys = np.eye(dim)[5] * protocol.clip_norm, stream(50)
    away = 0.0
    for round_ in range(rounds):
        points = pipeline.to_grid(protocol, vector, round_)
        keystreams = (keys.take(dim * mechanism.keystream_bytes) for _ in range(clients))
        sums = np.sum([single_draws(mechanism, points, keystream) for keystream in keystreams], axis=0)
        away = max(away, float(np.max(np.abs(sums - clients * mechanism.centre))))
    # 2 e^(λ²V/2 - λt) bounds one coordinate; here for all of them together it is the rate of false alarms.
    nats = math.log(2 * dim * rounds / FALSE_ALARM)
    for deviation in mechanism.deviations(clients=clients, dim=dim, clip_norm=protocol.clip_norm, rotate=rotate):
        slopes = np.geomspace(1e-4, min(deviation.steepest, 20.0), 200)
        assert away <= deviation.offset + min((nats + deviation.at(slope)) / slope for slope in slopes)


@every_integer
def test_rounded_values_lie_within_the_range_where_noise_is_added_to_them(mechanism: Mechanism) -> None:
    clients, range_ = 30, mechanism.coordinate_range
    for clip_norm, within in ((1.5, mechanism.noise.separate), (0.9 * range_, False)):
        found = mechanism.deviations(clients=clients, dim=64, clip_norm=clip_norm, rotate=False)
        assert (range_ * clients / mechanism.scale in [each.offset for each in found]) == within


@pytest.mark.parametrize("mechanism", FLOAT, ids=str)
def test_sums_of_floats_do_not_wrap_around(mechanism: Mechanism) -> None:
    assert mechanism.deviations(clients=30, dim=64, clip_norm=1.5, rotate=False) == []
    with pytest.raises(ParameterError, match="floats"):
        protocol_of(mechanism, modulus=2**10)


def test_distances_are_in_units_of_the_law() -> None:
    """Vectors of norm 3 are up to 6 apart, which is 12 steps of a half; ranges of ±4 steps allow 8 per coordinate."""
    extent, grid = Extent(0.5, 4.0), Grid(8.0, 16.0, 2)
    apart: dict[str, Any] = {"clip_norm": 3.0, "adjacency": Adjacency.REPLACE_ONE}
    for dim, grid_, stated, exact, resolution in (
        *((1, None, None, 12.0, 0.0), (1, None, 1.5, 3.0, 0.0), (1, grid, None, 8.0, 0.0), (4, grid, None, 12.0, 0.0)),
        # A distance that is stated counts as 3 at least, and is enforced to within a point of the grid per coordinate.
        *((1, grid, 1.5, 6.0, 0.251), (4, grid, 4.0, 8.0, 0.501)),
    ):
        found = extent.sensitivity(grid_, dim=dim, replace_one_distance=stated, **apart)
        assert exact <= found <= (exact + resolution) * (1.0 + 1e-12)
    wide = dataclasses.replace(extent, growth=2.0)
    assert 16.0 <= wide.sensitivity(grid, dim=1, replace_one_distance=None, **apart) <= 16.0 * (1.0 + 1e-12)
    assert [each.reach(Adjacency.REPLACE_ONE) for each in (extent, wide)] == [8.0, 16.0]
    assert [each.reach(Adjacency.ZERO_OUT) for each in (extent, wide)] == [4.0, 8.0]
    # √4 times 12, and 4 times 8; or 5 in steps of a half, with a point of the grid for each coordinate.
    for grid_, dim, exact, resolution in ((None, 4, 24.0, 0.0), (grid, 4, 10.0, 1.01), (None, 1, 8.0, 0.0)):
        found = extent.l1_sensitivity(grid_, 12.0, dim, Adjacency.REPLACE_ONE, 5.0)
        assert exact <= found <= (exact + resolution) * (1.0 + 1e-12)
