"""What a run's file holds, and what is refused in it; `test_course.py` damages it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.errors import CheckpointError
from cpsgd.federation import checkpoint
from cpsgd.federation.checkpoint import Standing
from cpsgd.federation.sessions import RoundReport
from cpsgd.secagg import Stage

FINGERPRINT = "ab" * 16


def standing(**changes: Any) -> Standing[str]:
    return Standing(**{"fingerprint": FINGERPRINT, "model": np.arange(3, dtype=np.float32), **changes})


def test_everything_is_read_as_it_was_written(tmp_path: Path) -> None:
    report: RoundReport[str] = RoundReport(
        1, True, "", 3, {"a": "gone"}, {"a": Stage.MASK}, {"b": "lied"}, {"loss": 0.5}, {"x": 1.0}, {"a": 7}
    )
    report.accused, report.relay_bytes, report.proved = {"b": ["a"]}, {"c": 2}, ["b"]
    written = standing(
        optimizer={"v": np.ones(2)},
        clip=0.25,
        reports=[report],
        begun=2,
        charged_to="r",
        revealing=True,
        course="c",
        asked=["a"],
    )
    checkpoint.save(tmp_path / "file", written)
    found = checkpoint.load(tmp_path / "file", FINGERPRINT, 3)
    assert found is not None
    np.testing.assert_array_equal(found.model, written.model)
    np.testing.assert_array_equal(found.optimizer.pop("v"), written.optimizer.pop("v"))
    found.model = written.model
    assert found == written


def test_a_state_that_is_no_numbers_is_not_written(tmp_path: Path) -> None:
    """It would be read by running what is in it."""
    with pytest.raises(ValueError, match="allow_pickle"):
        checkpoint.save(tmp_path / "file", standing(optimizer={"v": np.array([object()])}))
    assert not (tmp_path / "file").exists()


@pytest.mark.parametrize(
    "changes",
    [
        {"model": np.zeros(3)},
        {"clip": "wide"},
        {"begun": "2"},
        {"charged_to": 5},
        {"revealing": 1},
        {"course": None},
        {"asked": "a"},
        {"optimizer": {"v": np.ones(2)}},
        {},
    ],
)
def test_what_a_run_does_not_write_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]
) -> None:
    with monkeypatch.context() as patch:
        if "optimizer" in changes:
            patch.setattr(checkpoint, "_OPTIMIZER", "other ")
        if not changes:
            patch.setattr(checkpoint, "_FORMAT", "cpsgd course 2")
        checkpoint.save(tmp_path / "file", standing(**changes))
    with pytest.raises(CheckpointError, match="cannot be read"):
        checkpoint.load(tmp_path / "file", FINGERPRINT, 3)
