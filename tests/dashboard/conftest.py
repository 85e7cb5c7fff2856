"""A folder with one of each, and a client that has the token of its dashboard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dashboard.clients import Client, admitted
from tests.dashboard.samples import write_all


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_all(tmp_path / "shown")


@pytest.fixture
def client(folder: Path) -> Client:
    return admitted(folder)
