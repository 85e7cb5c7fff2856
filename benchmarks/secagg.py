"""Measures the cost of secure aggregation, beside Flower's SecAgg+ client in the same run. `make bench` runs this.

Client times are processor time (one thread does all the work; other programs on the machine do not count), the best of
several turns that the contenders take one after the other. What is compared at the masking stage:

* cpsgd: `SecureClient.mask`, all of it: checking the server's message, opening the neighbours' shares, agreeing on
  keys, adding the masks, packing the integers to b bits, the checksum.
* Flower: `_collect_masked_vectors` of its SecAgg+ mod, with what turns a model into integers replaced by functions that
  return their argument (deserialising, weighting and quantising, which cpsgd's client does elsewhere): opening the
  neighbours' shares, agreeing on keys, adding the masks, the modulus, serialising the integers as 64-bit numbers.

Both have the same number of neighbours, integers and modulus. Flower (`flwr`) must be installed.
"""

from __future__ import annotations

import argparse
import importlib
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from unittest import mock

import numpy as np
from rich.console import Console
from rich.table import Table

from cpsgd.secagg import SecureClient, SecureParameters, SecureServer, Stage, risk, shamir

DIM, BITS, NEIGHBOURS = 2**20, 16, 10
MANY_CLIENTS, MANY_DIM, MANY_DROPOUT = 1_000, 10_000, 0.05
UNMASK_DIM = 2**16
SIZES = (100, 1_000, 10_000)
console = Console(width=110)


def processor_seconds(contenders: dict[str, Callable[[], Callable[[], object]]], turns: int) -> dict[str, float]:
    """Returns the shortest time of each contender; the preparation of each call is not timed."""
    best = dict.fromkeys(contenders, float("inf"))
    for _ in range(turns):
        for name, prepare in contenders.items():
            run = prepare()
            start = time.process_time()
            run()
            best[name] = min(best[name], time.process_time() - start)
    return best


def our_client(neighbours: int, dim: int, bits: int) -> Callable[[], Callable[[], object]]:
    """Prepares a client of `neighbours` neighbours for its masking stage."""
    parameters = SecureParameters(
        clients=neighbours + 1,
        dim=dim,
        bits=bits,
        neighbours=neighbours,
        threshold=neighbours // 2 + 2,
        fingerprint=bytes(16),
        round=0,
    )
    server = SecureServer(parameters)
    clients = [SecureClient(expected=parameters) for _ in range(neighbours + 1)]
    for index, message in server.invite().items():
        server.receive(index, clients[index].advertise(message))
    for index, message in server.advance().items():
        server.receive(index, clients[index].share(message))
    delivery = server.advance()[0]
    state = clients[0].export_state()
    values = np.random.default_rng(0).integers(0, 2**bits, dim, dtype=np.uint32)

    def prepare() -> Callable[[], object]:
        client = SecureClient.restore(state)
        return lambda: client.mask(delivery, values)

    return prepare


def flower_client(neighbours: int, dim: int, bits: int) -> Callable[[], Callable[[], object]]:
    """Measures the same for Flower's SecAgg+ client, by its own functions from set-up to masking."""
    mod = importlib.import_module("flwr.client.mod.secure_aggregation.secaggplus_mod")
    key = importlib.import_module("flwr.common.secure_aggregation.secaggplus_constants").Key
    states = [mod.SecAggPlusState() for _ in range(neighbours + 1)]
    configs = {
        key.SAMPLE_NUMBER: neighbours + 1,
        key.SHARE_NUMBER: neighbours + 1,
        key.THRESHOLD: neighbours // 2 + 2,
        key.CLIPPING_RANGE: 1.0,
        key.TARGET_RANGE: 2**bits,
        key.MOD_RANGE: 2**bits,
        key.MAX_WEIGHT: 1.0,
    }
    public = {}
    for index, state in enumerate(states):
        state.nid = index
        found = mod._setup(state, configs)
        public[str(index)] = [found[key.PUBLIC_KEY_1], found[key.PUBLIC_KEY_2]]
    sources, ciphertexts = [], []
    for state in states:
        found = mod._share_keys(state, public)
        if state.nid:
            sources.append(state.nid)
            ciphertexts.append(found[key.CIPHERTEXT_LIST][found[key.DESTINATION_LIST].index(0)])
    values = [np.random.default_rng(0).integers(0, 2**bits, dim).astype(np.int64)]
    request = {key.CIPHERTEXT_LIST: ciphertexts, key.SOURCE_LIST: sources}

    def run() -> object:
        with ExitStack() as stack:
            for name in ("parameters_to_ndarrays", "parameters_multiply", "quantize"):
                stack.enter_context(mock.patch.object(mod, name, lambda first, *_: first))
            return mod._collect_masked_vectors(states[0], request, 1, values)

    return lambda: run


def many_clients() -> dict[str, float]:
    """Measures a whole round of all clients and the server in one process: wall time and peak memory in GiB."""
    start = time.perf_counter()
    parameters = SecureParameters.choose(MANY_CLIENTS, MANY_DIM, BITS, fingerprint=bytes(16), round=0)
    server = SecureServer(parameters)
    clients = [SecureClient(expected=parameters) for _ in range(MANY_CLIENTS)]
    random = np.random.default_rng(0)
    values = random.integers(0, 2**BITS, (MANY_CLIENTS, MANY_DIM), dtype=np.uint32)
    silent = set(random.permutation(MANY_CLIENTS)[: round(MANY_DROPOUT * MANY_CLIENTS)].tolist())
    messages = server.invite()
    while messages:
        stage = server.stage
        for index, message in messages.items():
            if stage is Stage.MASK:
                if index not in silent:
                    server.receive(index, clients[index].mask(message, values[index]))
            else:
                server.receive(index, getattr(clients[index], stage.value)(message))
        messages = server.advance()
    found = server.result()
    assert len(found.survivors) == MANY_CLIENTS - len(silent)
    expected = values[list(found.survivors)].sum(axis=0, dtype=np.uint32) & np.uint32(2**BITS - 1)
    assert np.array_equal(found.sums, expected)
    return {
        "seconds": time.perf_counter() - start,
        "gibibytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "neighbours": parameters.neighbours,
    }


def unmasking() -> dict[str, float]:
    """Measures the server's work at the end of a round: processor seconds in all, and for the shares."""
    parameters = SecureParameters.choose(MANY_CLIENTS, UNMASK_DIM, BITS, fingerprint=bytes(16), round=0)
    server = SecureServer(parameters)
    clients = [SecureClient(expected=parameters) for _ in range(MANY_CLIENTS)]
    values = np.ones(UNMASK_DIM, np.uint32)
    messages = server.invite()
    while server.stage is not Stage.DONE:
        stage = server.stage
        for index, message in messages.items():
            if stage is not Stage.MASK:
                server.receive(index, getattr(clients[index], stage.value)(message))
            elif index % 10:
                server.receive(index, clients[index].mask(message, values))
        if stage is Stage.UNMASK:
            break
        messages = server.advance()
    spent, combine = 0.0, shamir.combine

    def timed(shares: Mapping[int, bytes]) -> bytes:
        nonlocal spent
        start = time.process_time()
        secret = combine(shares)
        spent += time.process_time() - start
        return secret

    with mock.patch.object(shamir, "combine", timed):
        start = time.process_time()
        server.advance()
        seconds = time.process_time() - start
    assert (server.result().sums == len(server.result().survivors)).all()
    return {"seconds": seconds, "shares": spent}


def in_a_process_of_its_own() -> dict[str, float]:
    found = subprocess.run([sys.executable, __file__, "--many"], capture_output=True, text=True, check=True)
    return dict(json.loads(found.stdout))


def cost_rows(turns: int) -> list[dict[str, float]]:
    """Prints the cost of the parameters for 10 % dropouts and 5 % colluding, for each number of clients."""
    rows = []
    for n in SIZES:
        parameters = SecureParameters.choose(n, DIM, BITS, fingerprint=bytes(16), round=0, colluding=n // 20)
        k, lost = parameters.neighbours, n // 10
        seconds = processor_seconds({"client": our_client(k, DIM, BITS)}, turns)["client"]
        stated = risk(parameters, colluding=n // 20)
        rows.append(
            {
                "clients": n,
                "neighbours": k,
                "threshold": parameters.threshold,
                "insecurity": stated.insecurity,
                "client masks": k + 1,
                "complete graph": n,
                "client ms": 1e3 * seconds,
                "overhead bytes": 5 * 54 + 168 + 32 + 146 * k + 64 + 33 * (k + 1),
                "received bytes": 64 * n + 68 * parameters.quorum + 164 * k + 86 * k,
                "server masks": (n - lost) + round(lost * k * (n - lost) / (n - 1)),
            }
        )
    return rows


def print_report(
    times: dict[str, float], many: dict[str, float], unmask: dict[str, float], rows: list[dict[str, float]]
) -> None:
    table = Table(title=f"Cost against the number of clients (10 % drop out, 5 % collude; d = 2^20, b = {BITS})")
    for heading in ("clients", "neighbours", "threshold", "insecure", "masks per client"):
        table.add_column(heading, justify="right")
    for heading in ("complete graph", "client ms", "extra bytes", "received", "server's masks"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            f"{row['clients']:,}",
            f"{row['neighbours']}",
            f"{row['threshold']}",
            f"{row['insecurity']:.1e}",
            f"{row['client masks']}",
            f"{row['complete graph']:,}",
            f"{row['client ms']:.1f}",
            f"{row['overhead bytes']:,}",
            f"{row['received bytes']:,}",
            f"{row['server masks']:,}",
        )
    console.print(table)
    console.print(
        "insecure: bound on the probability, per round; complete graph: masks a client would need there; "
        "extra bytes: sent by a client beside its integers; received: keys, shares and signatures for a client; "
        "server's masks: to remove at the end."
    )
    ours, flower = times["cpsgd"], times["flower"]
    console.print(
        f"Masking at d = 2^20, b = {BITS}, {NEIGHBOURS} neighbours, processor time: "
        f"cpsgd {1e3 * ours:.1f} ms ({1e9 * ours / DIM:.1f} ns per coordinate), "
        f"Flower's SecAgg+ {1e3 * flower:.1f} ms ({1e9 * flower / DIM:.1f} ns)."
    )
    console.print(
        f"{MANY_CLIENTS:,} clients × {MANY_DIM:,} integers of {BITS} bits, {many['neighbours']:.0f} neighbours, "
        f"{MANY_DROPOUT:.0%} silent at the upload: {many['seconds']:.1f} s, {many['gibibytes']:.2f} GiB."
    )
    console.print(
        f"Unmasking {MANY_CLIENTS:,} clients × 2^16 integers, 10 % dropped out, processor time of the server: "
        f"{unmask['seconds']:.2f} s, of which putting shares together {unmask['shares']:.2f} s."
    )
    targets = [
        ("Flower's client, times ours", flower / ours, ">=", 9.0),
        ("a round of 1,000 clients, seconds", many["seconds"], "<=", 60.0),
        ("its peak memory, GiB", many["gibibytes"], "<=", 2.0),
        ("1,000 clients × 2^16 unmasked, 10 % dropped out, processor seconds", unmask["seconds"], "<=", 0.5),
    ]
    table = Table(title="Targets")
    for heading in ("what", "measured", "target", ""):
        table.add_column(heading, justify="left" if heading in ("what", "") else "right")
    for what, value, sign, target in targets:
        met = value <= target if sign == "<=" else value >= target
        table.add_row(what, f"{value:.2f}", f"{sign} {target:g}", "[green]met" if met else "[red]missed")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print the measurements as JSON")
    parser.add_argument("--turns", type=int, default=20, help="how often each client is timed")
    parser.add_argument("--many", action="store_true", help="run the round of 1,000 clients alone, and print JSON")
    options = parser.parse_args()
    if options.many:
        print(json.dumps(many_clients()))
        return
    contenders = {
        "cpsgd": our_client(NEIGHBOURS, DIM, BITS),
        "flower": flower_client(NEIGHBOURS, DIM, BITS),
    }
    times = processor_seconds(contenders, options.turns)
    many = in_a_process_of_its_own()
    unmask = unmasking()
    rows = cost_rows(max(3, options.turns // 4))
    if options.json:
        print(json.dumps({"masking": times, "many": many, "unmask": unmask, "rows": rows}))
    else:
        print_report(times, many, unmask, rows)


if __name__ == "__main__":
    main()
