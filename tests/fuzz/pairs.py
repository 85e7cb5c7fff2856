"""What a server may send to a client in the middle of a round, with a request for the next one, and what it may get."""

from __future__ import annotations

import copy
import struct
from dataclasses import dataclass
from functools import cache

import numpy as np

from cpsgd import plan
from cpsgd.errors import CpsgdError, MagicError
from cpsgd.federation.answering import ClientSession
from cpsgd.federation.choreography import begin_round
from cpsgd.federation.limits import Limits
from cpsgd.federation.messages import Pair
from cpsgd.federation.sessions import RoundSession
from cpsgd.federation.terms import Terms

from . import requests, secure

RUN, NODES, VICTIM = "1", ("a", "b", "c"), "a"
_HEAD = struct.Struct("<4sBBI")


@dataclass
class Moment:
    """A stage of a round in which the next one is prepared, before the client has answered."""

    server: RoundSession[str]
    state: bytes
    request: bytes
    answer: bytes


@cache
def moments() -> tuple[Terms, list[Moment]]:
    """Both such stages of a round."""
    best = plan(len(NODES), 3, 8.0, 1e-5, rounds=2, secure=True, colluding=1, bits=14, mechanism="binomial")
    terms = Terms(plan=best)
    server = begin_round(terms, 1, NODES, run=RUN, prepares=True)
    states = dict.fromkeys(NODES, b"")
    found: list[Moment] = []
    while server.stage is not None:
        answers: dict[str, bytes] = {}
        for node, request in server.requests().items():
            session = client(states[node])
            answers[node] = session.answer(request, lambda protocol: np.zeros(3, np.float32))
            if node == VICTIM and Pair.begins(request):
                found.append(Moment(copied(terms, server), states[node], request, answers[node]))
            states[node] = session.state
        for node, answer in answers.items():
            server.receive(node, answer)
        server.close()
    return terms, found


def client(state: bytes) -> ClientSession:
    """The client with this state."""
    return ClientSession(Limits(), RUN, state)


def copied(terms: Terms, server: RoundSession[str]) -> RoundSession[str]:
    """A server to be fed; the terms are never changed."""
    return copy.deepcopy(server, {id(terms): terms, id(terms.plan): terms.plan})


def ask(data: bytes) -> None:
    """Two requests to a client; whatever comes of the second, what it answers is two answers."""
    refusal = None
    for moment in moments()[1]:
        session = client(moment.state)
        try:
            answer = session.answer(data, lambda protocol: np.zeros(3, np.float32))
        except CpsgdError as error:
            refusal = refusal or error
            continue
        if Pair.begins(data):
            Pair.from_bytes(answer)
        client(session.state)
        return
    raise refusal or MagicError("There is nobody to ask.")


def answer(data: bytes) -> None:
    """Two answers of a client; with or without them the stage can be closed."""
    refusals: list[CpsgdError] = []
    terms, found = moments()
    for moment in found:
        server = copied(terms, moment.server)
        try:
            server.receive(VICTIM, data)
        except CpsgdError as error:
            refusals.append(error)
        server.close()
    if len(refusals) == len(found):
        raise refusals[0]


def request_seeds() -> list[bytes]:
    """What the client is really asked."""
    return [moment.request for moment in moments()[1]]


def answer_seeds() -> list[bytes]:
    """What the client really answers, and why it would not."""
    found = [moment.answer for moment in moments()[1]]
    return [*found, *(Pair.without(Pair.from_bytes(data).first, "StageError: no").to_bytes() for data in found)]


def _halves(data: bytes) -> tuple[bytes, bytes] | None:
    try:
        pair = Pair.from_bytes(data)
    except CpsgdError:
        return None
    return pair.first, pair.second


def seal_requests(data: bytes) -> bytes:
    """Both halves with the checksum that fits."""
    halves = _halves(data)
    return data if halves is None else data[: _HEAD.size] + b"".join(map(requests.seal_request, halves))


def seal_answers(data: bytes) -> bytes:
    """Both halves with the checksum that fits; a reason has none."""
    halves = _halves(data)
    if halves is None:
        return data
    refused = data[len(b"cpsp") + 1]
    first, second = (secure.seal(b"\0" + half)[1:] for half in halves)
    return data[: _HEAD.size] + first + (halves[1] if refused else second)
