"""Submits the job: job.py FOLDER STARTUP_KIT USER ROSTER, and the folder of a task of two servers, if any."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.recipe import ProdEnv

from cpsgd.engines.nvflare import CpsgdRecipe

DIM = 2000
LIMITS: dict[str, Any] = {"epsilon": 8.0, "delta": 1e-5, "rounds": 2, "min_clients": 4, "colluding": 1}
_BOTH: dict[str, Any] = {"num_clients": 5, "num_rounds": 2, "epsilon": 8.0, "delta": 1e-5}
SETTINGS = _BOTH | {
    "examples": 100,
    "plan": {"dropout": 0.2, "bits": 14, "participation": "poisson:0.2", "adjacency": "zero-out"},
}
PAIR_SETTINGS = _BOTH | {"plan": {"dropout": 0.2, "bits": 9, "mechanism": "coins"}}


def pair_files(folder: Path, roster: str) -> dict[str, str]:
    """The leader's files."""
    names = {"task": "task.json", "secrets": "leader.json", "collector": "collector.json", "store": "leader.db"}
    return {**{name: str(folder / file) for name, file in names.items()}, "roster": roster}


def main() -> None:
    """Submits it, and does not wait."""
    folder, kit, user, roster, *pair = sys.argv[1:]
    settings = SETTINGS if not pair else PAIR_SETTINGS | {"pair": pair_files(Path(pair[0]), roster)}
    recipe = CpsgdRecipe(
        name="recorder",
        model=NPModelPersistor(model=[[0.0] * 10] * (DIM // 10)),
        train_script=str(Path(__file__).parent / "train.py"),
        train_args=folder,
        limits=LIMITS if pair else LIMITS | {"examples": 100, "rate": 0.2, "adjacency": "zero-out"},
        roster="" if pair else roster,
        ledger=str(Path(folder) / "ledger"),
        population="sites" if pair else "examples",
        pace={"stage": 60.0, "grace": 3.0},
        **settings,
    )
    recipe.run(ProdEnv(kit, login_timeout=60.0, username=user))


if __name__ == "__main__":
    main()
