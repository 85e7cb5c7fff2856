"""Plans with noise that is correlated over rounds."""

import json
import time
from typing import Any

import numpy as np
import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.weights import Correlation
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.planner import Plan, plan
from cpsgd.planner.workloads import Workload
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.protocol import Protocol


def paper(epsilon: float = 2.0, bits: float | None = 12, **changes: Any) -> Plan:
    wanted = {"rounds": 2500, "participation": "once", "correlated": 8} | changes
    return plan(10_000, 51_370, epsilon, 1e-9, 1.0, bits=bits, **wanted)


@pytest.mark.parametrize("epsilon", [2.0, 1.0, 0.5])
@pytest.mark.parametrize("bands", [8, 32])
def test_the_papers_run_is_planned_quickly_and_near_the_best_there_is(epsilon: float, bands: int) -> None:
    begun = time.perf_counter()
    found = paper(epsilon, correlated=bands)
    assert time.perf_counter() - begun < 1.0
    protocol = found.protocol
    assert protocol.bits_per_coordinate <= 12.0
    assert found.prefix is not None
    # What real numbers for messages would gain, and what own noise and rounding leave of it.
    ideal = Correlation(bands, 2500).gain
    assert 0.9 * ideal < found.prefix.gain < 1.001 * ideal
    proved = guarantee_over_rounds(protocol, 1e-9, rounds=2500, participation="once")
    assert 0.998 * epsilon < proved.epsilon == found.guarantee.epsilon <= epsilon
    assert Protocol.from_json(protocol.to_json()) == protocol


def test_the_promise_is_about_the_whole_run() -> None:
    found = paper()
    assert found.protocol.promise is not None
    assert (found.protocol.promise.conditions.rounds, found.protocol.promise.claim.epsilon) == (2500, 2.0)
    assert found.protocol.release(10_000) is not None


def test_too_few_bits_name_the_fewest_that_will_do() -> None:
    with pytest.raises(InfeasibleError, match="bits=8 is the fewest"):
        paper(bits=6, colluding=1)
    assert paper(bits=8).bits == 8


def test_fewer_bits_are_rounded_at_random() -> None:
    found = paper(bits=5, correlated="auto")
    assert found.protocol.mechanism.name == "rounded-correlated"
    assert found.prefix is not None
    assert found.prefix.gain > 20.0
    assert found.guarantee.epsilon <= 2.0
    with pytest.raises(InfeasibleError, match="bits=8 is the fewest"):
        paper(bits=5, mechanism="correlated-gaussian")


def test_more_bits_never_do_worse() -> None:
    errors = [paper(bits=bits).prefix.squared_error for bits in (8, 8.5, 9, 10, 12, 17)]  # type: ignore[union-attr]
    assert errors == sorted(errors, reverse=True)


def test_without_bits_they_are_chosen() -> None:
    found = paper(bits=None)
    best = paper(bits=17)
    assert found.prefix is not None
    assert best.prefix is not None
    assert found.bits < 13
    assert found.prefix.squared_error < 1.11 * best.prefix.squared_error
    assert next(point.bits for point in found.frontier) == 8


def test_secure_sums_fit_the_modulus() -> None:
    found = paper(bits=18, secure=True)
    assert found.protocol.modulus is not None
    assert found.protocol.modulus <= 2**18
    assert 0.0 < found.overflow_probability <= 1e-9
    assert found.prefix is not None
    assert found.prefix.gain > 9.0


def test_colluding_clients_cost_the_slots_whose_seeds_they_hold() -> None:
    alone, colluding = paper(), paper(colluding=100)
    mechanism = colluding.protocol.mechanism
    assert isinstance(mechanism, CorrelatedGaussian)
    assert (mechanism.untrusted_holders, mechanism.exposed) == (100, 700)
    assert alone.prefix is not None
    assert colluding.prefix is not None
    assert colluding.guarantee.epsilon <= 2.0
    # 9,200 of 10,000 slots count.
    assert colluding.prefix.squared_error / alone.prefix.squared_error == pytest.approx(1 / 0.92, rel=0.01)
    with pytest.raises(InfeasibleError, match="fewer colluding"):
        paper(colluding=1250)


def test_too_few_honest_clients_name_the_most_bands() -> None:
    few: dict[str, Any] = {"rounds": 15, "participation": "once", "bits": 14}
    for correlated, nearest in ((8, "correlated=4"), (5, "correlated=4")):
        with pytest.raises(InfeasibleError, match=f"nobody's is left. The nearest that can be had: {nearest};"):
            plan(10, 50, 8.0, 1e-5, colluding=2, correlated=correlated, **few)
    assert plan(10, 50, 8.0, 1e-5, colluding=2, correlated=4, **few).prefix is not None
    with pytest.raises(InfeasibleError, match="independent noise, without correlated"):
        plan(2, 50, 8.0, 1e-5, colluding=1, correlated=2, **few)


def test_in_every_round_it_does_not_pay_and_says_so() -> None:
    found = plan(100, 50, 8.0, 1e-6, bits=12, rounds=20, participation="every", correlated=4)
    assert found.prefix is not None
    assert found.prefix.gain < 1.0
    assert found.guarantee.epsilon <= 8.0
    chosen = plan(100, 50, 8.0, 1e-6, bits=12, rounds=20, participation="every", correlated="auto")
    assert chosen.prefix is None
    assert not chosen.protocol.mechanism.memory.one_event
    assert f"{1 / found.prefix.gain:.3g} × more, so that correlated noise does not pay" in str(found.prefix)
    assert chosen.considered[-1].mechanism == "correlated-gaussian"
    assert "no less noise in the model" in str(chosen.considered[-1].reason)


def test_bands_are_chosen_for_the_workload_and_the_bits() -> None:
    few, many = paper(bits=8, correlated="auto"), paper(bits=14, correlated="auto")
    chosen = [p.protocol.mechanism.memory.bands for p in (few, many)]
    assert chosen[0] < chosen[1]
    assert few.prefix is not None
    # With few bits a client's own noise is most of it, and more bands gain nothing.
    assert paper(bits=8, correlated=128).prefix.squared_error > few.prefix.squared_error  # type: ignore[union-attr]
    # A model that forgets at once has no use for noise that cancels.
    forgets = np.eye(1, 2500)[0]
    assert paper(correlated="auto", workload=forgets).prefix is None


def test_a_workload_is_the_models_own_arithmetic() -> None:
    """Against a model of one number, trained by momentum with a falling rate from unit noise in one round each."""
    rounds, bands = 12, 4
    factors = Correlation(bands, rounds).factors
    workload = Workload.of("momentum-linear", rounds)
    moved = np.zeros((rounds, rounds))  # the model after a round, by the round whose z is one
    for source in range(rounds):
        model = velocity = 0.0
        for t in range(rounds):
            noise = factors[t - source] if 0 <= t - source < bands else 0.0
            velocity = 0.9 * velocity + noise
            model += (1.0 - t / rounds) * velocity
            moved[t, source] = model
    assert workload.variance(factors) == pytest.approx(float(np.mean(np.sum(moved**2, axis=1))))
    plain = Workload.of(None, 40)
    assert plain.variance(Correlation(8, 40).factors) == pytest.approx(np.mean(Correlation(8, 40).prefix_variance()))
    assert plain.bias() == pytest.approx(np.mean(np.arange(1, 41.0) ** 2))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"correlated": 1}, "correlated=1. Leave it out for independent noise"),
        ({"correlated": 0}, "correlated=0. Leave it out"),
        ({"correlated": "1"}, "correlated=1. Leave it out"),
        ({"correlated": 257}, "correlated=257. Use fewer bands"),
        ({"correlated": "many"}, "auto"),
        ({"correlated": "9" * 5000}, "auto"),  # more digits than Python makes a number of
        ({"correlated": "auto", "rounds": 2**20 + 1}, "at most 1048576"),
        ({"rounds": 10**9}, "at most 1048576"),  # at once: not after as many steps
        ({"correlated": 8, "rounds": 4}, "at most rounds=4"),
        ({"participation": "fixed-size:0.01"}, "not proved"),
        # Rather than that its neighbours are the wrong ones, which would not be the last word.
        ({"participation": "poisson:0.01"}, "not proved"),
        ({"bits": None, "max_error": 0.1}, "max_error"),
        ({"mechanism": "binomial"}, "independent noise"),
        ({"workload": "adam"}, "momentum-late"),
        ({"workload": [1.0, 2.0]}, "one for each round"),
        ({"correlated": None, "workload": "sgd"}, "give correlated"),
    ],
)
def test_bad_requirements_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        paper(**changes)


def test_a_plan_can_be_shown() -> None:
    found = paper()
    assert json.loads(json.dumps(found.to_dict()))["prefix"]["gain"] > 10.0
    assert "over the run" in found._repr_html_()
    assert "11.7 × less" in str(found.prefix)
    points = found.to_dict()["frontier"]
    gains = [point["prefix"]["gain"] for point in points]
    assert gains == sorted(gains)
    assert dict(zip([point["bits"] for point in points], gains, strict=True))[12] == found.to_dict()["prefix"]["gain"]
    assert paper(correlated="8").protocol == found.protocol
