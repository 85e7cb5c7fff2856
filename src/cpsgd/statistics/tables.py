"""Columns of people's tables, a chunk of rows at a time: arrays, frames, Arrow tables and files.

A `DataTable` knows the names of its columns and hands out chunks of those that are asked for. Files are never in memory
whole: .npy is mapped, Parquet is read by row groups and columns, text is read as it goes. pandas and polars are never
imported; whatever has `columns` and can be indexed by them is a frame. Parquet and Arrow tables need pyarrow
(`cpsgd[tables]`).

No error quotes a value. Errors are for whoever holds the table, and no guarantee covers them: that a table was refused
says something about it.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd.errors import ColumnError, ParameterError, TableError

Column = NDArray[Any]
Chunk = dict[str, Column]

CHUNK_ROWS = 1 << 16
"""Rows that are held at a time."""

FILES = (".npy", ".csv", ".csv.gz", ".tsv", ".parquet")
"""Suffixes of files that are read."""


class DataTable(ABC):
    """Named columns of equal length.

    Attributes:
        names: The columns' names.
        title: What to call the table in messages.
    """

    names: tuple[str, ...]
    title: str

    @property
    @abstractmethod
    def rows(self) -> int:
        """How many rows there are; text files are read once to know."""

    @abstractmethod
    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        """Chunks of these columns, which exist."""

    def chunks(self, columns: Iterable[str]) -> Iterator[Chunk]:
        """These columns, at most `CHUNK_ROWS` rows at a time, in order.

        Raises:
            ColumnError: One of them is missing.
            TableError: The table is empty or cannot be read.
        """
        wanted = tuple(dict.fromkeys(columns))
        if not wanted:
            raise ParameterError("Expected the name of at least one column.")
        for name in wanted:
            if name not in self.names:
                known = ", ".join(map(str, self.names[:20])) + (", …" if len(self.names) > 20 else "")
                raise ColumnError(f"{self.title} has no column {name!r}; it has {known or 'none'}.")
        if self.rows == 0:
            raise TableError(f"{self.title} is empty.")
        return self._read(wanted)


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
        return _of_array(source, "The array")
    if hasattr(source, "column_names") and hasattr(source, "to_batches"):
        return _Arrow(source)
    columns = getattr(source, "columns", None)
    if columns is not None and hasattr(source, "__getitem__"):
        names = [str(name) for name in columns]
        if len(set(names)) < len(names):
            raise TableError("The frame has two columns of one name; rename one.")
        return _Columns({str(name): _array(str(name), source[name]) for name in columns}, "The frame")
    raise TableError(
        f"Expected a table: an array, a mapping of columns, a pandas or polars frame, a pyarrow table or a file, got "
        f"{type(source).__name__}."
    )


def numbers(name: str, column: Column, title: str = "The table") -> NDArray[np.float64]:
    """A column as finite numbers.

    Raises:
        ColumnError: It holds text, several types, missing values, NaN or infinity.
    """
    if column.dtype.kind in "fiub":
        found = column.astype(np.float64)
    elif column.dtype.kind in "OUS":
        kinds = {type(entry) for entry in column.tolist()} if column.dtype.kind == "O" else {str}
        if type(None) in kinds:
            raise ColumnError(f"{title}: column {name!r} has missing values; fill them in or drop their rows.")
        if len(kinds) > 1 and str in kinds:
            raise ColumnError(f"{title}: column {name!r} mixes text and numbers; make it one of them.")
        try:
            found = column.astype(np.float64)
        except (TypeError, ValueError, OverflowError):
            raise ColumnError(f"{title}: column {name!r} is not of numbers.") from None
    else:
        raise ColumnError(f"{title}: column {name!r} holds {column.dtype}, not numbers.")
    if not np.isfinite(found).all():
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; fill them in or drop them.")
    return found


def labels(name: str, column: Column, title: str = "The table") -> tuple[list[str], NDArray[np.int64]]:
    """A column as the different texts in it and the number of each row's: 1, 1.0, "1" and True are written alike.

    Raises:
        ColumnError: It has missing values, or text among numbers.
    """
    if column.dtype.kind == "f" and not np.isfinite(column).all():
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; fill them in or drop them.")
    if column.dtype.kind == "O":
        kinds = {type(entry) for entry in column.tolist()}
        if type(None) in kinds or any(isinstance(e, float) and e != e for e in column.tolist()):
            raise ColumnError(f"{title}: column {name!r} has missing values; fill them in or drop their rows.")
        if str in kinds and len(kinds) > 1:
            raise ColumnError(f"{title}: column {name!r} mixes text and other values; make it one of them.")
        if str in kinds:
            column = column.astype(str)
    try:
        different, number = np.unique(column, return_inverse=True)
    except TypeError:
        raise ColumnError(f"{title}: column {name!r} mixes types that cannot be compared; make it one.") from None
    return [text_of(entry) for entry in different.tolist()], number.reshape(-1).astype(np.int64)


def text_of(value: object) -> str:
    """A category as text; whole numbers without a point, truth as 1 and 0."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value)


# ------------------------------------------------------------------ in memory


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
        for start in range(0, self._rows, CHUNK_ROWS):
            yield {name: self._columns[name][start : start + CHUNK_ROWS] for name in columns}


def _array(name: str, column: Any) -> Column:
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


# ------------------------------------------------------------------ Arrow and Parquet


class _Arrow(DataTable):
    """A pyarrow table, a batch at a time."""

    def __init__(self, table: Any) -> None:
        self.title = "The table"
        self.names = tuple(map(str, table.column_names))
        self._table = table

    @property
    def rows(self) -> int:
        return int(self._table.num_rows)

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        for batch in self._table.select(list(columns)).to_batches(max_chunksize=CHUNK_ROWS):
            yield _of_batch(batch, columns)


class _Parquet(DataTable):
    """A Parquet file by batches of the columns that are asked for."""

    def __init__(self, path: Path) -> None:
        self._path, self.title = path, str(path)
        try:
            import pyarrow.parquet as parquet
        except ModuleNotFoundError:
            raise TableError(f"{path}: reading Parquet needs pyarrow; install cpsgd[tables].") from None
        with path.open("rb"):
            pass  # a file that cannot be opened is not a damaged one
        with self._checked(), parquet.ParquetFile(path) as file:
            self.names = tuple(map(str, file.schema_arrow.names))
            self._rows = int(file.metadata.num_rows)

    @property
    def rows(self) -> int:
        return self._rows

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        import pyarrow.parquet as parquet

        with self._checked(), parquet.ParquetFile(self._path) as file:
            # One thread: decoding ahead in several would hold several row groups.
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(columns), use_threads=False):
                yield _of_batch(batch, columns)

    @contextmanager
    def _checked(self) -> Iterator[None]:
        import pyarrow

        try:
            yield
        except (pyarrow.ArrowException, OSError, ValueError) as error:
            if isinstance(error, TableError):
                raise
            # What pyarrow says may quote the file.
            raise TableError(
                f"{self._path}: not a readable Parquet file. It is damaged, cut short or another."
            ) from None


def _of_batch(batch: Any, columns: Sequence[str]) -> Chunk:
    return {name: batch.column(name).to_numpy(zero_copy_only=False) for name in columns}


# ------------------------------------------------------------------ text


class _Text(DataTable):
    """Lines of cells behind a header; numbers where all cells of a chunk's column are."""

    def __init__(self, path: Path, separator: str, *, packed: bool) -> None:
        self._path, self.title = path, str(path)
        self._separator, self._packed = separator, packed
        self._rows: int | None = None
        with path.open("rb"):
            pass
        header = next(self._lines(), None)
        if header is None:
            raise TableError(f"{path} is empty.")
        self.names = tuple(header[1])
        if len(set(self.names)) < len(self.names):
            raise TableError(f"{path} has two columns of one name; rename one.")
        if any(_is_number(name) for name in self.names):
            raise TableError(f"{path} has no header: the first line must name the columns.")

    @property
    def rows(self) -> int:
        if self._rows is None:
            self._rows = sum(1 for _ in self._lines()) - 1
        return self._rows

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        places = [self.names.index(name) for name in columns]
        held: list[list[str]] = []
        lines = self._lines()
        next(lines)
        for line, cells in lines:
            if len(cells) != len(self.names):
                raise TableError(f"{self._path}, line {line}: {len(cells)} cells under {len(self.names)} names.")
            held.append([cells[place] for place in places])
            if len(held) == CHUNK_ROWS:
                yield self._chunk(columns, held)
                held = []
        if held:
            yield self._chunk(columns, held)

    def _chunk(self, columns: Sequence[str], held: list[list[str]]) -> Chunk:
        return {name: self._column(name, cells) for name, cells in zip(columns, zip(*held, strict=True), strict=True)}

    def _column(self, name: str, cells: Sequence[str]) -> Column:
        if any(cell == "" for cell in cells):
            raise ColumnError(f"{self._path}: column {name!r} has empty cells; fill them in or drop their rows.")
        return np.array(cells)

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """The lines that are not blank, with their numbers from 1."""
        with self._path.open("rb") as opened:
            bytes_: Any = gzip.GzipFile(fileobj=opened) if self._packed else opened
            reader = csv.reader(io.TextIOWrapper(bytes_, encoding="utf-8-sig", newline=""), delimiter=self._separator)
            try:
                for cells in reader:
                    if cells and cells != [""]:
                        yield reader.line_num, cells
            except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError, csv.Error):
                raise TableError(f"{self._path}: not a readable text file of cells in UTF-8.") from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _open_file(path: Path) -> DataTable:
    name = path.name.lower()
    kind = next((suffix for suffix in FILES if name.endswith(suffix)), None)
    if kind is None:
        raise ParameterError(f"{path}: expected a file ending in {', '.join(FILES)}.")
    if kind == ".parquet":
        return _Parquet(path)
    if kind != ".npy":
        return _Text(path, "\t" if kind == ".tsv" else ",", packed=kind == ".csv.gz")
    with path.open("rb"):
        pass
    try:
        array = np.lib.format.open_memmap(path, mode="r")
    except Exception:
        raise TableError(f"{path}: not a readable .npy file of numbers.") from None
    return _of_array(array, str(path))
