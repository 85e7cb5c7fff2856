"""Skellam noise: its law, sampler and certificates, and that nothing else had to learn about it."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mpmath
import numpy as np
import pytest
from scipy import stats

from cpsgd import Protocol, guarantee, plan
from cpsgd.audit import audit
from cpsgd.codec import pack, pipeline, wire
from cpsgd.errors import ConditionError, InfeasibleError, RoundRefusedError
from cpsgd.federation.limits import Limits
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.mechanisms import Skellam
from cpsgd.mechanisms.skellam import SkellamLaw, truncation
from cpsgd.planner import Plan, modulus
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.randomness import Keystream

# Each statistical test raises a false alarm with this probability over seeds; the seed is fixed.
FALSE_ALARM = 1e-7


@cache
def exact_mass(variance: float, z: int) -> mpmath.mpf:
    """e^-v I_z(v) with thirty digits: (v/2)^z/z! times a series of positive terms."""
    if z < 0:
        return exact_mass(variance, -z)
    with mpmath.workdps(30):
        half = mpmath.mpf(variance) / 2
        term = total = mpmath.mpf(1)
        k = 0
        while term > total * mpmath.mpf("1e-31") or k < half:
            k += 1
            term *= half * half / (k * (k + z))
            total += term
        return total * half**z / mpmath.factorial(z) * mpmath.exp(-2 * half)


# ---------------------------------------------------------------------- the law


@pytest.mark.parametrize(("parts", "each"), [(1, 0.01), (1, 1.0), (10, 1.5), (7, 30.0), (1000, 2.5)])
@pytest.mark.parametrize("nats", [3.0, 40.0, 200.0])
def test_the_window_is_within_its_stated_error(parts: int, each: float, nats: float) -> None:
    law = SkellamLaw(parts, each, 5)
    window, centre = law.window(nats), 5 * parts
    variance = law.variance
    places = sorted({window.first, centre - 3, centre, centre + 1, window.last})
    for z in [z for z in places if window.first <= z <= window.last]:
        exact = exact_mass(variance, z - centre)
        found = window.mass[z - window.first]
        assert found * (1 - window.error) <= exact <= found * (1 + window.error), z
    assert window.error < 1e-10 or nats == 3.0
    assert window.outside_below == window.outside_above
    total = float(np.sum(window.mass))
    assert abs(total - 1.0) < 1e-12
    beyond = [exact_mass(variance, window.last - centre + 1 + j) for j in range(40)]
    assert sum(beyond) <= window.outside_above


@pytest.mark.parametrize(("parts", "each"), [(1, 0.3), (20, 1.0), (5, 400.0)])
@pytest.mark.parametrize("direction", [1, -1])
def test_ratios_of_masses(parts: int, each: float, direction: int) -> None:
    law = SkellamLaw(parts, each, 3)
    points = 3.0 * parts + np.arange(-30.0, 31.0)
    step, errors = law.step(points, direction)
    for point, found, error in zip(points, step, errors, strict=True):
        place = int(point) - 3 * parts
        with mpmath.workdps(50):
            exact = exact_mass(law.variance, place - direction) / exact_mass(law.variance, place)
        assert abs((1.0 + float(found)) / exact - 1) <= float(error) * 2.0**-53, point


# ---------------------------------------------------------------------- the sampler


@pytest.mark.parametrize(("variance", "limit"), [(0.2, 3), (5.0, 10), (900.0, 120)])
def test_truncation_is_an_upper_bound(variance: float, limit: int) -> None:
    exact = 2 * sum(exact_mass(variance, z) for z in range(limit + 1, limit + 120))
    assert exact <= truncation(variance, limit) < 30 * max(1.0, math.sqrt(variance)) * exact


def drawn(mechanism: Skellam, count: int, name: int = 1) -> np.ndarray:
    """Noise alone: what is sent for coordinates on the lowest level."""
    grid = np.full(count, -mechanism.grid.limit, np.float32)
    values = np.empty(count, np.uint32)
    words = Keystream(bytes([name] * 16)).take(count * mechanism.keystream_bytes)
    mechanism.kernel().values(grid, words, values)
    return values.astype(np.int64) - round(mechanism.noise.mean)


def p_value(sample: np.ndarray, variance: float) -> float:
    """Chi-square test against the Skellam law of scipy, outcomes pooled to at least 20 expected."""
    outcomes = np.arange(sample.min(), sample.max() + 1)
    mass = stats.skellam.pmf(outcomes, variance / 2, variance / 2) * sample.size
    counts = np.bincount(sample - sample.min(), minlength=outcomes.size).astype(float)
    big = mass >= 20
    observed = np.append(counts[big], counts[~big].sum())
    expected = np.append(mass[big], max(sample.size - mass[big].sum(), 1e-9))
    if expected[-1] < 5:
        observed[-2:], expected[-2:] = [observed[-2:].sum(), 0], [expected[-2:].sum(), 0]
        observed, expected = observed[:-1], expected[:-1]
    return float(stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue)


@pytest.mark.parametrize("variance", [0.1, 1.0, 7.5, 300.0])
def test_draws_have_the_law(variance: float) -> None:
    mechanism = Skellam(levels=2, variance=variance, coordinate_range=1.0)
    assert p_value(drawn(mechanism, 300_000), variance) > FALSE_ALARM
    # And the test would see a little more or less of it.
    for wrong in (1.05, 0.95):
        assert p_value(drawn(replace(mechanism, variance=wrong * variance), 300_000), variance) < FALSE_ALARM


# ---------------------------------------------------------------------- certificates


def test_much_noise_is_as_good_as_gaussian() -> None:
    gaussian = Protocol.gaussian(clients=1000, dim=100, clip_norm=1.0, sigma=1.0)
    scale = 0.1
    mechanism = Skellam(levels=21, variance=1.0 / scale**2, coordinate_range=10 * scale)
    protocol = Protocol(clients=1000, dim=100, clip_norm=1.0, mechanism=mechanism)
    assert 1.0 < guarantee(protocol, 1e-6).epsilon / guarantee(gaussian, 1e-6).epsilon < 1.05


# ---------------------------------------------------------------------- everywhere

VECTORS = np.random.default_rng(5).normal(size=(40, 30)) / 8.0


@cache
def planned_once() -> Plan:
    return plan(clients=40, dim=30, epsilon=4.0, delta=1e-5, bits=7, mechanism="skellam")


def test_a_plan_keeps_its_word_and_fills_its_bits() -> None:
    protocol = planned_once().protocol
    assert protocol.name == "rotated-skellam"
    assert 3.9 < planned_once().guarantee.epsilon <= 4.0
    assert guarantee(protocol, 1e-5).epsilon == planned_once().guarantee.epsilon
    assert 2**7 - 1 <= protocol.radix <= 2**7
    # Rounding and noise cost a few per cent over the exact Gaussian.
    assert 1.0 < planned_once().ratio < 1.2


def test_the_modulus_holds_real_sums() -> None:
    planned = plan(clients=60, dim=200, epsilon=3.0, delta=1e-5, secure=True, mechanism="skellam")
    protocol = planned.protocol
    assert protocol.modulus is not None
    vector = np.full(200, 1.0) / math.sqrt(200)
    sums = np.zeros(200, np.uint64)
    for _ in range(60):
        sums = (sums + protocol.encode_integers(vector, round=0)) % protocol.modulus
    mean = protocol.decode_sum(sums, 60, round=0)
    assert float(np.sum((mean - vector) ** 2)) < 5 * planned.error.total
    assert (
        modulus.overflow_probability(protocol.modulus, protocol.mechanism, clients=60, dim=200, clip_norm=1.0) <= 1e-9
    )


def test_several_rounds_and_a_ledger(tmp_path: Path) -> None:
    protocol = planned_once().protocol
    ten = plan(clients=40, dim=30, epsilon=4.0, delta=1e-5, bits=8, rounds=10, mechanism="skellam")
    assert 3.9 < guarantee_over_rounds(ten.protocol, 1e-5, rounds=10).epsilon <= 4.0
    assert guarantee_over_rounds(ten.protocol, 1e-5, rounds=5).epsilon < 3.0
    ledger = Ledger(tmp_path / "l.ledger")
    ledger.create(Budget(population="people", epsilon=5.0, delta=1e-5))
    entry = ledger.reserve("people", RoundEvent(protocol, survivors=40, participation="every", round=1, label="one"))
    ledger.release(entry, 40)
    assert ledger.total("people").epsilon == pytest.approx(planned_once().guarantee.epsilon)


def test_a_client_refuses_it_without_noise() -> None:
    silent = replace(planned_once().protocol, mechanism=planned_once().protocol.mechanism.without_noise())
    with pytest.raises(RoundRefusedError, match="no noise"):
        Limits().check(silent, rounds=1, surviving=40)
    with pytest.raises(ConditionError, match="no privacy"):
        guarantee(silent, 1e-5)


@pytest.mark.thorough
def test_the_auditor_passes_it_and_finds_a_fault() -> None:
    planned = plan(clients=3, dim=6, epsilon=2.0, delta=1e-3, bits=8, mechanism="skellam")
    small = replace(planned.protocol, promise=None)  # rounds of single messages are played
    assert audit(small, 1e-3, rounds=4_000, seed=1).passed
    assert isinstance(small.mechanism, Skellam)
    quiet = replace(small, mechanism=replace(small.mechanism, variance=0.5 * small.mechanism.variance))

    def faulty(vector: Any, round: int) -> bytes:
        """Half the noise in a message that looks right."""
        values = pipeline.integers(quiet, vector, round)
        message = small.encode(vector, round)
        body = np.frombuffer(message, np.uint8).copy()
        body[wire.HEADER_BYTES :] = np.frombuffer(pack.forward(values, small.radix), np.uint8)
        parsed = wire.read(message)
        wire.write_header(
            body,
            radix=parsed.radix,
            fingerprint=parsed.fingerprint,
            round=round,
            message_id=parsed.message_id,
            dim=parsed.dim,
        )
        return body.tobytes()

    assert not audit(small, 1e-3, rounds=4_000, seed=1, encode=faulty).passed


def test_a_secure_plan_of_many_clients_is_cut_off_where_its_little_noise_ends() -> None:
    planned = plan(
        clients=100_000, dim=1000, epsilon=1.0, delta=1e-6, bits=16, secure=True, mechanism="skellam"
    ).protocol
    assert isinstance(planned.mechanism, Skellam)
    assert planned.mechanism.variance < 0.1
    assert planned.mechanism.values < 64


@pytest.mark.parametrize("bits", [1.6, 2.0, 2.4, 3.0])
def test_a_plan_never_takes_more_bits_than_it_may(bits: float) -> None:
    try:
        planned = plan(clients=100_000, dim=1, epsilon=2.0, delta=0.1, bits=bits, mechanism="skellam")
    except InfeasibleError:
        return
    assert planned.protocol.bits_per_coordinate <= bits * (1 + 1e-9)


def test_too_few_bits_are_infeasible_and_not_an_accident() -> None:
    with pytest.raises(InfeasibleError, match="No protocol"):
        plan(clients=10**9, dim=10**4, epsilon=1.0, delta=1e-6, bits=2.4, mechanism="skellam")
