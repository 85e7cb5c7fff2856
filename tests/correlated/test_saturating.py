"""`RoundedCorrelated`: messages that saturate, rounded at random."""

import hashlib
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy.special import ndtr
from scipy.stats import chi2

from cpsgd import Protocol, guarantee
from cpsgd.codec import pipeline
from cpsgd.correlated import client_sums, fine_draws
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.errors import ConditionError, ParameterError, RoundRefusedError
from cpsgd.federation.limits import Limits
from cpsgd.mechanisms import fine_gaussian
from cpsgd.mechanisms.noise import FairCoins
from cpsgd.randomness import Keystream

# On a machine with a GPU these are tests of that GPU, and `-m gpu` runs them, too.
pytestmark = [pytest.mark.gpu] if torch.cuda.is_available() else []

TAPS = "1:8118,2:2490,4:1676"


def mechanism(**changes: object) -> RoundedCorrelated:
    fields = {
        "noise_deviation": 1.8,
        "step": 0.05,
        "window": 16,
        "coordinate_range": 0.05,
        "bands": 5,
        "run_length": 100,
        "untrusted_holders": 0,
        "inherited_range": 2.6,
        "taps": TAPS,
    }
    return RoundedCorrelated(**{**fields, **changes})  # type: ignore[arg-type]


def test_rounding_is_unbiased_and_saturates() -> None:
    found = mechanism()
    kernel = found.kernel()
    bits = found.finest_bits
    # The lineage's noise puts numbers at 0.3 steps, and far beyond either end.
    for place, expected in ((0.3, 0.3), (100.0, 7.5), (-100.0, -7.5)):
        inherited = np.full(20_000, round(place * 2.0**bits), dtype=np.int64)
        values = np.empty(20_000, dtype=np.uint32)
        keystream = np.random.default_rng(1).integers(0, 256, 20_000 * found.keystream_bytes, dtype=np.uint8)
        kernel.after(inherited).values(np.zeros(20_000, dtype=np.float32), keystream, values)
        # A half-integer lattice: the standard error is 0.0033, five of it a false alarm of 6e-7.
        assert abs(float(values.mean()) - found.centre - expected) < (0.0177 if abs(place) < 1.0 else 1e-12)
        assert values.max() <= 15


def test_a_window_without_room_for_noise_is_refused() -> None:
    """7½ steps to either end: a coordinate takes one, and what is inherited the rest, or almost."""
    assert mechanism(step=0.05, inherited_range=6.4999).noise.room == pytest.approx(1e-4, rel=1e-6)
    with pytest.raises(ParameterError, match="to have room"):
        mechanism(step=0.05, inherited_range=6.5)


def test_chosen_seeds_take_no_more_room_than_planned() -> None:
    found = mechanism(inherited_range=0.01)
    seeds = tuple(bytes([age]) * 16 for age in range(5))
    alone = found.lineages.noise(seeds[:1], 9, 500)
    together = found.lineages.noise(seeds, 9, 500)
    assert 0 < np.abs(together - alone).max() <= math.ldexp(0.01, found.finest_bits)


def test_protocol_survives_its_file() -> None:
    protocol = Protocol(clients=4000, dim=64, clip_norm=0.2, mechanism=mechanism(), rotate=True)
    assert Protocol.from_json(protocol.to_json()) == protocol


@pytest.mark.parametrize("taps", ["1:8118,4", "2:5,1:5", "1:9999,2:9999", "1:5,300:2", "x"])
def test_taps_that_are_none_are_refused(taps: str) -> None:
    with pytest.raises(ParameterError):
        mechanism(taps=taps)


def test_simulated_clients_are_played_as_they_are() -> None:
    found = mechanism()
    sums = found.memory.simulated(7).on_host(5, 300)
    for round in range(3):
        keystream = np.random.default_rng(round).integers(0, 256, 300 * found.keystream_bytes, dtype=np.uint8)
        values, again = np.empty(300, dtype=np.uint32), np.empty(300, dtype=np.uint32)
        for number in range(5):
            sums.of_client(found.kernel(), number, round).values(np.zeros(300, dtype=np.float32), keystream, values)
            seeds = [client_sums._seed(sums.keys(round)[age], number) for age in range(round, -1, -1)]
            noise = found.lineages.noise(seeds, round, 300)
            found.kernel().after(noise).values(np.zeros(300, dtype=np.float32), keystream, again)
            assert np.array_equal(values, again)
    with pytest.raises(ParameterError, match="messages"):
        sums.noisy(values, 4, 2, None)  # type: ignore[arg-type]


def test_devices_take_the_noise_of_earlier_rounds_away() -> None:
    found = mechanism(window=200, inherited_range=50.0)
    sums = found.memory.simulated(7).on_device(2, 2000, torch.device("cpu"))
    rounds = [sums.messages(torch.zeros((2, 2000)), 0, t, 100 + t).numpy() - 2 * found.centre for t in range(8)]
    factors = np.append(found.correlation.factors, np.zeros(8))
    for age in range(1, 8):
        expected = float(factors[:5] @ factors[age : age + 5])
        # In units of the noise of two clients in one round. A covariance is within six standard errors.
        seen = np.mean(rounds[7] * rounds[7 - age]) / (2.0 * found.noise_deviation**2)
        assert abs(seen - expected) < 6.0 * 1.5 / math.sqrt(2000)
    assert (sums.on_device(2), sums.before_rounding(8, 2)) == (FairCoins(0), 0.0)


def test_a_kernel_is_given_each_lineage_with_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVIDIA's kernel is asked for, on a machine that has none."""
    asked: list[Any] = []

    class Played:
        def __init__(self, **given: Any) -> None:
            asked.append({**given, "deviations": given["deviations"].tolist(), "keys": given["keys"].tolist()})

        def add(self, points: torch.Tensor, sums: torch.Tensor, first: int) -> None:
            sums += points.sum(dim=0).long() + first

    monkeypatch.setattr("cpsgd.simulation.device_kernels.compiles", lambda device: True)
    monkeypatch.setattr("cpsgd.simulation.device_cuda.PlayedLineages", Played)
    found = mechanism(inherited_range=3.0, taps="2:9000", bands=3)
    sums = found.memory.simulated(7).on_device(3, 5, torch.device("cpu"))
    for round_ in range(4):
        assert sums.messages(torch.ones((2, 5)), 10, round_, 100).tolist() == [12] * 5
    keys, factors = sums.keys(3), found.correlation.factors
    numbers = [number for number in sorted(keys) if factors[3 - number]]
    assert numbers == [1, 3]
    expected = [*(client_sums._number(keys[number], 0) for number in numbers), 100]
    assert asked[3] == {
        "keys": np.array(expected, dtype=np.uint64).view(np.int64).tolist(),
        "deviations": pytest.approx([found.noise_deviation * factors[3 - number] for number in numbers], rel=1e-6),
        "limit": int(found.grid.limit),
        "unit": 0.5**found.fraction_bits,
        "inherited": 3.0,
        "largest": found.largest,
    }


def joint_law(found: RoundedCorrelated, point: float) -> Any:
    """The law of a client's integers in rounds 0 and 1, by quadrature over the noise of round 0."""
    sigma, values = found.noise_deviation, np.arange(found.window - 1)

    def at_most(ends: Any, deviation: float) -> Any:
        """P[floor(U + Z) < end] for uniform U and Gaussian Z: the mean of end - Z, cut to 0 and 1."""
        if deviation == 0.0:
            return np.clip(ends, 0.0, 1.0)
        first, second = ends / deviation, (ends - 1.0) / deviation
        return deviation * ((first * ndtr(first) + density(first)) - (second * ndtr(second) + density(second)))

    def density(x: Any) -> Any:
        return np.exp(-0.5 * x * x) / math.sqrt(2.0 * math.pi)

    def masses(centres: Any, deviation: float) -> Any:
        below = at_most(values[None, :] + 1.0 - found.centre - centres[:, None], deviation)
        return np.diff(below, axis=1, prepend=0.0, append=1.0)

    draws = np.linspace(-9.0, 9.0, 4001)
    weights = density(draws)
    earlier = np.clip(sigma * found.correlation.factors[1] * draws, -found.inherited_range, found.inherited_range)
    law = (weights[:, None] * masses(point + sigma * draws, 0.0)).T @ masses(point + earlier, sigma)
    return law / weights.sum()


def kernel_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Returns a GPU, or the emulator's processor."""
    from tests.simulation.device.emulator import emulate

    if torch.cuda.is_available():
        return torch.device("cuda", 0)
    emulate(monkeypatch)
    return torch.device("cpu")


@pytest.mark.parametrize("where", ["host", "torch", pytest.param("kernel", marks=pytest.mark.slow)])
def test_simulated_messages_have_exactly_the_law_of_the_mechanism(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages of one client in two rounds, in coordinates that are alike; false alarm 1e-6."""
    on = kernel_device(monkeypatch) if where == "kernel" else torch.device("cpu")
    # Three in ten clip what they inherit, and many saturate.
    found, points = mechanism(noise_deviation=3.0, inherited_range=1.5, window=12), np.float32(5000.0)
    dim = 4_000_000 if on.type == "cuda" else 400_000 if where == "torch" else 40_000
    sums = found.memory.simulated(7)
    rounds = []
    for t in range(2):
        if where == "host":
            values = np.empty(dim, dtype=np.uint32)
            keystream = np.random.default_rng(t).integers(0, 256, dim * found.keystream_bytes, dtype=np.uint8)
            kernel = sums.on_host(1, dim).of_client(found.kernel(), 0, t)
            kernel.values(np.full(dim, points), keystream, values)
            rounds.append(values.astype(np.int64))
        else:
            given = torch.full((1, dim), float(points), device=on)
            rounds.append(sums.on_device(1, dim, on).messages(given, 0, t, 99 + t).cpu().numpy())
    assert float(points) < found.grid.limit
    law = joint_law(found, math.ldexp(float(points), -found.fraction_bits)).ravel() * dim
    counts = np.bincount(rounds[0] * found.window + rounds[1], minlength=law.size)
    assert counts.size == law.size
    few = law < 10.0
    law = np.append(law[~few], max(law[few].sum(), 1e-9))
    counts = np.append(counts[~few], counts[few].sum())
    assert float(((counts - law) ** 2 / law).sum()) < chi2.isf(1e-6, len(law) - 1)


@pytest.mark.gpu
def test_a_training_on_a_gpu_plays_every_client() -> None:
    """Six rounds of 10,000 clients, which teach digits something: without, one in ten is right."""
    from cpsgd import plan
    from cpsgd.learning import CohortOptions, RunOptions, ServerOptions, Trainer, mlp
    from cpsgd.learning.datasets import load

    data = load("infinite-digits")
    model = mlp(data.feature_dim, data.classes, seed=0)
    dim = sum(p.numel() for p in model.parameters())
    once: dict[str, Any] = {"rounds": 6, "participation": "once", "correlated": 6, "mechanism": "rounded-correlated"}
    found = plan(10_000, dim, 2.0, 1e-6, 0.05, bits=4.0, **once)
    trainer = Trainer(
        model,
        torch.nn.functional.cross_entropy,
        data,
        found,
        cohorts=CohortOptions(cohort=10_000, rounds=6, participation="once"),
        server=ServerOptions(lr=193.0, schedule="linear"),
        run=RunOptions(seed=0, evaluate_every=6, device="cuda"),
    )
    *_, last = trainer.run()
    account = trainer.guarantee()
    assert account is not None
    assert account.epsilon <= 2.0
    assert (last.accuracy or 0.0) > 0.4


@pytest.mark.slow
def test_rounds_on_a_device_take_clients_in_any_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """And their means are the vectors' mean with noise; six deviations in 203 coordinates are a false alarm of 4e-7."""
    from cpsgd.simulation.device import DeviceRound

    on = kernel_device(monkeypatch)
    protocol = Protocol(clients=150, dim=203, clip_norm=0.4, mechanism=mechanism(), rotate=True)
    source = mechanism().memory.simulated(3).on_device(150, 203, on)
    rows = torch.from_numpy(np.random.default_rng(1).normal(0.0, 0.02, (150, 203)).astype(np.float32)).to(on)
    deviation = mechanism().step * math.sqrt((1.8 * 1.3) ** 2 + 1.0) / math.sqrt(150)
    for t in range(3):
        means = []
        for ends in ((0, 150), (0, 1, 140, 150)):
            round_ = DeviceRound(protocol, t, seed=5, device=on, source=source)
            for first, last in itertools.pairwise(ends):
                round_.add(rows[first:last].clone())
            means.append(round_.mean())
        assert torch.equal(*means)
        assert float((means[0] - rows.mean(dim=0)).abs().max()) < 6.0 * deviation


@pytest.mark.parametrize("changes", [{"separation": 50}, {"clients": 60}])
def test_what_is_not_proved_is_refused(changes: dict[str, int]) -> None:
    changes = dict(changes)
    protocol = Protocol(
        clients=changes.pop("clients", 8000), dim=64, clip_norm=0.2, mechanism=mechanism(**changes), rotate=True
    )
    with pytest.raises(ConditionError):
        guarantee(protocol, 1e-6)


@pytest.mark.parametrize("window", [1990, 2047, 4000])
def test_windows_whose_numbers_would_wrap_around_are_refused(window: int) -> None:
    """The largest numbers of a message came out as the smallest: 64 bits hold 1024 steps where σ is below one."""
    with pytest.raises(ParameterError, match="wrap around"):
        mechanism(noise_deviation=0.81, window=window, inherited_range=900.0)


def test_numbers_of_64_bits_are_filled_to_the_last() -> None:
    """980 steps to an end, 1 for the coordinate, 28 inherited, 16 deviations of 13/16, and 2 of rounding are 1024."""
    sizes: dict[str, Any] = {"noise_deviation": 0.8125, "window": 1961}
    assert mechanism(inherited_range=27.999, **sizes).finest_bits == 53
    with pytest.raises(ParameterError, match="wrap around"):
        mechanism(inherited_range=28.0, **sizes)


def test_a_window_is_as_wide_as_its_numbers_fit() -> None:
    found = mechanism(noise_deviation=0.81, window=1960, inherited_range=20.0)
    noise, values = np.array([-40, 0, 40]) << found.finest_bits, np.empty(3, dtype=np.uint32)
    keystream = np.zeros(3 * found.keystream_bytes, dtype=np.uint8)
    found.kernel().after(noise).values(np.zeros(3, dtype=np.float32), keystream, values)
    assert values.tolist() == [939, 979, 1019]


def test_the_widest_window_saturates_at_its_ends() -> None:
    found = mechanism(noise_deviation=0.81, window=1000, inherited_range=490.0)
    values = np.empty(100, dtype=np.uint32)
    keystream = np.zeros(100 * found.keystream_bytes, dtype=np.uint8)
    for sign, end in ((1, 999), (-1, 0)):
        far = sign * (found.lineages.limit + round(16 * 0.81 * 2.0**found.finest_bits))  # type: ignore[operator]
        grid = np.full(100, sign * found.grid.limit, dtype=np.float32)
        found.kernel().after(np.full(100, far, dtype=np.int64)).values(grid, keystream, values)
        assert set(values.tolist()) == {end}


@pytest.mark.parametrize(("holders", "refused"), [(1, True), (None, False)])
def test_clients_with_a_limit_do_not_trust_the_server_to_name_holders(holders: int | None, refused: bool) -> None:
    """The proof is not about a server that gives seeds to colluders by what it saw."""
    found = mechanism(inherited_range=3.0, run_length=40, untrusted_holders=holders)
    protocol = Protocol(clients=20_000, dim=16_384, clip_norm=1.0, mechanism=found, rotate=True)
    limits = Limits(epsilon=2.0, delta=1e-6)
    if not refused:
        return limits.check(protocol, rounds=40, surviving=18_000)
    with pytest.raises(RoundRefusedError, match="names the next holders"):
        limits.check(protocol, rounds=40, surviving=18_000)
    return None


def refined(law: Any, refinements: tuple[tuple[int, int], ...]) -> Any:
    """Returns a law on the finest grid with the uniform numbers of all refinements."""
    unit = 1 << sum(bits for _, bits in refinements)
    for uniforms, bits in refinements:
        unit >>= bits
        steps = np.zeros(((1 << bits) - 1) * unit + 1)
        steps[::unit] = 1.0
        for _ in range(uniforms):
            law = np.convolve(law, steps)
    return law / law.sum()


@pytest.mark.parametrize(
    ("root", "refinements"),
    [
        *((2.0, ((8, 4),)), (3.0, ((4, 4),)), (4.0, ((8, 4),)), (2.0, ((3, 1),)), (2.0, ((8, 3), (4, 2)))),
        (1.5, ((6, 1), (6, 1), (6, 1))),
        (2.0, ((10, 2), (6, 2), (4, 2), (4, 1))),
    ],
)
def test_refined_draws_are_gaussians_with_uniform_numbers(
    root: float, refinements: tuple[tuple[int, int], ...]
) -> None:
    """Exactly: a discrete Gaussian on a coarse grid, or on the finest one, and the same uniform numbers."""
    cell = 1 << sum(bits for _, bits in refinements)
    points = np.arange(-48 * cell, 48 * cell + 1)
    fine = np.exp(-0.5 * (points / (root * cell)) ** 2)
    coarse = np.where(points % cell == 0, fine, 0.0)
    exact = 0.5 * float(np.abs(refined(fine, refinements) - refined(coarse, refinements)).sum())
    bound = 0.0
    for uniforms, bits in refinements:
        bound += fine_draws.aliasing(root, uniforms)
        root *= 2.0**bits
    assert 1e-15 < exact <= bound


def test_refinements_move_less_than_the_table_does() -> None:
    assert fine_draws.FINE_BITS == 27
    assert fine_draws.FINE_VARIATION < 2.0**-110 < fine_gaussian.SMOOTHING / 100
    # 64 · 2^8 points per deviation, and 2^8 times as many after each of the first two.
    roots = [2**14, 2**22, 2**30]
    exact = sum(fine_draws.aliasing(root, uniforms) for root, uniforms in zip(roots, (8, 5, 4), strict=True))
    assert fine_draws._variation() == fine_draws.FINE_VARIATION == pytest.approx(exact, rel=1e-8)
    assert exact <= fine_draws.FINE_VARIATION


@pytest.mark.parametrize("sigma", [0.8, 1.0, 1.999, 2.0, 3.3, 2047.0])
def test_draws_have_as_many_cells_per_deviation_as_the_proof_asks_for(sigma: float) -> None:
    found = mechanism(noise_deviation=sigma, window=1 << 16 if sigma > 100 else 40)
    assert fine_draws.LEAST_RATIO <= found.noise_ratio < 2 * fine_draws.LEAST_RATIO
    assert found.noise_ratio * 2.0 ** (8 + 24) == sigma * 2.0**found.noise_bits >= 2.0**38


def test_fine_draws_fill_their_grid() -> None:
    found, size = mechanism(), 1 << 19
    z = np.zeros(size, dtype=np.int64)
    found.lineages.add(bytes(16), 3, 1, z)
    deviation = math.ldexp(found.noise_deviation, found.noise_bits)
    # 256 cells of the same probability, and each byte but the highest: 255 degrees of freedom, false alarm 1e-7 each.
    cells = np.minimum(ndtr(z / deviation) * 256, 255).astype(np.int64)
    for part in (cells, *(z >> shift & 255 for shift in (0, 8, 16, 24))):
        counts = np.bincount(part, minlength=256)
        assert float(((counts - size / 256) ** 2 / (size / 256)).sum()) < chi2.isf(1e-7, 255)
    # Squares and their tails: a seventh moment's worth of deviations, six standard errors of each.
    x = z / deviation
    for power, mean, variance in ((1, 0.0, 1.0), (2, 1.0, 2.0), (4, 3.0, 96.0), (6, 15.0, 10170.0)):
        assert abs((x**power).mean() - mean) < 6.0 * math.sqrt(variance / size)
    # Draws of one register, of the next one and of the next block have nothing to do with each other.
    for apart in (1, 2, 32, 64, 4096):
        assert abs((x[apart:] * x[:-apart]).mean()) < 6.0 / math.sqrt(size)


def test_a_seed_is_expanded_to_the_same_fine_noise_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    found = np.zeros((4, 5000), dtype=np.int64)
    lineages = mechanism().lineages
    for z, (seed, round) in zip(found, ((7, 3), (7, 4), (8, 3)), strict=False):
        lineages.add(bytes([seed] * 16), round, 1, z)
    assert hashlib.sha256(found[0].astype("<i8").tobytes()).hexdigest()[:16] == "8b827fac6de6d9c1"
    assert len({z.tobytes() for z in found}) == 4
    assert fine_draws._SEGMENT == 1 << 24
    # Long vectors have a key for each segment.
    monkeypatch.setattr(fine_draws, "_SEGMENT", 4096)
    lineages.add(bytes([7] * 16), 3, 1, found[3])
    assert np.array_equal(found[3, :4096], found[0, :4096])
    assert not np.any(found[3, 4096:] == found[0, 4096:])


def test_noise_that_was_expanded_before_makes_the_same_message() -> None:
    protocol = Protocol(clients=4000, dim=700, clip_norm=0.2, mechanism=mechanism(), rotate=True)
    memory, vector = protocol.mechanism.memory, np.random.default_rng(1).normal(0.0, 0.01, 700)
    seeds = tuple(bytes([age]) * 16 for age in range(1, 6))

    def sent(state: Any) -> Any:
        return pipeline.integers(protocol, vector, 9, keystream=Keystream(bytes(16)), seeds=state)

    expanded = memory.expanded(seeds, 9, 700)
    assert expanded == seeds
    assert np.array_equal(sent(expanded), sent(seeds))
    # It is used, and only for the round and the mechanism that it was made for.
    expanded.noise[:] = 0
    assert not np.array_equal(sent(expanded), sent(seeds))
    assert np.array_equal(sent(memory.expanded(seeds, 8, 700)), sent(seeds))
    assert np.array_equal(sent(mechanism(inherited_range=0.5).memory.expanded(seeds, 9, 700)), sent(seeds))
    with pytest.raises(ParameterError, match="run_length"):
        memory.expanded(seeds, 100, 700)


@pytest.mark.parametrize(("inherited", "window"), [(2.6, 16), (0.7, 16), (0.7, 8)])
def test_what_clipping_and_saturation_leave_is_the_integral_over_the_gaussian(inherited: float, window: int) -> None:
    found = mechanism(inherited_range=inherited, window=window)
    spread = float(np.sqrt((found.correlation.factors**2).sum()))
    x = np.linspace(-12.0, 12.0, 400_001)
    mass = np.exp(-0.5 * x * x) * (x[1] - x[0]) / math.sqrt(2.0 * math.pi)
    earlier = found.noise_deviation * math.sqrt(spread * spread - 1.0) * x
    kept = np.clip(earlier, -inherited, inherited)
    # Regression of what is kept on what there was: by Stein's lemma the share that is not clipped.
    share = float((kept * earlier * mass).sum() / (earlier * earlier * mass).sum())
    assert found.noise.factors[1:] == pytest.approx(found.correlation.factors[1:] * share, rel=1e-6)
    residual = float(((kept - share * earlier) ** 2 * mass).sum())
    whole = found.noise_deviation * spread * x
    saturated = float(((whole - np.clip(whole, -found.largest, found.largest)) ** 2 * mass).sum())
    assert found.noise.own_variance == pytest.approx(1.0 / 12.0 + residual + saturated, rel=1e-6)
