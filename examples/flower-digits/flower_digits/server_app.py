"""The server's app."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict, UserConfig
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg, Strategy

from cpsgd.engines.flower import CpsgdStrategy
from cpsgd.ledger import Ledger
from cpsgd.planner import plan_examples
from cpsgd.secagg import read_roster
from flower_digits import IMAGES, RATE, SHARE, SILOS, task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Trains for some rounds, and prints the accuracy on the test images."""
    torch.set_num_threads(1)
    settings = context.run_config
    rounds, seed = int(settings["rounds"]), int(settings["seed"])
    start = ArrayRecord(task.network(seed).state_dict())

    def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
        if round % 5 and round != rounds:
            return None
        model = task.network()
        model.load_state_dict(arrays.to_torch_state_dict())
        return MetricRecord({"accuracy": task.accuracy(model)})

    strategy = private_strategy(settings, rounds) if settings["private"] else Baseline(fraction_evaluate=0.0)
    result = strategy.start(grid, start, num_rounds=rounds, timeout=600.0, evaluate_fn=evaluate)
    print(f"accuracy {result.evaluate_metrics_serverapp[rounds]['accuracy']:.4f} after {rounds} rounds")


def private_strategy(settings: UserConfig, rounds: int) -> Strategy:
    """Returns secure aggregation of the silos' sums, with the noise that (epsilon, delta) needs for one image."""
    bands = int(settings["correlated"])
    images, drawn = SHARE if bands else IMAGES, bool(settings["drawn"])
    rate = RATE if drawn else 1.0
    dim = sum(parameter.numel() for parameter in task.network().parameters())
    plan = plan_examples(
        SILOS,
        dim,
        float(settings["epsilon"]),
        float(settings["delta"]),
        examples=images,
        rounds=rounds,
        participation=f"poisson:{rate}" if drawn else "once" if bands else "every",
        adjacency="zero-out" if drawn else "replace-one",
        dropout=0.1,
        colluding=1,
        secure=True,
        bits=None if bands else 16,
        correlated=bands or None,
    )
    print(plan.guarantee)
    ledger = Ledger(str(settings["ledger"])) if settings["ledger"] else None
    return CpsgdStrategy(
        plan,
        examples=images,
        apply=Momentum(float(settings["learning-rate"]), rounds, images * rate),
        ledger=ledger,
        population="digits" if ledger else None,
        checkpoint=str(settings["checkpoint"]) or None,
        roster=read_roster(Path(str(settings["roster"]))) if settings["roster"] else None,
    )


class Momentum:
    """The server's optimizer: momentum 0.8, a little weight decay, and a rate that falls to zero in the second half.

    It sees the private mean only, so it costs no privacy.
    """

    def __init__(self, rate: float, rounds: int, images: float) -> None:
        """Starts with velocity 0; `images` is the (expected) number of images in a silo's sum."""
        self._rate, self._rounds, self._images = rate, rounds, images
        self._velocity: float | np.ndarray = 0.0

    def __call__(self, model: np.ndarray, mean: np.ndarray, round: int) -> np.ndarray:
        """Returns the next model, from the mean of the silos' sums of gradients."""
        self._velocity = 0.8 * self._velocity + mean / self._images + 1e-4 * model
        return model - self._rate * min(1.0, 2.0 - 2.0 * (round - 1) / self._rounds) * self._velocity

    def state_dict(self) -> dict[str, np.ndarray]:
        """Returns the state for a checkpoint."""
        return {"velocity": np.asarray(self._velocity)}

    def load_state_dict(self, state: Mapping[str, np.ndarray]) -> None:
        """Restores the state from a checkpoint."""
        self._velocity = state["velocity"]


class Baseline(FedAvg):
    """Federated averaging without privacy."""

    def _construct_messages(self, record: RecordDict, node_ids: list[int], message_type: str) -> Iterable[Message]:
        return super()._construct_messages(record, node_ids, "train.baseline")
