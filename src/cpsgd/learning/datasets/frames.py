"""Data sets from tables with named columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets.arrays import ArrayDataset, from_arrays


def from_frame(
    frame: Any,
    *,
    label: str,
    clients: str | None = None,
    features: Sequence[str] | None = None,
    test: Any = None,
    test_share: float = 0.2,
    classes: int | None = None,
    name: str = "table",
) -> ArrayDataset:
    """A data set from a pandas or polars frame, or a pyarrow table. Features are taken as float32.

    Args:
        frame: The table, one row per example.
        label: The column to predict: classes 0, 1, ..., or floats for regression.
        clients: The column that says whose a row is; every row is a client by default.
        features: The columns to predict from; by default all others.
        test: A table with the same columns for measuring, of which no row may be a client's.
        test_share: Where there is none: this share of the clients is set aside, see `from_arrays`.
        classes: Number of classes; by default one more than the largest label.
        name: Short name, for reports.

    Raises:
        DataError: A column is missing, or does not hold what it should.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"user": ["a", "b", "a", "c"], "age": [1, 2, 3, 4], "sick": [0, 1, 1, 0]})
    >>> data = from_frame(frame, label="sick", clients="user")
    >>> data.size, data.feature_dim, data.classes
    (2, 1, 2)
    """
    names = _names(frame)
    if features is None:
        features = [column for column in names if column not in (label, clients)]
    if not features:
        raise DataError(f"There is no column left to predict {label!r} from.")
    if isinstance(features, str) or label in features or clients in features:
        raise ParameterError("Expected features to be a list of columns without the label's and the clients'.")
    ids = None if clients is None else _values(frame, clients)
    tests: dict[str, Any] = {}
    if test is not None:
        tests = {"test_features": _table(test, features), "test_labels": _column(test, label)}
    return from_arrays(
        _table(frame, features),
        _column(frame, label),
        clients=ids,
        test_share=test_share,
        classes=classes,
        name=name,
        **tests,
    )


def _names(frame: Any) -> list[str]:
    names = getattr(frame, "column_names", getattr(frame, "columns", None))
    if names is None or not hasattr(frame, "__getitem__"):
        raise DataError(
            f"Expected a pandas or polars frame, or a pyarrow table, got {type(frame).__name__}; for arrays there is "
            "from_arrays."
        )
    return list(names)


def _values(frame: Any, column: str) -> NDArray[Any]:
    names = _names(frame)
    if names.count(column) != 1:
        found = "several columns" if column in names else "no column"
        raise DataError(f"There is {found} {column!r} among {', '.join(map(str, names))}.")
    return np.asarray(frame[column].to_numpy())


def _column(frame: Any, column: str) -> NDArray[Any]:
    values = _values(frame, column)
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"Expected numbers in every row of column {column!r}, got {values.dtype}. Fill in what is missing, and "
            "number what is text."
        )
    return values


def _table(frame: Any, columns: Sequence[str]) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        return np.stack([_column(frame, column).astype(np.float32) for column in columns], axis=1)
