"""Follows a page as a reader does: writes its files, and types its commands into one shell."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from tests.docs.blocks import Block, blocks, commands


def take_files(page: Path, folder: Path) -> None:
    """Writes the files that a page shows."""
    for block in blocks(page):
        if "file" in block.said:
            path = folder / block.said["file"]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")


def follow(page: Path, folder: Path, *, replaced: dict[str, str] | None = None, seconds: float = 600.0) -> str:
    """Types a page's commands into a shell, in the folder of its files; returns what they print.

    Where the page shows an error, the command must fail; every other command must succeed.

    Args:
        page: The page. Commands that need the network are left out.
        folder: The folder to type them in.
        replaced: Text of the commands to replace, such as ports.
        seconds: Time that they may take.
    """

    def typed(block: Block) -> bool:
        return block.language == "console" and block.said.get("not run") != "needs the network"

    lines = []
    for block in filter(typed, blocks(page)):
        for command, expected in commands(block.text):
            refused = re.search(r"^\S*Error: ", expected, re.MULTILINE)
            lines.append(f"if {command}; then exit 9; fi" if refused else command)
    script = "\n".join(lines)
    for old, new in (replaced or {}).items():
        assert old in script
        script = script.replace(old, new)
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, "PATH": programs, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    # Servers in the background end with the shell, also when a command fails.
    guarded = f"set -em\ntrap 'jobs -p | xargs --no-run-if-empty kill 2>/dev/null || true' EXIT\n{script}\n"
    done = subprocess.run(
        ["bash", "-c", guarded],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return done.stdout
