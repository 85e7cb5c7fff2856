"""The guarantee of many rounds of a protocol."""

from __future__ import annotations

import json
import math

import pytest

from cpsgd import Protocol
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import Coins, Mechanism, RoundedGaussian, Skellam
from cpsgd.privacy.gaussian import gdp_epsilon
from cpsgd.privacy.guarantees import guarantee, guarantee_over_rounds
from cpsgd.privacy.proofs import round_cost
from cpsgd.privacy.proofs.per_round import PerRound
from cpsgd.privacy.proofs.published_accounting import published_epsilon
from cpsgd.run import Run

PROTOCOL = Protocol.rotated_binomial(clients=2_000, dim=4_096, clip_norm=1.0, levels=3, trials=20)
DELTA = 1e-6


def test_one_round_is_the_plain_guarantee() -> None:
    single = guarantee(PROTOCOL, DELTA)
    for participation in ("once", "every"):
        found = guarantee_over_rounds(PROTOCOL, DELTA, participation=participation)
        assert (found.epsilon, found.method, found.citation) == (single.epsilon, single.method, single.citation)


def test_disjoint_cohorts_cost_one_round_whatever_their_number() -> None:
    found = guarantee_over_rounds(PROTOCOL, DELTA, rounds=1_000, participation="once")
    assert found.epsilon == guarantee(PROTOCOL, DELTA).epsilon
    assert found.rounds == 1_000


def test_every_round_is_slightly_above_gaussians_of_the_same_variance() -> None:
    found = guarantee_over_rounds(PROTOCOL, DELTA, rounds=25)
    sensitivity, deviation = 2.0 / PROTOCOL.scale, (2_000 * 20 / 4) ** 0.5
    gaussian = gdp_epsilon(5 * sensitivity / deviation, DELTA)
    assert gaussian < found.epsilon < 1.1 * gaussian


def test_rounds_with_different_survivors_lie_between_the_extremes() -> None:
    full = guarantee_over_rounds(PROTOCOL, DELTA, rounds=10).epsilon
    poor = guarantee_over_rounds(PROTOCOL, DELTA, rounds=10, surviving=1_000).epsilon
    mixed = guarantee_over_rounds(PROTOCOL, DELTA, surviving=[2_000] * 5 + [1_000] * 5)
    assert full < mixed.epsilon < poor
    assert mixed.noise_clients == 1_000
    # The order of the rounds is of no importance.
    shuffled = guarantee_over_rounds(PROTOCOL, DELTA, surviving=[1_000, 2_000] * 5)
    assert shuffled.epsilon == pytest.approx(mixed.epsilon, rel=1e-9)


def test_very_many_different_sizes_are_rounded_down() -> None:
    sizes = list(range(1_500, 2_000))
    found = guarantee_over_rounds(PROTOCOL, DELTA, surviving=sizes)
    # Twenty sizes are few enough to be taken as they are.
    up = guarantee_over_rounds(PROTOCOL, DELTA, surviving=[-(-size // 25) * 25 for size in sizes]).epsilon
    down = guarantee_over_rounds(PROTOCOL, DELTA, surviving=[size // 25 * 25 for size in sizes]).epsilon
    assert up < found.epsilon < down
    assert found.rounds == 500


def test_collusion_counts_like_dropping_out() -> None:
    colluding = guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, colluding=300)
    dropped = guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, surviving=1_700)
    assert colluding.epsilon == pytest.approx(dropped.epsilon, rel=1e-12)
    with pytest.raises(ConditionError, match="there is no privacy"):
        guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, surviving=300, colluding=300)


def test_sampling_amplifies_and_wants_its_adjacency() -> None:
    poisson = guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, participation="poisson:0.1", adjacency="zero-out")
    every = guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, adjacency="zero-out")
    assert poisson.epsilon < every.epsilon / 3
    fixed = guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, participation="fixed-size:0.01")
    assert fixed.epsilon < guarantee_over_rounds(PROTOCOL, DELTA, rounds=5).epsilon / 3
    with pytest.raises(ParameterError, match="zero-out"):
        guarantee_over_rounds(PROTOCOL, DELTA, rounds=5, participation="poisson:0.1")


def test_the_papers_route_is_far_above() -> None:
    # A range large enough for the paper's theorem at every round's share of δ.
    wide = Protocol.rotated_binomial(clients=2_000, dim=4_096, clip_norm=1.0, levels=3, trials=200, delta=1e-12)
    found = guarantee_over_rounds(wide, DELTA, rounds=20)
    alternatives = dict(found.alternatives)
    paper = alternatives["paper-theorem + optimal composition"]
    assert isinstance(paper, float)
    assert paper == published_epsilon(Run.of(wide, rounds=20), DELTA)
    assert paper > 2 * found.epsilon
    assert "could not come below" in str(alternatives["per-round guarantee + optimal composition"])
    own = PerRound().epsilon(Run.of(wide, rounds=20), DELTA).epsilon
    assert found.epsilon < own < paper


def test_a_published_accounting_that_floating_point_cannot_hold_is_no_reason_to_prove_nothing() -> None:
    coins = Protocol(clients=20, dim=1, clip_norm=1.0, mechanism=Coins(coins=4096, theta=0.001, coordinate_range=0.4))
    found = guarantee_over_rounds(coins, 1e-5, rounds=3)
    assert found.epsilon < 1.0
    assert "no finite ε" in str(dict(found.alternatives)["poisson-binomial + optimal composition"])


@pytest.mark.parametrize(
    ("participation", "adjacency"), [("fixed-size:0.05", "replace-one"), ("poisson:0.05", "zero-out")]
)
def test_sampling_amplifies_sums_without_separate_noise(participation: str, adjacency: str) -> None:
    """Their certificate is tried of each round and of all at once; the second must not take the first one's place."""
    coins = Protocol(clients=500, dim=100, clip_norm=1.0, mechanism=Coins(coins=1, theta=0.1, coordinate_range=0.3))
    every = guarantee_over_rounds(coins, DELTA, rounds=10, adjacency=adjacency)
    found = guarantee_over_rounds(coins, DELTA, rounds=10, participation=participation, adjacency=adjacency)
    assert found.epsilon < every.epsilon / 4
    assert "sampl" in found.citation


def test_numbers_too_small_for_floating_point_are_not_smoothed() -> None:
    far = Protocol.binomial(clients=3, dim=40, clip_norm=1.0, levels=39, trials=16345, coordinate_range=2.0**63)
    assert guarantee_over_rounds(far, 1e-5, rounds=3).epsilon < 1e-6


def test_monotone_in_rounds_noise_and_delta() -> None:
    reference = guarantee_over_rounds(PROTOCOL, DELTA, rounds=10).epsilon
    assert guarantee_over_rounds(PROTOCOL, DELTA, rounds=9).epsilon < reference
    assert guarantee_over_rounds(PROTOCOL, 2 * DELTA, rounds=10).epsilon < reference
    more = Protocol.rotated_binomial(clients=2_000, dim=4_096, clip_norm=1.0, levels=3, trials=21)
    assert guarantee_over_rounds(more, DELTA, rounds=10).epsilon < reference
    assert guarantee_over_rounds(PROTOCOL, DELTA, rounds=10, adjacency="zero-out").epsilon < reference


def test_the_gaussian_protocol_is_exact() -> None:
    gaussian = Protocol.gaussian(clients=100, dim=10, clip_norm=1.0, sigma=2.0)
    found = guarantee_over_rounds(gaussian, DELTA, rounds=4)
    assert found.epsilon == pytest.approx(gdp_epsilon(2 * 2.0 / (2.0 * 10.0), DELTA), rel=1e-6)
    assert found.tail == 0.0


def test_a_wrong_number_of_entries_is_refused() -> None:
    with pytest.raises(ParameterError, match="one entry of surviving per round"):
        guarantee_over_rounds(PROTOCOL, DELTA, rounds=3, surviving=[2_000, 2_000])
    with pytest.raises(ParameterError, match="one entry"):
        guarantee_over_rounds(PROTOCOL, DELTA, surviving=[])


def test_prints_and_serialises() -> None:
    found = guarantee_over_rounds(PROTOCOL, DELTA, rounds=7)
    assert "7 rounds, participation every" in str(found)
    data = json.loads(json.dumps(found.to_dict()))
    assert data["rounds"] == 7
    assert data["participation"] == "every"
    assert {found.method, *(entry["method"] for entry in data["alternatives"])} == {
        "gaussian-certificate",
        "smoothed-certificate",
        "per-round guarantee + optimal composition",
        "renyi-certificate",
        "paper-theorem + optimal composition",
    }


def test_rounds_that_cost_nothing() -> None:
    tiny = Protocol.rotated_binomial(clients=1000, dim=10, clip_norm=1e-6, coordinate_range=1.0, levels=3, trials=10)
    assert guarantee_over_rounds(tiny, 1e-2, rounds=2).epsilon == 0.0


def test_the_smallest_of_the_proofs_is_returned() -> None:
    # So little noise that Rényi certificates, added up, beat the Gaussian certificate of two.
    few = Protocol.rotated_binomial(clients=5, dim=1, clip_norm=1.0, coordinate_range=1.0, levels=2, trials=10)
    found = guarantee_over_rounds(few, 1e-6, rounds=2)
    assert found.method == "renyi-certificate"
    assert "Rényi" in found.citation
    assert found.epsilon < min(e for _, e in found.alternatives if isinstance(e, float))


FEW = Protocol.binomial(clients=4, dim=1, clip_norm=1.0, levels=3, trials=16)


def test_renyi_certificates_are_summed_over_rounds() -> None:
    found = guarantee_over_rounds(FEW, 1e-5, rounds=40)
    # The smoothed certificate of all rounds together comes as near, but not below.
    assert found.method == "renyi-certificate"
    assert 17.94 < found.epsilon < dict(found.alternatives)["smoothed-certificate"] <= 20.5  # type: ignore[operator]
    assert 0.0 < found.tail < 1e-5


def test_renyi_certificates_of_different_sizes_are_summed() -> None:
    mixed = guarantee_over_rounds(FEW, 1e-5, surviving=[4] * 20 + [3] * 20)
    assert mixed.method == "renyi-certificate"
    full, poor = (guarantee_over_rounds(FEW, 1e-5, rounds=40, surviving=size).epsilon for size in (4, 3))
    assert full < mixed.epsilon < poor
    many = Protocol.binomial(clients=40, dim=1, clip_norm=1.0, levels=3, trials=16)
    reason = dict(guarantee_over_rounds(many, 1e-5, surviving=range(31, 41)).alternatives)["renyi-certificate"]
    assert reason == "is computed for rounds of up to 4 different numbers of clients"


def test_renyi_certificates_pay_for_the_samplers_resolution() -> None:
    # Thresholds of 128 bits, for coins that are not fair.
    skewed = Protocol.binomial(clients=4, dim=1, clip_norm=1.0, levels=3, trials=40, p=0.4)
    found = guarantee_over_rounds(skewed, 1e-5, rounds=10)
    assert found.method == "renyi-certificate"
    moved = 10 * 4 * skewed.mechanism.noise.variation * (1 + math.exp(found.epsilon))
    assert moved > 0.0
    assert found.tail > moved
    with pytest.raises(ConditionError, match="Nothing is proved about 2000 such rounds"):
        guarantee_over_rounds(skewed, 1e-5, rounds=2_000)


@pytest.mark.parametrize("scheme", ["fixed-size", "poisson"])
def test_sampling_never_costs_privacy(scheme: str) -> None:
    protocol = Protocol.rotated_binomial(clients=1000, dim=10, clip_norm=1.0, coordinate_range=1.0, levels=3, trials=10)
    adjacency = "replace-one" if scheme == "fixed-size" else "zero-out"
    every = guarantee_over_rounds(protocol, 1e-9, rounds=10, adjacency=adjacency).epsilon
    for rate in (0.999, 0.5, 0.05):
        sampled = guarantee_over_rounds(
            protocol, 1e-9, rounds=10, adjacency=adjacency, participation=f"{scheme}:{rate}"
        )
        assert sampled.epsilon <= 1.01 * every


@pytest.mark.parametrize("colluding", [0, 30])
@pytest.mark.parametrize(
    "mechanism",
    [
        RoundedGaussian(noise_deviation=2.0, step=0.05, window=32, coordinate_range=0.5),
        Skellam(variance=40.0, levels=8, coordinate_range=0.5),
    ],
    ids=lambda mechanism: mechanism.name,
)
def test_a_rounds_variation_is_that_of_all_honest_clients_draws(mechanism: Mechanism, colluding: int) -> None:
    protocol = Protocol(clients=100, dim=64, clip_norm=1.0, mechanism=mechanism)
    each = mechanism.noise.variation
    assert each > 0.0
    found = round_cost(Run.of(protocol, colluding=colluding), 1e-9).variation
    assert found == pytest.approx((100 - colluding) * 64 * each, rel=1e-9)
