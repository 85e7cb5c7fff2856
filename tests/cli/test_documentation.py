"""The page about the command line shows what the program prints."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cpsgd import Protocol

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(kind: str) -> list[str]:
    return [text for name, text in FENCE.findall(PAGE.read_text(encoding="utf-8")) if name == kind]


def shown() -> Iterator[tuple[str, str]]:
    """Every command of the page that has an output, and that output."""
    for block in blocks("console"):
        for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            command, _, expected = part.partition("\n")
            if expected.strip():
                yield command, expected


def comparable(text: str) -> str:
    """Without what differs from run to run: errors that are measured, and spaces at the ends of lines."""
    text = re.sub(r"[\d.e+-]+ measured", "# measured", text)
    return "\n".join(line.rstrip() for line in text.strip().split("\n"))


def the_others_encode() -> None:
    """What two more clients and a bad line do, in between."""
    import numpy as np

    protocol = Protocol.from_json(Path("protocol.json").read_text())
    for i in (1, 2):
        Path(f"client{i}.message").write_bytes(protocol.encode(np.load(f"client{i}.npy"), 7))
    damaged = bytearray(Path("client1.message").read_bytes())
    damaged[-1] ^= 1
    Path("damaged.message").write_bytes(damaged)


AFTER: dict[str, Callable[[], None]] = {"cpsgd encode client0.npy": the_others_encode}


def test_the_page_shows_what_the_program_prints(cpsgd: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    for script in blocks("python"):
        exec(compile(script, str(PAGE), "exec"), {})
    compared = 0
    for command, expected in shown():
        program, *arguments = shlex.split(command)
        assert program == "cpsgd"
        result = cpsgd(*arguments)
        orders = [result.stderr + result.stdout, result.stdout + result.stderr]
        assert comparable(expected) in [comparable(text) for text in orders], command
        for start, action in AFTER.items():
            if command.startswith(start):
                action()
        compared += 1
    assert compared >= 9
