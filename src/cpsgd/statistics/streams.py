"""Tables that are never in memory whole: Parquet by row groups and columns, text as it goes; and Arrow by batches."""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from cpsgd._cells import filled_lines, is_number
from cpsgd.errors import ColumnError, TableError
from cpsgd.statistics import columns as limits
from cpsgd.statistics.columns import Chunk, Column, DataTable, different


class ArrowTable(DataTable):
    """A pyarrow table, a batch at a time."""

    def __init__(self, table: Any) -> None:
        self.title = "The table"
        self.names = different(table.column_names, self.title)
        self._table = table

    @property
    def rows(self) -> int:
        """How many there are."""
        return int(self._table.num_rows)

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        for batch in self._table.select(list(columns)).to_batches(max_chunksize=limits.CHUNK_ROWS):
            yield _of_batch(batch, columns)


class ParquetTable(DataTable):
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
            self.names = different(file.schema_arrow.names, self.title)
            self._rows = int(file.metadata.num_rows)

    @property
    def rows(self) -> int:
        """As the file's end says."""
        return self._rows

    def _read(self, columns: Sequence[str]) -> Iterator[Chunk]:
        import pyarrow.parquet as parquet

        with self._checked(), parquet.ParquetFile(self._path) as file:
            # One row group and one thread at a time: pyarrow would hold what it has read of several.
            for group in range(file.num_row_groups):
                batches = file.iter_batches(
                    limits.CHUNK_ROWS, row_groups=[group], columns=list(columns), use_threads=False
                )
                for batch in batches:
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


class TextTable(DataTable):
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
        self.names = different((name.strip() for name in header[1]), self.title)
        if any(is_number(name) for name in self.names):
            raise TableError(f"{path} has no header: the first line must name the columns.")

    @property
    def rows(self) -> int:
        """How many lines with cells; the file is read once to know."""
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
            # Without the blanks around a cell: "7" and "7 " are one user.
            held.append([cells[place].strip() for place in places])
            if len(held) == limits.CHUNK_ROWS:
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
                yield from filled_lines(reader)
            except (UnicodeDecodeError, gzip.BadGzipFile, zlib.error, EOFError, csv.Error):
                raise TableError(f"{self._path}: not a readable text file of cells in UTF-8.") from None
