"""Compares correlated with independent noise, if each image is used once: the app's computation in one process.

    python compare.py            # accuracy by seeds, with settings that were selected as below
    python compare.py --select   # accuracy on images of no silo, for numbers of rounds and learning rates

Silos' sums, plans, protocols, noise and the server's optimizer are those of the app; secure aggregation, which changes
no bit of a sum, and processes are left out.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from flower_digits import IMAGES, SILOS, task
from flower_digits.server_app import Momentum

from cpsgd import Plan
from cpsgd.learning.datasets import Batch, infinite_digits
from cpsgd.learning.example_sums import ExampleSums
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.planner.examples import plan_examples

ROUNDS = (15, 30, 90)
RATES = (1.0, 2.0, 4.0, 8.0, 16.0)
HELD_BACK = 2000
SEEDS = range(5)


@dataclass(frozen=True)
class Settings:
    """Bands (1 for independent noise), rounds and learning rate."""

    bands: int
    rounds: int
    rate: float


SELECTED = (Settings(1, 30, 4.0), Settings(8, 90, 8.0))


@cache
def planned(bands: int, rounds: int) -> Plan:
    """Returns a plan with each image in one round, for ε = 4 and δ = 10⁻⁶."""
    dim = sum(parameter.numel() for parameter in task.network().parameters())
    return plan_examples(
        *(SILOS, dim, 4.0, 1e-6),
        examples=IMAGES // rounds,
        rounds=rounds,
        participation="once",
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
    plan, share = planned(settings.bands, settings.rounds), IMAGES // settings.rounds
    protocol, model = plan.protocol, task.network(seed)
    step = Momentum(settings.rate, settings.rounds, share)
    memory = protocol.mechanism.memory
    states = [memory.init() for _ in range(SILOS)]
    sums = ExampleSums(ClientUpdates(model, task.loss), protocol.clip_norm, share)
    for round in range(settings.rounds):
        own = slice(round * share, (round + 1) * share)
        batch = Batch(
            np.concatenate([each.features[own] for each in images()]),
            np.concatenate([each.labels[own] for each in images()]),
            np.full(SILOS, share),
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
    parser.add_argument("--select", action="store_true")
    torch.set_num_threads(1)
    if parser.parse_args().select:
        held_back = task.centred(infinite_digits().batch(np.arange(SILOS * IMAGES, SILOS * IMAGES + HELD_BACK)))
        for bands in (1, 8):
            for rounds in ROUNDS:
                for rate in RATES:
                    models = [trained(Settings(bands, rounds, rate), seed) for seed in (100, 101)]
                    found = np.mean([task.accuracy(model, held_back) for model in models])
                    print(f"bands {bands:2} rounds {rounds:3} rate {rate:4g}: {found:.4f}", flush=True)
        return
    for settings in SELECTED:
        found = [task.accuracy(trained(settings, seed)) for seed in SEEDS]
        print(settings, " ".join(f"{each:.4f}" for each in found), f"mean {np.mean(found):.4f}", flush=True)


if __name__ == "__main__":
    main()
