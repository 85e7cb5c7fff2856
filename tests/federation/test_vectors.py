from __future__ import annotations

import numpy as np
import pytest

from cpsgd.errors import ParameterError, VectorError
from cpsgd.federation.messages import Arrays, check_alike, flatten, unflatten


def model(dim: int) -> Arrays:
    return {"weight": np.zeros((dim - 1, 1), np.float32), "bias": np.zeros(1, np.float32)}


def test_models_are_one_vector_and_keep_their_types() -> None:
    arrays = {
        "half": np.arange(6, dtype=np.float16).reshape(2, 3),
        "double": np.array(7.0),
        "none": np.zeros((0, 4), np.float32),
    }
    vector = flatten(arrays, 7)
    np.testing.assert_array_equal(vector, np.array([0, 1, 2, 3, 4, 5, 7], np.float32))
    back = unflatten(vector + 1, arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape
        assert back[name].dtype == array.dtype
        np.testing.assert_array_equal(back[name], array + 1)


def test_models_that_do_not_fit() -> None:
    with pytest.raises(ParameterError, match="plan with dim=5"):
        flatten(model(5), 6)
    with pytest.raises(ParameterError, match="'n' is of type int64"):
        flatten({"n": np.arange(3)}, 3)
    with pytest.raises(ParameterError, match="no arrays"):
        flatten({}, 0)
    check_alike(model(5), model(5))
    for other in (model(6), dict(reversed(list(model(5).items()))), {}):
        with pytest.raises(VectorError, match="other arrays"):
            check_alike(other, model(5))
