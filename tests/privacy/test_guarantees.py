from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import ConditionError, ParameterError
from cpsgd.mechanisms import Binomial, Gaussian, binomial
from cpsgd.mechanisms.binomial import BinomialLaw
from cpsgd.neighbours import Participation
from cpsgd.paper.theorem import theorem_epsilon
from cpsgd.privacy import (
    CITATIONS,
    analytic_epsilon,
    certified_epsilon,
    guarantee,
    guarantee_over_rounds,
    guarantees,
    proofs,
    renyi_certificate,
)
from cpsgd.privacy.one_example import example_protocol
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs.certified_smooth import smoothed_epsilon
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.run import Run

from . import checks

# k, m, the best ε of the reference table, and the ε of a Gaussian of the same variance.
TABLE = [
    (2, 1, 2.397, 2.271),
    (2, 6, 0.920, 0.884),
    (2, 16, 0.543, 0.530),
    (4, 64, 0.819, 0.809),
    (8, 256, 0.956, 0.951),
    (16, 1024, 1.025, 1.022),
]


def rotated(levels: int, trials: int, clients: int = 10_000) -> Protocol:
    return Protocol.rotated_binomial(
        clients=clients, dim=65_536, clip_norm=1.0, levels=levels, trials=trials, delta=1e-9
    )


@pytest.mark.parametrize(("levels", "trials", "reference", "gaussian"), TABLE)
def test_table(levels: int, trials: int, reference: float, gaussian: float) -> None:
    protocol = rotated(levels, trials)
    found = guarantee(protocol, 1e-9)
    # The reference is the Gaussian or the Rényi certificate's; the smoothed one comes closer to a Gaussian.
    assert found.epsilon < reference + 5e-4
    sigma = math.sqrt(10_000 * trials) / 2
    exact = analytic_epsilon(sigma=sigma, sensitivity=checks.sensitivity(protocol), delta=1e-9)
    assert exact == pytest.approx(gaussian, abs=5e-4)
    assert exact < found.epsilon < 1.006 * exact
    assert dict(found.alternatives)["paper-theorem"] == pytest.approx(theorem_epsilon(protocol, 1e-9), rel=1e-6)


@pytest.mark.parametrize(
    ("levels", "trials", "best"), [(2, 1, "smoothed-certificate"), (16, 16_384, "gaussian-certificate")]
)
def test_names_the_method_with_the_smallest_epsilon(levels: int, trials: int, best: str) -> None:
    protocol = rotated(levels, trials)
    law, sensitivity = BinomialLaw(10_000 * trials, 0.5), checks.sensitivity(protocol)
    renyi = math.inf
    with contextlib.suppress(ConditionError):  # with much noise it takes too long
        renyi = renyi_certificate(law, delta=1e-9, sensitivity=sensitivity, dim=65_536, levels=levels).epsilon
    epsilon, certificate = certified_epsilon(law, delta=1e-9, sensitivity=sensitivity, dim=65_536, levels=levels)
    found = guarantee(protocol, 1e-9)
    assert found.method == best
    assert found.citation == CITATIONS[best]
    smoothed = smoothed_epsilon(law, delta=1e-9, sensitivity=sensitivity, dim=65_536, reach=levels - 1.0)[0]
    # With much noise the sampler's resolution takes a little of δ.
    assert found.epsilon == pytest.approx(smoothed if best == "smoothed-certificate" else epsilon, rel=1e-7)
    assert found.epsilon <= min(epsilon, renyi) * (1.0 + 1e-7)
    if best == "gaussian-certificate":
        assert found.tail == pytest.approx(certificate.tail_mass, rel=1e-9, abs=0.0)
    assert {method for method, _ in found.alternatives} == {
        "renyi-certificate",
        "smoothed-certificate",
        "gaussian-certificate",
        "paper-theorem",
    } - {best}
    if best == "gaussian-certificate":
        # Rényi is left out only where it could not win, and the reason says what it could not come below.
        reason = dict(found.alternatives)["renyi-certificate"]
        assert isinstance(reason, str)
        floor = float(reason.split()[4].rstrip(","))
        assert epsilon < floor <= renyi


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_only_honest_noise_that_arrived_counts(adjacency: str) -> None:
    planned, small = rotated(2, 4), rotated(2, 4, clients=7_000)
    small = dataclasses.replace(small, mechanism=planned.mechanism)
    found = guarantee(planned, 1e-9, adjacency=adjacency, surviving=8_000, colluding=1_000)
    assert found.noise_clients == 7_000
    assert found.epsilon == guarantee(small, 1e-9, adjacency=adjacency).epsilon
    assert found.epsilon > guarantee(planned, 1e-9, adjacency=adjacency).epsilon


@pytest.mark.parametrize("given", [{"surviving": 1}, {"adjacency": "zero-out"}, {"colluding": 0}])
def test_a_run_has_conditions_of_its_own(given: dict[str, Any]) -> None:
    run = Run.of(Protocol.gaussian(clients=4, dim=2, clip_norm=1.0, sigma=1.0))
    with pytest.raises(ParameterError, match=f"give {next(iter(given))} to Run.of"):
        guarantee(run, 1e-6, **given)


def test_zero_out_is_half_the_distance() -> None:
    protocol = rotated(2, 16)
    assert checks.sensitivity(protocol, "zero-out") == pytest.approx(0.5 * checks.sensitivity(protocol))
    assert guarantee(protocol, 1e-9, adjacency="zero-out").epsilon < 0.6 * guarantee(protocol, 1e-9).epsilon


def test_samplers_total_variation_is_paid_from_delta(monkeypatch: pytest.MonkeyPatch) -> None:
    protocol = rotated(2, 16)
    exact = guarantee(protocol, 1e-9)
    monkeypatch.setattr(guarantees, "_remembered", guarantees._remembered.__wrapped__)  # nothing is remembered
    monkeypatch.setattr(binomial, "total_variation", lambda trials, p: 1e-27)
    paid = guarantee(protocol, 1e-9)
    moved = 10_000 * 65_536 * 1e-27 * (1 + math.exp(paid.epsilon))
    assert paid.tail >= moved
    assert exact.epsilon < paid.epsilon < exact.epsilon * 1.0001
    # A coarser sampler needs the larger share, and one that eats all of δ leaves nothing to prove.
    monkeypatch.setattr(binomial, "total_variation", lambda trials, p: 1e-20)
    coarse = guarantee(protocol, 1e-9)
    moved = 10_000 * 65_536 * 1e-20 * (1 + math.exp(coarse.epsilon))
    assert coarse.tail >= moved
    assert guarantee(protocol, 1e-9 - moved).epsilon > paid.epsilon
    assert coarse.epsilon > paid.epsilon
    monkeypatch.setattr(binomial, "total_variation", lambda trials, p: 1e-18)
    with pytest.raises(ConditionError, match="resolution"):
        guarantee(protocol, 1e-9)


def test_a_proof_whose_epsilon_no_share_could_pay_for_is_not_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(rotated(2, 16))

    def asked(moved: float, epsilon: float, least: float = 0.0) -> list[float]:
        deltas: list[float] = []

        def prove(delta: float) -> tuple[float, float]:
            deltas.append(delta)
            return epsilon, 0.0

        monkeypatch.setattr(base, "moved", lambda run: moved)
        with contextlib.suppress(ConditionError):
            base.with_sampler(run, 1e-9, prove, least=least)
        return deltas

    assert asked(0.0, 30.0) == [1e-9]
    assert asked(1e-18, 1.0) == [1e-9 * (1 - 1e-6)]
    assert asked(4e-16, 1.0) == [1e-9 * (1 - 1e-6), 1e-9 * (1 - 0.1)]
    assert len(asked(4e-16, 30.0)) == 1
    # A share that would not pay for an ε that is surely needed is passed over.
    assert asked(4e-16, 1.0, least=0.99) == asked(1e-13, 1.0) == [1e-9 * (1 - 0.1)]
    assert asked(1e-10, 0.0) == []


@pytest.mark.parametrize("adjacency", ["replace-one", "zero-out"])
def test_gaussian_protocol(adjacency: str) -> None:
    protocol = Protocol.gaussian(clients=100, dim=10, clip_norm=3.0, sigma=4.0)
    found = guarantee(protocol, 1e-5, adjacency=adjacency, surviving=90, colluding=9)
    distance = 6.0 if adjacency == "replace-one" else 3.0
    assert found.method == "gaussian-analytic"
    assert found.epsilon == pytest.approx(analytic_epsilon(sigma=36.0, sensitivity=distance, delta=1e-5), rel=1e-12)
    classical = dict(found.alternatives)["gaussian-classical"]
    assert classical == pytest.approx(distance / 36.0 * math.sqrt(2 * math.log(1.25e5)))
    loud = guarantee(dataclasses.replace(protocol, mechanism=Gaussian(sigma=0.1)), 1e-5, adjacency=adjacency)
    reason = dict(loud.alternatives)["gaussian-classical"]
    assert isinstance(reason, str)
    assert "ε <= 1" in reason


@pytest.mark.parametrize(("levels", "trials"), [(2, 1), (3, 6)])
def test_more_noise_and_a_larger_delta_never_raise_epsilon(levels: int, trials: int) -> None:
    protocol = rotated(levels, trials, clients=4_000)
    more = [guarantee(protocol, 1e-9, surviving=clients).epsilon for clients in (2_500, 2_501, 2_600, 3_999, 4_000)]
    assert more == sorted(more, reverse=True)
    larger = [guarantee(protocol, delta).epsilon for delta in (1e-12, 1e-9, 1.01e-9, 1e-6, 1e-3)]
    assert larger == sorted(larger, reverse=True)
    fewer = [guarantee(protocol, 1e-9, colluding=clients).epsilon for clients in (0, 1, 10, 1_000)]
    assert fewer == sorted(fewer)


def test_no_noise_no_privacy() -> None:
    with pytest.raises(ConditionError, match="trials=0 adds no noise"):
        guarantee(rotated(2, 0), 1e-9)
    with pytest.raises(ConditionError, match="surviving=5, colluding=5"):
        guarantee(rotated(2, 16), 1e-9, surviving=5, colluding=5)
    with pytest.raises(ConditionError, match="surviving=0"):
        guarantee(rotated(2, 16), 1e-9, surviving=0)


def test_too_little_noise_lists_every_reason() -> None:
    with pytest.raises(ConditionError) as caught:
        guarantee(Protocol.binomial(clients=10, dim=3, clip_norm=1.0, levels=2, trials=1), 1e-5)
    for method in ("gaussian-certificate", "renyi-certificate"):
        assert f"{method}: " in str(caught.value)


def test_bad_parameters() -> None:
    with pytest.raises(ParameterError, match="adjacency"):
        guarantee(rotated(2, 16), 1e-9, adjacency="add-remove")  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match="delta"):
        guarantee(rotated(2, 16), -1e-9)
    with pytest.raises(ParameterError, match="pure differential privacy"):
        guarantee(rotated(2, 16), 0.0)
    with pytest.raises(ParameterError, match="colluding=6"):
        guarantee(rotated(2, 16), 1e-9, surviving=5, colluding=6)
    with pytest.raises(ParameterError, match="colluding"):
        guarantee(rotated(2, 16), 1e-9, colluding=-1)


def test_prints_and_serialises() -> None:
    found = guarantee(rotated(2, 16), 1e-9)
    text = str(found)
    assert text.startswith("ε = 0.5311 at δ = 1e-09, replace-one adjacency\n")
    assert "Dong, Roth and Su" in text
    assert "10,000 clients" in text
    assert "paper-theorem: 3.363" in text
    assert max(map(len, text.splitlines())) <= 100
    data = json.loads(json.dumps(found.to_dict()))
    assert data["epsilon"] == found.epsilon
    theorem = {"method": "paper-theorem", "epsilon": dict(found.alternatives)["paper-theorem"]}
    assert data["alternatives"][-1] == theorem
    assert "reason" in data["alternatives"][1]


def test_printed_epsilon_is_never_too_small() -> None:
    found = dataclasses.replace(guarantee(rotated(2, 16), 1e-9), claim=Claim(1.00000000001, 1e-9))
    assert str(found).startswith("ε = 1.001 ")


@pytest.mark.parametrize(
    "protocol",
    [
        Protocol.gaussian(clients=100, dim=50, clip_norm=3.0, sigma=4.0),
        Protocol.rotated_binomial(clients=100, dim=50, clip_norm=3.0, levels=5, trials=60, coordinate_range=2.0),
    ],
)
def test_a_stated_distance_is_used_and_named(protocol: Protocol) -> None:
    stated = dataclasses.replace(protocol, replace_one_distance=4.0, distance_reason="all are on a simplex")
    found, usual = guarantee(stated, 1e-6), guarantee(protocol, 1e-6)
    # As private as clients within a ball of two thirds of the radius, and for zero-out no more private than before.
    smaller = guarantee(dataclasses.replace(protocol, clip_norm=2.0), 1e-6)
    assert found.epsilon == pytest.approx(smaller.epsilon, rel=1e-3)
    assert smaller.epsilon <= found.epsilon < usual.epsilon
    zero_out = guarantee(stated, 1e-6, adjacency="zero-out")
    assert zero_out.epsilon == guarantee(protocol, 1e-6, adjacency="zero-out").epsilon
    assert zero_out.assumption is usual.assumption is None
    assert found.assumption == "replace-one distance 4 because all are on a simplex"
    assert "  assuming   replace-one distance 4 because all are on a simplex\n" in str(found)
    assert "assuming" not in str(usual)
    assert json.loads(json.dumps(found.to_dict()))["assumption"] == found.assumption
    rounds = guarantee_over_rounds(stated, 1e-6, rounds=5)
    assert rounds.epsilon < guarantee_over_rounds(protocol, 1e-6, rounds=5).epsilon
    assert rounds.assumption == found.assumption
    assert "assuming" in str(rounds)


def test_one_examples_share_knows_no_distance_of_whole_sums() -> None:
    protocol = Protocol.rotated_binomial(
        clients=10, dim=50, clip_norm=30.0, levels=64, trials=60, coordinate_range=20.0
    )
    stated = dataclasses.replace(protocol, replace_one_distance=40.0, distance_reason="all are on a simplex")
    assert example_protocol(stated, 10) == example_protocol(protocol, 10)


@pytest.mark.parametrize("p", [5e-324, 1e-300, 1e-100, 1.0 - 2.0**-53])
def test_coins_that_never_fall_prove_nothing_and_take_no_time(p: float) -> None:
    mechanism = Binomial(levels=16, trials=1000, p=p, coordinate_range=4.0)
    protocol = Protocol(clients=100, dim=10, clip_norm=1.0, mechanism=mechanism, rotate=True)
    with pytest.raises(ConditionError, match="No method proves anything"):
        guarantee(protocol, 1e-6)
    assert protocol.mechanism.noise.variance < 1e-10
    protocol.encode(np.zeros(10), 0)


def test_many_numbers_of_messages_are_rounded_down_a_little_and_none_is_lost() -> None:
    few = ((100, 2), (101, 5))
    assert guarantees._grouped(few) == few
    sizes = tuple((size, size % 7 + 1) for size in range(100, 1100))
    grouped = guarantees._grouped(sizes)
    assert len(grouped) <= guarantees._MOST_SIZES < len(sizes)
    assert sum(count for _, count in grouped) == sum(count for _, count in sizes)
    kept, step = [size for size, _ in grouped], 10.99 ** (1.0 / (guarantees._MOST_SIZES - 1))
    assert kept == sorted({math.floor(100.0 * step**i + 1e-4) for i in range(guarantees._MOST_SIZES)})
    for size, count in grouped:
        above = min((other for other in kept if other > size), default=math.inf)
        assert count == sum(many for each, many in sizes if size <= each < above)
    assert all(after <= step * (before + 1) for before, after in itertools.pairwise(kept))
    assert kept[0] == 100
    assert sizes[-1][0] <= step * (kept[-1] + 1)


def test_numbers_of_messages_are_rounded_where_there_are_more_than_so_many() -> None:
    most = guarantees._MOST_SIZES
    for count in (most - 1, most, most + 1):
        # All but the last are next to one another: rounded down, they become one.
        sizes = (*((100 + i, 1) for i in range(count - 1)), (10_000, 2))
        assert (guarantees._grouped(sizes) == sizes) == (count <= most)


FEW = Protocol.rotated_binomial(clients=10, dim=16, clip_norm=1.0, levels=9, trials=2000)


def test_what_is_said_of_a_guarantee() -> None:
    reason = "halves of one-hot rows"
    stated = dataclasses.replace(FEW, replace_one_distance=1.5, distance_reason=reason)
    one = guarantee(stated, 1e-6)
    assert one.assumption is not None
    assert reason in one.assumption
    examples = guarantee(Run.of(stated, rounds=2, adjacency="zero-out", examples=3), 1e-3)
    assert examples.assumption is None
    assert not any("paper-theorem" in name for name, _ in examples.alternatives)
    assert any("paper-theorem" in name for name, _ in one.alternatives)
    assert one.method not in dict(one.alternatives)
    assert one.to_dict()["rounds"] == 1
    rows = dict(dataclasses.replace(one, tail=3e-9)._rows())
    assert (rows["assuming"], rows["tails"]) == (one.assumption, "3e-09 of δ")
    assert rows["covers"] == "1 round, participation every"
    assert not {"tails", "secret"} & dict(dataclasses.replace(one, tail=0.0)._rows()).keys()
    assert "assuming" not in dict(examples._rows())
    for own, secret in ((None, Participation.poisson(0.1).secrecy), (3, guarantees._SECRET_EXAMPLES)):
        run = Run.of(FEW, rounds=2, participation="poisson:0.1", adjacency="zero-out", examples=own)
        assert dict(dataclasses.replace(one, run=run)._rows())["secret"] == secret


def test_delta_that_pays_for_examples_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(FEW, rounds=4, participation="poisson:0.1", adjacency="zero-out", examples=500)
    seen, lost = [], 4 * 2.0**-100
    kept = proofs.best

    def best(run: Run, delta: float) -> Any:
        seen.append(delta)
        proof, proved, found = kept(run, 1e-3)
        return proof, dataclasses.replace(proved, tail=lost), found

    monkeypatch.setattr(guarantees, "best", best)
    monkeypatch.setattr(guarantees, "_remembered", guarantees._remembered.__wrapped__)
    found = guarantee(run, 3.0 * lost)
    assert [each / lost for each in seen] == [pytest.approx(2.0, rel=1e-9)]
    assert found.tail == pytest.approx(2.0 * lost, rel=1e-9, abs=0.0)
    with pytest.raises(ConditionError, match="draws too many"):
        guarantee(run, lost)
    with pytest.raises(ParameterError, match="delta"):
        guarantee(run, 0.0)
