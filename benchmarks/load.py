"""Measures rate and memory of an aggregator that takes 10,000 messages of a million coordinates.

Sixteen clients really encode; the other messages are theirs under new ids, with the checksum made right again, so that
what is measured is the server. Two threads feed it. At the end the sums are compared with what they must be.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import threading
import time
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from cpsgd import Aggregator, Protocol
from cpsgd.codec import pack, wire

ROUND, DISTINCT, REPORTS = 3, 16, 10


def memory() -> int:
    """Returns the bytes of this process that are in memory now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def renamed(message: bytes, protocol: Protocol) -> bytes:
    """Returns the message with a new id."""
    buffer = np.frombuffer(message, dtype=np.uint8).copy()
    wire.write_header(
        buffer,
        radix=protocol.radix,
        fingerprint=protocol.fingerprint,
        round=ROUND,
        message_id=os.urandom(16),
        dim=protocol.dim,
    )
    return buffer.tobytes()


def measure(dim: int, messages: int, threads: int) -> tuple[list[dict[str, float]], bool]:
    """Returns measurements along the way, and whether the sums are right."""
    protocol = Protocol.rotated_binomial(clients=messages, dim=dim, clip_norm=1.0, levels=3, trials=13)
    generator = np.random.default_rng(0)
    distinct = [protocol.encode(generator.normal(size=dim).astype(np.float32), ROUND) for _ in range(DISTINCT)]
    aggregator = Aggregator(protocol, ROUND)
    used = np.zeros(DISTINCT, dtype=np.int64)
    rows: list[dict[str, float]] = []
    for report in range(REPORTS):
        numbers = range(report * messages // REPORTS, (report + 1) * messages // REPORTS)
        busy = [0.0] * threads

        def feed(thread: int, numbers: range = numbers, busy: list[float] = busy) -> None:
            for number in numbers[thread::threads]:
                message = renamed(distinct[number % DISTINCT], protocol)
                start = time.perf_counter()
                aggregator.add(message)
                busy[thread] += time.perf_counter() - start

        workers = [threading.Thread(target=feed, args=(thread,)) for thread in range(threads)]
        start = time.perf_counter()
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        seconds = time.perf_counter() - start
        for number in numbers:
            used[number % DISTINCT] += 1
        rows.append(
            {
                "messages": aggregator.count,
                "per_second": len(numbers) / seconds,
                "ms_in_add": 1e3 * sum(busy) / len(numbers),
                "memory_mib": memory() / 2**20,
            }
        )
    expected = np.zeros(dim, dtype=np.uint64)
    for message, count in zip(distinct, used, strict=True):
        expected += pack.backward(wire.read(message).payload, dim, protocol.radix) * np.uint64(count)
    return rows, bool(np.array_equal(aggregator.sums, expected)) and aggregator.count == messages


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dim", type=int, default=10**6)
    parser.add_argument("--messages", type=int, default=10_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    options = parser.parse_args()
    rows, right = measure(options.dim, options.messages, options.threads)
    if options.json:
        print(json.dumps({"rows": rows, "sums_right": right}))
        return
    console = Console(width=110)
    table = Table(title=f"{options.messages:,} messages of {options.dim:,} coordinates, {options.threads} threads")
    for heading in ("messages", "per second", "ms in add", "MiB in memory"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['messages']:,.0f}",
            f"{row['per_second']:,.0f}",
            f"{row['ms_in_add']:.2f}",
            f"{row['memory_mib']:.0f}",
        )
    console.print(table)
    console.print("sums " + ("[green]right" if right else "[red]WRONG"))
    grown = rows[-1]["memory_mib"] - rows[0]["memory_mib"]
    console.print(f"memory grew by {grown:.1f} MiB from the first tenth to the last")


if __name__ == "__main__":
    main()
