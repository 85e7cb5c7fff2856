"""Categories of rows: lists that are checked, and the number of each row's category."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ParameterError
from cpsgd.tables import Chunk, is_none, labels, text_of


def check_categories(name: str, given: Iterable[object]) -> tuple[str, ...]:
    """Returns different categories as texts, or raises `ParameterError`."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise ParameterError(f"Expected {name} to list categories.")
    entries = tuple(given)
    if any(is_none(entry) for entry in entries if not isinstance(entry, str | bytes)):
        raise ParameterError(f"Expected {name} to list no missing value: rows with one are in no category.")
    texts = tuple(text_of(entry) for entry in entries)
    if not texts or len(set(texts)) < len(texts):
        raise ParameterError(f"Expected {name} to list at least one category, each once.")
    return texts


def codes(
    names: Sequence[str], chunk: Chunk, known: Sequence[tuple[str, ...]], *, missing: bool = False
) -> NDArray[np.int64]:
    """Returns the number of each row's texts in these columns among those known, -1 for others.

    Args:
        names: The columns.
        chunk: The rows.
        known: Tuples with one text per column.
        missing: Whether a missing value is no category. Otherwise it is refused.
    """
    lists, number = combinations(names, chunk, missing=missing)
    place = {texts: i for i, texts in enumerate(known)}
    return np.array([*(place.get(texts, -1) for texts in lists), -1], dtype=np.int64)[number]


def combinations(
    names: Sequence[str], chunk: Chunk, *, missing: bool = False
) -> tuple[list[tuple[str, ...]], NDArray[np.int64]]:
    """Returns the different texts of the rows in these columns, and for each row their number, -1 if one is missing."""
    found: list[tuple[str, ...]] = [()]
    number = np.zeros(len(next(iter(chunk.values()))), dtype=np.int64)
    for name in names:
        texts, own = labels(name, chunk[name], missing=missing)
        there = (number >= 0) & (own >= 0)
        both, number[there] = np.unique(number[there] * len(texts) + own[there], return_inverse=True)
        number[~there] = -1
        found = [(*found[pair // len(texts)], texts[pair % len(texts)]) for pair in both.tolist()]
    return found, number
