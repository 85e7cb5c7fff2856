"""`cpsgd round protocol`, `encode` and `aggregate`: a round through files, as its parties would do it one by one."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter

from cpsgd._durable import locked, write_file
from cpsgd._numbers import rounded_up
from cpsgd.cli import _files, options, output
from cpsgd.errors import (
    ConditionError,
    GuaranteeError,
    ParameterError,
    RoundError,
    TrailingBytesError,
    VectorError,
    WireError,
)

if TYPE_CHECKING:
    from cpsgd.aggregator import Aggregator
    from cpsgd.protocol import Protocol


def protocol(
    *,
    parameters: options.Parameters = options.NO_PARAMETERS,
    size: options.Size = options.NO_SIZE,
    required: options.Planned = options.NO_PLAN,
    out: Annotated[
        Path | None, Parameter(metavar="FILE", help="Where the protocol's JSON goes; stdout if not given.")
    ] = None,
    json: options.Json = False,
) -> None:
    """Write a protocol file, and say what a round with it sends and how wrong it can be.

    With --protocol, says it of a file that exists. With --epsilon the planner chooses the mechanism and its parameters;
    otherwise it is the paper's, with k = 2 and m = 14 if not given, four bits per coordinate. The ε that is proved, at
    δ = 1e-6 if not given, is shown and goes into the file: means are then released only if they keep it.
    """
    chosen = parameters.sized(size, required)
    if parameters.file is None and chosen.promise is None:
        chosen = _promising(chosen, options.given(required))
    if out is not None:
        _files.check_output(out)
        write_file(out, (chosen.to_json() + "\n").encode())
    privacy, privacy_facts = output.privacy(chosen, required.delta)
    promises = {**output.promises(chosen), **privacy}
    if json:
        output.show_json({**promises, "out": out})
        return
    if out is None:
        print(chosen.to_json())
    bound = promises["error_bound"]
    if bound["squared_error"] is None:
        error = f"none is published: {bound['reason']}"
    else:
        error = f"{bound['squared_error']:.4g} expected squared error of the mean at most; {bound['theorem']}"
    output.show(
        [
            ("clients", f"{chosen.clients:,} of {chosen.dim:,} coordinates each"),
            *output.sent_facts(chosen),
            *privacy_facts,
            ("error bound", error),
            ("fingerprint", promises["fingerprint"]),
            *([] if out is None else [("written to", str(out))]),
        ],
        # The JSON alone may go down a pipe or into a file.
        stream=sys.stderr if out is None else sys.stdout,
    )


def _promising(protocol: Protocol, asked: dict[str, Any]) -> Protocol:
    """Returns the protocol with its proved ε as its promise; unchanged if no ε is proved and none was asked for."""
    from cpsgd.planner.requirements import surviving
    from cpsgd.privacy import guarantee
    from cpsgd.promise import Claim, Promise
    from cpsgd.run import Run

    names = ("rounds", "adjacency", "colluding", "participation")
    terms: dict[str, Any] = {name: asked[name] for name in names if name in asked}
    run = Run.of(protocol, surviving=surviving(protocol.clients, asked.get("dropout", 0.0)), **terms)
    delta = asked.get("delta", output.DEFAULT_DELTA)
    try:
        found = guarantee(run, delta)
    except ConditionError:
        if asked:
            raise
        return protocol
    # A few digits, so that another machine's last ones make no difference.
    return replace(protocol, promise=Promise(Claim(float(rounded_up(found.epsilon)), delta), run.conditions))


def encode(
    vector: Annotated[Path, Parameter(name="VECTOR", help="An .npy, .npz or .csv file with one vector.")],
    /,
    *,
    protocol: options.ProtocolFile,
    round: options.Round,
    out: Annotated[Path, Parameter(metavar="MESSAGE", help="Where the message goes.")],
    key: options.Key = None,
    json: options.Json = False,
) -> None:
    """Turn a vector into a private message, as a client does.

    Each call draws fresh noise. Send only one message per vector and round, and if it gets lost the same file again:
    the noise of several could be averaged away.
    """
    _files.check_output(out, vector, protocol)
    chosen = _files.read_protocol(protocol)
    try:
        message = chosen.encode(_files.read_vector(vector, key), round)
    except VectorError as error:
        # Errors about the file name it already.
        raise error if str(error).startswith(str(vector)) else VectorError(f"{vector}: {error}") from None
    write_file(out, message)
    if json:
        output.show_json({"vector": vector, "out": out, "round": round, **output.sent(chosen)})
        return
    output.show([*output.message_facts(chosen), ("round", str(round)), ("written to", str(out))])


def aggregate(
    *messages: Annotated[Path, Parameter(name="MESSAGE", help="Files written by `cpsgd round encode`.")],
    protocol: options.ProtocolFile,
    round: options.Round,
    out: Annotated[Path | None, Parameter(metavar="FILE", help="Where the mean goes, .npy or .csv.")] = None,
    state: Annotated[
        Path | None,
        Parameter(metavar="FILE", help="Keeps the sums from call to call, for messages that arrive bit by bit."),
    ] = None,
    accept_epsilon: options.AcceptEpsilon = None,
    json: options.Json = False,
) -> None:
    """Add up messages and write their mean, as the server does.

    A message that is damaged, foreign or repeated is refused and changes nothing; the others count, and the exit code
    is 1. With --state and without --out the messages are only added up. A mean that does not keep what the protocol
    file promises is not written, the ε that would be true is named, and the exit code is 2.
    """
    if not messages:
        raise ParameterError("Missing MESSAGE: give the files written by `cpsgd round encode`.")
    if out is None and state is None:
        raise ParameterError(
            "Missing --out (where the mean goes) or --state (to add up now and ask for the mean later)."
        )
    if accept_epsilon is not None and out is None:
        raise ParameterError("--accept-epsilon is about a mean that is written; give --out with it.")
    chosen = _files.read_protocol(protocol)
    if out is not None:
        _files.check_vector_output(out, protocol, *messages)
    if state is not None:
        _files.check_output(state, protocol, *messages)
        if out is not None and out.resolve() == state.resolve():
            raise ParameterError("--out and --state must be two files.")

    refused: list[dict[str, str]] = []
    with locked(state) if state is not None else nullcontext():
        aggregator = _start(chosen, round, state)
        before = aggregator.count
        for path in messages:
            try:
                aggregator.add(_read(path, chosen))
            except (WireError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                refused.append({"file": str(path), "error": type(error).__name__, "reason": reason})
                output.complain(f"Refused {path}: {reason}")
        accepted = aggregator.count - before
        if state is not None and accepted:
            write_file(state, aggregator.save())
    privacy: dict[str, Any] = {}
    privacy_facts: list[tuple[str, str]] = []
    refusal: GuaranteeError | None = None
    written = False
    if out is not None and aggregator.count > 0:
        try:
            privacy, privacy_facts = output.privacy(chosen, None, aggregator.count, accept_epsilon=accept_epsilon)
            _files.write_vector(out, aggregator.mean(accept_epsilon=accept_epsilon))
            written = True
        except GuaranteeError as error:
            refusal = error
            privacy = {"epsilon": error.epsilon, "reason": str(error)}

    if json:
        output.show_json(
            {
                "accepted": accepted,
                "refused": refused,
                "count": aggregator.count,
                "clients": chosen.clients,
                "round": round,
                "fingerprint": chosen.fingerprint.hex(),
                "released": written,
                **privacy,
                "out": out if written else None,
                "state": state,
            }
        )
    else:
        total = f", {aggregator.count:,} with those before" if before else ""
        output.show(
            [
                ("messages", f"{accepted:,} accepted, {len(refused):,} refused{total}"),
                ("planned", f"{chosen.clients:,} clients, round {round}"),
                *privacy_facts,
                *([("mean", str(out))] if written else []),
                *([] if state is None else [("state", str(state))]),
            ]
        )
    if refusal is not None:
        raise refusal
    if out is not None and not written:
        output.complain(f"Did not write {out}: there is no mean, as no message has been accepted.")
    if refused:
        raise SystemExit(1)


def _start(protocol: Protocol, round: int, state: Path | None) -> Aggregator:
    """Returns an aggregator restored from the state file, or an empty one if there is no such file yet."""
    from cpsgd.aggregator import Aggregator

    # The protocol file is the receiver's own, hence its dimension is one to expect.
    if state is None or not state.exists():
        return Aggregator(protocol, round, max_dim=protocol.dim)
    try:
        aggregator = Aggregator.restore(protocol, state.read_bytes(), max_dim=protocol.dim)
    except WireError as error:
        raise type(error)(f"{state}: {error}") from None
    if aggregator.round != round:
        raise RoundError(f"{state}: was saved for round {aggregator.round}, this is round {round}.")
    return aggregator


def _read(path: Path, protocol: Protocol) -> bytes:
    """Returns a message's bytes, and refuses a file longer than any message of this protocol."""
    with path.open("rb") as file:
        message = file.read(protocol.longest_message_bytes + 1)
    if len(message) > protocol.longest_message_bytes:
        raise TrailingBytesError(
            f"The file is longer than the {protocol.longest_message_bytes} bytes of this protocol's messages: it was "
            "made with other parameters, or something was added."
        )
    return message
