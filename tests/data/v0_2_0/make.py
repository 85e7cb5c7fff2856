"""Wrote the files of this folder, once, with release 0.2.0 of cpsgd. No test runs it.

PYTHONPATH=. python tests/data/v0_2_0/make.py protocols epsilon plans ledger flower train cli
"""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import cpsgd
from cpsgd import mechanisms
from cpsgd.errors import CpsgdError
from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.planner.examples import plan_examples
from cpsgd.privacy import guarantee_over_rounds

HERE = Path(__file__).resolve().parent


def write(name: str, value: object) -> None:
    rows = value if isinstance(value, list) else None
    text = (
        "[\n" + ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n]" if rows else json.dumps(value)
    )
    (HERE / name).write_text(text + "\n", encoding="utf-8")


def number(value: float) -> dict[str, str]:
    return {"hex": float(value).hex(), "repr": repr(value)}


EXAMPLES: dict[str, mechanisms.Mechanism] = {
    "binomial": mechanisms.Binomial(levels=4, trials=20, coordinate_range=0.5),
    "gaussian": mechanisms.Gaussian(sigma=0.7),
    "skellam": mechanisms.Skellam(levels=4, variance=5.0, coordinate_range=0.5),
    "discrete-gaussian": mechanisms.DiscreteGaussian(levels=4, sigma_squared=5.0, coordinate_range=0.5),
    "coins": mechanisms.Coins(coins=1, theta=0.2, coordinate_range=0.5),
    "seven-coins": mechanisms.Coins(coins=7, theta=0.05, coordinate_range=0.4),
    "sampled-coins": mechanisms.SampledCoins(rate=0.3, theta=0.4, coordinate_range=0.5),
    "lazy-coins": mechanisms.LazyCoins(rate=0.3, theta=0.4, coordinate_range=0.5),
    "rounded-gaussian": mechanisms.RoundedGaussian(noise_deviation=1.5, step=0.25, window=45, coordinate_range=0.5),
    "correlated-gaussian": mechanisms.CorrelatedGaussian(
        noise_deviation=8.0, step=0.25, window=512, coordinate_range=0.5, bands=3, run_length=40
    ),
}


def protocol_list() -> dict[str, cpsgd.Protocol]:
    found = {}
    for name, mechanism in EXAMPLES.items():
        rotate = mechanism.grid is not None
        found[name] = cpsgd.Protocol(clients=40, dim=37, clip_norm=1.5, mechanism=mechanism, rotate=rotate)
        if rotate and not mechanism.not_summed:
            modulus = 50 * mechanism.values + 1
            found[f"{name} modulo"] = cpsgd.Protocol(
                clients=40, dim=37, clip_norm=1.5, mechanism=mechanism, rotate=False, modulus=modulus
            )
    found["promised"] = cpsgd.plan(clients=1000, dim=64, epsilon=2.0, delta=1e-6, bits=1, rounds=3).protocol
    found["promised examples"] = plan_examples(
        clients=10, examples=200, dim=64, epsilon=4.0, delta=1e-6, bits=8
    ).protocol
    return found


def protocols() -> None:
    """Files, fingerprints, three messages, their sums, mean and saved state."""
    generator, rows = np.random.default_rng(20), []
    for name, protocol in protocol_list().items():
        vectors = generator.normal(0, 0.1, size=(3, protocol.dim))
        messages = [protocol.encode(vector, 5) for vector in vectors]
        # A promise refuses to release so few: sums and means are those of the protocol without it.
        aggregator = cpsgd.Aggregator(protocol, 5)
        for message in messages:
            aggregator.add(message)
        row = {
            "name": name,
            "json": protocol.to_json(),
            "fingerprint": protocol.fingerprint.hex(),
            "kind": protocol.name,
            "message_bytes": protocol.message_bytes,
            "messages": [message.hex() for message in messages],
            "state": aggregator.save().hex(),
            "sums": aggregator.sums.tobytes().hex(),
        }
        if protocol.promise is None:
            row["mean"] = aggregator.mean().tobytes().hex()
        rows.append(row)
    write("protocols.json", rows)


def epsilon() -> None:
    """ε of every mechanism, alone and over rounds, with the method that proves it."""
    rows: list[dict[str, Any]] = []
    calls = {"guarantee": cpsgd.guarantee, "guarantee_over_rounds": guarantee_over_rounds}
    settings: list[tuple[str, dict[str, Any]]] = [
        ("guarantee", {"delta": 1e-6}),
        ("guarantee", {"delta": 1e-9, "adjacency": "zero-out", "surviving": 900, "colluding": 10}),
        ("guarantee", {"delta": 1e-6, "surviving": 10, "colluding": 10}),
        ("guarantee_over_rounds", {"delta": 1e-6, "rounds": 10}),
        ("guarantee_over_rounds", {"delta": 1e-6, "rounds": 10, "participation": "once"}),
        ("guarantee_over_rounds", {"delta": 1e-6, "surviving": [1000, 900, 900, 800], "colluding": 5}),
        (
            "guarantee_over_rounds",
            {"delta": 1e-6, "rounds": 20, "participation": "poisson:0.1", "adjacency": "zero-out"},
        ),
        ("guarantee_over_rounds", {"delta": 1e-6, "rounds": 20, "participation": "fixed-size:0.1"}),
    ]
    for name, mechanism in EXAMPLES.items():
        for clients, dim, clip_norm in ((1000, 100, 1.0), (1000, 4096, 4.0)):
            protocol = cpsgd.Protocol(
                clients=clients, dim=dim, clip_norm=clip_norm, mechanism=mechanism, rotate=mechanism.grid is not None
            )
            for call, arguments in settings:
                row: dict[str, Any] = {"mechanism": name, "call": call, "protocol": protocol.to_dict()}
                start = time.process_time()
                try:
                    found = calls[call](protocol, **arguments)
                except CpsgdError as error:
                    row["error"] = type(error).__name__
                else:
                    row |= {"epsilon": number(found.epsilon), "tail": number(found.tail), "method": found.method}
                    row |= {
                        "citation": found.citation,
                        "noise_clients": found.noise_clients,
                        "keys": sorted(found.to_dict()),
                    }
                row |= {"arguments": arguments, "seconds": round(time.process_time() - start, 1)}
                rows.append(row)
    write("epsilon.json", rows)


PLANS: list[dict[str, Any]] = [
    {"clients": 1000, "dim": 10_000, "epsilon": 2.0, "delta": 1e-6, "bits": 1},
    {"clients": 10_000, "dim": 51_370, "epsilon": 2.0, "delta": 1e-9, "bits": 0.1},
    {"clients": 1000, "dim": 1000, "epsilon": 1.0, "delta": 1e-6, "bits": 4, "colluding": 20, "dropout": 0.1},
    {"clients": 100, "dim": 1000, "epsilon": 4.0, "delta": 1e-6, "secure": True, "bits": 10},
    {"clients": 10, "dim": 1000, "epsilon": 4.0, "delta": 1e-6, "rounds": 30, "bits": 8},
    {"clients": 500, "dim": 2000, "epsilon": 2.0, "delta": 1e-6, "rounds": 50, "participation": "once",
     "correlated": 8},
    {"clients": 500, "dim": 200, "epsilon": 2.0, "delta": 1e-6, "rounds": 40, "participation": "poisson:0.05",
     "adjacency": "zero-out", "bits": 6},
    {"clients": 500, "dim": 200, "epsilon": 2.0, "delta": 1e-6, "rounds": 40, "participation": "fixed-size:0.05",
     "bits": 6},
    {"clients": 200, "dim": 100, "epsilon": 3.0, "delta": 1e-6, "bits": 5, "mechanism": "skellam"},
    {"clients": 200, "dim": 100, "epsilon": 3.0, "delta": 1e-6, "bits": 5, "mechanism": "discrete-gaussian"},
    {"clients": 200, "dim": 100, "epsilon": 3.0, "delta": 1e-6, "bits": 5, "mechanism": "binomial"},
    {"clients": 10, "dim": 100, "epsilon": 1e-9, "delta": 1e-6, "bits": 1},
]  # fmt: skip


def plans() -> None:
    rows = []
    for arguments in PLANS:
        start = time.process_time()
        row: dict[str, Any] = {"arguments": arguments}
        try:
            found = cpsgd.plan(**arguments)
        except CpsgdError as error:
            row["error"] = type(error).__name__
        else:
            row |= {
                "protocol": found.protocol.to_dict(),
                "epsilon": number(found.guarantee.epsilon),
                "bits": found.bits,
            }
            row |= {
                "squared_error": number(found.error.total),
                "ratio": number(found.ratio),
                "keys": sorted(found.to_dict()),
            }
        rows.append(row | {"seconds": round(time.process_time() - start, 1)})
        print(rows[-1]["seconds"], arguments, row.get("error"))
    write("plans.json", rows)


def ledger() -> None:
    """Budgets of every kind; a run with correlated noise; a witness."""
    path = HERE / "budgets.ledger"
    path.unlink(missing_ok=True)
    book = Ledger(path)
    coins = cpsgd.Protocol(clients=1000, dim=100, clip_norm=1.0, mechanism=EXAMPLES["coins"])
    exact = cpsgd.Protocol.gaussian(clients=500, dim=20, clip_norm=1.0, sigma=0.3)
    run = cpsgd.plan(
        clients=500, dim=200, epsilon=2.0, delta=1e-7, rounds=20, participation="once", correlated=4
    ).protocol
    for budget in (
        Budget(population="planned", epsilon=40.0, delta=1e-6),
        Budget(population="adaptive", epsilon=8.0, delta=1e-6, accounting="adaptive"),
        Budget(population="renyi", epsilon=8.0, delta=1e-6, accounting="adaptive-renyi", adjacency="zero-out"),
        Budget(population="all", epsilon=30.0, delta=1e-6),
        Budget(population="north", epsilon=10.0, delta=1e-6, group_of="all"),
        Budget(population="monthly", epsilon=5.0, delta=1e-6, renews=30, expires="2099-01-31"),
    ):
        book.create(budget)
    for round in range(3):
        entry = book.reserve("planned", RoundEvent(coins, survivors=950, round=round, run="a", colluding=3))
        book.release(entry, survivors=960)
        entry = book.reserve("adaptive", RoundEvent(exact, survivors=450, round=round, run="b"))
        book.release(entry, survivors=460 + round)
        entry = book.reserve(
            "renyi", RoundEvent(exact, survivors=450, participation="poisson:0.05", round=round, run="c")
        )
        book.release(entry, survivors=500)
    for round in range(4):
        event = RoundEvent(run, survivors=500, participation="once", partition="p", round=round, run="d")
        book.release(book.reserve("planned", event), survivors=500)
    book.release(book.reserve("all", RoundEvent(exact, survivors=450, round=0, run="e")), survivors=450)
    book.release(book.reserve("north", RoundEvent(exact, survivors=450, round=0, run="f")), survivors=450)
    book.reserve("monthly", RoundEvent(exact, survivors=450, round=0, run="g"))
    found = book.verify()
    totals = [
        {"population": t.population, "epsilon": number(t.epsilon), "delta": number(t.delta), "method": t.method}
        | {"rounds": t.rounds, "unreleased": t.unreleased, "keys": sorted(t.to_dict())}
        for t in found.totals
    ]
    entries = {b.population: [entry.to_dict() for entry in book.events(b.population)] for b in book.budgets()}
    budgets = [b.to_dict() for b in book.budgets()]
    head = {"head": str(found.head), "records": found.records}
    write("ledger.json", {**head, "budgets": budgets, "totals": totals, "entries": entries})


def flower() -> None:
    """The memories and seeds of clients after rounds of plain, secure and correlated federations."""
    from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

    from cpsgd.engines.flower import CpsgdStrategy, cpsgd_mod
    from tests.engines.flower.local import LocalGrid, Node, adds, model, task

    def zeros(message: Message, context: Context) -> Message:
        sent = message.content.array_records["arrays"]
        arrays = ArrayRecord({name: Array(np.zeros_like(array.numpy())) for name, array in sent.items()})
        return Message(RecordDict({"sum": arrays}), reply_to=message)

    folder = HERE / "flower"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    shared: dict[str, Any] = {"clients": 4, "dim": 40, "epsilon": 8.0, "delta": 1e-5, "secure": True, "colluding": 1}
    silos = {**shared, "examples": 3, "rounds": 6, "correlated": 2, "dropout": 0.25}
    recorded = {}
    options: dict[str, Any]
    for name, call, arguments, options in (
        ("secure", cpsgd.plan, {**shared, "rounds": 3, "dropout": 0.25, "bits": 14}, {}),
        ("correlated", plan_examples, silos, {"examples": 3, "disjoint": True}),
    ):
        plan = call(**arguments)
        with task():
            nodes = [
                Node(100 + i, cpsgd_mod(rounds=plan.rounds, **options), adds(np.zeros(40, np.float32)))
                for i in range(4)
            ]
            for i, node in enumerate(nodes):
                if options:
                    node.train = zeros
                where = {"cpsgd-memory": str(folder / f"{name}-{i}")}
                node.context = Context(1, node.number, where, RecordDict(), {})
            extra = {"examples": 3} if options else {}
            strategy = CpsgdStrategy(plan, **extra)
            strategy.start(LocalGrid(nodes), model(40), num_rounds=2, timeout=1.0)
            assert all(report.released for report in strategy.reports), strategy.reports
        recorded[name] = {"call": call.__name__, "arguments": arguments, "options": options}
    write("flower.json", recorded)


TRAIN = ["train", "--cohort", "200", "--model", "linear", "--epsilon", "8", "--seed", "3", "--no-baselines"]
RUNS = {
    "correlated": [*TRAIN, "--rounds", "5", "--correlated", "2", "--delta", "1e-6"],
    "sampled": [*TRAIN, "--rounds", "4", "--participation", "poisson", "--clients", "4000",
                "--bits", "6", "--optimizer", "adam", "--lr", "0.05"],
}  # fmt: skip


def train() -> None:
    """Folders of runs that were stopped after their second round, and how they end."""
    folder = HERE / "trainings"
    shutil.rmtree(folder, ignore_errors=True)
    recorded = {}
    for name, options in RUNS.items():
        with tempfile.TemporaryDirectory() as place, contextlib.chdir(place):
            done = command([*options, "--run", name, "--json"], place)
            assert done.returncode == 0, done.stderr
            summary = json.loads(Path(place, "runs", name, "summary.json").read_text())
            lines = Path(place, "runs", name, "metrics.jsonl").read_text().splitlines()
            recorded[name] = {"options": options, "summary": summary, "metrics": [json.loads(line) for line in lines]}
            shutil.rmtree("runs")
            code = (
                "import contextlib, itertools, sys, cpsgd.reports.live as t\n"
                "answers = itertools.chain([False, True], itertools.repeat(True))\n"
                "t.interrupts = contextlib.contextmanager(lambda: (yield lambda: next(answers)))\n"
                "from cpsgd.cli.app import main\nmain()"
            )
            done = subprocess.run(
                [sys.executable, "-c", code, *options, "--run", name], cwd=place, capture_output=True, text=True
            )
            print(done.returncode, done.stderr[-300:])
            shutil.copytree(Path(place, "runs", name), folder / name, ignore=shutil.ignore_patterns("*.png", "*.html"))
    write("trainings.json", recorded)


TABLE = ["people.csv", "--user", "user", "--epsilon", "4", "--delta", "1e-6"]
PLAN = ["plan", "--clients", "1000", "--dim", "100", "--epsilon", "3", "--delta", "1e-6"]
COMMANDS: dict[str, list[list[str]]] = {
    "tables": [
        ["mean", *TABLE, "--columns", "age", "--bounds", "age=0:100", "--json"],
        ["mean", *TABLE, "--columns", "age", "--bounds", "age=0:100", "--group-by", "sex=f,m", "--json"],
        ["sum", *TABLE, "--columns", "age", "--bounds", "age=0:100", "--json"],
        ["count", *TABLE, "--rows-per-user", "2", "--json"],
        ["histogram", *TABLE, "--columns", "sex", "--categories", "f,m", "--rows-per-user", "2", "--json"],
        ["quantiles", *TABLE, "--columns", "age", "--bounds", "age=0:100", "--json"],
        ["mean", *TABLE, "--columns", "height", "--json"],
        ["quantiles", "missing.csv", "--epsilon", "1", "--delta", "1e-6"],
        ["count", "people.csv", "--epsilon", "-1", "--delta", "1e-6"],
    ],
    "plan": [
        [*PLAN, "--bits", "1", "--json"],
        [*PLAN, "--secure", "--json"],
        [*PLAN, "--correlated", "4", "--rounds", "20", "--participation", "once", "--json"],
        [*PLAN, "--bits", "1", "--out", "plan.json"],
        ["privacy", "epsilon", "--protocol", "plan.json", "--delta", "1e-6", "--json"],
        ["protocol", "--protocol", "plan.json", "--json"],
        [*PLAN, "--epsilon", "0"],
    ],
    "budget": [
        ["budget", "show", "budgets.ledger", "--json"],
        ["budget", "verify", "budgets.ledger", "--json"],
        ["budget", "export", "budgets.ledger", "--json"],
        ["budget", "witness", "budgets.ledger", "--json"],
        ["identity", "create", "server.key"],
        ["budget", "report", "budgets.ledger", "--identity", "server.key", "--out", "report.json"],
        ["budget", "check-report", "report.json", "--json"],
        ["budget", "show", "nowhere.ledger"],
    ],
    "audit": [
        ["audit", "--clients", "3", "--dim", "4", "--levels", "2", "--trials", "40", "--rounds", "2000", "--json"]
    ],
}


def command(arguments: list[str], place: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cpsgd", *arguments], cwd=place, capture_output=True, text=True, check=False
    )


def keys_of(value: object, path: str = "") -> set[str]:
    """Names of all fields, as paths; [] stands for any element of a list."""
    if isinstance(value, dict):
        return {path + key for key in value}.union(*(keys_of(part, f"{path}{key}.") for key, part in value.items()))
    if isinstance(value, list):
        return set().union(*(keys_of(part, f"{path}[].") for part in value))
    return set()


def cli() -> None:
    inputs = HERE / "cli"
    shutil.rmtree(inputs, ignore_errors=True)
    inputs.mkdir()
    generator = np.random.default_rng(2)
    rows = [f"u{i // 2},{generator.integers(18, 90)},{'fm'[i % 3 % 2]}" for i in range(600)]
    (inputs / "people.csv").write_text("user,age,sex\n" + "\n".join(rows) + "\n")
    shutil.copyfile(HERE / "budgets.ledger", inputs / "budgets.ledger")
    cases = []
    for group, commands in COMMANDS.items():
        with tempfile.TemporaryDirectory() as place:
            shutil.copytree(inputs, place, dirs_exist_ok=True)
            for arguments in commands:
                done = command(arguments, place)
                print(group, done.returncode, " ".join(arguments), done.stderr[-200:])
                printed = json.loads(done.stdout) if "--json" in arguments and done.stdout else None
                keys = None if printed is None else sorted(keys_of(printed))
                cases.append({"group": group, "args": arguments, "exit_code": done.returncode, "keys": keys})
    write("cli.json", cases)


if __name__ == "__main__":
    for part in sys.argv[1:]:
        globals()[part]()
