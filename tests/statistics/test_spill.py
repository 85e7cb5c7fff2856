"""Tables in files that are larger than memory: split by user, with the sums of the whole table."""

from __future__ import annotations

import tempfile
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.statistics import Mean, Sum, prepare, spill
from cpsgd.statistics.users import users_of
from cpsgd.tables import open_table


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Splits tables of more than a few rows; returns where to."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(spill, "_CELLS", 100)
    monkeypatch.setattr("cpsgd._table_memory.CHUNK_ROWS", 64)
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def written(tmp_path: Path, ids: Any) -> tuple[Path, dict[str, Any]]:
    """Writes three Parquet files of rows in random order."""
    import pyarrow
    from pyarrow import parquet

    generator = np.random.default_rng(0)
    table = {"id": ids, "age": generator.integers(-5, 120, len(ids)).astype(float)}
    folder = tmp_path / "table"
    folder.mkdir()
    arrow = pyarrow.table({"id": pyarrow.array(list(ids)), "age": table["age"]})
    for number in range(3):
        parquet.write_table(arrow.slice(number * 200, 200), folder / f"part-{number}.parquet")
    return folder, table


USERS = np.random.default_rng(1).integers(0, 150, 600)
WAYS: list[Any] = [str, lambda n: f" {n}", lambda n: f"{n}.0"]


@pytest.mark.parametrize(
    "ids",
    [
        USERS.tolist(),
        (USERS / 4).tolist(),
        (USERS % 2 == 0).tolist(),
        [WAYS[i % 3](user) for i, user in enumerate(USERS.tolist())],
        [date(2026, 1, 1) + timedelta(int(user)) for user in USERS],
    ],
    ids=["integers", "floats", "truth", "texts", "dates"],
)
@pytest.mark.parametrize("question", [Mean({"age": (0, 100)}), Sum({"age": (0, 100)}, rows=2)])
def test_sums_are_those_of_memory(tmp_path: Path, small: Path, ids: list[Any], question: Any) -> None:
    folder, table = written(tmp_path, ids)
    job = prepare(question, user="id", epsilon=1.0).job
    found, expected = job.partial(folder), job.partial(table | {"id": np.array(ids)})
    assert found.users == expected.users
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(found.sums, expected.sums, strict=True))
    assert list(small.iterdir()) == []


def test_a_user_is_one_although_some_rows_have_none(tmp_path: Path, small: Path) -> None:
    # Arrow would give floats for the chunks with a missing id, and integers for the others.
    ids: list[int | None] = (USERS + 2**53 + 1).tolist()
    ids[300] = None
    folder, _ = written(tmp_path, ids)
    chunks = open_table(folder).chunks(["id"])
    assert {chunk["id"].dtype.kind for chunk in chunks} == {"i", "O"}
    places: dict[float, set[int]] = {}
    for chunk in open_table(folder).chunks(["id"]):
        for user, part in zip(chunk["id"].astype(float), spill.parts_of("id", chunk["id"]), strict=True):
            places.setdefault(user, set()).add(int(part))
    assert all(len(parts) == 1 for user, parts in places.items() if user == user)
    job = prepare(Mean({"age": (0, 100)}, missing="drop"), user="id", epsilon=1.0).job
    assert job.partial(folder).users == len(set(ids)) - 1


def test_parts_are_small_and_private_and_go_after_an_error(tmp_path: Path, small: Path) -> None:
    folder, _ = written(tmp_path, USERS.tolist())
    sizes = []
    for number, held in enumerate(spill.whole_users(open_table(folder), "id", ["age"])):
        if number == 0:
            (made,) = small.iterdir()
            assert made.stat().st_mode & 0o077 == 0
        sizes.append(len(held["id"]))
    assert sum(sizes) == 600
    assert max(sizes) < 100
    users = users_of(open_table(folder), "id", ["age"])
    next(users)
    users.close()  # type: ignore[attr-defined]
    assert list(small.iterdir()) == []


def test_tables_in_memory_are_never_written(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "TemporaryDirectory", None)
    job = prepare(Mean({"age": (0, 100)}), user="id", epsilon=1.0).job
    assert job.partial({"id": USERS, "age": USERS}).users == len(set(USERS.tolist()))
