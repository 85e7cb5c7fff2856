from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, Protocol, plan
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.plausibility import FALSE_ALARM, Bounds, _bernstein, _bounded, _sub_gaussian, bounds
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms, implausible
from cpsgd.mechanisms import RoundedGaussian, Skellam
from cpsgd.planner.modulus import window
from tests import known_values as known

from .local import RUN, Client, carry

LARGE = 2000


@pytest.fixture(scope="module")
def large_plan(small_plan: Plan) -> Plan:
    return replace(small_plan, protocol=replace(small_plan.protocol, dim=LARGE, promise=None))


def run_round(plan: Plan, clients: dict[str, Client]) -> tuple[np.ndarray | None, RoundSession[str]]:
    session = begin_round(Terms(plan=plan), 1, list(clients), run=RUN)
    return carry(session, clients), session


def test_honest_rounds_are_plausible_also_of_large_vectors(large_plan: Plan) -> None:
    clients = {name: Client(np.full(LARGE, 9.0, np.float32)) for name in "abcd"}
    mean, session = run_round(large_plan, clients)
    assert mean is not None
    assert session.report.survivors == 4
    assert implausible(mean, bounds(large_plan.protocol, 4)) is None


def test_one_random_upload_is_withheld(large_plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    original = Protocol.encode_integers

    def encode(self: Protocol, vector: Any, round: int) -> Any:
        if vector[0] != 7.0:
            return original(self, vector, round)
        assert self.modulus is not None
        return np.random.default_rng(1).integers(0, self.modulus, LARGE).astype(np.uint32)

    monkeypatch.setattr(Protocol, "encode_integers", encode)
    clients = {name: Client(np.zeros(LARGE, np.float32)) for name in "abc"}
    clients["liar"] = Client(np.full(LARGE, 7.0, np.float32))
    mean, session = run_round(large_plan, clients)
    assert mean is None
    assert not session.report.released
    assert "some client sent what no honest one sends" in session.report.reason


def test_the_bound_grows_with_the_noise_and_holds_for_it(large_plan: Plan) -> None:
    """The noise alone, drawn a hundred times, stays below it; the bound is a fifth larger than the largest."""
    protocol = large_plan.protocol
    mechanism: Any = protocol.mechanism
    draws = np.random.default_rng(2).binomial(mechanism.trials * 4, 0.5, (100, LARGE)) - mechanism.trials * 2.0
    norms = np.linalg.norm(draws * protocol.scale / 4, axis=1)
    assert norms.max() < bounds(protocol, 4).norm < 1.2 * norms.max()
    assert bounds(protocol, 3).norm > bounds(protocol, 4).norm


@cache
def protocol_of(mechanism: str) -> Protocol:
    made = plan(20, 1000, 8.0, 1e-6, secure=True, dropout=0.1, colluding=1, bits=14, mechanism=mechanism)
    return replace(made.protocol, promise=None)


@pytest.mark.parametrize("name", ["binomial", "discrete-gaussian", "skellam", "rounded-gaussian", "coins"])
def test_honest_sums_keep_every_bound_and_come_near_it(name: str) -> None:
    """Quantiles of the real sums: at a false alarm rate that can be seen, bounds of the same form are kept as well."""
    protocol = protocol_of(name)
    found = bounds(protocol, 20)
    vector = np.zeros(1000, np.float32)
    vector[3] = 1.0
    norms, largest = [], []
    for round in range(20):
        sums = sum(protocol.encode_integers(vector, round).astype(np.uint64) for _ in range(20))
        mean = protocol.decode_sum(np.asarray(sums, np.uint64), 20, round)
        assert implausible(mean, found) is None
        norms.append(float(np.linalg.norm(mean)))
        largest.append(float(np.abs(mean).max()))
    assert max(norms) < found.norm < 1.35 * max(norms)
    assert max(largest) < found.blocks[1] < 3.5 * max(largest)


def test_what_is_added_to_few_coordinates_is_noticed_before_the_norm_is_too_large() -> None:
    protocol = protocol_of("binomial")
    found = bounds(protocol, 20)
    for size, most in found.blocks.items():
        mean = np.zeros(1000, np.float32)
        mean[:size] = 1.01 * most / np.sqrt(size)
        assert most < found.norm
        reason = implausible(mean, found)
        assert reason is not None
        assert f"{FALSE_ALARM:g}" in reason
        assert "oordinate" in reason
    assert implausible(np.full(1000, np.nan, np.float32), found) is not None


def test_a_coordinate_at_the_clip_norm_with_noise_is_plausible() -> None:
    """Noise adds to the vector itself where a coordinate holds all of it: six deviations more are honest."""
    protocol = Protocol.binomial(clients=10, dim=64, clip_norm=1.0, levels=1024, trials=400)
    deviation = protocol.scale * (protocol.mechanism.noise.variance / 10) ** 0.5
    assert deviation < 0.05
    mean = np.zeros(64, np.float32)
    mean[3] = 1.0 + 6.0 * deviation
    assert implausible(mean, bounds(protocol, 10)) is None
    mean[3] = 1.0 + 12.0 * deviation
    assert implausible(mean, bounds(protocol, 10)) is not None


@pytest.mark.parametrize("dim", [64, 4096])
def test_bernsteins_bound_is_its_formula(dim: int) -> None:
    protocol = Protocol.rotated_binomial(clients=10, dim=dim, clip_norm=1.0, levels=64, trials=500)
    mechanism, nats = protocol.mechanism, np.log(2.0 / FALSE_ALARM)
    width = window(mechanism, clients=10, dim=dim, clip_norm=1.0, rotate=True, overflow=FALSE_ALARM / 6.0)
    variance = 10 * (mechanism.noise.settled_variance + mechanism.largest_rounding_variance)
    # The root of t² = 2 L B² (d v + t/3), where Bernstein's inequality has the probability exp(-L).
    excess = np.roots([1.0, -2.0 * nats * width**2 / 3.0, -2.0 * nats * width**2 * dim * variance]).max()
    expected = 1.25 + protocol.scale / 10 * np.sqrt(dim * variance + excess)
    assert _bernstein(protocol, 10, 1.25) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        (Bounds(5.0, {}), None),
        (Bounds(4.999, {}), "The mean has norm 5, "),
        (Bounds(5.0, {1: 4.0, 2: 4.0}), None),
        (Bounds(5.0, {1: 3.999, 2: 4.0}), "A coordinate of the mean has norm 4, "),
        (Bounds(5.0, {1: 4.0, 2: 3.999}), "A block of 2 coordinates of the mean has norm 4, "),
    ],
)
def test_a_bound_may_be_reached_and_no_more(bounds: Bounds, said: str | None) -> None:
    """Of (3, 0, 4): blocks of two have the norms 3 and 4."""
    found = implausible(np.array([3.0, 0.0, 4.0], np.float32), bounds)
    assert (found is None) if said is None else (found is not None and said in found)


def test_known_bounds() -> None:
    """What makes them larger lets liars move a mean; what makes them smaller withholds honest rounds."""
    skellam = Skellam(levels=16, variance=25.0, coordinate_range=0.5, noise_limit=60)
    protocols = {
        "binomial": Protocol.rotated_binomial(clients=10, dim=40, clip_norm=1.0, levels=64, trials=500),
        "wide": Protocol.rotated_binomial(clients=10, dim=3_000, clip_norm=0.5, levels=16, trials=50),
        "little noise": Protocol.binomial(clients=40, dim=64, clip_norm=1.0, levels=1024, trials=4),
        "none": Protocol.binomial(clients=5, dim=33, clip_norm=1.0, levels=4, trials=0),
        "skellam": Protocol(clients=20, dim=40, clip_norm=1.0, mechanism=skellam),
    }
    cases = {}
    for name, protocol in protocols.items():
        for survivors in (protocol.clients, protocol.clients - 1):
            found = bounds(protocol, survivors)
            cases[f"{name}, {survivors}"] = [
                *(found.norm, *found.blocks.values()),
                *(_bernstein(protocol, survivors, 1.0), *_sub_gaussian(protocol, survivors)),
            ]
    known.check("federation/plausibility", cases)


def test_what_holds_whatever_the_noise_is() -> None:
    """By Hoeffding's lemma: integers in 0..k have w = k²/4 each."""
    silent = Protocol.binomial(clients=5, dim=33, clip_norm=1.0, levels=4, trials=0)
    assert [set(bounds(replace(silent, dim=dim), 5).blocks) for dim in (1, 2, 32, 33)] == [set(), {1}, {1}, {1, 32}]
    assert _bounded(silent, 5) == (5 * 3**2 / 4, 0.0)


def test_noise_that_rounds_by_itself_has_no_other_rounding() -> None:
    rounded = RoundedGaussian(noise_deviation=1.0, step=0.3, window=40, coordinate_range=1.0)
    protocol = Protocol(clients=20, dim=40, clip_norm=1.0, mechanism=rounded)
    proxy, shift = _sub_gaussian(protocol, 20)
    assert 20 * rounded.noise.settled_variance <= proxy < 1.5 * 20 * rounded.noise.settled_variance
    assert shift < 1e-3
