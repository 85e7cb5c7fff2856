"""Pages as a browser takes them apart."""

from __future__ import annotations

from html.parser import HTMLParser


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))


def tags(page: str) -> list[tuple[str, dict[str, str | None]]]:
    """All elements with their attributes."""
    parser = _Tags()
    parser.feed(page)
    return parser.found


def check_harmless(page: str) -> None:
    """Nothing in a page runs but our script, and nothing is loaded but from us."""
    for tag, attributes in tags(page):
        assert tag not in ("img", "iframe", "object", "embed", "base", "foreignobject", "animate", "set")
        assert not [name for name in attributes if name.startswith("on") or name in ("style", "srcdoc")]
        assert tag != "script" or attributes == {"src": "/static/app.js", "defer": None}
        assert tag != "meta" or attributes.get("http-equiv") in (None, "Content-Security-Policy")
        for name in ("href", "src", "action"):
            place = attributes.get(name) or "/"
            assert place.startswith(("/", "#", "data:,"))
            assert not place.startswith("//")
