"""Reports of audits as files: what is read from them, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd.audit import audit as play
from cpsgd.dashboard import audits
from cpsgd.dashboard.folder import Folder
from cpsgd.errors import DataError
from cpsgd.protocol import Protocol
from tests.dashboard.clients import Client
from tests.dashboard.samples import report


def written(folder: Path, data: object) -> Path:
    path = folder / "audit.json"
    path.write_text(json.dumps(data))
    return path


def test_what_the_command_prints_is_read(tmp_path: Path) -> None:
    protocol = Protocol.rotated_binomial(clients=4, dim=8, clip_norm=1.0, levels=2, trials=50)
    real = play(protocol, 1e-3, rounds=1_000, seed=1)
    path = written(tmp_path, json.loads(json.dumps({**real.to_dict(), "protocol": protocol.to_dict()})))
    found = audits.read(path, "audit.json")
    assert found is not None
    assert found.passed is real.passed
    assert (found.lower_bound, found.rounds) == (real.lower_bound, real.attacked_rounds)
    assert [vars(claim) for claim in found.claims] == [vars(claim) for claim in real.claims]
    assert found.mechanism.startswith("binomial: k = ")
    alarms = np.linspace(0.0, 1.0, 11)
    assert [found.claimed_misses(alarm) for alarm in alarms] == pytest.approx(real.claimed_misses(alarms))


@pytest.mark.parametrize("data", [{}, {"claims": []}, [], 3, {"passed": True, "lower_bound": 1.0}])
def test_other_files_are_passed_over(tmp_path: Path, data: object) -> None:
    assert audits.read(written(tmp_path, data), "audit.json") is None


@pytest.mark.parametrize(
    "changes",
    [
        {"claims": []},
        {"claims": 3},
        {"claims": [{"delta": 0.1}]},
        {"claims": [{"delta": 0.1, "claimed": "2", "found": 1}]},
        {"claims": [{"delta": 0.1, "claimed": float("inf"), "found": 1}]},
        {"lower_bound": None},
        {"lower_bound": float("nan")},
        {"error_rates": [[0.1]]},
        {"error_rates": ["ab"]},
        {"checks": [{"name": "x"}]},
        {"attacked_rounds": "many"},
    ],
)
def test_what_looks_like_an_audit_and_is_none_is_named(folder: Path, changes: dict[str, Any]) -> None:
    path = written(folder, report(**changes))
    with pytest.raises(DataError, match="is not as `cpsgd audit --json` writes it"):
        audits.read(path, "audit.json")
    found, failed = audits.read_all(Folder.at(folder))
    assert (found, [name for name, _ in failed]) == ([], ["audit.json"])


def test_a_verdict_does_not_outweigh_a_failed_check(tmp_path: Path) -> None:
    failed = [{"name": "law", "question": "?", "passed": False}]
    for changes in (
        {"checks": failed},
        {"passed": "true"},
        {"passed": False},
        {"checks": [{**failed[0], "passed": "yes"}]},
    ):
        found = audits.read(written(tmp_path, report(**changes)), "audit.json")
        assert found is not None
        assert not found.passed


@pytest.mark.parametrize("number", [1e308, -1e99, 1e99, 0, -5, 1e-320])
def test_any_numbers_can_be_shown(folder: Path, client: Client, number: float) -> None:
    claims = [{"delta": number, "claimed": number, "found": number}]
    written(folder, report(claims=claims, lower_bound=number, error_rates=[[number, number]], attacked_rounds=number))
    assert client.get("/audit").status_code == 200


def test_claims_below_zero_can_be_shown(folder: Path, client: Client) -> None:
    written(folder, report(claims=[{"delta": 0.5, "claimed": -1, "found": -3}]))
    assert client.get("/audit").status_code == 200


def test_a_protocol_that_is_none_is_not_needed(tmp_path: Path) -> None:
    found = audits.read(written(tmp_path, report(protocol={"mechanism": "<b>"})), "audit.json")
    assert found is not None
    assert found.mechanism == "not said"


@pytest.mark.parametrize("text", [b'"\\ud800"', b'"\\uDFFF x"', b'"\xed\xa0\x80"'])
def test_half_a_pair_of_surrogates_does_not_hide_the_others(folder: Path, client: Client, text: bytes) -> None:
    """No page can hold one, and the whole tab was an error."""
    written(folder, report())
    plain = json.dumps(report(checks=[{"name": "@", "question": "@", "passed": True}])).encode()
    (folder / "hostile.json").write_bytes(plain.replace(b'"@"', text))
    answer = client.get("/audit")
    assert answer.status_code == 200
    assert "audit.json" in answer.text
