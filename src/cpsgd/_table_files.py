"""Tables in files: text, Parquet and Feather, and folders and patterns of them, by pyarrow, a chunk at a time."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import numpy as np

from cpsgd import _table_memory
from cpsgd._table_memory import DataTable, of_array
from cpsgd._table_values import NUMBER, Chunk, Column, are_large
from cpsgd.errors import ParameterError, TableError

# Separators of text files, by suffix.
_TEXT = {".csv": ",", ".csv.gz": ",", ".tsv": "\t", ".tsv.gz": "\t"}
FILES = (".npy", *_TEXT, ".parquet", ".feather", ".arrow")
"""Suffixes of files that are read."""
# Bytes of text that are parsed at a time, and the longest line; pyarrow reads some blocks ahead.
_TEXT_BLOCK = 1 << 20


def of_arrow(title: str, source: Any) -> DataTable:
    """Wraps a pyarrow table or data set as a `DataTable`."""
    from pyarrow import dataset

    whole = source if isinstance(source, dataset.Dataset) else dataset.dataset(source)

    def count() -> int:
        with _readable(title):
            return int(whole.count_rows())

    def read(names: Sequence[str]) -> Iterator[Chunk]:
        limits = {
            "batch_size": _table_memory.CHUNK_ROWS,
            "use_threads": False,
            "batch_readahead": 1,
            "fragment_readahead": 1,
        }
        with _readable(title):
            for file in whole.get_fragments():
                # One row group of Parquet at a time: pyarrow would hold several.
                for part in file.split_by_row_group() if hasattr(file, "split_by_row_group") else [file]:
                    for batch in part.to_batches(whole.schema, columns=list(names), **limits):
                        batch.validate(full=True)  # a damaged Feather file could end the process
                        if batch.num_rows:
                            yield {name: _of_cells(name, batch.column(name)) for name in names}

    return DataTable(title, tuple(source.schema.names), count, read, in_memory=whole is not source)


def _of_cells(name: str, cells: Any) -> Column:
    """Returns a column as an array. Whole numbers too large for float64 stay exact, also beside missing values."""
    from pyarrow import types

    _table_memory.check_single(name, str(cells.type))
    found: Column = cells.to_numpy(zero_copy_only=False)
    kind = cells.type.value_type if types.is_dictionary(cells.type) else cells.type
    if found.dtype.kind == "f" and types.is_integer(kind) and are_large(found):
        return np.array(cells.to_pylist(), dtype=object)
    return found


def _of_text(title: str, files: Sequence[Path], separator: str) -> DataTable:
    """Returns the table of text files with the same header.

    Cells stay text until their use is known: as numbers, the ids 7 and 07 would be one. pyarrow's data sets would
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
    if any(NUMBER.fullmatch(name) for name in names):
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
                    for start in range(0, batch.num_rows, _table_memory.CHUNK_ROWS):
                        part = batch.slice(start, _table_memory.CHUNK_ROWS)
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
        if "not in range" in said:
            raise TableError(
                f"{title} has files with whole numbers that are too large for the type of another file's column; write "
                "them with one type."
            ) from None
        if "multiple columns named" in said or "duplicate field names" in said:
            raise TableError(f"{title} has two columns of one name; rename one.") from None
        if "Unable to merge" in said:
            raise TableError(
                f"{title} has a column in its files and in the names of its folders; rename one."
            ) from None
        if ragged := re.search(r"Row #(\d+): Expected (\d+) columns, got (\d+)", said):
            row, expected, cells = ragged.groups()
            raise TableError(
                f"{title}, row {row}: {cells} cells under {expected} names (the header is row 1; blank lines do not "
                "count)."
            ) from None
        kind = "text file of cells in UTF-8" if text else "Parquet or Feather file"
        raise TableError(f"{title}: not a readable {kind}. It is damaged, cut short or another.") from None


def open_path(path: Path) -> DataTable:
    """Returns the table of a file, a folder, or a pattern of paths."""
    files, title, base = [path], str(path), path
    pattern = not path.exists() and any(sign in title for sign in "*?[")
    if pattern:
        # The folders before the first sign of a pattern say nothing about rows.
        fixed = list(takewhile(lambda part: not any(sign in part for sign in "*?["), path.parts))
        base = Path(*fixed)
        try:
            named = sorted(base.glob(str(Path(*path.parts[len(fixed) :]))))
        except ValueError:
            raise ParameterError(f"{path}: expected ** only as a whole folder's name, as in visits/**/*.csv.") from None
        inside = (file for file in named if file.is_file())
    elif path.is_dir():
        inside = (file for file in sorted(path.rglob("*")) if file.is_file())
    if many := pattern or path.is_dir():
        files = [file for file in inside if not any(part[0] in "._" for part in file.relative_to(base).parts)]
    if not files:
        raise TableError(f"{path}: {'no file has such a name' if pattern else 'the folder is empty'}.")
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
        return of_array(title, array)
    try:
        import pyarrow
        from pyarrow import dataset
    except ModuleNotFoundError:
        raise TableError(f"{path}: reading {kind} tables needs pyarrow: pip install cpsgd[tables].") from None
    if kind in _TEXT:
        return _of_text(title, files, _TEXT[kind])
    scan = dataset.ParquetFragmentScanOptions(pre_buffer=False, use_buffered_stream=True)
    layout = "feather" if kind != ".parquet" else dataset.ParquetFileFormat(default_fragment_scan_options=scan)
    folders: dict[str, Any] = {}
    if many:
        # Folders with names such as year=2026 hold a column, too. Of texts: as numbers, if all are, a folder
        # month=unknown would change month=07 for everybody.
        parts = (part for file in files for part in file.relative_to(base).parts[:-1] if "=" in part)
        names = dict.fromkeys(unquote(part.partition("=")[0]) for part in parts)
        texts = pyarrow.schema([(name, pyarrow.string()) for name in names])
        folders = {"partitioning": dataset.partitioning(texts, flavor="hive"), "partition_base_dir": str(base)}
    with _readable(title):
        whole = dataset.dataset(list(map(str, files)), format=layout, **folders)
        if many:
            folders["schema"] = _schema_of_all(title, whole)
            whole = dataset.dataset(list(map(str, files)), format=layout, **folders)
        return of_arrow(title, whole)


def _schema_of_all(title: str, whole: Any) -> Any:
    """Returns the columns of all files of a data set, with types that all their values fit in.

    By itself pyarrow takes the columns and types of the first file, whatever that is.
    """
    import pyarrow
    from pyarrow import types

    def plain(kind: Any) -> Any:
        return plain(kind.value_type) if types.is_dictionary(kind) else kind

    found: dict[str, Any] = {}
    # Last, so that names of folders have the types that were given to them.
    for schema in (*(file.physical_schema for file in whole.get_fragments()), whole.schema):
        for name, kind in zip(schema.names, schema.types, strict=True):
            known = found.get(name, kind)
            if known.equals(kind):
                found[name] = kind
                continue
            parts = [pyarrow.schema([(name, plain(each))]) for each in (known, kind)]
            try:
                found[name] = pyarrow.unify_schemas(parts, promote_options="permissive").field(0).type
            except pyarrow.ArrowException:
                raise TableError(
                    f"{title} has files with different types of the column {name!r}, {known} and {kind}; write them "
                    "with one."
                ) from None
    return pyarrow.schema(list(found.items()))
