"""Reading columns: all sources alike, all damage refused."""

from __future__ import annotations

import gzip
import math
import subprocess
import sys
from datetime import UTC, date, datetime, timedelta, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import polars
import pyarrow
import pytest
from pyarrow import csv, feather, parquet

from cpsgd import tables
from cpsgd.errors import ColumnError, ParameterError, TableError
from cpsgd.tables import labels, maybe_numbers, numbers, open_table, text_of

AGES = [41.0, 17.5, 63.0, 8.0, 29.0]
NAMES = ["a", "b", "a", "c", "b"]
LINES = "age,name\n" + "".join(f"{age},{name}\n" for age, name in zip(AGES, NAMES, strict=True))


def sources(folder: Path) -> dict[str, Any]:
    named = {"age": AGES, "name": NAMES}
    table = pyarrow.table(named)
    parquet.write_table(table, folder / "t.parquet", row_group_size=2)
    (folder / "t.csv").write_text("\ufeff" + LINES, encoding="utf-8")
    (folder / "t.tsv").write_text(LINES.replace(",", "\t"))
    (folder / "T.CSV.GZ").write_bytes(gzip.compress(LINES.encode()))
    structured = np.array(list(zip(AGES, NAMES, strict=True)), dtype=[("age", "f8"), ("name", "U1")])
    found: dict[str, Any] = {
        "mapping": named,
        "structured": structured,
        "pandas": pandas.DataFrame(named),
        "polars": polars.DataFrame(named),
        "pyarrow": table,
    }
    feather.write_feather(table, folder / "t.feather")
    for kind in ("parquet", "csv"):
        (folder / kind / "more").mkdir(parents=True)
    parquet.write_table(table[:3], folder / "parquet" / "a.parquet")
    parquet.write_table(table[3:], folder / "parquet" / "more" / "b.parquet")
    (folder / "parquet" / "_SUCCESS").touch()
    (folder / "csv" / "a.csv").write_text(LINES[:22])
    (folder / "csv" / "more" / "b.csv").write_text("age,name\n" + LINES[22:])
    names = ("t.parquet", "t.feather", "t.csv", "t.tsv", "T.CSV.GZ", "parquet", "csv")
    return found | {name: str(folder / name) for name in names}


def test_all_sources_are_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cpsgd._table_memory.CHUNK_ROWS", 2)
    for name, source in sources(tmp_path).items():
        table = open_table(source)
        assert (table.names, table.rows) == (("age", "name"), 5), name
        chunks = list(table.chunks(["name", "age"]))
        assert all(len(chunk["age"]) <= 2 for chunk in chunks), name
        ages = np.concatenate([numbers("age", chunk["age"]) for chunk in chunks])
        assert ages.tolist() == AGES, name
        texts, number = labels("name", np.concatenate([chunk["name"] for chunk in chunks]))
        assert [texts[i] for i in number] == NAMES, name
        assert list(next(iter(table.chunks(["age"])))) == ["age"], name


def test_arrays_have_numbered_columns(tmp_path: Path) -> None:
    np.save(tmp_path / "t.npy", np.arange(6.0).reshape(3, 2))
    for source in (np.arange(6.0).reshape(3, 2), [[0, 1], [2, 3], [4, 5]], tmp_path / "t.npy"):
        table = open_table(source)
        assert (table.names, table.rows) == (("0", "1"), 3)
        assert next(iter(table.chunks(["1"])))["1"].tolist() == [1.0, 3.0, 5.0]


@pytest.mark.parametrize(
    "column",
    [
        [1.0, float("nan")],
        [1.0, float("inf")],
        [1.0, None],
        [1.0, "two"],
        ["one", "two"],
        np.array([1, 2], dtype="datetime64[s]"),
    ],
)
def test_bad_numbers_are_refused(column: Any) -> None:
    with pytest.raises(ColumnError, match="'x'"):
        numbers("x", next(iter(open_table({"x": column}).chunks(["x"])))["x"])


@pytest.mark.parametrize(
    "column",
    [
        ["a", None],
        ["a", 1],
        [1.0, float("nan")],
        [("a",), 1],
        np.array([1.0 + 1j]),
        np.array(["2026-01-01", "NaT"], dtype="datetime64[D]"),
        np.array([float("nan"), 1], dtype=object),
        [Decimal(1), Decimal("NaN")],
    ],
)
def test_bad_labels_are_refused(column: Any) -> None:
    with pytest.raises(ColumnError):
        labels("x", next(iter(open_table({"x": column}).chunks(["x"])))["x"])


@pytest.mark.parametrize("cell", [[1], [2, 3], {"a": 1}])
def test_several_values_in_a_cell_are_refused(cell: Any) -> None:
    """Their type says so: where values may be missing, they would not be taken for missing ones."""
    cells = [cell, cell]
    known = pandas.DataFrame({"x": pandas.Series(cells, dtype=pandas.ArrowDtype(pyarrow.array(cells).type))})
    for source in (pyarrow.table({"x": cells}), {"x": pyarrow.array(cells)}, polars.DataFrame({"x": cells}), known):
        with pytest.raises(ColumnError, match="'x' is not of single values"):
            open_table(source).columns(["x"])


def test_lists_among_objects_are_refused() -> None:
    column = open_table(pandas.DataFrame({"x": [[1], [2, 3]]})).columns(["x"])["x"]
    for read in (labels, numbers):
        with pytest.raises(ColumnError, match="'x'"):
            read("x", column)


def test_masked_values_are_refused() -> None:
    hidden = np.ma.array([1.0, 99.0], mask=[False, True])
    for source in ({"x": hidden}, np.ma.stack([hidden, hidden])):
        with pytest.raises(ColumnError, match="masked"):
            open_table(source)
    assert open_table({"x": np.ma.array([1.0, 2.0])}).rows == 2


def test_nullable_and_categorical_columns(tmp_path: Path) -> None:
    frame = pandas.DataFrame(
        {
            "kind": pandas.Categorical(["a", "b", "a"]),
            "whole": pandas.array([1, 2, 3], dtype="Int64"),
            "gap": pandas.array([1, None, 3], dtype="Int64"),
            "text": pandas.array(["a", None, "b"], dtype="string"),
        }
    )
    frame.to_parquet(tmp_path / "t.parquet")
    for source in (frame, tmp_path / "t.parquet"):
        (chunk,) = open_table(source).chunks(["kind", "whole", "gap", "text"])
        assert labels("kind", chunk["kind"])[0] == ["a", "b"]
        assert numbers("whole", chunk["whole"]).tolist() == [1.0, 2.0, 3.0]
        for name in ("gap", "text"):
            for read in (labels, numbers):
                with pytest.raises(ColumnError):
                    read(name, chunk[name])


LARGE = 2**53 + 1


@pytest.mark.parametrize(
    "made",
    [
        lambda entry: {"x": [LARGE, entry]},
        lambda entry: {"x": [LARGE, math.nan if entry is None else entry]},
        lambda entry: [{"x": LARGE}, {"x": entry}],
        lambda entry: [[LARGE], [0.5 if entry is None else entry]],
        lambda entry: pyarrow.table({"x": pyarrow.array([LARGE, entry])}),
        lambda entry: pyarrow.table({"x": pyarrow.array([LARGE, entry]).dictionary_encode()}),
        lambda entry: {"x": pyarrow.chunked_array([[LARGE, entry]])},
        lambda entry: pyarrow.concat_tables([pyarrow.table({"x": [LARGE]}), pyarrow.table({"x": [7, entry]})]),
        lambda entry: pandas.DataFrame({"x": pandas.array([LARGE, entry], dtype="Int64")}),
        lambda entry: polars.DataFrame({"x": [LARGE, entry]}),
        lambda entry: {"x": ["a\0", None if entry is None else "b"]},
        lambda entry: {"x": [b"a\0", None if entry is None else b"b"]},
        lambda entry: [["a\0"], [None if entry is None else "b"]],
        lambda entry: {"x": [float(LARGE) * 1e8, entry or int(LARGE * 1e8)]},
        lambda entry: {"x": [np.float32(0.1), np.float32(5) if entry else 0.5]},
        lambda entry: pandas.DataFrame({"x": pandas.array(["a\0", None if entry is None else "b"], dtype="string")}),
    ],
)
def test_one_missing_value_does_not_change_what_others_are(made: Any) -> None:
    """As floats, large whole numbers would be other categories for everybody; as texts of NumPy, zeros would go."""
    first = []
    for entry in (5, None):
        table = open_table(made(entry))
        texts, number = labels("x", table.columns(table.names)[table.names[0]], missing=True)
        first.append(texts[number[0]])
    assert first[0] == first[1]
    assert first[0] not in (str(LARGE - 1), "a")


def test_equal_times_are_not_named_by_the_first() -> None:
    noon = datetime(2026, 1, 1, 12, tzinfo=UTC)
    texts, number = labels("x", np.array([noon.astimezone(timezone(timedelta(hours=1))), noon], dtype=object))
    assert (texts, number.tolist()) == (["2026-01-01T12:00:00"], [0, 0])


def test_names_must_differ() -> None:
    twice = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    for source in (twice, pandas.DataFrame([[1, 2]], columns=["a", "a"])):
        with pytest.raises(TableError, match="one name"):
            open_table(source)


def test_structured_arrays_have_single_values() -> None:
    with pytest.raises(ColumnError, match="one dimension"):
        open_table(np.zeros(4, dtype=[("x", "f8", 2)]))


def test_whole_numbers_of_128_bits() -> None:
    frame = polars.DataFrame({"x": polars.Series([7, 2**70 + 1, None], dtype=polars.Int128)})
    column = open_table(frame).columns(["x"])["x"]
    assert column.tolist() == [7, 2**70 + 1, None]
    assert labels("x", column, missing=True)[0] == ["7", str(2**70 + 1)]


def test_a_lazy_frame_is_to_be_collected() -> None:
    with pytest.raises(TableError, match=r"collect\(\)"):
        open_table(polars.LazyFrame({"a": [1]}))


def test_blanks_around_cells_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("id, sex\n7, f\n7 , f\n 7,m\n")
    (chunk,) = open_table(path).chunks(["id", "sex"])
    assert labels("id", chunk["id"])[0] == ["7"]
    assert labels("sex", chunk["sex"])[0] == ["f", "m"]


def test_blanks_in_frames_do_not_make_two_users_of_one(tmp_path: Path) -> None:
    frame = pandas.DataFrame({"id": ["a", "b", "a ", " a"]})
    frame.to_parquet(tmp_path / "t.parquet")
    for source in (frame, tmp_path / "t.parquet", {"id": [b"a", b"b", b"a ", b" a"]}):
        (chunk,) = open_table(source).chunks(["id"])
        texts, number = labels("id", chunk["id"])
        assert [texts[i] for i in number] == ["a", "b", "a", "a"]
    assert len(labels("id", np.array([b"\xff", b"\xfe"]))[0]) == 2


def test_one_person_is_one_user_however_the_id_is_written(tmp_path: Path) -> None:
    """A CSV and the same table in memory have the same users: as two, one person would have twice the ε."""
    (tmp_path / "t.csv").write_text("id\n1\n1.0\n2\n2.0\n")
    ids = [1, 1.0, 2, 2.0]
    texts = {"id": ["1", "1.0", " 2", "+2e0"]}
    for source in (
        tmp_path / "t.csv",
        {"id": ids},
        pandas.DataFrame({"id": ids}),
        texts,
        {"id": np.array(ids, object)},
    ):
        assert len(labels("id", open_table(source).columns(["id"])["id"])[0]) == 2
    alike = ["0.5", ".5", "-0", "12345678901234567.0", "1e300", "1e99999999999", "007", "1_000", "1e-7"]
    written = ["0.5", "0.5", "0", "12345678901234567", "1e300", "1e99999999999", "007", "1_000", "0.0000001"]
    assert [text_of(text) for text in alike] == [text if text != "1e300" else "1" + "0" * 300 for text in written]
    assert text_of(1e-7) == "0.0000001"
    assert text_of(1e22) == text_of("1e22") == text_of(10**22)


def test_a_time_is_one_text_whatever_its_unit_and_type() -> None:
    early, half = pandas.Timestamp("2026-01-01 08:30:00.5"), datetime(2026, 1, 1, 8, 30, 0, 500000)
    ways = [half, early, *(np.datetime64(half, unit) for unit in ("ms", "us", "ns")), early.tz_localize("UTC")]
    ways.append(early.tz_localize("UTC").tz_convert("Asia/Tokyo"))
    assert {text_of(way) for way in ways} == {"2026-01-01T08:30:00.5"}
    midnights = [date(2026, 1, 1), datetime(2026, 1, 1), np.datetime64("2026-01-01"), np.datetime64("2026-01-01", "us")]
    assert {text_of(way) for way in midnights} == {"2026-01-01"}
    for text, units in (("2026-01-01", "YMDhms"), ("2026-01-01T08:00:00", "hms")):
        assert {text_of(np.array(text, f"datetime64[{unit}]")[()]) for unit in units} == {text}
    assert text_of(datetime(2026, 1, 1, 0, 0, 10)) == "2026-01-01T00:00:10"


def test_folders_that_are_no_table_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="the folder is empty"):
        open_table(tmp_path)
    (tmp_path / "a.csv").write_text(LINES)
    (tmp_path / "b.tsv").write_text(LINES)
    with pytest.raises(ParameterError, match="a folder of files of one kind"):
        open_table(tmp_path)
    (tmp_path / "b.tsv").rename(tmp_path / "b.csv")
    (tmp_path / "b.csv").write_text("age\n1\n")
    with pytest.raises(TableError, match="different columns"):
        open_table(tmp_path)


def test_names_of_folders_are_columns(tmp_path: Path) -> None:
    for year in (2025, 2026):
        (tmp_path / f"year={year}").mkdir()
        parquet.write_table(pyarrow.table({"x": [year / 2.0]}), tmp_path / f"year={year}" / "part.parquet")
    columns = open_table(tmp_path).columns(["year", "x"])
    assert numbers("year", columns["year"]).tolist() == [2025.0, 2026.0]
    assert numbers("x", columns["x"]).tolist() == [1012.5, 1013.0]


@pytest.mark.parametrize("other", ["08", "unknown", "__HIVE_DEFAULT_PARTITION__"])
def test_a_folder_does_not_change_the_names_of_others(tmp_path: Path, other: str) -> None:
    """As numbers where all of them are, one person's folder would move everybody from month 07 to month 7."""
    for month in ("07", other):
        (tmp_path / f"the%20month={month}").mkdir()
        parquet.write_table(pyarrow.table({"x": [1.0]}), tmp_path / f"the%20month={month}" / "part.parquet")
    assert labels("", open_table(tmp_path).columns(["the month"])["the month"], missing=True)[0][0] == "07"


def parts(folder: Path, *tables: Any) -> Path:
    for i, table in enumerate(tables):
        parquet.write_table(pyarrow.table(table), folder / f"part-{i}.parquet")
    return folder


@pytest.mark.parametrize("order", [1, -1])
def test_files_of_a_folder_may_have_other_types(tmp_path: Path, order: int) -> None:
    """The first file's columns and types are not everybody's."""
    times = [pyarrow.array([0], pyarrow.timestamp(unit)) for unit in ("ms", "us")]
    words = [pyarrow.array(["a"]).dictionary_encode(), pyarrow.array(["a"])]
    first = {"x": pyarrow.array([40], pyarrow.int32()), "none": pyarrow.nulls(1), "time": times[0], "word": words[0]}
    second = {"x": [40.7], "none": ["here"], "time": times[1], "word": words[1], "more": [1.0]}
    columns = open_table(parts(tmp_path, *[first, second][::order])).columns(["x", "none", "time", "word", "more"])
    assert numbers("x", columns["x"])[::order].tolist() == [40.0, 40.7]
    assert columns["none"][::order].tolist() == [None, "here"]
    assert labels("time", columns["time"])[0] == ["1970-01-01"]
    assert labels("word", columns["word"])[0] == ["a"]
    assert maybe_numbers("more", columns["more"])[1][::order].tolist() == [False, True]


@pytest.mark.parametrize("order", [1, -1])
def test_types_that_do_not_go_together_are_named(tmp_path: Path, order: int) -> None:
    """By pyarrow the text "007" would be the user 7 after a file of numbers, and itself before it."""
    folder = parts(tmp_path, *[{"user": [7]}, {"user": ["007"]}][::order])
    with pytest.raises(TableError, match=r"different types of the column .user., (int64 and string|string and int64)"):
        open_table(folder)


def test_numbers_that_another_files_type_cannot_hold(tmp_path: Path) -> None:
    table = open_table(parts(tmp_path, {"user": [0.5]}, {"user": [2**60 + 1]}))
    with pytest.raises(TableError, match="too large for the type of another file"):
        table.columns(["user"])


def test_columns_that_are_there_twice_are_named(tmp_path: Path) -> None:
    (tmp_path / "x=1").mkdir()
    folder = parts(tmp_path / "x=1", {"x": [1]})
    with pytest.raises(TableError, match="in its files and in the names of its folders"):
        open_table(tmp_path)
    twice = pyarrow.table([pyarrow.array([1]), pyarrow.array([2])], names=["a", "a"])
    parquet.write_table(twice, folder / "part-0.parquet")
    with pytest.raises(TableError, match="two columns of one name"):
        open_table(folder / "part-0.parquet")


def test_bad_patterns_are_refused(tmp_path: Path) -> None:
    with pytest.raises((ParameterError, TableError)):
        open_table(tmp_path / "a**" / "b.csv")


def test_patterns_of_paths_are_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for year, part in [("2025", "part-0"), ("2026", "part-0"), ("2026", "part-1"), ("2026", "other")]:
        (tmp_path / f"year={year}").mkdir(exist_ok=True)
        parquet.write_table(pyarrow.table({"age": [len(part)]}), tmp_path / f"year={year}" / f"{part}.parquet")
    table = open_table(f"{tmp_path}/year=*/part-*.parquet")
    assert (table.names, table.rows) == (("age", "year"), 3)
    assert table.columns(["year"])["year"].tolist() == ["2025", "2026", "2026"]
    assert open_table(tmp_path / "year=2026" / "part-?.parquet").names == ("age",)
    monkeypatch.chdir(tmp_path)
    assert open_table("year=*/part-*.parquet").columns(["year"])["year"].tolist() == ["2025", "2026", "2026"]
    assert open_table("**/part-*.parquet").rows == 3
    with pytest.raises(TableError, match="no file has such a name"):
        open_table(tmp_path / "year=2026" / "part-*.csv")
    (tmp_path / "year=2026" / "part-2.csv").write_text("age\n1\n")
    with pytest.raises(ParameterError, match="expected files of one kind"):
        open_table(tmp_path / "year=2026" / "part-*")
    # A name that exists is no pattern.
    (tmp_path / "a[1].csv").write_text("age\n1\n")
    assert open_table(tmp_path / "a[1].csv").rows == 1


@pytest.mark.parametrize("kind", ["csv", "parquet"])
def test_files_are_never_in_memory_whole(tmp_path: Path, kind: str) -> None:
    table = pyarrow.table({name: np.random.default_rng(0).normal(size=500_000) for name in "abcdefgh"})
    path = tmp_path / f"t.{kind}"
    if kind == "csv":
        csv.write_csv(table, path)
    else:
        parquet.write_table(table, path, row_group_size=20_000)
    pool = pyarrow.default_memory_pool()
    del table
    before, most = pool.bytes_allocated(), 0
    for chunk in open_table(path).chunks("abcdefgh"):
        most = max(most, pool.bytes_allocated() - before)
        assert len(chunk["a"]) <= tables.CHUNK_ROWS
    # 32 MB of numbers, 75 MB of text, of which pyarrow reads some blocks ahead.
    assert most < {"csv": 50, "parquet": 10}[kind] * 2**20


def test_files_without_pyarrow_name_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    for name in ("t.csv", "t.parquet"):
        (tmp_path / name).write_text(LINES)
        with pytest.raises(TableError, match=r"pip install cpsgd\[tables\]"):
            open_table(tmp_path / name)
    assert open_table({"x": [1]}).rows == 1


def test_categories_are_texts() -> None:
    for column in ([1, 2], [1.0, 2.0], ["1", "2"]):
        assert labels("x", np.array(column))[0] == ["1", "2"]
    assert labels("x", np.array([False, True]))[0] == ["0", "1"]
    assert labels("x", np.array([b"f", b"m"]))[0] == ["f", "m"]
    assert labels("x", np.array([0.1, 0.5], dtype=np.float32))[0] == ["0.1", "0.5"]


@pytest.mark.parametrize(
    ("name", "body", "error"),
    [
        ("damaged.parquet", b"PAR1 not really", TableError),
        ("empty.parquet", b"", TableError),
        ("damaged.csv.gz", b"\x1f\x8b\x08 no", TableError),
        ("binary.csv", b"a,b\n\xff\xfe\n", TableError),
        ("empty.csv", b"", TableError),
        ("header.csv", b"a,b\n", TableError),
        ("ragged.csv", b"a,b\n1,2\n1\n", TableError),
        ("unnamed.csv", b"1,2\n3,4\n", TableError),
        ("twice.csv", b"a,a\n3,4\n", TableError),
        ("long.csv", b"a,b\n1,2\n" + b"3" * (3 << 20) + b",4\n", TableError),
        ("damaged.npy", b"\x93NUMPY", TableError),
        ("table.xlsx", b"", ParameterError),
    ],
)
def test_bad_files_are_refused(tmp_path: Path, name: str, body: bytes, error: type[Exception]) -> None:
    (tmp_path / name).write_bytes(body)
    with pytest.raises(error):
        list(open_table(tmp_path / name).chunks(["a", "b"]))


def test_truncated_parquet_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    parquet.write_table(pyarrow.table({"a": np.random.default_rng(0).normal(size=1000)}), path, compression="gzip")
    body = bytearray(path.read_bytes())
    body[20:200] = bytes(180)
    path.write_bytes(body)
    with pytest.raises(TableError, match="readable Parquet"):
        list(open_table(path).chunks(["a"]))


def test_missing_files_columns_and_tables() -> None:
    with pytest.raises(FileNotFoundError):
        open_table("nowhere.parquet")
    with pytest.raises(ColumnError, match="no column 'height'; it has age"):
        open_table({"age": [1]}).chunks(["height"])
    with pytest.raises(TableError, match="empty"):
        list(open_table({"age": []}).chunks(["age"]))
    with pytest.raises(TableError, match="different lengths"):
        open_table({"a": [1], "b": [1, 2]})
    for strange in (3, object(), np.zeros((2, 2, 2))):
        with pytest.raises(TableError):
            open_table(strange)


def test_frames_are_never_imported() -> None:
    script = (
        "import sys, cpsgd.statistics as s\n"
        "s.Mean({'a': (0, 1)}).vector({'a': 0.5})\n"
        "sys.exit(bool({'pandas', 'polars', 'pyarrow'} & sys.modules.keys()))\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_empty_cells_are_missing_values(tmp_path: Path) -> None:
    (tmp_path / "gap.csv").write_text("a,b\n1,x\n,y\n3,\n")
    chunk = open_table(tmp_path / "gap.csv").columns(["a", "b"])
    with pytest.raises(ColumnError, match="missing='drop'"):
        numbers("a", chunk["a"])
    with pytest.raises(ColumnError, match="missing='drop'"):
        labels("b", chunk["b"])
    values, there = maybe_numbers("a", chunk["a"])
    assert (values.tolist(), there.tolist()) == ([1.0, 0.0, 3.0], [True, False, True])
    texts, number = labels("b", chunk["b"], missing=True)
    assert [texts[i] if i >= 0 else None for i in number] == ["x", "y", None]


def test_lists_of_mappings_are_tables() -> None:
    table = open_table([{"age": 41, "sex": "f"}, {"sex": "m"}])
    assert (table.names, table.rows) == (("age", "sex"), 2)
    assert maybe_numbers("age", table.columns(["age"])["age"])[1].tolist() == [True, False]
