"""`cpsgd budget`: adaptive budgets, groups, ends, rounds given up, witnesses and reports; and who charges a ledger."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.ledger import Budget, Ledger, RoundEvent, Witness, replica
from cpsgd.protocol import Protocol

EVENT = RoundEvent(Protocol.gaussian(clients=1_000, dim=10, clip_norm=1.0, sigma=10.0), survivors=1_000)
PEOPLE = ("--population", "people", "--epsilon", 4, "--delta", 1e-6)


def create(cpsgd: Any, *options: object) -> Any:
    return cpsgd("budget", "create", "b.ledger", *PEOPLE, *options)


def save_people() -> None:
    points = np.random.default_rng(0).random((2_000, 2)) / 2
    rows = "\n".join(f"{x:.3f},{y:.3f},{int(x > y)}" for x, y in points)
    Path("people.csv").write_text(f"x,y,z\n{rows}\n")


COMMANDS: dict[str, tuple[object, ...]] = {
    "table mean": ("people.csv", "--columns", "x", "--bounds", "x=0:1"),
    "table sum": ("people.csv", "--columns", "x", "--bounds", "x=0:1"),
    "table count": ("people.csv", "--columns", "z"),
    "table histogram": ("people.csv", "--columns", "x", "--edges", "0,0.5,1"),
    "table quantiles": ("people.csv", "--columns", "x", "--bounds", "x=0:1"),
    "table kmeans": ("people.csv", "--columns", "x,y", "--clusters", 2, "--rounds", 2),
    "table pca": ("people.csv", "--columns", "x,y", "--components", 1),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_every_statistic_charges_a_ledger_and_tells_its_witness(cpsgd: Any, command: str) -> None:
    save_people()
    assert create(cpsgd, "--accounting", "adaptive", "--witness", "w.txt").exit_code == 0
    options = ("--epsilon", 0.5, "--delta", 1e-7, "--ledger", "b.ledger", "--population", "people")
    cpsgd.succeeds(command, *COMMANDS[command], *options, "--witness", "w.txt", "--json")
    ledger = Ledger("b.ledger", witness="w.txt")
    total = ledger.total("people")
    assert total.rounds >= 1
    assert (total.unreleased, total.method) == (0, "gaussian-filter")
    assert 0.0 < total.epsilon <= 1.0
    assert f"{total.delta:g} (ex post)" in cpsgd.succeeds("budget", "show", "b.ledger").stdout
    assert Witness(Path("w.txt")).newest() == ledger.head
    # Whoever keeps the old file cannot ask again.
    Path("b.ledger").unlink()
    assert create(cpsgd).exit_code == 0
    cpsgd.refuses("has seen", command, *COMMANDS[command], *options, "--witness", "w.txt")
    assert Ledger("b.ledger").total("people").rounds == 0


def test_a_witness_needs_a_ledger(cpsgd: Any) -> None:
    save_people()
    cpsgd.refuses(
        "give --ledger", "table sum", *COMMANDS["table sum"], "--epsilon", 1, "--delta", 1e-6, "--witness", "w.txt"
    )


def test_policies_are_shown(cpsgd: Any) -> None:
    text = create(cpsgd, "--accounting", "adaptive", "--expires", "2999-01-01", "--renews", 30).stdout
    for words in ("adaptive: chosen in any way", "2999-01-01", "every 30 days"):
        assert words in text
    text = cpsgd("budget", "show", "b.ledger").stdout
    for words in ("2999-01-01", "every 30 days", "all periods", "adaptive"):
        assert words in text
    assert "planned" in cpsgd("budget", "create", "c.ledger", *PEOPLE).stdout
    group = ("--population", "young", "--epsilon", 2, "--delta", 1e-6, "--group-of", "people")
    assert "group of" in cpsgd("budget", "create", "c.ledger", *group).stdout
    facts = json.loads(cpsgd("budget", "export", "c.ledger").stdout)
    assert facts["populations"][1]["group_of"] == "people"
    for wrong in (("--accounting", "some"), ("--expires", "soon"), ("--renews", -1), ("--group-of", "nobody")):
        assert cpsgd("budget", "create", "d.ledger", *PEOPLE, *wrong).exit_code == 2
    assert not Path("d.ledger").exists()


def test_giving_up_a_round(cpsgd: Any) -> None:
    create(cpsgd)
    entry = Ledger("b.ledger").reserve("people", EVENT)
    result = cpsgd("budget", "abandon", "b.ledger", entry.number, "--reason", "nobody was asked", "--json")
    facts = json.loads(result.stdout)
    assert (facts["entry"]["abandoned"], facts["budget"]["rounds"], facts["budget"]["epsilon"]) == (True, 0, 0.0)
    assert "given up" in cpsgd("budget", "show", "b.ledger", "--population", "people").stdout
    cpsgd.refuses("given up before", "budget", "abandon", "b.ledger", entry.number, "--reason", "again")
    second = Ledger("b.ledger").reserve("people", EVENT)
    assert "given up" in cpsgd("budget", "abandon", "b.ledger", second.number, "--reason", "again").stdout


def test_lines_for_a_witness(cpsgd: Any) -> None:
    create(cpsgd)
    cpsgd("round identity", "create", "me.key")
    cpsgd("round identity", "create", "other.key")
    line = cpsgd("budget", "witness", "b.ledger", "--identity", "me.key", "--out", "w.txt").stdout
    assert Path("w.txt").read_text() == line
    old = Path("b.ledger").read_bytes()
    Ledger("b.ledger").reserve("people", EVENT)
    facts = json.loads(
        cpsgd("budget", "witness", "b.ledger", "--identity", "me.key", "--out", "w.txt", "--json").stdout
    )
    assert facts["line"] == Path("w.txt").read_text().splitlines()[1]
    check = ("budget", "verify", "b.ledger", "--witness", "w.txt")
    assert "contained" in cpsgd(*check, "--signers", "me.key.pub").stdout
    facts = cpsgd.json(*check, "--signers", "me.key.pub")
    assert (facts["holds"], facts["head_checked"]) == (True, True)
    result = cpsgd(*check, "--signers", "other.key.pub")
    assert result.exit_code == 1
    assert "not signed by whom" in result.stderr
    assert cpsgd("budget", "verify", "b.ledger", "--signers", "me.key.pub").exit_code == 2
    Path("b.ledger").write_bytes(old)
    assert cpsgd("budget", "verify", "b.ledger").exit_code == 1
    Path("b.ledger.index").unlink()
    result = cpsgd(*check, "--json")
    assert result.exit_code == 1
    assert "has seen" in json.loads(result.stdout)["reason"]
    # Nor is the older copy witnessed as if nothing had happened.
    assert cpsgd("budget", "witness", "b.ledger", "--out", "w.txt").exit_code == 2
    assert cpsgd("budget", "witness", "b.ledger", "--out", "b.ledger").exit_code == 2
    cpsgd.succeeds("budget", "verify", "b.ledger")


def test_a_report_for_an_auditor(cpsgd: Any) -> None:
    create(cpsgd)
    Ledger("b.ledger").reserve("people", EVENT)
    cpsgd("round identity", "create", "me.key")
    cpsgd("round identity", "create", "other.key")
    facts = json.loads(
        cpsgd("budget", "report", "b.ledger", "--identity", "me.key", "--out", "r.json", "--json").stdout
    )
    Path("b.ledger").rename("away")
    assert facts["head"] == str(Ledger("away").head)
    checked = cpsgd.json("budget", "check-report", "r.json", "--signers", "me.key.pub")
    assert (checked["holds"], checked["head"], checked["signer_checked"]) == (True, facts["head"], True)
    assert checked["populations"][0]["epsilon"] == Ledger("away").total("people").epsilon
    text = cpsgd("budget", "check-report", "r.json").stdout
    assert "by whom was not checked" in text
    assert "people" in text
    assert "by a key that was given" in cpsgd("budget", "check-report", "r.json", "--signers", "me.key.pub").stdout
    result = cpsgd("budget", "check-report", "r.json", "--signers", "other.key.pub")
    assert result.exit_code == 1
    Path("r.json").write_text(Path("r.json").read_text().replace('"rounds": 1', '"rounds": 0'))
    result = cpsgd("budget", "check-report", "r.json", "--json")
    assert result.exit_code == 1
    assert "changed after it was signed" in json.loads(result.stdout)["reason"]
    Path("r.json").write_text("{")
    assert "not JSON" in cpsgd("budget", "check-report", "r.json").stderr
    assert cpsgd("budget", "check-report", "none.json").exit_code == 2


def test_repair(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "SNAPSHOT_EVERY", 3)
    ledger = Ledger("b.ledger")
    ledger.create(Budget(population="people", epsilon=1.0, delta=1e-6))
    for _ in range(3):
        ledger.reserve("people", EVENT)
    Path("b.ledger.index").write_bytes(bytes(200))
    result = cpsgd("budget", "verify", "b.ledger")
    assert result.exit_code == 1
    assert "cpsgd budget repair" in result.stderr
    assert "repaired" in cpsgd("budget", "repair", "b.ledger").stdout
    assert cpsgd.json("budget", "repair", "b.ledger")["head"] == str(Ledger("b.ledger").head)
    cpsgd.succeeds("budget", "verify", "b.ledger")
    assert len(Ledger("b.ledger").events("people")) == 3


def test_forget_future(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    create = ["budget", "create", "b.ledger", "--epsilon", "1", "--delta", "1e-6", "--population"]
    cpsgd(*create, "people", "--renews", "30")

    class Ahead(datetime):
        @classmethod
        def now(cls, tz: object = None) -> Ahead:
            return cls(2099, 1, 1, tzinfo=UTC)

    with monkeypatch.context() as patched:
        patched.setattr(replica, "datetime", Ahead)
        cpsgd(*create, "others")
    assert "--forget-future" in " ".join(cpsgd("budget", "verify", "b.ledger").stdout.split())
    assert cpsgd.json("budget", "verify", "b.ledger")["ahead"].startswith("2099-01-01")
    cpsgd("budget", "repair", "b.ledger", "--forget-future", "a flat battery")
    assert "ahead" not in cpsgd.json("budget", "verify", "b.ledger")
