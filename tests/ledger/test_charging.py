"""What rounds of different kinds cost together: never less than an independent computation says."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ConditionError, ParameterError
from cpsgd.ledger import Budget, Entry, RoundEvent, charging
from cpsgd.ledger.kinds import Account, Groups, Room, kind_of, octave_of
from cpsgd.mechanisms import Binomial, Gaussian, RoundedGaussian
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.law import Normal
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner import plan
from cpsgd.privacy.accountant import Rounds, mixed_epsilon
from cpsgd.privacy.gaussian import gdp_delta, gdp_epsilon
from cpsgd.privacy.guarantees import guarantee, guarantee_over_rounds
from cpsgd.privacy.one_example import example_protocol
from cpsgd.privacy.proofs import certified_smooth as products
from cpsgd.privacy.proofs import joint_cost, round_cost
from cpsgd.privacy.proofs.certified_gaussian import gaussian_certificate
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from tests import known_values as known

from .totals import total_of

DELTA = 1e-6
FIRST = Protocol.rotated_binomial(clients=1_000, dim=512, clip_norm=1.0, levels=3, trials=20)
SECOND = Protocol.rotated_binomial(clients=1_000, dim=200, clip_norm=2.0, levels=5, trials=100)
# So little noise that the Gaussian certificate is a poor one, or with fewer survivors none at all.
POOR = Protocol.binomial(clients=60, dim=1, clip_norm=1.0, levels=2, trials=1)
GAUSSIAN = Protocol.gaussian(clients=1_000, dim=7, clip_norm=1.0, sigma=0.4)
# Of which rounding tells a little.
ROUNDED = Protocol(
    clients=1_000,
    dim=100,
    clip_norm=1.0,
    mechanism=RoundedGaussian(noise_deviation=1.0, step=0.3, window=40, coordinate_range=1.0),
)
REPLACE = Budget(population="people", epsilon=400.0, delta=DELTA)
ZERO = replace(REPLACE, adjacency="zero-out")


def correlated(**options: object) -> Protocol:
    mechanism = CorrelatedGaussian(
        noise_deviation=64.0, step=0.02, window=1 << 12, coordinate_range=0.7, bands=3, run_length=6, **options
    )
    return Protocol(clients=40, dim=40, clip_norm=1.0, mechanism=mechanism)


def total(*events: RoundEvent, budget: Budget = REPLACE) -> charging.Total:
    return charging.priced(budget, [Account()], events)


def event(protocol: Protocol = FIRST, survivors: int = 1_000, **options: object) -> RoundEvent:
    return RoundEvent(protocol, survivors=survivors, **options)


def exact_mu(protocol: Protocol, honest: int) -> float:
    """μ of Gaussian noise with the variance of the round's: no proof can come below what it costs."""
    mechanism = protocol.mechanism
    if isinstance(mechanism, Gaussian):
        return 2 * protocol.clip_norm / (mechanism.sigma * math.sqrt(honest))
    assert isinstance(mechanism, Binomial)
    deviation = math.sqrt(honest * mechanism.trials * mechanism.p * (1 - mechanism.p))
    return 2 * protocol.clip_norm / protocol.scale / deviation


# ------------------------------------------------------------------ one kind of round


def test_nothing_spent() -> None:
    found = total()
    assert (found.epsilon, found.rounds, found.left) == (0.0, 0, 400.0)


@pytest.mark.parametrize("protocol", [FIRST, SECOND, GAUSSIAN, POOR, ROUNDED], ids=lambda protocol: f"{protocol.name}")
@pytest.mark.parametrize("count", [1, 5])
def test_rounds_of_one_protocol_are_the_guarantee_over_rounds(protocol: Protocol, count: int) -> None:
    expected = guarantee_over_rounds(protocol, DELTA, rounds=count, surviving=60, colluding=3)
    found = total(*[event(protocol, 60, colluding=3)] * count)
    assert (found.epsilon, found.method) == (expected.epsilon, expected.method)
    assert (found.rounds, found.delta) == (count, DELTA)


def test_rounds_of_different_sizes() -> None:
    sizes = [1_000, 900, 950, 1_000]
    expected = guarantee_over_rounds(FIRST, DELTA, surviving=sizes)
    assert total(*[event(survivors=size) for size in sizes]).epsilon == pytest.approx(expected.epsilon, rel=1e-9)


def test_sampled_rounds_of_one_protocol() -> None:
    expected = guarantee_over_rounds(FIRST, DELTA, rounds=4, participation="poisson:0.05", adjacency="zero-out")
    found = total(*[event(participation="poisson:0.05")] * 4, budget=ZERO)
    assert found.epsilon == pytest.approx(expected.epsilon, rel=1e-9)
    expected = guarantee_over_rounds(FIRST, DELTA, rounds=4, participation="fixed-size:0.05")
    assert total(*[event(participation="fixed-size:0.05")] * 4).epsilon == pytest.approx(expected.epsilon, rel=1e-9)


def test_what_privacy_does_not_depend_on() -> None:
    other = replace(FIRST, rotation_seed=5, modulus=2**20)
    assert total(event(), event(other)).epsilon == total(event(), event()).epsilon


# ------------------------------------------------------------------ several kinds


def test_two_protocols_cost_at_least_gaussians_of_their_variance_and_little_more() -> None:
    events = [event(), event(), event(SECOND, 800), event(GAUSSIAN)]
    floor = gdp_epsilon(
        math.sqrt(2 * exact_mu(FIRST, 1_000) ** 2 + exact_mu(SECOND, 800) ** 2 + exact_mu(GAUSSIAN, 1_000) ** 2), DELTA
    )
    found = total(*events)
    assert floor < found.epsilon < 1.15 * floor
    assert found.method == "gaussian composition"
    assert "Corollary 3.3" in found.citation
    assert found.epsilon < sum(guarantee(e.protocol, DELTA / 4, surviving=e.survivors).epsilon for e in events)
    for ordered in itertools.permutations(events):
        assert total(*ordered).epsilon == found.epsilon


def test_the_tails_of_all_rounds_are_paid_for() -> None:
    events = [event(), event(SECOND)]
    found = total(*events)
    # The same by hand, with one share of δ for the tails.
    tail = 0.01 * DELTA / 2
    parts = []
    for protocol in (FIRST, SECOND):
        mechanism = protocol.mechanism
        assert isinstance(mechanism, Binomial)
        certificate = gaussian_certificate(
            BinomialLaw(1_000 * mechanism.trials, 0.5),
            dim=protocol.dim,
            sensitivity=mechanism.sensitivity(
                dim=protocol.dim, clip_norm=protocol.clip_norm, adjacency=Adjacency.REPLACE_ONE
            ),
            levels=mechanism.levels,
            tail=tail,
        )
        parts.append((Rounds(certificate.mu, 1, certificate.tail_mass), Participation.every()))
    by_hand = mixed_epsilon(parts, delta=DELTA)
    assert found.epsilon <= by_hand
    assert found.epsilon == pytest.approx(by_hand, rel=0.02)
    assert 0.0 < found.tail < DELTA


def test_sampled_and_unsampled_rounds_together() -> None:
    often, seldom = event(participation="poisson:0.2"), event(SECOND, participation="poisson:0.01")
    sampled = total(often, seldom, budget=ZERO).epsilon
    both = total(often, seldom, event(SECOND, 900), budget=ZERO).epsilon
    alone = total(event(SECOND, 900), budget=ZERO).epsilon
    unsampled = total(event(), event(SECOND), event(SECOND, 900), budget=ZERO).epsilon
    assert sampled < both < unsampled
    assert alone < both < alone + sampled + 1e-6
    fixed = event(participation="fixed-size:0.02")
    assert total(event(SECOND)).epsilon < total(event(SECOND), fixed).epsilon < total(event(SECOND), event()).epsilon


@pytest.mark.parametrize(("survivors", "method"), [(28, "Gaussian certificate"), (60, "Rényi certificate")])
def test_where_the_gaussian_certificate_is_poor_or_missing_kinds_are_added_up(survivors: int, method: str) -> None:
    found = total(event(POOR, survivors), event(), event())
    assert found.method == charging.BASIC
    assert "Theorem 3.16" in found.citation
    assert method in found.citation
    share = DELTA / 2 * (1 - 1e-12)
    single = guarantee(POOR, share, surviving=survivors).epsilon
    expected = single + guarantee_over_rounds(FIRST, share, rounds=2).epsilon
    assert found.epsilon == pytest.approx(expected, rel=1e-12)
    assert found.epsilon >= expected
    many = [event(POOR, survivors), *[event()] * 9]
    if survivors == 60:
        assert total(*many).method == "gaussian composition"
    else:
        assert total(*many).method == charging.BASIC  # as there is nothing else


def test_more_rounds_never_cost_less() -> None:
    generator = random.Random(3)
    for budget, schemes in ((REPLACE, ("every", "once", "fixed-size:0.1")), (ZERO, ("every", "once", "poisson:0.1"))):
        events: list[RoundEvent] = []
        before = 0.0
        for _ in range(7):
            scheme = generator.choice(schemes)
            protocol = generator.choice([FIRST, SECOND, GAUSSIAN])
            events.append(event(protocol, generator.choice([700, 1_000]), participation=scheme))
            after = total(*events, budget=budget).epsilon
            assert after > before
            before = after


def test_nothing_is_claimed_where_nothing_is_proved() -> None:
    silent = Protocol.binomial(clients=100, dim=10, clip_norm=1.0, levels=2, trials=0)
    for events in ([event(silent, 100)], [event(silent, 100), event()]):
        with pytest.raises(ConditionError):
            total(*events)
    with pytest.raises(ConditionError, match="No method"):
        total(event(POOR, 12), event())


# ------------------------------------------------------------------ disjoint cohorts


def once(protocol: Protocol = FIRST, survivors: int = 1_000, partition: str = "spring") -> RoundEvent:
    return event(protocol, survivors, participation="once", partition=partition)


def test_a_partition_costs_its_costliest_round() -> None:
    assert total(*[once()] * 50).epsilon == total(event()).epsilon
    assert total(once(), once(survivors=500)).epsilon == total(event(survivors=500)).epsilon
    costliest = max(total(event()).epsilon, total(event(SECOND)).epsilon)
    assert total(once(), once(SECOND), once()).epsilon == costliest
    assert total(*[once()] * 50).rounds == 50


def test_partitions_compose_with_each_other_and_with_other_rounds() -> None:
    assert total(once(), once(), once(partition="autumn")).epsilon == total(event(), event()).epsilon
    assert total(once(), once(), event()).epsilon == total(event(), event()).epsilon
    mixed = total(once(), once(SECOND), event(GAUSSIAN)).epsilon
    floor = max(total(event(), event(GAUSSIAN)).epsilon, total(event(SECOND), event(GAUSSIAN)).epsilon)
    assert floor * (1 - 1e-12) <= mixed <= floor * 1.001


def test_without_a_name_disjoint_cohorts_are_not_believed() -> None:
    unnamed = event(participation="once")
    assert total(unnamed, unnamed).epsilon == total(event(), event()).epsilon


def test_partitions_of_several_kinds_each_are_covered_in_every_combination() -> None:
    events = [once(POOR, 60), once(), once(POOR, 60, "autumn"), once(partition="autumn")]
    found = total(*events)
    assert found.method == charging.BASIC
    # Some client may be in the costlier round of both.
    share = DELTA / 2 * (1 - 1e-12)
    assert found.epsilon == pytest.approx(2 * guarantee(POOR, share).epsilon, rel=1e-12)
    rich = total(once(), once(SECOND), once(partition="autumn"), once(SECOND, partition="autumn")).epsilon
    pairs = [total(event(a), event(b)).epsilon for a in (FIRST, SECOND) for b in (FIRST, SECOND)]
    assert rich >= max(pairs) * (1 - 1e-12)
    # Rounds of one kind have a certificate of their own, which is a little tighter.
    assert rich == pytest.approx(max(pairs), rel=0.02)


@pytest.mark.parametrize(("few", "many"), [((24, 2), (40, 2)), ((30, 1), (60, 3))])
def test_kinds_that_are_smoothed_together_are_never_below_the_exact_epsilon(
    few: tuple[int, int], many: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All outcomes of a few rounds of one coordinate, whose neighbours differ by one level."""
    monkeypatch.setattr(products, "_FEWEST", 0.0)
    delta = 1e-2
    kinds = [Protocol.binomial(clients=n, dim=1, clip_norm=1.0, levels=2, trials=1) for n, _ in (few, many)]
    losses, masses = np.zeros(1), np.ones(1)
    parts = []
    for protocol, (clients, count) in zip(kinds, (few, many), strict=True):
        run = Run.of(protocol, rounds=count, surviving=clients)
        parts.append((joint_cost(run, 0.01 * delta), Participation.every()))
        k = np.arange(clients + 1)
        here = binom.pmf(k, clients, 0.5)
        ratio = np.log(here) - np.log(np.append(0.0, here[:-1]) + 1e-300)
        for _ in range(count):
            losses, masses = np.add.outer(losses, ratio).ravel(), np.multiply.outer(masses, here).ravel()
    for epsilon in (0.3, 1.0, 2.0, 3.0):
        exact = float(np.sum(masses * np.maximum(0.0, -np.expm1(epsilon - losses))))
        mu = math.sqrt(sum(part.count * part.mu**2 for part, _ in parts))
        tail = sum(part.count * part.tail_mass for part, _ in parts)
        assert exact <= gdp_delta(mu, epsilon) + tail
    # And not far: a Gaussian of the same variance allows less.
    ideal = math.sqrt(sum(4.0 * count / clients for clients, count in (few, many)))
    assert ideal < mu < 2.0 * ideal


# ------------------------------------------------------------------ what else is paid for


def test_overflow_is_taken_off_delta() -> None:
    events = [event(participation="poisson:0.05", overflow=0.1 * DELTA)] * 3
    expected = guarantee_over_rounds(
        FIRST, 0.7 * DELTA, rounds=3, participation="poisson:0.05", adjacency="zero-out"
    ).epsilon
    found = total(*events, budget=ZERO)
    assert found.epsilon == pytest.approx(expected, rel=1e-6)
    assert found.tail > 0.3 * DELTA
    with pytest.raises(ConditionError, match="drawing too many"):
        total(*events * 4, budget=ZERO)


def test_the_unit_is_an_example() -> None:
    protocol = Protocol.rotated_binomial(clients=100, dim=100, clip_norm=1.0, levels=64, trials=200)
    budget = replace(REPLACE, unit="example")
    found = total(event(protocol, 100, examples=10), budget=budget)
    expected = guarantee(example_protocol(protocol, 10), DELTA).epsilon
    assert found.epsilon == expected < guarantee(protocol, DELTA).epsilon


def test_a_release_with_more_survivors_never_raises_the_total() -> None:
    reserved = event(survivors=901)
    entries = [Entry(i, "people", reserved, "now", 1.0, "some") for i in range(6)]
    before = total_of(REPLACE, entries)
    assert before.unreleased == 6
    for i, survivors in enumerate([901, 902, 950, 1_023, 1_024, 1_700]):
        entries[i] = replace(entries[i], released_at="now", released_survivors=survivors)
        after = total_of(REPLACE, entries)
        assert after.epsilon <= before.epsilon
        assert after.unreleased == 5 - i
        before = after
    sizes = [entry.survivors for entry in entries]
    exact = guarantee_over_rounds(FIRST, DELTA, surviving=sizes).epsilon
    assert exact * (1 - 1e-9) <= before.epsilon <= exact * 1.001


def test_a_release_does_not_bring_the_total_over_what_was_allowed() -> None:
    # With so little noise the certificate of 31 messages is worse than that of 30, and three kinds are worse than two.
    little, much = (
        Protocol.rotated_binomial(clients=30, dim=1, clip_norm=1.0, levels=2, trials=trials, coordinate_range=1.0)
        for trials in (1, 40)
    )
    rounds = [event(protocol, survivors=30) for protocol in (little, little, little, much)]
    budget = replace(REPLACE, delta=0.01, epsilon=100.0)
    entries = [Entry(i, "people", round, "now", 1.0, "some") for i, round in enumerate(rounds)]
    allowed = total_of(budget, entries)
    released = replace(entries[0], released_at="now", released_survivors=31, released_as=4)
    worse = total_of(budget, [replace(released, released_as=2), *entries[1:]])
    assert worse.epsilon > allowed.epsilon
    after = total_of(budget, [released, *entries[1:]])
    assert (after.epsilon, after.unreleased) == (allowed.epsilon, 3)


def test_a_stated_distance_is_accounted_for() -> None:
    stated = {"replace_one_distance": 2.0**0.5, "distance_reason": "rows are one-hot"}
    near = replace(FIRST, **stated)
    assert RoundEvent.from_dict(event(near).to_dict()).protocol == near
    assert total(event(near)).epsilon == guarantee(near, DELTA).epsilon < total(event()).epsilon
    mixed = total(event(near), event(SECOND)).epsilon
    assert total(event(near)).epsilon < mixed < total(event(), event(SECOND)).epsilon
    said = "replace-one distance 1.41421 because rows are one-hot"
    assert total(event(near), event(near, 900), event(SECOND)).assumptions == (said,)
    assert total(event()).assumptions == total(event(near), budget=ZERO).assumptions == ()
    # It says nothing of a vector and zero.
    assert total(event(near), budget=ZERO).epsilon == total(event(), budget=ZERO).epsilon


def test_what_rounding_tells_is_charged_beside_rounds_of_other_kinds() -> None:
    mechanism = ROUNDED.mechanism
    slack = 100 * mechanism.noise.slack(20)
    assert slack > 1e-5
    mixed = total(event(ROUNDED, 20), event(GAUSSIAN, 1_000))
    law = mechanism.noise.law(20)
    assert isinstance(law, Normal)
    mu = math.hypot(ROUNDED.sensitivity(Adjacency.REPLACE_ONE) / law.deviation, exact_mu(GAUSSIAN, 1_000))
    exact = gdp_epsilon(mu, DELTA)
    assert exact + 2.0 * slack <= mixed.epsilon <= (exact + 3.0 * slack) * (1.0 + 1e-5)


@pytest.mark.parametrize("separation", [None, 1])
@pytest.mark.parametrize("survivors", [(40, 40, 40), (40, 38, 35)])
def test_runs_of_correlated_noise_compose_and_rounds_of_one_do_not(
    separation: int | None, survivors: tuple[int, ...]
) -> None:
    """A run is one Gaussian mechanism, and several are that many, whether they are named or not."""
    protocol = correlated(separation=separation)
    sensitivity = protocol.sensitivity(Adjacency.REPLACE_ONE)

    def least(sizes: tuple[int, ...]) -> float:
        laws = [protocol.mechanism.noise.law(size) for size in sizes]
        mu = math.sqrt(sum((sensitivity / law.deviation) ** 2 for law in laws if isinstance(law, Normal)))
        return gdp_epsilon(mu, DELTA)

    for count in (1, 2, 3):
        sizes = survivors[:count]
        named = [
            event(protocol, size, participation=Participation.once(), partition=f"run {i}", round=round)
            for i, size in enumerate(sizes)
            for round in (1, 2)
        ]
        found = total(*named)
        assert least(sizes) <= found.epsilon <= 1.02 * least(sizes)
        assert total(*(event(protocol, size) for size in sizes)).epsilon == found.epsilon
        if count == 1:
            assert found.method == guarantee(protocol, DELTA).method


def test_runs_whose_windows_are_too_narrow_for_their_joint_epsilon_are_added_up() -> None:
    """What leaves a window costs δ e^ε times its probability: fine for each ε by itself, and too much for all."""
    planned = plan(100, 15, 8.0, DELTA, 1.0, bits=12, rounds=4, participation="once", correlated=2)
    runs = [
        event(planned.protocol, 100, participation="once", partition=f"run {i}", round=round)
        for i in range(10)
        for round in range(4)
    ]
    for count in (2, 10):
        found = total(*runs[: 4 * count])
        each = guarantee(planned.protocol, DELTA / count).epsilon
        assert found.epsilon == pytest.approx(count * each, rel=1e-6)
        assert found.method == charging.BASIC


def test_what_correlated_noise_does_not_cover_is_not_accounted_for() -> None:
    protocol = correlated(untrusted_holders=1)
    scheme = Participation.parse("poisson:0.1")
    with pytest.raises(ConditionError, match="at least half"):
        event(protocol, 20, colluding=1)
    with pytest.raises(ConditionError, match="untrusted_holders"):
        event(protocol, 40, colluding=2)
    with pytest.raises(ParameterError, match="at most clients=40"):
        event(protocol, 41)
    with pytest.raises(ConditionError, match="sampling"):
        event(protocol, 40, participation=scheme)
    # Nor by whoever has no event.
    whole = Participation.every()
    for surviving, colluding, who in ((19, 0, whole), (40, 2, whole), (40, 0, scheme)):
        run = Run.of(protocol, adjacency="zero-out", surviving=surviving, colluding=colluding, participation=who)
        with pytest.raises(ConditionError):
            round_cost(run, DELTA)
    with pytest.raises(ParameterError):
        round_cost(Run.of(protocol, adjacency="zero-out", surviving=41), DELTA)
    with pytest.raises(ParameterError):
        guarantee(protocol, DELTA, surviving=41)
    with pytest.raises(ConditionError):
        guarantee(protocol, DELTA, surviving=19)


def test_a_run_shares_its_partition_with_no_other_protocol() -> None:
    """Else a second run under the same name, with a little more noise, would be free."""
    run = correlated(separation=1)
    other = replace(run, mechanism=replace(run.mechanism, noise_deviation=70.0))  # type: ignore[type-var]
    first = event(run, 40, participation="once", partition="run")
    for protocol in (other, GAUSSIAN):
        with pytest.raises(ParameterError, match="one run of one protocol"):
            total(first, event(protocol, 40, participation="once", partition="run", round=1))
    assert total(first, replace(first, survivors=30, round=1)).rounds == 2


def test_a_run_has_no_more_rounds_than_its_noise_is_correlated_over() -> None:
    """Else a second run of the same protocol under the same name would be free, and so would any further round."""
    run = correlated(separation=1)
    one = event(run, 40, participation="once", partition="run")
    whole = [replace(one, round=number, survivors=40 - number % 2) for number in range(6)]
    assert total(*whole).rounds == 6
    for again in (one, replace(one, round=6), replace(one, survivors=39)):
        with pytest.raises(ParameterError, match="run_length=6"):
            total(*whole, again)
    assert total(*whole, replace(one, partition="another")).epsilon > 1.3 * total(*whole).epsilon
    # One that is released with more messages than were reserved for is full all the same.
    account = Account()
    for each in whole:
        account.reserve(each)
    for each in whole:
        account.release(each, 40)
    assert sum(count for _, _, count in account.at_the_last_reservation().items()) == 6
    with pytest.raises(ParameterError, match="run_length=6"):
        account.reserve(one)
    assert account.rounds == 6


def test_rounds_of_a_run_are_not_charged_as_runs_of_their_own() -> None:
    """Somebody in all rounds of one run pays far more than for as many runs with one round each."""
    protocol = correlated()
    with pytest.raises(ParameterError, match="as partition"):
        event(protocol, 40, participation="every", run="spring")
    assert event(protocol, 40, participation="once", run="spring", partition="spring").partition == "spring"
    assert event(protocol, 40).partition == ""  # a run by itself


def test_what_samplers_take_of_delta_is_counted_for_every_round_in_both_worlds() -> None:
    variation = round_cost(Run.of(ROUNDED, surviving=900), 1e-9).variation
    assert variation > 0.0
    planned = total(event(ROUNDED, 900), event(ROUNDED, 900), event(GAUSSIAN))
    assert planned.tail == pytest.approx(2.0 * variation * (1.0 + math.exp(planned.epsilon)), rel=1e-9, abs=0.0)
    assert planned.left == REPLACE.epsilon - planned.epsilon
    adaptive = replace(REPLACE, epsilon=8.0, accounting="adaptive")
    filtered = total(event(ROUNDED, 900), event(GAUSSIAN), budget=adaptive)
    assert filtered.tail == pytest.approx(variation * (1.0 + math.exp(8.0)), rel=1e-9, abs=0.0)


def test_rounds_that_differ_in_their_size_alone_are_one_run() -> None:
    sizes = [900, 1_000, 1_000]
    found = total(*(event(GAUSSIAN, size) for size in sizes))
    exact = guarantee_over_rounds(GAUSSIAN, DELTA, surviving=sizes)
    assert (found.epsilon, found.method) == (exact.epsilon, exact.method)
    assert total(event(GAUSSIAN), event(replace(GAUSSIAN, clip_norm=2.0))).method == "gaussian composition"


def test_each_kind_has_its_share_of_delta_where_kinds_are_added_up() -> None:
    louder = replace(GAUSSIAN, clip_norm=2.0)
    first, second = (kind_of(event(protocol), 1_000) for protocol in (GAUSSIAN, louder))
    # Two rounds of one kind are a run, whose rounds compose; a set of two kinds costs its costlier one, each time.
    alone, both = frozenset([first]), frozenset([first, second])
    share = DELTA / 2 * (1 - 1e-12)
    found = charging._added_up(frozenset([(alone, 2), (both, 1)]), DELTA, Adjacency.REPLACE_ONE)
    twice = guarantee_over_rounds(GAUSSIAN, share, surviving=[1_000, 1_000]).epsilon
    assert found.epsilon == pytest.approx(twice + guarantee(louder, share).epsilon, rel=1e-12)
    again = charging._added_up(frozenset([(both, 3)]), DELTA, Adjacency.REPLACE_ONE)
    assert again.epsilon == pytest.approx(3 * guarantee(louder, DELTA / 3 * (1 - 1e-12)).epsilon, rel=1e-12)


# ------------------------------------------------------------------ what is decided about a charge

LOUD = replace(GAUSSIAN, clip_norm=2.0)


def account_of(one: RoundEvent, rounds: int, *, adaptive: bool = False) -> Account:
    account = Account()
    for number in range(rounds):
        account.reserve(one, octave=octave_of(number) if adaptive else None)
    return account


def test_two_partitions_of_several_kinds_cost_two_rounds() -> None:
    events = [once(protocol, 1_000, name) for name in ("spring", "autumn") for protocol in (GAUSSIAN, LOUD)]
    assert total(*events[:2]).epsilon == total(event(LOUD)).epsilon
    expected = guarantee_over_rounds(LOUD, DELTA, rounds=2).epsilon
    assert total(*events).epsilon == pytest.approx(expected, rel=1e-9)
    assert total(*events).epsilon > 1.3 * total(*events[:2]).epsilon


def test_nothing_is_left_beyond_the_limit() -> None:
    assert total(event(LOUD), budget=replace(REPLACE, epsilon=0.01)).left == 0.0


def test_how_many_rounds_are_counted_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [charging.most_covered(before) for before in (0, 126, 127, 254, 255)] == [0, 0, 1, 1, 2]
    monkeypatch.setattr(charging, "_PLENTY", 2)
    one = event(GAUSSIAN)
    account = account_of(one, 7)
    room = charging.affordable(REPLACE, [account], one)
    assert room is not None
    assert (room.kind, room.rounds) == (kind_of(one, 1_000), 4)
    assert room.epsilon == pytest.approx(guarantee_over_rounds(GAUSSIAN, DELTA, rounds=7 + 1 + 4).epsilon, rel=1e-9)
    # Where that is too much, the round alone is.
    tight = replace(REPLACE, epsilon=guarantee_over_rounds(GAUSSIAN, DELTA, rounds=9).epsilon)
    assert (alone := charging.affordable(tight, [account], one)) is not None
    assert (alone.rounds, alone.epsilon) == (0, guarantee_over_rounds(GAUSSIAN, DELTA, rounds=8).epsilon)
    assert charging.affordable(replace(REPLACE, epsilon=alone.epsilon * 0.999), [account], one) is None


def test_what_a_record_covers_is_not_proved_again() -> None:
    one, other = event(GAUSSIAN), event(LOUD)
    account = account_of(one, 7)
    account.room = Room(kind_of(one, 1_000), 3, 77.0, "as it was")
    assert charging.affordable(REPLACE, [account], one) == replace(account.room, rounds=2)
    first = charging.affordable(REPLACE, [account], other)
    assert first is not None
    assert first.epsilon < 77.0
    # Nor is it believed where it is about less, or about more than the budget.
    for room, budget in (
        (replace(account.room, rounds=0), REPLACE),
        (account.room, replace(REPLACE, epsilon=70.0)),
        (None, REPLACE),
    ):
        account.room = room
        found = charging.affordable(budget, [account], one)
        assert found is not None
        assert (found.method, found.rounds) != ("as it was", 2)
        assert found.epsilon < 10.0


@pytest.mark.parametrize(
    ("one", "others", "ahead"),
    [
        (event(GAUSSIAN), 0, True),
        (event(GAUSSIAN, colluding=3), 0, True),
        (event(GAUSSIAN, participation="poisson:0.1"), 0, True),
        (event(GAUSSIAN, participation="poisson:0.1", colluding=3), 0, False),
        (once(GAUSSIAN), 0, False),
        (event(GAUSSIAN), 1, False),
    ],
)
def test_which_rounds_are_counted_ahead(
    one: RoundEvent, others: int, ahead: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of a population by itself, in no partition; and none that records of 0.2.0 prove too little about."""
    monkeypatch.setattr(charging, "_PLENTY", 1)
    accounts = [account_of(one, 2), *[account_of(event(LOUD), 1)] * others]
    found = charging.affordable(ZERO, accounts, one)
    assert found is not None
    assert (found.rounds > 0) == ahead
    accounts[0].room = Room(found.kind, 5, 77.0, "as it was")
    again = charging.affordable(ZERO, accounts, one)
    assert again is not None
    assert (again.method == "as it was") == ahead


def test_the_proof_of_the_last_reservation_holds_for_its_account_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that are not monotone in the number of rounds: three cost more than the four that were proved together."""
    proved = {3: 1.2, 4: 0.9, 6: 2.0, 7: 1.5}

    def composed(groups: Groups, delta: float, adjacency: Adjacency) -> object:
        return charging._Proof(proved[sum(count for _, count in groups)], "m", "c", 0.0)

    monkeypatch.setattr(charging, "_composed", composed)
    one, budget = event(GAUSSIAN), replace(REPLACE, epsilon=1.0)
    account = account_of(one, 3)
    assert charging.spent(budget, [account]).epsilon == 1.2
    account.room = Room(kind_of(one, 1_000), 1, 0.9, "m")
    assert charging.spent(budget, [account]).epsilon == 0.9
    for enough in (1.2, 2.0):
        assert charging.spent(replace(budget, epsilon=enough), [account]).epsilon == 1.2
    assert charging.spent(budget, [account, account_of(one, 3)]).epsilon == 2.0


@pytest.mark.parametrize(
    ("accounting", "method", "said"),
    [("adaptive", "gaussian-filter", "Gaussian"), ("adaptive-renyi", "renyi-filter", "Rényi")],
)
def test_filters_say_which_they_are(accounting: str, method: str, said: str) -> None:
    budget = replace(REPLACE, epsilon=4.0, accounting=accounting)
    found = total(event(GAUSSIAN), budget=budget)
    assert found.method == method
    assert said in found.citation
    with pytest.raises(ConditionError, match="not charged to an adaptive budget"):
        charging.spent(budget, [account_of(event(GAUSSIAN), 1)])


def test_every_period_with_a_round_is_added_up_where_a_filter_does_not_hold_them_all() -> None:
    budget = replace(REPLACE, epsilon=0.8, accounting="adaptive")
    accounts = [account_of(event(GAUSSIAN), rounds, adaptive=True) for rounds in (1, 0)]
    assert charging.over_periods(budget, accounts) == charging.spent(budget, accounts)
    accounts = [account_of(event(LOUD), rounds, adaptive=True) for rounds in (1, 0, 5, 1)]
    found = charging.over_periods(budget, accounts)
    assert found.epsilon == pytest.approx(3 * 0.8)
    assert found.delta == pytest.approx(3 * DELTA)
    assert (found.tail, found.rounds, found.method) == (0.0, 7, charging.BASIC)


SMALL = Protocol.rotated_binomial(clients=200, dim=2, clip_norm=1.0, levels=3, trials=200)
COARSE = Protocol.rotated_binomial(clients=200, dim=2, clip_norm=2.0, levels=5, trials=400)


def test_known_totals() -> None:
    """Of kinds with tails: each one's share of δ, and the costliest of a partition, each once for every partition."""
    partitions = [once(protocol, 200, name) for name in ("a", "b") for protocol in (SMALL, COARSE)]
    cases = {
        "two kinds": total(event(SMALL, 200), event(COARSE, 200), event(COARSE, 200)),
        "nine rounds": total(*[event(SMALL, 200)] * 8, event(COARSE, 190)),
        "partitions": total(*partitions, event(SMALL, 200)),
        "sampled": total(event(SMALL, 200, participation="poisson:0.1"), event(COARSE, 200), budget=ZERO),
        "with Gaussian noise": total(event(SMALL, 200), event(GAUSSIAN, 200), event(GAUSSIAN, 200)),
        "adaptive": total(*[event(SMALL, 200)] * 2, budget=replace(REPLACE, epsilon=8.0, accounting="adaptive")),
    }
    known.check(
        "ledger/charging", {name: [found.epsilon, found.tail / DELTA] for name, found in cases.items()}, rel=1e-7
    )


def test_a_filter_takes_the_better_of_two_certificates() -> None:
    """Smoothed laws where noise is little, equivalent Gaussians where there is much."""
    limits = replace(REPLACE, epsilon=8.0, accounting="adaptive").filter
    assert limits is not None
    target, adjacency = limits.tail(3), Adjacency.REPLACE_ONE
    little = Protocol.rotated_binomial(clients=10, dim=4, clip_norm=1.0, levels=4, trials=5)
    much = Protocol.rotated_binomial(clients=100, dim=30, clip_norm=1.0, levels=16, trials=200)
    for protocol, smoothed_is_better in ((little, True), (much, False)):
        kind = kind_of(RoundEvent(protocol, survivors=protocol.clients), protocol.clients, 3)
        smoothed, gaussian = joint_cost(kind.run(adjacency), target), round_cost(kind.run(adjacency), target)
        assert smoothed is not None
        assert (smoothed.mu < gaussian.mu) == smoothed_is_better
        best = smoothed if smoothed_is_better else gaussian
        assert charging._single_cost(kind, limits, adjacency) == limits.cost(best, kind.participation, 0.0)
    nothing = kind_of(RoundEvent(replace(POOR, clients=2), survivors=2), 2, 3)
    with pytest.raises(ConditionError):
        charging._single_cost(nothing, limits, adjacency)


def test_rounds_beyond_a_filter_are_quoted_with_what_would_pay_for_them() -> None:
    budget = replace(REPLACE, epsilon=1.0, accounting="adaptive")
    event = RoundEvent(GAUSSIAN, survivors=1_000)
    needed = charging.priced(budget, [Account()], [event] * 40).epsilon
    assert needed > 1.2
    for factor, enough in ((1.001, True), (0.98, False)):
        other = replace(budget, epsilon=factor * needed)
        assert (charging.priced(other, [Account()], [event] * 40).epsilon <= other.epsilon) == enough


def test_rounds_of_a_partition_that_may_overflow_are_paid_for_by_the_worst() -> None:
    options = {"survivors": 1_000, "participation": "once", "partition": "p"}
    rounds = [RoundEvent(GAUSSIAN, overflow=overflow, **options) for overflow in (0.0, 1e-8)]
    other = RoundEvent(GAUSSIAN, survivors=1_000)
    assert total(*rounds, other).epsilon == total(rounds[1], other).epsilon > total(rounds[0], other).epsilon


def test_an_epsilon_beyond_all_limits_is_none() -> None:
    loud = Protocol.gaussian(clients=10, dim=7, clip_norm=1.0, sigma=1e-4)
    with pytest.raises(ConditionError, match="run fewer rounds or add noise"):
        total(RoundEvent(loud, survivors=10))


def test_nothing_is_assumed_where_no_distance_is_stated() -> None:
    near = replace(GAUSSIAN, replace_one_distance=1.0, distance_reason="rows are one-hot")
    assert total(RoundEvent(GAUSSIAN, survivors=1_000)).assumptions == ()
    both = total(RoundEvent(near, survivors=1_000), RoundEvent(GAUSSIAN, survivors=1_000)).assumptions
    assert both == ("replace-one distance 1 because rows are one-hot",)


def test_pure_rounds_of_two_kinds_have_no_tail() -> None:
    """Their ε add up, and δ pays for nothing."""
    rounds = []
    for spread in (40, 60):
        laplace = DiscreteLaplace(levels=5, coordinate_range=1.0, spread=spread, shares=10, window=2**16)
        rounds.append(RoundEvent(Protocol(clients=10, dim=2, clip_norm=1.0, mechanism=laplace), survivors=10))
    found = total(*rounds, budget=replace(REPLACE, delta=0.0))
    each = [guarantee(Run.of(event.protocol, surviving=10), 0.0).epsilon for event in rounds]
    assert found.epsilon == pytest.approx(sum(each), rel=1e-9)
    assert (found.tail, found.delta) == (0.0, 0.0)


def test_repetitions_of_one_kind_are_smoothed_together_where_that_is_better() -> None:
    little = Protocol.rotated_binomial(clients=10, dim=4, clip_norm=1.0, levels=4, trials=5)
    kind, adjacency = kind_of(RoundEvent(little, survivors=10), 10), Adjacency.REPLACE_ONE
    part, participation = charging._part(frozenset([kind]), 3, DELTA, 0.1, adjacency)
    assert part == joint_cost(kind.run(adjacency, rounds=3), charging._JOINT_SHARE * DELTA)
    assert participation == Participation.every()
