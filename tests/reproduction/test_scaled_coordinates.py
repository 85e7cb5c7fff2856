"""The comparison of errors with and without scales of coordinates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from cpsgd.learning.datasets import ImageDataset
from reproduction import scaled_coordinates
from reproduction.scaled_coordinates import errors, main


def test_noise_falls_as_the_formula_says() -> None:
    sizes = np.array([4.0, 1.0, 1.0, 0.25])
    signs = np.random.default_rng(0).choice([-1.0, 1.0], (50, 4))
    rows = (sizes * signs).astype(np.float32)
    noise, everything = errors(rows, np.sqrt(sizes))
    plain_noise, plain = errors(rows, np.ones(4))
    # √s keeps no norm by itself, but the product of squared norm and squared scales does not depend on their size.
    assert noise / plain_noise == pytest.approx(sizes.sum() ** 2 / (4 * np.sum(sizes**2)), rel=1e-6)
    assert everything < plain


def test_the_command_writes_its_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    random = np.random.default_rng(1)
    images = random.integers(0, 256, (40, 8, 8), dtype=np.uint8) * (np.arange(8, dtype=np.uint8) % 2)
    labels = random.integers(0, 10, 40, dtype=np.uint8)
    small = ImageDataset("small", "made here", images, labels, images[:5], labels[:5])
    monkeypatch.setattr(scaled_coordinates, "load", lambda name: small)
    out = tmp_path / "ratios.json"
    main(["--datasets", "mnist", "--rounds", "6", "--images", "20", "--looks", "2", "--out", str(out)])
    rows = json.loads(out.read_text())
    assert [(row["dataset"], row["inputs"]) for row in rows] == [("mnist", "as they are"), ("mnist", "scaled")]
    # Half of the inputs are 0 and need no noise; scaled inputs are not 0.
    assert all(0.0 < ratio < 1.0 for _, ratio, _ in rows[0]["ratios"])
    assert "as they are" in capsys.readouterr().out
