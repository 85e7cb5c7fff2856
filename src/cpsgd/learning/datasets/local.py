"""Where data files are on this machine."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "CPSGD_DATA_DIR"


def data_folder(folder: Path | str | None = None) -> Path:
    """The folder of data files: the one given, else `CPSGD_DATA_DIR`, else `cpsgd` in the user's cache."""
    if folder is not None:
        return Path(folder).expanduser()
    if chosen := os.environ.get(VARIABLE):
        return Path(chosen).expanduser()
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(cache).expanduser() / "cpsgd"


def find_file(folder: Path, subfolder: str, name: str) -> Path | None:
    """The file in the data folder's subfolder or in the data folder itself, if it is there."""
    for path in (folder / subfolder / name, folder / name):
        if path.is_file():
            return path
    return None
