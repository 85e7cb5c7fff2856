"""Silos that draw their examples: what they agree to, count and remember."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cpsgd import Plan
from cpsgd.errors import ParameterError, RoundError, RoundRefusedError
from cpsgd.federation.limits import Limits, RoundKind
from cpsgd.federation.messages import Request
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger
from cpsgd.planner.examples import plan_examples
from cpsgd.secagg import Stage

from .correlated import correlated_plan, remembering
from .local import DIM, Client

OWN: dict[str, Any] = {"examples": 100, "adjacency": "zero-out", "secure": False}
LIMITS = {**OWN, "epsilon": 2.0, "delta": 1e-5}


@cache
def planned(rate: float = 0.1, rounds: int = 3) -> Plan:
    terms = {"rounds": rounds, "adjacency": "zero-out", "dropout": 0.25, "colluding": 1, "secure": True, "bits": 14}
    scheme = "every" if rate == 1.0 else f"poisson:{rate}"
    return plan_examples(4, DIM, 2.0, 1e-5, examples=100, participation=scheme, mechanism="binomial", **terms)


def asked(plan: Plan, round: int = 1) -> Request:
    return Request(Stage.UPLOAD, round, plan.rounds, plan.surviving, plan.protocol.to_json(), examples=100)


def test_a_silo_answers_a_plan_for_its_own_rate() -> None:
    client = Client(**LIMITS, rate=0.1)
    for round in (1, 2, 3):
        client.ask(asked(planned(), round))
    assert client.trained == 3


@pytest.mark.parametrize(("plans", "own"), [(0.1, 1.0), (1.0, 0.1), (0.1, 0.05), (0.1, 0.2)])
@pytest.mark.parametrize("limits", [OWN, LIMITS])
def test_no_round_of_another_rate_is_answered(plans: float, own: float, limits: dict[str, Any]) -> None:
    client = Client(**limits, rate=own)
    with pytest.raises(RoundRefusedError, match="drawn with probability"):
        client.ask(asked(planned(plans)))
    assert client.trained == 0


def test_a_plan_that_promises_nothing_is_judged_by_the_silos_own_rate() -> None:
    plan = planned()
    silent = replace(plan, protocol=replace(plan.protocol, promise=None))
    with pytest.raises(RoundRefusedError, match="drawn with probability 1"):
        Client(**LIMITS, rate=0.1).ask(asked(silent))
    with pytest.raises(RoundRefusedError, match=r"limit is 2\.|does not protect"):
        Client(**LIMITS).ask(asked(silent))


def test_noise_that_is_correlated_over_rounds_is_refused(small_plan: Plan, tmp_path: Path) -> None:
    plan = correlated_plan(small_plan, rounds=3, bands=2, separation=1)
    protocol = replace(plan.protocol, promise=planned().protocol.promise)
    request = Request(Stage.UPLOAD, 1, 3, plan.surviving, protocol.to_json(), examples=100)
    with pytest.raises(RoundRefusedError, match="sampling is not proved"):
        remembering(tmp_path, "a", **OWN, rate=0.1).ask(request)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rate": 0.1},
        {"rate": 0.1, "examples": 5},
        {"rate": 0.1, "examples": 5, "adjacency": "zero-out", "disjoint": True},
        {"rate": 0.0, "examples": 5, "adjacency": "zero-out"},
        {"rate": 1.5, "examples": 5, "adjacency": "zero-out"},
    ],
)
def test_limits_that_make_no_sense(wrong: dict[str, Any]) -> None:
    with pytest.raises(ParameterError):
        Limits(**wrong)


def test_the_rate_is_part_of_what_was_agreed_and_of_a_kind() -> None:
    protocol, names = planned().protocol, {"rounds": 3, "surviving": 3}
    limits = [Limits(examples=5, adjacency="zero-out", rate=rate) for rate in (1.0, 0.1, 0.2)]
    assert len({each.digest(protocol, **names) for each in limits}) == 3
    kinds = [RoundKind.of(each, protocol, 3) for each in limits]
    assert [RoundKind.from_text(kind.to_text()) for kind in kinds] == kinds
    # As it was written before there were rates.
    assert '"rate"' not in kinds[0].to_text()


def test_a_silo_that_is_restarted_draws_for_no_round_twice(tmp_path: Path) -> None:
    """A second draw for the same round, answered too, would be a round that nobody counts."""
    remembering(tmp_path, "a", **LIMITS, rate=0.1).ask(asked(planned()))
    again = remembering(tmp_path, "a", **LIMITS, rate=0.1)
    with pytest.raises(RoundError, match="already"):
        again.ask(asked(planned()))
    assert again.trained == 0

    class Crashing(Client):
        def train(self, protocol: object) -> Any:
            raise KeyboardInterrupt

    crashing = Crashing(settings={"cpsgd-memory": str(tmp_path / "b")}, **LIMITS, rate=0.1)
    with pytest.raises(KeyboardInterrupt):
        crashing.ask(asked(planned()))
    after = remembering(tmp_path, "b", **LIMITS, rate=0.1)
    with pytest.raises(RoundError, match="already"):
        after.ask(asked(planned()))
    assert after.trained == 0


def answered(client: Callable[[str], Client], plan: Plan, runs: int) -> int:
    """Rounds of runs of one round each that are answered before the limit is reached."""
    for number in range(runs):
        try:
            client(str(number)).ask(asked(plan))
        except RoundRefusedError:
            return number
    return runs


def test_all_rounds_are_counted_with_their_rate(tmp_path: Path) -> None:
    def client(run: str) -> Client:
        return Client(run=run, settings={"cpsgd-memory": str(tmp_path / "memory")}, **LIMITS, rate=0.1)

    assert answered(client, planned(), 5) == 3
    # Where plans change, a filter that knows of sampling decides; rounds of a plan for more of them cost less each.
    for run in ("a", "b"):
        other = Client(run=run, settings={"cpsgd-memory": str(tmp_path / "other")}, **LIMITS, rate=0.1)
        other.ask(asked(planned(rounds=30 if run == "a" else 40)))


def test_a_server_holds_plan_and_silos_to_the_same_number(tmp_path: Path) -> None:
    with Ledger(tmp_path / "ledger") as ledger:
        ledger.create(Budget(population="p", epsilon=2.0, delta=1e-5, adjacency="zero-out", unit="example"))
        terms = Terms(plan=planned(), examples=100, ledger=ledger, population="p")
        terms.check_ledger()
        event = terms.event(1, "run")
        assert (str(event.participation), event.examples, event.unit) == ("poisson:0.1", 100, "example")
    with pytest.raises(ParameterError, match="draw among 100 examples"):
        Terms(plan=planned(), examples=50)
    with pytest.raises(ParameterError, match="same nodes may be in every round"):
        Terms(plan=planned())
