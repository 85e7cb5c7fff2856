"""Columns of a table, a chunk of rows at a time: what a table is, and what its columns hold.

No error quotes a value. Errors are for whoever holds the table, and no guarantee covers them: that a table was refused
says something about it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ColumnError, ParameterError, TableError

Column = NDArray[Any]
Chunk = dict[str, Column]

CHUNK_ROWS = 1 << 16
"""Rows that are held at a time."""


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


def different(names: Iterable[object], title: str) -> tuple[str, ...]:
    """Names of columns as texts, or `TableError` if two are alike."""
    found = tuple(map(str, names))
    if len(set(found)) < len(found):
        raise TableError(f"{title} has two columns of one name; rename one.")
    return found


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

    "a" and "a " are, too, wherever they come from: as two users, one person would count twice.

    Raises:
        ColumnError: It has missing values, or text among numbers.
    """
    kind = column.dtype.kind
    if (kind == "f" and not np.isfinite(column).all()) or (kind in "mM" and np.isnat(column).any()):
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; fill them in or drop them.")
    if kind not in "fiubOUSmM":
        raise ColumnError(f"{title}: column {name!r} holds {column.dtype}, not categories.")
    if kind == "O":
        kinds = {type(entry) for entry in column.tolist()}
        if type(None) in kinds or any(isinstance(e, float) and e != e for e in column.tolist()):
            raise ColumnError(f"{title}: column {name!r} has missing values; fill them in or drop their rows.")
        if str in kinds and len(kinds) > 1:
            raise ColumnError(f"{title}: column {name!r} mixes text and other values; make it one of them.")
    try:
        different, number = np.unique(column, return_inverse=True)
    except (TypeError, ValueError, ArithmeticError):
        raise ColumnError(f"{title}: column {name!r} is not of single values of one type.") from None
    written = [text_of(entry) for entry in different]
    texts = {text: i for i, text in enumerate(dict.fromkeys(written))}
    place = np.array([texts[text] for text in written], dtype=np.int64)
    return list(texts), place[number.reshape(-1)]


def text_of(value: object) -> str:
    """A category as text without blanks around it; whole numbers without a point, truth as 1 and 0."""
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, bytes):
        return value.decode(errors="backslashreplace").strip()  # two ids stay two
    if isinstance(value, float | np.floating) and float(value).is_integer():
        return str(int(value))
    return str(value).strip()
