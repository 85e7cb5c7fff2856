from __future__ import annotations

import pytest

from cpsgd.engines.nvflare import controller

from .local import cached_plan


@pytest.fixture(autouse=True)
def same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes most of a second, and most tests have the same plan."""
    monkeypatch.setattr(controller, "plan", cached_plan)
