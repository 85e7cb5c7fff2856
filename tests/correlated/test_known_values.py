"""What correlated noise computes, as it was: weights, noise, messages with fixed seeds, and simulated sums."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cpsgd.correlated import draws, fine_draws, run_gaussian, run_sums, saturating, shaped, uniform_fractions
from cpsgd.correlated.draws import Lineages
from cpsgd.correlated.fine_draws import FineLineages
from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.correlated.weights import Correlation, read_taps
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import Mechanism, fine_gaussian
from tests import known_values as known
from tests.mechanisms.test_known_values import numbers, stream, values_of, values_of_law, values_of_noise

SHARED: dict[str, Any] = {"step": 0.25, "coordinate_range": 0.5, "bands": 3, "run_length": 40}
EXAMPLES: list[Any] = [
    CorrelatedGaussian(noise_deviation=8.0, window=512, **SHARED),
    CorrelatedGaussian(noise_deviation=300.0, window=9000, separation=7, untrusted_holders=1, **SHARED),
    RoundedCorrelated(noise_deviation=1.8, window=32, inherited_range=3.0, **SHARED),
    RoundedCorrelated(noise_deviation=4.0, window=23, inherited_range=2.0, taps="2:9000", **SHARED),
    ShapedGaussian(noise_deviation=3.0, window=128, **SHARED),
    ShapedGaussian(noise_deviation=1.1, window=25, separation=1, **{**SHARED, "coordinate_range": 0.37}),
    ShapedGaussian(noise_deviation=3.0, window=1200, **{**SHARED, "coordinate_range": 125.0}),
    ShapedGaussian(noise_deviation=3.0, window=80, **{**SHARED, "coordinate_range": 1e-7}),
    CorrelatedGaussian(noise_deviation=2000.0, window=1 << 17, **{**SHARED, "coordinate_range": 1e-5}),
]
every = pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=lambda number: f"{number}-{EXAMPLES[number].name}")


@every
@pytest.mark.parametrize("of", [values_of, values_of_noise, values_of_law], ids=["interface", "noise", "law"])
def test_known_numbers(of: Any, number: int) -> None:
    mechanism: Mechanism = replace(EXAMPLES[number])  # nothing is cached yet
    known.check(
        f"correlated/{mechanism.name}", {f"{number} {key}": list(numbers(found)) for key, found in of(mechanism)}
    )


@every
def test_known_noise_of_runs(number: int) -> None:
    of = replace(EXAMPLES[number])
    noise, memory = of.noise, of.memory
    values: dict[str, Any] = {
        "run": [
            memory.rounds,
            memory.bands,
            memory.hands_on,
            memory.handed_bytes,
            memory.one_event,
            *(memory.echo or ()),
        ],
        "parts": [noise.taken_away, noise.left, noise.deviation, *noise.factors, noise.cut, noise.counted_variance],
        "bits": [of.finest_bits, of.fraction_bits, of.largest_rounding_variance],
    }
    if isinstance(of, ShapedGaussian):
        values["shaped"] = [noise.state_variation(5, 100), of.farthest_draw, of.draws, noise.needs, noise.ripple]
        values["slack"] = [noise.run_slack(2, 2), noise.run_slack(5, 9), noise.run_slack(40, 40)]
    else:
        values["own"] = [noise.own_variance, of.noise_bits, of.noise_ratio, of.exposed, of.shifts]
    if isinstance(of, RoundedCorrelated):
        values["saturating"] = [noise.room, of.largest, of.draws, of.lineages.limit, memory.steerable]
    if type(of) is CorrelatedGaussian:
        values["needs"] = [noise.needs, noise.ripple, *(noise.needs.window(cut) for cut in (1e-3, 1e-30))]
    known.check(f"correlated/{of.name}", {f"{number} {key}": list(numbers(value)) for key, value in values.items()})


@every
def test_known_messages(number: int) -> None:
    of = replace(EXAMPLES[number])
    points = np.linspace(-of.grid.limit, of.grid.limit, 33).round().astype(np.float32)
    if isinstance(of, ShapedGaussian):
        inherited = np.arange(-16, 17, dtype=np.int64) << (of.finest_bits + 2)
    else:
        inherited = of.lineages.noise([b"a" * 16, None, b"c" * 16], 9, 33)
    sent = np.empty(33, dtype=np.uint32)
    of.kernel().after(inherited).values(points, stream(5).take(33 * of.keystream_bytes), sent)
    found = {f"{number} sent": sent, f"{number} inherited": inherited}
    clients, dim, simulated = 3, 20, of.memory.simulated(seed=4)
    for round_ in range(3):
        # The same way as a simulation goes: a kernel for every client, and then what the sum needs.
        sums, host = np.zeros(dim, dtype=np.uint64), simulated.on_host(clients, dim)
        for client in range(clients):
            values = np.empty(dim, dtype=np.uint32)
            kernel = host.of_client(host.client.kernel(), client, round_)
            keystream = stream(100 * round_ + client).take(dim * host.client.keystream_bytes)
            kernel.values(points[:dim], keystream, values)
            sums += values
        found[f"{number} sums {round_}"] = host.noisy(sums, clients, round_, stream(900 + round_))
    known.check(f"correlated/{of.name}", found)


@pytest.mark.parametrize("taps", ["", "1:8118,4:1145"])
@pytest.mark.parametrize("separation", [None, 1, 4, 29, 30])
def test_known_weights(taps: str, separation: int | None) -> None:
    found = Correlation(5, 30, separation, taps)
    values = {
        "weights": found.weights,
        "numbers": [
            found.spread,
            found.inherited,
            found.column_norm,
            found.sensitivity,
            found.participations,
            found.gain,
        ],
        "coefficients": found.coefficients,
        "prefixes": [*found.prefix_variance(), *found.prefix_variance(0.9 ** np.arange(40.0))],
        "errors": [found.prefix_error(), found.prefix_error(0.9 ** np.arange(30.0))],
        "shortest": [uniform_fractions.shortest(found, honest) for honest in (2, 9)],
        "excess": [
            uniform_fractions.excess(variance, found, honest=honest, silos=silos)
            for variance, honest, silos in ((0.36, 3, 3), (2.0, 2, 4), (9.0, 4, 9), (20.0, 2, 2))
        ],
    }
    known.check("correlated/weights", {f"{taps} {separation} {key}": value for key, value in values.items()})


def test_known_draws() -> None:
    values: dict[str, Any] = {"many bands": Correlation(40, 50).weights}
    for bits in (10, 11, 19, 20, 54):
        values[f"own shifts {bits}"] = draws.own_shifts(bits)
    for deviation in (2048.0, 4096.0, 5000.0, 1e6, 3e14):
        values[f"wide {deviation}"] = list(numbers(draws.wide_parts(deviation)))
        values[f"drawn {deviation}"] = run_sums.wide_draw(deviation, stream(1), 9)
    for ratio in (8.0, 13.0):
        values[f"draw {ratio}"] = [draws.farthest_point(ratio), *draws.draw(ratio, stream(2).take(6 * 44), 6)]
        values[f"resolution {ratio}"] = run_gaussian.resolution(ratio)
    for kind, ratio in ((Lineages, 9.0), (FineLineages, 72.0)):
        for limit in (None, 1 << 20):
            lineages = kind(Correlation(4, 9), ratio, limit)
            key = f"{kind is FineLineages} {limit}"
            values[f"bytes {key}"] = lineages.draw_bytes
            values[f"fresh {key}"] = lineages.fresh(stream(3).take(7 * lineages.draw_bytes), 7)
            values[f"expanded {key}"] = np.zeros(4100, dtype=np.int64)
            lineages.add(b"b" * 16, 2, 1, values[f"expanded {key}"])
            seeds = [b"a" * 16, b"b" * 16, None, b"d" * 16]
            values[f"noise {key}"] = [lineages.noise(seeds[:count], 5, 3) for count in (1, 2, 4)]
    for deviation in (0.0, 0.8, 3.0):
        values[f"loss {deviation}"] = [saturating.squared_loss(deviation, limit) for limit in (0.0, 0.5, 4.0)]
    values["beyond"] = [saturating.beyond(x) for x in (-1.0, 0.0, 2.0, 9.0)]
    values["aliasing"] = [fine_draws.aliasing(root, uniforms) for root, uniforms in ((2.0, 8), (2048.0, 10), (3.0, 1))]
    values["middles"] = [run_gaussian.centre_of(window, bits) for window in (9, 10) for bits in (2, 20)]
    past = {1: np.array([5, -7, 1 << 60]), 3: np.array([1, 1 << 40, -(1 << 61)])}
    values["correction"] = shaped.correction(past, (1 << 14, -8192, -2048, -1024), 3)
    known.check("correlated/draws", values)


@every
def test_nobody_hides_behind_no_noise(number: int) -> None:
    with pytest.raises(ConditionError):
        EXAMPLES[number].noise.law(0)


@pytest.mark.parametrize(("number", "draws_"), [(0, 4), (2, 3), (4, 1)])
def test_a_grid_that_is_off_counts_for_every_draw_of_the_run(
    number: int, draws_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a message's own noise and of three lineages', or of what a message rounds; twice the rounds' messages."""
    before = replace(EXAMPLES[number]).noise.variation
    monkeypatch.setattr(fine_gaussian, "GRID_VARIATION", 1e-3)
    found = replace(EXAMPLES[number]).noise.variation - before
    assert found == pytest.approx(2 * 40 * draws_ * 1e-3, rel=1e-9)


def test_numbers_of_other_types_become_plain_ones() -> None:
    whole: Any = np.int64
    found = CorrelatedGaussian(
        noise_deviation=8.0, step=0.25, window=512, coordinate_range=0.5, bands=whole(3), run_length=whole(40),
        separation=whole(7), untrusted_holders=whole(1),
    )  # fmt: skip
    weights = Correlation(whole(3), whole(40), whole(7))
    for each in (found.bands, found.run_length, found.separation, found.untrusted_holders):
        assert type(each) is int
    for each in (weights.bands, weights.rounds, weights.separation):
        assert type(each) is int
    rounded = replace(EXAMPLES[2], inherited_range=whole(3))
    assert (rounded.inherited_range, type(rounded.inherited_range)) == (3.0, float)


def test_taps_at_their_limits() -> None:
    assert read_taps("1:16383") == {1: 16383}
    assert read_taps("1:8,255:1") == {1: 8, 255: 1}
    for text in ("1:16384", "1:8192,2:8192", "1:8,256:1", "2:1,1:1", "1:1,1:1", "0:1", "1:0", ""):
        with pytest.raises(ParameterError):
            read_taps(text)


def test_as_many_dropouts_as_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uniform_fractions, "_MOST_COUNTS", 3)
    weights = Correlation(3, 9)
    assert uniform_fractions.excess(9.0, weights, honest=2, silos=5) < 1.0
    with pytest.raises(ConditionError, match="More than 3 of 6"):
        uniform_fractions.excess(9.0, weights, honest=2, silos=6)
    monkeypatch.undo()
    with pytest.raises(ConditionError, match="More than 512 of 515"):
        uniform_fractions.excess(9.0, weights, honest=2, silos=515)
    assert 1e300 < uniform_fractions.excess(0.2, weights, honest=2, silos=2) < np.inf
    with pytest.raises(ConditionError, match="two honest"):
        uniform_fractions.excess(9.0, weights, honest=1, silos=3)
