"""How notebooks show things: one small table, of plain text only."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape

Rows = Iterable[tuple[str, str]]
"""Names and what is said of each."""

_CELL = 'style="text-align:left;vertical-align:top"'


def html_table(title: str, rows: Rows) -> str:
    """Returns a table with a caption. Everything is escaped: reasons, names and paths are other people's words.

    Example:
        >>> "<script>" in html_table("<script>", [("reason", "<script>alert(1)</script>")])
        False
    """
    body = "".join(f"<tr><th {_CELL}>{escape(name)}</th><td {_CELL}>{escape(text)}</td></tr>" for name, text in rows)
    return f"<table><caption {_CELL}><b>{escape(title)}</b></caption><tbody>{body}</tbody></table>"
