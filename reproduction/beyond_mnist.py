"""Beyond MNIST: clothes, text and a medical table at ε = 1, 2 and 8, with settings chosen on held-back data.

Of each task a fifth of the training clients is held back. Every group (without privacy, one bit, messages with noise
that later rounds cancel, example-level DP-SGD by `make_private` and by Opacus) tries the same number of settings drawn
at random, and the best on the held-back clients is trained on all training clients, once per seed, and measured on the
test set.

    python -m reproduction.beyond_mnist --prepare FOLDER         # copies the data, for a machine that has none
    python -m reproduction.beyond_mnist --task fashion --device cuda --out docs/results/beyond-mnist
    python -m reproduction.beyond_mnist --draw --out docs/results/beyond-mnist

Clothes: an image per client, a CNN of 13,066 parameters. Text: a client per maintainer, the next character by a gated
recurrent network; the test is of other maintainers. Table: scikit-learn's breast cancer data, a patient per client,
logistic regression. One bit and cancelling noise are rounds of clients who send messages; DP-SGD is training on one
machine, and so is Opacus (`--opacus`), with the noise of its own accountant.

Each training is a line of `TASK.jsonl` in `--out`, and those already there are not repeated.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, cast

import numpy as np
import torch
from rich.console import Console
from torch import nn

from cpsgd import make_private
from cpsgd.errors import DivergedError
from cpsgd.learning import CohortOptions, NoPrivacy, RunOptions, ServerOptions, Trainer
from cpsgd.learning.datasets import ArrayDataset, from_arrays, load_changelogs, load_fashion_mnist
from cpsgd.learning.datasets.changelogs import ALPHABET
from cpsgd.learning.datasets.files import data_folder
from cpsgd.learning.datasets.partitions import by_client
from cpsgd.neighbours import Participation
from cpsgd.planner import plan
from cpsgd.planner.passes import schedule
from cpsgd.reports import plotting

EPSILONS = (1.0, 2.0, 8.0)
TEXT = "changelogs.npz"
HELD_BACK = 5
Group = Literal["no privacy", "1 bit", "cancelling", "DP-SGD", "Opacus"]


class Characters(nn.Module):
    """Tells the next character by a gated recurrent unit, written out so that clients are computed together."""

    def __init__(self, symbols: int, width: int = 48, rows: int = 16) -> None:
        super().__init__()
        self.rows, self.head = nn.Embedding(symbols, rows), nn.Linear(width, symbols)
        self.incoming, self.own, self.width = nn.Linear(rows, 3 * width), nn.Linear(width, 3 * width), width

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        """Returns the scores of the next character."""
        inputs = self.incoming(self.rows(numbers))
        state = inputs.new_zeros(*inputs.shape[:-2], self.width)
        for place in range(numbers.shape[-1]):
            ahead, before = inputs[..., place, :], self.own(state)
            reset, update = torch.sigmoid(ahead + before)[..., : 2 * self.width].chunk(2, -1)
            fresh = torch.tanh(ahead[..., 2 * self.width :] + reset * before[..., 2 * self.width :])
            state = update * state + (1.0 - update) * fresh
        found: torch.Tensor = self.head(state)
        return found


def clothes_net() -> nn.Module:
    """Returns a CNN for images of 28×28 pixels."""
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 5, stride=2), nn.ReLU(), nn.Conv2d(16, 32, 3, stride=2), nn.ReLU(), nn.Flatten()),
        nn.Linear(800, 10),
    )


@dataclass(frozen=True)
class Task:
    """A data set with its model, and the rounds that it is trained in.

    Attributes:
        data: Reads the data set.
        model: Makes the model.
        delta: δ.
        rounds: Rounds of clients.
        passes: Rounds of one client.
        bits: Of messages with cancelling noise.
        batch_rate: Share of the examples in a batch of DP-SGD; None where what is protected is not an example.
        epochs: Those of DP-SGD.
    """

    data: Callable[[], ArrayDataset]
    model: Callable[[], nn.Module]
    delta: float
    rounds: int
    passes: int
    bits: float
    batch_rate: float | None = None
    epochs: int = 0


@cache
def clothes() -> ArrayDataset:
    """Returns Fashion-MNIST as images [1, 28, 28]."""
    found = load_fashion_mnist()
    train, test = (each[:, None].astype(np.float32) / 255.0 for each in (found.images, found.test_images))
    return from_arrays(train, found.labels, test_features=test, test_labels=found.test_labels, name="fashion-mnist")


@cache
def text() -> ArrayDataset:
    """Returns the changelogs as `--prepare` wrote them, or else this machine's."""
    path = data_folder() / TEXT
    if not path.exists():
        return load_changelogs()
    saved = np.load(path)
    return from_arrays(
        saved["features"],
        saved["labels"],
        partition=by_client(saved["clients"]),
        test_features=saved["test_features"],
        test_labels=saved["test_labels"],
        classes=len(ALPHABET),
        name="changelogs",
    )


@cache
def patients() -> ArrayDataset:
    """Returns the breast cancer data; features are brought to [-1, 1] by bounds that are taken to be public."""
    from sklearn.datasets import load_breast_cancer

    features, labels = load_breast_cancer(return_X_y=True)
    low, high = features.min(0), features.max(0)
    scaled = (2.0 * (features - low) / (high - low) - 1.0).astype(np.float32)
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[114:], order[:114]
    return from_arrays(
        scaled[train], labels[train], test_features=scaled[test], test_labels=labels[test], name="breast-cancer"
    )


TASKS = {
    "fashion": Task(clothes, clothes_net, 1e-5, rounds=120, passes=6, bits=8.0, batch_rate=1 / 30, epochs=10),
    "text": Task(text, lambda: Characters(len(ALPHABET)), 1e-4, rounds=80, passes=10, bits=8.0),
    "table": Task(patients, lambda: nn.Linear(30, 2), 1e-4, rounds=40, passes=5, bits=8.0, batch_rate=0.1, epochs=10),
}
GROUPS: tuple[tuple[Group, float | None], ...] = (
    ("no privacy", None),
    *(
        (group, epsilon)
        for epsilon in EPSILONS
        for group in cast(tuple[Group, ...], ("1 bit", "cancelling", "DP-SGD", "Opacus"))
    ),
)


def without_a_fifth(data: ArrayDataset) -> ArrayDataset:
    """Returns the training clients without every fifth, which are its test set."""
    numbers = np.arange(data.size)
    kept, aside = (data.batch(numbers[chosen]) for chosen in (numbers % HELD_BACK > 0, numbers % HELD_BACK == 0))
    owners = np.repeat(np.arange(len(kept.counts)), kept.counts)
    return from_arrays(
        kept.features,
        kept.labels,
        partition=by_client(owners),
        test_features=aside.features,
        test_labels=aside.labels,
        classes=data.classes,
        name=data.name,
    )


# ------------------------------------------------------------------ settings


def drawn(group: Group, tries: int) -> list[dict[str, Any]]:
    """Returns settings to try: the same for all private groups; without privacy nothing is clipped.

    `scale` multiplies the loss: clipping to norm 1 then clips gradients to 1 / scale.
    """
    source, found = np.random.default_rng(7), []
    for _ in range(tries):
        adam = bool(source.random() < 0.5)
        longest = 10.0 ** source.uniform(-3.0, -1.5) if adam else 10.0 ** source.uniform(-1.0, 0.7)
        scale = 10.0 ** source.uniform(-0.3, 1.3)
        schedule_name = ("constant", "linear")[int(source.integers(2))]
        found.append(
            {
                "optimizer": "adam" if adam else "momentum",
                "lr": longest if adam else 0.3 * longest,
                "scale": 1.0 if group == "no privacy" else scale,
                "schedule": schedule_name,
            }
        )
    return found


@cache
def planned(name: str, group: Group, epsilon: float, cohort: int) -> Any:
    """Returns the plan of a group's rounds for clip norm 1; settings scale the loss instead."""
    task = TASKS[name]
    who = participation(name)
    dim = sum(p.numel() for p in task.model().parameters())
    one_bit = group == "1 bit"
    return plan(
        cohort,
        dim,
        epsilon,
        task.delta,
        bits=1.0 if one_bit else task.bits,
        rounds=task.rounds,
        participation=who,
        correlated=None if one_bit else "auto",
    )


def participation(name: str) -> Participation:
    """Returns who takes part: clients in a fixed order, several times."""
    task = TASKS[name]
    return schedule(10**6, task.rounds, task.passes)[0]


# ------------------------------------------------------------------ trainings


def rounds_of_clients(name: str, group: Group, epsilon: float | None, data: ArrayDataset, **how: Any) -> dict[str, Any]:
    """Trains in rounds of clients."""
    task, scale = TASKS[name], how["scale"]
    apart = -(-task.rounds // task.passes)
    cohort = data.size // apart
    mechanism: Any = NoPrivacy(1e6) if epsilon is None else planned(name, group, epsilon, cohort)
    torch.manual_seed(how["seed"])
    trainer = Trainer(
        task.model(),
        lambda scores, labels: scale * nn.functional.cross_entropy(scores, labels),
        data,
        mechanism,
        cohorts=CohortOptions(cohort=cohort, rounds=task.rounds, participation=participation(name).scheme),
        server=ServerOptions(optimizer=how["optimizer"], lr=how["lr"], schedule=how["schedule"]),
        run=RunOptions(seed=how["seed"], evaluate_every=task.rounds, device=how["device"]),
    )
    last = list(trainer.run())[-1]
    guarantee = trainer.guarantee()
    bits = None if epsilon is None else mechanism.protocol.bits_per_coordinate
    return {
        "accuracy": last.accuracy,
        "proved": None if guarantee is None else guarantee.epsilon,
        "bits": bits,
        "mechanism": None if epsilon is None else mechanism.protocol.mechanism.name,
    }


class Picked(torch.utils.data.TensorDataset):
    """Examples that are picked by batches, on the device where they are."""

    def __getitems__(self, numbers: list[int]) -> list[torch.Tensor]:
        """Returns the batch of these examples."""
        return [tensor[torch.tensor(numbers, device=tensor.device)] for tensor in self.tensors]


MULTIPLIERS: dict[tuple[str, Group, float, int], float] = {}
"""Noise multipliers of DP-SGD by task, group, ε and number of examples."""


def dp_sgd(name: str, group: Group, epsilon: float | None, data: ArrayDataset, **how: Any) -> dict[str, Any]:
    """Trains on one machine, by `make_private` or by Opacus, each with the noise that its own accountant finds."""
    assert epsilon is not None
    task, device, scale = TASKS[name], torch.device(how["device"]), how["scale"]
    assert task.batch_rate is not None
    torch.manual_seed(how["seed"])
    model, batch = task.model().to(device), data.batch(np.arange(data.size))
    rate = how["lr"]
    kinds: dict[str, Any] = {"adam": torch.optim.Adam, "momentum": torch.optim.SGD}
    options = {"momentum": 0.9} if how["optimizer"] == "momentum" else {}
    optimizer: Any = kinds[how["optimizer"]](model.parameters(), lr=rate, **options)
    tensors = (torch.from_numpy(batch.features).to(device), torch.from_numpy(batch.labels).to(device))
    # Opacus would pick examples one by one.
    kind, join = (Picked, list) if group == "Opacus" else (torch.utils.data.TensorDataset, None)
    size = max(1, round(task.batch_rate * data.size))
    loader: Any = torch.utils.data.DataLoader(kind(*tensors), batch_size=size, collate_fn=join)
    key = name, group, epsilon, data.size
    steps = task.epochs * len(loader)
    if group == "Opacus":
        from opacus import PrivacyEngine
        from opacus.accountants.utils import get_noise_multiplier

        if key not in MULTIPLIERS:
            MULTIPLIERS[key] = get_noise_multiplier(
                target_epsilon=epsilon,
                target_delta=task.delta,
                sample_rate=1 / len(loader),
                epochs=task.epochs,
                accountant="prv",
            )
        model, optimizer, batches = PrivacyEngine().make_private(
            module=model, optimizer=optimizer, data_loader=loader, noise_multiplier=MULTIPLIERS[key], max_grad_norm=1.0
        )
    else:
        known = MULTIPLIERS.get(key)
        given: dict[str, Any] = {"epsilon": epsilon} if known is None else {"noise_multiplier": known}
        batches = make_private(model, optimizer, loader, delta=task.delta, epochs=task.epochs, **given)
        MULTIPLIERS[key] = batches._multipliers[0]
    step = 0
    for _ in range(task.epochs):
        for features, labels in batches:
            if how["schedule"] == "linear":
                for part in optimizer.param_groups:
                    part["lr"] = rate * (1.0 - step / steps)
            optimizer.zero_grad()
            (scale * nn.functional.cross_entropy(model(features.to(device)), labels.to(device))).backward()
            optimizer.step()
            step += 1
    model.eval()
    test = data.test_set()
    with torch.no_grad():
        scores = model(torch.from_numpy(test.features).to(device))
    right = (scores.argmax(1).cpu() == torch.from_numpy(test.labels)).float().mean()
    proved = None if group == "Opacus" or not how["final"] else batches.epsilon
    return {"accuracy": float(right), "proved": proved, "bits": None, "mechanism": "Poisson-sampled Gaussian"}


# ------------------------------------------------------------------ all of a task


def run_task(name: str, options: argparse.Namespace, console: Console) -> None:
    """Selects and trains all groups of a task that the file of results has not."""
    task, path = TASKS[name], options.out / f"{name}.jsonl"
    rows: list[dict[str, Any]] = []
    if path.exists():
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    data, part = task.data(), without_a_fifth(task.data())
    begun = time.perf_counter()

    def trained(group: Group, epsilon: float | None, setting: dict[str, Any], seed: int, final: bool) -> dict[str, Any]:
        wanted = {"group": group, "epsilon": epsilon, "setting": setting, "seed": seed, "final": final}
        for row in rows:
            if all(row[key] == value for key, value in wanted.items()):
                return row
        how = {**setting, "seed": seed, "final": final, "device": options.device}
        train = dp_sgd if group in ("DP-SGD", "Opacus") else rounds_of_clients
        start = time.perf_counter()
        try:
            found = train(name, group, epsilon, data if final else part, **how)
        except DivergedError as error:
            found = {"accuracy": 0.0, "proved": None, "bits": None, "mechanism": None, "failed": str(error)[:200]}
        row = {**wanted, **found, "seconds": round(time.perf_counter() - start, 2)}
        rows.append(row)
        with path.open("a") as file:
            file.write(json.dumps(row) + "\n")
        return row

    for group, epsilon in GROUPS:
        on_one_machine = group in ("DP-SGD", "Opacus")
        if (on_one_machine and task.batch_rate is None) or (group == "Opacus" and not options.opacus):
            continue
        if time.perf_counter() - begun > options.seconds:
            console.print("Out of time: run again to go on.")
            return
        tried = [trained(group, epsilon, each, 100, False) for each in drawn(group, options.tries)]
        best = max(tried, key=lambda row: row["accuracy"])
        ends = [trained(group, epsilon, best["setting"], seed, True) for seed in range(options.seeds)]
        words = group if epsilon is None else f"{group}, ε = {epsilon:g}"
        shown = ", ".join(f"{row['accuracy']:.2%}" for row in ends)
        console.print(
            f"{name}: {words}: {shown} (held back {best['accuracy']:.2%}, {time.perf_counter() - begun:.0f} s)"
        )


def prepare(folder: Path) -> None:
    """Copies the files that the tasks need into a folder, to be named by CPSGD_DATA_DIR elsewhere."""
    data = load_changelogs()
    owners = np.repeat(np.arange(data.size), data.counts(np.arange(data.size)))
    batch = data.batch(np.arange(data.size))
    folder.mkdir(parents=True, exist_ok=True)
    small = {"features": batch.features, "test_features": data.test_features, "test_labels": data.test_labels}
    arrays: dict[str, Any] = {key: value.astype(np.uint8) for key, value in {**small, "labels": batch.labels}.items()}
    np.savez_compressed(folder / TEXT, clients=owners, **arrays)
    shutil.copytree("/usr/share/datasets/fashion-mnist", folder / "fashion-mnist", dirs_exist_ok=True)


def finals(path: Path) -> dict[tuple[str, float | None], list[dict[str, Any]]]:
    """Returns the final trainings of a task by group and ε."""
    found: dict[tuple[str, float | None], list[dict[str, Any]]] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if row["final"]:
            found.setdefault((row["group"], row["epsilon"]), []).append(row)
    return found


def draw(folder: Path, console: Console) -> None:
    """Draws accuracy against ε for each task, and prints the table."""
    there = [name for name in TASKS if (folder / f"{name}.jsonl").exists()]
    figure = plotting.new_figure(3.6 * len(there), 3.6)
    for axes, name in zip(np.atleast_1d(figure.subplots(1, len(there))), there, strict=True):
        groups = finals(folder / f"{name}.jsonl")
        for (group, epsilon), rows in groups.items():
            accuracies = [row["accuracy"] for row in rows]
            proved = max((row["proved"] or math.nan for row in rows), default=math.nan)
            spread = f"{min(accuracies):.2%} to {max(accuracies):.2%}"
            bits = f"{rows[0]['bits']:g} bits" if rows[0]["bits"] else ""
            console.print(
                f"| {name} | {group} | {epsilon or ''} | {fmean(accuracies):.2%} | {spread} | {proved:.3f} | {bits} |"
            )
        for index, group in enumerate(("1 bit", "cancelling", "DP-SGD", "Opacus")):
            known = [epsilon for epsilon in EPSILONS if (group, epsilon) in groups]
            ends = [[100 * row["accuracy"] for row in groups[group, epsilon]] for epsilon in known]
            if known:
                axes.plot(known, [fmean(v) for v in ends], "o-", color=plotting.SEQUENCE[index], label=group)
        if ("no privacy", None) in groups:
            best = fmean(100 * row["accuracy"] for row in groups["no privacy", None])
            axes.axhline(best, color=plotting.INK, linewidth=1.2, label="no privacy")
        plotting.tidy(axes, title=name, xlabel="ε", ylabel="test accuracy, %")
        axes.set_xscale("log")
        axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8, labelcolor=plotting.INK, loc="lower right")
    plotting.save(figure, folder / "accuracy.png")


def main() -> None:
    """Reads the options, and does what they ask for."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    arguments.add_argument("--task", nargs="+", choices=list(TASKS), default=[])
    arguments.add_argument("--out", type=Path, default=Path("docs/results/beyond-mnist"))
    arguments.add_argument("--device", default="cpu")
    arguments.add_argument("--tries", type=int, default=6)
    arguments.add_argument("--seeds", type=int, default=3)
    arguments.add_argument("--seconds", type=float, default=1e6, help="begin no group of a task after this long")
    arguments.add_argument("--opacus", action="store_true", help="Opacus, too")
    arguments.add_argument("--prepare", type=Path, metavar="FOLDER", help="write the data that other machines need")
    arguments.add_argument("--draw", action="store_true", help="draw the results, and print a table")
    options = arguments.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False, width=140)
    if options.prepare:
        prepare(options.prepare)
    for name in options.task:
        run_task(name, options, console)
    if options.draw:
        draw(options.out, console)


if __name__ == "__main__":
    main()
