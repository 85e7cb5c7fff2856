"""`RoundedCorrelated`: messages that saturate, rounded at random."""

import math

import numpy as np
import pytest

from cpsgd import Protocol
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.privacy.proofs import rounded_correlated as proof

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


def test_few_clients_and_several_rounds_of_a_client_are_refused() -> None:
    with pytest.raises(ConditionError, match="more clients"):
        proof.slots_certificate(mechanism().noise.law(50), reach=0.5, budget=0.1, dim=9, rounds=100, tail=1e-9)


@pytest.mark.slow
def test_certificate_costs_more_than_the_slots_and_less_with_more_clients() -> None:
    rates = []
    for clients in (10_000, 20_000):
        law = mechanism().noise.law(clients)
        found = proof.slots_certificate(law, reach=0.7, budget=0.05, dim=1000, rounds=100, tail=1e-10)
        assert found.rate > found.slots > 0.0
        rates.append(found.rate * clients)
    assert rates[1] < rates[0]
