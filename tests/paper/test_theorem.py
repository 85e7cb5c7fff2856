from __future__ import annotations

import dataclasses
import math
from functools import partial

import pytest

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import Binomial
from cpsgd.paper.theorem import (
    Constants,
    Sensitivities,
    binomial_mechanism_epsilon,
    binomial_mechanism_trials,
    quantization_sensitivities,
    theorem_epsilon,
)
from cpsgd.protocol import Protocol

ONE = Sensitivities(l1=1.0, l2=1.0, linf=1.0)
epsilon_of = partial(binomial_mechanism_epsilon, p=0.5, dim=1, delta=1e-6, sensitivities=ONE)
trials_of = partial(binomial_mechanism_trials, epsilon=1.0, p=0.5, dim=1, delta=1e-6, sensitivities=ONE)

# k, m and ε at n = 10^4, d = 65,536, δ = 1e-9 with the paper's range for that δ.
TABLE = [(2, 1, 14.8989), (2, 6, 5.6163), (2, 16, 3.3629), (4, 64, 3.2117), (8, 256, 2.8048), (16, 1024, 2.4231)]


def rotated(levels: int, trials: int) -> Protocol:
    return Protocol.rotated_binomial(
        clients=10_000, dim=65_536, clip_norm=1.0, levels=levels, trials=trials, delta=1e-9
    )


def changed(protocol: Protocol, **fields: object) -> Protocol:
    """The protocol, with fields of its mechanism replaced."""
    assert isinstance(protocol.mechanism, Binomial)
    return dataclasses.replace(protocol, mechanism=dataclasses.replace(protocol.mechanism, **fields))


def test_reference_value() -> None:
    assert epsilon_of(noise_trials=2000) == pytest.approx(0.6375134, abs=5e-8)


@pytest.mark.parametrize(("p", "smallest"), [(0.5, 1483), (0.25, 1978), (0.75, 1978)])
def test_smallest_noise(p: float, smallest: int) -> None:
    assert trials_of(p=p) == smallest
    assert epsilon_of(noise_trials=smallest, p=p) <= 1.0
    with pytest.raises(ConditionError):  # in this setting the condition decides, not ε
        epsilon_of(noise_trials=smallest - 1, p=p)


def test_smallest_noise_where_epsilon_decides() -> None:
    far = {"p": 0.4, "dim": 7, "sensitivities": Sensitivities(l1=5.0, l2=3.0, linf=2.0)}
    smallest = trials_of(epsilon=0.2, **far)
    assert epsilon_of(noise_trials=smallest, **far) <= 0.2 < epsilon_of(noise_trials=smallest - 1, **far)


@pytest.mark.parametrize("p", [5e-324, 1e-300, 1e-100, 1e-30, 1.0 - 2.0**-53])
def test_a_p_next_to_nothing_is_refused_at_once(p: float) -> None:
    with pytest.raises(ConditionError, match="Choose a p nearer"):
        epsilon_of(noise_trials=2000, p=p)


def test_no_number_of_trials_makes_up_for_a_p_of_nothing() -> None:
    with pytest.raises(ConditionError, match="choose a larger ε"):
        trials_of(p=5e-324)


def test_constants() -> None:
    half = Constants.of(0.5)
    assert (half.b, half.c, half.d) == pytest.approx((1 / 3, 7 * math.sqrt(2) / 4, 2 / 3))
    skewed = Constants.of(0.25)
    assert (skewed.b, skewed.c, skewed.d) == pytest.approx(
        (2 * 0.625 / 3 + 0.5, math.sqrt(2) * (3 * 0.4375 + 2 * 0.625), 4 * 0.625 / 3)
    )
    assert Constants.of(0.75) == skewed


@pytest.mark.parametrize(("levels", "trials", "epsilon"), TABLE)
def test_table_of_the_rotated_protocol(levels: int, trials: int, epsilon: float) -> None:
    assert theorem_epsilon(rotated(levels, trials), 1e-9) == pytest.approx(epsilon, abs=6e-5)


def test_sensitivities_are_the_main_text_s() -> None:
    # Equation for Δ₁, Δ₂, Δ∞ as the main text prints it, with q = X/(k - 1).
    dim, clip, reach, levels, delta = 300, 1.5, 0.25, 5, 1e-7
    q, log = reach / (levels - 1), math.log(2 / delta)
    root = math.sqrt(2 * math.sqrt(dim) * clip * log / q)
    l1 = math.sqrt(dim) * clip / q + root + 4 / 3 * log
    l2 = clip / q + math.sqrt(l1 + root)
    found = quantization_sensitivities(dim=dim, clip_norm=clip, coordinate_range=reach, levels=levels, delta=delta)
    assert (found.l1, found.l2, found.linf) == pytest.approx((l1, l2, levels + 1), rel=1e-12)


def test_condition_names_the_smallest_number_of_trials() -> None:
    with pytest.raises(ConditionError, match=r"23 log\(10 d/δ\).*N=1483 would do") as caught:
        epsilon_of(noise_trials=100)
    assert "N=100" in str(caught.value)
    with pytest.raises(ConditionError):
        epsilon_of(noise_trials=1482)
    epsilon_of(noise_trials=1483)


def test_condition_on_the_largest_coordinate() -> None:
    with pytest.raises(ConditionError, match=r"N=800[01] would do"):
        epsilon_of(noise_trials=7999, sensitivities=dataclasses.replace(ONE, linf=1000.0))


def test_scale_is_a_unit() -> None:
    at = partial(epsilon_of, noise_trials=50_000, p=0.3, dim=10)
    small = Sensitivities(l1=0.3, l2=0.2, linf=0.1)
    unit = Sensitivities(l1=3.0, l2=2.0, linf=1.0)
    assert at(sensitivities=small, scale=0.1) == pytest.approx(at(sensitivities=unit), rel=1e-12)


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_without_rotation_two_shares(adjacency: str) -> None:
    protocol = Protocol.binomial(clients=10_000, dim=100, clip_norm=1.0, levels=4, trials=16)
    half = {"dim": 100, "delta": 0.5e-9}
    norms = quantization_sensitivities(clip_norm=1.0, coordinate_range=1.0, levels=4, adjacency=adjacency, **half)
    expected = epsilon_of(noise_trials=160_000, sensitivities=norms, **half)
    assert theorem_epsilon(protocol, 1e-9, adjacency=adjacency) == expected


def test_zero_out_is_cheaper() -> None:
    protocol = rotated(4, 16)
    assert theorem_epsilon(protocol, 1e-9, adjacency="zero-out") < 0.7 * theorem_epsilon(protocol, 1e-9)


def test_rotated_demands_the_papers_range() -> None:
    paper = rotated(4, 16)
    assert isinstance(paper.mechanism, Binomial)
    reach = paper.mechanism.coordinate_range
    theorem_epsilon(paper, 1e-9)
    theorem_epsilon(changed(paper, coordinate_range=2 * reach), 1e-9)
    with pytest.raises(ConditionError, match=f"{reach:.6g}"):
        theorem_epsilon(changed(paper, coordinate_range=0.99 * reach), 1e-9)
    # Without rotation any range will do: coordinates are clipped to it.
    theorem_epsilon(dataclasses.replace(changed(paper, coordinate_range=0.01), rotate=False), 1e-9)


def test_only_noise_that_arrived_counts() -> None:
    protocol = rotated(4, 16)
    alone = changed(protocol, trials=8)
    assert theorem_epsilon(protocol, 1e-9, noise_clients=5_000) == theorem_epsilon(alone, 1e-9)


def test_no_noise_is_refused() -> None:
    with pytest.raises(ConditionError):
        theorem_epsilon(rotated(4, 0), 1e-9)


def test_gaussian_protocol_is_refused() -> None:
    with pytest.raises(ParameterError, match="not about gaussian"):
        theorem_epsilon(Protocol.gaussian(clients=10, dim=2, clip_norm=1.0, sigma=1.0), 1e-5)
