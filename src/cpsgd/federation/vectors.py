"""A model's arrays as one vector, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cpsgd.errors import ParameterError, VectorError

Arrays = Mapping[str, NDArray[Any]]
"""A model: its arrays by name, in an order that all sides keep."""


def flatten(arrays: Arrays, dim: int) -> NDArray[np.float32]:
    """All arrays one after the other as one vector.

    Raises:
        ParameterError: They are not float arrays of `dim` coordinates in all.
    """
    for name, array in arrays.items():
        if array.dtype.kind != "f":
            raise ParameterError(
                f"The model's array {name!r} is of type {array.dtype}, and only floats can be averaged. Leave counters "
                "and the like out of the arrays that travel."
            )
    size = sum(array.size for array in arrays.values())
    if size != dim:
        raise ParameterError(f"The model has {size} coordinates and the plan {dim}; plan with dim={size}.")
    return np.concatenate([array.reshape(-1) for array in arrays.values()]).astype(np.float32)


def unflatten(vector: NDArray[np.float32], like: Arrays) -> dict[str, NDArray[Any]]:
    """The vector as arrays with the names, shapes and types of `like`."""
    arrays, start = {}, 0
    for name, array in like.items():
        arrays[name] = vector[start : start + array.size].reshape(array.shape).astype(array.dtype)
        start += array.size
    return arrays


def check_alike(found: Arrays, sent: Arrays) -> None:
    """Refuses what a train function returned if its arrays are others than those it was sent.

    Raises:
        VectorError: Their names, order or shapes differ.
    """
    one, other = ([(name, array.shape) for name, array in arrays.items()] for arrays in (found, sent))
    if one != other:
        raise VectorError("The train function returned other arrays (names, order or shapes) than it was sent.")
