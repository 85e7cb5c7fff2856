"""Four silos with identities and a roster in files, and a stranger."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from cpsgd.secagg import create_identity, public_line
from cpsgd.secagg.keys import public_bytes

from .local import DIM, Client

CLIENTS = 4
VECTORS = np.random.default_rng(5).normal(size=(CLIENTS + 1, DIM)).astype(np.float32) * 0.1


class Silos:
    """Identities of four silos and of a stranger, with a roster of the four, in files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keys = [create_identity(folder / f"silo-{i}") for i in range(CLIENTS + 1)]
        self.public = [public_bytes(key) for key in self.keys]
        self.roster = frozenset(self.public[:CLIENTS])
        self.write_roster("roster", range(CLIENTS))

    def write_roster(self, name: str, members: Iterable[int]) -> None:
        lines = [public_line(self.keys[i], f"silo-{i}") for i in members]
        (self.folder / name).write_text("".join(f"{line}\n" for line in lines))

    def config(self, silo: int, roster: str = "roster") -> dict[str, Any]:
        return {
            "cpsgd-identity": str(self.folder / f"silo-{silo}"),
            "cpsgd-roster": str(self.folder / roster),
            "cpsgd-memory": str(self.folder / f"memory-{silo}"),
        }

    def client(self, silo: int, roster: str = "roster", **options: Any) -> Client:
        return Client(VECTORS[silo], settings=self.config(silo, roster), **options)
