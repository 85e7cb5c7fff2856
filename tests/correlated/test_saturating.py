"""`RoundedCorrelated`: messages that saturate, rounded at random."""

import math

import numpy as np
import pytest

from cpsgd import Protocol, guarantee
from cpsgd.correlated import client_sums
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.errors import ConditionError, ParameterError, RoundRefusedError
from cpsgd.federation.limits import Limits

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


def test_noise_of_device_and_host_has_the_same_covariance_over_rounds() -> None:
    torch = pytest.importorskip("torch")
    found, clients, dim = mechanism(), 40, 500
    simulated = found.memory.simulated(11)
    device = simulated.on_device(clients, dim, torch.device("cpu"))
    rounds = [
        (device.messages(torch.zeros(clients, dim), 0, t, 5 * t).numpy() - clients * found.centre) for t in range(3)
    ]
    host = found.memory.simulated(12).on_host(clients, dim)
    others = []
    for t in range(3):
        total = np.zeros(dim)
        for number in range(clients):
            values = np.empty(dim, dtype=np.uint32)
            keystream = np.random.default_rng([t, number]).integers(0, 256, dim * found.keystream_bytes, dtype=np.uint8)
            host.of_client(found.kernel(), number, t).values(np.zeros(dim, dtype=np.float32), keystream, values)
            total += values
        others.append(total - clients * found.centre)
    # Of 500 coordinates: standard errors of 6 % of the variance; six of them together, on each side.
    scale = clients * found.noise_deviation**2
    assert np.allclose(np.cov(rounds) / scale, np.cov(others) / scale, atol=0.55)
    assert np.cov(rounds)[0, 1] < -0.2 * scale
    assert np.cov(others)[0, 1] < -0.2 * scale


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
