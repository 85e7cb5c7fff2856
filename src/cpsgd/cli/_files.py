"""Files of vectors, results that appear whole or not at all, and the protocol file.

Tables of vectors are .npy, .npz or .csv, one row per client. They are read in blocks: an .npy file is mapped into
memory, a .csv file is read by the standard library, so that neither needs an extra. Errors name a place in a file, and
quote nothing of it. `cpsgd.tables` reads tables with named columns.
"""

from __future__ import annotations

import csv
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from cpsgd._durable import write_file
from cpsgd.errors import ParameterError, VectorError

if TYPE_CHECKING:
    from cpsgd.protocol import Protocol

Array = NDArray[np.generic]

_PICTURES = (".png", ".pdf", ".svg")
# Rows read together.
_POINTS = 1 << 16
# A protocol is a dozen short fields; a longer file is another one, given by mistake.
_LONGEST_PROTOCOL = 1 << 16


# ------------------------------------------------------------------ writing


@contextmanager
def paid(charged: bool) -> Iterator[None]:
    """Within the context, errors of writing a result also say that the result was charged to a ledger."""
    try:
        yield
    except OSError as error:
        if not charged:
            raise
        reason = f"{error.strerror or error}. It was charged to the ledger all the same, and has to be paid for again"
        raise OSError(error.errno, reason, error.filename) from None


def check_output(path: Path, *inputs: Path) -> None:
    """Raises `ParameterError`, before any work is done, if a file cannot be written or is one of the inputs."""
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
    """Checks the output of a vector, whose suffix says the format; see `check_output`."""
    if path.suffix.lower() not in (".npy", ".csv"):
        raise ParameterError(f"Expected --out to end in .npy or .csv, got {path.name}.")
    check_output(path, *inputs)


def check_picture(path: Path | None) -> None:
    """Refuses a picture, if one is asked for, with an unknown suffix or without matplotlib."""
    if path is None:
        return
    if path.suffix.lower() not in _PICTURES:
        raise ParameterError(f"Expected --plot to name a file ending in {', '.join(_PICTURES)}, got {path}.")
    from cpsgd.reports import plotting

    plotting.check()


def write_vector(path: Path, vector: NDArray[np.float32]) -> None:
    """Writes a vector as .npy, or as the single line of a .csv; of a table one line per row."""
    if path.suffix.lower() == ".csv":
        # Nine digits tell all float32 numbers apart.
        write_file(path, lambda file: np.savetxt(file, np.atleast_2d(vector), fmt="%.9g", delimiter=","))
    else:
        write_file(path, lambda file: np.save(file, vector))


def read_protocol(path: Path) -> Protocol:
    """Returns the protocol in a JSON file, or raises `ParameterError`."""
    from cpsgd.protocol import Protocol

    with path.open("rb") as file:
        text = file.read(_LONGEST_PROTOCOL + 1)
    if len(text) > _LONGEST_PROTOCOL:
        raise ParameterError(f"{path} is too long to be a protocol file.")
    try:
        return Protocol.from_json(text)
    except ParameterError as error:
        raise ParameterError(f"{path}: {error}") from None


# ------------------------------------------------------------------ reading vectors


@dataclass(frozen=True, eq=False)
class Rows:
    """The vectors of all clients in a file.

    Attributes:
        path: The file.
        clients: Number of rows.
        dim: Number of coordinates.
        named: Whether a header names the coordinates.
        blocks: Yields the vectors in order, at most the given number at a time, with the number of each first row.
    """

    path: Path
    clients: int
    dim: int
    named: bool
    blocks: Callable[[int], Iterator[tuple[int, Array]]]

    def not_finite(self, row: int, coordinate: int) -> VectorError:
        """Returns the error that names this place."""
        below = " below the header" if self.named else ""
        return VectorError(
            f"{self.path}, row {row}{below}: NaN or infinite at coordinate {coordinate} (rows and coordinates counted "
            "from 0). Repair or drop the row."
        )


def open_rows(path: Path, key: str | None = None) -> Rows:
    """Opens the vectors in an .npy, .npz or .csv file, one row per client.

    Args:
        path: The file.
        key: Name of one of several arrays in an .npz file.

    Raises:
        VectorError: The file does not hold rows of real numbers.
        ParameterError: The file's suffix is unknown, or the key is wrong.
    """
    if _suffix(path, key) == ".csv":
        return _csv_rows(path)
    array = _open_array(path, key)
    if array.ndim != 2:
        raise VectorError(
            f"{path}: expected a table of two dimensions, one row per client, got an array of shape {array.shape}."
        )
    if 0 in array.shape:
        raise VectorError(f"{path}: the table is empty, its shape is {array.shape}.")

    def blocks(rows: int) -> Iterator[tuple[int, Array]]:
        for start in range(0, len(array), rows):
            yield start, array[start : start + rows]

    clients, dim = array.shape
    return Rows(path, clients, dim, named=False, blocks=blocks)


def read_points(rows: Rows) -> Array:
    """Returns all rows in memory, for algorithms that read them several times; raises `VectorError` if not finite."""
    blocks = []
    for start, block in rows.blocks(_POINTS):
        if not (finite := np.isfinite(block)).all():
            row, coordinate = np.unravel_index(int(np.argmin(finite)), finite.shape)
            raise rows.not_finite(start + int(row), int(coordinate))
        blocks.append(block)
    return np.concatenate(blocks)


def read_vector(path: Path, key: str | None = None) -> Array:
    """Returns the one vector in a file, an array of one dimension or of one row; errors as of `open_rows`."""
    if _suffix(path, key) == ".csv":
        rows = _csv_rows(path)
        if rows.clients != 1:
            raise VectorError(f"{path}: expected one vector, got {rows.clients} rows; `cpsgd round mean` takes many.")
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
        raise ParameterError(f"--key names an array in an .npz file, which {path.name} is not.")
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
        # NumPy lets all kinds of errors through from a damaged file, and they may quote it.
        raise VectorError(
            f"{path}: not a readable {kind} file of numbers. It is damaged, cut short, of another format or holds "
            "Python objects."
        ) from None
    if array.dtype.kind not in "fiub":
        raise VectorError(f"{path}: expected real numbers, got an array of {array.dtype}.")
    return array


def _from_npz(path: Path, key: str | None) -> Array:
    # Opened here, as np.load leaves a file open if it is not an archive.
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


def _csv_rows(path: Path) -> Rows:
    """Opens rows of numbers separated by commas, with or without a header; reads the file once to count them."""
    if not path.is_file():
        # Also a pipe is refused: the file is read twice.
        raise FileNotFoundError(2, "No such file", str(path))
    named, clients, dim = False, 0, 0
    for line, cells in _csv_lines(path):
        if dim == 0:
            dim = len(cells)
            if not any(_is_number(cell) for cell in cells):
                named = True
                continue
            if dim > 2 and cells == [str(i) for i in range(dim)]:
                raise VectorError(
                    f"{path}, line {line}: counts 0, 1, 2, …, as column names do that some programs write. Remove the "
                    "line, or write 0.0 for 0 if it is a client's vector after all."
                )
        if len(cells) != dim:
            raise VectorError(f"{path}, line {line}: has {len(cells)} cells where the first line has {dim}.")
        clients += 1
    if clients == 0:
        raise VectorError(f"{path}: holds no row of numbers.")

    def blocks(rows: int) -> Iterator[tuple[int, Array]]:
        lines, start = _csv_lines(path), 0
        if named:
            next(lines)
        while block := [_numbers_in(path, line, cells) for line, cells in islice(lines, rows)]:
            yield start, np.array(block)
            start += len(block)

    return Rows(path, clients, dim, named, blocks)


def _numbers_in(path: Path, line: int, cells: list[str]) -> list[float]:
    try:
        return list(map(float, cells))
    except ValueError:
        column = next(i for i, cell in enumerate(cells, start=1) if not _is_number(cell))
        raise VectorError(
            f"{path}, line {line}, column {column}: not a number (cells are separated by commas)."
        ) from None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _csv_lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Yields the lines that are not blank, with their numbers from 1."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        reader = csv.reader(file)
        try:
            for cells in reader:
                if cells and cells != [""]:
                    yield reader.line_num, cells
        except UnicodeDecodeError:
            raise VectorError(f"{path}: not a text file in UTF-8.") from None
        except csv.Error:
            raise VectorError(f"{path}, line {reader.line_num}: not cells separated by commas.") from None
