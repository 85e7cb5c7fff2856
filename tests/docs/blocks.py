"""The blocks of code on a page, and how each is run.

A comment above a block says what the block alone does not, and is not shown to readers:

    <!-- not run: needs a GPU -->        nobody runs it here; the reason is one of REASONS
    <!-- thorough -->                    it takes long, and is run by the thorough tests only
    <!-- file: run.toml -->              the block is the contents of this file
    <!-- noisy: sizes, angle -->         output: on lines that begin so, digits may differ
    <!-- before: (lines of Python) -->   is run before it
    <!-- output -->                      what the last block of Python printed; with "output: noisy" digits may differ

Without one, Python is executed, `>>>` is left to doctest, and commands of `cpsgd` are called: what they print is
compared with what is shown, `...` standing for anything, and a number before the word "measured" for any number.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
import shlex
import textwrap
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

REASONS = (
    "needs a fresh clone",
    "needs a GPU",
    "needs hours",
    "needs minutes",
    "needs several processes",
    "needs the network",
)

_PARSERS: dict[str, Callable[[str], object]] = {".json": json.loads, ".py": ast.parse, ".toml": tomllib.loads}
_FENCE = re.compile(r"^( *)```(\w*) *$")
_DIRECTIVE = re.compile(r"<!-- (not run|thorough|file|noisy|before|output)(?::\s*(.*?))?\s*-->", re.DOTALL)
_BROKEN = ("Error:", "Refused ")


@dataclass(frozen=True)
class Block:
    """A fenced block, with what the comments above it say."""

    page: Path
    line: int
    language: str
    text: str
    said: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page.name}, line {self.line}"

    @property
    def doctest(self) -> bool:
        return self.language in {"python", "pycon"} and ">>>" in self.text


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in order."""
    lines = page.read_text(encoding="utf-8").split("\n")
    above: list[str] = []
    index = 0
    while index < len(lines):
        start = index
        opening = _FENCE.match(lines[index])
        if opening:
            index += 1
            while lines[index].strip() != "```":
                index += 1
            text = textwrap.dedent("\n".join(lines[start + 1 : index])) + "\n"
            said = dict(_DIRECTIVE.findall("\n".join(above)))
            yield Block(page, start + 1, opening[2], text, {key: value or "" for key, value in said.items()})
            above = []
        elif lines[index].lstrip().startswith("<!--"):
            while not lines[index].rstrip().endswith("-->"):
                index += 1
            above += lines[start : index + 1]
        elif lines[index].strip():
            above = []
        index += 1


@dataclass
class Runner:
    """Runs the blocks of a page one after the other, in the current folder."""

    call: Callable[..., Any]
    """Calls `cpsgd` with arguments; the result has `exit_code`, `stdout` and `stderr`."""
    parse: Callable[[list[str]], object]
    """Reads the arguments of `cpsgd` without calling anything."""
    names: dict[str, Any] = field(default_factory=lambda: {"__name__": "page"})
    compared: int = 0
    printed: str = ""

    def run(self, block: Block) -> None:
        """Runs one block, or fails."""
        if "before" in block.said:
            self._execute(block, block.said["before"])
        if "file" in block.said:
            path = Path(block.said["file"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
            _PARSERS[path.suffix](block.text)
        elif "output" in block.said:
            noisy = ("",) if block.said["output"] == "noisy" else ()
            shown, printed = (" ".join(_comparable(text, noisy).split()) for text in (block.text, self.printed))
            assert shown == printed, f"{block}: printed was\n{self.printed}"
            self.compared += 1
        elif block.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as kept:
                self._execute(block, block.text)
            self.printed = kept.getvalue()
        elif block.language == "console":
            for command, expected in commands(block.text):
                self._command(block, command, expected)
        else:
            raise AssertionError(f"{block}: nothing runs `{block.language}`; name the file it is, or use `text`.")

    def glance(self, block: Block) -> None:
        """What can be seen of a block that is not run: Python that compiles, names and options that exist."""
        if block.language == "python":
            tree = ast.parse(block.text)
            tree.body = [part for part in tree.body if isinstance(part, ast.Import | ast.ImportFrom)]
            exec(compile(tree, str(block.page), "exec"), {})
        if block.language == "console":
            for command, _ in commands(block.text):
                for part in command.split(" && "):
                    program, *arguments = shlex.split(part.removesuffix("&"), comments=True)
                    if program == "cpsgd":
                        self.parse(arguments)

    def _execute(self, block: Block, text: str) -> None:
        # Lines before the block, so that a traceback names the page's own.
        exec(compile("\n" * block.line + textwrap.dedent(text), str(block.page), "exec"), self.names)

    def _command(self, block: Block, command: str, expected: str) -> None:
        for part in re.split(r" && ", command):
            program, *arguments = shlex.split(part, comments=True)
            assert program == "cpsgd", f"{block}: {program} is not run by this test; mark the block."
            result = self.call(*arguments)
            shown = f"{block}: {part}\n{result.stdout}{result.stderr}"
            should_fail = any(line.startswith(_BROKEN) for line in expected.split("\n"))
            assert (result.exit_code != 0) == should_fail, shown
        if expected.strip():
            noisy = tuple(word.strip() for word in block.said.get("noisy", "").split(",") if word.strip())
            printed = (result.stderr + result.stdout, result.stdout + result.stderr)
            assert any(matches(expected, text, noisy) for text in printed), shown
            self.compared += 1


def commands(text: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with the output that is shown."""
    for part in re.split(r"^\$ ", text.replace("\\\n", " "), flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected


def matches(expected: str, printed: str, noisy: tuple[str, ...] = ()) -> bool:
    """Whether this was printed, but for what the page says may differ."""
    pattern = re.escape(_comparable(expected, noisy)).replace(r"\.\.\.", ".*?")
    return re.fullmatch(pattern, _comparable(printed, noisy), re.DOTALL) is not None


def _comparable(text: str, noisy: tuple[str, ...]) -> str:
    lines = [line.rstrip() for line in text.strip().split("\n")]
    lines = [re.sub(r"-?\d[\d.,e+-]*", "#", line) if noisy and line.startswith(noisy) else line for line in lines]
    return re.sub(r"[\d.e+-]+ measured", "# measured", "\n".join(lines))
