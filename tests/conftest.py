"""Fixtures shared by all tests."""

from __future__ import annotations

import fcntl
import gc
import hashlib
import io
import itertools
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.timing import LIST, name_of

# Scripts that wrote the data with an earlier release: they call what that release had.
collect_ignore = ["data"]

# Tests of real processes, which mostly wait: the first worker begins with them, while the others compute.
WAITING = {"test_deployment.py", "test_deployed.py", "test_postgres.py", "test_spark.py"}


@dataclass(frozen=True)
class Result:
    """What a command left behind."""

    exit_code: int
    stdout: str
    stderr: str


@pytest.fixture(scope="session")
def invoke() -> Callable[..., Result]:
    """Runs a command line in this process. It ends by an exit code; any other exception is a traceback, and raised."""
    from cpsgd.cli.frame import launch

    def run(app: Any, *arguments: object) -> Result:
        stdout, stderr = io.StringIO(), io.StringIO()
        with redirect_stdout(stdout), redirect_stderr(stderr), pytest.raises(SystemExit) as end:
            launch(app, [str(argument) for argument in arguments])
        return Result(int(end.value.code or 0), stdout.getvalue(), stderr.getvalue())

    return run


@pytest.fixture(autouse=True, scope="session")
def _nothing_remembered() -> Iterator[None]:
    """Forgets guarantees when a test patches something that they may depend on, and when it takes the patch back."""
    change, undo = pytest.MonkeyPatch.setattr, pytest.MonkeyPatch.undo
    others = {"os", "tempfile", "time", "torch"}
    above = {"cli", "dashboard", "engines", "reports", "learning", "statistics", "federation", "planner", "ledger"}
    above |= {"audit", "simulation", "secagg"}  # rooms that `privacy` does not import
    patched: set[int] = set()

    def forget() -> None:
        if guarantees := sys.modules.get("cpsgd.privacy.guarantees"):
            with suppress(AttributeError):  # a patch of the function itself, which remembers nothing
                guarantees._remembered.cache_clear()

    def changed(self: pytest.MonkeyPatch, target: Any, *words: Any, **options: Any) -> None:
        place = target if isinstance(target, str) else getattr(target, "__module__", None) or target.__name__
        package, room = (*place.split("."), "")[:2]
        if package not in others and not (package == "cpsgd" and room in above):
            patched.add(id(self))
            forget()
        change(self, target, *words, **options)

    def undone(self: pytest.MonkeyPatch) -> None:
        undo(self)
        if id(self) in patched:
            patched.remove(id(self))
            forget()

    with pytest.MonkeyPatch.context() as ours:
        ours.setattr(pytest.MonkeyPatch, "undo", undone)
        ours.setattr(pytest.MonkeyPatch, "setattr", changed)
        yield


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Callable[..., Path]:
    """Fills a folder once for all workers, with what the first of them makes."""
    base = tmp_path_factory.getbasetemp()

    def made(make: Callable[[Path], None]) -> Path:
        folder = (base if worker_id == "master" else base.parent) / f"once-{make.__module__}.{make.__qualname__}"
        with Path(f"{folder}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (folder / "made").exists():
                shutil.rmtree(folder, ignore_errors=True)
                folder.mkdir()
                make(folder)
                (folder / "made").touch()
        return folder

    return made


@pytest.fixture
def fixed_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the operating system's generator by a fixed sequence, so that a statistical test repeats exactly."""
    calls = itertools.count()

    def urandom(size: int) -> bytes:
        return hashlib.shake_128(next(calls).to_bytes(8, "little")).digest(size)

    monkeypatch.setattr(os, "urandom", urandom)


def pytest_collection() -> None:
    """Nothing that is collected becomes garbage: looking for some among thousands of tests takes seconds."""
    gc.disable()


def pytest_collection_finish() -> None:
    """From here on garbage is looked for, among what tests make."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that `make slow` found to be, starts those first that wait most, and skips what needs a GPU."""
    slow = set(LIST.read_text(encoding="utf-8").splitlines())
    for item in items:
        if name_of(item) in slow:
            item.add_marker(pytest.mark.slow(recorded=True))
    items.sort(key=lambda item: item.path.name not in WAITING)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked:
        import torch

        if not torch.cuda.is_available():
            for item in marked:
                item.add_marker(pytest.mark.skip(reason="there is no NVIDIA GPU"))
