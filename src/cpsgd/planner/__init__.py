"""From what a person wants (clients, dimension, ε, δ, bits or error) to a protocol, with the frontier behind it."""

from __future__ import annotations

from cpsgd.planner.planning import FrontierPoint as FrontierPoint
from cpsgd.planner.planning import Plan as Plan
from cpsgd.planner.planning import plan as plan
from cpsgd.planner.planning import plan_for as plan_for
from cpsgd.planner.requirements import Requirements as Requirements
from cpsgd.planner.search import Considered as Considered
