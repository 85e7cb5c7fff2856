"""Templates filled in. Every value is escaped by the template engine; nothing here writes HTML of its own."""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from cpsgd.dashboard import charts, values
from cpsgd.reports.numbers import power, rounded_down, rounded_up, size

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
    """One of the files that pages refer to."""
    return (_HERE / "static" / name).read_text(encoding="utf-8")


@cache
def style_digest() -> str:
    """By which a policy allows the style sheet inside of a page."""
    return base64.b64encode(hashlib.sha256(static(STYLE).encode()).digest()).decode()


def render(template: str, **context: Any) -> str:
    """A template with its values."""
    return _environment().get_template(template).render(saved=False, **context)


def render_saved(template: str, **context: Any) -> str:
    """A template as a page that needs nothing else: the style sheet is in it, and nothing but that may be loaded."""
    inside = {"saved": True, "style": static(STYLE), "digest": style_digest()}
    return _environment().get_template(template).render(**inside, **context)
