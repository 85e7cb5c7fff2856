"""Examples in docstrings as code: `>>>` is quoted text to Markdown.

An extension of griffe, which reads docstrings for mkdocstrings.
"""

from __future__ import annotations

from typing import Any

import griffe


class Examples(griffe.Extension):
    """Puts fences around the examples of every docstring."""

    def on_object(self, *, obj: griffe.Object, **kwargs: Any) -> None:
        """Called with each object once its docstring has been read."""
        if obj.docstring and not obj.is_alias:
            obj.docstring.value = fenced(obj.docstring.value)


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
        lines.append(line.rstrip())
    return "\n".join(lines).rstrip("\n")
