"""`cpsgd mean`: a whole round on this machine, from a table of vectors to the estimate of their mean."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from cpsgd.cli import _files, _ledger, _options, _output
from cpsgd.errors import NonFiniteError, ParameterError, VectorError

if TYPE_CHECKING:
    from cpsgd.aggregator import Aggregator
    from cpsgd.cli._data import Array, Rows
    from cpsgd.error import Expectation

# Coordinates a thread works on at a time: milliseconds of work, a megabyte or two of data.
_BLOCK = 1 << 18
# Shorter vectors spend their time in the interpreter, where threads only get in each other's way.
_THREADED_DIM = 1 << 14


def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="An .npy, .npz or .csv table, one row a client.")],
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
    round: Annotated[int, typer.Option(min=0, help="Number of the round.")] = 0,
    key: _options.Key = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Where the mean goes, .npy or .csv.")] = Path("mean.npy"),
    threads: Annotated[
        int | None, typer.Option(min=1, help="Threads.", show_default="one a processor, one in all for short vectors")
    ] = None,
    ledger: _options.LedgerFile = None,
    population: _options.Population = None,
    json: _options.Json = False,
) -> None:
    """Estimate the mean of a table's rows by a whole round on this machine.

    Every row is encoded as its client would do it, and the messages are added up as the server would. This is a
    simulation: here the real error can be measured, because one machine holds all vectors.

    With --ledger the mean is a release: the round is refused if too little is left of the population's budget, and
    charged to it before the mean is computed. A table that cannot be read to its end costs nothing. The real error is
    then not shown, because no budget covers it.
    """
    from cpsgd.aggregator import Aggregator
    from cpsgd.cli import _data
    from cpsgd.error import Expectation

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
    _files.check_vector_output(out, file, *([] if protocol is None else [protocol]))
    rows = _data.open_rows(file, key)
    chosen = parameters.protocol(clients=rows.clients, dim=rows.dim)
    if chosen.dim != rows.dim:
        raise ParameterError(f"The protocol is for {chosen.dim} coordinates, the rows of {file} have {rows.dim}.")

    privacy, privacy_facts = _output.privacy(chosen, delta, rows.clients)
    charge = _ledger.quote(
        ledger, population, chosen, survivors=rows.clients, round=round, label=f"cpsgd mean {file.name}"
    )

    aggregator = Aggregator(chosen, round, max_dim=chosen.dim)
    expectation = Expectation(chosen, round)
    if threads is None:
        threads = (os.cpu_count() or 1) if chosen.dim >= _THREADED_DIM else 1
    _simulate(rows, aggregator, expectation, threads)
    # Only now, since all rows are known to be good, and nothing has been seen yet but by this machine.
    if charge is not None:
        budget, budget_facts = charge.pay()
        privacy, privacy_facts = privacy | budget, privacy_facts + budget_facts
    estimate = aggregator.mean()
    error: dict[str, float] | None = None
    if charge is None:
        difference, expected = estimate - expectation.mean(), expectation.error()
        error = {
            "measured": float(difference @ difference),
            "expected": expected.total,
            "noise": expected.noise,
            "rounding": expected.rounding,
            "clipping": expected.clipping,
        }
    _files.write_vector(out, estimate)

    if json:
        _output.show_json(
            {
                "simulation": charge is None,
                "file": str(file),
                "out": str(out),
                "clients": aggregator.count,
                "dim": chosen.dim,
                "round": round,
                **_output.sent(chosen),
                **privacy,
                "total_bytes": aggregator.count * chosen.message_bytes,
                "squared_error": error,
            }
        )
        return
    planned = "" if aggregator.count == chosen.clients else f" (the protocol was made for {chosen.clients:,})"
    _output.show(
        [
            ("clients", f"{aggregator.count:,} of {chosen.dim:,} coordinates each, round {round}{planned}"),
            *_output.sent_facts(chosen),
            *privacy_facts,
            ("sent in all", f"{aggregator.count * chosen.message_bytes:,} bytes"),
            *_error_facts(error),
            ("mean", str(out)),
        ]
    )


def _error_facts(error: dict[str, float] | None) -> list[tuple[str, str]]:
    if error is None:
        return [("squared error", "not shown: it depends on the vectors, and the budget pays for the mean only")]
    return [
        ("squared error", "{measured:.4g} measured, {expected:.4g} expected".format_map(error)),
        ("expected", "noise {noise:.4g} + rounding {rounding:.4g} + clipping {clipping:.4g}".format_map(error)),
        ("note", "a simulation: all vectors were on this machine, which is how the error could be measured"),
    ]


def _simulate(rows: Rows, aggregator: Aggregator, expectation: Expectation, threads: int) -> None:
    """Has every row encoded and added up, a few blocks at a time."""

    def work(start: int, block: Array) -> int:
        for i, vector in enumerate(block):
            try:
                aggregator.add(aggregator.protocol.encode(vector, aggregator.round))
            except NonFiniteError as error:
                raise VectorError(
                    f"{rows.where(start + i)}: NaN or infinite at coordinate {error.coordinate} (rows and coordinates "
                    "counted from 0). Repair or drop the row."
                ) from None
            expectation.add(vector)
        return len(block)

    with _output.progress(rows.clients) as advance:
        _in_order(rows, max(1, _BLOCK // rows.dim), work, threads, advance)
    # A .csv file is read twice, and with fewer rows the second time there would be less noise than is accounted for.
    if aggregator.count != rows.clients:
        raise VectorError(
            f"The file changed while it was read: it had {rows.clients:,} rows, and then {aggregator.count:,}. Nothing "
            "was released or charged; try again when it is complete."
        )


def _in_order(
    rows: Rows, block_rows: int, work: Callable[[int, Array], int], threads: int, finished: Callable[[int], None]
) -> None:
    """Runs `work` on all blocks in threads. Of several errors, that of the first row is raised."""
    pending: deque[Future[int]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for start, block in rows.blocks(block_rows):
                # Few blocks wait at a time, so that a file read as it goes is never in memory whole.
                if len(pending) == 2 * threads:
                    finished(pending.popleft().result())
                pending.append(pool.submit(work, start, block))
            while pending:
                finished(pending.popleft().result())
        finally:
            for future in pending:
                future.cancel()
