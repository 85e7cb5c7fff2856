"""The audit fails all code that gets something wrong. All randomness is fixed."""

from __future__ import annotations

import pytest

from cpsgd import Protocol
from cpsgd.audit import audit
from cpsgd.mechanisms import Coins

from . import faults, sly_faults

DELTA = 1e-3
PROTOCOL = Protocol.rotated_binomial(
    clients=4, dim=16, clip_norm=1.0, levels=8, trials=250, coordinate_range=0.72, rotation_seed=3
)
ONE_COORDINATE = Protocol.binomial(clients=2, dim=1, clip_norm=1.0, levels=4, trials=200)
WIDE = Protocol.rotated_binomial(clients=2, dim=128, clip_norm=1.0, levels=8, trials=250, coordinate_range=0.3)
# As it is planned for ε = 2 with 8 bits.
SECURE = Protocol(
    clients=4,
    dim=16,
    clip_norm=1.0,
    mechanism=Coins(coins=255, theta=0.01483154296875, coordinate_range=0.6874627418234283),
    modulus=256,
)

# How each fault is found. Others may notice as well.
FAULTS: dict[str, tuple[faults.Fault, set[str]]] = {
    "no noise": (faults.no_noise, {"privacy", "unbiased", "spread", "law", "repeats"}),
    "no noise, but its mean": (faults.no_noise_but_its_mean, {"privacy", "spread", "law", "quiet"}),
    "half the trials": (faults.half_the_trials, {"unbiased", "law"}),
    "half the trials, but all of the mean": (faults.half_the_trials_but_all_of_the_mean, {"spread", "law", "tails"}),
    "biased coins": (faults.biased_coins, {"unbiased", "law"}),
    "slightly biased coins": (faults.slightly_biased_coins, {"unbiased", "law"}),
    "missing clip": (faults.missing_clip, {"privacy", "unbiased", "law"}),
    "clip before scaling": (faults.clip_before_scaling, {"privacy", "unbiased", "law"}),
    "keystream reused by all clients": (faults.one_keystream_for_all_clients, {"spread", "law"}),
    "keystream reused in all rounds": (faults.one_keystream_for_all_rounds, {"privacy", "law", "rounds", "repeats"}),
    "keystream reused in the next round": (faults.one_keystream_for_two_rounds, {"rounds", "repeats"}),
    "keystream reused much later": (faults.keystream_that_comes_back, {"rounds", "repeats"}),
    "keystream reused in a message": (faults.keystream_used_twice_in_a_message, {"coordinates"}),
    "noise of one client only": (sly_faults.noise_of_one_client, {"spread", "law"}),
    "noise of absent clients subtracted": (faults.planned_noise_subtracted, {"unbiased", "law"}),
    "divided by absent clients": (faults.planned_clients_divided_by, {"law"}),
    "off the lattice": (faults.off_the_lattice, {"integers"}),
    "no noise for zero vectors": (sly_faults.no_noise_for_zero_vectors, {"spread", "law"}),
    "no noise for constant vectors": (sly_faults.no_noise_for_constant_vectors, {"spread", "law"}),
    "no noise for one-hot vectors": (sly_faults.no_noise_for_one_hot_vectors, {"privacy", "spread", "law"}),
    "no noise for subnormal vectors": (sly_faults.no_noise_for_tiny_vectors, {"spread", "law"}),
    "no noise for single precision": (sly_faults.no_noise_for_single_precision, {"spread", "law"}),
    "no noise in the last coordinate": (sly_faults.no_noise_in_the_last_coordinate, {"spread", "law"}),
    "no noise from the first client": (sly_faults.no_noise_from_the_first_client, {"spread", "law", "quiet"}),
    "no noise from the last client": (sly_faults.no_noise_from_the_last_client, {"spread", "law"}),
    "coins shared by neighbours": (sly_faults.coins_shared_by_neighbours, {"rounds"}),
    "noise in steps of two": (sly_faults.even_noise, {"remainders"}),
    "uniform noise": (sly_faults.uniform_noise, {"spread", "tails"}),
    "trials rounded to words": (sly_faults.whole_words_of_coins, {"spread"}),
    "less noise for negative values": (sly_faults.less_noise_for_negative_values, {"spread", "law"}),
    "keystream shared by two clients": (sly_faults.one_keystream_for_two_clients, {"spread", "law"}),
    "keystream of the round before last": (sly_faults.keystream_of_the_round_before_last, {"rounds", "repeats"}),
    "keystream of another client, a round before": (
        sly_faults.keystream_of_another_client_in_the_round_before,
        {"rounds"},
    ),
    "keystreams that overlap": (sly_faults.overlapping_keystreams, {"rounds"}),
    "few keys": (sly_faults.few_keys, {"repeats"}),
    "key from the rotation's seed": (sly_faults.key_from_the_rotation_seed, {"privacy", "law", "rounds", "repeats"}),
    "encoding remembered": (sly_faults.encoding_remembered, {"privacy", "law", "rounds", "repeats"}),
    "noise removed after dropouts": (sly_faults.noise_removed_after_dropouts, {"spread", "tails"}),
}
# Those that take another protocol to show, or more rounds.
SPECIAL: dict[str, tuple[Protocol, int, faults.Fault, set[str]]] = {
    "clip by the largest coordinate": (PROTOCOL, 12_000, faults.clip_by_the_largest_coordinate, {"unbiased"}),
    "deterministic rounding": (PROTOCOL, 5_000, faults.deterministic_rounding, {"unbiased"}),
    "huge vectors unclipped": (PROTOCOL, 8_000, sly_faults.long_vectors_unclipped, {"unbiased"}),
    "huge vectors clipped to twice the bound": (
        PROTOCOL,
        12_000,
        sly_faults.very_long_vectors_clipped_to_more,
        {"unbiased"},
    ),
    "no noise in a message of a hundred": (
        PROTOCOL,
        5_000,
        sly_faults.no_noise_in_one_message_of_a_hundred,
        {"quiet"},
    ),
    "no tails": (PROTOCOL, 12_000, sly_faults.noise_without_tails, {"tails"}),
    "no noise on the largest level": (PROTOCOL, 8_000, sly_faults.no_noise_on_the_largest_level, {"remainders"}),
    "wrong modulus": (SECURE, 2_500, sly_faults.wrong_modulus, {"unbiased", "spread", "law"}),
    "no noise beyond a block": (WIDE, 1_000, sly_faults.no_noise_beyond_a_block, {"spread", "law"}),
    "no noise in the last of many coordinates": (
        WIDE,
        1_000,
        sly_faults.no_noise_in_the_last_coordinate,
        {"spread", "law"},
    ),
    "one coordinate: keystream of the round before last": (
        ONE_COORDINATE,
        2_500,
        sly_faults.keystream_of_the_round_before_last,
        {"rounds"},
    ),
    "one coordinate: few keys": (ONE_COORDINATE, 5_000, sly_faults.few_keys, {"repeats"}),
    "one coordinate: noise in steps of two": (ONE_COORDINATE, 2_500, sly_faults.even_noise, {"remainders"}),
    "one coordinate: no noise for zero vectors": (
        ONE_COORDINATE,
        10_000,
        sly_faults.no_noise_for_zero_vectors,
        {"spread", "law"},
    ),
}
ALL = {name: (PROTOCOL, 2_500, fault, expected) for name, (fault, expected) in FAULTS.items()} | SPECIAL
# One for every check; the others repeat them.
USUAL = {
    "no noise, but its mean",
    "slightly biased coins",
    "keystream reused in the next round",
    "keystream reused in a message",
    "off the lattice",
    "noise in steps of two",
    "uniform noise",
}


def test_every_check_fails_for_a_usual_fault() -> None:
    checks = {"privacy", "integers", "unbiased", "spread", "law", "tails"}
    checks |= {"remainders", "quiet", "coordinates", "rounds", "repeats"}
    assert set.union(*(ALL[name][3] for name in USUAL)) == checks


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in USUAL else pytest.mark.thorough) for name in ALL]
)
@pytest.mark.usefixtures("fixed_seed")
def test_a_fault_is_found(name: str) -> None:
    protocol, rounds, fault, expected = ALL[name]
    encode, start = fault(protocol)
    report = audit(protocol, DELTA, rounds=rounds, encode=encode, start=start, seed=2)
    assert not report.passed
    found = {check.name for check in report.checks if not check.passed}
    assert expected <= found
