"""Fixtures shared by all tests."""

from __future__ import annotations

import hashlib
import itertools
import os

import pytest

# Scripts that wrote the data with an earlier release: they call what that release had.
collect_ignore = ["data"]


@pytest.fixture
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the operating system's generator by a fixed sequence, so that a statistical test repeats exactly."""
    calls = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_128(next(calls).to_bytes(8, "little")).digest(size)

    monkeypatch.setattr(os, "urandom", urandom)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips what needs a GPU where there is none."""
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU"))
