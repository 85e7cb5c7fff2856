"""Plans with correlated noise for tests, and clients that remember."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from cpsgd import Plan, Protocol
from cpsgd.correlated.mechanism import CorrelatedGaussian

from .local import DIM, Client, with_run


def correlated_plan(like: Plan, *, rounds: int = 6, clients: int = 4, surviving: int = 3, **changes: Any) -> Plan:
    """A plan for clients in one round each, or as `changes` say, with much noise."""
    fields: dict[str, Any] = {
        "noise_deviation": 64.0,
        "step": 0.05,
        "window": 1 << 12,
        "coordinate_range": 0.7,
        "bands": 3,
        "run_length": rounds,
        **changes,
    }
    mechanism = CorrelatedGaussian(**fields)
    protocol = Protocol(clients=clients, dim=DIM, clip_norm=1.0, mechanism=mechanism, modulus=1 << 16)
    planned = replace(like, protocol=protocol)
    return with_run(planned, rounds=rounds, participation="once", surviving=surviving, colluding=1)


def remembering(folder: Path, name: str, **options: Any) -> Client:
    return Client(settings={"cpsgd-memory": str(folder / name)}, **options)
