"""Checks of the law at other SIMD levels than this process's: in processes of their own, one after the other."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cpsgd.audit.cases import Case
from cpsgd.codec.rounding import kernels
from cpsgd.errors import WorkerError

Answers = Callable[[str], list[dict[str, Any]]]
"""Waits for a level, and returns its answer for each protocol."""


def current() -> str:
    """Returns the SIMD level of this process."""
    return str(kernels.simd_level())


def others() -> tuple[str, ...]:
    """Returns the SIMD levels of this machine besides this process's; none if CPSGD_SIMD fixes the level."""
    if "CPSGD_SIMD" in os.environ:
        return ()
    return tuple(level for level in (*kernels.supported_levels(), "numpy") if level != current())


@contextlib.contextmanager
def started(
    levels: Sequence[str], cases: Sequence[Case], *, rounds: int, surviving: int | None, share: float
) -> Iterator[Answers]:
    """Runs the checks at these levels while the block runs, and yields the function that waits for them."""
    named = [[case.sampler, case.protocol.to_json()] for case in cases]
    asked = json.dumps({"cases": named, "rounds": rounds, "surviving": surviving, "share": share})
    running: list[subprocess.Popen[str]] = []

    def checked(level: str) -> list[dict[str, Any]]:
        """Runs the checks in a process at this level, and returns its answer for each case."""
        environment = {**os.environ, "CPSGD_SIMD": level}
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        with subprocess.Popen([sys.executable, "-m", "cpsgd.audit"], env=environment, text=True, **pipes) as process:
            running[:] = [process]
            out, error = process.communicate(asked)
        if process.returncode != 0:
            last = (error.strip().splitlines() or ["no reason given"])[-1]
            raise WorkerError(f"The audit at SIMD level {level} did not end: {last}")
        return [json.loads(line) for line in out.splitlines()]

    with ThreadPoolExecutor(max_workers=1) as pool:
        answers = {level: pool.submit(checked, level) for level in levels}
        try:
            yield lambda level: answers[level].result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in running:
                process.kill()
