"""`cpsgd budget`, and commands that charge a budget."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.aggregator import Aggregator
from cpsgd.cli import mean as mean_command
from cpsgd.errors import VectorError
from cpsgd.ledger import Ledger, RoundEvent
from cpsgd.privacy.guarantees import guarantee
from cpsgd.protocol import Protocol

PROTOCOL = Protocol.rotated_binomial(clients=200, dim=20, clip_norm=1.0, levels=2, trials=2)


@pytest.fixture
def budget(cpsgd: Any) -> Any:
    """`cpsgd` in a folder with a ledger, a table and a protocol; ε = 0.3 pays for two rounds."""
    np.save("table.npy", np.full((200, 20), 0.01))
    Path("p.json").write_text(PROTOCOL.to_json())
    result = cpsgd(
        "budget", "create", "b.ledger", "--population", "people", "--epsilon", 0.3, "--delta", 1e-6, "--json"
    )
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["budget"]["adjacency"] == "replace-one"
    return cpsgd


def mean(cpsgd: Any, *options: object) -> Any:
    return cpsgd(
        "round mean", "table.npy", "--protocol", "p.json", "--ledger", "b.ledger", "--population", "people", *options
    )


def test_means_are_charged_until_the_budget_is_spent(budget: Any) -> None:
    for rounds in range(10):
        if (result := mean(budget, "--json")).exit_code != 0:
            break
        facts = json.loads(result.stdout)
        assert facts["budget"]["rounds"] == rounds + 1
        assert facts["budget"]["epsilon"] <= 0.3
        # The real error tells about people outside of the budget.
        assert facts["squared_error"] is None
        assert facts["simulation"] is False
        Path("mean.npy").unlink()
    assert rounds == 2
    assert result.exit_code == 2
    assert "is left; this would bring it to" in result.stderr
    assert not Path("mean.npy").exists()
    shown = budget.json("budget", "show", "b.ledger")
    (people,) = shown["populations"]
    assert (people["rounds"], people["unreleased"], len(people["entries"])) == (rounds, 0, rounds)
    assert people["entries"][0]["event"]["label"] == "cpsgd round mean table.npy"


def test_one_mean_for_people(budget: Any) -> None:
    text = mean(budget).stdout
    assert "people: ε = " in text
    assert "of 0.3 at δ = 1e-06 spent" in text
    assert "measured" not in text
    expected = guarantee(PROTOCOL, 1e-6).epsilon
    assert Ledger("b.ledger").total("people").epsilon == expected
    shown = " ".join(budget("budget", "show", "b.ledger", "--population", "people").stdout.split())
    assert "of 0.3 at δ = 1e-06, replace-one neighbours, one client" in shown
    assert "docs/proofs/" in shown
    assert "released" in shown


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_table_that_is_not_finite_costs_nothing(budget: Any, bad: float) -> None:
    table = np.full((200, 20), 0.01)
    table[-1, 7] = bad
    np.save("table.npy", table)
    before = Path("b.ledger").read_bytes()
    result = mean(budget)
    assert result.exit_code == 2
    assert "row 199: NaN or infinite at coordinate 7" in " ".join(result.stderr.split())
    assert Path("b.ledger").read_bytes() == before
    assert not Path("mean.npy").exists()


def test_a_table_that_is_damaged_at_its_end_costs_nothing(budget: Any) -> None:
    good = "0.01" + ",0.02" * 19 + "\n"
    Path("table.csv").write_text(good * 199 + good.replace("0.01", "x"))
    before = Path("b.ledger").read_bytes()
    options = ("--protocol", "p.json", "--ledger", "b.ledger", "--population", "people")
    budget.refuses("line 200, column 1: not a number", "round mean", "table.csv", *options)
    assert Path("b.ledger").read_bytes() == before
    Path("table.csv").write_text(good * 200)  # the same options with a good table
    budget.succeeds("round mean", "table.csv", *options)
    assert Path("b.ledger").read_bytes() != before


def test_a_round_is_on_the_ledger_before_its_mean_is_computed(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spent = []

    def fail(aggregator: Aggregator, *, accept_epsilon: float | None) -> None:
        spent.append(Ledger("b.ledger").total("people").rounds)
        raise VectorError("no mean today")

    monkeypatch.setattr(Aggregator, "mean", fail)
    assert mean(budget).exit_code == 2
    assert spent == [1]
    assert Ledger("b.ledger").total("people").rounds == 1


def test_a_table_that_loses_rows_while_it_is_read_costs_nothing(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savetxt("table.csv", np.full((200, 20), 0.01), delimiter=",")
    quote = mean_command._quote

    def quote_and_cut(*arguments: Any, **named: Any) -> Any:
        Path("table.csv").write_text("".join(Path("table.csv").read_text().splitlines(keepends=True)[:150]))
        return quote(*arguments, **named)

    monkeypatch.setattr(mean_command, "_quote", quote_and_cut)
    before = Path("b.ledger").read_bytes()
    budget.refuses(
        "it had 200 rows, and then 150",
        "round mean",
        "table.csv",
        "--protocol",
        "p.json",
        "--ledger",
        "b.ledger",
        "--population",
        "people",
    )
    assert Path("b.ledger").read_bytes() == before
    assert not Path("mean.npy").exists()


def test_a_budget_that_is_spent_meanwhile_is_refused(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add = Aggregator.add

    def spend_and_add(aggregator: Aggregator, message: bytes) -> None:
        ledger = Ledger("b.ledger")
        while ledger.total("people").rounds < 2:
            ledger.reserve("people", RoundEvent(PROTOCOL, survivors=200))
        add(aggregator, message)

    monkeypatch.setattr(Aggregator, "add", spend_and_add)
    result = mean(budget)
    assert result.exit_code == 2
    assert "is left; this would bring it to" in result.stderr
    assert not Path("mean.npy").exists()
    assert Ledger("b.ledger").total("people").rounds == 2


def test_what_was_reserved_and_not_released_is_shown(budget: Any) -> None:
    Ledger("b.ledger").reserve("people", RoundEvent(PROTOCOL, survivors=200))
    assert "1 of them reserved and not released" in budget("budget", "show", "b.ledger").stdout


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--ledger", "b.ledger"), "both ledger and population"),
        (("--population", "people"), "both ledger and population"),
        (("--ledger", "b.ledger", "--population", "nobody"), "no budget for 'nobody'"),
        (("--ledger", "none.ledger", "--population", "people"), "no ledger at none.ledger"),
        (("--ledger", "table.npy", "--population", "people"), "not a ledger"),
        (("--ledger", "b.ledger", "--population", "people", "--trials", 0), "no noise"),
    ],
)
def test_charges_that_are_refused(budget: Any, options: tuple[object, ...], words: str) -> None:
    budget.refuses(words, "round mean", "table.npy", *options)
    assert not Path("mean.npy").exists()
    assert not Path("none.ledger").exists()
    assert Ledger("b.ledger").total("people").rounds == 0


def test_verify(budget: Any) -> None:
    head = budget.json("budget", "show", "b.ledger")["head"]
    mean(budget)
    facts = budget.json("budget", "verify", "b.ledger", "--head", head)
    assert (facts["holds"], facts["records"], facts["head_checked"]) == (True, 4, True)
    later = facts["head"]
    text = budget("budget", "verify", "b.ledger").stdout
    assert "4 records, every hash holds" in text
    assert "a cut end would not be noticed" in text
    lines = Path("b.ledger").read_bytes().splitlines(keepends=True)
    Path("b.ledger").write_bytes(b"".join(lines[:3]))
    result = budget("budget", "verify", "b.ledger")
    assert result.exit_code == 1
    assert "end of the ledger is missing" in result.stderr
    # By somebody who knows what else is in the folder:
    Path("b.ledger.index").unlink()
    budget.succeeds("budget", "verify", "b.ledger", "--head", head)
    budget.succeeds("budget", "repair", "b.ledger")
    budget.succeeds("budget", "verify", "b.ledger", "--head", head)
    result = budget("budget", "verify", "b.ledger", "--head", later, "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["holds"] is False
    result = budget("budget", "verify", "b.ledger", "--head", later)
    assert result.exit_code == 1
    assert "does not contain the head" in result.stderr
    assert budget("budget", "verify", "none.ledger").exit_code == 2


def test_export(budget: Any) -> None:
    mean(budget)
    data = json.loads(budget("budget", "export", "b.ledger").stdout)
    facts = budget.json("budget", "export", "b.ledger", "--out", "b.json")
    assert json.loads(Path("b.json").read_text()) == data
    assert (facts["records"], facts["head"]) == (4, data["head"])
    assert "b.json" in budget("budget", "export", "b.ledger", "--out", "b.json").stdout
    budget.refuses("overwrite the input", "budget", "export", "b.ledger", "--out", "b.ledger")


def test_plot(budget: Any) -> None:
    pytest.importorskip("matplotlib")
    for released in (0, 1, 2):
        result = budget.succeeds("budget", "show", "b.ledger", "--population", "people", "--plot", "b.png", "--json")
        assert json.loads(result.stdout)["plot"] == "b.png"
        assert Path("b.png").read_bytes().startswith(b"\x89PNG")
        assert Ledger("b.ledger").total("people").rounds == released
        mean(budget)
    budget.refuses("--population", "budget", "show", "b.ledger", "--plot", "b.png")


def test_create(budget: Any) -> None:
    budget.refuses("already", "budget", "create", "b.ledger", "--population", "people", "--epsilon", 5, "--delta", 1e-6)
    options = ("--unit", "example", "--adjacency", "zero-out")
    result = budget("budget", "create", "b.ledger", "--population", "[x]", "--epsilon", 5, "--delta", 1e-6, *options)
    assert "[x]" in result.stdout
    assert "one example, zero-out neighbours" in result.stdout
    assert budget("budget", "create", "c.ledger", "--population", "p", "--epsilon", 0, "--delta", 1e-6).exit_code == 2
    assert not Path("c.ledger").exists()
    assert "[x]" in budget("budget", "show", "b.ledger").stdout


def test_training_is_charged_and_refused(budget: Any) -> None:
    budget("budget", "create", "b.ledger", "--population", "digits", "--epsilon", 2.5, "--delta", 1e-6)
    options = (
        "--cohort",
        400,
        "--rounds",
        3,
        "--model",
        "linear",
        "--bits",
        6,
        "--mechanism",
        "binomial",
        "--no-baselines",
        "--ledger",
        "b.ledger",
    )
    facts = budget.json("train", *options, "--population", "digits", "--run", "one")
    assert facts["budget"]["epsilon"] == facts["guarantee"]["epsilon"] <= 2.0
    assert facts["budget"]["rounds"] == 3
    # The run goes on with its ledger, which it knows by itself, and a second run costs as much again.
    assert "digits: ε = " in budget("train", "--resume", "--run", "one").stdout
    budget.refuses("is left; this would bring it to", "train", *options, "--population", "digits", "--run", "two")
    assert Ledger("b.ledger").total("digits").rounds == 3
    for wrong, words in (
        (("--population", "nobody"), "no budget"),
        ((), "population"),
        (("--population", "digits", "--baselines"), "baselines"),
    ):
        budget.refuses(words, "train", *options, *wrong, "--run", "three")


def test_heads_are_printed_in_one_piece(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    head = budget.json("budget", "show", "b.ledger")["head"]
    for command in ("show", "verify", "export"):
        options = ("--out", "b.json") if command == "export" else ()
        assert f"head          {head}\n" in budget("budget", command, "b.ledger", *options).stdout


@pytest.mark.parametrize("columns", [80, 200])
def test_timestamps_are_whole_on_narrow_terminals(budget: Any, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    ledger = Ledger("b.ledger")
    loud = Protocol.rotated_binomial(clients=200, dim=20, clip_norm=1.0, levels=2, trials=2000)
    event = RoundEvent(loud, survivors=150, participation="fixed-size:0.012345", run="a-run-of-a-long-name" * 2)
    entry = ledger.reserve("people", event)
    monkeypatch.setenv("COLUMNS", str(columns))
    text = budget("budget", "show", "b.ledger", "--population", "people").stdout
    assert entry.reserved_at[:19].replace("T", " ") in text
    for heading in ("entry", "reserved (UTC)", "round", "messages", "released", "ε then"):
        assert heading in text


def test_a_picture_that_cannot_be_drawn_is_known_at_once(budget: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for command in (
        ("budget", "show", "b.ledger", "--population", "people", "--plot", "b.png"),
        # Neither plans, plays rounds, nor looks for the ledger.
        ("plan", "--clients", 10**9, "--dim", 10**9, "--epsilon", 1, "--delta", 1e-6, "--plot", "b.png"),
        ("audit", "--rounds", 10**9, "--plot", "b.png"),
    ):
        budget.refuses("Drawing needs matplotlib, which is not installed: pip install matplotlib.", *command)
        assert not Path("b.png").exists()
