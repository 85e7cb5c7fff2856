"""From requirements (clients, dimension, ε, δ, bits or error) to a protocol, with the frontier behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpsgd._lazy import on_demand

if TYPE_CHECKING:
    from cpsgd.planner.examples import plan_examples as plan_examples
    from cpsgd.planner.passes import PassesPlan as PassesPlan
    from cpsgd.planner.passes import plan_passes as plan_passes
    from cpsgd.planner.planning import FrontierPoint as FrontierPoint
    from cpsgd.planner.planning import Plan as Plan
    from cpsgd.planner.planning import plan as plan
    from cpsgd.planner.requirements import Requirements as Requirements
    from cpsgd.planner.search import Considered as Considered

# Requirements are read without the planner itself, by the command line for one.
__getattr__ = on_demand(
    __name__,
    {
        "Considered": "search",
        "FrontierPoint": "planning",
        "PassesPlan": "passes",
        "Plan": "planning",
        "Requirements": "requirements",
        "plan": "planning",
        "plan_examples": "examples",
        "plan_passes": "passes",
    },
)
