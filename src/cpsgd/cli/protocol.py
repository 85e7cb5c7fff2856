"""`cpsgd protocol`: write down the parameters all parties of a round share, and what they promise."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from cpsgd.cli import _files, _options, _output
from cpsgd.errors import ParameterError


def run(
    clients: Annotated[int | None, typer.Option(help="n: clients the round is planned for.")] = None,
    dim: Annotated[int | None, typer.Option(help="d: coordinates of a vector.")] = None,
    protocol: _options.ProtocolFile = None,
    clip_norm: _options.ClipNorm = None,
    levels: _options.Levels = None,
    trials: _options.Trials = None,
    p: _options.SuccessProbability = None,
    coordinate_range: _options.CoordinateRange = None,
    rotate: _options.Rotate = None,
    sigma: _options.Sigma = None,
    seed: _options.Seed = None,
    epsilon: _options.Epsilon = None,
    delta: _options.Delta = None,
    bits: _options.Bits = None,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Where the protocol's JSON goes.", show_default="stdout")
    ] = None,
    json: _options.Json = False,
) -> None:
    """Write a protocol file, and say what a round with it sends and how wrong it can be.

    With --protocol, says it of a file that exists.
    """
    parameters = _options.Parameters(
        file=protocol,
        clip_norm=clip_norm,
        levels=levels,
        trials=trials,
        p=p,
        coordinate_range=coordinate_range,
        rotate=rotate,
        sigma=sigma,
        seed=seed,
        epsilon=epsilon,
        delta=delta,
        bits=bits,
    )
    if protocol is not None:
        if clients is not None or dim is not None:
            raise ParameterError("The protocol file already fixes --clients and --dim; leave them out.")
        clients = dim = 1
    elif clients is None or dim is None:
        raise ParameterError("Missing --clients and --dim: the range and the promises depend on both.")
    chosen = parameters.protocol(clients=clients, dim=dim)

    if out is not None:
        _files.check_output(out)
        _files.write_bytes(out, (chosen.to_json() + "\n").encode())
    privacy, privacy_facts = _output.privacy(chosen, delta)
    promises = {**_output.promises(chosen), **privacy}
    if json:
        _output.show_json({**promises, "out": None if out is None else str(out)})
        return
    if out is None:
        typer.echo(chosen.to_json())
    bound = promises["error_bound"]
    if bound["squared_error"] is None:
        error = f"the paper gives none here: {bound['reason']}"
    else:
        error = f"{bound['squared_error']:.4g} expected squared error of the mean at most; {bound['theorem']}"
    _output.show(
        [
            ("clients", f"{chosen.clients:,} of {chosen.dim:,} coordinates each"),
            *_output.sent_facts(chosen),
            *privacy_facts,
            ("error bound", error),
            ("fingerprint", promises["fingerprint"]),
            *([] if out is None else [("written to", str(out))]),
        ],
        # The JSON alone may go down a pipe or into a file.
        stream=sys.stderr if out is None else sys.stdout,
    )
