"""Bad numbers are told of by the names they were given under, and nothing warns or breaks down."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

ROUND = ("round protocol", "--clients", 3, "--dim", 10)
PLAN = ("plan", "--clients", 300, "--dim", 10, "--epsilon", 1)


@pytest.mark.parametrize(
    ("command", "words"),
    [
        ((*ROUND, "--range", 0), "Expected range in (1e-20, 1e+20), got range=0.0."),
        ((*ROUND, "--range", "-1e-300"), "got range=-1e-300."),
        ((*ROUND, "--range", "nan"), "finite range"),
        ((*ROUND, "--clip-norm", 0), "got clip_norm=0.0."),
        ((*ROUND, "--no-rotate", "--clip-norm", 0), "got clip_norm=0.0."),
        ((*ROUND, "--clip-norm", 1e300), "got clip_norm=1e+300."),
        ((*ROUND, "--no-rotate", "--clip-norm", 1e300), "got clip_norm=1e+300."),
        ((*ROUND, "--dropout", "-1e-300"), "Expected dropout in [0, 1)"),
        ((*PLAN, "--delta", 1e-6, "--clip-norm", 1e300), "Expected clip_norm in (1e-20, 1e+20)"),
        ((*PLAN, "--delta", 1e-6, "--clip-norm", 1e-300), "Expected clip_norm in (1e-20, 1e+20)"),
        ((*PLAN, "--delta", "-1e-300"), "Expected delta in [0, 1)"),
        ((*PLAN, "--delta", 1e-6, "--dropout", "-1e-300"), "Expected dropout in [0, 1)"),
    ],
)
def test_numbers_are_named_as_they_were_given(cpsgd: Any, command: tuple[Any, ...], words: str) -> None:
    result = cpsgd.refuses(words, *command)
    assert "coordinate_range" not in result.stderr


def test_huge_vectors_do_not_warn(cpsgd: Any) -> None:
    np.save("big.npy", np.full((5, 10), 1e300))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = cpsgd("round mean", "big.npy", "--trials", 200)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "squared error  inf measured, inf expected" in result.stdout
