"""Measures the cost of a charge and of opening a ledger, by its number of entries.

    python benchmarks/ledger.py 10000 1000000 --folder /dev/shm

A ledger of that many released rounds is written at once, without waiting for the disk after each. Then: opening it, a
charge (reserve and release, each on the disk when it returns), looking up a run's round, and, with --verify, reading
all of it. The disk's part of a charge is measured apart, by lines that are added to a file in the same folder.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from cpsgd._plain import canonical
from cpsgd._record_log import RecordLog, record_line
from cpsgd.ledger import Budget, Entry, Ledger, RoundEvent
from cpsgd.ledger.chain import DOMAIN
from cpsgd.ledger.kinds import kind_of
from cpsgd.protocol import Protocol

PROTOCOL = Protocol.rotated_binomial(clients=10_000, dim=1_000, clip_norm=1.0, levels=16, trials=100_000)
EVENT = RoundEvent(PROTOCOL, survivors=9_000, run="benchmark")
NOW = "2026-01-01T00:00:00.000+00:00"


def build(path: Path, entries: int) -> None:
    """Makes a ledger of released rounds, with a snapshot after the last of them."""
    ledger = Ledger(path)
    ledger.create(Budget(population="people", epsilon=100.0, delta=1e-6))
    reserve = {"kind": "reserve", "population": "people", "event": EVENT.to_dict(), "spent": 1.0, "method": "some"}
    before, middle, after = _template(reserve, "round")
    replica = ledger._replica
    state, end, index = replica.state, replica.end, replica.index
    account = state.accounts["people", 0]
    account.reserve(EVENT)
    account.release(EVENT, 9_500)
    account.tally.add(kind_of(EVENT, 9_500), "", entries - 1)
    account.rounds = account.reserved = entries
    state.time = NOW
    round_of = {"run": EVENT.run}

    def write(text: str, body: dict[str, object]) -> None:
        nonlocal end
        line, end = record_line(DOMAIN, text, end)
        file.write(line)
        index.add(body, end)

    with path.open("ab") as file:
        for number in range(entries):
            place = end.records
            event = {**round_of, "round": number}
            body: dict[str, object] = {"kind": "reserve", "population": "people", "event": event}
            write(f"{before}{number}{middle}{place}{after}", body)
            text = f'{{"entry":{place},"kind":"release","number":{place + 1},"survivors":9500,"time":"{NOW}"}}'
            write(text, {"kind": "release", "entry": place})
        snapshot = {"kind": "snapshot", "state": json.loads(state.to_text()), "number": end.records, "time": NOW}
        write(canonical(snapshot), snapshot)
    index.save()


def _template(record: dict[str, object], field: str) -> tuple[str, str, str]:
    """Returns the canonical text around the record's number and its event's field."""
    event = {**json.loads(json.dumps(record["event"])), field: -77}
    text = canonical({**record, "event": event, "number": -88, "time": NOW})
    places = sorted((text.index(mark), mark) for mark in ("-77", "-88"))
    if [mark for _, mark in places] != ["-77", "-88"]:
        raise SystemExit("The record's fields are in another order than this program knows.")
    (a, _), (b, _) = places
    return text[:a], text[a + 3 : b], text[b + 3 :]


def median(work: Callable[[int], object], repeats: int) -> float:
    """Returns the milliseconds that `work` takes."""
    times = []
    for number in range(repeats):
        start = time.perf_counter()
        work(number)
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[repeats // 2]


def disk(folder: Path) -> float:
    """Returns the milliseconds of adding one line to a file."""
    with RecordLog(folder / "disk", b"disk").opened() as log:
        return median(lambda number: log.append("x" * 600), 30)


def main() -> None:
    """Prints a line for each number of entries."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("entries", type=int, nargs="+")
    parser.add_argument("--folder", help="where the ledgers are made; a folder for temporary files if not given")
    parser.add_argument("--verify", action="store_true", help="also read all of it")
    options = parser.parse_args()
    for entries in options.entries:
        with tempfile.TemporaryDirectory(dir=options.folder) as name:
            found = measure(Path(name), entries, verify=options.verify)
        print(json.dumps({name: round(value, 2) for name, value in found.items()}), flush=True)


def measure(folder: Path, entries: int, *, verify: bool) -> dict[str, float]:
    """Returns the measurements for one number of entries."""
    path = folder / "budgets.ledger"
    build(path, entries)
    ledger = Ledger(path)
    found = {
        "entries": entries,
        "megabytes": path.stat().st_size / 1e6,
        "open_ms": median(lambda number: Ledger(path), 5),
        "first_find_ms": median(lambda number: Ledger(path).find("people", run="benchmark", round=entries // 2), 3),
        "find_ms": median(lambda number: ledger.find("people", run="benchmark", round=entries // 2), 20),
        "disk_ms": disk(folder),
        # The first is priced, and the proof covers the next ones.
        "first_charge_ms": median(lambda number: ledger.reserve("people", event_of("first", 0)), 1),
    }
    reserved: list[Entry] = []
    found["reserve_ms"] = median(lambda number: reserved.append(ledger.reserve("people", event_of("run", number))), 50)
    found["release_ms"] = median(lambda number: ledger.release(reserved[number], 9_500), 50)
    # With a hundred records since the snapshot; there are never more than 128.
    found["open_later_ms"] = median(lambda number: Ledger(path), 5)
    if verify:
        found["verify_s"] = median(lambda number: ledger.verify(), 1) / 1e3
    return found


def event_of(run: str, round: int) -> RoundEvent:
    """Returns a round of the same kind."""
    return RoundEvent(PROTOCOL, survivors=9_000, run=run, round=round)


if __name__ == "__main__":
    main()
