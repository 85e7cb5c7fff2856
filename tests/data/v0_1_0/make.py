"""Wrote the files of this folder, once, with release 0.1.0 of cpsgd.

The files are what `tests/compatibility` reads. They are not to be written again: their worth is that release 0.1.0
wrote them. This script says how they came about, and no test runs it.

    PYTHONPATH=. python tests/data/v0_1_0/make.py epsilon plans protocols messages ledger runs secure flower cli

The private keys in `identities` and the states in `secure.json` were made for the tests and protect nothing.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import numpy as np
from cpsgd.learning.examples import example_protocol, plan_examples
from cpsgd.privacy.ledger import Budget, Ledger, RoundEvent
from typer.testing import CliRunner

import cpsgd
from cpsgd.cli.app import app
from cpsgd.errors import CpsgdError
from cpsgd.privacy import guarantee_over_rounds
from cpsgd.secagg import (
    SecureClient,
    SecureParameters,
    SecureServer,
    Stage,
    create_identity,
    public_line,
    read_roster,
)

HERE = Path(__file__).resolve().parent
SLOW = 1.0
"""Settings that take longer, in seconds, go to the slow tests."""


def write(name: str, value: object) -> None:
    (HERE / name).write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def write_rows(name: str, rows: list[dict[str, Any]]) -> None:
    """One row in a line."""
    text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / name).write_text(f"[\n{text}\n]\n", encoding="utf-8")


def number(value: float) -> dict[str, str]:
    return {"hex": value.hex(), "repr": repr(value)}


# ------------------------------------------------------------------ ε


def single_settings() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Protocol and arguments of `guarantee`."""
    draw = Random("cpsgd 0.1.0: single rounds")
    for _ in range(150):
        clients = draw.choice([1, 3, 20, 100, 1000, 10_000, 100_000, 2_000_000])
        dim = draw.choice([1, 2, 7, 100, 1000, 4096, 65_536, 1_000_000])
        clip_norm = draw.choice([1.0, 0.01, 2.5, 100.0])
        levels = draw.choice([2, 2, 3, 4, 8, 16, 33, 256])
        trials = draw.choice([1, 6, 14, 16, 40, 128, 255, 256, 257, 300, 1000, 20_000])
        p = draw.choice([0.5, 0.5, 0.5, 0.3, 0.7, 0.1])
        rotate = draw.random() < 0.7
        fraction = draw.choice([None, None, 0.1, 0.02, 0.5])
        delta = draw.choice([1e-9, 1e-6, 1e-5, 1e-3, 0.1])
        name = "rotated_binomial" if rotate else "binomial"
        protocol = getattr(cpsgd.Protocol, name)(
            clients=clients,
            dim=dim,
            clip_norm=clip_norm,
            levels=levels,
            trials=trials,
            p=p,
            coordinate_range=None if fraction is None else fraction * clip_norm,
        )
        arguments: dict[str, Any] = {"delta": delta, "adjacency": draw.choice(["replace-one", "zero-out"])}
        if draw.random() < 0.3:
            arguments["surviving"] = max(1, clients * 9 // 10)
        if draw.random() < 0.3:
            arguments["colluding"] = min(clients // 10, 50)
        yield protocol.to_dict(), arguments
    # Enough noise for a useful ε, where rounding up and rounding down matter.
    for clients, dim in [(100, 10), (1000, 100), (10_000, 4096), (100_000, 65_536)]:
        for levels, trials in [(2, 14), (3, 29), (16, 48), (16, 240), (9, 503)]:
            for p in (0.5, 0.3):
                protocol = cpsgd.Protocol.rotated_binomial(
                    clients=clients, dim=dim, clip_norm=1.0, levels=levels, trials=trials, p=p
                )
                yield protocol.to_dict(), {"delta": 1e-6, "adjacency": "replace-one"}
    for clients, sigma, clip_norm in [(1, 1.0, 1.0), (100, 0.5, 1.0), (1000, 0.05, 0.3), (10_000, 1e-4, 1.0)]:
        protocol = cpsgd.Protocol.gaussian(clients=clients, dim=50, clip_norm=clip_norm, sigma=sigma)
        for delta in (1e-9, 1e-5, 0.01):
            yield protocol.to_dict(), {"delta": delta, "adjacency": "replace-one"}
            yield protocol.to_dict(), {"delta": delta, "adjacency": "zero-out", "surviving": max(1, clients // 2)}
    usual = cpsgd.Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=200).to_dict()
    noiseless = {**usual, "trials": 0}
    for wrong in (
        {"delta": 0.0},
        {"delta": 1.0},
        {"delta": -1e-6},
        {"delta": 1e-6, "adjacency": "add-one"},
        {"delta": 1e-6, "surviving": -1},
        {"delta": 1e-6, "surviving": 10, "colluding": 11},
        {"delta": 1e-6, "surviving": 10, "colluding": 10},
        {"delta": 1e-6, "surviving": 0},
        {"delta": 1e-6, "colluding": -1},
        {"delta": 1e-6, "colluding": 1000},
    ):
        yield usual, wrong
    yield noiseless, {"delta": 1e-6}


def rounds_settings() -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Protocol and arguments of `guarantee_over_rounds`."""
    make = cpsgd.Protocol.rotated_binomial
    protocols = [
        make(clients=10_000, dim=65_536, clip_norm=1.0, levels=2, trials=16),
        make(clients=1000, dim=100, clip_norm=1.0, levels=16, trials=240, p=0.3),
        make(clients=500, dim=1000, clip_norm=0.5, levels=5, trials=600, coordinate_range=0.3),
        cpsgd.Protocol.binomial(clients=20_000, dim=30, clip_norm=2.0, levels=8, trials=100),
        cpsgd.Protocol.binomial(clients=50, dim=10, clip_norm=1.0, levels=2, trials=30),
        cpsgd.Protocol.gaussian(clients=200, dim=77, clip_norm=1.0, sigma=0.5),
    ]
    for protocol in protocols:
        for rounds in (1, 10, 100):
            for participation in ("once", "every"):
                for adjacency in ("replace-one", "zero-out"):
                    yield (
                        protocol.to_dict(),
                        {"delta": 1e-6, "rounds": rounds, "participation": participation, "adjacency": adjacency},
                    )
        n = protocol.clients
        yield protocol.to_dict(), {"delta": 1e-8, "rounds": 20, "surviving": n * 8 // 10, "colluding": n // 20}
        yield protocol.to_dict(), {"delta": 1e-8, "surviving": [n, n, n * 9 // 10, n // 2, n - 1]}
    plain = protocols[0].to_dict(), protocols[5].to_dict()
    for protocol_fields in plain:
        for participation, adjacency in [
            ("poisson:0.01", "zero-out"),
            ("poisson:0.2", "zero-out"),
            ("fixed-size:0.05", "replace-one"),
        ]:
            for rounds in (1, 10, 100):
                yield (
                    protocol_fields,
                    {"delta": 1e-6, "rounds": rounds, "participation": participation, "adjacency": adjacency},
                )
    for wrong in (
        {"delta": 1e-6, "participation": "poisson:0.1"},
        {"delta": 1e-6, "participation": "fixed-size:0.1", "adjacency": "zero-out"},
        {"delta": 1e-6, "participation": "poisson"},
        {"delta": 1e-6, "participation": "often"},
        {"delta": 1e-6, "participation": "poisson:2", "adjacency": "zero-out"},
        {"delta": 1e-6, "participation": "every:0.5"},
        {"delta": 1e-6, "rounds": 0},
        {"delta": 1e-6, "rounds": 2, "surviving": [10, 10, 10]},
        {"delta": 1e-6, "rounds": 2, "surviving": 10, "colluding": 10},
        {"delta": 2.0, "rounds": 2},
    ):
        yield plain[0], wrong


def epsilon() -> None:
    rows: list[dict[str, Any]] = []
    calls: list[tuple[str, Callable[..., cpsgd.Guarantee], Iterator[tuple[dict[str, Any], dict[str, Any]]]]] = [
        ("guarantee", cpsgd.guarantee, single_settings()),
        ("guarantee_over_rounds", guarantee_over_rounds, rounds_settings()),
    ]
    for name, function, settings in calls:
        for fields, arguments in settings:
            protocol = cpsgd.Protocol.from_dict(fields)
            start = time.perf_counter()
            row: dict[str, Any] = {"call": name, "protocol": fields, "arguments": arguments}
            try:
                found = function(protocol, **arguments)
            except CpsgdError as error:
                row["error"] = type(error).__name__
            else:
                row |= {"epsilon": number(found.epsilon), "tail": number(found.tail), "method": found.method}
                row["noise_clients"] = found.noise_clients
            row["slow"] = time.perf_counter() - start > SLOW
            rows.append(row)
    write_rows("epsilon.json", rows)


# ------------------------------------------------------------------ plans


def plan_settings() -> Iterator[dict[str, Any]]:
    usual = {"clients": 10_000, "dim": 65_536, "epsilon": 2.0, "delta": 1e-9}
    small = {"clients": 1000, "dim": 100, "epsilon": 3.0, "delta": 1e-6}
    few = {"clients": 100, "dim": 20, "epsilon": 5.0, "delta": 1e-5}
    for base in (usual, small, few):
        for bits in (3, 4, 6, 10, 31):
            yield {**base, "bits": bits}
        yield base
        yield {**base, "bits": 12, "adjacency": "zero-out"}
        yield {**base, "bits": 20, "secure": True}
        yield {**base, "secure": True}
        yield {**base, "secure": True, "overflow": 1e-3, "dropout": 0.1}
        yield {**base, "bits": 8, "rotate": False}
        yield {**base, "rotate": False, "secure": True}
        yield {**base, "bits": 8, "dropout": 0.25, "colluding": 7}
        yield {**base, "bits": 8, "rounds": 10}
        yield {**base, "bits": 8, "rounds": 100, "participation": "once", "clip_norm": 0.01}
        yield {**base, "rounds": 5, "adjacency": "zero-out", "clip_norm": 30.0, "secure": True, "colluding": 2}
    yield {**usual, "max_error": 0.05}
    yield {**small, "max_error": 0.01}
    yield {**few, "max_error": 0.5, "secure": True}
    yield {**usual, "bits": 1.6}
    yield {**usual, "bits": 2}
    yield {**usual, "bits": 4, "epsilon": 0.1}
    yield {**usual, "bits": 4, "epsilon": 20.0}
    yield {**small, "bits": 8, "rounds": 20, "participation": "fixed-size:0.1"}
    yield {**small, "bits": 8, "rounds": 20, "participation": "poisson:0.1", "adjacency": "zero-out"}
    # Wishes that nothing meets, and mistakes.
    yield {**usual, "bits": 1}
    yield {**small, "max_error": 1e-9}
    yield {**few, "clients": 2, "delta": 1e-12, "bits": 3}
    yield {**small, "bits": 4, "secure": True}
    yield {**few, "dropout": 0.5, "colluding": 50}
    yield {**few, "bits": 4, "max_error": 1.0}
    yield {**few, "bits": 0}
    yield {**few, "epsilon": 0.0}
    yield {**few, "delta": 1.5}
    yield {**few, "dropout": 1.5}
    yield {**few, "participation": "poisson:0.1"}


def example_settings() -> Iterator[dict[str, Any]]:
    base = {"clients": 10, "dim": 1000, "epsilon": 4.0, "delta": 1e-6, "examples": 5000}
    yield {**base, "rounds": 20, "participation": "every", "secure": True}
    yield {**base, "bits": 16, "rounds": 3, "participation": "once"}
    yield {**base, "clients": 200, "examples": 40, "bits": 12, "adjacency": "zero-out", "clip_norm": 0.5}
    yield {**base, "clients": 200, "examples": 1, "dropout": 0.1, "colluding": 3}
    yield {**base, "clients": 5000, "dim": 30, "examples": 7, "bits": 10}
    yield {**base, "participation": "poisson:0.1", "adjacency": "zero-out"}
    yield {**base, "bits": 1}


def planned(found: cpsgd.Plan) -> dict[str, Any]:
    protocol = found.protocol
    return {
        "protocol": protocol.to_dict(),
        "fingerprint": protocol.fingerprint.hex(),
        "coordinate_range": number(protocol.coordinate_range),
        "epsilon": number(found.guarantee.epsilon),
        "method": found.guarantee.method,
        "ratio": number(found.ratio),
        "squared_error": number(found.error.total),
        "gaussian_squared_error": number(found.gaussian_squared_error),
        "overflow_probability": number(found.overflow_probability),
        "bits": found.bits,
        "surviving": found.surviving,
        "frontier": [[point.bits, point.levels, point.trials, point.modulus] for point in found.frontier],
    }


def plans() -> None:
    rows: list[dict[str, Any]] = []
    calls: list[tuple[str, Callable[..., cpsgd.Plan], Iterator[dict[str, Any]]]] = [
        ("plan", cpsgd.plan, plan_settings()),
        ("plan_examples", plan_examples, example_settings()),
    ]
    for name, function, settings in calls:
        for arguments in settings:
            start = time.perf_counter()
            row: dict[str, Any] = {"call": name, "arguments": arguments}
            try:
                row |= planned(function(**arguments))
            except CpsgdError as error:
                row["error"] = type(error).__name__
            row["slow"] = time.perf_counter() - start > SLOW
            rows.append(row)
    write_rows("plans.json", rows)
    single = []
    for row in rows:
        if "error" in row:
            continue
        for examples in (1, 50):
            found: dict[str, Any] = {"protocol": row["protocol"], "examples": examples}
            try:
                found["result"] = example_protocol(cpsgd.Protocol.from_dict(row["protocol"]), examples).to_dict()
            except CpsgdError as error:
                found["error"] = type(error).__name__
            single.append(found)
    write_rows("example_protocols.json", single)


# ------------------------------------------------------------------ protocols, messages, sums


def protocol_list() -> dict[str, cpsgd.Protocol]:
    make = cpsgd.Protocol
    return {
        "gaussian": make.gaussian(clients=10, dim=7, clip_norm=1.5, sigma=0.25),
        "binomial": make.binomial(clients=10, dim=9, clip_norm=1.0, levels=16, trials=48),
        "binomial-p": make.binomial(
            clients=5, dim=12, clip_norm=0.1, levels=5, trials=300, p=0.3, coordinate_range=0.07
        ),
        "binomial-modulus": make.binomial(clients=8, dim=16, clip_norm=2.0, levels=9, trials=20, modulus=4096),
        "rotated": make.rotated_binomial(clients=100, dim=33, clip_norm=1.0, levels=2, trials=14),
        "rotated-seed": make.rotated_binomial(
            clients=10, dim=64, clip_norm=1.0, levels=257, trials=255, rotation_seed=2**64 - 1, coordinate_range=0.5
        ),
        "rotated-p-modulus": make.rotated_binomial(
            clients=4, dim=5, clip_norm=3.0, levels=33, trials=1000, p=0.7, modulus=10_007, rotation_seed=12345
        ),
        "rotated-wide": make.rotated_binomial(
            clients=3, dim=10, clip_norm=1.0, levels=65_536, trials=100_000, modulus=2**20, delta=1e-5
        ),
        "rotated-quiet": make.rotated_binomial(clients=3, dim=1, clip_norm=1.0, levels=3, trials=0),
    }


def protocols() -> None:
    rows = {}
    for name, protocol in protocol_list().items():
        rows[name] = {
            "json": protocol.to_json(),
            "fingerprint": protocol.fingerprint.hex(),
            "kind": protocol.name,
            "radix": protocol.radix,
            "message_bytes": protocol.message_bytes,
        }
    write("protocols.json", rows)


def messages() -> None:
    """Messages, what they add up to, and the aggregator on the way."""
    generator = np.random.default_rng(1)
    rows = []
    for name, protocol in protocol_list().items():
        for round in (0, 1, 2**32 + 5):
            vectors = generator.normal(size=(3, protocol.dim)) / protocol.dim**0.5 * protocol.clip_norm
            sent = [protocol.encode(vector, round) for vector in vectors]
            aggregator = cpsgd.Aggregator(protocol, round)
            aggregator.add(sent[0])
            aggregator.add(sent[1])
            state = aggregator.save()
            aggregator.add(sent[2])
            row = {
                "protocol": name,
                "round": round,
                "messages": [message.hex() for message in sent],
                "state_after_two": state.hex(),
                "sums_dtype": str(aggregator.sums.dtype),
                "sums": aggregator.sums.tobytes().hex(),
                "mean": aggregator.mean().tobytes().hex(),
                "state": aggregator.save().hex(),
            }
            rows.append(row)
    write("messages.json", rows)
    decoded = []
    for name, protocol in protocol_list().items():
        if protocol.sigma is not None:
            continue
        most = protocol.modulus or 3 * (protocol.radix - 1) + 1
        for round, dtype in ((0, "uint32"), (7, "uint64")):
            sums = generator.integers(0, most, size=protocol.dim).astype(dtype)
            mean = protocol.decode_sum(sums, 3, round)
            decoded.append(
                {
                    "protocol": name,
                    "round": round,
                    "count": 3,
                    "dtype": dtype,
                    "sums": sums.tobytes().hex(),
                    "mean": mean.tobytes().hex(),
                }
            )
    write("decode_sum.json", decoded)


# ------------------------------------------------------------------ the ledger


def ledger() -> None:
    path = HERE / "budgets.ledger"
    path.unlink(missing_ok=True)
    book = Ledger(path)
    rotated = cpsgd.Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=200)
    binomial = cpsgd.Protocol.binomial(clients=2000, dim=10, clip_norm=1.0, levels=8, trials=250)
    gaussian = cpsgd.Protocol.gaussian(clients=500, dim=20, clip_norm=1.0, sigma=0.3)
    book.create(Budget(population="patients-2026", epsilon=4.0, delta=1e-6))
    book.create(Budget(population="zero-out", epsilon=6.0, delta=1e-5, adjacency="zero-out"))
    book.create(Budget(population="examples", epsilon=8.0, delta=1e-6, unit="example"))
    book.create(Budget(population="floats, größer", epsilon=20.0, delta=1e-6))
    book.create(Budget(population="untouched", epsilon=0.5, delta=1e-9))
    entry = book.reserve("patients-2026", RoundEvent(rotated, survivors=950, round=0, run="spring", label="first"))
    book.release(entry, survivors=970)
    entry = book.reserve("patients-2026", RoundEvent(rotated, survivors=900, round=1, run="spring", colluding=10))
    book.release(entry, survivors=900)
    book.reserve("patients-2026", RoundEvent(rotated, survivors=950, round=2, run="spring"))
    for round in range(3):
        event = RoundEvent(binomial, survivors=1900, participation="once", partition="halves", round=round)
        entry = book.reserve("patients-2026", event)
        book.release(entry, survivors=1950)
    for round in range(4):
        event = RoundEvent(rotated, survivors=950, participation="poisson:0.05", overflow=1e-9, round=round, run="p")
        entry = book.reserve("zero-out", event)
        if round != 2:
            book.release(entry, survivors=1000)
    for round in range(2):
        event = RoundEvent(rotated, survivors=900, examples=5, round=round, participation="every")
        book.release(book.reserve("examples", event), survivors=999)
    for round in range(3):
        event = RoundEvent(gaussian, survivors=450, round=round, run="floats")
        book.release(book.reserve("floats, größer", event), survivors=460 + round)
    book.reserve("floats, größer", RoundEvent(gaussian, survivors=400, participation="fixed-size:0.1", round=9))
    found = book.verify()
    write(
        "ledger.json",
        {
            "head": str(found.head),
            "records": found.records,
            "budgets": [budget.to_dict() for budget in book.budgets()],
            "totals": [
                {
                    "population": total.population,
                    "epsilon": number(total.epsilon),
                    "delta": number(total.delta),
                    "tail": number(total.tail),
                    "limit": total.limit,
                    "unit": total.unit,
                    "adjacency": total.adjacency,
                    "method": total.method,
                    "rounds": total.rounds,
                    "unreleased": total.unreleased,
                }
                for total in found.totals
            ],
            "entries": {
                budget.population: [entry.to_dict() for entry in book.events(budget.population)]
                for budget in book.budgets()
            },
        },
    )


# ------------------------------------------------------------------ runs

COMMON = ["--cohort", "200", "--model", "linear", "--bits", "6", "--epsilon", "8", "--seed", "3"]
RUNS = {
    "whole": [*COMMON, "--rounds", "3"],
    "interrupted": [*COMMON, "--rounds", "5", "--no-baselines", "--dropout", "0.1"],
    "interrupted-adam": [
        *COMMON, "--rounds", "5", "--no-baselines", "--participation", "poisson", "--optimizer", "adam", "--lr", "0.05",
        "--schedule", "linear", "--clients", "4000",
    ],
}  # fmt: skip


def runs() -> None:
    """Runs of `cpsgd train`: as they end without an interruption, and the folders of those that were interrupted."""
    folder = HERE / "trainings"
    shutil.rmtree(folder, ignore_errors=True)
    recorded = {}
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            found = CliRunner().invoke(app, ["train", *options, "--run", name, "--json"])
            assert found.exit_code == 0, found.output
            run = Path("runs") / name
            summary = json.loads((run / "summary.json").read_text())
            recorded[name] = {
                "options": options,
                "results": summary["results"],
                "guarantee": summary["guarantee"],
                "protocol": summary["protocol"],
                "metrics": [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()],
            }
            if name != "whole":
                shutil.rmtree("runs")
                answers = iter([False, True])

                @contextlib.contextmanager
                def second_round(answers: Iterator[bool] = answers) -> Iterator[Callable[[], bool]]:
                    yield lambda: next(answers)

                with mock.patch("cpsgd.cli._training.interrupts", second_round):
                    found = CliRunner().invoke(app, ["train", *options, "--run", name])
                assert found.exit_code == 130, found.output
            shutil.copytree(run, folder / name, ignore=shutil.ignore_patterns("*.png", "*.html"))
    write("trainings.json", recorded)


# ------------------------------------------------------------------ secure aggregation


def secure() -> None:
    """Whole rounds: every message, and every client's state before each message it answers."""
    folder = HERE / "identities"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    identities = [create_identity(folder / f"client-{i}.key") for i in range(6)]
    lines = [public_line(identity, f"client {i}") for i, identity in enumerate(identities)]
    (folder / "roster.txt").write_text("# six clients\n\n" + "\n".join(lines) + "\n")
    roster = read_roster(folder / "roster.txt")
    write("identities.json", {"lines": lines, "roster": sorted(key.hex() for key in roster)})

    protocol = cpsgd.Protocol.rotated_binomial(
        clients=6, dim=11, clip_norm=1.0, levels=17, trials=100, modulus=2**11, rotation_seed=5
    )
    complete = SecureParameters.for_protocol(protocol, round=3, dropout=0.3, surviving=4)
    sparse = SecureParameters(
        clients=6, dim=11, bits=20, neighbours=4, threshold=3, fingerprint=bytes(range(16)), round=0, surviving=3
    )
    cases = [
        ("complete", complete, False, {"mask": [5], "unmask": [0]}),
        ("signed", complete, True, {"mask": [2]}),
        ("sparse", sparse, False, {"share": [1]}),
    ]
    rows = []
    generator = np.random.default_rng(6)
    for name, parameters, signed, silent in cases:
        session = generator.bytes(16)
        server = SecureServer(parameters, session=session, roster=roster if signed else None)
        keys: list[dict[str, Any]] = [{"identity": i, "roster": roster} if signed else {} for i in identities]
        states = [SecureClient(expected=parameters, **extra).export_state() for extra in keys]
        values = generator.integers(0, 100, size=(6, 11)).astype(np.uint32)
        waiting = server.invite()
        stages = []
        while server.stage is not Stage.DONE:
            stage = server.stage.value
            exchanges = {}
            for i, message in waiting.items():
                if i in silent.get(stage, []):
                    continue
                client = SecureClient.restore(states[i], expected=parameters, **keys[i])
                answer = getattr(client, stage)(message, *([values[i]] if stage == "mask" else []))
                exchanges[str(i)] = {"state": states[i].hex(), "message": message.hex(), "answer": answer.hex()}
                server.receive(i, answer)
                states[i] = client.export_state()
            waiting = server.advance()
            stages.append({"stage": stage, "exchanges": exchanges})
        result = server.result()
        rows.append(
            {
                "name": name,
                "parameters": parameters.to_bytes().hex(),
                "fields": {**vars(parameters), "fingerprint": parameters.fingerprint.hex()},
                "session": session.hex(),
                "signed": signed,
                "values": values.tolist(),
                "stages": stages,
                "sums": result.sums.tolist(),
                "survivors": sorted(result.survivors),
            }
        )
    write("secure.json", rows)


# ------------------------------------------------------------------ a Flower client's memory


def flower() -> None:
    """What four clients remember of two rounds, of which secure aggregation is one stage after the other."""
    from flwr.app import Context, RecordDict

    from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
    from tests.engines.flower.local import LocalGrid, Node, adds, model, task

    folder = HERE / "flower"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    arguments = {
        "clients": 4,
        "dim": 40,
        "epsilon": 8.0,
        "delta": 1e-5,
        "rounds": 3,
        "secure": True,
        "dropout": 0.25,
        "bits": 14,
    }
    plan = cpsgd.plan(**arguments)  # type: ignore[arg-type]
    with task():
        nodes = [Node(100 + i, cpsgd_mod(rounds=3), adds(np.zeros(40, np.float32))) for i in range(4)]
        for i, node in enumerate(nodes):
            node.context = Context(1, node.number, {"cpsgd-memory": str(folder / f"memory-{i}")}, RecordDict(), {})
        CpsgdStrategy(plan).start(LocalGrid(nodes), model(40), num_rounds=2, timeout=1.0)
    write("flower.json", {"plan": arguments, "protocol": plan.protocol.to_dict()})


# ------------------------------------------------------------------ the command line

PLAN = ["plan", "--clients", "1000", "--dim", "100", "--epsilon", "3", "--delta", "1e-6"]
PROOF = [
    "--clients",
    "10000",
    "--dim",
    "65536",
    "--levels",
    "2",
    "--trials",
    "16",
    "--clip-norm",
    "1",
    "--range",
    "0.05",
]
THEOREM = ["privacy", "theorem", "--trials", "200000", "--dim", "10", "--delta", "1e-5", "--l2", "10", "--linf", "3"]
POINTS = ["points.npy", "--epsilon", "8", "--delta", "1e-5"]
MEAN = ["mean", "table.npy", "--clip-norm", "1", "--json"]
CHARGED = ["--ledger", "new.ledger", "--levels", "2", "--trials", "250"]
ROUND = ["--protocol", "protocol.json", "--round", "7", "--json"]
TRAIN = ["train", "--cohort", "200", "--rounds", "2", "--model", "linear", "--bits", "6", "--epsilon", "8"]
COMMANDS: dict[str, list[list[str]]] = {
    "plan": [
        [*PLAN, "--bits", "6", "--json"],
        [*PLAN, "--secure", "--rounds", "3", "--dropout", "0.1", "--json"],
        [*PLAN, "--bits", "1", "--json"],
        [*PLAN, "--bits", "-1", "--json"],
        [*PLAN, "--bits", "many"],
        [*PLAN, "--adjacency", "friends"],
        [*PLAN, "--no-such-option"],
        ["plan", "--clients", "1000"],
        ["no-such-command"],
    ],
    "privacy": [
        ["privacy", "epsilon", *PROOF, "--delta", "1e-9", "--json"],
        ["privacy", "epsilon", *PROOF, "--delta", "1e-9", "--rounds", "10", "--json"],
        ["privacy", "epsilon", *PROOF, "--delta", "1e-9", "--surviving", "9000", "--colluding", "10", "--json"],
        ["privacy", "epsilon", *PROOF, "--delta", "2", "--json"],
        ["privacy", "epsilon", *PROOF, "--trials", "0", "--delta", "1e-9"],
        ["privacy", "epsilon", *PROOF, "--delta", "1e-9", "--participation", "poisson:0.1"],
        [*THEOREM, "--l1", "30", "--json"],
        [*THEOREM],
    ],
    "mean": [
        MEAN,
        [*MEAN, "--sigma", "0.5", "--out", "mean.csv"],
        ["mean", "damaged.csv"],
        ["mean", "missing.npy"],
        [*MEAN, "--levels", "1"],
    ],
    "round": [
        ["protocol", "--clients", "3", "--dim", "20", "--levels", "16", "--trials", "48", "--json"],
        ["protocol", "--protocol", "protocol.json", "--json"],
        ["protocol", "--protocol", "damaged.csv"],
        ["protocol", "--protocol", "missing.json"],
        ["encode", "client0.npy", *ROUND, "--out", "0.message"],
        ["encode", "client1.npy", *ROUND, "--out", "1.message"],
        ["encode", "table.npy", *ROUND, "--out", "2.message"],
        ["encode", "missing.npy", *ROUND, "--out", "2.message"],
        ["aggregate", "0.message", "1.message", *ROUND, "--state", "round.state"],
        ["aggregate", "1.message", *ROUND, "--state", "round.state"],
        ["aggregate", "old.message", *ROUND, "--state", "round.state", "--out", "mean.npy"],
        ["aggregate", "missing.message", *ROUND, "--state", "other.state"],
        ["aggregate", "0.message", *ROUND],
        ["aggregate", "0.message", "--protocol", "protocol.json", "--round", "8", "--state", "other.state"],
    ],
    "budget": [
        ["budget", "show", "budgets.ledger", "--json"],
        ["budget", "show", "budgets.ledger", "--population", "patients-2026", "--json"],
        ["budget", "show", "budgets.ledger", "--population", "nobody"],
        ["budget", "verify", "budgets.ledger", "--json"],
        ["budget", "verify", "budgets.ledger", "--head", "ab" * 32],
        ["budget", "verify", "missing.ledger"],
        ["budget", "verify", "damaged.csv"],
        ["budget", "export", "budgets.ledger", "--json"],
        ["budget", "create", "new.ledger", "--population", "people", "--epsilon", "7", "--delta", "1e-5", "--json"],
        ["budget", "create", "new.ledger", "--population", "people", "--epsilon", "8", "--delta", "1e-5"],
        ["budget", "create", "new.ledger", "--population", "poor", "--epsilon", "0.001", "--delta", "1e-5"],
        [*MEAN, *CHARGED, "--population", "people"],
        [*MEAN, *CHARGED, "--population", "poor"],
        [*MEAN, *CHARGED, "--population", "nobody"],
    ],
    "points": [
        ["kmeans", *POINTS, "--clusters", "2", "--rounds", "2", "--json"],
        ["kmeans", *POINTS, "--clusters", "0"],
        ["pca", *POINTS, "--components", "1", "--json"],
        ["pca", *POINTS, "--components", "5"],
        ["pca", "missing.npy", "--components", "1", "--epsilon", "8", "--delta", "1e-5"],
    ],
    "identity": [
        ["identity", "create", "new.key", "--name", "hospital-a", "--json"],
        ["identity", "create", "new.key"],
        ["identity", "show", "client-0.key", "--json"],
        ["identity", "show", "damaged.csv"],
        ["identity", "show", "missing.key"],
        ["data", "cifar"],
    ],
    "train": [
        [*TRAIN, "--run", "small", "--json"],
        ["train", "--resume", "--run", "small", "--json"],
        [*TRAIN, "--run", "small"],
        ["train", "--resume", "--run", "none"],
        ["train", "--preset", "cifar"],
        ["train", "--config", "damaged.csv"],
        [*TRAIN, "--seed", "today"],
    ],
    "audit": [
        ["audit", "--clients", "3", "--dim", "4", "--levels", "2", "--trials", "40", "--rounds", "2000", "--json"],
        ["audit", "--rounds", "0"],
    ],
}
"""Commands by group; those of a group run in one folder, one after the other."""


def cli() -> None:
    """What every command prints with --json, by its keys, and how it ends."""
    inputs = HERE / "cli"
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir()
    generator = np.random.default_rng(2)
    table = generator.normal(0.05, 20**-0.5, size=(30, 20)).astype(np.float32)
    np.save(inputs / "table.npy", table)
    np.save(inputs / "client0.npy", table[0])
    np.save(inputs / "client1.npy", table[1])
    centres = np.array([[0.7, 0.0, 0.1], [-0.6, 0.2, 0.0]])
    np.save(inputs / "points.npy", generator.normal(np.repeat(centres, 150, axis=0), 0.05).astype(np.float32))
    (inputs / "damaged.csv").write_text("1,2\n3,x\n")
    protocol = cpsgd.Protocol.rotated_binomial(clients=3, dim=20, clip_norm=1.0, levels=16, trials=48)
    (inputs / "protocol.json").write_text(protocol.to_json() + "\n")
    (inputs / "old.message").write_bytes(protocol.encode(table[2], 7))
    shutil.copyfile(HERE / "budgets.ledger", inputs / "budgets.ledger")
    shutil.copyfile(HERE / "identities" / "client-0.key", inputs / "client-0.key")
    cases = []
    for group, commands in COMMANDS.items():
        with tempfile.TemporaryDirectory() as place:
            shutil.copytree(inputs, place, dirs_exist_ok=True)
            for arguments in commands:
                start = time.perf_counter()
                done = subprocess.run(
                    [sys.executable, "-m", "cpsgd", *arguments], cwd=place, capture_output=True, text=True, check=False
                )
                seconds = time.perf_counter() - start
                print(f"{group} {seconds:.1f} s, exit {done.returncode}: {' '.join(arguments)} {done.stderr[-300:]}")
                printed = json.loads(done.stdout) if "--json" in arguments and done.stdout else None
                keys = None if printed is None else sorted(keys_of(printed))
                cases.append({"group": group, "args": arguments, "exit_code": done.returncode, "keys": keys})
    write("cli.json", {"cases": cases, "documented": documented()})


def keys_of(value: object, path: str = "") -> set[str]:
    """Names of all fields, as paths; [] stands for any element of a list."""
    if isinstance(value, dict):
        return {path + key for key in value}.union(*(keys_of(part, f"{path}{key}.") for key, part in value.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(part, f"{path}[].") for part in value))
    return set()


def documented() -> list[dict[str, str]]:
    """The command lines of README.md and docs, for whoever changes commands or options."""
    root = HERE.parents[2]
    found = []
    for page in [root / "README.md", *sorted((root / "docs").glob("*.md"))]:
        text = page.read_text(encoding="utf-8")
        for block in re.findall(r"```(?:console|bash|sh|shell)\n(.*?)```", text, re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if re.match(r"(\$ )?(cpsgd|python -m cpsgd) ", line):
                    found.append({"page": str(page.relative_to(root)), "line": " ".join(line.split())})
        for line in re.findall(r"(?<!`)`(cpsgd [^`\n]+)`(?!`)", text):
            found.append({"page": str(page.relative_to(root)), "line": line})
    return found


PARTS: dict[str, Callable[[], None]] = {
    "flower": flower,
    "cli": cli,
    "secure": secure,
    "runs": runs,
    "protocols": protocols,
    "messages": messages,
    "ledger": ledger,
    "epsilon": epsilon,
    "plans": plans,
}

if __name__ == "__main__":
    for part in sys.argv[1:]:
        PARTS[part]()
