"""Tables with named columns, of three libraries."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
from sklearn.datasets import load_breast_cancer, load_diabetes

from cpsgd.errors import DataError, ParameterError
from cpsgd.learning.datasets import from_frame


def cancer() -> pd.DataFrame:
    frame = load_breast_cancer(as_frame=True).frame
    return frame.assign(hospital=[f"h{row % 60}" for row in range(len(frame))])


def test_the_three_kinds_of_table_hold_the_same() -> None:
    frame = cancer()
    found = [
        from_frame(table, label="target", clients="hospital")
        for table in (frame, pl.from_pandas(frame), pa.Table.from_pandas(frame))
    ]
    assert len({data.fingerprint for data in found}) == 1
    data = found[0]
    assert (data.size, data.feature_dim, data.classes, data.name) == (48, 30, 2, "table")
    assert data.batch([0]).features.dtype == np.float32


def test_columns_may_be_chosen_and_regression_is_told_by_floats() -> None:
    frame = load_diabetes(as_frame=True).frame
    data = from_frame(frame[:400], label="target", features=["bmi", "bp"], test=frame[400:])
    assert (data.size, data.feature_dim, data.classes, len(data.test_set().labels)) == (400, 2, None, 42)
    np.testing.assert_array_equal(data.batch([3]).features[0], frame[["bmi", "bp"]].to_numpy(np.float32)[3])


@pytest.mark.parametrize(
    ("frame", "changes", "message"),
    [
        (cancer(), {"label": "diagnosis"}, "no column 'diagnosis'; it has mean radius"),
        (cancer(), {"clients": "person"}, "no column 'person'"),
        (cancer(), {"clients": None}, "column 'hospital', got .*number what is text"),
        (cancer(), {"features": ["age"]}, "no column 'age'"),
        (cancer().replace({"mean area": {1001.0: np.nan}}), {}, "features holds NaN"),
        (pl.from_pandas(cancer()).with_columns(target=pl.lit(None)), {}, "labels holds NaN"),
        (pd.concat([cancer(), cancer()], axis=1), {"features": ["mean area"]}, "two columns of one name"),
        (cancer()[[]], {}, "no column left"),
        (cancer()[:0], {}, "is empty"),
        (cancer().assign(hospital=None), {}, "missing|client id"),
        (np.eye(3), {}, "there is from_arrays"),
    ],
)
def test_what_does_not_fit_is_refused(frame: Any, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        from_frame(frame, **{"label": "target", "clients": "hospital", **changes})


def test_the_label_is_no_feature() -> None:
    with pytest.raises(ParameterError, match="without the label's"):
        from_frame(cancer(), label="target", features=["target", "mean area"])
