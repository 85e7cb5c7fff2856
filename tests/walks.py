"""Walks through the package: the files that the code of one task passes through.

Whoever reads a task from top to bottom has to open these files. Where a walk grows, inline what is called once, or
compute it when the terms are made.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import cpsgd

ROOT = Path(cpsgd.__file__).parent


def walk(task: Callable[[], object]) -> list[str]:
    """Returns the files whose functions a task enters, once caches are warm and late imports are made."""
    found = set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and not frame.f_code.co_name.startswith("<") and path.is_relative_to(ROOT):
            found.add(str(path.relative_to(ROOT)))

    task()
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        task()
    finally:
        sys.setprofile(before)
    return sorted(found)
