"""`cpsgd round mean|sum|count|histogram|quantiles` of tables with named columns."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

GOOD = "id,x\n" + "".join(f"{i},2\n" for i in range(100))
COST = ("--epsilon", 1, "--delta", 1e-6)


@pytest.fixture
def people(cpsgd: Any) -> Path:
    """A file with 2,000 people in the folder that commands run in."""
    generator = np.random.default_rng(0)
    ages, sexes = generator.uniform(0, 90, 2000), generator.choice(["f", "m"], 2000)
    lines = [f"{1000000 + i // 2},{ages[i]:.3f},{sexes[i]},{i % 2}" for i in range(2000)]
    path = Path("people.csv")
    path.write_text("id,age,sex,smokes\n" + "\n".join(lines) + "\n")
    return path


def test_mean_of_a_column(cpsgd: Any, people: Path) -> None:
    found = cpsgd.json("table mean", people, "--user", "id", "--columns", "age", "--bounds", "age=0:100", *COST)
    assert (found["statistic"], found["unit"], found["users"]) == ("mean", "user", 1000)
    assert found["epsilon"] <= 1.0
    (value,) = found["values"]
    assert value["name"] == "age"
    assert value["low"] < value["value"] < value["high"]
    assert abs(value["value"] - 45.0) < 5.0
    assert not Path("mean.npy").exists()
    text = cpsgd("table mean", people, "--columns", "age", "--bounds", "age=0:100", *COST).stdout
    for words in ("2,000 rows", "age", "ε = ", "δ = 0 per row, replace-one", "proved by", "0 to 100"):
        assert words in text


def test_other_statistics(cpsgd: Any, people: Path) -> None:
    commands = {
        "sum": ("--columns", "age", "--bounds", "age=0:100", "--group-by", "sex=f,m"),
        "count": ("--columns", "smokes"),
        "histogram": ("--columns", "age", "--edges", "0,30,60,90"),
        "quantiles": ("--columns", "age", "--bounds", "age=0:100", "--quantiles", "0.5", "--bins", "64"),
    }
    expected = {"sum": 45_000.0, "count": 1000.0, "histogram": 2000 / 3, "quantiles": 45.0}
    for name, options in commands.items():
        result = cpsgd.succeeds(f"table {name}", people, *options, *COST, "--json", "--out", f"{name}.csv")
        found = json.loads(result.stdout)
        assert found["statistic"] == name
        assert found["values"][0]["value"] == pytest.approx(expected[name], rel=0.25)
        with Path(f"{name}.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert float(rows[0]["value"]) == found["values"][0]["value"]
        assert ("sex" in rows[0]) == (name == "sum")


def test_edges_may_begin_below_zero(cpsgd: Any, people: Path) -> None:
    result = cpsgd.succeeds("table histogram", people, "--columns", "age", "--edges", "-10,0,100", *COST, "--json")
    assert [entry["name"] for entry in json.loads(result.stdout)["values"]] == ["[-10, 0)", "[0, 100]"]


def test_a_list_that_is_given_twice_is_refused(cpsgd: Any, people: Path) -> None:
    for name, given in {"--columns": ("age", "smokes"), "--bounds": ("age=0:9", "smokes=0:1")}.items():
        result = cpsgd("table mean", people, name, given[0], name, given[1], *COST)
        assert result.exit_code != 0
        assert f"Parameter {name} specified multiple times" in result.stderr
        assert result.stdout == ""


def test_values_that_are_paid_for_are_shown_on_a_full_disk(
    cpsgd: Any, people: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("cpsgd.cli.columns.write_file", full)
    command = ("table mean", people, "--columns", "age", "--bounds", "age=0:100", *COST, "--out", "mean.csv")
    result = cpsgd.refuses("mean.csv: No space left on device", *command, "--json")
    found = json.loads(result.stdout)
    assert found["out"] is None
    assert len(found["values"]) == 1
    text = cpsgd(*command).stdout
    assert "2,000 rows" in text
    assert "mean.csv" not in text


def test_histogram_of_categories_by_user(cpsgd: Any, people: Path) -> None:
    options = ("--columns", "sex", "--categories", "f,m", "--user", "id", "--rows-per-user", 2)
    cpsgd.succeeds("table histogram", people, *options, *COST, "--out", "h.json")
    found = json.loads(Path("h.json").read_text())
    assert [entry["name"] for entry in found["values"]] == ["f", "m"]
    assert found["unit"] == "user"


def test_picture(cpsgd: Any, people: Path) -> None:
    pytest.importorskip("matplotlib")
    options = ("--columns", "sex", "--categories", "f,m", "--group-by", "smokes=0,1")
    cpsgd.succeeds("table histogram", people, *options, *COST, "--plot", "h.png")
    assert Path("h.png").stat().st_size > 1000


def test_parquet_is_a_table_of_columns(cpsgd: Any, people: Path) -> None:
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.table({"id": np.arange(100), "x": np.arange(100.0)}), "t.parquet")
    cpsgd.refuses("Name the columns", "table mean", "t.parquet", *COST)


def test_named_columns_are_not_averaged_unasked(cpsgd: Any, people: Path) -> None:
    Path("ids.csv").write_text("id,x\n" + "".join(f"{1000000 + i},0.5\n" for i in range(300)))
    for options in (("--epsilon", 1, "--delta", 1e-6), ()):
        for file in ("ids.csv", people):
            cpsgd.refuses("cpsgd table mean", "round mean", file, *options)
            assert not Path("mean.npy").exists()
    # Who says what norm its vectors have means vectors.
    cpsgd.succeeds("round mean", "ids.csv", "--clip-norm", 1)


def test_much_clipping_is_said(cpsgd: Any, people: Path) -> None:
    result = cpsgd.succeeds("table mean", people, "--columns", "age", "--bounds", "age=0:10", *COST)
    assert "Warning: About " in result.stderr
    assert "had values beyond bounds" in result.stderr
    assert "values beyond bounds  " in result.stdout


@pytest.mark.parametrize(
    ("command", "options", "words"),
    [
        ("table mean", ("--columns", "height", "--bounds", "height=0:2"), "no column 'height'"),
        ("table mean", ("--columns", "sex", "--bounds", "sex=0:2"), "'sex'"),
        ("table mean", ("--columns", "age", "--bounds", "age=3"), "LOW:HIGH"),
        ("table mean", ("--columns", "age", "--bounds", "age=0:1,age=0:2"), "each column once"),
        ("table mean", ("--columns", "age", "--bounds", "age=a:b"), "Expected numbers"),
        ("table mean", ("--columns", "age,"), "separated by commas"),
        ("table mean", ("--columns", "age", "--bounds", "age=0:inf"), "finite bound of 'age'"),
        ("table mean", ("--columns", "age", "--bounds", "age=0:100", "--out", "mean.npy"), ".json or .csv"),
        ("table mean", ("--user", "id"), "Name the columns"),
        ("table sum", ("--columns", "age", "--bounds", "age=0:100", "--user", "id"), "rows_per_user"),
        ("table count", (), "number of users"),
        ("table count", ("--columns", "age"), "0 and 1"),
        ("table histogram", ("--columns", "age,sex", "--edges", "0,1"), "one column"),
        ("table quantiles", ("--columns", "age", "--bounds", "age=0:100", "--quantiles", "2"), "quantiles"),
        ("table sum", ("--columns", "age", "--bounds", "age=0:100", "--group-by", "sex=f;id"), "--group-by"),
        ("table sum", ("--columns", "age", "--bounds", "age=0:100", "--group-by", "sex=f;sex=m"), "each column once"),
    ],
)
def test_bad_input_writes_and_charges_nothing(
    cpsgd: Any, people: Path, command: str, options: tuple[str, ...], words: str
) -> None:
    cpsgd.succeeds("budget", "create", "b.ledger", "--population", "p", "--epsilon", 4, "--delta", 1e-6)
    out = () if "--out" in options else ("--out", "out.json")
    before = Path("b.ledger").read_bytes()
    result = cpsgd(command, people, *COST, *options, *out, "--ledger", "b.ledger", "--population", "p")
    assert result.exit_code == 2, result.stdout
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert not Path("out.json").exists()
    assert not Path("mean.npy").exists()
    assert Path("b.ledger").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "body", "words"),
    [
        ("t.csv", "", "is empty"),
        ("t.csv", "id,x\n", "is empty"),
        ("t.csv", GOOD + "0,nan\n", "NaN"),
        ("t.csv", GOOD + "0,inf\n", "infinite"),
        ("t.csv", "id,x\n1,2\n2,\n", "missing values; say what they count as"),
        ("t.csv", GOOD + "0,two\n", "not of numbers"),
        ("t.csv", "id,x\n1,2\n1,3\n", "one user only"),
        ("t.csv", "id,x\n1,2\n2\n", "row 3: 1 cells"),
        ("t.parquet", "PAR1 17 not really", "Parquet"),
        ("t.csv.gz", "17 not really", "not a readable text file"),
        ("t.tsv", "x\n1\n2\n", "no column 'id'"),
        ("t.xlsx", "17", "expected a file ending in"),
    ],
)
def test_bad_files_write_and_charge_nothing(cpsgd: Any, name: str, body: str, words: str) -> None:
    Path(name).write_text(body)
    cpsgd.succeeds("budget", "create", "b.ledger", "--population", "p", "--epsilon", 4, "--delta", 1e-6)
    before = Path("b.ledger").read_bytes()
    options = ("--columns", "x", "--bounds", "x=0:9", "--user", "id", "--ledger", "b.ledger", "--population", "p")
    result = cpsgd("table mean", name, *COST, *options, "--out", "out.json")
    assert result.exit_code == 2, result.stdout
    assert words in result.stderr
    assert result.stderr.count("\n") == 1
    assert "17" not in result.stderr
    assert "two" not in result.stderr.replace("two columns", "")
    assert not Path("out.json").exists()
    assert Path("b.ledger").read_bytes() == before


def test_the_ledger_is_charged(cpsgd: Any, people: Path) -> None:
    cpsgd("budget", "create", "b.ledger", "--population", "p", "--epsilon", 1.2, "--delta", 1e-6)
    options = ("--columns", "smokes", *COST, "--ledger", "b.ledger", "--population", "p")
    cpsgd.succeeds("table count", people, *options)
    cpsgd.refuses("is left", "table count", people, *options, "--out", "second.json")
    assert not Path("second.json").exists()


def test_labels_do_not_run_into_numbers(cpsgd: Any) -> None:
    rows = "".join(
        f"{country},{i % 90}\n" for i in range(300) for country in ("Deutschland", "日本", "Fürstentum Liechtenstein")
    )
    Path("c.csv").write_text("country,age\n" + rows)
    groups = "country=Deutschland,日本,Fürstentum Liechtenstein"
    text = cpsgd.succeeds(
        "mean", "c.csv", "--columns", "age", "--bounds", "age=0:100", "--group-by", groups, *COST
    ).stdout
    for label in ("Deutschland · age", "日本 · age", "Fürstentum Liechtenstein · age"):
        (line,) = [line for line in text.splitlines() if line.startswith(label)]
        assert line.removeprefix(label).startswith("  ")


def test_missing_values_and_groups_that_are_found(cpsgd: Any) -> None:
    rows = "".join(f"{'ab'[i % 2]},{i % 3},{'' if i % 4 == 0 else i % 90}\n" for i in range(3000))
    Path("c.csv").write_text("g,h,age\n" + rows)
    options = ("--columns", "age", "--bounds", "age=0:100", "--missing", "drop", *COST)
    cpsgd.refuses("missing", "mean", "c.csv", *options[:4], *COST)
    (found,) = cpsgd.json("mean", "c.csv", *options)["values"]
    assert abs(found["value"] - 44.5) < 3.0
    both = cpsgd.json("count", "c.csv", "--group-by", "g;h", *COST)
    assert both["group_by"] == ["g", "h"]
    assert len(both["values"]) == 6
    hidden = cpsgd.json("mean", "c.csv", *options, "--neighbours", "add-remove")
    assert hidden["users"] is None


def test_a_budget_speaks_of_the_questions_that_were_asked(cpsgd: Any, people: Path) -> None:
    charged = ("--ledger", "b.ledger", "--population", "people")
    cpsgd.succeeds("budget create", "b.ledger", "--population", "people", "--epsilon", 4, "--delta", 1e-6)
    asked = ("mean age=0:100", "count smokes", "histogram sex in f,m", "sum age=0:100")
    cpsgd.succeeds("table report", people, *asked, "--epsilon", 1, *charged)
    shown = " ".join(cpsgd.succeeds("budget show", "b.ledger").stdout.split())
    assert "statistics report of 4 questions (7 sums with noise)" in shown
    assert "rounds 7" not in shown
    for _ in range(2):
        cpsgd.succeeds("table mean", people, "--columns", "age", "--bounds", "age=0:100", "--epsilon", 0.5, *charged)
    shown = " ".join(cpsgd.succeeds("budget show", "b.ledger").stdout.split())
    assert "report of 4 questions, 2 × mean (11 sums with noise)" in shown
