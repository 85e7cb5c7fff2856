"""Rounds in this process: bytes go from a server's session to clients' sessions and back, and nothing else does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from cpsgd import Plan, Protocol, Run
from cpsgd.errors import CpsgdError
from cpsgd.federation.answering import ClientSession, SessionState
from cpsgd.federation.limits import Limits, open_client_files
from cpsgd.federation.messages import Request
from cpsgd.federation.sessions import RoundSession
from cpsgd.secagg import SecureParameters, SecureServer, Stage

DIM, RUN = 40, "77"


class Client:
    """A client that keeps its session's state, as an engine does between two requests."""

    def __init__(
        self,
        vector: np.ndarray | None = None,
        *,
        run: str = RUN,
        settings: Mapping[str, object] | None = None,
        secure: bool = True,
        **limits: Any,
    ) -> None:
        self.vector = np.zeros(DIM, np.float32) if vector is None else vector
        self.run, self.state, self.secure = run, b"", secure
        self.settings = dict(settings or {})
        self.limits = Limits(**limits)
        self.trained = 0

    def train(self, protocol: Protocol) -> np.ndarray:
        self.trained += 1
        return self.vector

    def ask(self, request: Request | bytes) -> bytes:
        data = request if isinstance(request, bytes) else request.to_bytes()
        memory, signing = open_client_files(self.settings)
        session = ClientSession(self.limits, self.run, self.state, memory=memory, signing=signing, secure=self.secure)
        try:
            return session.answer(data, self.train)
        finally:
            self.state = session.state

    @property
    def secrets(self) -> bytes:
        return SessionState.from_bytes(self.state).secrets


Tamper = Callable[[str, Stage, bytes], bytes | None]
"""From a node, a stage and an answer to what arrives of it; None for silence."""


def honest(node: str, stage: Stage, answer: bytes) -> bytes:
    return answer


def carry(session: RoundSession[str], clients: Mapping[str, Client], tamper: Tamper = honest) -> np.ndarray | None:
    """Runs a round to its end."""
    exchange(session, clients, tamper)
    return session.release()


def exchange(session: RoundSession[str], clients: Mapping[str, Client], tamper: Tamper) -> list[Stage]:
    """Runs all stages of a round, and returns them."""
    stages = []
    while (stage := session.stage) is not None:
        stages.append(stage)
        for node, request in session.requests().items():
            try:
                answer = tamper(node, stage, clients[node].ask(request))
                if answer is not None:
                    session.receive(node, answer)
            except CpsgdError as error:
                session.drop(node, f"{type(error).__name__}: {error}")
        session.close()
    return stages


def parameters(plan: Plan, **changes: Any) -> SecureParameters:
    found = SecureParameters.for_protocol(plan.protocol, round=1, dropout=0.25, surviving=plan.surviving)
    return replace(found, **changes)


def opening(plan: Plan, *, secure: SecureParameters | None = None, **changes: Any) -> Request:
    """The request that begins round 1, with some of its fields changed."""
    fields: dict[str, Any] = {
        "stage": Stage.ADVERTISE,
        "round": 1,
        "rounds": plan.rounds,
        "surviving": plan.surviving,
        "protocol": plan.protocol.to_json(),
        "payload": SecureServer(secure or parameters(plan)).invite()[0],
    }
    return Request(**{**fields, **changes})


def plain(plan: Plan, round: int = 1) -> Request:
    """The request of a round without secure aggregation."""
    return Request(Stage.UPLOAD, round, plan.rounds, plan.surviving, plan.protocol.to_json())


def with_protocol(plan: Plan, **changes: Any) -> Plan:
    # What was promised is about other parameters.
    return replace(plan, protocol=replace(plan.protocol, promise=None, **changes))


def with_run(plan: Plan, **changes: Any) -> Plan:
    """The plan for other rounds: what was proved is about others."""
    run = plan.run
    names = ("rounds", "participation", "adjacency", "surviving", "colluding", "examples")
    other = Run.of(plan.protocol, **{**{name: getattr(run, name) for name in names}, **changes})
    return replace(plan, guarantee=replace(plan.guarantee, run=other))


def with_mechanism(plan: Plan, **changes: Any) -> Plan:
    mechanism: Any = plan.protocol.mechanism
    return with_protocol(plan, mechanism=replace(mechanism, **changes))


def with_more_noise(plan: Plan) -> Plan:
    """The same integers, each worth twice as much."""
    mechanism = plan.protocol.mechanism
    return with_protocol(plan, mechanism=mechanism.with_scale(2 * mechanism.scale))
