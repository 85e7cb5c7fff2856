"""Examples that silos draw in secret: exact laws of small federations, against what is claimed."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import binom

from cpsgd import Protocol, Run, guarantee
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.planner.examples import plan_examples, sum_norm
from cpsgd.privacy.one_example import example_norm, example_protocol, most_drawn, overflow
from cpsgd.promise import Conditions
from tests import known_values as known

RATE, OWN = 0.3, 3
PROTOCOL = Protocol.binomial(clients=3, dim=1, clip_norm=sum_norm(1.0, OWN), levels=65, trials=1600)
DELTA = 1e-3
Law = NDArray[np.float64]


def run(rounds: int, colluding: int, rate: float = RATE, surviving: int = 3) -> Run:
    return Run.of(
        PROTOCOL,
        rounds=rounds,
        participation=Participation.poisson(rate),
        adjacency="zero-out",
        surviving=surviving,
        colluding=colluding,
        examples=OWN,
    )


def sum_of(silo: list[float], protected: bool) -> list[tuple[float, float]]:
    """All sums of a silo's examples with their probabilities; without its first example, if that is never drawn."""
    found = []
    for draw in itertools.product((0, 1), repeat=len(silo)):
        chance = math.prod(RATE if taken else 1.0 - RATE for taken in draw)
        counted = (draw[0] and protected, *draw[1:])
        found.append((sum(x * taken for x, taken in zip(silo, counted, strict=True)), chance))
    return found


def released(silos: list[list[float]], protected: bool) -> Law:
    """The law of the sum of the honest silos' messages, all draws of all silos enumerated."""
    mechanism = PROTOCOL.mechanism
    half, scale = mechanism.coordinate_range, mechanism.scale
    noise = binom.pmf(np.arange(1601), 1600, 0.5)
    total = np.ones(1)
    for place, silo in enumerate(silos):
        law = np.zeros(65 + 1600)
        for value, chance in sum_of(silo, protected or place > 0):
            level = (value + half) / scale
            low = math.floor(level)
            law[low : low + 1601] += chance * (1.0 - level + low) * noise
            law[low + 1 : low + 1602] += chance * (level - low) * noise
        total = np.convolve(total, law)
    return total


def delta_at(epsilon: float, first: Law, second: Law) -> float:
    return float(np.maximum(first - math.exp(epsilon) * second, 0.0).sum())


def worst_delta(epsilon: float, honest: int, rounds: int) -> float:
    """The largest exact δ over data sets whose gradients are ±1, and both orders."""
    found = []
    for own in itertools.product((1.0, -1.0), repeat=OWN):
        others = [[side] * OWN for side in (1.0,) * (honest - 1)]
        laws = [released([list(own), *others], protected) for protected in (True, False)]
        pair = [law if rounds == 1 else np.outer(law, law).ravel() for law in laws]
        found += [delta_at(epsilon, *pair), delta_at(epsilon, *pair[::-1])]
    return max(found)


@pytest.mark.parametrize(("rounds", "colluding"), [(1, 2), (1, 1), (2, 2)])
def test_no_exact_law_has_a_larger_delta_than_is_claimed(rounds: int, colluding: int) -> None:
    """Colluders and the server know all but the honest silos' draws and noise."""
    claimed = guarantee(run(rounds, colluding), DELTA).epsilon
    assert worst_delta(claimed, 3 - colluding, rounds) <= DELTA
    # The claim is no looser than certificates without sampling are: what it costs is not a multiple of what is true.
    assert worst_delta(0.6 * claimed, 3 - colluding, rounds) > DELTA


def test_a_rate_that_is_too_small_by_a_third_would_be_found_out() -> None:
    assert worst_delta(guarantee(run(1, 2, rate=0.2), DELTA).epsilon, 1, 1) > DELTA


def test_an_example_costs_less_than_without_sampling() -> None:
    every = Run.of(PROTOCOL, rounds=2, adjacency="zero-out", colluding=1, examples=OWN)
    assert guarantee(run(2, 1), DELTA).epsilon < 0.7 * guarantee(every, DELTA).epsilon


def test_colluding_silos_know_nothing_of_another_ones_draws() -> None:
    assert guarantee(run(2, 1), DELTA).epsilon == guarantee(run(2, 0, surviving=2), DELTA).epsilon


def test_nobody_is_protected_where_all_collude() -> None:
    with pytest.raises(ConditionError, match="No honest client"):
        guarantee(run(1, 3), DELTA)


# ---------------------------------------------------------------------- how many are drawn


@pytest.mark.parametrize("rate", [1e-6, 1e-3, 0.02, 0.3, 0.5, 0.9, 0.999])
@pytest.mark.parametrize("examples", [1, 2, 30, 100, 5000, 10**6, 2**32 - 1])
def test_more_are_drawn_with_a_probability_of_two_to_the_minus_hundred(examples: int, rate: float) -> None:
    participation = Participation.poisson(rate)
    most, lost = most_drawn(examples, participation), overflow(examples, participation)
    assert examples * rate <= most <= examples
    if most == examples:
        assert lost == 0.0
    else:
        assert lost == 2.0**-100
        # That E or more are drawn: E - 1 others leave room for the one example in question.
        assert binom.logsf(most - 1, examples, rate) <= math.log(lost)
        assert binom.logsf(most - 0.9 * (most - examples * rate) - 1, examples, rate) > math.log(lost)


def test_all_may_be_in_a_sum_without_sampling() -> None:
    assert [most_drawn(9, each) for each in (Participation.every(), Participation.poisson(1.0))] == [9, 9]
    assert overflow(9, Participation.once()) == 0.0


def test_drawing_too_many_is_paid_for() -> None:
    protocol = Protocol.binomial(clients=3, dim=1, clip_norm=sum_norm(1.0, 58), levels=1025, trials=10**6)
    terms = {"participation": "poisson:0.1", "adjacency": "zero-out", "examples": 100}
    found = guarantee(Run.of(protocol, rounds=4, **terms), 1e-6)
    assert found.tail >= 4 * 2.0**-100
    with pytest.raises(ConditionError, match="draws too many examples"):
        guarantee(Run.of(protocol, rounds=4, **terms), 2.0**-99)


# ---------------------------------------------------------------------- plans, promises, the ledger


@pytest.mark.parametrize(
    ("epsilon", "rounds", "rate", "others"),
    [
        (4.0, 90, 0.02, {"bits": 16}),
        pytest.param(1.0, 300, 0.05, {"bits": 14}, marks=pytest.mark.thorough),
        pytest.param(8.0, 20, 0.3, {"mechanism": "binomial"}, marks=pytest.mark.thorough),
    ],
)
def test_a_plan_spends_what_was_asked_for(epsilon: float, rounds: int, rate: float, others: dict[str, object]) -> None:
    terms = {"rounds": rounds, "adjacency": "zero-out", "dropout": 0.1, "colluding": 1, "secure": True, **others}
    plan = plan_examples(10, 500, epsilon, 1e-6, examples=5000, participation=f"poisson:{rate}", **terms)
    assert 0.98 * epsilon <= plan.guarantee.epsilon <= epsilon
    assert plan.examples == 5000
    assert plan.protocol.clip_norm == sum_norm(1.0, most_drawn(5000, Participation.poisson(rate)))
    promise = plan.protocol.promise
    assert promise is not None
    assert promise.conditions.participation.rate == rate
    assert Protocol.from_json(plan.protocol.to_json()) == plan.protocol
    # At equal ε the mean of what is drawn has less noise than that of as many examples in one round each.
    once = plan_examples(10, 500, epsilon, 1e-6, examples=round(5000 * rate), participation="every", **terms)
    assert plan.error.total < once.error.total


@pytest.mark.parametrize(
    ("changes", "remedy"),
    [
        ({"adjacency": "replace-one"}, "adjacency='zero-out'"),
        ({"participation": "fixed-size:0.1", "adjacency": "replace-one"}, "'poisson:RATE'"),
        ({"correlated": 4}, "leave correlated out"),
        ({"delta": 0.0}, "use a larger δ"),
    ],
)
def test_what_is_not_proved_is_refused_with_a_remedy(changes: dict[str, object], remedy: str) -> None:
    asked = {"participation": "poisson:0.1", "adjacency": "zero-out", "delta": 1e-6, "rounds": 8, **changes}
    with pytest.raises((ParameterError, InfeasibleError), match=remedy):
        plan_examples(10, 100, 1.0, examples=1000, **asked)


def test_conditions_of_examples_that_are_drawn() -> None:
    terms = Conditions.of([9, 10], participation="poisson:0.1", adjacency="zero-out", colluding=2, examples=50)
    assert terms.of_one_example == replace(terms, sizes=((7, 1), (8, 1)), colluding=0, examples=None)


def test_the_ledger_charges_what_the_guarantee_says(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.create(Budget(population="p", epsilon=9.0, delta=DELTA, adjacency="zero-out", unit="example"))
    for round in (1, 2):
        event = RoundEvent(PROTOCOL, 3, f"poisson:{RATE}", colluding=1, round=round, run="r", examples=OWN)
        assert RoundEvent.from_dict(event.to_dict()) == event
        entry = ledger.reserve("p", event)
        assert entry.spent == pytest.approx(guarantee(run(round, 1), DELTA).epsilon, rel=1e-9)
    with pytest.raises(ParameterError, match="'poisson:RATE'"):
        replace(event, participation="fixed-size:0.5")


def test_known_protocols_of_one_example() -> None:
    def binomial(examples: int, levels: int, coordinate_range: float | None = None) -> Protocol:
        norm = sum_norm(1.0, examples)
        return Protocol.binomial(
            clients=3, dim=16, clip_norm=norm, levels=levels, trials=1600, coordinate_range=coordinate_range
        )

    def accepted(given: Protocol, examples: int) -> bool:
        try:
            example_protocol(given, examples)
        except ParameterError:
            return False
        return True

    values: dict[str, object] = {}
    for examples in (1, 7, 5000):
        found = example_protocol(binomial(examples, 2**20), examples)
        exact = example_protocol(Protocol.gaussian(clients=3, dim=16, clip_norm=2.0, sigma=1.0), examples)
        coarse = example_protocol(binomial(examples, 33), examples)
        widest = [coarse.clip_norm, *(found.reach(adjacency) for adjacency in Adjacency)]
        values[f"norms {examples}"] = [found.clip_norm, exact.clip_norm, *widest]
        assert found.largest_norm == math.inf
        # The smallest range of coordinates, and the fewest levels, that are enough.
        low, high = 1e-3, 10.0
        for _ in range(45):
            middle = 0.5 * (low + high)
            low, high = (low, middle) if accepted(binomial(examples, 2**20, middle), examples) else (middle, high)
        values[f"range {examples}"] = high
        fewest, most = 2, 2**24
        while most - fewest > 1:
            middle_levels = (fewest + most) // 2
            enough = accepted(binomial(examples, middle_levels, 100.0), examples)
            fewest, most = (fewest, middle_levels) if enough else (middle_levels, most)
        values[f"levels {examples}"] = most
    values["norm"] = [example_norm(3.0, examples) for examples in (1, 100)]
    values["drawn"] = [
        most_drawn(count, Participation.poisson(rate)) for count in (1, 2, 30, 5000) for rate in (1e-6, 0.02, 0.9)
    ]
    known.check("privacy/one_example", values, rel=1e-10)


def test_one_example_states_nothing_of_whole_sums() -> None:
    stated = replace(
        PROTOCOL, replace_one_distance=3.1, replace_one_l1_distance=4.0, distance_reason="halves of one-hot rows"
    )
    found = example_protocol(stated, OWN)
    assert (found.replace_one_distance, found.replace_one_l1_distance, found.distance_reason) == (None, None, None)
    assert found == example_protocol(PROTOCOL, OWN)
