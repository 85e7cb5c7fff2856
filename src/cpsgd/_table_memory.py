"""Tables in memory: arrays, mappings of columns, lists of rows, and frames of pandas and polars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cpsgd._table_values import REMEDY, Chunk, Column, are_large, join
from cpsgd.errors import ColumnError, ParameterError, TableError

CHUNK_ROWS = 1 << 16
"""Rows that are held at a time."""


@dataclass(frozen=True, eq=False)
class DataTable:
    """Named columns of equal length.

    Attributes:
        title: Name of the table in messages.
        names: Names of the columns.
        count: Returns the number of rows. Text files are read once for it.
        read: Yields chunks of the given columns, which exist.
        in_memory: Whether the rows are in memory already.
    """

    title: str
    names: tuple[str, ...]
    count: Callable[[], int]
    read: Callable[[Sequence[str]], Iterator[Chunk]]
    in_memory: bool = False

    def __post_init__(self) -> None:
        if len(set(self.names)) < len(self.names):
            raise TableError(f"{self.title} has two columns of one name; rename one.")

    @cached_property
    def rows(self) -> int:
        """Number of rows."""
        return self.count()

    def chunks(self, columns: Iterable[str]) -> Iterator[Chunk]:
        """Yields these columns, at most `CHUNK_ROWS` rows at a time, in order.

        Raises:
            ColumnError: A column is missing.
            TableError: The table is empty or cannot be read; as soon as the first chunk is asked for.
        """
        asked = tuple(dict.fromkeys(columns))
        if not asked:
            raise ParameterError("Expected the name of at least one column.")
        for name in asked:
            if name not in self.names:
                known = ", ".join(self.names[:20]) + (", …" if len(self.names) > 20 else "")
                raise ColumnError(f"{self.title} has no column {name!r}; it has {known or 'none'}.")
        return self._filled(self.read(asked))

    def _filled(self, chunks: Iterator[Chunk]) -> Iterator[Chunk]:
        first = next(chunks, None)
        if first is None:
            raise TableError(f"{self.title} is empty.")
        yield first
        yield from chunks

    def columns(self, columns: Iterable[str]) -> Chunk:
        """Returns whole columns in memory; raises the errors of `chunks`."""
        found: dict[str, list[Column]] = {}
        for chunk in self.chunks(columns):
            for name, column in chunk.items():
                found.setdefault(name, []).append(column)
        # One column at a time, so that only one of them is there twice.
        return {name: join(found.pop(name)) for name in list(found)}


def of_columns(title: str, columns: Mapping[str, Column]) -> DataTable:
    """Returns the table of columns in memory."""
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise TableError(f"{title} has columns of different lengths.")
    rows = lengths.pop() if lengths else 0

    def read(names: Sequence[str]) -> Iterator[Chunk]:
        for start in range(0, rows, CHUNK_ROWS):
            yield {name: columns[name][start : start + CHUNK_ROWS] for name in names}

    return DataTable(title, tuple(columns), lambda: rows, read, in_memory=True)


def unmasked(what: str, values: Any) -> Any:
    """Refuses masked arrays: NumPy drops the mask in a conversion, and hidden values would count."""
    if np.ma.is_masked(values):
        raise ColumnError(f"{what} has masked values; make them NaN, and {REMEDY}.")
    return values


def check_single(name: str, kind: str) -> None:
    """Refuses a column whose type, as Arrow or polars write it, is of several values in a cell.

    With missing values allowed each of them would be one that is missing.
    """
    if kind.lower().startswith(("list", "large_list", "fixed_size_list", "array", "struct", "map")):
        raise ColumnError(f"Column {name!r} is not of single values.")


def as_array(name: str, column: Any) -> Column:
    """Returns a column as an array, without silent conversions that could merge values."""
    column = unmasked(f"Column {name!r}", column)
    if hasattr(column, "to_numpy"):
        kind, given = str(getattr(column, "dtype", getattr(column, "type", ""))).lower(), column
        check_single(name, kind)
        # NumPy has no whole numbers of 128 bits.
        column = column.to_list() if kind in ("int128", "uint128") else column.to_numpy()
        if (
            not isinstance(column, list)
            and column.dtype.kind == "f"
            and kind.startswith(("int", "uint"))
            and are_large(column)
        ):
            entries = given.to_pylist() if hasattr(given, "to_pylist") else given.to_list()
            column = [entry if isinstance(entry, int) else None for entry in entries]
    kinds = {type(entry) for entry in column} if isinstance(column, list | tuple) else set()
    try:
        array = np.asarray(column)
        # NumPy would turn numbers among text into text, and large whole numbers into floats, and cut zeros off texts:
        # two users could be one, and one value could change what all others are.
        mixed = len(kinds) > 1 and not all(issubclass(kind, int | float | np.integer) for kind in kinds)
        whole = array.dtype.kind == "f" and any(issubclass(kind, int | np.integer) for kind in kinds)
        if mixed or (kinds and array.dtype.kind in "US") or (whole and are_large(array)):
            array = np.empty(len(column), dtype=object)
            array[:] = column
    except ValueError:
        raise ColumnError(f"Column {name!r} is not of single values.") from None
    if array.ndim != 1:
        raise ColumnError(f"Expected column {name!r} to have one dimension, got an array of shape {array.shape}.")
    return array


def of_rows(rows: Sequence[Mapping[object, object]]) -> DataTable:
    """Returns the table of mappings, one per row; a name that a row lacks is a missing value."""
    names = dict.fromkeys(str(name) for row in rows for name in row)
    columns = {name: [{str(key): value for key, value in row.items()}.get(name) for row in rows] for name in names}
    return of_columns("The table", {name: as_array(name, column) for name, column in columns.items()})


def of_array(title: str, source: ArrayLike) -> DataTable:
    """Returns the table of an array."""
    try:
        array = np.asarray(source)
    except ValueError:
        raise TableError(f"{title} has rows of different lengths.") from None
    changed = array.dtype.kind in "US" or (array.dtype.kind == "f" and are_large(array))
    if changed and not isinstance(source, np.ndarray):  # see `as_array`
        array = np.array(source, dtype=object)
    if array.dtype.names:
        return of_columns(title, {name: as_array(name, array[name]) for name in array.dtype.names})
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise TableError(f"{title}: expected two dimensions, rows and columns, got a shape of {array.shape}.")
    return of_columns(title, {str(i): array[:, i] for i in range(array.shape[1])})


def of_frame(source: Any) -> DataTable:
    """Returns the table of a frame of pandas or polars."""
    import narwhals
    from narwhals.exceptions import DuplicateError

    if hasattr(source, "collect"):
        raise TableError(f"Expected a table, got {type(source).__name__}: collect() it first.")
    try:
        frame = narwhals.from_native(source, eager_only=True)
    except DuplicateError:
        raise TableError("The frame has two columns of one name; rename one.") from None
    except TypeError:
        raise TableError(
            "Expected a table: an array, a mapping of columns, a frame of pandas or polars, a pyarrow table, a file or "
            f"a folder, got {type(source).__name__}."
        ) from None
    keys = {str(name): name for name in frame.columns}

    def read(names: Sequence[str]) -> Iterator[Chunk]:
        columns = {name: as_array(name, frame.get_column(keys[name])) for name in names}
        return of_columns("The frame", columns).read(names)

    return DataTable("The frame", tuple(map(str, frame.columns)), lambda: len(frame), read, in_memory=True)
