"""Tables from arrays, mappings, frames, Arrow tables, files and folders, read a chunk of rows at a time.

narwhals reads frames of pandas and polars. pyarrow reads Arrow tables, text files, Parquet and Feather, and folders of
them; install it with `pip install cpsgd[tables]`. Files are never in memory whole. No error quotes a value. Errors are
for the holder of the table, and no guarantee covers them: a refusal says something about the table.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from decimal import Decimal
from functools import cached_property
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cpsgd.errors import ColumnError, ParameterError, TableError

Column = NDArray[Any]
Chunk = dict[str, Column]

CHUNK_ROWS = 1 << 16
"""Rows that are held at a time."""
# Separators of text files, by suffix.
_TEXT = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
FILES = (".npy", *_TEXT, ".parquet", ".feather", ".arrow")
"""Suffixes of files that are read."""
# Bytes of text that are parsed at a time, and the longest line; pyarrow reads some blocks ahead.
_TEXT_BLOCK = 1 << 20
# Dropping rows by hand would change the number of users by what is protected.
_REMEDY = "say what they count as: missing='drop', 'bounds' or a value (--missing)"
# A number as people and programs write it. Texts with leading zeros are codes, not numbers.
_NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


@dataclass(frozen=True, eq=False)
class DataTable:
    """Named columns of equal length.

    Attributes:
        title: Name of the table in messages.
        names: Names of the columns.
        count: Returns the number of rows. Text files are read once for it.
        read: Yields chunks of the given columns, which exist.
        in_memory: Whether the rows are in memory anyway.
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
        """Returns whole columns, in memory; errors as of `chunks`."""
        found: dict[str, list[Column]] = {}
        for chunk in self.chunks(columns):
            for name, column in chunk.items():
                found.setdefault(name, []).append(column)
        # One column at a time, so that only one of them is there twice.
        return {name: np.concatenate(found.pop(name)) for name in list(found)}


def open_table(source: object) -> DataTable:
    """Opens a table.

    Args:
        source: An array of two dimensions (its columns are named "0", "1", ...), a structured array, a mapping of names
            to columns, a list of mappings (one per row), a frame of pandas or polars, a pyarrow table or data set, or
            the path of a file or a folder, or a pattern of paths such as "visits/part-*.parquet".

    Raises:
        TableError: It is not a table, or the file cannot be read as one.
        ParameterError: The file's suffix is unknown.

    Example:
        >>> table = open_table({"age": [41, 17], "sex": ["f", "m"]})
        >>> table.names, table.rows
        (('age', 'sex'), 2)
    """
    if isinstance(source, DataTable):
        return source
    if isinstance(source, str | Path):
        return _open_path(Path(source))
    if isinstance(source, Mapping):
        return _of_columns("The table", {str(name): _array(str(name), column) for name, column in source.items()})
    if isinstance(source, list | tuple) and source and all(isinstance(row, Mapping) for row in source):
        return _of_rows(source)
    if isinstance(source, np.ndarray | list | tuple):
        return _of_array("The array", _unmasked("The array", source))
    if type(source).__module__.partition(".")[0] == "pyarrow" and hasattr(source, "to_batches"):
        return _of_arrow("The table", source)
    return _of_frame(source)


def numbers(name: str, column: Column, title: str = "The table") -> NDArray[np.float64]:
    """Returns a column as finite numbers.

    Raises:
        ColumnError: It holds text, several types, missing values, NaN or infinity.
    """
    kind = column.dtype.kind
    if kind not in "fiubOUS":
        raise ColumnError(f"{title}: column {name!r} holds {column.dtype}, not numbers.")
    if kind == "O":
        _check_types(name, column, title)
    try:
        found = column.astype(np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ColumnError(f"{title}: column {name!r} is not of numbers.") from None
    if not np.isfinite(found).all():
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; {_REMEDY}.")
    return found


def maybe_numbers(name: str, column: Column, title: str = "The table") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns a column as numbers, and which of them are there. Infinity is the largest number of its sign.

    Missing are None, NaN, blanks, and among texts whatever is not a number.

    Example:
        >>> values, there = maybe_numbers("age", np.array(["41", "", "unknown", "1e400"], dtype=object))
        >>> there.tolist(), values.tolist()
        ([True, False, False, True], [41.0, 0.0, 0.0, 1.7976931348623157e+308])
    """
    kind = column.dtype.kind
    if kind not in "fiubOUS":
        raise ColumnError(f"{title}: column {name!r} holds {column.dtype}, not numbers.")
    if kind in "fiub":
        found = column.astype(np.float64)
    else:
        found = np.fromiter(map(_number_or_nan, column.tolist()), dtype=np.float64, count=len(column))
    return np.nan_to_num(found, nan=0.0), ~np.isnan(found)


def _number_or_nan(entry: object) -> float:
    try:
        return float(entry)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return math.nan
    except OverflowError:
        return math.inf if entry > 0 else -math.inf  # type: ignore[operator]


def _is_missing(column: Column) -> NDArray[np.bool_]:
    """Returns which entries are None, NaN, infinite, no time, or blank text."""
    kind = column.dtype.kind
    if kind == "f":
        return ~np.isfinite(column)
    if kind in "mM":
        return np.isnat(column)
    if kind in "OUS":
        blank = (None, "", b"")
        return np.fromiter(
            ((e.strip() if isinstance(e, str | bytes) else e) in blank or e != e for e in column.tolist()),
            dtype=np.bool_,
            count=len(column),
        )
    return np.zeros(len(column), dtype=np.bool_)


def labels(
    name: str, column: Column, title: str = "The table", *, missing: bool = False
) -> tuple[list[str], NDArray[np.int64]]:
    """Returns the different texts in a column (see `text_of`), and for each row the number of its text.

    Args:
        name: The column's name.
        column: The column.
        title: The table's.
        missing: Whether values may be missing; the number of such a row is -1.

    Raises:
        ColumnError: It has missing values, or text among numbers.
    """
    kind = column.dtype.kind
    if kind not in "fiubOUSmM":
        raise ColumnError(f"{title}: column {name!r} holds {column.dtype}, not categories.")
    if missing and (gone := _is_missing(column)).any():
        number = np.full(len(column), -1, dtype=np.int64)
        texts: list[str] = []
        if not gone.all():
            texts, number[~gone] = labels(name, column[~gone], title)
        return texts, number
    if (kind == "f" and not np.isfinite(column).all()) or (kind in "mM" and np.isnat(column).any()):
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; {_REMEDY}.")
    if kind == "O":
        _check_types(name, column, title)
    try:
        if kind in "OUS":
            entries = column.tolist()
            different: Iterable[object] = sorted(set(entries))
            place = {entry: number for number, entry in enumerate(different)}
            which = np.fromiter(map(place.__getitem__, entries), dtype=np.int64, count=len(entries))
        else:
            different, which = np.unique(column, return_inverse=True)
    except (TypeError, ValueError, ArithmeticError):
        raise ColumnError(f"{title}: column {name!r} is not of single values of one type.") from None
    written = [text_of(entry) for entry in different]
    places = {text: number for number, text in enumerate(dict.fromkeys(written))}
    return list(places), np.array([places[text] for text in written], dtype=np.int64)[which.reshape(-1)]


def text_of(value: object) -> str:
    """Returns a category or a user as text, one text for one value however it is written.

    Blanks around it go, numbers are written in full without zeros at the end, and truth values are 1 and 0. As two
    texts, one person would count as two users.

    Example:
        >>> [text_of(value) for value in (1, 1.0, True, "1.00", " 1e0", "01")]
        ['1', '1', '1', '1', '1', '01']
    """
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    # Bytes that are not text stay different.
    text = (value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)).strip()
    if text.isdecimal() or not _NUMBER.fullmatch(text):
        return text
    text = format(Decimal(text), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _check_types(name: str, column: Column, title: str) -> None:
    """Refuses missing values, and text among other values."""
    types = {type(entry) for entry in column.tolist()}
    if type(None) in types or (float in types and any(e != e for e in column.tolist() if isinstance(e, float))):
        raise ColumnError(f"{title}: column {name!r} has missing values; {_REMEDY}.")
    if str in types and len(types) > 1:
        raise ColumnError(f"{title}: column {name!r} mixes text and other values; make it one of them.")


# ------------------------------------------------------------------ in memory


def _of_columns(title: str, columns: Mapping[str, Column]) -> DataTable:
    """Returns the table of columns in memory."""
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise TableError(f"{title} has columns of different lengths.")
    rows = lengths.pop() if lengths else 0

    def read(names: Sequence[str]) -> Iterator[Chunk]:
        for start in range(0, rows, CHUNK_ROWS):
            yield {name: columns[name][start : start + CHUNK_ROWS] for name in names}

    return DataTable(title, tuple(columns), lambda: rows, read, in_memory=True)


def _unmasked(what: str, values: Any) -> Any:
    # NumPy forgets a mask on the way to an array, and the values under it would count.
    if np.ma.is_masked(values):
        raise ColumnError(f"{what} has masked values; make them NaN, and {_REMEDY}.")
    return values


def _array(name: str, column: Any) -> Column:
    """Returns a column as an array, without silent conversions that could merge values."""
    column = _unmasked(f"Column {name!r}", column)
    if hasattr(column, "to_numpy"):
        column = column.to_numpy()
    kinds = {type(entry) for entry in column} if isinstance(column, list | tuple) else set()
    try:
        array = np.asarray(column)
        # NumPy would turn numbers among text into text, and large whole numbers into floats: two users could be one.
        mixed = len(kinds) > 1 and not all(issubclass(kind, int | float | np.number) for kind in kinds)
        if mixed or (array.dtype.kind == "f" and kinds and all(issubclass(kind, int) for kind in kinds)):
            array = np.empty(len(column), dtype=object)
            array[:] = column
    except ValueError:
        raise ColumnError(f"Column {name!r} is not of single values.") from None
    if array.ndim != 1:
        raise ColumnError(f"Expected column {name!r} to have one dimension, got an array of shape {array.shape}.")
    return array


def _of_rows(rows: Sequence[Mapping[object, object]]) -> DataTable:
    """Returns the table of mappings, one per row; a name that a row lacks is a missing value."""
    names = dict.fromkeys(str(name) for row in rows for name in row)
    columns = {name: [{str(key): value for key, value in row.items()}.get(name) for row in rows] for name in names}
    return _of_columns("The table", {name: _array(name, column) for name, column in columns.items()})


def _of_array(title: str, source: ArrayLike) -> DataTable:
    """Returns the table of an array."""
    try:
        array = np.asarray(source)
    except ValueError:
        raise TableError(f"{title} has rows of different lengths.") from None
    if array.dtype.names:
        return _of_columns(title, {name: array[name] for name in array.dtype.names})
    if array.ndim == 1:
        array = array[:, None]
    if array.ndim != 2:
        raise TableError(f"{title}: expected two dimensions, rows and columns, got a shape of {array.shape}.")
    return _of_columns(title, {str(i): array[:, i] for i in range(array.shape[1])})


def _of_frame(source: Any) -> DataTable:
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
        columns = {name: _array(name, frame.get_column(keys[name])) for name in names}
        return _of_columns("The frame", columns).read(names)

    return DataTable("The frame", tuple(map(str, frame.columns)), lambda: len(frame), read, in_memory=True)


# ------------------------------------------------------------------ Arrow, files and folders


def _of_arrow(title: str, source: Any) -> DataTable:
    """Returns the table of a pyarrow table or data set."""
    from pyarrow import dataset

    whole = source if isinstance(source, dataset.Dataset) else dataset.dataset(source)

    def count() -> int:
        with _readable(title):
            return int(whole.count_rows())

    def read(names: Sequence[str]) -> Iterator[Chunk]:
        limits = {"batch_size": CHUNK_ROWS, "use_threads": False, "batch_readahead": 1, "fragment_readahead": 1}
        with _readable(title):
            for file in whole.get_fragments():
                # One row group of Parquet at a time: pyarrow would hold several.
                for part in file.split_by_row_group() if hasattr(file, "split_by_row_group") else [file]:
                    for batch in part.to_batches(whole.schema, columns=list(names), **limits):
                        batch.validate(full=True)  # a damaged Feather file could end the process
                        if batch.num_rows:
                            yield {name: batch.column(name).to_numpy(zero_copy_only=False) for name in names}

    return DataTable(title, tuple(source.schema.names), count, read, in_memory=whole is not source)


def _of_text(title: str, files: Sequence[Path], separator: str) -> DataTable:
    """Returns the table of text files with the same header.

    Cells stay texts until it is known what for: as numbers, the ids 7 and 07 would be one. pyarrow's data sets would
    read too far ahead in text, so each file has a reader of its own.
    """
    import pyarrow
    from pyarrow import compute, csv

    def batches(file: Path, columns: Sequence[str] | None = None) -> Any:
        convert = csv.ConvertOptions(
            include_columns=columns, column_types=None if columns is None else dict.fromkeys(columns, pyarrow.string())
        )
        parse = csv.ParseOptions(delimiter=separator, newlines_in_values=True)
        stream = pyarrow.input_stream(file, compression="gzip" if file.suffix.lower() == ".gz" else None)
        return csv.open_csv(stream, csv.ReadOptions(use_threads=False, block_size=_TEXT_BLOCK), parse, convert)

    def header(file: Path) -> list[str]:
        with _readable(title, text=True), batches(file) as reader:
            return list(reader.schema.names)

    keys = header(files[0])
    if any(header(file) != keys for file in files[1:]):
        raise TableError(f"{title} has files with different columns.")
    names = tuple(key.strip() for key in keys)
    if any(_NUMBER.fullmatch(name) for name in names):
        raise TableError(f"{title} has no header: the first line must name the columns.")
    key = dict(zip(names, keys, strict=True))

    def count() -> int:
        rows = 0
        for file in files:
            with _readable(title, text=True), batches(file, keys[:1]) as reader:
                rows += sum(batch.num_rows for batch in reader)
        return rows

    def column(cells: Any) -> Column:
        cells = compute.utf8_trim_whitespace(cells)
        if compute.any(compute.equal(cells, "")).as_py():
            cells = compute.if_else(compute.equal(cells, ""), None, cells)
        array: Column = cells.to_numpy(zero_copy_only=False)
        return array

    def read(names: Sequence[str]) -> Iterator[Chunk]:
        for file in files:
            with _readable(title, text=True), batches(file, [key[name] for name in names]) as reader:
                for batch in reader:
                    for start in range(0, batch.num_rows, CHUNK_ROWS):
                        part = batch.slice(start, CHUNK_ROWS)
                        yield {name: column(part.column(key[name])) for name in names}

    return DataTable(title, names, count, read)


@contextmanager
def _readable(title: str, *, text: bool = False) -> Iterator[None]:
    """Turns pyarrow's errors, which may quote the file, into `TableError`."""
    import pyarrow

    try:
        yield
    except TableError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        said = str(error)
        if "Empty CSV" in said:
            raise TableError(f"{title} is empty.") from None
        if "straddling" in said:
            raise TableError(f"{title} has a line of more than {_TEXT_BLOCK:,} bytes; write it as Parquet.") from None
        if "multiple columns named" in said:
            raise TableError(f"{title} has two columns of one name; rename one.") from None
        if ragged := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", said):
            row, expected, cells = ragged.groups()
            raise TableError(
                f"{title}, row {row}: {cells} cells under {expected} names (the header is row 1; blank lines do not "
                "count)."
            ) from None
        kind = "text file of cells in UTF-8" if text else "Parquet or Feather file"
        raise TableError(f"{title}: not a readable {kind}. It is damaged, cut short or another.") from None


def _open_path(path: Path) -> DataTable:
    files, title, base = [path], str(path), path
    pattern = not path.exists() and any(sign in title for sign in "*?[")
    if pattern:
        # The folders before the first sign of a pattern say nothing about rows.
        fixed = list(takewhile(lambda part: not any(sign in part for sign in "*?["), path.parts))
        base = Path(*fixed)
        inside = (file for file in sorted(base.glob(str(Path(*path.parts[len(fixed) :])))) if file.is_file())
    elif path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
    if many := pattern or path.is_dir():
        files = [file for file in inside if not any(part[0] in "._" for part in file.relative_to(base).parts)]
    if pattern and not files:
        raise TableError(f"{path}: no file has such a name.")
    kinds = {next((suffix for suffix in FILES if file.name.lower().endswith(suffix)), None) for file in files}
    kind = kinds.pop() if len(kinds) == 1 else None
    if kind is None or (kind == ".npy" and many):
        what = "files of one kind" if pattern else "a folder of files of one kind" if many else "a file"
        raise ParameterError(f"{path}: expected {what} ending in {', '.join(FILES)}.")
    for file in files:
        with file.open("rb"):
            pass  # a file that cannot be opened is not a damaged one
    if kind == ".npy":
        try:
            array = np.lib.format.open_memmap(path, mode="r")
        except Exception:
            raise TableError(f"{path}: not a readable .npy file of numbers.") from None
        return _of_array(title, array)
    try:
        from pyarrow import dataset
    except ModuleNotFoundError:
        raise TableError(f"{path}: reading {kind} tables needs pyarrow: pip install cpsgd[tables].") from None
    if kind in _TEXT:
        return _of_text(title, files, _TEXT[kind])
    scan = dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
    layout = "feather" if kind != ".parquet" else dataset.ParquetFileFormat(default_fragment_scan_options=scan)
    # Folders with names such as year=2026 hold a column, too.
    folders = {"partitioning": "hive", "partition_base_dir": str(base)} if many else {}
    with _readable(title):
        return _of_arrow(title, dataset.dataset(list(map(str, files)), format=layout, **folders))
