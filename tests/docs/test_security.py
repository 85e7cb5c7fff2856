from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_that_security_names_is_there() -> None:
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    section = text[text.index("## Each promise") : text.index("## What is measured")]
    folder, named = Path(), []
    for name in re.findall(r"`(tests/[\w./]+|test_\w+\.py)`", section):
        # A file without a folder is in the one before.
        path = Path(name) if name.startswith("tests/") else folder / name
        folder = path.parent if path.suffix else path
        named.append(path)
    assert len(named) > 15
    assert [str(path) for path in named if not (ROOT / path).exists()] == []
