"""`cpsgd aggregate`: the server's half of a round, from messages' files to the mean's."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsgd.cli import _files, _options, _output
from cpsgd.errors import ParameterError, RoundError, TrailingBytesError, WireError

if TYPE_CHECKING:
    from cpsgd.aggregator import Aggregator
    from cpsgd.protocol import Protocol


def run(
    messages: Annotated[list[Path], typer.Argument(metavar="MESSAGE...", help="Files written by `cpsgd encode`.")],
    protocol: _options.RequiredProtocolFile,
    round: Annotated[int, typer.Option(min=0, help="Number of the round.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where the mean goes, .npy or .csv.")] = None,
    state: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keeps the sums from call to call, for messages that arrive bit by bit."),
    ] = None,
    json: _options.Json = False,
) -> None:
    """Add up messages and write their mean, as the server does.

    A message that is damaged, foreign or repeated is refused and changes nothing; the others count, and the exit code
    is 1. With --state and without --out the messages are only added up.
    """
    if out is None and state is None:
        raise ParameterError(
            "Missing --out (where the mean goes) or --state (to add up now and ask for the mean later)."
        )
    chosen = _files.read_protocol(protocol)
    if out is not None:
        _files.check_vector_output(out, protocol, *messages)
    if state is not None:
        _files.check_output(state, protocol, *messages)
        if out is not None and out.resolve() == state.resolve():
            raise ParameterError("--out and --state must be two files.")

    refused: list[dict[str, str]] = []
    with _files.locked(state) if state is not None else nullcontext():
        aggregator = _start(chosen, round, state)
        before = aggregator.count
        for path in messages:
            try:
                aggregator.add(_read(path, chosen))
            except (WireError, OSError) as error:
                reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
                refused.append({"file": str(path), "error": type(error).__name__, "reason": reason})
                _output.complain(f"Refused {path}: {reason}")
        accepted = aggregator.count - before
        if state is not None and accepted:
            _files.write_bytes(state, aggregator.save())
    written = out is not None and aggregator.count > 0
    if out is not None and written:
        _files.write_vector(out, aggregator.mean())

    if json:
        _output.show_json(
            {
                "accepted": accepted,
                "refused": refused,
                "count": aggregator.count,
                "clients": chosen.clients,
                "round": round,
                "fingerprint": chosen.fingerprint.hex(),
                "out": str(out) if written else None,
                "state": None if state is None else str(state),
            }
        )
    else:
        total = f", {aggregator.count:,} with those before" if before else ""
        _output.show(
            [
                ("messages", f"{accepted:,} accepted, {len(refused):,} refused{total}"),
                ("planned", f"{chosen.clients:,} clients, round {round}"),
                *([("mean", str(out))] if written else []),
                *([] if state is None else [("state", str(state))]),
            ]
        )
    if out is not None and not written:
        _output.complain(f"Did not write {out}: there is no mean, as no message has been accepted.")
    if refused:
        raise typer.Exit(1)


def _start(protocol: Protocol, round: int, state: Path | None) -> Aggregator:
    """An aggregator with what the state file holds, or an empty one where there is no such file yet."""
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
    """A message's bytes; never more than a message of this protocol has, whatever the file holds."""
    with path.open("rb") as file:
        message = file.read(protocol.message_bytes + 1)
    if len(message) > protocol.message_bytes:
        raise TrailingBytesError(
            f"The file is longer than the {protocol.message_bytes} bytes of this protocol's messages: it was made with "
            "other parameters, or something was added."
        )
    return message
