"""Measures the cost of a secure round for a client and the server, by clients and dimension. `make bench` runs this.

A tenth of the clients drops out before the upload. For each number of clients n a whole round with few integers is
played, all parties in this process, and its parts are timed: what is done once per client or neighbour does not depend
on d. What grows with d is timed by itself at each d: a client's masks, an upload that the server adds, a mask that it
removes. A row is the sum of both. Rows marked = were played whole at their own d, and the sum stands beside what the
round took, so that one can see how far to trust the others.

10,000 clients in one process would take 13 GB, as each gets lists of all. What does not depend on d is linear in n, and
is drawn out to them from rounds of 1,000 and 3,000 clients; these rows are marked ~.

Processor time of one thread throughout.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import asdict, astuple, dataclass
from functools import cache
from typing import TypeVar
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage, keys

BITS, DROPOUT = 16, 10  # every tenth client is silent
CLIENTS = (100, 1_000, 3_000)
MOST = 10_000
DIMS = (2**16, 2**20, 2**24)
FEW = 64
PLAYED = {(100, 2**16), (1_000, 2**16), (100, 2**20)}
console = Console(width=130)
Found = TypeVar("Found")


@dataclass
class Cost:
    """Costs of one round, in processor seconds and bytes.

    Attributes:
        client: One client that stays to the end.
        sent: Its bytes, all messages together.
        received: Those for it.
        server: All that the server does before the last message has come.
        unmask: All that it does then.
    """

    client: float
    sent: float
    received: float
    server: float
    unmask: float


def play(n: int, dim: int) -> Cost:
    """Runs a whole round and times one client. Signatures are checked once for all the others."""
    is_signed = cache(keys.is_signed.__wrapped__)
    with mock.patch.object(keys, "is_signed", is_signed):
        return play_remembering(n, dim, is_signed.cache_clear)


def play_remembering(n: int, dim: int, forget: Callable[[], None]) -> Cost:
    """Runs a whole round. `forget` discards what others have checked before the timed client does."""
    parameters = SecureParameters.choose(n, dim, BITS, fingerprint=bytes(16), round=0)
    server, clients = SecureServer(parameters), [SecureClient(expected=parameters) for _ in range(n)]
    values = np.full(dim, 3, np.uint32)
    client = serving = unmask = 0.0
    sent = received = 0
    messages = server.invite()
    while messages:
        stage = server.stage
        forget()
        # The first to answer is the one that is timed, so that it finds nothing prepared by the others.
        for index in sorted(messages, key=lambda other: other != 1):
            if stage is Stage.MASK and index % DROPOUT == 0:
                continue
            more = (values,) if stage is Stage.MASK else ()
            answer, seconds = timed(lambda: getattr(clients[index], stage.value)(messages[index], *more))  # noqa: B023
            if index == 1:
                client, sent, received = client + seconds, sent + len(answer), received + len(messages[index])
            serving += timed(lambda: server.receive(index, answer))[1]  # noqa: B023
        messages, seconds = timed(server.advance)
        if messages:
            serving += seconds
        else:
            unmask = seconds
    result = server.result()
    assert (result.sums == 3 * len(result.survivors)).all()
    return Cost(client, sent, received, serving, unmask)


def timed(work: Callable[[], Found]) -> tuple[Found, float]:
    """Calls a function; returns its result and its processor time."""
    start = time.process_time()
    found = work()
    return found, time.process_time() - start


def best(work: Callable[[], object], turns: int = 3) -> float:
    return min(timed(work)[1] for _ in range(turns))


def growing(parameters: SecureParameters) -> tuple[float, float, float]:
    """Measures the costs that grow with d: a mask, an upload that a client writes, an upload that the server adds."""
    masks, dim = parameters.masks, parameters.dim
    words = np.zeros(dim, masks.word)
    values = np.full(dim, 3, np.uint32)
    many = [(bytes(16), 1)] * 8
    mask = best(lambda: masks.apply(words, many)) / len(many)
    write = best(lambda: b"".join(masks.to_bytes(masks.to_words(values, dim))))
    payload = b"".join(masks.to_bytes(words))
    add = best(lambda: masks.add(words, masks.from_bytes(payload, dim)))
    return mask, write, add


def scaled(few: Cost, n: int, dim: int) -> Cost:
    """Returns the cost with `dim` integers, from that with few."""
    parameters = SecureParameters.choose(n, dim, BITS, fingerprint=bytes(16), round=0)
    mask, write, add = growing(parameters)
    k, stay = parameters.neighbours, n - n // DROPOUT
    removed = stay + (n - stay) * k * stay / (n - 1)
    size = parameters.masks.size_bytes
    return Cost(
        client=few.client + (k + 1) * mask + write,
        sent=few.sent + size(dim) - size(FEW),
        received=few.received,
        server=few.server + stay * add,
        unmask=few.unmask + removed * mask,
    )


def drawn_out(fewer: Cost, more: Cost, n: int) -> Cost:
    """Returns the cost of a round of n clients, extrapolated from the last two measurements on a line."""
    share = (n - CLIENTS[-2]) / (CLIENTS[-1] - CLIENTS[-2])
    return Cost(*(low + (high - low) * share for low, high in zip(astuple(fewer), astuple(more), strict=True)))


def rows() -> list[dict[str, float]]:
    costs: dict[int, Cost] = {}
    for n in CLIENTS:
        console.print(f"A round of {n:,} clients …", style="dim")
        costs[n] = play(n, FEW)
    costs[MOST] = drawn_out(costs[CLIENTS[-2]], costs[CLIENTS[-1]], MOST)
    found = []
    for n, few in costs.items():
        for dim in DIMS:
            row: dict[str, float] = {"clients": n, "dim": dim, **asdict(scaled(few, n, dim))}
            if (n, dim) in PLAYED:
                row |= {f"played {name}": value for name, value in asdict(play(n, dim)).items()}
            found.append(row)
    return found


def print_report(found: list[dict[str, float]]) -> None:
    table = Table(title=f"A round of secure aggregation: {BITS} bits, a tenth drops out; seconds of one processor")
    for heading in (
        "clients",
        "d",
        "client s",
        "ns per coordinate",
        "sent",
        "received",
        "server s",
        "unmask s",
        "whole",
    ):
        table.add_column(heading, justify="right")
    for row in found:
        played = "played client" in row
        table.add_row(
            f"{'~ ' if row['clients'] == MOST else ''}{row['clients']:,}",
            f"2^{int(row['dim']).bit_length() - 1}{' =' if played else ''}",
            beside(row, "client"),
            f"{row['sent'] / 1e6:,.2f} MB",
            f"{row['received'] / 1e3:,.0f} kB",
            beside(row, "server"),
            beside(row, "unmask"),
            f"{row['server'] + row['unmask']:.1f}",
        )
    console.print(table)
    console.print(
        "=: played whole at this d; the figure in brackets is what it took, the one before it the sum. "
        "~: drawn out from fewer clients."
    )


def beside(row: dict[str, float], name: str) -> str:
    measured = row.get(f"played {name}")
    return f"{row[name]:.2f}" + ("" if measured is None else f" ({measured:.2f})")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options = parser.parse_args()
    found = rows()
    if options.json:
        print(json.dumps(found))
    else:
        print_report(found)


if __name__ == "__main__":
    main()
