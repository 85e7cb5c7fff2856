"""Known values of every proof's answers: ε, costs and scales of small runs of every mechanism.

Of certified_gaussian, certified_smooth, gaussian_noise, per_round, published_accounting, pure_laplace,
rounded_correlated, shaped_rounding and steps_renyi, by what they share in argument.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.coins import Coins
from cpsgd.mechanisms.discrete_gaussian import DiscreteGaussian
from cpsgd.mechanisms.discrete_laplace import DiscreteLaplace
from cpsgd.mechanisms.law import Normal, SlotsAndCoins
from cpsgd.mechanisms.rounded_gaussian import RoundedGaussian
from cpsgd.mechanisms.skellam import Skellam
from cpsgd.neighbours import Adjacency
from cpsgd.privacy.accountant import Rounds
from cpsgd.privacy.gaussian import gdp_mu
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs import published_accounting, pure_laplace, rounded_correlated, supporting
from cpsgd.privacy.proofs.argument import Proof
from cpsgd.privacy.proofs.published_accounting import accounting_of, published_epsilon
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from tests import known_values as known


def of(mechanism: Any, **more: Any) -> Protocol:
    return Protocol(**{"clients": 60, "dim": 8, "clip_norm": 1.0, "mechanism": mechanism, "rotate": False, **more})


ROUND: dict[str, Any] = {"step": 0.4, "coordinate_range": 0.7}
STATED: dict[str, Any] = {"replace_one_distance": 1.3, "distance_reason": "halves of one-hot rows"}
RUN: dict[str, Any] = {"bands": 3, "run_length": 12}
PROTOCOLS = {
    "gaussian": Protocol.gaussian(clients=60, dim=8, clip_norm=1.0, sigma=1.2),
    "rounded": of(RoundedGaussian(noise_deviation=2.2, window=60, **ROUND)),
    "coarse": of(RoundedGaussian(noise_deviation=0.8, window=20, **ROUND)),
    "stated": of(RoundedGaussian(noise_deviation=2.2, window=60, **ROUND), **STATED),
    "binomial": Protocol.binomial(clients=60, dim=8, clip_norm=1.0, levels=9, trials=700),
    "skellam": of(Skellam(levels=5, coordinate_range=1.0, variance=9.0)),
    "discrete": of(DiscreteGaussian(levels=9, coordinate_range=1.0, sigma_squared=9.0)),
    "coins": of(Coins(coins=2, theta=0.1, coordinate_range=0.4), clients=20, dim=20),
    "laplace": of(DiscreteLaplace(levels=3, coordinate_range=1.0, spread=20, shares=50, window=2**14)),
    "missing": of(DiscreteLaplace(levels=3, coordinate_range=1.0, spread=4, shares=90, window=2**12)),
    "many": of(RoundedGaussian(noise_deviation=0.8, window=20, **ROUND), clients=600),
    "pure": of(
        DiscreteLaplace(levels=3, coordinate_range=1.0, spread=20, shares=50, window=2**14),
        replace_one_l1_distance=1.5,
        **STATED,
    ),
    "correlated": of(CorrelatedGaussian(noise_deviation=8.0, window=1 << 10, **ROUND, **RUN)),
    "shaped": of(ShapedGaussian(noise_deviation=3.0, window=80, separation=1, **ROUND, **RUN)),
    "silent": of(ShapedGaussian(noise_deviation=1.0, window=64, separation=1, **ROUND, **RUN), clients=12),
    "slots": of(
        RoundedCorrelated(noise_deviation=1.8, window=16, step=0.05, coordinate_range=0.05, inherited_range=2.6, **RUN),
        clients=4000,
        dim=1000,
    ),
}
CONDITIONS: dict[str, dict[str, Any]] = {
    "one": {},
    "zero": {"adjacency": "zero-out", "surviving": 52, "colluding": 2},
    "several": {"rounds": 5},
    "sizes": {"surviving": [50, 55, 50], "colluding": 3},
    "once": {"rounds": 5, "participation": "once"},
    "fixed": {"rounds": 5, "participation": "fixed-size:0.1", "colluding": 4},
    "poisson": {"rounds": 3, "participation": "poisson:0.2", "adjacency": "zero-out"},
    "run": {"rounds": 12, "participation": "once", "colluding": 3},
    "silos": {"rounds": 12, "colluding": 3},
}
RUNS = [
    *(f"gaussian {each}" for each in ("one", "zero", "several", "sizes", "once", "fixed", "poisson")),
    *(f"rounded {each}" for each in ("one", "several", "sizes", "poisson")),
    *("coarse zero", "coarse several", "stated one", "stated zero", "binomial zero", "binomial several"),
    *("skellam sizes", "discrete one", "coins one", "coins fixed", "laplace one", "laplace sizes"),
    *("laplace fixed", "laplace poisson", "missing one", "missing zero", "correlated run", "shaped silos"),
    *("slots run", "silent silos", "many one", "pure one", "pure several"),
]
LONG = {"smoothed-certificate", "bounded-losses", "gaussian-analytic"}


def number(call: Callable[[], Any]) -> Any:
    """Returns what is computed, or NaN where nothing is proved."""
    try:
        return call()
    except ConditionError:
        return math.nan


def answers(proof: Proof, run: Run) -> Iterator[tuple[str, Any]]:
    """Yields all that a proof says of a run."""

    def epsilon() -> list[float]:
        found = proof.epsilon(run, delta)
        return [found.epsilon, found.tail]

    def cost(found: Rounds) -> list[float]:
        parts = [found.mu, found.count, found.tail_mass, found.variation, found.slack, found.pure]
        return [*parts, *itertools.chain(*found.seen)]

    few = proof.name in LONG
    for delta in (1e-3, 1e-7)[few:]:
        yield f"epsilon {delta}", number(epsilon)
    yield "cost", number(lambda: cost(proof.cost(run, 1e-9)))
    yield "joint cost", number(lambda: cost(proof.joint_cost(run, 1e-9)))
    for claim in (Claim(0.3, 1e-8), Claim(2.0, 1e-6))[few:]:
        yield (
            f"ranks {claim}",
            [proof.rough_scale(run, claim), proof.least_scale(run, claim), proof.might_keep(run, claim)],
        )
        if run.protocol.mechanism.grid:
            yield f"scale {claim}", number(partial(proof.scale, run, claim))


@pytest.mark.parametrize("name", RUNS)
def test_known_answers(name: str) -> None:
    protocol, conditions = name.split()
    run = Run.of(PROTOCOLS[protocol], **CONDITIONS[conditions])
    # Those of sums of Rényi divergences take long, and have known values of their own.
    proofs = [proof for proof in supporting(run) if proof.name != "renyi-certificate"]
    values = {f"{name} {proof.name} {key}": value for proof in proofs for key, value in answers(proof, run)}
    known.check("privacy/proofs", values, rel=1e-8)


def test_losses_of_missing_shares_are_spread_over_coordinates() -> None:
    # 7.35 units in two coordinates, up to 5.2 in each: with five in both nothing is forgotten.
    laplace = DiscreteLaplace(levels=9, coordinate_range=1.0, spread=4, shares=90, window=2**12)
    run = Run.of(of(laplace, dim=2, replace_one_distance=1.3, distance_reason="halves of one-hot rows"))
    law = pure_laplace._law(run)
    assert pure_laplace._epsilon(run) == pytest.approx(2 * law.losses(5), rel=1e-9)
    assert law.parts < law.shares


def test_a_coordinate_moves_no_farther_than_a_whole_vector() -> None:
    laplace = DiscreteLaplace(levels=9, coordinate_range=1.0, spread=4, shares=90, window=2**12)
    run = Run.of(of(laplace, dim=1, clip_norm=0.2475))
    assert (base.sensitivity(run), run.protocol.reach(run.adjacency)) == (pytest.approx(1.98), 8.0)
    assert pure_laplace._epsilon(run) == pytest.approx(pure_laplace._law(run).losses(2), rel=1e-9)


def test_pure_rounds_add_up_and_others_may_cost_less() -> None:
    run, proof = Run.of(PROTOCOLS["laplace"], rounds=5), pure_laplace.PROOFS[0]
    assert proof.rough_scale(run, Claim(5e3, 0.0)) > 0.0  # whose e^ε is too large a number
    for delta, factor in ((0.0, 1.0), (1e-6, 5.0)):
        claim = Claim(0.3, delta)
        assert proof.least_scale(run, claim) == pytest.approx(proof.rough_scale(run, claim) / factor, rel=1e-12)


def test_whoever_is_in_one_round_may_be_in_that_with_the_fewest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pure_laplace, "_epsilon", lambda run: 50.0 / run.honest)
    run = Run.of(PROTOCOLS["laplace"], surviving=[50, 55], participation="once")
    assert pure_laplace.PROOFS[0].epsilon(run, 0.0).epsilon == 1.0


def test_the_classical_lemma_allows_for_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(PROTOCOLS["rounded"])
    proof = next(each for each in supporting(run) if each.name == "gaussian-classical")
    law, sensitivity = base.law_of(run), base.sensitivity(run)
    assert isinstance(law, Normal)
    for slack, refused in ((0.5, False), (1.0, False), (1.0 + 1e-9, True)):
        monkeypatch.setattr(type(run.protocol.mechanism.noise), "slack", lambda *_, slack=slack: slack / 8)
        with pytest.raises(ConditionError, match="more than 1") if refused else contextlib.nullcontext():
            exact = sensitivity / law.deviation * math.sqrt(2.0 * math.log(1.25 / 0.5) + 2.0 * slack) + 2.0 * slack
            assert proof.epsilon(run, 0.5).epsilon == pytest.approx(exact, rel=1e-6)


def test_samplers_that_cost_too_much_of_delta_are_refused() -> None:
    run = Run.of(PROTOCOLS["slots"], **CONDITIONS["run"])
    with pytest.raises(ConditionError, match="The sampler costs too much"):
        rounded_correlated.PROOFS[0].scale(run, Claim(0.3, 1e-30))


@pytest.mark.parametrize(
    ("name", "conditions", "share"), [("rounded", "several", 0.1), ("shaped", "silos", 0.1), ("slots", "run", 0.02)]
)
def test_plans_spend_so_much_of_a_claim_on_samplers_and_rounding(name: str, conditions: str, share: float) -> None:
    run = Run.of(PROTOCOLS[name], **CONDITIONS[conditions])
    proof = next(proof for proof in supporting(run) if proof.name != "gaussian-classical")
    spent = proof.cost(run, 1e-9)

    def refused(claim: Claim) -> bool:
        try:
            proof.scale(run, claim)
        except ConditionError as reason:
            return "too far from a Gaussian" in str(reason) or "costs too much" in str(reason)
        return False

    times = base.counted(run)
    for epsilon in (1.0, 3.0):
        delta = times * spent.variation * (1.0 + math.exp(epsilon)) / share
        assert [refused(Claim(epsilon, factor * delta)) for factor in (1.0 - 1e-9, 1.0 + 1e-9)] == [True, False]
    if spent.slack:
        epsilon = times * spent.slack / 0.1
        assert [refused(Claim(factor * epsilon, 0.5)) for factor in (1.0 - 1e-9, 1.0 + 1e-9)] == [True, False]


@pytest.mark.parametrize(("needed", "refused"), [(0.7, 0.0), (1.1, 0.0), (2.5, 1.5), (1.2, 1.5), (9.0, math.inf)])
def test_the_smallest_scale_of_slots_is_found(needed: float, refused: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """μ falls as 1/s, and nothing is proved below some scale; in units of the first scale that is tried."""
    proof, run, claim = rounded_correlated.PROOFS[0], Run.of(PROTOCOLS["slots"], **CONDITIONS["run"]), Claim(1.0, 1e-3)
    first, mu, asked = proof.rough_scale(run, claim), gdp_mu(1.0, 1e-3 * 0.97 * (1.0 - 1e-9)), list[float]()

    def cost(here: Run, tail: float) -> Any:
        assert tail == pytest.approx(0.01 * 1e-3 * 0.96, rel=1e-12, abs=0.0)
        asked.append(here.protocol.mechanism.scale / first)
        if asked[-1] < refused:
            raise ConditionError("too few messages")
        return SimpleNamespace(w=(mu * needed / asked[-1]) ** 2)

    monkeypatch.setattr(rounded_correlated, "_cost", cost)
    if math.isinf(refused):
        with pytest.raises(ConditionError, match="No scale of"):
            proof.scale(run, claim)
        assert asked == pytest.approx([1.3**i for i in range(12)], rel=1e-4)
        return
    found, least = proof.scale(run, claim) / first, max(needed, refused)
    assert least <= found <= (1.002 if needed > refused else 1.3) * least
    assert asked[1] / asked[0] == pytest.approx(1.3 if refused else needed * 1.0001, rel=1e-4)
    assert len(asked) <= 5


def test_clients_that_come_back_are_not_in_the_proof_of_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(PROTOCOLS["slots"], **CONDITIONS["run"])
    with pytest.raises(ConditionError, match="without a part of δ"):
        rounded_correlated.PROOFS[0].cost(run, 0.0)
    law = base.law_of(run)
    assert isinstance(law, SlotsAndCoins)
    again = replace(law, weighting=replace(law.weighting, separation=2))
    monkeypatch.setattr(base, "law_of", lambda _: again)
    with pytest.raises(ConditionError, match="one round of the run only"):
        rounded_correlated.PROOFS[0].cost(run, 1e-6)
    found = []
    for untold in (0, 1, 4):
        monkeypatch.setattr(base, "law_of", lambda _, untold=untold: replace(law, untold=untold))
        found.append(rounded_correlated.PROOFS[0].rough_scale(run, Claim(1.0, 1e-6)))
    assert found == [found[0], found[0], pytest.approx(0.5 * found[0])]


def test_published_accounting_is_of_rounds_without_sampling(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(PROTOCOLS["skellam"], rounds=3, participation="fixed-size:0.1")
    proof = next(each for each in supporting(run) if each.comparison)
    endless = replace(proof, bound=lambda *_: math.inf)  # type: ignore[type-var]
    with pytest.raises(ConditionError, match="without sampling only"):
        proof.epsilon(run, 1e-6)
    monkeypatch.setattr(published_accounting, "accounting_of", lambda _: endless)
    with pytest.raises(ConditionError, match="no finite ε"):
        published_epsilon(Run.of(PROTOCOLS["skellam"], rounds=3), 1e-6)


@pytest.mark.parametrize("name", ["discrete", "skellam"])
def test_published_accounting_of_one_round_is_its_bound_and_two_cost_more(name: str) -> None:
    protocol = PROTOCOLS[name]
    published = accounting_of(protocol)
    assert published is not None
    one, two = (published_epsilon(Run.of(protocol, rounds=rounds), 1e-6) for rounds in (1, 2))
    assert one == published.bound(protocol, 1e-6, Adjacency.REPLACE_ONE, 60)
    assert 1.2 * one < two < 2.5 * one
