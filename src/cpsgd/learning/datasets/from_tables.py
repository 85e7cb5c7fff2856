"""Data sets from tables with named columns."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets.arrays import ArrayDataset, from_arrays
from cpsgd.tables import Column, labels, open_table


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
    """Returns a data set of a table, one row per example. Features are taken as float32.

    Args:
        frame: A frame of pandas or polars, a pyarrow table, a mapping of names to columns, or the path of a Parquet or
            Feather file, or of a folder of them.
        label: The column to predict: classes 0, 1, ..., or floats for regression.
        clients: The column of client ids; every row is a client by default.
        features: The columns to predict from; by default all others.
        test: A table of test examples with the same columns; no client may have its rows.
        test_share: Without `test`: the share of the clients that is used for testing, see `from_arrays`.
        classes: Number of classes; by default one more than the largest label.
        name: Short name, for reports.

    Raises:
        DataError: A column is missing, or its values cannot be used.

    >>> import pandas as pd
    >>> frame = pd.DataFrame({"user": ["a", "b", "a", "c"], "age": [1, 2, 3, 4], "sick": [0, 1, 1, 0]})
    >>> data = from_frame(frame, label="sick", clients="user")
    >>> data.size, data.feature_dim, data.classes
    (2, 1, 2)
    """
    if isinstance(frame, np.ndarray):
        raise DataError("Expected a table with named columns, got an array; for arrays there is from_arrays.")
    table = open_table(frame)
    if features is None:
        features = [column for column in table.names if column not in (label, clients)]
    if not features:
        raise DataError(f"There is no column left to predict {label!r} from.")
    if isinstance(features, str) or label in features or clients in features:
        raise ParameterError("Expected features to be a list of columns without the label's and the clients'.")
    columns = table.columns([*features, label, *([] if clients is None else [clients])])
    tests: dict[str, Any] = {}
    if test is not None:
        held = open_table(test).columns([*features, label])
        tests = {"test_features": _matrix(held, features), "test_labels": _number_column(held, label)}
    return from_arrays(
        _matrix(columns, features),
        _number_column(columns, label),
        clients=None if clients is None else labels(clients, columns[clients], table.title)[1],
        test_share=test_share,
        classes=classes,
        name=name,
        **tests,
    )


def _number_column(columns: dict[str, Column], name: str) -> Column:
    values = columns[name]
    if values.dtype.kind not in "biuf":
        raise DataError(
            f"Expected numbers in every row of column {name!r}, got {values.dtype}. Fill in what is missing, and "
            "number what is text."
        )
    return values


def _matrix(columns: dict[str, Column], names: Sequence[str]) -> Column:
    with np.errstate(over="ignore"):
        return np.stack([_number_column(columns, name).astype(np.float32) for name in names], axis=1)
