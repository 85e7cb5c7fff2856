"""Folders as `cpsgd train`, `cpsgd budget` and `cpsgd audit` leave them, and one that a hostile person wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cpsgd.ledger import Budget, Ledger, RoundEvent
from cpsgd.protocol import Protocol

SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "rounds": 10,
    "epsilon": 2.0,
    "delta": 1e-6,
    "seed": 3,
    "evaluate_every": 1,
}
PROTOCOL = Protocol.rotated_binomial(clients=1000, dim=100, clip_norm=1.0, levels=2, trials=200)

EVIL = '<script>window.hacked=1</script><img src=x onerror="window.hacked=1">\'"&{{7*7}}'
"""What must be shown as it is, or not at all."""


def metrics(round: int, **changes: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    usual = {
        "round": round,
        "released": True,
        "survivors": 400,
        "loss": 2.0 - 0.1 * round,
        "accuracy": 0.2 + 0.05 * round,
        "epsilon": 0.25 * (round + 1),
        "delta": 1e-6,
        "bytes_per_client": 50,
        "bytes_total": 4_000 * (round + 1),
        "seconds": 1.5,
        "r_squared": None,
    }
    return usual | changes


def write_rounds(folder: Path, rounds: int, **changes: Any) -> None:
    """The metrics of the first rounds."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(metrics(number, **changes)) + "\n" for number in range(rounds)]
    (folder / "metrics.jsonl").write_text("".join(lines))


def write_run(folder: Path, done: int = 4, *, finished: bool = False, **settings: Any) -> Path:
    """A run that goes on, or is finished, with one baseline."""
    write_rounds(folder, done)
    write_rounds(folder / "baselines" / "no-privacy", done, epsilon=None, accuracy=0.9, bytes_per_client=400)
    (folder / "config.json").write_text(json.dumps(SETTINGS | settings))
    (folder / "charges.jsonl").touch()
    if finished:
        (folder / "summary.json").write_text(json.dumps(summary(folder.name)))
    return folder


def summary(name: str) -> dict[str, Any]:
    """As the command writes it at the end."""
    result = {"rounds": 4, "accuracy": 0.35, "loss": 1.7, "epsilon": 1.0, "bits_per_coordinate": 4.0, "seconds": 6.0}
    return {
        "run": name,
        "seeded": True,
        "device": "cpu",
        "unit": "client",
        "settings": SETTINGS,
        "dataset": "digits",
        "source": "made up",
        "protocol": PROTOCOL.to_dict(),
        "guarantee": {
            "epsilon": 1.0,
            "delta": 1e-6,
            "adjacency": "replace-one",
            "participation": "every",
            "rounds": 4,
            "citation": "a theorem",
            "noise_clients": 400,
        },
        "paper_bound": {"method": "paper-theorem", "epsilon": 3.0, "reason": None},
        "float32_bytes": 400,
        "results": [
            {**result, "name": "private", "bytes_per_client": 50},
            {**result, "name": "no privacy", "epsilon": None, "bits_per_coordinate": 32.0, "bytes_per_client": 400},
        ],
    }


def write_ledger(path: Path, population: str = "patients", rounds: int = 2) -> Path:
    """A ledger with one population, some of whose budget is spent."""
    ledger = Ledger(path)
    ledger.create(Budget(population=population, epsilon=8.0, delta=1e-6))
    for number in range(rounds):
        entry = ledger.reserve(population, RoundEvent(PROTOCOL, survivors=1000, round=number, run="spring"))
        ledger.release(entry, survivors=1000)
    return path


def report(**changes: Any) -> dict[str, Any]:
    """As `cpsgd audit --json` prints it."""
    usual: dict[str, Any] = {
        "passed": True,
        "claimed": {"epsilon": 2.0, "delta": 0.001, "adjacency": "replace-one", "citation": "a theorem"},
        "lower_bound": 1.3,
        "confidence": 0.95,
        "claims": [
            {"delta": 0.001, "claimed": 2.0, "found": 0.9},
            {"delta": 0.1, "claimed": 0.6, "found": 0.3},
        ],
        "attacked_rounds": 24_000,
        "error_rates": [[0.0, 1.0], [0.2, 0.6], [0.6, 0.2], [1.0, 0.0]],
        "checks": [{"name": "attack", "question": "learned more than claimed?", "passed": True}],
        "protocol": PROTOCOL.to_dict(),
    }
    return usual | changes


def write_all(folder: Path) -> Path:
    """One of each."""
    write_run(folder / "runs" / "done", finished=True)
    write_run(folder / "runs" / "going")
    write_ledger(folder / "study.ledger")
    (folder / "audit.json").write_text(json.dumps(report()))
    return folder


def write_hostile(folder: Path) -> Path:
    """Everything is there, and all that is text is an attempt to get a script in."""
    name = EVIL.replace("/", "\u2215")
    run = write_run(folder / name, finished=True, dataset=EVIL, **{EVIL: EVIL})
    evil = summary(EVIL) | {"dataset": EVIL, "source": EVIL, "run": EVIL}
    evil["guarantee"] |= {"citation": EVIL, "adjacency": EVIL}
    evil["protocol"] = {EVIL: [EVIL, {EVIL: EVIL}]}
    evil["results"][1]["name"] = EVIL
    (run / "summary.json").write_text(json.dumps(evil))
    write_rounds(run / "baselines" / name, 3)
    write_ledger(folder / f"{name}.ledger", population=EVIL, rounds=1)
    checks = [{"name": EVIL, "question": EVIL, "passed": False}]
    claimed = {"adjacency": EVIL, "citation": EVIL}
    (folder / f"{name}.json").write_text(json.dumps(report(checks=checks, claimed=claimed)))
    return folder
