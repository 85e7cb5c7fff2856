"""Fixtures shared by all tests."""

from __future__ import annotations

import hashlib
import itertools
import os

import pytest


@pytest.fixture
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the operating system's generator by a fixed sequence, so that a statistical test repeats exactly."""
    calls = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_128(next(calls).to_bytes(8, "little")).digest(size)

    monkeypatch.setattr(os, "urandom", urandom)
