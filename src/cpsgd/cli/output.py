"""Output of commands: tables for people, JSON for programs, errors on stderr."""

from __future__ import annotations

import json
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from rich import box
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from cpsgd._numbers import bits_of, rounded_up
from cpsgd.errors import ConditionError

if TYPE_CHECKING:
    from cpsgd.neighbours import Participation
    from cpsgd.privacy import Guarantee
    from cpsgd.protocol import Protocol

# Cells of the labels that facts are aligned for.
_WIDEST_LABEL = 40
DEFAULT_DELTA = 1e-6
"""δ of an ε that is shown without one having been asked for."""


def show(facts: Iterable[tuple[str, str]], *, stream: TextIO | None = None) -> None:
    """Prints named facts, one per line."""
    console = Console(file=stream or sys.stdout, soft_wrap=True)
    rows = list(facts)
    # A label never runs into its fact, and a very long one does not move all others.
    width = max([14, *(cell_len(name) + 2 for name, _ in rows if cell_len(name) <= _WIDEST_LABEL)])
    for name, fact in rows:
        label = name + " " * max(2, width - cell_len(name))
        console.print(Text.assemble((label, "bold cyan"), fact), highlight=False)


def show_json(data: dict[str, Any]) -> None:
    """Prints one JSON object, with null for what is not a finite number, and paths as text."""
    print(json.dumps(_plain(data), indent=2, allow_nan=False, ensure_ascii=False))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, Path):
        return str(value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def answer(json: bool, data: dict[str, Any], *parts: object) -> None:
    """Prints the data as JSON, or tables and lines for people."""
    if json:
        show_json(data)
        return
    for part in parts:
        console().print(part, markup=not isinstance(part, str), soft_wrap=isinstance(part, str))


def complain(text: str, *, style: str = "bold red") -> None:
    """Prints one line on stderr."""
    # Not parsed as markup: file names may hold brackets.
    Console(stderr=True, soft_wrap=True).print(Text(" ".join(text.split()), style=style))


@contextmanager
def warnings_shown() -> Iterator[None]:
    """Within the context, prints warnings as lines on stderr."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        yield
    for warning in heard:
        complain(f"Warning: {warning.message}", style="bold yellow")


def console() -> Console:
    """Returns a console on the current standard output, so that redirections are respected."""
    return Console(highlight=False)


def facts(rows: Iterable[tuple[str, str]], title: str | None = None) -> Table:
    """Returns a table of names and values."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold cyan", no_wrap=True, min_width=13)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(name, value)
    return table


def grid(
    columns: Iterable[str], rows: Iterable[Iterable[str]], title: str | None = None, *, whole: Iterable[str] = ()
) -> Table:
    """Returns a right-aligned table; a row that begins with an arrow is shown in bold.

    On a narrow terminal the columns that are named in `whole` are cut last, and the others folded before.
    """
    kept = set(whole)
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
    if kept:
        table.padding = (0, 1, 0, 0)
    for column in columns:
        fold: Any = {"no_wrap": True} if column in kept else {"overflow": "fold"}
        table.add_column(column, justify="right", header_style="cyan", **fold)
    for row in rows:
        cells = list(row)
        table.add_row(*cells, style="bold" if cells[0].startswith("▸") else "")
    return table


@contextmanager
def progress(total: int, what: str = "clients") -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on a terminal; yields a function to call with the number of clients just done."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda done: None
        return
    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.advance(task, done)


def promises(protocol: Protocol) -> dict[str, Any]:
    """Returns the size of messages and the error bound of a protocol, as JSON values."""
    bound: dict[str, Any] = {"squared_error": None, "theorem": None, "reason": None}
    try:
        bound.update(asdict(protocol.error_bound()))
    except ConditionError as error:
        bound["reason"] = str(error)
    return {**sent(protocol), "error_bound": bound}


def privacy(
    protocol: Protocol, delta: float | None, messages: int | None = None, *, accept_epsilon: float | None = None
) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns the ε proved for a release of this many messages (all, if None), as JSON and as rows.

    Raises `GuaranteeError` if the protocol's promise is not kept. Without a promise, ε is that of one round at `delta`,
    or at the default δ.
    """
    from cpsgd.privacy import guarantee

    promise = protocol.promise
    found = protocol.release(messages or protocol.clients, accept_epsilon=accept_epsilon)
    if promise is not None and found is not None and delta in (None, promise.claim.delta):
        facts, rows = guaranteed(found)
        return facts, [*rows, ("promised", str(promise))]
    try:
        return guaranteed(guarantee(protocol, DEFAULT_DELTA if delta is None else delta, surviving=messages))
    except ConditionError as error:
        if delta is not None:
            raise
        reason = str(error).splitlines()[0]
        unproved = {"epsilon": None, "delta": DEFAULT_DELTA, "method": None, "guarantee": None, "reason": reason}
        # That there is no noise at all is said with the message.
        rows = [("privacy", f"none is proved at δ = {DEFAULT_DELTA:g}: {reason}")] if _silent(protocol) is None else []
        return unproved, rows


def guaranteed(found: Guarantee) -> tuple[dict[str, Any], list[tuple[str, str]]]:
    """Returns a guarantee as JSON and as rows."""
    from cpsgd.privacy import Guarantee

    text = f"ε = {rounded_up(found.epsilon)} at δ = {found.delta:g}, {found.adjacency} neighbours"
    rows = []
    if isinstance(found, Guarantee):
        if found.rounds > 1:
            text += f", {found.rounds:,} rounds together (participation {found.participation})"
        rows = secrecy(found.participation)
    facts = {"epsilon": found.epsilon, "delta": found.delta, "method": found.method, "guarantee": found.to_dict()}
    assumed = [] if found.assumption is None else [("assuming", found.assumption)]
    return facts, [("privacy", text), ("proved by", found.citation), *assumed, *rows]


def secrecy(participation: Participation) -> list[tuple[str, str]]:
    """Returns a row that says the draw of clients must stay secret, or none if clients are not drawn."""
    return [] if participation.secrecy is None else [("secret", participation.secrecy)]


def sent(protocol: Protocol) -> dict[str, Any]:
    """Returns a client's message and its size, as JSON values."""
    return {
        "protocol": protocol.to_dict(),
        "name": protocol.name,
        "fingerprint": protocol.fingerprint.hex(),
        "message_bytes": protocol.message_bytes,
        "longest_message_bytes": protocol.longest_message_bytes,
        "bits_per_client": protocol.bits_per_client,
        "bits_per_coordinate": protocol.bits_per_coordinate,
        "sent_bits_per_coordinate": protocol.bits_per_client / protocol.dim,
        "compression": 4 * protocol.dim / protocol.message_bytes,
    }


def sent_facts(protocol: Protocol) -> list[tuple[str, str]]:
    """Returns rows about a client's message and its size."""
    parameters = f"clip norm {protocol.clip_norm:g}, {protocol.mechanism.describe()}"
    if protocol.modulus is not None:
        parameters += f", sums modulo {protocol.modulus}"
    return [
        ("protocol", ("rotation, " if protocol.rotate else "") + protocol.mechanism.title),
        ("parameters", parameters),
        *message_facts(protocol),
        ("compression", f"{4 * protocol.dim / protocol.message_bytes:.3g}× against float32"),
    ]


def caution(protocol: Protocol) -> list[tuple[str, str]]:
    """Returns a row with the mechanism's caution, or none."""
    return [] if protocol.mechanism.caution is None else [("mind", protocol.mechanism.caution)]


def message_facts(protocol: Protocol) -> list[tuple[str, str]]:
    """Returns rows about the length of a message, cautions, and a warning where nothing in it is private."""
    packed = protocol.bits_per_client / protocol.dim
    average = "" if protocol.longest_message_bytes == protocol.message_bytes else " on average"
    facts = [
        (
            "message",
            f"{protocol.message_bytes:,} bytes per client{average}, header included: {bits_of(packed)} per coordinate "
            f"({protocol.bits_per_coordinate:.4g} by the paper's count)",
        ),
        *caution(protocol),
    ]
    if (reason := _silent(protocol)) is not None:
        facts.append(("privacy", f"none: {reason}"))
    return facts


def _silent(protocol: Protocol) -> str | None:
    """Returns why a protocol adds no noise that could protect anybody, or None if it does."""
    try:
        protocol.mechanism.noise.law(protocol.clients)
    except ConditionError as error:
        return str(error)
    return None
