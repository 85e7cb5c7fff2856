"""Indices and exponents of formulas within a line: `P_t` and `e^(−λ/2)` are shown below and above the line.

Proofs are read as plain text in the repository and as typeset text on the site. Displayed formulas are LaTeX
(`docs/assets/math.js`); short ones within a sentence are plain Unicode, of which this makes HTML.
"""

from __future__ import annotations

import re

# Code, formulas and the addresses of links stay as they are.
_KEPT = re.compile(r"(```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$]+?\$|\]\([^)]*\))", re.DOTALL)
_MARK = re.compile(r"(?<=[\w)₀₁₂≼\u2032\u0303])(?<![A-Za-z]{2})([_^])(?=[\w({±−∘])")
_PLAIN = re.compile(r"[±−]?[^\W²³⁴]+\u2032?")
_TAGS = {"_": "sub", "^": "sup"}
_CLOSING = {"(": ")", "{": "}"}


def typeset(markdown: str) -> str:
    """Returns a page with its indices and exponents as HTML.

    Example:
        >>> typeset("P_{t+1} is e^(−(x−1)/2) times Z_0, in `law_of`.")
        'P<sub>t+1</sub> is e<sup>−(x−1)/2</sup> times Z<sub>0</sub>, in `law_of`.'
    """
    parts = _KEPT.split(markdown)
    return "".join(part if number % 2 else _shown(part) for number, part in enumerate(parts))


def _shown(text: str) -> str:
    """Returns plain text with the indices in it as HTML, inner ones too."""
    found = _MARK.search(text)
    if found is None:
        return text
    inner, rest = _argument(text[found.end() :])
    tag = _TAGS[found[1]]
    return f"{text[: found.start()]}<{tag}>{_shown(inner)}</{tag}>{_shown_after(rest)}"


def _shown_after(rest: str) -> str:
    """Returns what follows an index: an exponent may stand right behind it."""
    if rest[:1] in _TAGS and len(rest) > 1:
        inner, behind = _argument(rest[1:])
        return f"<{_TAGS[rest[0]]}>{_shown(inner)}</{_TAGS[rest[0]]}>{_shown(behind)}"
    return _shown(rest)


def _argument(text: str) -> tuple[str, str]:
    """Returns what an index consists of, without its brackets, and the text behind it."""
    if text[0] in _CLOSING:
        depth = 0
        for place, character in enumerate(text):
            depth += (character == text[0]) - (character == _CLOSING[text[0]])
            if depth == 0:
                return text[1:place], text[place + 1 :]
    plain = _PLAIN.match(text)
    return (plain[0], text[plain.end() :]) if plain else (text[0], text[1:])
