"""Checks of the law at other SIMD levels than this process's: in processes of their own, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from threading import Thread
from typing import Any

from cpsgd.audit.cases import Case
from cpsgd.codec.kernels import kernels
from cpsgd.errors import WorkerError

Found = Callable[[str], Iterator[dict[str, Any]]]
"""What a level found, protocol by protocol; waits for it."""


def current() -> str:
    """The level of this process."""
    return str(kernels.simd_level())


def others() -> tuple[str, ...]:
    """The other levels that this machine has; none where CPSGD_SIMD says which one is to be used."""
    if "CPSGD_SIMD" in os.environ:
        return ()
    return tuple(level for level in (*kernels.supported_levels(), "numpy") if level != current())


@contextlib.contextmanager
def started(
    levels: Sequence[str], cases: Sequence[Case], *, rounds: int, surviving: int | None, share: float
) -> Iterator[Found]:
    """Runs the checks at these levels beside what is done in the block, and yields how to ask for them."""
    asked = json.dumps(
        {
            "cases": [[case.sampler, case.protocol.to_json()] for case in cases],
            "rounds": rounds,
            "surviving": surviving,
            "share": share,
        }
    )
    done: dict[str, tuple[int, str, str]] = {}
    running: list[subprocess.Popen[str]] = []
    stopped = False

    def work() -> None:
        for level in levels:
            if stopped:
                return
            environment = {**os.environ, "CPSGD_SIMD": level}
            command = [sys.executable, "-m", "cpsgd.audit"]
            pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
            with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
                running[:] = [process]
                out, error = process.communicate(asked)
                done[level] = (process.returncode, out, error)

    thread = Thread(target=work, daemon=True)
    thread.start()

    def found(level: str) -> Iterator[dict[str, Any]]:
        thread.join()
        code, out, error = done.get(level, (-1, "", "it was not started"))
        if code != 0:
            last = (error.strip().splitlines() or ["no reason given"])[-1]
            raise WorkerError(f"The audit at SIMD level {level} did not end: {last}")
        return (json.loads(line) for line in out.splitlines())

    try:
        yield found
    finally:
        stopped = True
        for process in running:
            process.kill()
        thread.join()
