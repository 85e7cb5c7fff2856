"""The job, in NVFlare's simulator: ten silos learn to read digits.

python job.py [--rounds 90] [--seed 0] [--epsilon 4.0] [--drawn | --baseline]

With `--drawn` a silo draws its images for each round, each with the same probability and in secret.
`deploy.py` also takes `--correlated 8`: silos then take noise and rounding errors away in later rounds, for which each
needs a memory, and every image is in one round.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from digits import IMAGES, RATE, SHARE, SILOS, Network, accuracy
from momentum import Momentum
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from nvflare.recipe.spec import Recipe

from cpsgd.engines.nvflare import CpsgdRecipe


def private_recipe(
    rounds: int, seed: int, epsilon: float, correlated: int = 0, drawn: bool = False, **server: object
) -> Recipe:
    """Returns secure aggregation of the silos' sums, with the noise that (epsilon, delta) needs for one image.

    The silos have their own limit, whatever epsilon the server plans for.
    """
    images = SHARE if correlated else IMAGES
    limits = {"epsilon": 4.0, "delta": 1e-6, "examples": images, "min_clients": 9, "colluding": 1}
    plan = {"dropout": 0.1, **({"correlated": correlated} if correlated else {"bits": 16})}
    if drawn:
        limits |= {"rate": RATE, "adjacency": "zero-out"}
        plan |= {"participation": f"poisson:{RATE}", "adjacency": "zero-out"}
    return CpsgdRecipe(
        name="digits",
        model=Network(seed),
        train_script="client.py",
        train_args="--disjoint" if correlated else "",
        num_clients=SILOS,
        num_rounds=rounds,
        epsilon=epsilon,
        delta=1e-6,
        examples=images,
        plan=plan,
        limits={**limits, "disjoint": True} if correlated else limits,
        apply=Momentum(8.0 if correlated else 16.0, rounds, images * RATE if drawn else images),
        **server,
    )


def baseline_recipe(rounds: int, seed: int) -> Recipe:
    """Returns federated averaging without privacy, NVFlare's own recipe."""
    return FedAvgRecipe(
        name="digits", model=Network(seed), train_script="baseline.py", min_clients=SILOS, num_rounds=rounds
    )


def read_accuracy(result: Path) -> float:
    """Returns the test accuracy of a run's last model."""
    (path,) = result.rglob("FL_global_model.pt")
    model = Network()
    model.load_state_dict(torch.load(path, weights_only=True)["model"])
    return accuracy(model)


def parse() -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=90)
    parser.add_argument("--seed", type=int, default=0, help="of the first model; the noise has no seed")
    parser.add_argument("--epsilon", type=float, default=4.0, help="of one image, over all rounds")
    parser.add_argument("--correlated", type=int, default=0, help="bands of correlated noise, for deploy.py")
    parser.add_argument("--drawn", action="store_true", help="silos draw their images for each round")
    parser.add_argument("--baseline", action="store_true", help="federated averaging without privacy")
    return parser.parse_args()


def main() -> None:
    """Runs the job in the simulator."""
    asked = parse()
    recipe = (
        baseline_recipe(asked.rounds, asked.seed)
        if asked.baseline
        else private_recipe(asked.rounds, asked.seed, asked.epsilon, drawn=asked.drawn)
    )
    with TemporaryDirectory() as folder:
        run = recipe.run(SimEnv(num_clients=SILOS, workspace_root=folder))
        print(f"accuracy {read_accuracy(Path(run.get_result())):.4f} after {asked.rounds} rounds")


if __name__ == "__main__":
    main()
