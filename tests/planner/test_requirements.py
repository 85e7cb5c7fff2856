"""`Requirements` holds what `plan` takes, and says of each what it means."""

from __future__ import annotations

import inspect
from dataclasses import MISSING, fields
from typing import get_type_hints

from cpsgd.planner import plan
from cpsgd.planner.requirements import Requirements


def test_the_fields_are_the_planners_parameters() -> None:
    parameters = inspect.signature(plan).parameters
    defaults = {name: MISSING if p.default is p.empty else p.default for name, p in parameters.items()}
    assert {entry.name: entry.default for entry in fields(Requirements)} == defaults
    hints = get_type_hints(plan)
    del hints["return"]
    assert get_type_hints(Requirements) == hints


def test_every_field_is_described() -> None:
    described = (Requirements.__doc__ or "").partition("Attributes:")[2]
    for entry in fields(Requirements):
        assert f"\n        {entry.name}: " in described
