"""`cpsgd encode`: the client's half of a round, from a vector's file to a message's."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cpsgd.cli import _files, _options, _output
from cpsgd.errors import VectorError


def run(
    vector: Annotated[Path, typer.Argument(metavar="VECTOR", help="An .npy, .npz or .csv file with one vector.")],
    protocol: _options.RequiredProtocolFile,
    round: Annotated[int, typer.Option(min=0, help="Number of the round.")],
    out: Annotated[Path, typer.Option(metavar="MESSAGE", help="Where the message goes.")],
    key: _options.Key = None,
    json: _options.Json = False,
) -> None:
    """Turn a vector into a private message, as a client does.

    Each call draws fresh noise. Send only one message a vector and round, and if it gets lost the same file again: the
    noise of several could be averaged away.
    """
    from cpsgd.cli import _data

    _files.check_output(out, vector, protocol)
    chosen = _files.read_protocol(protocol)
    try:
        message = chosen.encode(_data.read_vector(vector, key), round)
    except VectorError as error:
        # Errors about the file name it already.
        raise error if str(error).startswith(str(vector)) else VectorError(f"{vector}: {error}") from None
    _files.write_bytes(out, message)
    if json:
        _output.show_json({"vector": str(vector), "out": str(out), "round": round, **_output.sent(chosen)})
        return
    _output.show([*_output.message_facts(chosen), ("round", str(round)), ("written to", str(out))])
