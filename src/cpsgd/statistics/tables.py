"""Tables from whatever holds one: arrays, mappings, frames, Arrow tables and files.

Files are never in memory whole (.npy is mapped). pandas and polars are never imported; whatever has `columns` and can
be indexed by them is a frame. Parquet and Arrow tables need pyarrow (`cpsgd[tables]`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from cpsgd.errors import ColumnError, ParameterError, TableError
from cpsgd.statistics import columns as limits
from cpsgd.statistics.columns import Chunk, Column, DataTable, different
from cpsgd.statistics.streams import ArrowTable, ParquetTable, TextTable

FILES = (".npy", ".csv", ".csv.gz", ".tsv", ".parquet")
"""Suffixes of files that are read."""


def open_table(source: object) -> DataTable:
    """A table from whatever holds one.

    Args:
        source: A table of two dimensions (its columns are named "0", "1", ...), a structured array, a mapping of names
            to columns, a pandas or polars frame, a pyarrow table, or the path of a file.

    Raises:
        TableError: It is no table, or the file cannot be read as one.
        ParameterError: The file's suffix is of no known kind.

    Example:
        >>> table = open_table({"age": [41, 17], "sex": ["f", "m"]})
        >>> table.names, table.rows
        (('age', 'sex'), 2)
    """
    if isinstance(source, DataTable):
        return source
    if isinstance(source, str | Path):
        return _open_file(Path(source))
    if isinstance(source, Mapping):
        return _Columns({str(name): _array(str(name), column) for name, column in source.items()}, "The table")
    if isinstance(source, np.ndarray | list | tuple):
        return _of_array(_unmasked("The array", source), "The array")
    if hasattr(source, "column_names") and hasattr(source, "to_batches"):
        return ArrowTable(source)
    if hasattr(source, "collect"):
        raise TableError(f"Expected a table, got {type(source).__name__}: collect() it first.")
    if hasattr(source, "columns") and hasattr(source, "__getitem__"):
        return _Frame(source)
    raise TableError(
        f"Expected a table: an array, a mapping of columns, a pandas or polars frame, a pyarrow table or a file, got "
        f"{type(source).__name__}."
    )


class _Columns(DataTable):
    """Columns in memory, or mapped from a file."""

    def __init__(self, columns: Mapping[str, Column], title: str) -> None:
        self.title = title
        self.names = tuple(columns)
        self._columns = columns
        lengths = {len(column) for column in columns.values()}
        if len(lengths) > 1:
            raise TableError(f"{title} has columns of different lengths.")
        self._rows = lengths.pop() if lengths else 0

    @property
    def rows(self) -> int:
        return self._rows

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        for start in range(0, self._rows, limits.CHUNK_ROWS):
            yield {name: self._columns[name][start : start + limits.CHUNK_ROWS] for name in columns}


class _Frame(DataTable):
    """A pandas or polars frame; columns become arrays when they are asked for."""

    def __init__(self, frame: Any) -> None:
        self.title = "The frame"
        self.names = different(frame.columns, self.title)
        self._frame, self._keys = frame, dict(zip(self.names, frame.columns, strict=True))

    @property
    def rows(self) -> int:
        return len(self._frame)

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        found = {name: _array(name, self._frame[self._keys[name]]) for name in columns}
        return _Columns(found, self.title).chunks(columns)


def _unmasked(what: str, values: Any) -> Any:
    # NumPy forgets a mask on the way to an array, and what is under it would count.
    if np.ma.is_masked(values):
        raise ColumnError(f"{what} has masked values; fill them in or drop their rows.")
    return values


def _array(name: str, column: Any) -> Column:
    column = _unmasked(f"Column {name!r}", column)
    if hasattr(column, "to_numpy"):
        column = column.to_numpy()
    elif isinstance(column, list | tuple):
        # NumPy would turn numbers among text into text.
        kinds = {type(entry) for entry in column}
        if len(kinds) > 1 and not all(issubclass(kind, int | float | np.number) for kind in kinds):
            found = np.empty(len(column), dtype=object)
            found[:] = column
            return found
    try:
        array = np.asarray(column)
        if array.dtype.kind == "f" and isinstance(column, list | tuple) and all(isinstance(e, int) for e in column):
            # Whole numbers that no integer type of NumPy holds together: as floats, two users could be one.
            array = np.asarray(column, dtype=object)
    except ValueError:
        raise ColumnError(f"Column {name!r} is not of single values.") from None
    if array.ndim != 1:
        raise ColumnError(f"Expected column {name!r} to have one dimension, got an array of shape {array.shape}.")
    return array


def _of_array(source: ArrayLike, title: str) -> DataTable:
    try:
        array = np.asarray(source)
    except ValueError:
        raise TableError(f"{title} has rows of different lengths.") from None
    if array.dtype.names:
        return _Columns({name: array[name] for name in array.dtype.names}, title)
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise TableError(f"{title}: expected two dimensions, rows and columns, got a shape of {array.shape}.")
    return _Columns({str(i): array[:, i] for i in range(array.shape[1])}, title)


def _open_file(path: Path) -> DataTable:
    name = path.name.lower()
    kind = next((suffix for suffix in FILES if name.endswith(suffix)), None)
    if kind is None:
        raise ParameterError(f"{path}: expected a file ending in {', '.join(FILES)}.")
    if kind == ".parquet":
        return ParquetTable(path)
    if kind != ".npy":
        return TextTable(path, "\t" if kind == ".tsv" else ",", packed=kind == ".csv.gz")
    with path.open("rb"):
        pass
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception:
        raise TableError(f"{path}: not a readable .npy file of numbers.") from None
    return _of_array(array, str(path))
