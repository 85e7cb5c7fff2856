"""Silos with shaped rounding in a federation: rows beside the memory, dropouts, lost and restored files, the ledger."""

from __future__ import annotations

import shutil
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cpsgd import Plan, Protocol
from cpsgd.codec import rotate
from cpsgd.correlated.shaped import ShapedGaussian
from cpsgd.errors import CpsgdError, RoundRefusedError
from cpsgd.federation.messages import Request
from cpsgd.ledger import Budget, Ledger
from cpsgd.secagg import Stage

from .correlated import remembering
from .local import DIM, Client, with_run
from .test_handover import Federation, silos

ROUNDS = 6
MECHANISM = ShapedGaussian(noise_deviation=4.0, step=0.8, window=100, coordinate_range=0.7, bands=3, run_length=ROUNDS)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda file: None)


@pytest.fixture
def shaped(small_plan: Plan) -> Plan:
    protocol = Protocol(clients=4, dim=DIM, clip_norm=1.0, mechanism=MECHANISM, modulus=1 << 10)
    planned = replace(small_plan, protocol=protocol)
    return with_run(planned, rounds=ROUNDS, participation="once", surviving=3, colluding=1)


def rows_of(folder: Path, name: str) -> list[Path]:
    return sorted(folder.glob(f"{name}.rows-*"))


def asked(plan: Plan, round: int) -> Request:
    return Request(Stage.UPLOAD, round, plan.rounds, plan.surviving, plan.protocol.to_json(), examples=5)


def silo(folder: Path, **options: Any) -> Client:
    return remembering(folder, "a", **{"examples": 5, "disjoint": True, "secure": False, **options})


@pytest.mark.parametrize("secure", [True, False])
def test_what_silos_send_adds_up_to_what_they_keep(shaped: Plan, secure: bool, tmp_path: Path) -> None:
    """Over the whole run the released sums are Σ_t L w, to the last digits: rounding errors are in w."""
    clients = silos(tmp_path, "abcd", examples=5, disjoint=True, secure=secure)
    federation = Federation(shaped, clients, examples=5, secure=secure)
    kept: dict[int, np.ndarray] = {}
    for round_ in range(1, ROUNDS):
        before = federation.course.model.copy()
        session = federation.round("abcd")
        assert session.report.released, session.report.reason
        rows = np.zeros(DIM)
        for name in "abcd":
            (path,) = rows_of(tmp_path, name)
            assert path.stat().st_mode & 0o077 == 0
            rows += np.frombuffer(path.read_bytes()[-8 * DIM :], dtype="<i8") * 2.0**-MECHANISM.finest_bits
        kept[round_] = rows
        got = rotate.forward(federation.course.model - before, shaped.protocol.rotation_signs(0)) * 4 / MECHANISM.step
        weights = MECHANISM.correlation.factors
        assert np.abs(rows).max() > 3.0
        assert np.allclose(got, sum(weights[j] * kept[round_ - j] for j in range(3) if round_ - j in kept), atol=1e-3)
    # With the last round nothing is kept any more.
    federation.round("abcd")
    assert not list(tmp_path.glob("*.rows-*"))


def test_silos_that_were_away_or_lost_their_rows_go_on(shaped: Plan, tmp_path: Path) -> None:
    clients = silos(tmp_path, "abcd", examples=5, disjoint=True)
    federation = Federation(shaped, clients, examples=5)
    for connected in ("abcd", "abc", "abcd"):
        assert federation.round(connected).report.released
    for path in (rows_of(tmp_path, "a"), rows_of(tmp_path, "b")):
        path[0].unlink()
    rows_of(tmp_path, "c")[0].write_bytes(b"damaged")
    assert federation.round("abcd").report.released
    assert len(rows_of(tmp_path, "a")) == 1


def test_a_restored_file_is_noticed(shaped: Plan, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    client = silo(tmp_path)
    client.ask(asked(shaped, 1))
    (path,) = rows_of(tmp_path, "a")
    shutil.copy(path, tmp_path / "copy")
    client.ask(asked(shaped, 2))
    shutil.copy(tmp_path / "copy", path)
    client.ask(asked(shaped, 3))
    assert "older than its memory" in caplog.text
    assert path.read_bytes().count(b'"rounds": [2]') == 1  # begun anew: the protocol's third round alone


def test_a_memory_that_was_set_back_is_noticed(shaped: Plan, tmp_path: Path) -> None:
    client = silo(tmp_path)
    client.ask(asked(shaped, 1))
    shutil.copy(tmp_path / "a", tmp_path / "copy")
    client.ask(asked(shaped, 2))
    shutil.copy(tmp_path / "copy", tmp_path / "a")
    again = silo(tmp_path)
    with pytest.raises(RoundRefusedError, match="was set back"):
        again.ask(asked(shaped, 2))


def test_a_round_is_answered_once_and_only_with_a_memory(shaped: Plan, tmp_path: Path) -> None:
    client = silo(tmp_path)
    first = client.ask(asked(shaped, 1))
    for state in (b"", client.state):
        client.state = state
        with pytest.raises(CpsgdError):
            client.ask(asked(shaped, 1))
    assert len(first) == shaped.protocol.message_bytes
    assert client.trained == 1
    with pytest.raises(RoundRefusedError, match="cpsgd-memory"):
        Client(examples=5, disjoint=True, secure=False).ask(asked(shaped, 1))


def test_a_message_whose_rows_cannot_be_written_does_not_leave(
    shaped: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device", str(tmp_path / "secret"))

    monkeypatch.setattr("cpsgd.correlated.silo_files.write_file", full)
    with pytest.raises(RoundRefusedError, match=r"write its memory|cannot write") as refused:
        silo(tmp_path).ask(asked(shaped, 1))
    assert "secret" not in str(refused.value)


def test_no_more_files_than_a_few_federations_are_kept(shaped: Plan, tmp_path: Path) -> None:
    for run in range(6):
        silo(tmp_path, run=f"run-{run}").ask(asked(shaped, 1))
    kept = rows_of(tmp_path, "a")
    assert len(kept) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in kept} == {0o600}


def test_the_ledger_has_the_run_as_one_event(shaped: Plan, tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.create(Budget(population="p", epsilon=400.0, delta=1e-5, unit="example"))
    clients = silos(tmp_path, "abcd", examples=5, disjoint=True)
    federation = Federation(shaped, clients, examples=5, ledger=ledger, population="p")
    spent = []
    for _ in range(3):
        assert federation.round("abcd").report.released
        spent.append(ledger.total("p").epsilon)
    assert spent[0] > 0.0
    assert spent == [spent[0]] * 3
