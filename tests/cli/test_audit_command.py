"""`cpsgd audit`: what it prints, its picture, its exit codes."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Protocol, guarantee
from cpsgd.audit import all_cases, pair_rounds
from cpsgd.codec import pack, pipeline, wire
from cpsgd.engines.pair.running import write_task
from cpsgd.engines.pair.task import create_task
from cpsgd.mechanisms import Binomial
from cpsgd.mechanisms.binomial import MAX_COINS
from cpsgd.randomness import Keystream
from cpsgd.secagg.pair.extension import modular_sum
from tests.engines.pair.local import protocol as pair_protocol

FEW = ("--rounds", "1000")


@pytest.fixture(autouse=True)
def one_level(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other levels have processes of their own, which know no fixed seed: tests/audit/test_surveys.py."""
    monkeypatch.setenv("CPSGD_SIMD", "this")


@pytest.mark.usefixtures("fixed_seed")
def test_a_planned_protocol_passes(cpsgd: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    result = cpsgd("audit", *FEW, "--epsilon", "2", "--plot", "audit.png")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "PASS" in result.stdout
    assert "ε ≤ 2 at δ = 0.001, replace-one" in result.stdout
    for check in ("privacy", "integers", "unbiased", "law", "coordinates", "rounds", "repeats"):
        assert f"{check} " in result.stdout
    assert (tmp_path / "audit.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("fixed_seed")
def test_json_of_a_protocol_file(cpsgd: Any, tmp_path: Path) -> None:
    protocol = Protocol.rotated_binomial(clients=6, dim=4, clip_norm=1.0, levels=8, trials=200)
    (tmp_path / "p.json").write_text(protocol.to_json())
    options = ("--delta", "1e-4", "--adjacency", "zero-out", "--surviving", "3")
    result = cpsgd.succeeds("audit", "--protocol", "p.json", *FEW, *options, "--json")
    data = json.loads(result.stdout)
    claimed = guarantee(protocol, 1e-4, adjacency="zero-out", surviving=3)
    assert data["passed"] is True
    assert data["claimed"]["epsilon"] == claimed.epsilon
    assert data["protocol"] == protocol.to_dict()
    assert (data["rounds"], data["surviving"], data["confidence"]) == (1000, 3, 0.95)
    assert {check["name"] for check in data["checks"]} >= {"privacy", "law"}
    assert len(data["error_rates"][0]) == 2


@pytest.mark.parametrize("form", [(), ("--json",)])
@pytest.mark.usefixtures("fixed_seed")
def test_a_broken_encoder_is_exit_code_1(cpsgd: Any, monkeypatch: pytest.MonkeyPatch, form: tuple[str, ...]) -> None:
    real = pipeline.encode

    def repeating(protocol: Protocol, vector: Any, round: int, **options: Any) -> bytes:
        return real(protocol, vector, round, Keystream(bytes(16)))

    monkeypatch.setattr(pipeline, "encode", repeating)
    result = cpsgd("audit", *FEW, "--clients", "2", "--dim", "8", "--levels", "8", "--trials", "250", *form)
    assert result.exit_code == 1
    assert "FAIL" in result.stdout or json.loads(result.stdout)["passed"] is False


def _repacked(protocol: Protocol, sent: bytes, values: Any, round: int) -> bytes:
    """The message with other integers in it."""
    out = np.frombuffer(sent, dtype=np.uint8).copy()
    out[wire.HEADER_BYTES :] = np.frombuffer(pack.forward(values, protocol.radix), dtype=np.uint8)
    fields = {"radix": protocol.radix, "fingerprint": protocol.fingerprint, "dim": protocol.dim}
    wire.write_header(out, round=round, message_id=os.urandom(16), **fields)
    return out.tobytes()


@pytest.fixture
def two_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    """All there is takes minutes: the planned protocol, and few coins."""
    monkeypatch.setattr("cpsgd.audit.all_cases", lambda: (all_cases()[0], all_cases()[3]))


@pytest.mark.usefixtures("fixed_seed", "two_cases")
def test_without_parameters_everything_is_covered(cpsgd: Any) -> None:
    result = cpsgd("audit", *FEW)
    assert (result.exit_code, result.stderr) == (0, "")
    for words in ("PASS", "binomial, inversion", "binomial, counted coins", "SIMD levels", "0, 1, 2, 7, 1,000,000"):
        assert words in result.stdout
    assert "gaussian" in result.stdout.split("Not covered")[1]


@pytest.mark.parametrize("parity", [None, 1])
@pytest.mark.usefixtures("fixed_seed", "two_cases")
def test_coins_that_are_missing_fail_everything(
    cpsgd: Any, monkeypatch: pytest.MonkeyPatch, parity: int | None
) -> None:
    """Everywhere, or in odd rounds alone; their mean is there."""
    real = pipeline.encode

    def silent(protocol: Protocol, vector: Any, round: int, **options: Any) -> bytes:
        noise = protocol.mechanism
        if not isinstance(noise, Binomial) or noise.trials > MAX_COINS or parity not in (None, round % 2):
            return real(protocol, vector, round)
        values = pipeline.integers(replace(protocol, mechanism=noise.without_noise()), vector, round)
        return _repacked(protocol, real(protocol, vector, round), values + np.uint32(noise.trials // 2), round)

    monkeypatch.setattr(pipeline, "encode", silent)
    result = cpsgd("audit", *FEW, "--json")
    assert result.exit_code == 1
    data = json.loads(result.stdout)
    assert [(each["protocol"], each["passed"]) for each in data["covered"]] == [
        ("binomial, inversion", True),
        ("binomial, counted coins", False),
    ]
    assert data["passed"] is False
    assert set(data["left_out"]) == {"discrete-laplace", "gaussian", "rounded-correlated", "whole-laplace"}


@pytest.mark.usefixtures("fixed_seed")
def test_checks_that_cannot_be_asked_say_so(cpsgd: Any) -> None:
    options = ("--clients", "2", "--dim", "1", "--levels", "4", "--trials", "200", "--no-rotate")
    result = cpsgd.succeeds("audit", *FEW, *options)
    assert "not asked" in result.stdout


def test_refusals(cpsgd: Any, tmp_path: Path) -> None:
    protocol = Protocol.rotated_binomial(clients=6, dim=4, clip_norm=1.0, levels=8, trials=200)
    (tmp_path / "p.json").write_text(protocol.to_json())
    (tmp_path / "silent.json").write_text(replace(protocol, mechanism=protocol.mechanism.without_noise()).to_json())
    for arguments, reason in (
        (("--plot", "audit.txt"), "--plot"),
        (("--rounds", "10"), "rounds"),
        (("--surviving", "3"), "--surviving is for one protocol"),
        (("--protocol", "p.json", "--dim", "4"), "--dim"),
        (("--protocol", "p.json", "--levels", "4"), "--levels"),
        (("--protocol", "silent.json"), "no noise"),
        ((*FEW, "--levels", "4", "--trials", "3", "--delta", "1e-9"), "No method proves"),
        (("--epsilon", "1", "--trials", "5"), "--trials"),
    ):
        result = cpsgd("audit", *arguments)
        assert result.exit_code == 2
        assert result.stdout == ""
        assert reason in result.stderr
        assert result.stderr.count("\n") == 1


def _task(folder: Path) -> Path:
    """A task of two servers for twelve clients."""
    made, secrets = create_task(pair_protocol(), leader="http://127.0.0.1:1", helper="http://127.0.0.1:2")
    return write_task(folder, made, secrets)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("fixed_seed")
def test_a_task_of_two_servers_is_played_through_both(cpsgd: Any, tmp_path: Path) -> None:
    words = ("--task", _task(tmp_path), *FEW, "--surviving", "1")
    data = cpsgd.json("audit", *words)
    assert data["passed"] is True
    assert data["protocol"] == pair_protocol().to_dict()
    assert (data["surviving"], len(data["levels"])) == (1, 1)
    cpsgd.refuses("The task already fixes", "audit", *words, "--epsilon", "2")
    cpsgd.refuses("Expected a task", "audit", "--task", tmp_path / "leader.json")


def _same_coins(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = pipeline.integers
    monkeypatch.setattr(pipeline, "integers", lambda *words, **_: real(*words[:3], Keystream(bytes(16))))


def _one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sum of both servers' sums is one too large in a coordinate of some."""

    def summed(a: Any, b: Any, prime: int) -> Any:
        found = modular_sum(a, b, prime)
        found[0] = (found[0] + found[1] % 2) % prime
        return found

    monkeypatch.setattr(pair_rounds, "modular_sum", summed)


@pytest.mark.slow
@pytest.mark.parametrize("fault", [_same_coins, _one_more])
@pytest.mark.usefixtures("fixed_seed")
def test_faults_of_two_servers_are_exit_code_1(
    cpsgd: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: Any
) -> None:
    fault(monkeypatch)
    assert cpsgd("audit", "--task", _task(tmp_path), *FEW, "--surviving", "1", "--json").exit_code == 1
