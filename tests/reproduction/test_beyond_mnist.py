"""Beyond MNIST: settings with equal effort, data that are held back, and results that are not repeated."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from reproduction import beyond_mnist
from reproduction.beyond_mnist import TASKS, drawn, finals, patients, run_task, without_a_fifth


def test_private_groups_try_the_same_settings_and_none_is_clipped_without_privacy() -> None:
    assert drawn("1 bit", 6) == drawn("cancelling", 6) == drawn("DP-SGD", 6)
    plain = drawn("no privacy", 6)
    assert {each["scale"] for each in plain} == {1.0}
    assert [each["lr"] for each in plain] == [each["lr"] for each in drawn("1 bit", 6)]


def test_a_fifth_is_held_back_and_the_test_set_is_not_used() -> None:
    data = patients()
    part = without_a_fifth(data)
    assert part.size == 364
    assert len(part.test_set().labels) == 91
    rows = {row.tobytes() for row in data.test_set().features}
    assert not rows & {row.tobytes() for row in np.concatenate([part.features, part.test_features])}


@pytest.mark.thorough
def test_groups_are_selected_trained_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "table", replace(TASKS["table"], rounds=4, passes=2, epochs=1))
    groups = (("no privacy", None), ("1 bit", 8.0), ("cancelling", 8.0), ("DP-SGD", 8.0))
    monkeypatch.setattr(beyond_mnist, "GROUPS", groups)
    options = argparse.Namespace(out=tmp_path, device="cpu", tries=2, seeds=1, seconds=100.0, opacus=False)
    for _ in range(2):  # the second time everything is known
        run_task("table", options, Console(quiet=True))
    rows = [json.loads(line) for line in (tmp_path / "table.jsonl").read_text().splitlines()]
    assert len(rows) == len(groups) * 3
    found = finals(tmp_path / "table.jsonl")
    assert set(found) == set(groups)
    for (_, epsilon), (row,) in found.items():
        assert (row["proved"] is None) == (epsilon is None)
        assert epsilon is None or row["proved"] <= epsilon
    beyond_mnist.draw(tmp_path, Console(quiet=True))
    assert (tmp_path / "accuracy.png").stat().st_size > 10_000
