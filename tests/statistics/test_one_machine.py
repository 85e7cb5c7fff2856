"""Statistics of tables: estimates, intervals that cover, the ledger, bounds that are found, and bad input."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import statistics
from cpsgd.errors import (
    BudgetExceededError,
    ColumnError,
    CpsgdError,
    InfeasibleError,
    ParameterError,
    TableError,
)
from cpsgd.ledger import Budget, Ledger
from cpsgd.promise import Claim
from cpsgd.simulation.cpu import RoundSimulator
from cpsgd.statistics import ClippingWarning, Count, Histogram, Mean, Quantiles, Sum
from cpsgd.statistics.ranks import Ranges, beyond
from cpsgd.statistics.rows import RowQuestion
from cpsgd.statistics.table_noise import noise_for
from cpsgd.statistics.users import users_of
from cpsgd.tables import open_table

QUICK: dict[str, Any] = {"epsilon": 1.0, "delta": 1e-6}
GROUPS = {"sex": ["f", "m"]}
EDGES = [0, 30, 60, 90]


@pytest.fixture
def table() -> dict[str, np.ndarray]:
    return people(3000)


def people(n: int) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    return {
        "id": np.repeat(np.arange(n // 2), 2),
        "age": generator.uniform(0, 90, n),
        "income": generator.normal(3e4, 5e3, n),
        "sex": generator.choice(["f", "m"], n),
        "smokes": generator.integers(2, size=n),
    }


def budget(folder: Path, epsilon: float) -> Ledger:
    """A ledger with a budget of this ε for people."""
    ledger = Ledger(folder / "b.ledger")
    ledger.create(Budget(population="people", epsilon=epsilon, delta=1e-6))
    return ledger


def truths(table: dict[str, np.ndarray]) -> dict[str, tuple[str, dict[str, Any], Any]]:
    """Statistics, their options, and their values without noise."""
    age, women = table["age"], table["sex"] == "f"
    bounds: dict[str, Any] = {"bounds": {"age": (0, 100)}}
    groups, two = {"group_by": GROUPS}, {"user": "id", "rows_per_user": 2}
    return {
        "mean": ("mean", bounds, [age.mean()]),
        "mean by group": ("mean", bounds | groups, [[age[women].mean()], [age[~women].mean()]]),
        "mean by user": ("mean", bounds | {"user": "id"}, [age.mean()]),
        "sum": ("sum", bounds, [age.sum()]),
        "sum by user and group": ("sum", bounds | two | groups, [[age[women].sum()], [age[~women].sum()]]),
        "sum of first rows": ("sum", bounds | two | {"rows_per_user": 1}, [age[::2].sum()]),
        "count": ("count", {"columns": ["smokes"]}, [table["smokes"].sum()]),
        "count by group": ("count", groups, [[women.sum()], [(~women).sum()]]),
        "histogram": ("histogram", {"column": "age", "edges": EDGES}, np.histogram(age, EDGES)[0]),
        "quantiles": ("quantiles", bounds, np.quantile(age, [0.25, 0.5, 0.75])),
    }


NAMES = list(truths(people(3000)))


@pytest.mark.filterwarnings("ignore::cpsgd.statistics.ClippingWarning")
@pytest.mark.parametrize("name", NAMES)
def test_values_are_near_the_truth(table: dict[str, np.ndarray], fixed_seed: None, name: str) -> None:
    statistic, options, truth = truths(table)[name]
    ask = getattr(statistics, statistic)
    found = ask(table, **options, **QUICK, confidence=1.0 - 1e-7)
    assert 0.99 < found.epsilon <= 1.0
    # Only the many values of a distribution function are worth a δ.
    assert found.delta == (1e-6 if statistic == "quantiles" else 0.0)
    assert found.unit == ("user" if "user" in name or "first" in name else "row")
    assert found.users == (1500 if found.unit == "user" else 3000)
    assert (found.low <= truth).all()
    assert (found.high >= truth).all()
    # And the intervals say something.
    narrow = ask(table, **options, **QUICK, confidence=0.95)
    assert (narrow.high - narrow.low < 0.3 * np.abs(truth)).all()


@pytest.mark.parametrize(
    ("question", "truth"),
    [
        (Mean({"age": (0, 100), "income": (0, 1e5)}), lambda t: [t["age"].mean(), t["income"].mean()]),
        (
            Mean({"age": (0, 100)}, group_by=GROUPS),
            lambda t: [[t["age"][t["sex"] == "f"].mean()], [t["age"][t["sex"] == "m"].mean()]],
        ),
        pytest.param(
            Sum({"age": (0, 100)}, group_by=GROUPS),
            lambda t: [[t["age"][t["sex"] == "f"].sum()], [t["age"][t["sex"] == "m"].sum()]],
            marks=pytest.mark.thorough,
        ),
        (Count(group_by=GROUPS), lambda t: [[np.sum(t["sex"] == "f")], [np.sum(t["sex"] == "m")]]),
        (Histogram("age", edges=[0, 45, 90]), lambda t: np.histogram(t["age"], [0, 45, 90])[0]),
        (
            Quantiles({"age": (0, 100)}, [0.25, 0.5], bins=64),
            lambda t: np.quantile(t["age"], [0.25, 0.5], method="inverted_cdf"),
        ),
    ],
    ids=["mean", "mean by group", "sum by group", "count by group", "histogram", "quantiles"],
)
def test_intervals_cover(table: dict[str, np.ndarray], question: RowQuestion, truth: Any) -> None:
    few = {name: column[:300] for name, column in table.items()}
    asked = question.plan(300, 1.0, 1e-6, bits=8, mechanism="binomial")
    vectors = np.concatenate([question.vectors(*each) for each in users_of(open_table(few), None, question.needed)])
    expected = np.array(truth(few), dtype=np.float64)
    inside = []
    for seed in range(400):
        simulator = RoundSimulator(asked.protocol, 0, seed=seed, threads=1)
        simulator.add(vectors.astype(np.float32))
        found = asked.result(simulator.mean(), 300)
        inside.append((found.low <= expected) & (expected <= found.high))
    covered = np.mean(inside)
    # 800 intervals of 95 %: five standard deviations are 0.0385.
    assert covered >= 0.95 - 0.0385
    if question.statistic != "quantiles":  # whose intervals end at bins
        assert covered <= 0.985


def test_bounds_are_found_privately(fixed_seed: None, tmp_path: Path) -> None:
    table = people(10_000)
    found = statistics.mean(table, columns=["income"], **QUICK)
    low, high = found.bounds["income"]
    assert 8e3 < low < 2.5e4
    assert 3.6e4 < high < 7e4
    assert abs(found.values[0] - 3e4) < 1e3
    assert found.epsilon <= 1.0
    # What both rounds cost is charged.
    ledger = budget(tmp_path, 1.0)
    again = statistics.mean(table, columns=["income"], **QUICK, ledger=ledger, population="people")
    total = ledger.total("people")
    assert total.rounds == 3
    assert again.epsilon * (1.0 - 1e-9) <= total.epsilon <= 1.0


@pytest.mark.parametrize("shape", ["normal", "far from zero", "positive", "constant", "huge"])
def test_bounds_leave_out_what_they_say(shape: str) -> None:
    generator, n = np.random.default_rng(2), 4000
    values = {
        "normal": generator.normal(0.3, 1.0, n),
        "far from zero": generator.normal(3e4, 5e3, n),
        "positive": generator.exponential(10.0, n),
        "constant": np.full(n, 7.0),
        "huge": generator.uniform(1e15, 9e17, n),  # as nanoseconds are: more than the finest bins hold
    }[shape]
    question = Ranges(["x"])
    noise = noise_for(question.geometry, Claim(0.4, 1e-6))
    exact, deviation = question.points({"x": values}).mean(axis=0), np.sqrt(noise.variance) / n
    share = beyond(["x"], deviation, n)
    assert share < 0.15
    missed = wide = 0
    for _ in range(400):
        found = question.read((exact + generator.normal(0.0, deviation, len(exact)))[None], deviation**2, n, 0.0)
        low, high = found.low[0, 0], found.high[0, 0]
        missed += np.mean(values < low) > share or np.mean(values > high) > share
        wide += high > 4 * np.abs(values).max() or low < -4 * np.abs(values).max()
    # Some in a hundred are what the two standard deviations in the share leave.
    assert missed <= 40
    assert wide <= 4


@pytest.mark.filterwarnings("ignore::cpsgd.statistics.ClippingWarning")
def test_the_wide_normal_of_the_defaults(fixed_seed: None) -> None:
    data = np.random.default_rng(1).normal(0.3, 1.0, size=(9000, 20))
    found = statistics.mean(data, columns=[str(i) for i in range(20)], **(QUICK | {"epsilon": 4.0}))
    error = np.linalg.norm(found.values - data.mean(axis=0)) / np.linalg.norm(data.mean(axis=0))
    assert error < 0.1


def test_too_few_users_for_bounds(table: dict[str, np.ndarray]) -> None:
    few = {name: column[:60] for name, column in table.items()}
    with pytest.raises(InfeasibleError, match=r"no bounds for income, and 60 users .* state bounds"):
        statistics.mean(few, columns=["income"], **QUICK)


def test_much_clipping_is_said(table: dict[str, np.ndarray], tmp_path: Path) -> None:
    """By a private estimate, which is within ε: so also where a ledger pays."""
    ledger = budget(tmp_path, 2.0)
    for paid in ({}, {"ledger": ledger, "population": "people"}):
        with pytest.warns(ClippingWarning, match="values beyond bounds"):
            found = statistics.mean(table, bounds={"income": (0, 3e4)}, **QUICK, **paid, confidence=1.0 - 1e-7)
        (cut,) = found.cut_off
        assert cut.cut == "values beyond bounds"
        assert cut.low < 0.5 < cut.high
        assert "values beyond bounds" in repr(found)
    assert ledger.total("people").epsilon <= 1.0


@pytest.mark.parametrize("several", [False, True])
def test_an_adaptive_budget_pays_about_what_is_asked(
    table: dict[str, np.ndarray], tmp_path: Path, several: bool
) -> None:
    """Its filter counts Gaussian shifts: Laplace noise of ε = 0.5 would take more than 3 of 4."""
    ledger = Ledger(tmp_path / "b.ledger")
    ledger.create(Budget(population="people", epsilon=4.0, delta=1e-6, accounting="adaptive"))
    asked: dict[str, Any] = {"epsilon": 0.5, "delta": 1e-7, "ledger": ledger, "population": "people"}
    if several:
        statistics.report(table, {"age": Mean({"age": (0, 90)}), "smokers": statistics.Count(["smokes"])}, **asked)
    else:
        statistics.mean(table, bounds={"age": (0, 90)}, **asked)
    assert 0.0 < ledger.total("people").epsilon <= 1.0


def test_the_ledger_is_charged_before_release(table: dict[str, np.ndarray], tmp_path: Path) -> None:
    ledger = budget(tmp_path, 1.2)
    asked: dict[str, Any] = {**QUICK, "ledger": ledger, "population": "people"}
    statistics.histogram(table, "sex", categories=["f", "m"], **asked)
    # The histogram, and what was cut off.
    assert ledger.total("people").rounds == 2
    assert 0.999 < ledger.total("people").epsilon <= 1.0
    entry, cut = ledger.events("people")
    assert entry.released
    assert cut.released
    assert entry.event.label == "statistics: histogram"
    with pytest.raises(BudgetExceededError):
        statistics.mean(table, bounds={"age": (0, 100)}, **asked)
    assert ledger.total("people").rounds == 2


def test_a_budget_of_users_does_not_pay_for_rows(table: dict[str, np.ndarray], tmp_path: Path) -> None:
    """Pages, reports and points: all say to the ledger what they protect."""
    asked: dict[str, Any] = {"bounds": {"age": (0, 100)}, "ledger": budget(tmp_path, 9.0), "population": "people"}
    questions = {"age": Mean({"age": (0, 100)})}
    report = {name: value for name, value in asked.items() if name != "bounds"}
    statistics.mean(table, user="id", **QUICK, **asked)
    for ask in (
        lambda: statistics.mean(table, **QUICK, **asked),
        lambda: statistics.mean(table, group_by=["sex"], **QUICK, **asked),
        lambda: statistics.report(table, questions, **QUICK, **report),
        lambda: statistics.kmeans(table, 1, 3.0, 1e-6, rounds=1, **asked),
    ):
        with pytest.raises(ParameterError, match="per user, and this one is per row"):
            ask()
    statistics.report(table, questions, user="id", **QUICK, **report)
    statistics.kmeans(table, 1, 3.0, 1e-6, rounds=1, user="id", **asked)
    assert {entry.event.table_unit for entry in asked["ledger"].events("people")} == {"user"}


def damaged(name: str) -> Path:
    """A file that is not what its name says."""
    path = Path(tempfile.mkdtemp()) / name
    path.write_bytes(b"PAR1 age 17 not really")
    return path


def bad_inputs(table: dict[str, np.ndarray]) -> dict[str, tuple[type[CpsgdError], str, Any, dict[str, Any]]]:
    """The error that each statistic of a table with these options ends in."""
    bounds: dict[str, Any] = {"bounds": {"age": (0, 100)}}
    last = np.arange(3000) == 2999
    nan, infinite = (table | {"age": np.where(last, bad, table["age"])} for bad in (np.nan, np.inf))
    mixed = table | {"age": np.array([*table["age"][:-1], "old"], dtype=object)}
    empty = {name: column[:0] for name, column in table.items()}
    one, user = table | {"id": np.zeros(3000)}, {"user": "id"}
    misspelt: dict[str, Any] = {"users": "id"}
    return {
        "empty": (TableError, "mean", empty, bounds),
        "missing column": (ColumnError, "mean", table, {"bounds": {"height": (0, 2)}}),
        "missing user": (ColumnError, "mean", table, bounds | {"user": "who"}),
        "missing group": (ColumnError, "mean", table, bounds | {"group_by": {"x": ["a"]}}),
        "nan": (ColumnError, "mean", nan, bounds),
        "nan in the search": (ColumnError, "mean", nan, {"columns": ["age"]}),
        "nan beside the search": (ColumnError, "mean", nan, bounds | {"columns": ["income", "age"]}),
        "infinity": (ColumnError, "quantiles", infinite, bounds),
        "mixed types": (ColumnError, "sum", mixed, bounds),
        "text": (ColumnError, "mean", table, {"bounds": {"sex": (0, 1)}}),
        "one user": (TableError, "mean", one, bounds | user),
        "groups without a list or a δ": (ParameterError, "count", table, {"group_by": "sex", "delta": 0.0}),
        "groups per user": (ParameterError, "count", table, {"group_by": "sex", "groups_per_user": 0}),
        "neighbours": (ParameterError, "mean", table, bounds | {"neighbours": "next-door"}),
        "missing that is no number": (ParameterError, "mean", table, bounds | {"missing": "zero"}),
        "unreadable Parquet": (TableError, "mean", damaged("t.parquet"), bounds),
        "unreadable text": (TableError, "mean", damaged("t.csv.gz"), bounds),
        "a word that is misspelt": (ParameterError, "mean", table, bounds | misspelt),
        "the mean user": (ParameterError, "mean", table, {"bounds": {"id": (0, 9)}} | user),
        "not a count": (ColumnError, "count", table, {"columns": ["age"]}),
        "no columns": (ParameterError, "mean", table, {}),
        "bounds of no column": (ParameterError, "mean", table, bounds | {"columns": ["income"]}),
        "rows missing": (ParameterError, "sum", table, bounds | user),
        "rows without user": (ParameterError, "sum", table, bounds | {"rows_per_user": 2}),
        "confidence": (ParameterError, "mean", table, bounds | {"confidence": 1.0}),
        "several users": (ParameterError, "mean", table, bounds | {"user": ["id"]}),
        "a group twice": (ParameterError, "mean", table, bounds | {"group_by": ["sex", "sex"]}),
        "a missing group": (ParameterError, "mean", table, bounds | {"group_by": {"sex": ["f", math.nan]}}),
        "a quantile twice": (ParameterError, "quantiles", table, bounds | {"quantiles": [0.5, 0.5]}),
        "nothing to count": (ParameterError, "histogram", table, {"column": "sex", "delta": 0.0}),
    }


BAD = list(bad_inputs(people(3000)))


@pytest.mark.parametrize("name", BAD)
def test_bad_input_costs_nothing(table: dict[str, np.ndarray], tmp_path: Path, name: str) -> None:
    ledger = budget(tmp_path, 4.0)
    error, statistic, bad, options = bad_inputs(table)[name]
    for paid in ({"ledger": ledger, "population": "people"}, {}):
        with pytest.raises(error):
            getattr(statistics, statistic)(bad, **QUICK | options, **paid)
    assert ledger.total("people").rounds == 0


def test_a_callback_that_fails_costs_nothing(table: dict[str, np.ndarray], tmp_path: Path) -> None:
    ledger = budget(tmp_path, 4.0)

    def fail(rows: int) -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        statistics.mean(table, bounds={"age": (0, 100)}, **QUICK, ledger=ledger, population="people", advance=fail)
    assert ledger.total("people").rounds == 0


def test_progress_counts_rows(table: dict[str, np.ndarray]) -> None:
    for user in (None, "id"):
        heard: list[int] = []
        statistics.mean(table, bounds={"age": (0, 100)}, **QUICK, user=user, advance=heard.append)
        assert sum(heard) == 3000


def replaced(table: dict[str, np.ndarray], generator: np.random.Generator) -> dict[str, np.ndarray]:
    """The same table with all rows of one user replaced: others, more or fewer."""
    others = {name: column[table["id"] != 3] for name, column in table.items()}
    size = int(generator.integers(1, 9))
    rows = {
        "id": np.full(size, 3),
        "age": generator.choice([-1e9, 0.0, 50.0, 100.0, 1e9], size),
        "income": generator.choice([-1e300, 0.0, 1e300], size),
        "sex": generator.choice(["f", "m", "x"], size),
        "smokes": generator.integers(2, size=size),
    }
    # The others stay in their order.
    place = np.sort(generator.integers(len(others["id"]) + 1, size=size))
    return {name: np.insert(others[name], place, rows[name]) for name in table}


@pytest.mark.parametrize(
    "question",
    [
        Mean({"age": (0, 100), "income": (-1e3, 1e5)}),
        Mean({"age": (0, 100)}, group_by=GROUPS),
        Sum({"age": (0, 100)}, rows=3, group_by=GROUPS),
        Sum({"age": (-20, 100)}),
        Count(["smokes"], rows=2),
        Count(rows=2),
        Histogram("sex", categories=["f", "m"], rows=3),
        Quantiles({"age": (0, 100)}, bins=16, group_by=GROUPS),
        Ranges(["age", "income"]),
    ],
    ids=lambda question: f"{question.statistic} {question.rows} {question.group_by}",
)
def test_replacing_one_user_moves_one_vector_no_further_than_is_accounted_for(question: RowQuestion) -> None:
    generator = np.random.default_rng(5)
    few = {name: column[:60] for name, column in people(3000).items()}
    stated = question.geometry.stated()
    allowed = stated.get("replace_one_distance", 2.0 * stated["clip_norm"])
    farthest = 0.0
    for _ in range(60):
        pair = [
            np.concatenate([question.vectors(*part) for part in users_of(open_table(each), "id", question.needed)])
            for each in (few, replaced(few, generator))
        ]
        assert pair[0].shape == pair[1].shape == (30, question.geometry.dim)
        apart = np.linalg.norm(pair[0].astype(np.float64) - pair[1], axis=1)
        # Where sums are of the same rows in another order, they are the same but for their last digit.
        assert (np.delete(apart, 3) < 1e-6).all()
        assert max(np.linalg.norm(vectors.astype(np.float64), axis=1).max() for vectors in pair) <= stated["clip_norm"]
        farthest = max(farthest, float(apart[3]))
    assert 0.0 < farthest <= allowed


def test_bounds_far_from_zero_keep_rows_in_the_cube() -> None:
    """Rounding x/width - middle/width must not add to what is accounted for."""
    low = 1e12 / 3.0
    question = Mean({"x": (low, low + 3.0)}, group_by={"g": ["a", "b"]})
    rows = {"x": np.linspace(low - 1.0, low + 4.0, 1001), "g": np.array(["a"] * 1001)}
    points = question.points(rows)
    stated = question.geometry.stated()
    assert np.linalg.norm(points, axis=1).max() <= stated["clip_norm"]
    assert np.ptp(points[:, 0]) <= stated["replace_one_distance"]


def test_a_user_with_very_many_rows_is_one_user(monkeypatch: pytest.MonkeyPatch) -> None:
    from cpsgd.statistics import rows, users

    table = {"id": np.array([0] * 500 + [1] * 3), "x": np.arange(503) % 10}
    question = Histogram("x", categories=range(10), rows=400)

    def vectors() -> list[np.ndarray]:
        return [question.vectors(*part) for part in users_of(open_table(table), "id", ["x"])]

    whole = vectors()
    monkeypatch.setattr(rows, "_BLOCK", 10 * 64)  # rows of 64 at a time
    monkeypatch.setattr(users, "CHUNK_ROWS", 64)
    parts = vectors()
    assert len(whole) == 1
    assert [len(part) for part in parts] == [1, 1]
    np.testing.assert_allclose(np.concatenate(parts), np.concatenate(whole), atol=1e-6)
    assert np.concatenate(parts)[0].sum() == pytest.approx(1.0)


def test_what_is_wrong_in_a_later_chunk_costs_nothing(
    table: dict[str, np.ndarray], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds are found in a first round; columns that only the second one needs are read before it is paid, too."""
    monkeypatch.setattr("cpsgd._table_memory.CHUNK_ROWS", 1000)
    ledger = budget(tmp_path, 9.0)
    damaged = table["sex"].astype(object)
    damaged[2999] = None
    cost = QUICK | {"epsilon": 4.0, "ledger": ledger, "population": "people"}
    for user in (None, "id"):
        with pytest.raises(ColumnError, match="missing"):
            statistics.mean(table | {"sex": damaged}, columns=["age"], group_by=GROUPS, user=user, **cost)
    assert ledger.total("people").rounds == 0


def test_nothing_of_the_callers_runs_after_payment(table: dict[str, np.ndarray], tmp_path: Path) -> None:
    ledger = budget(tmp_path, 9.0)
    heard: list[int] = []

    def advance(rows: int) -> None:
        heard.append(rows)
        assert ledger.total("people").rounds == 0

    cost = QUICK | {"epsilon": 4.0, "ledger": ledger, "population": "people"}
    statistics.mean(table, columns=["age"], **cost, advance=advance)
    assert sum(heard) == 3000
    # The search for bounds, the mean, and what was cut off.
    assert ledger.total("people").rounds == 3


def test_the_first_column_does_not_matter_to_a_count_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("note,id\n" + "".join(f",{i // 2}\n" for i in range(800)))
    found = statistics.count(path, user="id", rows_per_user=3, **QUICK)
    assert found.names == ("rows",)
    assert found.users == 400


def test_ids_are_told_apart_exactly() -> None:
    """As floats these would be one user."""
    for first in (2**62, 2**63 - 100, 2**70):
        large = [first + i // 2 for i in range(600)]
        for ids in (large, [-1, -1, *large[2:]]):
            found = statistics.mean({"id": ids, "x": [0.5] * 600}, bounds={"x": (0, 1)}, user="id", **QUICK)
            assert found.users == 300


def test_columns_of_an_array_may_be_counted() -> None:
    asked: dict[str, Any] = {"columns": [1], "bounds": {1: (0.0, 1.0)}, **QUICK}
    found = statistics.mean(np.ones((100, 2)), **asked)
    assert found.names == ("1",)


@pytest.mark.filterwarnings("error")
def test_the_largest_bounds_give_numbers() -> None:
    bounds = {"x": (-(2.0**1000), 2.0**1000)}
    ways: list[Any] = [statistics.mean, statistics.sum]
    for ask in ways:
        found = ask({"x": np.full(1000, 1e300)}, bounds=bounds, **QUICK)
        assert np.isfinite([found.low, found.values, found.high]).all()


def test_what_it_may_cost_is_needed(table: dict[str, np.ndarray]) -> None:
    with pytest.raises(ParameterError, match="Missing epsilon"):
        statistics.mean(table, bounds={"age": (0, 100)}, delta=1e-6)  # type: ignore[call-arg]
