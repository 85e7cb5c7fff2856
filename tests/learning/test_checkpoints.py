"""Checkpoints, the log of charges and a run's folder; whole runs that are interrupted are in `test_resume`."""

from __future__ import annotations

import hashlib
import io
import json
import multiprocessing
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch

from cpsgd.errors import CheckpointError
from cpsgd.learning import mlp
from cpsgd.learning.checkpoints import ChargeLog, Progress, RunFolder, load, save
from cpsgd.learning.cohorts import Cohorts
from cpsgd.learning.datasets import ArrayDataset
from cpsgd.learning.metrics import RoundMetrics

STATE: dict[str, Any] = {
    "round": 3,
    "model": {"weight": torch.arange(6.0)},
    "history": [{"loss": None, "accuracy": 0.5}],
}
CONFIG = {"learning_rate": 0.1, "seed": 3}
COHORTS = Cohorts(population=300, cohort=100, scheme="once", messages=100, overflow=0.0, key=2**63 - 1)


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)
    found = load(path)
    assert torch.equal(found["model"]["weight"], STATE["model"]["weight"])
    assert found["history"] == STATE["history"]
    assert [entry.name for entry in tmp_path.iterdir()] == ["checkpoint.bin"]


def test_every_damage_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)
    good = path.read_bytes()
    for position in [0, 5, 20, 40, 60, len(good) // 2, len(good) - 1]:
        path.write_bytes(good[:position] + bytes([good[position] ^ 1]) + good[position + 1 :])
        with pytest.raises(CheckpointError):
            load(path)
    for size in (0, 10, 40, len(good) - 1):
        path.write_bytes(good[:size])
        with pytest.raises(CheckpointError):
            load(path)
    path.unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


def sealed(body: bytes) -> bytes:
    return b"cpsgd checkpoint 2\n" + hashlib.sha256(body).digest() + body


def test_a_checksum_is_no_signature(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)
    archive = path.read_bytes()[len(b"cpsgd checkpoint 2\n") + 32 :]
    a_list, packed = io.BytesIO(), io.BytesIO()
    torch.save([1, 2], a_list)
    with zipfile.ZipFile(io.BytesIO(archive)) as good, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as bomb:
        for entry in good.infolist():
            bomb.writestr(entry.filename, good.read(entry))
    for body in (b"", archive[:-30], archive[:50] + archive[60:], a_list.getvalue(), packed.getvalue()):
        path.write_bytes(sealed(body))
        with pytest.raises(CheckpointError, match="does not hold"):
            load(path)


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)

    def fail(*arguments: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save(path, {**STATE, "round": 4})
    assert load(path)["round"] == 3


def test_an_unfinished_line_is_no_charge_and_is_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    ChargeLog(path).append(0, 100)
    whole = path.read_bytes()
    for size in range(1, len(whole)):
        path.write_bytes(whole + whole[:size])
        log = ChargeLog(path)
        assert log.survivors == {0: 100}
        assert path.read_bytes() == whole
    log.append(1, 98)
    assert ChargeLog(path).survivors == {0: 100, 1: 98}


def test_a_file_of_others_is_no_unfinished_line(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    for content in (b"somebody else's", b'{"rounds": 1', bytes(3)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match="no log of charges"):
            ChargeLog(path)
        assert path.read_bytes() == content
    for content in (b'{"rou', b'{"round": 1'):
        path.write_bytes(content)
        assert ChargeLog(path).survivors == {}
        assert path.read_bytes() == b""


def test_a_damaged_charge_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    log = ChargeLog(path)
    log.append(0, 100)
    log.append(1, 100)
    path.write_bytes(path.read_bytes().replace(b"100", b"900", 1))
    with pytest.raises(CheckpointError, match="Line 1"):
        ChargeLog(path)


@pytest.mark.parametrize(
    "line",
    [
        b'{"round": 1e999, "survivors": 9}',
        b'{"round": 0, "survivors": -1}',
        b'{"round": -1, "survivors": 9}',
        b'{"round": "0", "survivors": 9}',
        b'{"round": 0}',
        b"[" * 100_000,
        b"[0]",
    ],
)
def test_a_charge_that_makes_no_sense_is_refused(tmp_path: Path, line: bytes) -> None:
    path = tmp_path / "charges.jsonl"
    path.write_bytes(line + b" %08x\n" % zlib.crc32(line))
    with pytest.raises(CheckpointError, match="Line 1"):
        ChargeLog(path)


def test_two_writers_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "charges.jsonl"
    first, second = ChargeLog(path), ChargeLog(path)
    first.append(0, 100)
    with pytest.raises(CheckpointError, match="twice at once"):
        second.append(0, 100)
    first.append(1, 100)
    assert ChargeLog(path).survivors == {0: 100, 1: 100}


def _holds(path: Path, said: Any) -> None:
    log = ChargeLog(path)
    log.append(0, 100)
    said.send("open")
    time.sleep(600)


def _tries(path: Path, said: Any) -> None:
    """Opens the log and closes it again, as often as it is asked to."""
    while said.recv() == "try":
        try:
            ChargeLog(path)
        except CheckpointError as error:
            said.send(str(error))
        else:
            said.send("free")


def test_another_process_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    path, context = tmp_path / "charges.jsonl", multiprocessing.get_context("fork")
    here, there = context.Pipe()
    holder = context.Process(target=_holds, args=(path, there))
    holder.start()
    assert here.recv() == "open"
    before = path.read_bytes()
    with pytest.raises(CheckpointError, match="Another process is at work"):
        ChargeLog(path)
    assert path.read_bytes() == before
    holder.kill()
    holder.join()
    # Started before the log is opened here: what is open is open in a copy of this process as well.
    other = context.Process(target=_tries, args=(path, there))
    other.start()
    log = ChargeLog(path)
    assert log.survivors == {0: 100}
    here.send("try")
    assert "Another process" in here.recv()
    # The lock is on the open log: once it is closed the file is free.
    del log
    here.send("try")
    assert here.recv() == "free"
    here.send("end")
    other.join()


def test_checkpoints_are_told_apart_by_version(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.bin"
    save(path, STATE)
    rest = path.read_bytes().removeprefix(b"cpsgd checkpoint 2\n")
    path.write_bytes(b"cpsgd checkpoint 1\n" + rest)
    assert load(path)["round"] == 3
    for kind, words in (
        (b"cpsgd checkpoint 3\n", "of this release: resume"),
        (b"cpsgd chequepoint 2", "is not a chec"),
    ):
        path.write_bytes(kind + rest)
        with pytest.raises(CheckpointError, match=words):
            load(path)


def test_what_was_charged_is_known_by_its_lines(tmp_path: Path) -> None:
    log = ChargeLog(tmp_path / "charges.jsonl")
    assert log.extent(5) == {"rounds": 0, "sha256": hashlib.sha256().hexdigest()}
    extents = []
    for number in range(3):
        log.append(number, 90 + number)
        extents.append(log.extent(number + 1))
    again = ChargeLog(tmp_path / "charges.jsonl")
    assert [again.extent(number + 1) for number in range(3)] == extents == [log.extent(n) for n in (1, 2, 3)]
    assert [extent["rounds"] for extent in extents] == [1, 2, 3]
    assert len({extent["sha256"] for extent in extents}) == 3


# ------------------------------------------------------------------ the folder


def server(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = mlp(4, 3, (), seed=seed)
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def progress(rounds: int) -> Progress:
    fixed: dict[str, Any] = {"released": True, "loss": 1.0, "accuracy": 0.5, "epsilon": 1.0, "delta": 1e-5}
    fixed |= {"method": "m", "bytes_per_client": 9, "bytes_total": 9, "noise_to_signal": 1.0, "seconds": 0.1}
    return Progress(rounds, [RoundMetrics(round=n, survivors=90 + n, **fixed) for n in range(rounds)], COHORTS, "run")


def test_what_was_saved_is_restored(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "a" / "b", CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    assert folder.restore(model, {"optimizer": optimizer}) is None
    for number in range(3):
        folder.charge(number, 90 + number)
    torch.nn.functional.cross_entropy(model(torch.ones(1, 4)), torch.tensor([1])).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    folder.save(progress(2), model, {"optimizer": optimizer})
    del folder
    other, other_optimizer = server(seed=2)
    again = RunFolder(tmp_path / "a" / "b", CONFIG, triangle, resume=True)
    assert again.restore(other, {"optimizer": other_optimizer}) == progress(2)
    assert again.charged == {0: 90, 1: 91, 2: 92}  # the third was charged and not completed
    for name, value in model.state_dict().items():
        assert torch.equal(value, other.state_dict()[name])
    assert len(other_optimizer.state_dict()["state"]) == len(optimizer.state_dict()["state"]) > 0


def test_a_round_is_charged_once(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    folder.charge(0, 90)
    written = (tmp_path / "charges.jsonl").read_bytes()
    folder.charge(0, 90)
    with pytest.raises(CheckpointError, match="charged with 90 messages and has 91 now"):
        folder.charge(0, 91)
    assert (tmp_path / "charges.jsonl").read_bytes() == written


def test_a_run_that_is_refused_changes_nothing(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    folder.charge(0, 90)
    first, first_optimizer = server(seed=1)
    folder.save(progress(1), first, {"optimizer": first_optimizer})
    del folder
    model, optimizer = server(seed=2)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(CheckpointError, match="holds a run already"):
        RunFolder(tmp_path, CONFIG, triangle, resume=False)
    changed = RunFolder(tmp_path, {**CONFIG, "seed": 4}, triangle, resume=True)
    with pytest.raises(CheckpointError, match="another seed;"):
        changed.restore(model, {"optimizer": optimizer})
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_checkpoints_do_not_grow_with_the_rounds(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    sizes = []
    for rounds in (100, 1_000):
        for number in range(len(folder.charged), rounds):
            folder.charge(number, 90 + number)
        folder.save(progress(rounds), model, {"optimizer": optimizer})
        sizes.append((tmp_path / "checkpoint.bin").stat().st_size)
    assert sizes[1] - sizes[0] < 100
    del folder
    again = RunFolder(tmp_path, CONFIG, triangle, resume=True)
    assert again.restore(model, {"optimizer": optimizer}) == progress(1_000)


def test_a_checkpoint_of_before_is_taken_up_and_the_next_one_is_new(triangle: ArrayDataset, tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("somebody else's\n")
    with pytest.raises(CheckpointError, match="no metrics of a run"):
        RunFolder(tmp_path, CONFIG, triangle, resume=False)
    assert (tmp_path / "metrics.jsonl").read_text() == "somebody else's\n"
    (tmp_path / "metrics.jsonl").unlink()
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    for number in range(3):
        folder.charge(number, 90 + number)
    folder.save(progress(2), model, {"optimizer": optimizer})
    path = tmp_path / "checkpoint.bin"
    old = load(path) | {
        "history": "\n".join(json.dumps(row.to_dict()) for row in progress(2).history),
        "charged": torch.tensor([[0, 90], [1, 91]]),
    }
    save(path, old)
    path.write_bytes(b"cpsgd checkpoint 1\n" + path.read_bytes().removeprefix(b"cpsgd checkpoint 2\n"))
    (tmp_path / "metrics.jsonl").write_text(
        "whatever a person has put there, longer than all that was ever there\n" * 99
    )
    del folder
    again = RunFolder(tmp_path, CONFIG, triangle, resume=True)
    assert again.restore(model, {"optimizer": optimizer}) == progress(2)
    again.save(progress(3), model, {"optimizer": optimizer})
    del again
    last = RunFolder(tmp_path, CONFIG, triangle, resume=True)
    assert last.restore(model, {"optimizer": optimizer}) == progress(3)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 3


def test_a_log_that_differs_from_what_was_spent_is_refused(triangle: ArrayDataset, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path, CONFIG, triangle, resume=False)
    model, optimizer = server(seed=1)
    for number in range(3):
        folder.charge(number, 90 + number)
    folder.save(progress(2), model, {"optimizer": optimizer})
    del folder
    log = tmp_path / "charges.jsonl"
    first, second, third = log.read_bytes().splitlines(keepends=True)
    other = b'{"round": 1, "survivors": 99}'
    for bad in (first, first + third, first + other + b" %08x\n" % zlib.crc32(other) + third):
        log.write_bytes(bad)
        with pytest.raises(CheckpointError, match="does not hold all that the checkpoint has spent"):
            RunFolder(tmp_path, CONFIG, triangle, resume=True).restore(model, {"optimizer": optimizer})
    log.write_bytes(first + second)  # what was charged after the checkpoint is missing, which nobody can see
    assert RunFolder(tmp_path, CONFIG, triangle, resume=True).restore(model, {"optimizer": optimizer}) == progress(2)


def test_a_folder_that_cannot_be_written_is_named(triangle: ArrayDataset, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file: File exists"):
        RunFolder(tmp_path / "file", CONFIG, triangle, resume=False)
    (tmp_path / "run" / "charges.jsonl").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"charges\.jsonl: Is a directory"):
        RunFolder(tmp_path / "run", CONFIG, triangle, resume=False)
