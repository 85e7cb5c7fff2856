"""The client's side: `cpsgd_mod` wraps a train function, and what leaves the client is one private, masked vector.

`silo_sum` is what a silo's train function returns where single examples are protected.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MessageType, MetricRecord, RecordDict
from flwr.clientapp.typing import ClientAppCallable, Mod
from numpy.typing import NDArray

from cpsgd.engines.flower import records
from cpsgd.engines.flower.records import RECORD, ROUND, STATE
from cpsgd.engines.pair import task_of
from cpsgd.engines.silo import example_sum
from cpsgd.errors import CpsgdError, ParameterError, RoundRefusedError, StageError, TrainFunctionError, VectorError
from cpsgd.federation.answering import ClientSession, call_privately
from cpsgd.federation.client_files import FILE_KEYS, TASK_KEY
from cpsgd.federation.limits import Limits, open_client_files
from cpsgd.federation.messages import Arrays, check_alike, flatten
from cpsgd.protocol import Protocol

if TYPE_CHECKING:
    import torch

    from cpsgd.learning.models import Loss


def cpsgd_mod(
    *,
    allow_metrics: Iterable[str] = (),
    secure: bool = True,
    require_memory: bool = False,
    require_roster: bool = False,
    **limits: Any,
) -> Mod:
    """Returns a Flower mod for `@app.train(mods=[cpsgd_mod()])`.

    The train function stays as it is: it gets the model and returns the trained one. The difference is the update; it
    is clipped, rounded, given its share of the noise, masked, and sent as one flat array of bytes. Everything else that
    the train function returns stays here, except the metrics named in `allow_metrics`. An error in it is reported to
    the server without its text, which might quote data.

    The client does not take the server's word for its privacy. It refuses protocols without noise, and with `epsilon`
    and `delta` every round that would not keep them: the guarantee is computed here, for all rounds together. With a
    memory (`flower-supernode --node-config 'cpsgd-memory="/path/to/file"'`) limits hold over all runs and restarts.

    A SuperNode may also be started with an identity and a roster (`cpsgd-identity="/path/to/key"
    cpsgd-roster="/path/to/roster"`). It then takes part only in rounds whose keys and survivors are signed by those on
    the roster. So the server cannot put keys of its own in place of theirs.

    With `cpsgd-task="/path/to/task.json"` the client also answers rounds of one message to the two servers of this task
    (docs/pair.md), and of no other.

    Args:
        allow_metrics: Names of metrics that may leave. They travel in clear and outside the privacy guarantee.
        secure: False also accepts rounds without secure aggregation, in which the server sees this client's own noisy
            message. The guarantees above then hold only for those who see no more than the model.
        require_memory: Refuses every round on a SuperNode that was started without `cpsgd-memory`.
        require_roster: Refuses every round on a SuperNode that was started without `cpsgd-identity` and `cpsgd-roster`.
        limits: The fields of `Limits`: epsilon, delta, rounds, colluding, adjacency, examples, disjoint, rate,
            min_clients and fingerprint. With `examples` the train function returns the *sum* of at most that many
            clipped gradients (`silo_sum`) in place of a model; with `disjoint` they are other ones in every round
            (`accepted_round`), and with `rate` `silo_sum` draws them.

    Example:
        >>> mod = cpsgd_mod(epsilon=4.0, delta=1e-5, examples=200)
        >>> cpsgd_mod(epsilon=4.0)
        Traceback (most recent call last):
        cpsgd.errors.ParameterError: Give epsilon and delta together: neither means anything without the other.
    """
    agreed = Limits(**limits)
    if isinstance(allow_metrics, str):
        raise ParameterError(f"Expected allow_metrics to be a list of names, got the text {allow_metrics!r}.")
    allowed = frozenset(allow_metrics)

    def mod(message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if message.metadata.message_type.split(".")[0] != MessageType.TRAIN:
            metrics = _metrics(_call(call_next, message, context), allowed)
            content = RecordDict({records.METRICS: MetricRecord(metrics)} if metrics else {})
            return Message(content, reply_to=message)
        request = records.read_request(message)
        _check_misplaced(context.run_config)
        memory, signing = open_client_files(
            context.node_config, require_memory=require_memory, require_roster=require_roster
        )
        kept: Any = context.state.config_records.get(RECORD, {})
        session = ClientSession(
            agreed,
            str(context.run_id),
            kept.get(STATE, b""),
            memory=memory,
            signing=signing,
            secure=secure,
            task=task_of(context.node_config[TASK_KEY]) if TASK_KEY in context.node_config else None,
        )
        replies: list[Message] = []

        def train(protocol: Protocol) -> NDArray[np.float32]:
            sent = _model(message, StageError("Expected one model in the server's message."))
            extras = records.read_extras(message)
            if extras is not None:
                extras.check(protocol, agreed.examples)
            dim = protocol.dim - (0 if extras is None else extras.size)
            start = flatten(sent, dim)
            # The train function sees what was accepted here, not what the server wrote.
            examples, rate = agreed.examples or 0, agreed.rate
            accepted = ConfigRecord({"clip-norm": protocol.clip_norm, "examples": examples, "rate": rate})
            accepted[ROUND] = session.round
            message.content = RecordDict({**dict(message.content.items()), RECORD: accepted})
            replies.append(_call(call_next, message, context))
            found = _model(replies[0], VectorError("Expected the train function to return one ArrayRecord."))
            check_alike(found, sent)
            vector = flatten(found, dim)
            update = vector - start if agreed.examples is None else vector
            if extras is None:
                return update
            return extras.encode(update, _metrics(replies[0], frozenset(extras.measures)), protocol.clip_norm)

        try:
            answer = session.answer(request, train)
        finally:
            # At the end, for some train functions begin by emptying the state.
            if session.state:
                context.state[RECORD] = ConfigRecord({STATE: session.state})
        return records.make_reply(message, answer, _metrics(replies[0], allowed) if replies else {})

    return mod


def accepted_round(message: Message) -> int:
    """Returns the number of the round that the mod has accepted, 1 for the first; a silo picks its examples by it.

    The mod lets no round of a run be answered twice, and counts as a run of its own what a server asks for again under
    another name. The `server-round` of Flower's settings is just what the server says.

    Args:
        message: The train function's message, as the mod hands it over.

    Raises:
        ParameterError: The train function does not run under `cpsgd_mod`.
    """
    found = (message.content.config_records.get(RECORD) or ConfigRecord()).get(ROUND)
    if not isinstance(found, int):
        raise ParameterError("accepted_round needs a train function with mods=[cpsgd_mod(...)].")
    return found


def silo_sum(
    message: Message,
    model: torch.nn.Module,
    loss: Loss,
    features: NDArray[np.float32],
    labels: NDArray[np.int64],
) -> ArrayRecord:
    """Returns the sum of the examples' clipped gradients, for a train function under `cpsgd_mod(examples=...)`.

    What each gradient is clipped to follows from the protocol that the mod has accepted. Of more examples than
    `examples` the first ones count. With a `rate` each of these is drawn by itself, in secret, anew in every round.

    Args:
        message: The train function's message, as the mod hands it over.
        model: The model with the server's parameters in it.
        loss: From a model's outputs and the labels to their mean loss.
        features: The silo's examples, one per row.
        labels: Their classes.

    Returns:
        The sum, named like the model's trainable parameters: the reply's one ArrayRecord, and nothing else's.

    Raises:
        ParameterError: The train function does not run under `cpsgd_mod(examples=...)`.
    """
    accepted = message.content.config_records.get(RECORD) or ConfigRecord()
    examples, rate, clip_norm = (accepted.get(name) for name in ("examples", "rate", "clip-norm"))
    if not isinstance(examples, int) or examples < 1 or not isinstance(rate, float):
        raise ParameterError("silo_sum needs a train function with mods=[cpsgd_mod(examples=...)].")
    found = example_sum(model, loss, features, labels, clip_norm=clip_norm, examples=examples, rate=rate)
    return records.make_arrays(found)


def _check_misplaced(settings: Mapping[str, object]) -> None:
    """Raises `RoundRefusedError` for settings of an app that name a client's files, which only its operator can set."""
    for name in settings:
        if name.lower().replace("_", "-") in FILE_KEYS:
            raise RoundRefusedError(f"The app sets {name!r}. Only a client's operator can set its files.")


def _model(message: Message, error: CpsgdError) -> Arrays:
    found = list(message.content.array_records.values())
    if len(found) != 1:
        raise error
    return records.read_arrays(found[0])


def _call(call_next: ClientAppCallable, message: Message, context: Context) -> Message:
    if (reply := call_privately(call_next, message, context)).has_error():
        raise TrainFunctionError("an error reply")
    return reply


def _metrics(reply: Message, allowed: frozenset[str]) -> dict[str, Any]:
    return {
        name: value
        for record in reply.content.metric_records.values()
        for name, value in record.items()
        if name in allowed and isinstance(value, int | float)
    }
