"""The rounds of a run in a federation: who may be in which, and how often they are paid for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cpsgd.correlated.mechanism import CorrelatedGaussian
from cpsgd.errors import ParameterError, RoundError, RoundRefusedError
from cpsgd.federation.client_files import Memory
from cpsgd.mechanisms import Binomial
from cpsgd.mechanisms.memory import Turn
from cpsgd.neighbours import Participation

ONCE = CorrelatedGaussian(
    noise_deviation=8.0, step=0.25, window=512, coordinate_range=0.5, bands=3, run_length=10, untrusted_holders=0
)
APART, ALWAYS = replace(ONCE, separation=3), replace(ONCE, separation=1)
INDEPENDENT = Binomial(levels=4, trials=20, coordinate_range=0.5)


def allowed(mechanism: Any, turn: Turn, answered: list[Turn], *, examples: bool = False) -> bool:
    try:
        mechanism.memory.check_turn(turn, answered, examples=examples)
    except RoundRefusedError:
        return False
    return True


def test_a_run_with_a_memory_begins_with_round_0() -> None:
    assert [each.memory.number(3) for each in (ONCE, APART, INDEPENDENT)] == [2, 2, 3]
    assert [each.memory.separation for each in (ONCE, APART, ALWAYS)] == [None, 3, 1]


def test_rounds_are_those_of_the_run_and_far_enough_apart() -> None:
    for mechanism in (ONCE, APART, ALWAYS):
        assert [allowed(mechanism, ("run", round), []) for round in (0, 1, 10, 11)] == [False, True, True, False]
    assert allowed(INDEPENDENT, ("run", 0), [("run", 0)])
    before = [("run", 5), ("other", 9)]
    assert [allowed(APART, ("run", round), before) for round in range(1, 11)] == [
        *(True, True, False, False, False, False, False, True, True, True)
    ]
    assert not any(allowed(ONCE, ("run", round), before) for round in range(1, 11))
    assert allowed(ONCE, ("third", 9), before)
    assert [allowed(ALWAYS, ("run", round), before) for round in (4, 5, 6)] == [True, False, True]
    # Examples are kept apart by the node itself.
    assert all(allowed(mechanism, ("run", 5), before, examples=True) for mechanism in (ONCE, APART, ALWAYS))


def test_plans_that_a_federation_can_run() -> None:
    every, poisson, once = Participation.every(), Participation.parse("poisson:0.1"), Participation.once()
    for mechanism, rounds, participation, examples, fits in (
        *((ONCE, 10, once, False, True), (ONCE, 11, once, False, False)),
        *((INDEPENDENT, 10**6, every, False, True), (INDEPENDENT, 3, poisson, False, False)),
        *((INDEPENDENT, 3, poisson, True, True), (INDEPENDENT, 3, once, True, False)),
    ):
        rules = mechanism.memory
        if fits:
            rules.check_plan(rounds, participation, examples=examples)
        else:
            with pytest.raises(ParameterError):
                rules.check_plan(rounds, participation, examples=examples)


def test_what_a_server_may_announce() -> None:
    for mechanism, rounds, examples, disjoint, fits in (
        *((ONCE, 10, False, False, True), (ONCE, 11, False, False, False)),
        *((ONCE, 10, True, False, False), (ONCE, 10, True, True, True), (ALWAYS, 10, True, False, True)),
    ):
        rules = mechanism.memory
        if fits:
            rules.check_announced(rounds, examples=examples, disjoint=disjoint)
        else:
            with pytest.raises(RoundRefusedError):
                rules.check_announced(rounds, examples=examples, disjoint=disjoint)


def test_how_often_rounds_are_paid_for() -> None:
    def paid(mechanism: Any, turns: list[Turn], *, protected: bool = True, examples: bool = True) -> int:
        return mechanism.memory.paid(turns, protected=protected, examples=examples)

    # A run that goes on under another name costs no more than one; a round that is answered again is another run.
    turns = [("a", 1), ("a", 2), ("b", 3), ("b", 4), ("c", 2), ("d", 1), ("d", 2)]
    assert paid(INDEPENDENT, turns) == 7
    for mechanism in (ONCE, APART, ALWAYS):
        assert paid(mechanism, turns) == 3
        assert paid(mechanism, turns[:4]) == 1
        assert paid(mechanism, []) == 0
    # Whole clients pay for every run.
    assert paid(ONCE, turns, protected=False, examples=False) == paid(ONCE, turns, protected=False) == 4
    assert paid(ALWAYS, turns, protected=False, examples=False) == 3
    with pytest.raises(RoundRefusedError, match="says nothing about whole clients"):
        paid(ONCE, turns, examples=False)
    assert paid(ALWAYS, turns, examples=False) == 3


def test_a_client_needs_a_file_where_noise_is_carried_on() -> None:
    with pytest.raises(RoundRefusedError, match="keep its seeds"):
        ONCE.memory.of_client(None, "run", bytes(16))
    state = INDEPENDENT.memory.of_client(None, "run", bytes(16))
    state.check(3)
    assert state.meanwhile(3, 5, lambda: "trained") == ("trained", {})


@pytest.mark.parametrize("other", [3, 4])
def test_a_round_that_another_session_answers_while_a_client_trains_is_answered_once(
    tmp_path: Path, other: int
) -> None:
    """The noise that was drawn for it is used by nobody: what was expanded is no seed of a later round either."""
    memory = Memory(tmp_path / "memory")
    states = [ONCE.memory.of_client(memory.seeds, "run", bytes(16)) for _ in range(2)]
    answers: list[Any] = []

    def train() -> None:
        answers.append(states[1].meanwhile(other, 5, lambda: "trained"))

    with pytest.raises(RoundError, match="is drawn"):
        states[0].meanwhile(3, 5, train)
    ((trained, arguments),) = answers
    assert (trained, arguments["seeds"][1:]) == ("trained", (None, None))
    following = states[0].meanwhile(other + 1, 5, lambda: "next")[1]["seeds"]
    assert following[1:] == (arguments["seeds"][0], None)
