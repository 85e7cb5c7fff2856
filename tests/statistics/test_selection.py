"""Groups that are found: the optimal probabilities by brute force, users in a few groups, and whole questions."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import statistics
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.ledger import Budget, Ledger
from cpsgd.neighbours import Adjacency
from cpsgd.promise import Claim
from cpsgd.statistics import ClippingWarning
from cpsgd.statistics.selection import Selection, keep_words
from cpsgd.statistics.table_options import events_for

COST: dict[str, Any] = {"epsilon": 2.0, "delta": 1e-6}


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (3.0, 1e-9)])
def test_probabilities_are_private_and_as_large_as_can_be(epsilon: float, delta: float) -> None:
    odds = keep_words(epsilon, delta) / 2**61
    more, less = odds[1:], odds[:-1]
    slack = 1e-14
    assert odds[0] == 0.0
    assert odds[-1] == 1.0
    # Kept or not kept, one user more or less: all four inequalities, and one of them is tight at each step.
    losses = [
        more - math.exp(epsilon) * less,
        less - math.exp(epsilon) * more,
        (1.0 - less) - math.exp(epsilon) * (1.0 - more),
        (1.0 - more) - math.exp(epsilon) * (1.0 - less),
    ]
    assert max(loss.max() for loss in losses) <= delta + slack
    tight = np.maximum(losses[0], losses[2])[:-1]
    assert np.abs(tight - delta).max() <= slack * math.exp(epsilon)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 1e-3), (1.0, 1e-5), (1.0, 1e-17), (40.0, 5e-19)])
def test_probabilities_are_private_exactly(epsilon: float, delta: float) -> None:
    # In floats 1 - π jumps from 1e-16 to 0, which a smaller δ does not pay for.
    words, whole, budget = keep_words(epsilon, delta).tolist(), 2**61, Fraction(delta) * 2**61
    grow = Fraction(math.exp(epsilon)) * (1 - Fraction(1, 2**51))  # at most e^ε
    assert (words[0], words[-1]) == (0, whole)
    for less, more in pairwise(words):
        assert less < more <= grow * less + budget
        assert whole - less <= grow * (whole - more) + budget


def test_a_delta_below_the_resolution_is_refused() -> None:
    with pytest.raises(InfeasibleError, match="too small"):
        keep_words(1.0, 1e-19)


# At ε below 2^-12, one in a whole number may be 10^-4 too small.
@pytest.mark.parametrize("spent", [1.0, 2.2521769e-4, 3.4749875e-4])
def test_a_replace_one_ledger_pays_twice_for_add_remove_groups(tmp_path: Path, spent: float) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    for adjacency in ("replace-one", "zero-out"):
        ledger.create(Budget(population=adjacency, epsilon=20.0, delta=1e-5, adjacency=Adjacency.parse(adjacency)))
    for neighbours, expected in (("add-remove", (2.0, 1.0)), ("replace-one", (1.0, 0.5))):
        selection = Selection(("g",), Claim(spent, 1e-6), neighbours)  # type: ignore[arg-type]
        events = events_for(ledger, "", None, [], selection)
        for population, epsilon in zip(("replace-one", "zero-out"), expected, strict=True):
            assert epsilon * spent <= ledger.quote(population, events).epsilon <= epsilon * spent * 1.001
        assert events[0].overflow == (2e-6 if neighbours == "add-remove" else 1e-6)


def test_a_user_is_counted_in_their_first_groups() -> None:
    chunk = {"g": np.array(["a", "b", "a", "c", "b", "a"]), "h": np.array([1, 1, 1, 1, 2, 1])}
    sizes = np.array([4, 2])
    for most, expected in ((1, {"a": 1, "b": 1}), (2, {"a": 2, "b": 2}), (9, {"a": 2, "b": 2, "c": 1})):
        selection = Selection(("g",), Claim(1.0, 1e-6), "replace-one", most)
        assert selection.tally(chunk, sizes) == {(name,): count for name, count in expected.items()}
    both = Selection(("g", "h"), Claim(1.0, 1e-6), "replace-one", 9).tally(chunk, sizes)
    assert both == {("a", "1"): 2, ("b", "1"): 1, ("b", "2"): 1, ("c", "1"): 1}


def test_replacing_a_user_changes_no_more_groups_than_is_paid_for() -> None:
    generator = np.random.default_rng(3)
    for most in (1, 2, 5):
        selection = Selection(("g",), Claim(1.0, 1e-6), "replace-one", most)
        for _ in range(50):
            rows = [generator.integers(12, size=generator.integers(1, 9)).astype(str) for _ in range(2)]
            one, other = (selection.tally({"g": own}, np.array([len(own)])) for own in rows)
            changed = [abs(one[group] - other[group]) for group in {*one, *other}]
            assert max(changed) <= 1
            assert sum(changed) <= 2 * most
        assert math.isclose(selection._each[0] * 2 * most, 1.0, rel_tol=1e-6)


def people(n: int = 4000) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(1)
    country = np.where(np.arange(n) < 3, "Tuvalu", generator.choice(["日本", "Deutschland"], n))
    return {"country": country, "sex": generator.choice(["f", "m"], n), "age": generator.uniform(20, 80, n)}


def test_rare_groups_stay_unknown(fixed_seed: None) -> None:
    table = people()
    found = statistics.mean(table, bounds={"age": (0, 100)}, group_by="country", **COST)
    assert found.groups == ("Deutschland", "日本")
    assert found.epsilon <= 2.0
    assert 0.0 < found.delta <= 1e-6
    both = statistics.count(table, group_by=["country", "sex"], **COST)
    assert both.group_by == ("country", "sex")
    assert both.to_columns()["sex"] == ["f", "m", "f", "m"]
    colours = statistics.histogram(table, "country", **COST)
    assert colours.names == ("Deutschland", "日本")
    assert np.abs(colours.values - 2000).max() < 200


def test_no_group_is_an_answer_too(fixed_seed: None) -> None:
    table = {"id": [str(i) for i in range(200)], "x": [0.5] * 200}
    with pytest.warns(ClippingWarning, match="No group was kept"):
        found = statistics.mean(table, bounds={"x": (0, 1)}, group_by="id", **COST)
    assert found.groups == ()
    assert found.values.shape == (0, 1)
    assert (found.rows(), found.to_dict()["values"]) == ([], [])
    assert list(found.to_pandas().columns) == ["id", "name", "value", "low", "high"]
    assert "mean of 200 rows" in repr(found)
    assert "<table>" in found._repr_html_()


def test_groups_that_are_found_are_charged(fixed_seed: None, tmp_path: Any) -> None:
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=2.0, delta=1e-6))
    paid: dict[str, Any] = {"ledger": ledger, "population": "people"}
    found = statistics.mean(people(), bounds={"age": (0, 100)}, group_by="country", **COST, **paid)
    total = ledger.total("people")
    assert total.rounds == 3
    assert found.epsilon * (1.0 - 1e-9) <= total.epsilon <= 2.0


def test_groups_need_a_delta() -> None:
    with pytest.raises(ParameterError, match="needs a δ"):
        statistics.count(people(), group_by="country", epsilon=1.0)
