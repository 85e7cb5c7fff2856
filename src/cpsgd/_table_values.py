"""Values of a column as numbers or as categories, with clear refusals. No error quotes a value."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ColumnError

Column = NDArray[Any]
Chunk = dict[str, Column]

# Dropping rows by hand would change the number of users by what is protected.
REMEDY = "say what they count as: missing='drop', 'bounds' or a value (--missing)"
# A number as people and programs write it. Texts with leading zeros are codes, not numbers.
NUMBER = re.compile(r"[+-]?((0|[1-9]\d*)(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)


# Types whose equal values have one text.
_ONE_TEXT = {str, bytes, int, float, bool, Decimal, date}
# Floats tell whole numbers apart up to here.
_LARGE = 2.0**53


def are_large(column: Column) -> bool:
    """Returns whether some numbers are so large that two different integers could be the same float."""
    return bool((np.abs(column.astype(np.float64)) >= _LARGE).any())


def join(columns: Sequence[Column]) -> Column:
    """Concatenates parts of a column. Large whole numbers stay integers even if other parts are floats.

    As floats, one missing value would change the categories of everybody else.
    """
    if np.result_type(*{column.dtype for column in columns}).kind == "f" and any(
        column.dtype.kind in "iu" and are_large(column) for column in columns
    ):
        columns = [column.astype(object) for column in columns]
    return np.concatenate(columns)


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
        raise ColumnError(
            f"{title}: column {name!r} is not of numbers; mend its texts, or count them by a histogram."
        ) from None
    if not np.isfinite(found).all():
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; {REMEDY}.")
    return found


def maybe_numbers(name: str, column: Column, title: str = "The table") -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Returns a column as numbers, and which are present. Infinity becomes the largest finite number of its sign.

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
        return np.fromiter(map(is_none, column.tolist()), dtype=np.bool_, count=len(column))
    return np.zeros(len(column), dtype=np.bool_)


def is_none(entry: Any) -> bool:
    """Returns whether an entry is None, NaN, no time, or blank text."""
    if isinstance(entry, str | bytes):
        return not entry.strip()
    # pandas' missing value is neither equal to itself nor different.
    return entry is None or type(entry).__name__ == "NAType" or bool(entry != entry)


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
        raise ColumnError(f"{title}: column {name!r} has NaN, missing or infinite values; {REMEDY}.")
    if kind == "O":
        _check_types(name, column, title)
    try:
        if kind in "OUS":
            entries = column.tolist()
            different: Iterable[object] = sorted(set(entries))
            kinds = set(map(type, entries))
            if len(kinds) > 1 or not kinds <= _ONE_TEXT:
                # Equal entries may be written differently: each by itself, or the first would name all of them.
                entries = list(map(text_of, entries))
                different = sorted(set(entries))
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
    """Returns a category or a user as text, the same for all spellings of one value.

    Blanks around it go, numbers are written in full without zeros at the end, and truth values are 1 and 0. Times have
    no more digits than they need, and are in UTC where they have a time zone. As two texts, one person would count as
    two users.

    Example:
        >>> [text_of(value) for value in (1, 1.0, True, "1.00", " 1e0", "01")]
        ['1', '1', '1', '1', '1', '01']
    """
    if isinstance(value, bool | np.bool_):
        return str(int(value))
    if isinstance(value, datetime | np.datetime64):
        return _time_text(value)
    # Bytes that are not text stay different.
    text = (value.decode(errors="backslashreplace") if isinstance(value, bytes) else str(value)).strip()
    if text.isdecimal() or not NUMBER.fullmatch(text):
        return text
    text = format(Decimal(text), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "0" if text == "-0" else text


def _time_text(time: datetime | np.datetime64) -> str:
    """Returns a time as ISO text, independent of its unit; at midnight only the date."""
    if isinstance(time, datetime):
        time = time if time.tzinfo is None else time.astimezone(UTC).replace(tzinfo=None)
        text = time.isoformat()
    else:
        # NumPy writes whole hours, months and so on by other texts than the same time in seconds.
        coarse = np.datetime_data(time.dtype)[0] in ("Y", "M", "W", "D", "h", "m")
        text = str(time.astype("datetime64[s]") if coarse else time)
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return text.removesuffix("T00:00:00")


def _check_types(name: str, column: Column, title: str) -> None:
    """Refuses missing values, and text among other values."""
    types = {type(entry) for entry in column.tolist()}
    if type(None) in types or (float in types and any(e != e for e in column.tolist() if isinstance(e, float))):
        raise ColumnError(f"{title}: column {name!r} has missing values; {REMEDY}.")
    if str in types and len(types) > 1:
        raise ColumnError(f"{title}: column {name!r} mixes text and other values; make it one of them.")
