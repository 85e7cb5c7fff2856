"""The same job in a federation of processes on 127.0.0.1, with mutual TLS and a roster.

python deploy.py [--rounds 90] [--seed 0] [--epsilon 4.0] [--correlated 8 | --drawn]
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from tempfile import TemporaryDirectory

from digits import SILOS
from job import parse, private_recipe, read_accuracy
from nvflare.recipe import ProdEnv

from federation import ADMIN, Federation


def main() -> None:
    """Runs the job."""
    asked = parse()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # and then end all processes, as after an error
    with TemporaryDirectory() as folder:
        sites = [f"site-{number}" for number in range(1, SILOS + 1)]
        with Federation(Path(folder), sites, int(os.environ.get("PORT", "8002"))) as federation:
            roster = str(federation.roster)
            recipe = private_recipe(
                asked.rounds, asked.seed, asked.epsilon, asked.correlated, asked.drawn, roster=roster
            )
            env = ProdEnv(str(federation.admin_kit), login_timeout=30.0, username=ADMIN)
            run = recipe.run(env)
            result = run.get_result()
            print(f"accuracy {read_accuracy(Path(result)):.4f} after {asked.rounds} rounds")


if __name__ == "__main__":
    try:
        main()
    except BaseException:
        traceback.print_exc()
        os._exit(1)  # NVFlare's threads would keep this process alive
