"""A server with four clients in one process, which may kill itself in the middle of round 2: see test_course.py."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from cpsgd import Plan
from cpsgd.federation.course import Course
from cpsgd.federation.terms import Terms
from cpsgd.ledger import Ledger

from .local import Client

ROUNDS = 3
NODES = list("abcd")


class Momentum:
    """An optimizer that remembers something."""

    def __init__(self) -> None:
        self.velocity = np.zeros(1, np.float32)

    def __call__(self, model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        self.velocity = self.velocity * 0.5 + mean
        return model + self.velocity

    def state_dict(self) -> dict[str, np.ndarray]:
        return {"velocity": self.velocity}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        self.velocity = state["velocity"]


def open_course(folder: Path, plan: Plan, run: str, apply: Any) -> Course[str]:
    terms = Terms(plan=plan, ledger=Ledger(folder / "ledger"), population="people", engine="test")
    return Course(terms, np.zeros(plan.protocol.dim, np.float32), run=run, apply=apply, path=folder / "checkpoint")


def go(folder: Path, plan: Plan, run: str, stage: str) -> Course[str]:
    """Runs what is left of the rounds; dies at this stage of round 2, before it is closed."""
    course = open_course(folder, plan, run, Momentum())
    clients = {
        name: Client(
            np.full(plan.protocol.dim, 0.01, np.float32), run=run, settings={"cpsgd-memory": f"{folder}/{name}"}
        )
        for name in NODES
    }
    while course.round <= ROUNDS:
        # Where one joins, round 2 begins from the beginning: else it has no such stage.
        session = course.begin(NODES[:3] if course.round == 1 and stage == "advertise" else NODES)
        while session.stage is not None:
            for node, request in session.requests().items():
                session.receive(node, clients[node].ask(request))
            if session.stage.value == stage and session.report.round == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            session.close()
        course.finish(session)
    return course
