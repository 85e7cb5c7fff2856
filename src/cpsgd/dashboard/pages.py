"""Rendering of templates. The template engine escapes every value; nothing here writes HTML of its own."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cpsgd._numbers import power, rounded_down, rounded_up, size
from cpsgd.dashboard import charts, values

_HERE = Path(__file__).parent
STYLE, SCRIPT = "style.css", "app.js"
"""The files that pages refer to."""


@cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(_HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "up": rounded_up,
        "down": rounded_down,
        "power": power,
        "size": size,
        "duration": values.duration,
        "known": values.text,
    }
    environment.globals["styles"] = charts.STYLES
    return environment


@cache
def static(name: str) -> str:
    """Returns the text of the style sheet or the script."""
    return (_HERE / "static" / name).read_text(encoding="utf-8")


@cache
def style_digest() -> str:
    """Returns the SHA-256 of the style sheet, by which a policy allows it inside a page."""
    return base64.b64encode(hashlib.sha256(static(STYLE).encode()).digest()).decode()


def render(template: str, **context: Any) -> str:
    """Renders a template."""
    return _environment().get_template(template).render(saved=False, **context)


def render_saved(template: str, **context: Any) -> str:
    """Renders a template as a page that needs no other file: the style sheet is in it, and nothing else is loaded."""
    inside = {"saved": True, "style": static(STYLE), "digest": style_digest()}
    return _environment().get_template(template).render(**inside, **context)
