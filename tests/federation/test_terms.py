"""What a server may hold its rounds to, beside what `test_server.py` plans anew for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from cpsgd import Plan
from cpsgd.errors import ParameterError
from cpsgd.federation.one_message import PairServers
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Budget, Ledger

from .local import with_protocol, with_run
from .silos import Silos


def test_the_way_in_which_sums_are_made(small_plan: Plan, tmp_path: Path) -> None:
    roster = Silos(tmp_path).public[:4]
    servers = SimpleNamespace(task=SimpleNamespace(protocol=small_plan.protocol), rounds=3)
    for options, said in (
        ({}, "by secure aggregation"),
        ({"roster": roster}, "by secure aggregation, signed"),
        ({"secure": False}, "in the server's sight"),
        ({"pair": cast(PairServers, servers)}, "by one message to two servers"),
    ):
        found = Terms(plan=small_plan, **cast(dict[str, Any], options))
        assert found.way == said
        assert found.secure == ("secure" in said)
    with pytest.raises(ParameterError, match="fewer than 3"):
        Terms(plan=small_plan, pair=cast(PairServers, SimpleNamespace(**{**vars(servers), "rounds": 2})))


def test_terms_that_contradict_the_plan(small_plan: Plan, tmp_path: Path) -> None:
    ledger, roster = Ledger(tmp_path / "ledger"), Silos(tmp_path).public
    for options, said in (
        ({"ledger": ledger}, "together"),
        ({"population": "people"}, "together"),
        ({"examples": 0}, "examples"),
        ({"roster": roster[:3]}, "3 are"),
        ({"roster": roster[:4], "secure": False}, "secure=False"),
    ):
        with pytest.raises(ParameterError, match=said):
            Terms(plan=small_plan, **cast(dict[str, Any], options))
    with pytest.raises(ParameterError, match="participation"):
        Terms(plan=with_run(small_plan, participation="once"))
    with pytest.raises(ParameterError, match="for outsiders only"):
        Terms(plan=with_run(small_plan, colluding=0))
    silent = replace(small_plan, protocol=replace(small_plan.protocol, modulus=None))
    with pytest.raises(ParameterError, match="got none"):
        Terms(plan=silent)
    assert Terms(plan=silent, secure=False).way == "in the server's sight"
    terms = Terms(plan=small_plan, examples=1)
    assert terms.event(2, "name").examples == 1
    terms.check_rounds(3)
    with pytest.raises(ParameterError, match="plan with rounds=4"):
        terms.check_rounds(4)


def test_with_a_roster_everybody_is_everybodys_neighbour(small_plan: Plan, tmp_path: Path) -> None:
    signed = Terms(plan=small_plan, roster=Silos(tmp_path).public[:4]).parameters(2, 4)
    # 4 clients of whom one may collude: two sets of survivors cannot both have 3 signatures.
    assert (signed.neighbours, signed.threshold, signed.quorum, signed.round) == (3, 3, 3, 2)
    assert (signed.surviving, signed.modulus) == (3, Terms(plan=small_plan).parameters(2, 4).modulus)


def test_a_ledger_that_pays_for_no_round_is_refused(small_plan: Plan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    options = {"epsilon": 1e-3, "delta": 1e-5}
    ledger.create(Budget(population="spent", **options))
    ledger.create(Budget(population="examples", unit="example", **options))
    Terms(plan=small_plan).check_ledger()
    Terms(plan=small_plan, ledger=ledger, population="spent").check_ledger()  # a round may have been paid for
    with pytest.raises(ParameterError, match="protects one example"):
        Terms(plan=small_plan, ledger=ledger, population="examples").check_ledger()


def test_among_many_clients_a_roster_makes_the_graph_complete(small_plan: Plan) -> None:
    many = with_run(with_protocol(small_plan, clients=100, modulus=2**20), surviving=80)
    roster = [bytes([number]) * 32 for number in range(100)]
    assert Terms(plan=many).parameters(2, 100).neighbours < 90
    signed = Terms(plan=many, roster=roster).parameters(2, 100)
    assert (signed.neighbours, signed.threshold, signed.quorum) == (99, 51, 51)
    assert Terms(plan=many, roster=iter(roster)).roster == frozenset(roster)  # of an iterator that is read once


def test_a_plan_for_drawn_examples_is_for_as_many(small_plan: Plan) -> None:
    drawn = with_run(small_plan, participation="poisson:0.5", adjacency="zero-out", examples=5)
    assert Terms(plan=drawn, examples=5).examples == 5
    for examples in (None, 4, 6):
        with pytest.raises(ParameterError, match=r"draw among 5 examples|participation"):
            Terms(plan=drawn, examples=examples)
