"""What proofs share: which rounds count, what samplers cost, and from a claim to a scale."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ConditionError
from cpsgd.mechanisms.rounded_gaussian import RoundedGaussian
from cpsgd.neighbours import Participation
from cpsgd.privacy import proofs
from cpsgd.privacy.accountant import Rounds, composed_delta
from cpsgd.privacy.proofs import argument as base
from cpsgd.privacy.proofs import joint_cost, round_cost, supporting
from cpsgd.promise import Claim
from cpsgd.protocol import Protocol
from cpsgd.run import Run
from tests import known_values as known

ROUNDED = Protocol(
    clients=60,
    dim=8,
    clip_norm=1.0,
    mechanism=RoundedGaussian(noise_deviation=2.2, window=60, step=0.4, coordinate_range=0.7),
)
LASTING = replace(
    ROUNDED,
    mechanism=CorrelatedGaussian(
        noise_deviation=8.0, window=200, step=0.4, coordinate_range=0.7, bands=3, run_length=12
    ),
)


@pytest.mark.parametrize(
    ("protocol", "rounds", "participation", "alone"),
    [
        (ROUNDED, 1, "every", True),
        (ROUNDED, 2, "every", False),
        (ROUNDED, 2, "once", True),
        (ROUNDED, 1, "poisson:0.5", False),
        (ROUNDED, 2, "poisson:0.5", False),
        (LASTING, 12, "once", True),
    ],
)
def test_one_proof_covers_one_round_or_one_law(
    protocol: Protocol, rounds: int, participation: str, alone: bool
) -> None:
    adjacency = "zero-out" if "poisson" in participation else "replace-one"
    run = Run.of(protocol, rounds=rounds, participation=participation, adjacency=adjacency)
    assert base.alone(run) == alone
    assert base.counted(run) == (1 if alone else rounds)


def test_every_honest_draw_of_a_sampler_counts() -> None:
    each = 8 * ROUNDED.mechanism.noise.variation
    assert each > 0.0
    sizes: dict[str, Any] = {"surviving": [50, 55, 55], "colluding": 3}
    assert base.moved(Run.of(ROUNDED, **sizes)) / each == pytest.approx(47 + 2 * 52, rel=1e-12)
    # A client is in one of the rounds only: in the one with the most draws, at worst.
    once = Run.of(ROUNDED, participation="once", **sizes)
    assert base.moved(once) / each == pytest.approx(52, rel=1e-12)


@dataclass(frozen=True)
class Checked:
    """A memory that notes what it is asked."""

    asked: list[tuple[Any, ...]]

    def check_run(self, *given: Any) -> None:
        self.asked.append(("run", *given))

    def check_messages(self, *given: Any) -> None:
        self.asked.append(("messages", *given))

    def check_honest(self, *given: Any) -> None:
        self.asked.append(("honest", *given))


def test_every_size_of_a_round_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, ...]] = []
    monkeypatch.setattr(RoundedGaussian, "memory", Checked(asked))
    base.check(Run.of(ROUNDED, surviving=[50, 55], colluding=3))
    assert asked == [
        ("run", 2, Participation.every()),
        *(("messages", 50, 60), ("honest", 47, 3, 60)),
        *(("messages", 55, 60), ("honest", 52, 3, 60)),
    ]
    base.check(Run.of(ROUNDED, surviving=4, colluding=3))
    with pytest.raises(ConditionError, match="No honest"):
        base.check(Run.of(ROUNDED, surviving=3, colluding=3))


@pytest.mark.parametrize("share", base._SAMPLER_SHARES)
def test_a_sampler_may_cost_a_share_of_delta(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run, epsilon = Run.of(ROUNDED), 1.0

    def found(moved: float) -> tuple[float, float]:
        monkeypatch.setattr(base, "moved", lambda run: moved)
        return base.with_sampler(run, 1e-6, lambda delta: (epsilon + 1e-6 - delta, 0.25 * delta))

    most = share * 1e-6 / (1.0 + math.e) / (1.0 + 1e-12)
    kept, spent = found(0.999 * most)
    assert kept == pytest.approx(1.0 + share * 1e-6, rel=1e-12)
    assert spent == pytest.approx(0.25e-6 * (1.0 - share) + 0.999 * share * 1e-6, rel=1e-5)
    if share == base._SAMPLER_SHARES[-1]:
        with pytest.raises(ConditionError, match="resolution would cost"):
            found(1.001 * most)
        # Twice that at ε = 0 is too much, whatever ε is.
        with pytest.raises(ConditionError, match="at ε=0"):
            found(0.5001e-7)
    else:
        assert found(1.001 * most)[0] > kept


@pytest.mark.parametrize(("epsilon", "rounds", "proved"), [(500.0, 2, True), (500.1, 2, False), (500.1, 1, True)])
def test_epsilon_of_several_rounds_ends_at_the_largest(epsilon: float, rounds: int, proved: bool) -> None:
    gaussian = Run.of(Protocol.gaussian(clients=6, dim=8, clip_norm=1.0, sigma=1.0), rounds=rounds)
    if proved:
        assert base.with_sampler(gaussian, 1e-6, lambda delta: (epsilon, 0.0)) == (epsilon, 0.0)
    else:
        with pytest.raises(ConditionError, match="would be over 500"):
            base.with_sampler(gaussian, 1e-6, lambda delta: (epsilon, 0.0))


def test_a_planned_samplers_resolution() -> None:
    run = Run.of(ROUNDED, rounds=4, surviving=50, colluding=3)
    each = base.planned_variation(run.conditions, 8, Claim(2.0, 1e-6))
    assert 4 * 47 * 8 * each * (1.0 + math.exp(2.0)) == pytest.approx(0.05e-6, rel=1e-12)


def test_known_mu_of_claims() -> None:
    claim, values = Claim(1.1, 1e-5), dict[str, object]()
    for name in ("every", "once", "fixed-size:0.1", "poisson:0.1"):
        adjacency = "zero-out" if "poisson" in name else "replace-one"
        run = Run.of(ROUNDED, rounds=6, participation=name, adjacency=adjacency)
        values[name] = [base.gaussian_mu(run, claim), base.ideal_scale(run, claim), base.distance(run)]
        if run.sampling.rate < 1.0:
            values[f"{name} tails"] = mu = base.sampled_mu(run, claim)
            spent = composed_delta([Rounds(mu, 6)], epsilon=1.1, participation=run.sampling, interval=1e-3)
            assert 0.98 * claim.delta < spent <= 0.99 * claim.delta
    values["scale"] = [base.scale_for(Run.of(ROUNDED), allowed) for allowed in (0.1, 3.0, 3.9)]
    known.check("privacy/proofs/argument", values, rel=1e-8)


def test_where_clipping_alone_keeps_neighbours_near_any_scale_will_do() -> None:
    run = Run.of(ROUNDED)
    diagonal = math.sqrt(8) * ROUNDED.reach(run.adjacency)
    assert base.scale_for(run, diagonal) == 0.0
    assert base.scale_for(run, 0.999 * diagonal) > 0.0


def test_colluders_are_told_apart_in_pieces() -> None:
    run = Run.of(ROUNDED, rounds=3, participation="fixed-size:0.1", colluding=20)
    proof = supporting(run)[0]
    assert proof.effort == 0
    for effort, pieces in ((0, 8), (2, 3)):
        other = replace(proof, effort=effort)  # type: ignore[type-var]
        found = base.seen_cost(run, other, 0.0, run.sampling)
        assert len(found.seen) == pieces
        mus, rates = np.array(found.seen).T
        # The most colluders are beside the least noise, and beside the smallest rate.
        assert found.mu == mus[-1] == max(mus)
        assert rates[0] == max(rates)
        assert np.all(np.diff(mus) > 0.0)
        assert np.all(np.diff(rates) < 0.0)
        known.check("privacy/proofs/argument", {f"pieces {pieces}": [*mus, *rates]})
    few = Run.of(ROUNDED, rounds=3, participation="fixed-size:0.1", colluding=1)
    assert len(base.seen_cost(few, proof, 0.0, few.sampling).seen) == 2


def test_rounds_together_want_a_tail() -> None:
    run = Run.of(Protocol.binomial(clients=60, dim=8, clip_norm=1.0, levels=9, trials=700), rounds=2)
    for cost in (joint_cost, round_cost):
        with pytest.raises(ConditionError, match="at δ = 0"):
            cost(run, 0.0)


def test_where_no_share_of_delta_is_enough_the_last_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(ROUNDED, rounds=4)
    reasons = iter(["the first", "the second"])

    def seen_cost(*_: Any) -> Rounds:
        raise ConditionError(next(reasons))

    monkeypatch.setattr(base, "seen_cost", seen_cost)
    with pytest.raises(ConditionError, match="the second"):
        base.composed(run, 1e-6, supporting(run)[0], [0.01, 0.1])


@pytest.mark.parametrize("sampled", [False, True])
def test_a_sampler_may_be_why_nothing_is_proved(sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run.of(ROUNDED if sampled else Protocol.gaussian(clients=9, dim=2, clip_norm=1.0, sigma=1.0), rounds=4)
    assert (run.protocol.mechanism.noise.variation > 0.0) == sampled
    monkeypatch.setattr(base, "seen_cost", lambda *_: Rounds(100.0))
    with pytest.raises(ConditionError, match="over 500") as refused:
        base.composed(run, 1e-6, supporting(run)[0], [0.01])
    assert ("resolution spends δ" in str(refused.value)) == sampled


@pytest.mark.parametrize(
    ("rounds", "delta", "said"),
    [
        (1, 1e-6, "No method proves anything about this round.\n  one: too few\n  two: too short"),
        (3, 1e-6, "too few"),
        (3, 0.0, "No method proves anything about this round."),
    ],
)
def test_why_nothing_is_proved(rounds: int, delta: float, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(name: str, reason: str, comparison: bool = False) -> Any:
        def epsilon(*_: object) -> None:
            raise ConditionError(reason)

        return SimpleNamespace(label=lambda _: name, epsilon=epsilon, comparison=comparison, pure=False)

    found = [failing("one", "too few"), failing("two", "too short"), failing("paper", "not theirs", comparison=True)]
    monkeypatch.setattr(proofs, "supporting", lambda _: found)
    with pytest.raises(ConditionError) as refused:
        proofs.best(Run.of(ROUNDED, rounds=rounds), delta)
    assert str(refused.value) == said


def test_of_equal_proofs_the_quicker_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def stating(name: str, epsilon: float, comparison: bool = False) -> Any:
        proved = base.Proved(epsilon, 0.0, name)
        return SimpleNamespace(label=lambda _: name, epsilon=lambda *_: proved, comparison=comparison, pure=False)

    found = [stating("paper", 1.0, comparison=True), stating("endless", math.inf)]
    monkeypatch.setattr(proofs, "supporting", lambda _: found)
    with pytest.raises(ConditionError, match="No method"):
        proofs.best(Run.of(ROUNDED), 1e-6)
    found += [stating("quick", 2.0), stating("slow", 2.0), stating("slower", 1.5)]
    assert proofs.best(Run.of(ROUNDED), 1e-6)[1].citation == "slower"
    assert proofs.best(Run.of(ROUNDED), 1e-6)[2].keys() == {"paper", "endless", "quick", "slow", "slower"}
    del found[-1]
    assert proofs.best(Run.of(ROUNDED), 1e-6)[1].citation == "quick"
