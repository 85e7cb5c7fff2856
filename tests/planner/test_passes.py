"""Passes over a population: sensitivities, schedules, the table of options and their limits."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest

from cpsgd.correlated.weights import Correlation
from cpsgd.errors import ConditionError, InfeasibleError, ParameterError
from cpsgd.neighbours import Participation
from cpsgd.planner import plan
from cpsgd.planner.passes import plan_passes, schedule
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.protocol import Protocol

SMALL: dict[str, Any] = {"rounds": 20, "workload": "sgd", "correlated": 8}


def exact_sensitivity(bands: int, rounds: int, separation: int) -> float:
    """Returns ‖C Δ‖² with the weights of √(1 - x) as floats, in rounds 0, s, 2s, ..., by solving L y = Δ."""
    weights = [1.0]
    for k in range(1, bands):
        weights.append(weights[-1] * (2 * k - 3) / (2 * k))
    found = np.zeros(rounds)
    for t in range(rounds):
        moved = 1.0 if t % separation == 0 else 0.0
        found[t] = moved - sum(weights[j] * found[t - j] for j in range(1, min(bands, t + 1)))
    return float(found @ found)


@pytest.mark.parametrize(("bands", "separation", "squared"), [(32, 250, 23.42), (32, 100, 62.84), (8, 50, 94.13)])
def test_sensitivities_of_passes_are_those_of_the_exact_weights(bands: int, separation: int, squared: float) -> None:
    exact = exact_sensitivity(bands, 2500, separation)
    assert exact == pytest.approx(squared, abs=0.01)
    # The library rounds weights towards zero, which takes a little less away and costs a little less.
    ours = Correlation(bands, 2500, separation).sensitivity ** 2
    assert 0.99 * exact < ours <= exact * (1 + 1e-9)


@pytest.mark.parametrize(("bands", "rounds", "apart"), [(3, 7, 2), (4, 9, 3), (2, 6, 4)])
def test_no_rounds_that_far_apart_cost_more_than_the_evenly_spaced(bands: int, rounds: int, apart: int) -> None:
    correlation = Correlation(bands, rounds, apart)
    steps = np.array(
        [[correlation.coefficients[t - s] if t >= s else 0.0 for s in range(rounds)] for t in range(rounds)]
    )
    found = 0.0
    for size in range(1, rounds + 1):
        for chosen in combinations(range(rounds), size):
            if all(later - earlier >= apart for earlier, later in pairwise(chosen)):
                found = max(found, float(np.linalg.norm(steps[:, list(chosen)].sum(axis=1))))
    assert found == pytest.approx(correlation.sensitivity, rel=1e-9)


def test_schedules_keep_clients_apart() -> None:
    assert schedule(25_000_000, 2500, 10) == (Participation.apart(250), 100_000)
    assert schedule(1000, 10, 1) == (Participation.once(), 100)
    assert schedule(1000, 10, 10) == (Participation.every(), 1000)
    for passes in range(1, 24):
        who, cohort = schedule(997, 23, passes)
        assert who.counted_rounds(23) <= passes
        apart = 997 // cohort
        assert who.scheme == "once" or apart >= who.separation
    with pytest.raises(ParameterError, match="passes of 10 rounds need a client"):
        schedule(5, 20, 2)


def test_independent_noise_pays_for_the_rounds_of_one_client() -> None:
    protocol = Protocol.rotated_binomial(clients=1000, dim=64, clip_norm=1.0, levels=4, trials=200)
    five = guarantee_over_rounds(protocol, 1e-6, rounds=5, participation="every").epsilon
    assert guarantee_over_rounds(protocol, 1e-6, rounds=20, participation="apart:4").epsilon == five
    # A sixth round of a client begins with the next one.
    six = guarantee_over_rounds(protocol, 1e-6, rounds=6, participation="every").epsilon
    assert guarantee_over_rounds(protocol, 1e-6, rounds=21, participation="apart:4").epsilon == six > five
    # The costliest rounds count, wherever they were.
    few = guarantee_over_rounds(protocol, 1e-6, surviving=[500] * 2 + [1000] * 3, participation="every").epsilon
    mixed = guarantee_over_rounds(protocol, 1e-6, surviving=[1000] * 18 + [500] * 2, participation="apart:4").epsilon
    assert mixed == few > five


def test_a_run_is_only_for_clients_as_far_apart_as_it_was_planned_for() -> None:
    found = plan(1000, 64, 2.0, 1e-6, bits=14, rounds=20, participation="apart:5", correlated=4)
    assert found.protocol.mechanism.memory.separation == 5
    assert found.guarantee.epsilon <= 2.0
    for fine in ("apart:5", "apart:7", "once"):
        guarantee_over_rounds(found.protocol, 1e-6, rounds=20, participation=fine)
    for near in ("apart:4", "every"):
        with pytest.raises(ConditionError, match="at least 5 rounds apart"):
            guarantee_over_rounds(found.protocol, 1e-6, rounds=20, participation=near)
    assert Protocol.from_json(found.protocol.to_json()) == found.protocol
    assert str(found.protocol.promise.conditions.participation) == "apart:5"  # type: ignore[union-attr]


def test_options_are_shown_and_the_best_within_the_limits_is_taken() -> None:
    found = plan_passes(20_000, 500, 4.0, 1e-6, **SMALL)
    assert {option.passes for option in found.options} == {1, 2, 5, 10}
    assert found.chosen.squared_error <= 1.05 * min(option.squared_error for option in found.options)
    for option in found.options:
        assert option.bytes_down >= option.passes * 4 * 500
        assert option.cohort == 20_000 * option.passes // 20
    small = plan_passes(20_000, 500, 4.0, 1e-6, **SMALL, uplink=3000, downlink=11_000)
    assert small.chosen.bytes_up <= 3000
    assert small.chosen.bytes_down <= 11_000
    assert small.chosen.squared_error > found.chosen.squared_error
    better = [o for o in found.options if o.bytes_up <= 3000 and o.bytes_down <= 11_000]
    assert small.chosen.squared_error <= 1.05 * min(o.squared_error for o in better)
    # What is shown of an option is what its plan says.
    plan_ = small.plan
    assert plan_.protocol.clients == small.chosen.cohort
    assert plan_.participation.counted_rounds(20) == small.chosen.passes
    handed = 37 + 1 + 16 * 7 + 16  # a baton of eight bands
    assert small.chosen.bytes_up == small.chosen.passes * (plan_.protocol.message_bytes + handed)
    assert set(found.to_dict()["passes"]) == {"chosen", "options"}


def test_passes_divide_the_noise_by_their_number() -> None:
    errors = {}
    for passes in (1, 10):
        found = plan_passes(200_000, 500, 4.0, 1e-6, rounds=20, bits=10, passes=passes)
        assert {option.bands for option in found.options} == {1, 8}
        errors[passes] = next(option.squared_error for option in found.options if option.bands == 1)
    assert errors[1] / errors[10] == pytest.approx(10, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "error", "said"),
    [
        ({"uplink": 10}, InfeasibleError, "uplink="),
        ({"downlink": 10}, InfeasibleError, "downlink="),
        ({"participation": "once"}, ParameterError, "Leave out participation"),
        ({"clients": 10}, ParameterError, "Leave out clients"),
        ({"passes": 0}, ParameterError, "passes"),
        ({"passes": 21}, ParameterError, "passes"),
        ({"correlated": "many"}, ParameterError, "number of bands"),
        ({"uplink": -1}, ParameterError, "uplink"),
    ],
)
def test_bad_questions_are_refused(changes: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        plan_passes(**{"population": 20_000, "dim": 500, "epsilon": 4.0, "delta": 1e-6, **SMALL, **changes})


@pytest.mark.parametrize("text", ["apart", "apart:", "apart:0", "apart:-3", "apart:2.5", "apart:x", "every:3"])
def test_texts_that_are_no_participation_are_refused(text: str) -> None:
    with pytest.raises(ParameterError):
        Participation.parse(text)


def test_participations_are_read_as_they_were_written() -> None:
    for who in (Participation.apart(7), Participation.every(), Participation.poisson(0.25)):
        assert Participation.from_dict(who.to_dict()) == who
    assert Participation.every().to_dict() == {"scheme": "every", "rate": 1.0}
    for wrong in ({"scheme": "every", "rate": 1.0, "separation": 3}, {"scheme": "apart", "rate": 1.0}, 3, {}):
        with pytest.raises(ParameterError):
            Participation.from_dict(wrong)
