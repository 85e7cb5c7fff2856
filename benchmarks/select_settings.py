"""How presets were chosen, and what they come to: selection on held-out training images, then the test set.

A fifth of the training images is held back, and the infinite data set is made of the others. Every setting of a
small grid is trained privately (ε = 2, 4 bits) and without privacy, and judged by its mean accuracy on the images held
back, so that the test set has no say. Then the setting picked for the private run is trained on all training images
with other seeds and measured on the test set, beside two baselines without privacy: one with the private run's setting,
one with the setting picked for it.

Each training is a line of the file after `--out`; those already there are not repeated.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Self, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cpsgd.learning import CohortOptions, NoPrivacy, RunOptions, ServerOptions, Trainer, mlp
from cpsgd.learning.datasets import load
from cpsgd.learning.datasets.infinite import InfiniteDataset
from cpsgd.learning.options import Schedule
from cpsgd.planner import plan

EPSILON, BITS = 2.0, 4
DELTA = {"infinite-digits": 1e-6, "infinite-mnist": 1e-9}
RATES = {"sgd": (2.0, 4.0, 8.0), "momentum": (1.0, 2.0, 4.0), "adam": (0.01,)}
SCHEDULES: tuple[Schedule, ...] = ("constant", "linear")
HELD_BACK = 5


@dataclass(frozen=True)
class Setting:
    """What is chosen: the server's optimizer, its rate and how the rate changes, and what updates are clipped to."""

    optimizer: str
    rate: float
    schedule: Schedule
    clip_norm: float = 1.0
    weight_decay: float = 0.0

    def __str__(self) -> str:
        text = f"{self.optimizer}, rate {self.rate:g}, {self.schedule}, clipped to {self.clip_norm:g}"
        return text + (f", decay {self.weight_decay:g}" if self.weight_decay else "")

    @classmethod
    def parse(cls, text: str) -> Self:
        """From "sgd:6:late:1:1e-4": optimizer, rate, schedule, clip norm, weight decay."""
        optimizer, rate, schedule, clip_norm, decay = text.split(":")
        return cls(optimizer, float(rate), cast(Schedule, schedule), float(clip_norm), float(decay))


@dataclass(frozen=True)
class Training:
    """One training: on what, how, and how it ended."""

    images: str
    private: bool
    setting: Setting
    seed: int
    accuracy: float
    loss: float


class Trainings:
    """Trainings of one size, kept in a file."""

    def __init__(self, path: Path, dataset: str, device: str, cohort: int, rounds: int, console: Console) -> None:
        """Reads those that are there."""
        self._path = path
        self._device = device
        self._delta = DELTA[dataset]
        self._size = {"cohort": cohort, "rounds": rounds}
        self._console = console
        self._known: dict[str, dict[str, float]] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self._known[row["key"]] = row["result"]
        whole = load(dataset)
        assert isinstance(whole, InfiniteDataset)
        self._data = {"test": whole, "validation": with_validation(whole)}

    def train(self, images: str, private: bool, setting: Setting, seed: int) -> Training:
        """Trains, unless the file has it, and measures on the "validation" or the "test" images."""
        key = json.dumps([self._size, images, private, vars(setting), seed])
        if key not in self._known:
            self._known[key] = self._run(self._data[images], private, setting, seed)
            with self._path.open("a") as file:
                file.write(json.dumps({"key": key, "result": self._known[key]}) + "\n")
            kind = "private" if private else "no privacy"
            self._console.print(f"{images} {kind:<10} {setting} seed {seed}: {self._known[key]['accuracy']:.2%}")
        return Training(images, private, setting, seed, **self._known[key])

    def _run(self, data: InfiniteDataset, private: bool, setting: Setting, seed: int) -> dict[str, float]:
        model = mlp(data.feature_dim, data.classes, seed=seed)
        dim = sum(p.numel() for p in model.parameters())
        rounds, cohort = self._size["rounds"], self._size["cohort"]
        trainer = Trainer(
            model,
            torch.nn.functional.cross_entropy,
            data,
            plan(cohort, dim, EPSILON, self._delta, setting.clip_norm, bits=BITS, rounds=rounds, participation="once")
            if private
            else NoPrivacy(setting.clip_norm),
            cohorts=CohortOptions(cohort=cohort, rounds=rounds),
            server=ServerOptions(
                optimizer=setting.optimizer,
                lr=setting.rate,
                weight_decay=setting.weight_decay,
                schedule=setting.schedule,
            ),
            run=RunOptions(seed=seed, evaluate_every=rounds, device=self._device),
        )
        *_, last = trainer.run()
        assert last.accuracy is not None
        assert last.loss is not None
        return {"accuracy": last.accuracy, "loss": last.loss}


def with_validation(data: InfiniteDataset) -> InfiniteDataset:
    """The infinite version of four fifths of the training images, with the others in the place of the test set."""
    base = data.base
    held_back = np.zeros(base.size, dtype=np.bool_)
    for digit in range(base.classes):
        held_back[np.flatnonzero(base.labels == digit)[HELD_BACK - 1 :: HELD_BACK]] = True
    return replace(
        data,
        base=replace(
            base,
            images=base.images[~held_back],
            labels=base.labels[~held_back],
            test_images=base.images[held_back],
            test_labels=base.labels[held_back],
        ),
    )


def grid() -> Iterator[Setting]:
    for optimizer, rates in RATES.items():
        yield from (Setting(optimizer, rate, schedule) for rate, schedule in product(rates, SCHEDULES))


def mean_and_range(trainings: list[Training]) -> str:
    values = [training.accuracy for training in trainings]
    return f"{fmean(values):.2%} ({min(values):.2%} to {max(values):.2%})"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--out", type=Path, default=Path("selection.jsonl"), help="where trainings are kept")
    arguments.add_argument("--dataset", choices=list(DELTA), default="infinite-digits")
    arguments.add_argument("--device", default="cpu", help="cpu or cuda")
    arguments.add_argument("--grid", nargs="+", type=Setting.parse, help="settings such as sgd:6:late:1:1e-4")
    arguments.add_argument("--cohort", type=int, default=10_000)
    arguments.add_argument("--rounds", type=int, default=80)
    arguments.add_argument("--select-seeds", type=int, default=2, help="trainings of each setting, seeds 100, 101, ...")
    arguments.add_argument("--seeds", type=int, default=5, help="trainings for the test set, seeds 0, 1, ...")
    options = arguments.parse_args()
    console = Console(highlight=False)
    trainings = Trainings(options.out, options.dataset, options.device, options.cohort, options.rounds, console)

    table = Table("setting", "private", "no privacy", title="Accuracy on the training images held back")
    best: dict[bool, tuple[tuple[float, float], Setting]] = {}
    for setting in options.grid or grid():
        shown = []
        for private in (True, False):
            done = [trainings.train("validation", private, setting, 100 + i) for i in range(options.select_seeds)]
            # The loss settles ties.
            score = fmean(t.accuracy for t in done), -fmean(t.loss for t in done)
            best[private] = max(best.get(private, (score, setting)), (score, setting), key=lambda pair: pair[0])
            shown.append(mean_and_range(done))
        table.add_row(str(setting), *shown)
    console.print(table)

    chosen, own = best[True][1], best[False][1]
    console.print(f"Chosen: {chosen} (private), {own} (no privacy)")
    if options.seeds == 0:
        return
    table = Table("run", "setting", "test accuracy: mean (range)", title=f"Test set, {options.seeds} seeds")
    for name, private, setting in (
        ("private", True, chosen),
        ("no privacy, the same setting", False, chosen),
        ("no privacy, its own setting", False, own),
    ):
        done = [trainings.train("test", private, setting, seed) for seed in range(options.seeds)]
        table.add_row(name, str(setting), mean_and_range(done))
    console.print(table)


if __name__ == "__main__":
    main()
