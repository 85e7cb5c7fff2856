"""`cpsgd_mod`: the client's side. Wraps a train function; what leaves the client is one private, masked vector."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from logging import getLogger
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from cpsgd.engines.flower import _records
from cpsgd.engines.flower._memory import Answered, Memory
from cpsgd.engines.flower._records import RECORD, Request
from cpsgd.engines.flower._signing import Signing
from cpsgd.engines.flower.limits import Limits
from cpsgd.errors import (
    ParameterError,
    RoundError,
    RoundRefusedError,
    StageError,
    TrainFunctionError,
    VectorError,
)
from cpsgd.privacy.adjacency import Adjacency
from cpsgd.protocol import Protocol
from cpsgd.secagg import Invitation, SecureClient, SecureParameters, risk

# The most that an unlucky draw of the graph may have for a probability to protect less than it should.
_INSECURITY = 1e-6
_ANOTHER_PROTOCOL = "This client's limit is accounted for with another protocol, and it keeps to that."
_log = getLogger("flwr")


def cpsgd_mod(
    *,
    epsilon: float | None = None,
    delta: float | None = None,
    rounds: int | None = None,
    colluding: int = 0,
    adjacency: Adjacency = "replace-one",
    examples: int | None = None,
    min_clients: int = 2,
    fingerprint: bytes | None = None,
    allow_metrics: Iterable[str] = (),
    secure: bool = True,
) -> Mod:
    """A Flower mod for `@app.train(mods=[cpsgd_mod()])`.

    The train function stays as it is: it gets the model and returns the trained one. The difference is the update; it
    is clipped, rounded, given its share of the noise, masked, and sent as one flat array of bytes. Everything else that
    the train function returns stays here, except the metrics named in `allow_metrics`. An error in it is reported to
    the server without its text, which might quote data.

    The client does not take the server's word for its privacy. It refuses protocols without noise, and with `epsilon`
    and `delta` every round that would not keep them: the guarantee is computed here, for all rounds together.

    A SuperNode that was started with an identity and a roster (`--node-config 'cpsgd-identity="/path/to/key"
    cpsgd-roster="/path/to/roster" cpsgd-memory="/path/to/file"'`) takes part in rounds only whose keys and survivors
    are signed by those on the roster: the server can then not put keys of its own in place of theirs.

    Args:
        epsilon: ε that all rounds together may cost at most; needs `delta`. The first protocol that keeps it, with the
            number of rounds announced for it, is then all this client takes part in: costs of different ones would add
            up. It remembers over all runs and restarts if its SuperNode was started with a file for that
            (`--node-config 'cpsgd-memory="/path/to/file"'`). Without, Flower keeps its count for one run only.
        delta: δ of that guarantee.
        rounds: Rounds this client answers at most, counted in the same way.
        colluding: Other clients who may tell their noise to the server; it is not counted.
        adjacency: "replace-one" or "zero-out": which data sets are neighbours.
        examples: Protects single examples instead of the whole client: the train function returns the *sum* of at most
            this many clipped gradients, as `silo_sum` makes it, in place of a model.
        min_clients: The fewest clients in a sum this client is part of.
        fingerprint: `Protocol.fingerprint` of the one protocol to accept.
        allow_metrics: Names of metrics that may leave. They travel in clear and outside the privacy guarantee.
        secure: False also accepts rounds without secure aggregation, in which the server sees this client's own noisy
            message. The guarantees above then hold only for those who see no more than the model.

    Returns:
        The mod.
    """
    limits = Limits(
        epsilon=epsilon,
        delta=delta,
        rounds=rounds,
        colluding=colluding,
        adjacency=adjacency,
        examples=examples,
        min_clients=min_clients,
        fingerprint=fingerprint,
    )
    if isinstance(allow_metrics, str):
        raise ParameterError(f"Expected allow_metrics to be a list of names, got the text {allow_metrics!r}.")
    allowed = frozenset(allow_metrics)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            return _only_metrics(_call(call_next, message, context), message, allowed)
        request = Request.from_message(message)
        if request.stage == "upload" and not secure:
            return _upload(request, message, context, call_next, limits, allowed)
        if request.stage == "upload":
            raise RoundRefusedError(
                "The server asks for messages without secure aggregation. If it may see this client's own noisy "
                "message, say so with cpsgd_mod(secure=False)."
            )
        return _secure_stage(request, message, context, call_next, limits, allowed)

    return mod


@dataclass(frozen=True)
class _State:
    """What a client remembers between messages, in Flower's `context.state`: on its own machine, in memory.

    Attributes:
        run: The run that `round` belongs to, as text: Flower's numbers need 64 bits without sign.
        round: The last round of the run that was begun.
        rounds: Rounds that the server announced with the protocol.
        answered: Rounds in which something was sent, over all runs that Flower keeps one state for, or over all that
            are in the client's memory.
        accepted: Digest of the last protocol that was found acceptable.
        protocol: The current round's protocol as JSON.
        secrets: The state of the secure aggregation client, empty when no round is under way.
    """

    run: str = ""
    round: int = -1
    rounds: int = 0
    answered: int = 0
    accepted: bytes = b""
    protocol: str = ""
    secrets: bytes = b""

    @classmethod
    def of(cls, context: Context) -> _State:
        record: Any = context.state.config_records.get(RECORD, {})
        found, run = cls(**record), str(context.run_id)
        return found if found.run == run else cls(run=run, answered=found.answered, accepted=found.accepted)

    def save(self, context: Context, **changes: Any) -> _State:
        changed = replace(self, **changes)
        context.state[RECORD] = ConfigRecord(dict(vars(changed)))
        return changed


def _secure_stage(
    request: Request,
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    limits: Limits,
    allowed: frozenset[str],
) -> Message:
    """Answers one stage of secure aggregation. The state is saved before anything is computed from it."""
    signing, state = Signing.of(context), _State.of(context)
    if request.stage == "advertise":
        signing.check(Invitation.read(request.payload), context.run_id, request.round)
        protocol, state = _begin(request, state, context, limits)
        expected = _expected(protocol, request, limits)
        _once(request, state, context)
        client = SecureClient(expected=expected, identity=signing.identity, roster=signing.roster)
        reply = client.advertise(request.payload)
        state.save(context, secrets=client.export_state())
        return _records.make_reply(message, reply)
    if request.round != state.round:
        raise RoundError(f"The server's message is for round {request.round}, and this client is in {state.round}.")
    if not state.secrets:
        raise StageError("This client takes no part in the round, or has left it.")
    client = SecureClient.restore(state.secrets, identity=signing.identity, roster=signing.roster)
    # Whatever goes wrong below, no secret is used twice.
    state = state.save(context, secrets=b"")
    if request.stage != "mask":
        _once(request, state, context)
    if request.stage == "share":
        reply = client.share(request.payload)
    elif request.stage == "mask":
        protocol = Protocol.from_json(state.protocol)
        state = _count(state, context, limits)
        update, metrics = _update(message, context, call_next, protocol, limits, allowed)
        reply = client.mask(request.payload, protocol.encode_integers(update, request.round))
        state.save(context, secrets=client.export_state())
        return _records.make_reply(message, reply, metrics)
    elif request.stage == "confirm":
        reply = client.confirm(request.payload)
    else:
        # The last stage: nothing is kept, so nothing can be asked again.
        return _records.make_reply(message, client.unmask(request.payload))
    state.save(context, secrets=client.export_state())
    return _records.make_reply(message, reply)


def _upload(
    request: Request,
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    limits: Limits,
    allowed: frozenset[str],
) -> Message:
    """Answers a round without secure aggregation."""
    if Signing.of(context).roster is not None:
        raise RoundRefusedError("This client has a roster, and takes part in signed rounds of secure aggregation only.")
    protocol, state = _begin(request, _State.of(context), context, limits)
    _count(state, context, limits)
    update, metrics = _update(message, context, call_next, protocol, limits, allowed)
    return _records.make_reply(message, protocol.encode(update, request.round), metrics)


def _begin(request: Request, state: _State, context: Context, limits: Limits) -> tuple[Protocol, _State]:
    """Enters a round: a new one, with a protocol that keeps the client's limits."""
    if request.round <= state.round:
        raise RoundError(f"The server begins round {request.round} of this run again or too late.")
    if request.examples != (limits.examples or 0):
        raise RoundRefusedError(
            f"The server plans for sums of {request.examples} examples (0: whole clients are protected), and this "
            f"client is set up for {limits.examples or 0}: one of them would be wrong about what is protected."
        )
    protocol = Protocol.from_json(request.protocol)
    memory = Memory.of(context)
    if memory is not None and (before := memory.rounds()):
        state = replace(state, answered=len(before), accepted=bytes.fromhex(before[-1].digest))
    digest = limits.digest(protocol, rounds=request.rounds, surviving=request.surviving)
    if digest != state.accepted:
        if limits.epsilon is not None and state.answered:
            raise RoundRefusedError(_ANOTHER_PROTOCOL)
        limits.check(protocol, rounds=request.rounds, surviving=request.surviving)
    state = state.save(
        context, round=request.round, rounds=request.rounds, accepted=digest, protocol=request.protocol, secrets=b""
    )
    return protocol, state


def _once(request: Request, state: _State, context: Context) -> None:
    """Refuses, with a memory, a stage that was answered before, whichever state Flower hands over."""
    memory = Memory.of(context)
    if memory is not None:
        memory.once(state.run, request.round, request.stage)


def _count(state: _State, context: Context, limits: Limits) -> _State:
    """Counts the round before anything about the data is computed."""
    most = limits.rounds if limits.epsilon is None else state.rounds

    def check_rounds_left(answered: int) -> None:
        if most is not None and answered >= most:
            raise RoundRefusedError(f"This client has answered {answered} rounds, and answers no more.")

    def permit(before: list[Answered]) -> None:
        check_rounds_left(len(before))
        if any((other.run, other.round) == (this.run, this.round) for other in before):
            raise RoundError(f"This client has answered round {this.round} of this run already.")
        if limits.epsilon is not None and any(other.digest != this.digest for other in before):
            raise RoundRefusedError(_ANOTHER_PROTOCOL)

    memory = Memory.of(context)
    if memory is None:
        check_rounds_left(state.answered)
        return state.save(context, answered=state.answered + 1)
    this = Answered(state.run, state.round, state.accepted.hex())
    return state.save(context, answered=memory.add(this, permit))


def _expected(protocol: Protocol, request: Request, limits: Limits) -> SecureParameters:
    """The parameters of secure aggregation that this client agrees to: the graph and threshold are the server's choice.

    Raises:
        RoundRefusedError: The choice would let so many colluding clients and the server see more than the sum.
    """
    proposed = Invitation.read(request.payload).session.parameters
    if protocol.modulus is None or protocol.modulus.bit_count() != 1 or proposed.clients > protocol.clients:
        raise RoundRefusedError("The server's protocol does not fit secure aggregation.")
    expected = replace(
        proposed,
        dim=protocol.dim,
        bits=protocol.modulus.bit_length() - 1,
        fingerprint=protocol.fingerprint,
        round=request.round,
        surviving=request.surviving,
    )
    dropout = 1.0 - expected.surviving / expected.clients
    if risk(expected, dropout=dropout, colluding=min(limits.colluding, expected.clients)).insecurity > _INSECURITY:
        raise RoundRefusedError(
            f"With threshold={expected.threshold} and neighbours={expected.neighbours} the server and "
            f"{limits.colluding} colluding clients could see more than the sum."
        )
    return expected


def _update(
    message: Message,
    context: Context,
    call_next: ClientAppCallable,
    protocol: Protocol,
    limits: Limits,
    allowed: frozenset[str],
) -> tuple[NDArray[np.float32], dict[str, int | float]]:
    """Runs the train function, once; returns its update as one vector, and the metrics that may leave."""
    received = message.content
    if len(received.array_records) != 1:
        raise StageError(f"Expected one model in the server's message, got {len(received.array_records)}.")
    before = next(iter(received.array_records.values()))
    start = _records.flatten(before, protocol.dim)
    # The train function sees what was accepted here, not what the server wrote.
    accepted = ConfigRecord({"clip-norm": protocol.clip_norm, "examples": limits.examples or 0})
    message.content = RecordDict({**dict(received.items()), RECORD: accepted})
    kept = context.state[RECORD]
    reply = _call(call_next, message, context)
    # Some train functions begin by emptying the state.
    context.state[RECORD] = kept
    found = list(reply.content.array_records.values())
    if len(found) != 1:
        raise VectorError(f"Expected the train function to return one ArrayRecord, got {len(found)}.")
    if not _records.alike(found[0], before):
        raise VectorError("The train function returned other arrays (names, order or shapes) than it was sent.")
    update = _records.flatten(found[0], protocol.dim)
    if limits.examples is None:
        update -= start
    if not np.isfinite(update).all():
        # Falling out of the round would tell the server something about the data that no guarantee covers.
        _log.error("The update is NaN or infinite somewhere. It counts as zero, and nobody is told.")
        update = np.zeros_like(update)
    return update, _metrics(reply, allowed)


def _call(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    """Calls the user's function; an error's text might quote data, so it stays in this machine's log."""
    try:
        reply = call_next(message, context)
    except Exception as error:
        _log.error("The client's function failed.", exc_info=error)
        raise TrainFunctionError(type(error).__name__) from None
    if reply.has_error():
        raise TrainFunctionError("an error reply")
    return reply


def _metrics(reply: Message, allowed: frozenset[str]) -> dict[str, int | float]:
    return {
        name: value
        for record in reply.content.metric_records.values()
        for name, value in record.items()
        if name in allowed and isinstance(value, int | float)
    }


def _only_metrics(reply: Message, message: Message, allowed: frozenset[str]) -> Message:
    """What may leave after an evaluation or a query: the metrics that are allowed, and nothing else."""
    content = RecordDict()
    if metrics := _metrics(reply, allowed):
        content[_records.METRICS] = MetricRecord(dict(metrics))
    return Message(content, reply_to=message)
