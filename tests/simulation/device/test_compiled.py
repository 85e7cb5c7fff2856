"""The Triton kernels as machine code: what the interpreter runs must also be something that a GPU can."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")


@pytest.mark.slow
@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.thorough)])
def test_all_kernels_compile(capability: int, tmp_path: Path) -> None:
    script = Path(__file__).with_name("compile_kernels.py")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, str(script), str(capability)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line.split() for line in done.stdout.splitlines()]
    assert {name for name, _ in lines} == {
        *("_rotate_rows", "_rotate_back", "_pass", "_round_and_sum", "_toss_and_sum", "_toss_many_and_sum"),
        *("_add_coins", "_outer", "_samples"),
    }
    # A program may take 99 KiB of shared memory on the smallest of the GPUs that have capability 8 or more.
    assert max(int(shared) for _, shared in lines) <= 99 * 1024
