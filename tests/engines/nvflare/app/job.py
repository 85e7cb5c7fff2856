"""Submits the job: job.py FOLDER STARTUP_KIT USER ROSTER."""

from __future__ import annotations

import sys
from pathlib import Path

from nvflare.app_common.np.np_model_persistor import NPModelPersistor
from nvflare.recipe import ProdEnv

from cpsgd.engines.nvflare import CpsgdRecipe

DIM = 2000
SETTINGS = {
    "num_clients": 5,
    "num_rounds": 2,
    "epsilon": 8.0,
    "delta": 1e-5,
    "examples": 100,
    "plan": {"dropout": 0.2, "bits": 14, "participation": "poisson:0.2", "adjacency": "zero-out"},
}


def main() -> None:
    """Submits it, and does not wait."""
    folder, kit, user, roster = sys.argv[1:]
    recipe = CpsgdRecipe(
        name="recorder",
        model=NPModelPersistor(model=[[0.0] * 10] * (DIM // 10)),
        train_script=str(Path(__file__).parent / "train.py"),
        train_args=folder,
        limits={
            **{"epsilon": 8.0, "delta": 1e-5, "rounds": 2, "min_clients": 4, "colluding": 1},
            **{"examples": 100, "rate": 0.2, "adjacency": "zero-out"},
        },
        roster=roster,
        ledger=str(Path(folder) / "ledger"),
        population="sites",
        pace={"stage": 60.0, "grace": 3.0},
        **SETTINGS,
    )
    recipe.run(ProdEnv(kit, login_timeout=60.0, username=user))


if __name__ == "__main__":
    main()
