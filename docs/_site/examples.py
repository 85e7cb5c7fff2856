"""Docstrings as the reference shows them: examples as code (`>>>` is quoted text to Markdown), pages as links.

An extension of griffe, which reads docstrings for mkdocstrings.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import griffe

DOCS = Path(__file__).parents[1]


# The map of a package's modules is for those who change them.
_TABLE = re.compile(r"^\|.*\n?", re.MULTILINE)
_PAGE = re.compile(r"\bdocs/([\w/-]+)\.md\b")


class Examples(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with each object once its docstring has been read."""
        if obj.docstring and not obj.is_alias:
            text = _TABLE.sub("", obj.docstring.value) if obj.is_module else obj.docstring.value
            obj.docstring.value = fenced(text)


def fenced(text: str) -> str:
    """The text with each example, from its first `>>>` to the next empty line, in a fence."""
    lines: list[str] = []
    margin: str | None = None
    for line in [*text.split("\n"), ""]:
        if margin is None and line.lstrip().startswith(">>>"):
            margin = line[: len(line) - len(line.lstrip())]
            lines.append(f"{margin}```pycon")
        elif margin is not None and not line.strip():
            lines.append(f"{margin}```")
            margin = None
        lines.append(line.rstrip() if margin is not None else _PAGE.sub(_link, line.rstrip()))
    return "\n".join(lines).rstrip("\n")


def _link(found: re.Match[str]) -> str:
    """A page of the documentation, as a link from a page of the reference."""
    return f"[{found[0]}](../{found[1]}.html)" if (DOCS / f"{found[1]}.md").exists() else found[0]
