"""Tables with a user column that are larger than memory: split by user into temporary files, read one at a time."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from cpsgd._table_values import join
from cpsgd.tables import Chunk, Column, DataTable, labels

# Values of a table in files that are held in memory; larger tables are split.
_CELLS = 1 << 23
# Files that a table is split into.
_PARTS = 128


def whole_users(table: DataTable, user: str, columns: Sequence[str]) -> Iterator[Chunk]:
    """Yields the columns in parts, each with all rows of its users in the table's order.

    Tables in memory and small files are one part. A larger table is split by user into files in a temporary folder that
    only this account can read, and that is deleted in the end. `TMPDIR` says where it is. The table is read once: if a
    file changed in between, a second reading could give one user's rows to another.
    """
    names = tuple(dict.fromkeys((*columns, user)))
    if table.in_memory:
        yield table.columns(names)
        return
    chunks = table.chunks(names)
    held: list[Chunk] = []
    cells = 0
    for chunk in chunks:
        held.append(chunk)
        cells += len(chunk[user]) * len(names)
        if cells > _CELLS:
            break
    else:
        yield _joined(held)
        return
    with TemporaryDirectory(prefix="cpsgd-") as folder:
        paths = [Path(folder) / str(part) for part in range(_PARTS)]
        with ExitStack() as stack:
            files = [stack.enter_context(path.open("wb")) for path in paths]
            for chunk in chain(_emptied(held), chunks):
                for part, rows in _split(chunk, user):
                    pickle.dump(rows, files[part], protocol=5)
        for path in paths:
            if path.stat().st_size:
                yield _joined(list(_read(path)))
            path.unlink()


def _emptied(held: list[Chunk]) -> Iterator[Chunk]:
    while held:
        yield held.pop(0)


def _split(chunk: Chunk, user: str) -> Iterator[tuple[int, Chunk]]:
    part = parts_of(user, chunk[user])
    order = np.argsort(part, kind="stable")
    found, starts = np.unique(part[order], return_index=True)
    for number, own in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
        yield number, {name: column[own] for name, column in chunk.items()}


def _read(path: Path) -> Iterator[Chunk]:
    """Yields the tables in a temporary file that this process wrote."""
    size = path.stat().st_size
    with path.open("rb") as file:
        while file.tell() < size:
            yield pickle.load(file)


def _joined(chunks: list[Chunk]) -> Chunk:
    names = list(chunks[0])
    # One column at a time, so that only one of them is there twice.
    return {name: join([chunk.pop(name) for chunk in chunks]) for name in names}


def parts_of(user: str, column: Column) -> NDArray[np.int64]:
    """Returns the number of each row's part, one for all users of one text (see `cpsgd.tables.text_of`).

    Arrow gives whole numbers as floats where some of a chunk are missing. So numbers are placed as floats; large ones
    that are the same float share a part.
    """
    if column.dtype.kind == "O" and {type(entry) for entry in column} <= {int, type(None)}:
        column = column.astype(np.float64)
    if column.dtype.kind in "iuf":
        bits = np.nan_to_num(column.astype(np.float64) + 0.0).view(np.uint64)
        # Multiplicative hashing (Knuth, The Art of Computer Programming, volume 3, 6.4): the upper bits are mixed best.
        mixed = (bits ^ (bits >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        return (mixed >> np.uint64(40)).astype(np.int64) * _PARTS >> 24
    texts, number = labels(user, column, missing=True)
    # Rows without a user have the number -1, and are refused or left out later.
    return np.array([*(crc32(text.encode(errors="surrogatepass")) % _PARTS for text in texts), 0])[number]
