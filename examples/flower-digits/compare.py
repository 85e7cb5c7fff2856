"""Compares ways to use the images at equal ε: the app's computation in one process.

    python compare.py                    # each image once: correlated noise beside independent noise
    python compare.py --drawn            # images drawn for each round beside all images in every round
    python compare.py --select           # accuracy on images of no silo, for numbers of rounds and learning rates
    python compare.py --drawn --select

Silos' sums, plans, protocols, noise and the server's optimizer are those of the app; secure aggregation, which changes
no bit of a sum, and processes are left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from flower_digits import IMAGES, RATE, SILOS, task
from flower_digits.server_app import Momentum

from cpsgd import Plan
from cpsgd.engines.silo import drawn
from cpsgd.learning.datasets import Batch, infinite_digits
from cpsgd.learning.example_sums import ExampleSums
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.neighbours import Participation
from cpsgd.planner import plan_examples
from cpsgd.privacy.one_example import most_drawn

ROUNDS = (15, 30, 90)
RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
HELD_BACK = 2000
SEEDS = range(5)


@dataclass(frozen=True)
class Settings:
    """Bands (1 for independent noise), rounds, learning rate; who takes part with which neighbours; and ε."""

    bands: int
    rounds: int
    rate: float
    participation: str = "once"
    adjacency: str = "replace-one"
    epsilon: float = 4.0


SELECTED = (Settings(1, 30, 4.0), Settings(8, 90, 8.0))
WAYS = ((90, 16.0, "every"), (90, 16.0, f"poisson:{RATE}"), (300, 8.0, "poisson:0.02"))
DRAWN = tuple(Settings(1, *way, "zero-out", epsilon) for epsilon in (4.0, 1.0) for way in WAYS)


@cache
def planned(bands: int, rounds: int, participation: str, adjacency: str, epsilon: float) -> Plan:
    """Returns a plan for δ = 10⁻⁶."""
    dim = sum(parameter.numel() for parameter in task.network().parameters())
    return plan_examples(
        *(SILOS, dim, epsilon, 1e-6),
        examples=IMAGES // rounds if participation == "once" else IMAGES,
        rounds=rounds,
        participation=participation,
        adjacency=adjacency,
        dropout=0.1,
        colluding=1,
        secure=True,
        bits=None if bands > 1 else 16,
        correlated=bands if bands > 1 else None,
    )


@cache
def images() -> list[Batch]:
    """Returns the images of all silos."""
    return [task.images_of(silo) for silo in range(SILOS)]


def trained(settings: Settings, seed: int) -> torch.nn.Module:
    """Returns the model after a run."""
    plan = planned(settings.bands, settings.rounds, settings.participation, settings.adjacency, settings.epsilon)
    sampling, share = Participation.parse(settings.participation), plan.examples
    protocol, model = plan.protocol, task.network(seed)
    step = Momentum(settings.rate, settings.rounds, share * sampling.rate)
    memory = protocol.mechanism.memory
    states = [memory.init() for _ in range(SILOS)]
    sums = ExampleSums(ClientUpdates(model, task.loss), protocol.clip_norm, most_drawn(share, sampling))
    for round in range(settings.rounds):
        first = round * share if settings.participation == "once" else 0
        own = [first + drawn(share, sampling.rate) for _ in range(SILOS)]
        batch = Batch(
            np.concatenate([each.features[rows] for each, rows in zip(images(), own, strict=True)]),
            np.concatenate([each.labels[rows] for each, rows in zip(images(), own, strict=True)]),
            np.array([len(rows) for rows in own]),
        )
        total = np.zeros(protocol.dim, dtype=np.uint64)
        for silo, vector in enumerate(np.concatenate(list(sums.chunks(batch)))):
            states[silo] = memory.update(states[silo])
            total += protocol.encode_integers(vector, round, seeds=states[silo])
        mean = protocol.decode_sum(total % np.uint64(protocol.modulus), SILOS, round)
        before = torch.nn.utils.parameters_to_vector(model.parameters()).detach().numpy()
        after = step(before, mean, round + 1).astype(np.float32)
        torch.nn.utils.vector_to_parameters(torch.from_numpy(after), model.parameters())
    return model


def main() -> None:
    """Selects settings, or measures the selected ones."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--drawn", action="store_true")
    parser.add_argument("--select", action="store_true")
    torch.set_num_threads(1)
    asked = parser.parse_args()
    if asked.select:
        held_back = task.centred(infinite_digits().batch(np.arange(SILOS * IMAGES, SILOS * IMAGES + HELD_BACK)))
        once = [Settings(bands, rounds, rate) for bands in (1, 8) for rounds in ROUNDS for rate in RATES]
        chosen = [replace(each, rate=rate) for each in DRAWN for rate in RATES[-3:]]
        for settings in chosen if asked.drawn else once:
            models = [trained(settings, seed) for seed in (100, 101)]
            found = np.mean([task.accuracy(model, held_back) for model in models])
            print(settings, f"{found:.4f}", flush=True)
        return
    for settings in DRAWN if asked.drawn else SELECTED:
        found = [task.accuracy(trained(settings, seed)) for seed in SEEDS]
        print(settings, " ".join(f"{each:.4f}" for each in found), f"mean {np.mean(found):.4f}", flush=True)


if __name__ == "__main__":
    main()
