from __future__ import annotations

import inspect
from functools import partial
from unittest.mock import patch

import pytest

# It looks for its own name in the stack with the source of every frame, for a second among all the tests' modules.
with patch("inspect.stack", partial(inspect.stack, 0)):
    from cpsgd.engines.nvflare import controller

from .local import cached_plan


@pytest.fixture(autouse=True)
def same_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning takes most of a second, and most tests have the same plan."""
    monkeypatch.setattr(controller, "plan", cached_plan)
