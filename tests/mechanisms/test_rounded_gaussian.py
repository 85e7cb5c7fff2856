"""Gaussian noise before rounding: the law of messages and of their sums, against what the accounting takes them for."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy import stats

from cpsgd import Protocol, guarantee
from cpsgd.codec.pipeline import to_grid
from cpsgd.codec.rounding import CELL_BITS, UNIFORMS
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import RoundedGaussian, fine_gaussian
from cpsgd.mechanisms.rounded_gaussian import uniformity
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.privacy.gaussian import gdp_delta
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.randomness import Keystream

Array = NDArray[np.float64]
FALSE_ALARM = 1e-6


def mechanism(**changes: Any) -> RoundedGaussian:
    fields = {"noise_deviation": 1.5, "step": 0.5, "window": 32, "coordinate_range": 1.0}
    return RoundedGaussian(**{**fields, **changes})


# ------------------------------------------------------------------ the law of what is sent


@lru_cache(maxsize=1)
def uniform_law() -> Array:
    found = np.ones(1)
    for _ in range(UNIFORMS):
        found = np.convolve(found, np.full(2**CELL_BITS, 2.0**-CELL_BITS))
    return found


def client_law(sent: RoundedGaussian, point: int) -> Array:
    """The masses of a client's integers at a grid point, from the kernel's own table."""
    table = fine_gaussian.table(sent._ratio, sent.cells)
    # Differences of integers: those of floats next to 1 would lose the upper tail.
    below = [0, *(int(h) << 64 | int(w) for h, w in zip(table.high, table.low, strict=True)), 1 << 128]
    cells = [(end - start) / 2.0**128 for start, end in itertools.pairwise(below)]
    uniforms = uniform_law()
    noise = np.zeros((len(cells) - 1 << CELL_BITS) + len(uniforms))
    for start, mass in enumerate(cells):
        noise[start << CELL_BITS : (start << CELL_BITS) + len(uniforms)] += mass * uniforms
    places = point + np.arange(len(noise)) - len(noise) // 2 + (sent.window << (sent.fraction_bits - 1))
    integers = np.clip(places >> sent.fraction_bits, 0, sent.window - 1)
    found: Array = np.bincount(integers, weights=noise, minlength=sent.window).astype(np.float64)
    return found


def ideal_sum(claimed: RoundedGaussian, points: list[int]) -> Array:
    """The masses of the Gaussian of the sum, rounded by the lemma's kernel, for sums of so many clients' integers.

    By the inverse Fourier transform: a Gaussian, and n numbers uniform on the grid points of a level.
    """
    clients = len(points)
    mean = sum(points) / 2**claimed.fraction_bits + clients * claimed.centre
    variance = clients * claimed.noise_deviation**2
    frequencies = np.arange(-4096, 4097) / 2048
    uniform = np.sinc(frequencies) / np.sinc(frequencies / 2**claimed.fraction_bits)
    spectrum = np.exp(-2.0 * (math.pi * frequencies) ** 2 * variance) * uniform**clients
    sums = np.arange(clients * (claimed.window - 1) + 1)
    found: Array = np.cos(2.0 * math.pi * np.outer(sums - mean, frequencies)) @ spectrum / 2048
    return found


def distance(sent: RoundedGaussian, claimed: RoundedGaussian, points: list[int]) -> float:
    real = np.ones(1)
    for point in points:
        real = np.convolve(real, client_law(sent, point))
    ideal = ideal_sum(claimed, points)
    size = max(len(real), len(ideal))
    apart = np.abs(np.pad(real, (0, size - len(real))) - np.pad(ideal, (0, size - len(ideal)))).sum()
    return 0.5 * float(apart + max(0.0, 1.0 - ideal.sum()))


def claimed_distance(claimed: RoundedGaussian, clients: int) -> float:
    """The sampler's and the window's, and half of what densities are off by."""
    return clients * claimed.noise.variation + 0.5 * math.expm1(claimed.noise.slack(clients))


def holds(sent: RoundedGaussian, claimed: RoundedGaussian, points: list[int]) -> bool:
    return distance(sent, claimed, points) <= claimed_distance(claimed, len(points)) + 1e-11


NARROW = mechanism(window=16)  # what is cut off shows
LITTLE = mechanism(noise_deviation=1.0, window=40)  # what rounding tells shows
WIDE = mechanism(noise_deviation=5.7, window=120, coordinate_range=3.0)
POINTS = [[700], [0, 300], [1000, -512], [37, 0, 901]]


@pytest.mark.parametrize("points", POINTS, ids=str)
@pytest.mark.parametrize("example", [mechanism(), NARROW, LITTLE, WIDE], ids=str)
def test_sums_have_the_law_that_is_accounted_for(example: RoundedGaussian, points: list[int]) -> None:
    assert all(abs(point) <= example.grid.limit for point in points)
    assert holds(example, example, points)


def test_the_distance_that_is_claimed_is_not_far_from_the_real_one() -> None:
    assert distance(NARROW, NARROW, [4096, 4096]) > 0.01 * claimed_distance(NARROW, 2)
    apart = max(distance(LITTLE, LITTLE, [0, point]) for point in range(0, 2048, 256))
    assert apart > 0.1 * claimed_distance(LITTLE, 2)


@pytest.mark.parametrize(
    ("sent", "claimed"),
    [
        (mechanism(), mechanism(noise_deviation=1.5 * (1.0 + 1e-6))),  # σ
        (mechanism(noise_deviation=1.5 * (1.0 - 1e-6)), mechanism()),
        (mechanism(window=12), mechanism()),  # the window
        (NARROW, replace(NARROW, window=17)),
    ],
)
def test_what_is_not_as_claimed_is_noticed(sent: RoundedGaussian, claimed: RoundedGaussian) -> None:
    assert not holds(sent, claimed, [0, 300])


class _Coarse(RoundedGaussian):
    """Takes a level for twice as many grid points as it has."""

    @property
    def fraction_bits(self) -> int:  # type: ignore[override]
        return super().fraction_bits + 1

    @property
    def _ratio(self) -> float:
        return super()._ratio / 2.0


def test_another_grid_is_noticed() -> None:
    coarse = _Coarse(noise_deviation=1.5, step=0.5, window=32, coordinate_range=1.0)
    assert not holds(coarse, mechanism(), [0, 300])


@pytest.mark.parametrize("example", [mechanism(), NARROW, WIDE], ids=str)
def test_messages_have_the_law(example: RoundedGaussian) -> None:
    draws = 1 << 16
    for number, point in enumerate((0, 411, -1000)):
        keystream = Keystream(number.to_bytes(16, "little")).take(draws * example.keystream_bytes)
        values = np.empty(draws, dtype=np.uint32)
        example.kernel().values(np.full(draws, point, dtype=np.float32), keystream, values)
        expected = client_law(example, point) * draws
        enough = expected >= 10.0
        counts = np.bincount(values, minlength=example.window)
        observed = [*counts[enough], counts[~enough].sum()]
        wanted = [*expected[enough], expected[~enough].sum()]
        kept = [(o, w) for o, w in zip(observed, wanted, strict=True) if w >= 5.0]
        statistic = sum((o - w) ** 2 / w for o, w in kept)
        assert stats.chi2.sf(statistic, len(kept) - 1) > FALSE_ALARM


def test_rounding_is_a_variance_of_a_twelfth_and_no_bias() -> None:
    for point in (0, 300, 1024):
        law, integers = client_law(mechanism(window=40), point), np.arange(40)
        mean = law @ integers
        assert mean - mechanism(window=40).centre == pytest.approx(point / 2048, abs=1e-9)
        assert law @ (integers - mean) ** 2 == pytest.approx(1.5**2 + 1.0 / 12.0, rel=1e-7)


# ------------------------------------------------------------------ privacy


def exact_delta(example: RoundedGaussian, epsilon: float, points: tuple[int, int], others: list[int]) -> float:
    """δ of one coordinate in one round, by adding up the sum's outcomes."""
    laws = []
    for point in points:
        law = client_law(example, point)
        for other in others:
            law = np.convolve(law, client_law(example, other))
        laws.append(law)
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0.0).sum()) for a, b in (laws, laws[::-1]))


@pytest.mark.parametrize("others", [[], [100], [0, 777]], ids=str)
def test_the_guarantee_holds_and_is_nearly_exact(others: list[int]) -> None:
    example = mechanism(window=48)
    protocol = Protocol(clients=len(others) + 1, dim=1, clip_norm=0.5, mechanism=example, rotate=False)
    for delta in (1e-3, 1e-5):
        proved = guarantee(protocol, delta)
        assert proved.method == "rounded-gaussian"
        # 0.5 is one step, 2048 points.
        exact = exact_delta(example, proved.epsilon, (1024 * 2, -1024 * 2), others)
        assert exact <= delta
        # The rounding hides a little more than the Gaussian does.
        assert exact >= 0.3 * delta


def sum_law(example: RoundedGaussian, points: list[int]) -> Array:
    found = np.ones(1)
    for point in points:
        found = np.convolve(found, client_law(example, point))
    return found


def divergence(ours: Array, theirs: Array, epsilon: float) -> float:
    """The smallest δ at this ε."""
    pairs = ((ours, theirs), (theirs, ours))
    return max(float(np.maximum(a - math.exp(epsilon) * b, 0.0).sum()) for a, b in pairs)


@pytest.mark.parametrize(("sigma", "window"), [(0.8, 12), (1.2, 14)])
@pytest.mark.parametrize("clients", [1, 2, 3])
def test_two_rounds_of_narrow_windows_keep_the_guarantee(clients: int, sigma: float, window: int) -> None:
    # What is cut off, what rounding tells and the noise all count here.
    example = mechanism(noise_deviation=sigma, step=1.0, window=window, coordinate_range=0.7)
    protocol = Protocol(clients=clients, dim=1, clip_norm=0.7, mechanism=example, rotate=False)
    end = int(example.grid.limit)
    for adjacency, other in ((Adjacency.REPLACE_ONE, -end), (Adjacency.ZERO_OUT, 0)):
        proved = guarantee_over_rounds(protocol, 0.05, rounds=2, adjacency=adjacency)
        worst = 0.0
        for rest in (0, end // 2, end):
            near, far = (sum_law(example, [point] + [rest] * (clients - 1)) for point in (end, other))
            exact = divergence(np.multiply.outer(near, near), np.multiply.outer(far, far), proved.epsilon)
            worst = max(worst, exact)
        assert 0.5 * 0.05 < worst <= 0.05


def test_sampled_sums_keep_the_guarantee() -> None:
    example = mechanism(noise_deviation=0.8, step=1.0, window=14)
    protocol = Protocol(clients=2, dim=1, clip_norm=1.0, mechanism=example, rotate=False)
    drawn = guarantee_over_rounds(protocol, 1e-2, participation="poisson:0.3", adjacency="zero-out")
    chosen = guarantee_over_rounds(protocol, 1e-2, participation=Participation.fixed_size(cohort=2, population=3))
    end = int(example.grid.limit)
    for other in (0, end // 2, end, -end):
        # A client is drawn with probability 0.3, or sends noise alone; so is the other one.
        without = 0.7 * sum_law(example, [0, 0]) + 0.3 * sum_law(example, [0, other])
        present = 0.7 * sum_law(example, [end, 0]) + 0.3 * sum_law(example, [end, other])
        assert divergence(0.7 * without + 0.3 * present, without, drawn.epsilon) <= 1e-2
        # Two clients out of three.
        absent = sum_law(example, [other, other]) / 3.0
        laws = [absent + 2.0 / 3.0 * sum_law(example, [point, other]) for point in (end, -end)]
        assert divergence(laws[0], laws[1], chosen.epsilon) <= 1e-2


def test_less_noise_than_claimed_breaks_the_guarantee() -> None:
    example = mechanism(window=48)
    protocol = Protocol(clients=2, dim=1, clip_norm=0.5, mechanism=example, rotate=False)
    proved = guarantee(protocol, 1e-5)
    quieter = replace(example, noise_deviation=1.4)
    assert exact_delta(quieter, proved.epsilon, (2048, -2048), [0]) > 1e-5


def test_rounds_and_sampling_cost_what_the_gaussian_mechanism_costs() -> None:
    example = mechanism(noise_deviation=8.0, window=256, step=0.2)
    size = {"clients": 20, "dim": 50, "clip_norm": 1.0}
    protocol = Protocol(**size, mechanism=example)
    floats = Protocol.gaussian(**size, sigma=8.0 * 0.2)
    for options in (
        {"rounds": 30},
        {"rounds": 30, "surviving": 12, "colluding": 2},
        {"rounds": 30, "participation": "poisson:0.1", "adjacency": "zero-out"},
        {"rounds": 30, "participation": "fixed-size:0.1"},
    ):
        ours = guarantee_over_rounds(protocol, 1e-6, **options)
        exact = guarantee_over_rounds(floats, 1e-6, **options)
        assert exact.epsilon * (1.0 - 1e-9) <= ours.epsilon <= exact.epsilon * (1.0 + 1e-4)


def test_one_client_alone_is_the_gaussian_mechanism() -> None:
    assert uniformity(1.0, 1) == 0.0
    assert mechanism().noise.slack(1) == 0.0


def test_fractional_parts_are_charged_for() -> None:
    # Two clients with little noise each tell more by their rounding than many do.
    assert uniformity(1.0, 2) == pytest.approx(2.0 * math.exp(-(math.pi**2)), rel=0.2)
    assert uniformity(1.0, 50) < 1e-2 * uniformity(1.0, 2)
    example = mechanism(noise_deviation=1.0, window=64, step=1.0)
    few = Protocol(clients=2, dim=1000, clip_norm=0.1, mechanism=example)
    free = guarantee(Protocol.gaussian(clients=2, dim=1000, clip_norm=0.1, sigma=1.0), 1e-6)
    assert guarantee(few, 1e-6).epsilon >= free.epsilon + 2.0 * 1000 * uniformity(1.0, 2)


def test_a_window_that_is_too_narrow_is_refused() -> None:
    narrow = Protocol(clients=2, dim=1000, clip_norm=0.1, mechanism=mechanism(window=16, coordinate_range=0.1))
    with pytest.raises(ConditionError, match="wider window, more noise per client"):
        guarantee(narrow, 1e-9)


@pytest.mark.parametrize("points", [[0, 512], [100, 1024], [1024, 1024], [37, 0, 901]], ids=str)
def test_likelihoods_are_off_by_no_more_than_the_slack(points: list[int]) -> None:
    real = np.ones(1)
    for point in points:
        real = np.convolve(real, client_law(LITTLE, point))
    ideal = ideal_sum(LITTLE, points)
    seen = ideal > 1e-8
    worst = float(np.abs(np.log(real[seen] / ideal[seen])).max())
    slack = LITTLE.noise.slack(len(points))
    assert 0.01 * slack < worst <= slack + 1e-7


@pytest.mark.parametrize("sigma", [0.8, 1.5, 90.0, 2047.0])
def test_noise_on_the_grid_counts_as_less_than_it_is(sigma: float) -> None:
    """It is a rounding of a Gaussian with five squared points less."""
    given = mechanism(noise_deviation=sigma, window=1 << 17)
    points = sigma * 2.0**given.grid.fraction_bits
    assert 2048 <= points < 4096
    for honest in (1, 7):
        assert given.noise.law(honest).deviation ** 2 <= honest * sigma**2 * (1.0 - 5.0 / points**2)


def test_nobodys_noise_is_no_privacy() -> None:
    with pytest.raises(ConditionError, match="No noise arrived"):
        mechanism().noise.law(0)


def test_sensitivity_is_the_norms_or_the_ranges() -> None:
    example = mechanism()
    whole = example.sensitivity(dim=100, clip_norm=1.0, adjacency=Adjacency.REPLACE_ONE)
    assert whole == pytest.approx(4.0)
    assert example.sensitivity(dim=100, clip_norm=1.0, adjacency=Adjacency.ZERO_OUT) == pytest.approx(2.0)
    assert example.sensitivity(dim=1, clip_norm=9.0, adjacency=Adjacency.REPLACE_ONE) == pytest.approx(4.0)
    stated = example.sensitivity(
        dim=100, clip_norm=1.0, adjacency=Adjacency.REPLACE_ONE, replace_one_distance=math.sqrt(2.0)
    )
    assert math.sqrt(2.0) / 0.5 < stated < 1.01 * math.sqrt(2.0) / 0.5
    assert example.extent.reach(Adjacency.REPLACE_ONE) == pytest.approx(4.0)


@pytest.mark.parametrize("reach", [1e-6, 0.4 / 2048, 0.9 / 2048, 1.9 / 2048, 0.3], ids=str)
@pytest.mark.parametrize("adjacency", list(Adjacency))
def test_neighbours_on_the_grid_are_no_further_apart_than_the_sensitivity(reach: float, adjacency: Adjacency) -> None:
    # A range below the grid's resolution is one point of it, which is what coordinates are clipped to.
    example = mechanism(noise_deviation=1.0, step=1.0, coordinate_range=reach)
    protocol = Protocol(clients=1, dim=400, clip_norm=8.0, mechanism=example, rotate=False)
    grid = example.grid
    points = np.clip(np.rint(to_grid(protocol, np.full(400, 0.39), 0)), -grid.limit, grid.limit)
    apart = adjacency.distance(float(np.linalg.norm(points))) / 2.0**grid.fraction_bits
    assert apart > 0.0
    assert protocol.sensitivity(adjacency) >= apart
    assert protocol.reach(adjacency) >= adjacency.distance(float(points.max())) / 2.0**grid.fraction_bits


def test_a_range_below_a_grid_point_keeps_its_guarantee() -> None:
    example = mechanism(noise_deviation=0.8, step=1.0, coordinate_range=1e-6)
    protocol = Protocol(clients=1, dim=100_000, clip_norm=1.0, mechanism=example, rotate=False)
    proved = guarantee(protocol, 1e-3)
    # All coordinates at one grid point or its opposite: the sum of 100,000 likelihoods is Gaussian.
    mu = 2.0 * math.sqrt(100_000) * 2.0**-example.grid.fraction_bits / math.sqrt(0.8**2 + 1.0 / 12.0)
    assert gdp_delta(mu, proved.epsilon) <= 1e-3


@pytest.mark.parametrize(("clients", "dim"), [(10**6, 1), (2, 10**6)])
def test_rounding_that_tells_too_much_is_refused(clients: int, dim: int) -> None:
    loud = mechanism(noise_deviation=0.8, step=1.0, window=64)
    protocol = Protocol(clients=clients, dim=dim, clip_norm=1.0, mechanism=loud, rotate=False)
    with pytest.raises(ConditionError, match="more noise per client"):
        guarantee(protocol, 1e-5)
    with pytest.raises(ConditionError, match="add noise"):
        guarantee_over_rounds(protocol, 1e-5, rounds=3)


# ------------------------------------------------------------------ use


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"noise_deviation": 0.5}, r"Expected noise_deviation in \[0.8, 2047\] steps, got noise_deviation=0.5"),
        ({"noise_deviation": math.nan}, "noise_deviation"),
        ({"noise_deviation": 5000.0}, "change the step instead"),
        ({"window": 1}, "window"),
        ({"window": 2**20}, "window"),
        ({"window": 3.5}, "window"),
        ({"step": 0.0}, "step"),
        ({"step": -1.0}, "step"),
        ({"coordinate_range": 9.0}, "use a wider window"),
        ({"coordinate_range": 0.0}, "coordinate_range"),
        ({"noise_deviation": 1.0, "window": 2**17, "coordinate_range": 10_000.0}, "grid points"),
    ],
)
def test_bad_parameters_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        mechanism(**changes)


def test_every_sigma_has_a_table_and_a_grid() -> None:
    for sigma in (1.0, math.nextafter(2.0, 1.0), 2.0, math.nextafter(2.0, 3.0), 3.0, 1023.9, 2047.0):
        example = mechanism(noise_deviation=sigma, window=40_000)
        assert 8.0 * (1.0 - 1e-12) <= example._ratio < 16.0
        assert example._ratio * 256 == sigma * 2**example.grid.fraction_bits
        assert len(fine_gaussian.table(example._ratio, example.cells).high) < 500
        example.kernel()


def test_a_smaller_step_takes_of_the_range_what_window_and_grid_hold() -> None:
    small = mechanism().with_scale(1e-3)
    assert (small.step, small.noise_deviation, small.window) == (1e-3, 1.5, 32)
    assert small.coordinate_range == pytest.approx(0.49 * 32 * 1e-3)
    wide = mechanism(window=2**17).with_scale(1e-5)
    assert wide.grid.limit <= 2**24
    assert mechanism().with_scale(7.0).coordinate_range == 1.0


@pytest.mark.parametrize("sigma", [1.0, 0.9, 0.8])
def test_the_ripple_is_what_rounding_adds_and_little_more(sigma: float) -> None:
    """Masses of N(x, σ²) rounded, which is smeared out by a uniform number, weigh all integers alike but for it."""
    noise = RoundedGaussian(noise_deviation=sigma, step=0.1, window=64, coordinate_range=0.1).noise
    integers = np.arange(-40, 41)
    density = max(abs(float(stats.norm.pdf(integers, x, sigma).sum()) - 1.0) for x in np.linspace(0.0, 1.0, 65))
    assert density <= noise.ripple <= 1.06 * density
