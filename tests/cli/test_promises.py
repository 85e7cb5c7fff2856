"""Commands keep what a protocol file promises, and show no mean without its ε."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol, guarantee
from cpsgd.privacy.guarantees import guarantee_over_rounds
from cpsgd.promise import Claim, Conditions, Promise

LOUD = ("--levels", 2, "--trials", 60)
ROUND = ("--protocol", "p.json", "--round", 1)


@pytest.fixture
def messages(cpsgd: Any) -> list[str]:
    """Files of three messages for a protocol that promises an ε for three."""
    cpsgd.succeeds("round protocol", "--clients", 3, "--dim", 100, *LOUD, "--out", "p.json")
    protocol = Protocol.from_json(Path("p.json").read_text())
    for i in range(3):
        Path(f"{i}.message").write_bytes(protocol.encode(np.full(100, 0.01), 1))
    return [f"{i}.message" for i in range(3)]


def test_a_protocol_shows_its_epsilon_and_promises_it(cpsgd: Any) -> None:
    result = cpsgd("round protocol", "--clients", 3, "--dim", 100, "--out", "p.json")
    protocol = Protocol.from_json(Path("p.json").read_text())
    assert "ε = 1.853 at δ = 1e-06, replace-one neighbours" in result.stdout
    assert "ε ≤ 1.853 at δ = 1e-06 for one client" in result.stdout
    assert protocol.promise == Promise(Claim(1.853, 1e-6), Conditions.of(3))


def test_a_protocol_knows_rounds_dropout_and_secure(cpsgd: Any) -> None:
    asked = ("--rounds", 4, "--participation", "once", "--dropout", 0.2, "--colluding", 1, "--adjacency", "zero-out")
    result = cpsgd("round protocol", "--clients", 10, "--dim", 50, *LOUD, *asked, "--delta", 1e-5, "--out", "p.json")
    assert (result.exit_code, result.stderr) == (0, "")
    protocol = Protocol.from_json(Path("p.json").read_text())
    promise = protocol.promise
    assert promise is not None
    exact = guarantee_over_rounds(
        protocol, 1e-5, rounds=4, participation="once", surviving=8, colluding=1, adjacency="zero-out"
    ).epsilon
    assert exact <= promise.claim.epsilon <= 1.001 * exact
    assert (promise.conditions.surviving, promise.conditions.colluding, promise.conditions.rounds) == (8, 1, 4)
    planned = ("--epsilon", 8, "--delta", 1e-5, "--bits", 12, "--mechanism", "binomial", "--secure", "--dropout", 0.1)
    cpsgd.succeeds("round protocol", "--clients", 10, "--dim", 50, *planned, "--rounds", 2, "--out", "s.json")
    secure = Protocol.from_json(Path("s.json").read_text())
    assert secure.modulus is not None
    assert secure.promise == Promise(Claim(8.0, 1e-5), Conditions.of(9, rounds=2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--secure",), "--secure is for the planner"),
        (("--rounds", 0), "rounds"),
        (("--rounds", 10**30), "rounds in"),
        (("--dropout", 1), "dropout in"),
        (("--dropout", "nan"), "finite dropout"),
        (("--participation", "often"), "Expected participation"),
        (("--participation", "poisson:0.1"), "zero-out"),
        (("--colluding", 3), "no privacy"),
        (("--delta", 0), "no pure differential privacy"),
        (("--trials", 0, "--delta", 1e-6), "trials"),
        (("--protocol", "p.json", "--rounds", 3), "already fixes"),
    ],
)
def test_a_promise_that_cannot_be_made_is_refused(cpsgd: Any, options: tuple[Any, ...], words: str) -> None:
    size = () if "--protocol" in options else ("--clients", 3, "--dim", 100)
    cpsgd.refuses(words, "round protocol", *size, *options, "--out", "out.json")
    assert not Path("out.json").exists()


def test_where_nothing_is_proved_nothing_is_promised(cpsgd: Any) -> None:
    result = cpsgd.succeeds("round protocol", "--clients", 3, "--dim", 100, "--trials", 0, "--out", "p.json")
    assert "none: trials=0 adds no noise" in result.stdout
    assert Protocol.from_json(Path("p.json").read_text()).promise is None
    result = cpsgd("round protocol", "--clients", 3, "--dim", 100, "--trials", 1, "--out", "p.json")
    assert "none is proved at δ = 1e-06: No method proves anything" in result.stdout


def test_plan_writes_a_file_with_the_promise(cpsgd: Any) -> None:
    options = ("--clients", 1000, "--dim", 50, "--epsilon", 2, "--delta", 1e-6, "--bits", 4, "--mechanism", "binomial")
    result = cpsgd("plan", *options, "--out", "p.json", "--json")
    answer = json.loads(result.stdout)
    protocol = Protocol.from_json(Path("p.json").read_text())
    assert protocol.to_dict() == answer["protocol"]
    assert answer["out"] == "p.json"
    assert protocol.promise == Promise(Claim(2.0, 1e-6), Conditions.of(1000))
    result = cpsgd("plan", *options, "--out", "nowhere/p.json")
    assert (result.exit_code, "the folder does not exist" in result.stderr) == (2, True)


def test_too_few_messages_are_not_released(cpsgd: Any, messages: list[str]) -> None:
    protocol = Protocol.from_json(Path("p.json").read_text())
    exact = guarantee(protocol, 1e-6, surviving=2).epsilon
    result = cpsgd.refuses("2 messages are in the sum", "round aggregate", *messages[:2], *ROUND, "--out", "mean.npy")
    assert "for at least 3" in result.stderr
    offered = float(result.stderr.split("--accept-epsilon")[1].strip(" ).\n"))
    assert exact <= offered <= 1.001 * exact
    assert not Path("mean.npy").exists()
    answer = json.loads(cpsgd("round aggregate", *messages[:2], *ROUND, "--out", "mean.npy", "--json").stdout)
    assert (answer["released"], answer["out"], answer["epsilon"]) == (False, None, exact)

    result = cpsgd("round aggregate", *messages[:2], *ROUND, "--out", "mean.npy", "--accept-epsilon", offered)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"ε = {offered:g} at δ = 1e-06" in result.stdout
    assert Path("mean.npy").exists()
    assert (
        cpsgd("round aggregate", *messages[:2], *ROUND, "--out", "m.npy", "--accept-epsilon", 0.99 * exact).exit_code
        == 2
    )
    assert not Path("m.npy").exists()


def test_enough_messages_are_released_with_their_epsilon(cpsgd: Any, messages: list[str]) -> None:
    result = cpsgd("round aggregate", *messages, *ROUND, "--out", "mean.npy")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "privacy       ε = " in result.stdout
    assert "promised      ε ≤ " in result.stdout


def test_messages_that_come_later_are_waited_for(cpsgd: Any, messages: list[str]) -> None:
    assert cpsgd("round aggregate", messages[0], *ROUND, "--state", "s", "--out", "mean.npy").exit_code == 2
    result = cpsgd("round aggregate", *messages[1:], *ROUND, "--state", "s", "--out", "mean.npy")
    assert (result.exit_code, "3 with those before" in result.stdout) == (0, True)


@pytest.mark.parametrize("accepted", ["0", "-1", "nan", "inf", "many"])
def test_what_is_no_epsilon_is_not_accepted(cpsgd: Any, messages: list[str], accepted: str) -> None:
    result = cpsgd("round aggregate", *messages, *ROUND, "--out", "mean.npy", f"--accept-epsilon={accepted}")
    assert result.exit_code != 0
    assert not Path("mean.npy").exists()


def test_accepting_needs_something_to_release(cpsgd: Any, messages: list[str]) -> None:
    result = cpsgd("round aggregate", *messages, *ROUND, "--state", "s", "--accept-epsilon", 9)
    assert (result.exit_code, "give --out" in result.stderr) == (2, True)


def test_a_file_with_an_edited_promise_does_not_even_take_the_messages(cpsgd: Any, messages: list[str]) -> None:
    text = Path("p.json").read_text()
    Path("p.json").write_text(text.replace('"surviving": 3', '"surviving": 1'))
    result = cpsgd("round aggregate", *messages, *ROUND, "--out", "mean.npy")
    assert result.exit_code != 0
    assert "other protocol parameters" in result.stderr
    assert not Path("mean.npy").exists()
    # Nor is it believed where everybody has it.
    edited = Protocol.from_json(Path("p.json").read_text())
    Path("one").write_bytes(edited.encode(np.zeros(100), 1))
    result = cpsgd("round aggregate", "one", *ROUND, "--out", "mean.npy")
    assert (result.exit_code, Path("mean.npy").exists()) == (2, False)


def test_an_old_file_is_released_with_its_epsilon(cpsgd: Any, messages: list[str]) -> None:
    old = replace(Protocol.from_json(Path("p.json").read_text()), promise=None)
    Path("p.json").write_text(old.to_json())
    for i in range(3):
        Path(f"{i}.message").write_bytes(old.encode(np.full(100, 0.01), 1))
    result = cpsgd.succeeds("round aggregate", *messages[:2], *ROUND, "--out", "mean.npy", "--json")
    assert json.loads(result.stdout)["epsilon"] == guarantee(old, 1e-6, surviving=2).epsilon
    result = cpsgd("round aggregate", *messages[:2], *ROUND, "--out", "mean.npy", "--accept-epsilon", 9)
    assert (result.exit_code, "promises no ε" in result.stderr) == (2, True)


def test_a_mean_shows_its_epsilon(cpsgd: Any) -> None:
    np.save("updates.npy", np.random.default_rng(0).normal(0.0, 0.1, size=(50, 20)))
    result = cpsgd.succeeds("round mean", "updates.npy")
    assert "privacy        ε = " in result.stdout
    assert "at δ = 1e-06" in result.stdout
    answer = cpsgd.json("round mean", "updates.npy")
    protocol = Protocol.from_dict(answer["protocol"])
    assert answer["epsilon"] == guarantee(protocol, 1e-6).epsilon


def test_a_mean_of_too_few_rows_is_refused_before_it_costs_anything(cpsgd: Any) -> None:
    np.save("updates.npy", np.zeros((2, 100)))
    cpsgd("round protocol", "--clients", 3, "--dim", 100, *LOUD, "--out", "p.json")
    cpsgd("budget", "create", "b.ledger", "--population", "us", "--epsilon", 90, "--delta", 1e-5)
    before = Path("b.ledger").read_bytes()
    paid = ("--ledger", "b.ledger", "--population", "us")
    result = cpsgd("round mean", "updates.npy", "--protocol", "p.json", *paid)
    assert (result.exit_code, "2 messages are in the sum" in result.stderr) == (2, True)
    assert Path("b.ledger").read_bytes() == before
    assert not Path("mean.npy").exists()
    result = cpsgd("round mean", "updates.npy", "--protocol", "p.json", *paid, "--accept-epsilon", 50)
    assert (result.exit_code, result.stderr) == (0, "")


def test_sampled_rounds_say_that_the_draw_is_secret(cpsgd: Any) -> None:
    options = ("--clients", 100, "--dim", 20, *LOUD, "--range", 0.5, "--clip-norm", 1, "--delta", 1e-5)
    sampled = (*options, "--participation", "fixed-size:0.1")
    for command in (("round protocol", *sampled, "--out", "p.json"), ("privacy", "epsilon", *sampled)):
        words = " ".join(cpsgd(*command).stdout.split())
        assert "who was drawn for a round must stay secret" in words
    assert "secret" not in cpsgd("privacy", "epsilon", *options).stdout
