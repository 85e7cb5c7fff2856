"""Measures sums by two servers: client, leader and helper, and reports per second over real HTTP.

`python -m benchmarks.pair` runs this. Times of the parts are processor time, the best of several turns, beside the time
that copying the integers takes (32 bits each). Over HTTP two servers run as processes of their own with SQLite, and one
process sends reports that were made before; the machine's cores are shared by all three. What the servers themselves
took is their processor time.
"""

from __future__ import annotations

import argparse
import http.client
import json
import math
import os
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from cpsgd import plan
from cpsgd.codec import rotate
from cpsgd.engines.pair.parties import Sender
from cpsgd.engines.pair.running import free_port, start_server, stop_server, write_task
from cpsgd.engines.pair.task import create_task
from cpsgd.secagg.pair.extension import modular_sum
from cpsgd.secagg.pair.proof import Basis, evaluation_message, make_report, open_helper, open_leader, prepared, verify

PRIMES = {1_000: 337, 10_000: 3_779, 100_000: 78_041}
DIMS = (1_000, 51_370, 2**20)
LOADS = {1_000: 3_000, 51_370: 400}
AT_ONCE = 32
# Assumed prices: dollars for a core and hour on demand, and for a gigabyte that leaves a cloud (what comes in is free).
CORE_HOUR, GIGABYTE_OUT = 0.05, 0.09
PRIO3_BYTES_PER_COORDINATE = 16
console = Console(width=110)


def best_milliseconds(run: Callable[[], object], turns: int) -> float:
    times = []
    for _ in range(turns):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return 1e3 * min(times)


def parts(clients: int, dim: int, turns: int = 15) -> dict[str, Any]:
    """Measures what each party computes for one report with one coin per coordinate."""
    shape = prepared(PRIMES[clients], dim, b"benchmark")
    values = np.random.default_rng(1).integers(0, 2, dim).astype(np.uint32)
    report, key = make_report(shape, values), bytes(32)
    sums = np.zeros(dim, dtype=np.uint32)

    def leader() -> bytes:
        share = open_leader(shape, report.id, report.leader)
        modular_sum(sums, share.values, shape.field.prime)
        return evaluation_message(shape, share, Basis.of(shape, report.id, key))

    message = leader()

    def helper() -> None:
        share = open_helper(shape, report.id, report.helper)
        assert verify(shape, report.id, share, Basis.of(shape, report.id, key), message)
        modular_sum(sums, share.values, shape.field.prime)

    return {
        "clients": clients,
        "dim": dim,
        "prime": shape.field.prime,
        "upload_bytes": shape.upload_bytes,
        "between_bytes": shape.evaluation_bytes,
        "copy_ms": best_milliseconds(lambda: np.copyto(sums, values), turns),
        "client_ms": best_milliseconds(lambda: make_report(shape, values), turns),
        "leader_ms": best_milliseconds(leader, turns),
        "helper_ms": best_milliseconds(helper, turns),
    }


def liar(clients: int, dim: int = 51_370, tries: int = 20) -> dict[str, Any]:
    """Measures how far one client that lies moves the mean, in units of the farthest that an honest one moves it.

    The formula is √d s / (2 D): every vector of zeros and ones has this norm about its centre. The attack sends one
    with a proof that both servers check, and compares the decoded means of it and of its opposite. In a direction that
    is given it sends the signs of the rotated direction, which reach about √(2/π) of that. Any other integer is to be
    refused.
    """
    found = plan(clients, dim, 2.0, 1e-6, bits=math.log2(PRIMES[clients]) + 1e-9, mechanism="coins", pair=True)
    protocol, prime = found.protocol, int(found.protocol.modulus or 0)
    shape = prepared(prime, dim, b"liar")
    generator = np.random.default_rng(1)
    others = generator.binomial(clients - 1, 0.5, dim).astype(np.uint64)

    def accepted(values: NDArray[np.uint32], *, change: int = 0) -> bool:
        """Returns whether both servers take a report, one of whose integers is changed after the proof was made."""
        report, key = make_report(shape, values), bytes(32)
        share = open_leader(shape, report.id, report.leader)
        share.values[0] = (int(share.values[0]) + change) % prime
        basis = Basis.of(shape, report.id, key)
        message = evaluation_message(shape, share, basis)
        return verify(shape, report.id, open_helper(shape, report.id, report.helper), basis, message)

    def mean(values: NDArray[np.uint32]) -> NDArray[np.float32]:
        return protocol.decode_sum((others + values) % np.uint64(prime), clients, 0)

    moved, along = [], []
    for _ in range(3):
        direction = generator.standard_normal(dim)
        direction /= np.linalg.norm(direction)
        values = (rotate.forward(direction, protocol.rotation_signs(0)) > 0).astype(np.uint32)
        assert accepted(values)
        difference = (mean(values) - mean(1 - values)) / 2
        moved.append(float(np.linalg.norm(difference)))
        along.append(float(difference @ direction))
    changes = generator.integers(1, prime - 1, tries)
    return {
        "clients": clients,
        "prime": prime,
        "by_formula": math.sqrt(dim) * protocol.scale / (2.0 * protocol.clip_norm),
        "by_attack": clients * max(moved) / protocol.clip_norm,
        "in_given_direction": clients * max(along) / protocol.clip_norm,
        "squared_error_over_gaussian": found.ratio,
        "out_of_range_refused": sum(not accepted(values, change=int(c) * (1 - 2 * int(values[0]))) for c in changes),
        "out_of_range_sent": tries,
        "not_verified": math.sqrt(dim) * protocol.scale * (prime // 2) / protocol.clip_norm,
    }


def processor_seconds(process: int) -> float:
    """Returns what a process has taken so far; Linux only."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def megabytes(process: int) -> float:
    """Returns the largest resident memory of a process so far; Linux only."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("VmHWM")).split()[1]) / 1024


def send_all(url: str, uploads: list[bytes], at_once: int) -> list[float]:
    """Sends uploads over connections that stay open, and returns each one's latency in seconds."""
    address, waiting, latencies = urlsplit(url), iter(uploads), []
    lock = threading.Lock()

    def client() -> None:
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=120)
        while True:
            with lock:
                upload = next(waiting, None)
            if upload is None:
                break
            start = time.perf_counter()
            connection.request("POST", "/reports", upload)
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer
            latencies.append(time.perf_counter() - start)
        connection.close()

    threads = [threading.Thread(target=client) for _ in range(at_once)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return latencies


def load(dim: int, reports: int, at_once: int = AT_ONCE) -> dict[str, Any]:
    """Measures reports per second through both servers, after a tenth as many to begin with."""
    clients = max(10_000, reports + reports // 10)
    bits = 13 + math.ceil(math.log2(clients / 10_000) / 2)
    found = plan(clients=clients, dim=dim, epsilon=2.0, delta=1e-6, bits=bits, mechanism="coins", pair=True)
    task, secrets = create_task(
        found.protocol,
        leader=f"http://127.0.0.1:{free_port()}",
        helper=f"http://127.0.0.1:{free_port()}",
        admission="open",
    )
    vector = np.full(dim, dim**-0.5, dtype=np.float32)
    with Sender(task) as sender:
        uploads = [sender.prepare(vector, 0) for _ in range(reports + reports // 10)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_task(folder, task, secrets)
        servers = {}
        try:
            for role in ("helper", "leader"):
                servers[role] = start_server(role, folder)
            send_all(task.leader.url, uploads[: reports // 10], at_once)
            before = {role: processor_seconds(server.pid) for role, server in servers.items()}
            early = {role: megabytes(server.pid) for role, server in servers.items()}
            own, start = time.process_time(), time.perf_counter()
            latencies = send_all(task.leader.url, uploads[reports // 10 :], at_once)
            seconds, own = time.perf_counter() - start, time.process_time() - own
            took = {
                role: 1e3 * (processor_seconds(each.pid) - before[role]) / reports for role, each in servers.items()
            }
            memory = {role: megabytes(server.pid) for role, server in servers.items()}
        finally:
            for server in servers.values():
                stop_server(server)
    return {
        "dim": dim,
        "prime": found.protocol.modulus,
        "levels": found.protocol.mechanism.values,
        "reports": reports,
        "upload_bytes": task.shape(0).upload_bytes,
        "per_second": reports / seconds,
        "median_latency_ms": 1e3 * float(np.median(latencies)),
        "worst_latency_ms": 1e3 * max(latencies),
        "leader_cpu_ms": took["leader"],
        "helper_cpu_ms": took["helper"],
        "sender_cpu_ms": 1e3 * own / reports,
        "leader_mb": memory["leader"],
        "helper_mb": memory["helper"],
        "leader_growth_mb": memory["leader"] - early["leader"],
        "helper_growth_mb": memory["helper"] - early["helper"],
    }


def million(row: dict[str, Any], reports: int = 1_000_000) -> list[dict[str, Any]]:
    """Returns what a million reports cost each server, by the processor time that a load took."""
    found = []
    sent_on = task_bytes(row) * reports / 1e9
    for role, in_gb, out_gb in (("leader", row["upload_bytes"] * reports / 1e9, sent_on), ("helper", sent_on, 0.0)):
        hours = row[f"{role}_cpu_ms"] * reports / 3.6e6
        found.append(
            {
                "server": role,
                "dim": row["dim"],
                "core_hours": hours,
                "per_second_and_core": 1e3 / row[f"{role}_cpu_ms"],
                "gb_in": in_gb,
                "gb_out": out_gb,
                "dollars": CORE_HOUR * hours + GIGABYTE_OUT * out_gb,
                "prio3_gb_in": PRIO3_BYTES_PER_COORDINATE * row["dim"] * reports / 1e9 if role == "leader" else 0.0,
            }
        )
    return found


def task_bytes(row: dict[str, Any]) -> int:
    """Returns the bytes that the leader sends to the helper for a report: head, sealed seed and evaluations."""
    shape = prepared(row["prime"], row["dim"], b"benchmark", row["levels"])
    return 116 + 80 + shape.evaluation_bytes


def show(title: str, rows: list[dict[str, Any]]) -> None:
    table = Table(title=title)
    for name in rows[0]:
        table.add_column(name.replace("_", " "), justify="right")
    for row in rows:
        table.add_row(*(_text(value) for value in row.values()))
    console.print(table)


def _text(value: object) -> str:
    return f"{value:,.2f}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="where the figures go as JSON")
    parser.add_argument("--only", choices=("parts", "load", "liars"), help="measure only one of them")
    parser.add_argument("--reports", type=int, help="reports of each load; 3,000 and 400 if not given")
    parser.add_argument("--dims", type=int, nargs="+", help="other dimensions, such as 10000000 for parts")
    parser.add_argument("--at-once", type=int, default=AT_ONCE, help="clients that wait for an answer at any time")
    chosen = parser.parse_args(arguments)
    report: dict[str, Any] = {}
    if chosen.only in (None, "parts"):
        others = [] if chosen.dims else [parts(n, 51_370) for n in (1_000, 100_000)]
        report["parts"] = [parts(10_000, dim) for dim in chosen.dims or DIMS] + others
        show("One report", report["parts"])
    if chosen.only in (None, "liars"):
        report["liars"] = [liar(clients) for clients in PRIMES]
        show("One liar, in units of an honest client's largest influence", report["liars"])
    if chosen.only in (None, "load"):
        loads = {dim: LOADS.get(dim, 400) for dim in chosen.dims or LOADS}
        report["load"] = [load(dim, chosen.reports or reports, chosen.at_once) for dim, reports in loads.items()]
        for row in report["load"]:
            console.print_json(json.dumps(row))
        report["million"] = [cost for row in report["load"] for cost in million(row)]
        show(f"A million reports, at ${CORE_HOUR} per core-hour and ${GIGABYTE_OUT} per GB out", report["million"])
    if chosen.out is not None:
        chosen.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
