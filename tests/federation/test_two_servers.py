"""A protocol with two servers, composed of exchanges: neither of them sees more than one share of a client's vector.

A toy: a client splits its vector into two shares that add up to it modulo M, and sends one to each server. Each server
adds up what it got. A collector, to which the servers are nodes, asks them first whose shares they have, and then for
the sum over those whose both shares came; it adds the two sums. All three sides run the session and the `carry` that
every engine runs, over a transport of this test.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest

from cpsgd.errors import CpsgdError, ThresholdError, WireError
from cpsgd.federation.carrying import Pace, Reply, carry
from cpsgd.federation.sessions import RoundSession
from cpsgd.secagg import Stage

MODULUS, DIM = 1 << 16, 8
VECTORS = np.random.default_rng(2).integers(0, 1000, (5, DIM), dtype=np.uint32)
SERVERS = ("leader", "helper")


class Client:
    """Splits its vector once, and gives each server the share that is its own."""

    def __init__(self, vector: np.ndarray) -> None:
        pad = np.random.default_rng(int(vector.sum())).integers(0, MODULUS, DIM, dtype=np.uint32)
        self.shares = {"leader": (vector - pad) % MODULUS, "helper": pad}

    def answer(self, request: bytes) -> bytes:
        return self.shares[request.decode()].astype("<u4").tobytes()


@dataclass
class Shares:
    """One exchange of a server with all clients: a share from each."""

    server: str
    nodes: list[str]
    needed: int
    taken: dict[str, np.ndarray] = field(default_factory=dict)
    stage, binding = Stage.UPLOAD, True

    def requests(self) -> Mapping[str, bytes]:
        return dict.fromkeys(self.nodes, self.server.encode())

    def receive(self, node: str, answer: bytes) -> None:
        if len(answer) != 4 * DIM:
            raise WireError(f"A share has {4 * DIM} bytes, got {len(answer)}.")
        self.taken[node] = np.frombuffer(answer, "<u4")

    def close(self) -> Mapping[str, str]:
        if len(self.taken) < self.needed:
            raise ThresholdError(f"{len(self.taken)} shares came, and {self.needed} are needed.")
        return {}

    def answer(self, request: bytes) -> bytes:
        """Answers the collector, to whom this server is a node."""
        asked = json.loads(request)
        if asked == "who":
            return json.dumps(sorted(self.taken)).encode()
        return (np.sum([self.taken[node] for node in asked], axis=0) % MODULUS).astype("<u4").tobytes()


@dataclass
class Collected:
    """What the collector has learnt from the servers."""

    clients: frozenset[str] = frozenset()
    total: np.ndarray = field(default_factory=lambda: np.zeros(DIM, np.uint32))


@dataclass
class Who:
    """The collector's first exchange with the servers: whose shares they have."""

    found: Collected
    answers: dict[str, frozenset[str]] = field(default_factory=dict)
    stage, binding, needed = Stage.SHARE, True, 2

    def requests(self) -> Mapping[str, bytes]:
        return dict.fromkeys(SERVERS, b'"who"')

    def receive(self, node: str, answer: bytes) -> None:
        self.answers[node] = frozenset(json.loads(answer))

    def close(self) -> Mapping[str, str]:
        if len(self.answers) < 2:
            raise ThresholdError("One server alone gives no sum.")
        self.found.clients = frozenset.intersection(*self.answers.values())
        return {}


@dataclass
class Totals:
    """The collector's second exchange: the sum of the shares of clients that both servers have."""

    found: Collected
    answers: dict[str, np.ndarray] = field(default_factory=dict)
    stage, binding, needed = Stage.UNMASK, True, 2

    def requests(self) -> Mapping[str, bytes]:
        return dict.fromkeys(SERVERS, json.dumps(sorted(self.found.clients)).encode())

    def receive(self, node: str, answer: bytes) -> None:
        self.answers[node] = np.frombuffer(answer, "<u4")

    def close(self) -> Mapping[str, str]:
        if len(self.answers) < 2:
            raise ThresholdError("One server alone gives no sum.")
        self.found.total = np.sum(list(self.answers.values()), axis=0) % MODULUS
        return {}


class Direct:
    """A transport to nodes in this process; a node that returns None is silent."""

    aborted = False

    def __init__(self, nodes: Mapping[str, Callable[[bytes], bytes | None]]) -> None:
        self.nodes, self.waiting = nodes, dict[str, bytes | None]()

    def send(self, session: RoundSession[str]) -> None:
        self.waiting = {node: self.nodes[node](request) for node, request in session.requests().items()}

    def replies(self, waiting: frozenset[str]) -> list[Reply[str]]:
        found, self.waiting = self.waiting, {}
        return [Reply(node, answer, size=len(answer)) for node, answer in found.items() if answer is not None]

    def end_stage(self) -> None:
        self.waiting = {}


def collect(servers: Mapping[str, Shares]) -> tuple[RoundSession[str], Collected]:
    found = Collected()
    session: RoundSession[str] = RoundSession(SERVERS, exchanges=[Who(found), Totals(found)])
    carry(session, Direct({name: server.answer for name, server in servers.items()}), Pace(stage=0.01))
    return session, found


def gather(silent: Mapping[str, set[str]], needed: int = 3) -> dict[str, tuple[RoundSession[str], Shares]]:
    """Both servers hear from the clients; `silent` names those that do not answer one of them."""
    clients = {f"client-{i}": Client(vector) for i, vector in enumerate(VECTORS)}
    found = {}
    for server in SERVERS:
        shares = Shares(server, list(clients), needed)
        session: RoundSession[str] = RoundSession(clients, exchanges=[shares])
        answers: dict[str, Callable[[bytes], bytes | None]] = {
            name: (lambda request: None) if name in silent.get(server, ()) else client.answer
            for name, client in clients.items()
        }
        carry(session, Direct(answers), Pace(stage=0.01, grace=0.0))
        found[server] = session, shares
    return found


def test_the_two_sums_give_the_sum_of_all_vectors() -> None:
    servers = gather({})
    session, found = collect({name: shares for name, (_, shares) in servers.items()})
    assert session.stage is None
    assert session.report.dropped == {}
    np.testing.assert_array_equal(found.total, VECTORS.sum(axis=0) % MODULUS)
    # Neither server's own sum is the sum, or near it.
    for _, shares in servers.values():
        assert np.abs(sum(shares.taken.values()) % MODULUS - VECTORS.sum(axis=0).astype(np.int64)).max() > 5000


def test_clients_that_reach_one_server_only_are_left_out_by_both() -> None:
    servers = gather({"leader": {"client-1"}, "helper": {"client-4"}})
    assert [list(session.report.dropped) for session, _ in servers.values()] == [["client-1"], ["client-4"]]
    assert all(session.report.stages.values() for session, _ in servers.values())
    session, found = collect({name: shares for name, (_, shares) in servers.items()})
    assert session.report.reason == ""
    assert found.clients == {"client-0", "client-2", "client-3"}
    np.testing.assert_array_equal(found.total, VECTORS[[0, 2, 3]].sum(axis=0) % MODULUS)


def test_a_server_with_too_few_shares_withholds_its_round() -> None:
    servers = gather({"helper": {"client-0", "client-1", "client-2"}})
    session, _ = servers["helper"]
    assert session.report.reason == "2 shares came, and 3 are needed."
    assert session.stage is None


def test_a_wrong_share_is_refused_and_its_sender_is_at_fault() -> None:
    shares = Shares("leader", ["client-0"], 0)
    session: RoundSession[str] = RoundSession(["client-0"], exchanges=[shares])
    with pytest.raises(CpsgdError, match="32 bytes"):
        session.receive("client-0", b"short")
    session.close()
    assert session.report.faults == {"client-0": "WireError: A share has 32 bytes, got 5."}
