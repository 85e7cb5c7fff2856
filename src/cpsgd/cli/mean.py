"""`cpsgd round mean`: a whole round on this machine, from a table of vectors to the estimate of their mean.

The mean of named columns, `cpsgd table mean`, is one of the statistics in `cpsgd.cli.columns`.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Parameter, validators

from cpsgd._numbers import rounded_down, rounded_up
from cpsgd.cli import _files, options, output
from cpsgd.cli.columns import NO_BUDGET, BudgetOptions, Budgets
from cpsgd.cli.frame import whole
from cpsgd.errors import NonFiniteError, ParameterError, VectorError

if TYPE_CHECKING:
    from cpsgd.aggregator import Aggregator
    from cpsgd.cli._files import Array, Rows
    from cpsgd.expectation import Expectation
    from cpsgd.protocol import Protocol
    from cpsgd.statistics.charge import Charge

# Coordinates that a thread works on at a time: milliseconds of work, a megabyte or two of data.
_BLOCK = 1 << 18
# Shorter vectors spend their time in the interpreter, where threads only wait for each other.
_THREADED_DIM = 1 << 14


def run(
    file: options.Table,
    /,
    *,
    parameters: options.Parameters = options.NO_PARAMETERS,
    required: options.Required = options.NO_REQUIREMENTS,
    budget: Budgets = NO_BUDGET,
    round: options.Round = 0,
    accept_epsilon: options.AcceptEpsilon = None,
    key: options.Key = None,
    out: Annotated[Path, options.file_option("Where the mean goes: .npy or .csv.")] = Path("mean.npy"),
    threads: Annotated[
        int | None,
        Parameter(
            converter=whole,
            validator=validators.Number(gte=1),
            help="Threads; if not given one per processor, one in all for short vectors.",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Estimate the mean of a table's rows by a whole round on this machine.

    Every row is encoded as its client would do it, and the messages are added up as the server would. This is a
    simulation: here the real error can be measured, because one machine holds all vectors.

    With --epsilon the planner chooses the mechanism and its parameters; otherwise it is the paper's, with k = 2 and
    m = 14 if not given, four bits per coordinate. The ε proved for the round is shown (replace-one neighbours), at
    δ = 1e-6 if not given. A table with fewer rows than a protocol file promises messages for is refused.

    With --ledger the mean is a release: the round is refused if too little is left of the population's budget, and
    charged to it before the mean is computed. A table that cannot be read to its end costs nothing. The real error is
    then not shown, because no budget covers it.
    """
    import numpy as np

    from cpsgd.aggregator import Aggregator
    from cpsgd.expectation import Expectation

    _files.check_vector_output(out, file, *([] if parameters.file is None else [parameters.file]))
    rows = _files.open_rows(file, key)
    if rows.named and not {"--clip-norm", "--protocol"} & parameters.given.keys():
        raise ParameterError(
            f"{file} names its columns, and an id among them would be averaged, too. Ask `cpsgd table mean` for "
            "named columns, or give --clip-norm if its rows are vectors."
        )
    protocol = parameters.protocol(required, clients=rows.clients, dim=rows.dim)
    if protocol.dim != rows.dim:
        raise ParameterError(f"The protocol is for {protocol.dim} coordinates, the rows of {file} have {rows.dim}.")

    privacy, privacy_facts = output.privacy(protocol, required.delta, rows.clients, accept_epsilon=accept_epsilon)
    charge = _quote(budget, protocol, survivors=rows.clients, round=round, label=f"cpsgd round mean {file.name}")

    aggregator = Aggregator(protocol, round, max_dim=protocol.dim)
    expectation = Expectation(protocol, round)
    if threads is None:
        threads = (os.cpu_count() or 1) if protocol.dim >= _THREADED_DIM else 1
    _simulate(rows, aggregator, expectation, threads)
    # Only now, since all rows are known to be good, and nothing has been seen yet but by this machine.
    if charge is not None:
        charge.pay()
        paid, paid_facts = _spent(charge)
        privacy, privacy_facts = privacy | paid, privacy_facts + paid_facts
    estimate = aggregator.mean(accept_epsilon=accept_epsilon)
    error: dict[str, float] | None = None
    if charge is None:
        difference, expected = estimate - expectation.mean(), expectation.error()
        with np.errstate(over="ignore"):
            measured = float(difference @ difference)
        error = {"measured": measured, "expected": expected.total, **asdict(expected)}
    with _files.paid(charge is not None):
        _files.write_vector(out, estimate)

    if json:
        output.show_json(
            {
                "simulation": charge is None,
                "file": file,
                "out": out,
                "clients": aggregator.count,
                "dim": protocol.dim,
                "round": round,
                **output.sent(protocol),
                **privacy,
                "total_bytes": aggregator.count * protocol.message_bytes,
                "squared_error": error,
            }
        )
        return
    planned = "" if aggregator.count == protocol.clients else f" (the protocol was made for {protocol.clients:,})"
    output.show(
        [
            ("clients", f"{aggregator.count:,} of {protocol.dim:,} coordinates each, round {round}{planned}"),
            *output.sent_facts(protocol),
            *privacy_facts,
            ("sent in all", f"{aggregator.count * protocol.message_bytes:,} bytes"),
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
    """Encodes every row and adds it up, a few blocks at a time."""

    def work(start: int, block: Array) -> int:
        for i, vector in enumerate(block):
            try:
                aggregator.add(aggregator.protocol.encode(vector, aggregator.round))
            except NonFiniteError as error:
                raise rows.not_finite(start + i, error.coordinate) from None
            expectation.add(vector)
        return len(block)

    with output.progress(rows.clients) as advance:
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
    """Runs `work` on all blocks in threads. Of several errors, raises that of the first row."""
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


def _quote(budget: BudgetOptions, protocol: Protocol, **event: Any) -> Charge | None:
    """Returns the charge for a round of all rows, if the budget allows it; None without a ledger."""
    ledger = budget.open()
    if ledger is None and budget.population is None:
        return None
    from cpsgd.statistics.charge import Charge, events_of

    return Charge.of(ledger, budget.population, events_of([protocol], **event))


def _spent(charge: Charge) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns the spent part of a budget after a charge, as JSON values and as rows of text."""
    assert charge.ledger is not None
    total = charge.ledger.total(charge.population)
    text = (
        f"{total.population}: ε = {rounded_up(total.epsilon)} of {rounded_up(total.limit)} at δ = {total.delta:g} "
        f"spent, {rounded_down(total.left)} left ({total.rounds:,} round{'' if total.rounds == 1 else 's'})"
    )
    return {"budget": {"ledger": charge.ledger.path, **total.to_dict()}}, [("budget", text)]
