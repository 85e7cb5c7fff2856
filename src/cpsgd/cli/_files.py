"""Files: people's vectors that are read, results that appear whole or not at all, and the protocol file.

Tables are .npy, .npz or .csv, one row per client. Rows are handed out in blocks and never held twice: an .npy file is
mapped into memory, a .csv file is read as it goes. No error quotes what stands in a file, only where.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Protocol as Interface

import numpy as np
from numpy.typing import NDArray

from cpsgd._cells import filled_lines, is_number
from cpsgd._durable import write_file
from cpsgd.errors import ParameterError, VectorError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Array = NDArray[np.generic]

_PICTURES = (".png", ".pdf", ".svg")
# Rows looked at together.
_POINTS = 1 << 16
# A protocol is a dozen short fields; whatever is longer is another file given by mistake.
_LONGEST_PROTOCOL = 1 << 16


# ------------------------------------------------------------------ writing


@contextmanager
def paid(charged: bool) -> Iterator[None]:
    """Where a result was charged to a ledger and cannot be written, the error says so."""
    try:
        yield
    except OSError as error:
        if not charged:
            raise
        told = f"{error.strerror or error}. It was charged to the ledger all the same, and has to be paid for again"
        raise OSError(error.errno, told, error.filename) from None


def check_output(path: Path, *inputs: Path) -> None:
    """Refuses with `ParameterError`, before any work is done, a place that cannot be written or one of the inputs."""
    if not path.resolve().parent.is_dir():
        raise ParameterError(f"Cannot write {path}: the folder does not exist.")
    if path.is_dir():
        raise ParameterError(f"Cannot write {path}: it is a folder.")
    if not path.exists() or path.is_file():
        try:
            # Files are replaced, so it is the folder that has to allow it.
            with tempfile.TemporaryFile(dir=path.resolve().parent):
                pass
        except OSError as error:
            raise ParameterError(f"Cannot write {path}: {error.strerror}.") from None
    for other in inputs:
        if path.exists() and other.exists() and path.samefile(other):
            raise ParameterError(f"Writing {path} would overwrite the input of the same name; choose another --out.")


def check_vector_output(path: Path, *inputs: Path) -> None:
    """`check_output` for a vector, whose suffix says the format."""
    if path.suffix.lower() not in (".npy", ".csv"):
        raise ParameterError(f"Expected --out to end in .npy or .csv, got {path.name}.")
    check_output(path, *inputs)


def check_picture(path: Path | None) -> None:
    """Refuses a picture, if one is asked for, whose suffix is of no known format, or that could not be drawn here."""
    if path is None:
        return
    if path.suffix.lower() not in _PICTURES:
        raise ParameterError(f"Expected --plot to name a file ending in {', '.join(_PICTURES)}, got {path}.")
    from cpsgd.reports import plotting

    plotting.check()


def write_vector(path: Path, vector: NDArray[np.float32]) -> None:
    """Writes a vector as .npy, or as the single line of a .csv; a table as so many lines."""
    if path.suffix.lower() == ".csv":
        # Nine digits tell all float32 numbers apart.
        write_file(path, lambda file: np.savetxt(file, np.atleast_2d(vector), fmt="%.9g", delimiter=","))
    else:
        write_file(path, lambda file: np.save(file, vector))


def read_protocol(path: Path) -> Protocol:
    """The protocol in a JSON file, or `ParameterError` where it holds none."""
    from cpsgd.protocol import Protocol

    with path.open("rb") as file:
        text = file.read(_LONGEST_PROTOCOL + 1)
    if len(text) > _LONGEST_PROTOCOL:
        raise ParameterError(f"{path} is too long to be a protocol file.")
    try:
        return Protocol.from_json(text)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


# ------------------------------------------------------------------ reading tables


class Rows(Interface):
    """The vectors of all clients; `named` where a line above them names the coordinates."""

    clients: int
    dim: int
    named: bool

    def blocks(self, rows: int) -> Iterator[tuple[int, Array]]:
        """The vectors in order, at most `rows` at a time, each block with the number of its first row."""
        ...

    def where(self, row: int) -> str:
        """How a person finds this row in the file."""
        ...


def open_rows(path: Path, key: str | None = None) -> Rows:
    """The vectors in an .npy, .npz or .csv file, one row per client; `key` names one of several arrays in an .npz file.

    Raises:
        VectorError: The file does not hold rows (or, for `read_vector`, one vector) of real numbers.
        ParameterError: The file's suffix or `key` makes no sense.
    """
    if _suffix(path, key) == ".csv":
        return _CsvRows(path)
    array = _open_array(path, key)
    if array.ndim != 2:
        raise VectorError(
            f"{path}: expected a table of two dimensions, one row per client, got an array of shape {array.shape}."
        )
    if 0 in array.shape:
        raise VectorError(f"{path}: the table is empty, its shape is {array.shape}.")
    return _ArrayRows(path, array)


def read_points(rows: Rows) -> Array:
    """All rows in memory, for algorithms that go over them several times; all finite, or `VectorError`."""
    blocks = []
    for start, block in rows.blocks(_POINTS):
        if not (finite := np.isfinite(block)).all():
            row, coordinate = np.unravel_index(int(np.argmin(finite)), finite.shape)
            raise not_finite(rows, start + int(row), int(coordinate))
        blocks.append(block)
    return np.concatenate(blocks)


def not_finite(rows: Rows, row: int, coordinate: int) -> VectorError:
    """The error that names this place."""
    return VectorError(
        f"{rows.where(row)}: NaN or infinite at coordinate {coordinate} (rows and coordinates counted from 0). Repair "
        "or drop the row."
    )


def read_vector(path: Path, key: str | None = None) -> Array:
    """The one vector in a file, a one-dimensional array or a table of one row; errors as of `open_rows`."""
    if _suffix(path, key) == ".csv":
        rows = _CsvRows(path)
        if rows.clients != 1:
            raise VectorError(f"{path}: expected one vector, got {rows.clients} rows; `cpsgd mean` takes many.")
        return np.asarray(next(rows.blocks(1))[1][0])
    array = _open_array(path, key)
    if array.ndim == 2 and array.shape[0] == 1:
        return np.asarray(array[0])
    if array.ndim != 1:
        raise VectorError(f"{path}: expected one vector, got an array of shape {array.shape}.")
    return array


def _suffix(path: Path, key: str | None) -> str:
    suffix = path.suffix.lower()
    if suffix not in (".npy", ".npz", ".csv"):
        raise ParameterError(f"{path}: expected an .npy, .npz or .csv file.")
    if key is not None and suffix != ".npz":
        raise ParameterError(f"--key names an array in an .npz file, and {path.name} is none.")
    return suffix


def _open_array(path: Path, key: str | None) -> Array:
    kind = path.suffix.lower()
    with path.open("rb"):
        pass  # a file that cannot be opened is not a damaged one
    try:
        array = _from_npz(path, key) if kind == ".npz" else np.lib.format.open_memmap(path, mode="r")
    except ParameterError:
        raise
    except Exception:
        # NumPy lets all kinds of errors through from a damaged file; what they say may quote it.
        raise VectorError(
            f"{path}: not a readable {kind} file of numbers. It is damaged, cut short, of another format or holds "
            "Python objects."
        ) from None
    if array.dtype.kind not in "fiub":
        raise VectorError(f"{path}: expected real numbers, got an array of {array.dtype}.")
    return array


def _from_npz(path: Path, key: str | None) -> Array:
    # Opened here, as np.load leaves a file open that turns out to be no archive.
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("not an archive")
        names = archive.files
        if key is None and len(names) != 1:
            raise ParameterError(f"{path} holds the arrays {', '.join(names) or '(none)'}; choose one with --key.")
        if key is not None and key not in names:
            raise ParameterError(f"{path} holds no array {key!r}, but {', '.join(names) or 'nothing'}.")
        return np.asarray(archive[key or names[0]])


class _ArrayRows:
    """Rows of an array, in memory or mapped from a file."""

    def __init__(self, path: Path, array: Array) -> None:
        self._path = path
        self._array = array
        self.named = False
        self.clients, self.dim = array.shape

    def blocks(self, rows: int) -> Iterator[tuple[int, Array]]:
        for start in range(0, self.clients, rows):
            yield start, self._array[start : start + rows]

    def where(self, row: int) -> str:
        return f"{self._path}, row {row}"


class _CsvRows:
    """Rows of numbers separated by commas, behind a header line or none."""

    def __init__(self, path: Path) -> None:
        self._path = path
        if not path.is_file():
            # Also a pipe is refused: the file is read twice.
            raise FileNotFoundError(2, "No such file", str(path))
        self.named = False
        self.clients = self.dim = 0
        for line, cells in self._lines():
            if self.dim == 0:
                self.dim = len(cells)
                if not any(is_number(cell) for cell in cells):
                    self.named = True
                    continue
                if self.dim > 2 and cells == [str(i) for i in range(self.dim)]:
                    raise VectorError(
                        f"{path}, line {line}: counts 0, 1, 2, …, as column names do that some programs write. Remove "
                        "the line, or write 0.0 for 0 if it is a client's vector after all."
                    )
            if len(cells) != self.dim:
                raise VectorError(f"{path}, line {line}: has {len(cells)} cells where the first line has {self.dim}.")
            self.clients += 1
        if self.clients == 0:
            raise VectorError(f"{path}: holds no row of numbers.")

    def blocks(self, rows: int) -> Iterator[tuple[int, Array]]:
        block: list[list[float]] = []
        start = 0
        lines = self._lines()
        if self.named:
            next(lines)
        for line, cells in lines:
            try:
                block.append(list(map(float, cells)))
            except ValueError:
                column = next(i for i, cell in enumerate(cells, start=1) if not is_number(cell))
                raise VectorError(
                    f"{self._path}, line {line}, column {column}: not a number (cells are separated by commas)."
                ) from None
            if len(block) == rows:
                yield start, np.array(block)
                start += rows
                block = []
        if block:
            yield start, np.array(block)

    def where(self, row: int) -> str:
        return f"{self._path}, row {row}" + (" below the header" if self.named else "")

    def _lines(self) -> Iterator[tuple[int, list[str]]]:
        """The lines that are not blank, with their numbers from 1."""
        with self._path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file)
            try:
                yield from filled_lines(reader)
            except UnicodeDecodeError:
                raise VectorError(f"{self._path}: not a text file in UTF-8.") from None
            except csv.Error:
                raise VectorError(f"{self._path}, line {reader.line_num}: not cells separated by commas.") from None
