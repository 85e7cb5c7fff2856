"""Measures the growth of costs with clients and coordinates, beside the machine's floor: a table and a picture.

Clients: a simulated round (`RoundSimulator`), every client's vector clipped, rotated and rounded. The same thousand
vectors are added again and again, so that no time goes into making them, and memory does not grow. Coordinates: one
client's message, from vector to bytes, and its way back: added to the sums and decoded. The floor is memcpy of the same
float32 numbers, in the same turns. A round on a CUDA device (`DeviceRound`), where there is one, has its own columns.

Times are minima over turns, in processor time of one thread, as other programs on the machine do not count there; on a
device they are wall-clock time. Large sizes get one turn, and the table says how many. A size that would take longer
than `--limit` seconds on the clock at the cost of the one before it, or more than half of the memory that is free, is
not run. Its row says so, and has no time: nothing is extrapolated but the billion clients at the end, which says from
what.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from cpsgd import Aggregator, Protocol, RoundSimulator
from cpsgd.codec._kernels import kernels
from cpsgd.codec.batch import processors

LEVELS, TRIALS, ROUND = 2, 14, 0
DIM, CHUNK = 1_000, 1_000
SIZES = tuple(10**power for power in range(3, 9))
BILLION = 10**9
# Seconds for the turns of a size, and the most turns; there is at least one.
TURN_SECONDS, MOST_TURNS = 2.0, 7
# Bytes per coordinate of all that is held at the largest dimension: the vector, its copy, scratch, sums, message.
BYTES = 32
# Numbers that a device holds at once.
AT_ONCE = 1 << 28
# Calls on short vectors are repeated, up to this many coordinates per turn: the clock itself takes half a microsecond.
REPEATED = 10**5
Row = dict[str, Any]


class NotRunError(Exception):
    """A size that cannot be measured here, with the reason."""


def best_times(
    contenders: dict[str, Callable[[], object]],
    runs: int = 1,
    repeats: int = 1,
    clock: Callable[[], float] = time.process_time,
) -> tuple[dict[str, float], int]:
    """Returns the shortest time of each contender over turns of several runs, and the number of turns.

    After the first run of a turn a contender finds its own data in the cache. A run has `repeats` calls.
    """
    best, turns, begun = dict.fromkeys(contenders, math.inf), 0, time.perf_counter()
    while turns == 0 or (turns < MOST_TURNS and time.perf_counter() - begun < TURN_SECONDS):
        for name, contender in contenders.items():
            for _ in range(runs):
                start = clock()
                for _ in range(repeats):
                    contender()
                best[name] = min(best[name], (clock() - start) / repeats)
        turns += 1
    return best, turns


def protocol_of(clients: int, dim: int) -> Protocol:
    return Protocol.rotated_binomial(
        clients=clients,
        dim=dim,
        clip_norm=1.0,
        levels=LEVELS,
        trials=TRIALS,
        coordinate_range=5.0 / math.sqrt(dim),
    )


def random_rows(count: int, dim: int) -> Any:
    return np.random.default_rng(0).standard_normal((count, dim), dtype=np.float32)


def simulated_round(clients: int, dim: int) -> tuple[dict[str, float], int]:
    """Returns the seconds of a round of this many clients, and of copying their vectors."""
    rows, protocol = random_rows(min(CHUNK, clients), dim), protocol_of(clients, dim)
    copy = np.zeros_like(rows)

    def whole() -> None:
        simulator = RoundSimulator(protocol, ROUND, seed=1, threads=1)
        for start in range(0, clients, len(rows)):
            simulator.add(rows[: clients - start])
        simulator.mean()

    def floor() -> None:
        for start in range(0, clients, len(rows)):
            np.copyto(copy[: clients - start], rows[: clients - start])

    return best_times({"seconds": whole, "memcpy": floor}, runs=3 if clients <= CHUNK else 1)


def one_message(dim: int) -> tuple[dict[str, float], int]:
    """Returns the seconds of encoding a message, adding it and decoding the sum, and of copying the vector."""
    protocol, vector = protocol_of(1_000, dim), random_rows(1, dim)[0]
    copy, aggregator = np.zeros_like(vector), Aggregator(protocol, ROUND)
    aggregator.add(protocol.encode(vector, ROUND))
    messages: list[bytes] = []  # an aggregator takes a message once
    return best_times(
        {
            "memcpy": lambda: np.copyto(copy, vector),
            "seconds": lambda: messages.append(protocol.encode(vector, ROUND)),
            "add": lambda: aggregator.add(messages.pop()),
            "decode": aggregator.mean,
        },
        runs=3,
        repeats=max(1, REPEATED // dim),
    )


def device_round(clients: int, dim: int, device: str = "cuda") -> tuple[dict[str, float], int]:
    """Returns the seconds of a round on a device, from vectors there to their mean, and of copying vectors there."""
    import torch

    from cpsgd.simulation.device import DeviceRound

    at = torch.device(device)
    protocol = protocol_of(clients, dim)
    count = max(1, min(clients, AT_ONCE // dim))
    # Rows begin on a cache line, as those of a training do.
    rows = torch.randn(count, -(-dim // 32) * 32, device=at)[:, :dim]
    copy = torch.empty_like(rows)

    def wait() -> None:
        if at.type == "cuda":
            torch.cuda.synchronize(at)

    def whole() -> None:
        round_ = DeviceRound(protocol, ROUND, seed=1, device=at)
        for start in range(0, clients, count):
            round_.add(rows[: clients - start])
        round_.mean()
        wait()

    def floor() -> None:
        for start in range(0, clients, count):
            copy[: clients - start].copy_(rows[: clients - start])
        wait()

    try:
        DeviceRound(protocol, ROUND, seed=1, device=at).add(rows)  # compiles the kernels
        wait()
        return best_times({"seconds": whole, "memcpy": floor}, clock=time.perf_counter)
    except torch.OutOfMemoryError:
        raise NotRunError("memory") from None


def grow(
    axis: str, sizes: Sequence[int], measure: Callable[[int], tuple[dict[str, float], int]], limit: float, free: float
) -> list[Row]:
    """Returns a row per size: the measurement, or the reason why there is none."""
    rows: list[Row] = []
    cost = 0.0
    for size in track(sizes, axis, console=Console(stderr=True), transient=True):
        row: Row = {axis: size}
        rows.append(row)
        if cost * size > limit:
            row["not_run"] = f"longer than {limit:g} s at the cost before it"
        elif axis == "coordinates" and BYTES * size > free / 2:
            row["not_run"] = "memory"
        else:
            begun = time.perf_counter()
            try:
                times, turns = measure(size)
            except NotRunError as reason:
                row["not_run"] = str(reason)
                continue
            cost = (time.perf_counter() - begun) / turns / size
            row.update(times, turns=turns)
    return rows


def billion(rows: Sequence[Row]) -> Row | None:
    """Returns the time of a billion clients, extrapolated from the largest measurement."""
    run = [row for row in rows if "seconds" in row]
    if not run:
        return None
    last = run[-1]
    return {"seconds": last["seconds"] / last["clients"] * BILLION, "measured": False, "from_clients": last["clients"]}


def free_memory() -> float:
    """Returns the available bytes of memory, as Linux estimates them; elsewhere half of all."""
    found = Path("/proc/meminfo")
    if found.exists():
        lines = dict(line.split(":") for line in found.read_text(encoding="ascii").splitlines())
        return 1024.0 * int(lines["MemAvailable"].split()[0])
    return 0.5 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def has_cuda() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return torch.cuda.is_available()


def measured_here(client_sizes: Sequence[int], dimensions: Sequence[int], limit: float, dim: int = DIM) -> Row:
    """Returns the tables of this machine."""
    free = free_memory()
    tables = {
        "clients": grow("clients", client_sizes, lambda size: simulated_round(size, dim), limit, free),
        "coordinates": grow("coordinates", dimensions, one_message, limit, free),
    }
    return {
        "machine": {
            "processor": platform.processor() or platform.machine(),
            "threads": processors(),
            "load": os.getloadavg()[0],
            "simd": kernels.simd_level(),
        },
        "mechanism": {"levels": LEVELS, "trials": TRIALS, "rotated": True},
        "coordinates per client": dim,
        "tables": tables,
        "billion clients": billion(tables["clients"]),
    }


def measured_on(
    device: str, client_sizes: Sequence[int], dimensions: Sequence[int], limit: float, dim: int = DIM
) -> Row:
    """Returns the tables of a device."""
    free = free_memory()

    # A device takes many clients at once: with few coordinates a single one would measure launches.
    def dimension(size: int) -> tuple[dict[str, float], int]:
        clients = max(1, AT_ONCE // size)
        times, turns = device_round(clients, size, device)
        return {name: seconds / clients for name, seconds in times.items()}, turns

    on_device = grow("clients", client_sizes, lambda size: device_round(size, dim, device), limit, free)
    return {
        "name": device_name(device),
        "clients": on_device,
        "coordinates": grow("coordinates", dimensions, dimension, limit, free),
        "billion clients": billion(on_device),
    }


def device_name(device: str) -> str:
    import torch

    return torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else device


def seconds_text(seconds: float) -> str:
    for unit, size, least in (("h", 3600.0, 7200.0), ("min", 60.0, 120.0), ("s", 1.0, 1.0), ("ms", 1e-3, 1e-3)):
        if seconds >= least:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} µs"


def markdown(report: dict[str, Any]) -> str:
    """Prints the tables."""
    dim, machine, device = report["coordinates per client"], report["machine"], report["device"]
    lines = [
        f"{machine['threads']} processors, {machine['simd']}, load {machine['load']:.1f}. Minima over turns,"
        " processor time of one thread; memcpy in the same turns.",
    ]
    for axis, unit, what in (
        ("clients", dim, f"a simulated round, {dim:,} coordinates per client"),
        ("coordinates", 1, "one message, encoded"),
    ):
        parts = ["add", "decode"] if axis == "coordinates" else []
        heads = [axis, what, "ns per coordinate", "memcpy", "× memcpy", *parts, "turns"]
        heads += ["on the device", "its ns", "× its memcpy"] if device else []
        lines += ["", f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
        for number, row in enumerate(report["tables"][axis]):
            size = row[axis]
            cells = [f"{size:,}", *_cells(row, size * unit)]
            if "seconds" in row:
                cells += [*(seconds_text(row[part]) for part in parts), str(row["turns"])]
            else:
                cells += ["–"] * (len(parts) + 1)
            if device:
                there = _cells(device[axis][number], size * unit)
                cells += [there[0], there[1], there[3]]
            lines.append(f"| {' | '.join(cells)} |")
    for where, found in (("", report["billion clients"]), (" on the device", device and device["billion clients"])):
        if found:
            lines += [
                "",
                f"A billion clients would take {seconds_text(found['seconds'])}{where}: not run,"
                f" at the cost per client of {found['from_clients']:,}.",
            ]
    return "\n".join(lines) + "\n"


def _cells(row: Row, coordinates: int) -> list[str]:
    """Returns time, nanoseconds per coordinate, memcpy and the ratio, or the reason why there are none."""
    if "seconds" not in row:
        return [f"not run: {row['not_run']}", "–", "–", "–"]
    return [
        seconds_text(row["seconds"]),
        f"{row['seconds'] / coordinates * 1e9:.3g}",
        seconds_text(row["memcpy"]),
        f"{row['seconds'] / row['memcpy']:.1f}",
    ]


def draw(report: dict[str, Any], path: Path) -> None:
    """Draws time against clients and against coordinates, with memcpy; dotted lines are exactly linear."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4.2), layout="constrained")
    for axes, axis in zip(figure.subplots(1, 2), ("clients", "coordinates"), strict=True):
        curves = [("this machine", report["tables"][axis], "C0")]
        if report["device"]:
            curves.append((report["device"]["name"], report["device"][axis], "C1"))
        for name, rows, colour in curves:
            run = [row for row in rows if "seconds" in row]
            sizes = [row[axis] for row in run]
            axes.loglog(sizes, [row["seconds"] for row in run], "o-", color=colour, label=name)
            axes.loglog(sizes, [row["memcpy"] for row in run], "s--", color=colour, alpha=0.5, label=f"memcpy, {name}")
            if run:
                last = run[-1]
                line = [last["seconds"] * size / last[axis] for size in sizes]
                axes.loglog(sizes, line, ":", color="grey", label="linear" if colour == "C0" else None)
        axes.set_xlabel(axis)
        axes.set_ylabel("seconds")
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    dim = report["coordinates per client"]
    figure.axes[0].set_title(f"a simulated round, {dim:,} coordinates", fontsize="medium")
    figure.axes[1].set_title("one message, from vector to bytes", fontsize="medium")
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/growth"), help="folder of the table and the picture")
    parser.add_argument("--limit", type=float, default=45.0, help="seconds that one size may take")
    parser.add_argument(
        "--only", choices=["machine", "device"], help="measure one of the two; the other's figures in --out are kept"
    )
    options = parser.parse_args()
    path = options.out / "growth.json"
    report: Row = json.loads(path.read_text(encoding="utf-8")) if options.only and path.exists() else {"device": None}
    if options.only != "device":
        report |= measured_here(SIZES, SIZES, options.limit)
    if options.only == "device" or (options.only is None and has_cuda()):
        report["device"] = measured_on("cuda", SIZES, SIZES, options.limit)
    if "tables" not in report:
        parser.error(f"--only device adds to figures of a machine, and there are none in {options.out}")
    options.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    text = markdown(report)
    (options.out / "growth.md").write_text(text, encoding="utf-8")
    draw(report, options.out / "growth.svg")
    print(text)
    print(f"Written: {options.out}/growth.json, growth.md, growth.svg")


if __name__ == "__main__":
    main()
