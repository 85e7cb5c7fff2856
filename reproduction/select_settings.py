"""Chooses the settings of presets and results, on held-back training images and with equal effort for all.

A fifth of the training images is held back and the infinite data set is made of the others, so that the test set is not
used. For training without privacy, and for each ε, number of bands of correlated noise and number of passes or of bits,
the same number of settings is tried by `many_runs`, which trains dozens at once:

1. `--tries` settings drawn at random (every private group tries the same ones),
2. half as many near the four best of them,
3. the six best of all with three other seeds. The best mean accuracy of these wins; the loss settles ties.

Without privacy nothing is clipped, and rates are drawn from a range for gradients as they are. With several passes the
noise is that of cohorts as many times as large; the gradient is the mean over `--cohort` clients, which is a stand-in
for the larger cohort's and a little noisier. `--few-bits` are those of `rounded-correlated`, whose noise is the plan's,
rounding and saturation included.

Each training is a line of `tries.jsonl` in `--out`, and those already there are not repeated. The choices are written
to `chosen.json`, beside those of other groups that it has.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from cpsgd.correlated.saturating import RoundedCorrelated
from cpsgd.correlated.weights import Correlation
from cpsgd.learning import mlp
from cpsgd.learning.datasets import load
from cpsgd.learning.datasets.infinite import InfiniteDataset
from cpsgd.learning.option_groups import Schedule
from cpsgd.planner import Plan, plan
from cpsgd.privacy import gdp_mu
from reproduction.many_runs import Noise, Optimizer, Outcome, Setting, train

DELTA = {"infinite-digits": 1e-6, "infinite-mnist": 1e-9}
ROUNDS = {"infinite-digits": 80, "infinite-mnist": 2_500}
HELD_BACK = 5
SEARCH_SEED, FINAL_SEEDS = 100, (101, 102, 103)
LEADERS, FINALISTS = 4, 6
FEW_BITS_BANDS = 129

CLIP_NORMS = (0.05, 2.0)
# Range of the rate times the clip norm, the longest step.
PRIVATE_RATES: dict[Optimizer, tuple[float, float]] = {
    "sgd": (0.5, 16.0),
    "momentum": (0.05, 1.6),
    "adam": (3e-4, 3e-2),
}
PLAIN_RATES: dict[Optimizer, tuple[float, float]] = {"sgd": (0.05, 2.0), "momentum": (5e-3, 0.2), "adam": (3e-4, 3e-2)}
SCHEDULES: tuple[Schedule, ...] = ("constant", "late", "linear")
DECAYS, AVERAGING = (0.0, 1e-5, 1e-4, 3e-4), (0.0, 0.9, 0.98, 0.995)


# Plans take seconds, and several seeds share one.
planned = lru_cache(plan)


@lru_cache(maxsize=1)
def data_set(name: str) -> InfiniteDataset:
    """Loads an infinite data set."""
    found = load(name)
    assert isinstance(found, InfiniteDataset)
    return found


@dataclass(frozen=True)
class Size:
    """The size of an experiment, for one pass: clients per round, rounds, parameters, and δ."""

    cohort: int
    rounds: int
    dim: int
    delta: float

    def plan(self, epsilon: float, clip_norm: float = 1.0, **requirements: Any) -> Plan:
        """Returns the plan for this ε."""
        cohort = requirements.pop("cohort", self.cohort)
        return planned(cohort, self.dim, epsilon, self.delta, clip_norm, rounds=self.rounds, **requirements)


@dataclass(frozen=True)
class Group:
    """Trainings that are compared with each other: those without privacy (ε infinite), or with this ε and noise.

    Attributes:
        epsilon: ε.
        bands: Rounds over which noise is correlated.
        passes: Rounds of a client.
        bits: Those of `rounded-correlated`; 0 for other noise.
    """

    epsilon: float
    bands: int = 1
    passes: int = 1
    bits: float = 0.0

    @property
    def private(self) -> bool:
        """Whether noise is added."""
        return math.isfinite(self.epsilon)

    def __str__(self) -> str:
        if not self.private:
            return "no privacy"
        more = f", {self.passes} passes" if self.passes > 1 else f", {self.bits:g} bits" if self.bits else ""
        return f"ε = {self.epsilon:g}, {self.bands} bands{more}"

    @property
    def fields(self) -> dict[str, float]:
        """The fields for a file, but for one pass and no bits."""
        usual = {"passes": 1, "bits": 0.0}
        return {name: value for name, value in asdict(self).items() if usual.get(name) != value}

    def noise(self, size: Size) -> Noise:
        """Returns the noise of a round's mean, for replace-one neighbours."""
        if not self.private:
            return Noise()
        if self.bits:
            mechanism = size.plan(self.epsilon, **few_bits(self.bands, self.bits)).protocol.mechanism
            assert isinstance(mechanism, RoundedCorrelated)
            unit = mechanism.step / math.sqrt(size.cohort)
            left = unit * math.sqrt(mechanism.noise.own_variance + 1.0 / 12.0)
            return Noise(unit * mechanism.noise_deviation, tuple(map(float, mechanism.noise.factors)), left)
        apart = None if self.passes == 1 else -(-size.rounds // self.passes)
        sensitivity = 2.0 * Correlation(self.bands, size.rounds, apart).sensitivity
        deviation = sensitivity / (self.passes * size.cohort * gdp_mu(self.epsilon, size.delta))
        return Noise(deviation, tuple(map(float, Correlation(self.bands, size.rounds).factors)))


def few_bits(bands: int, bits: float) -> dict[str, Any]:
    """Returns the requirements for correlated noise rounded at random to few bits; each client takes part once."""
    return {"bits": bits, "participation": "once", "correlated": bands, "mechanism": RoundedCorrelated.name}


@dataclass(frozen=True)
class Training:
    """One training to do, or done."""

    group: Group
    setting: Setting
    seed: int

    @property
    def key(self) -> str:
        """Key of the training in the file."""
        return json.dumps([self.group.fields, asdict(self.setting), self.seed])


class Trainings:
    """Trainings of one size, kept in a file."""

    def __init__(self, path: Path, data: InfiniteDataset, options: argparse.Namespace, console: Console) -> None:
        """Reads the trainings in the file."""
        self._path, self._data, self._options, self._console = path, data, options, console
        self._known: dict[str, Outcome] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                row = json.loads(line)
                self._known[json.dumps(row["training"])] = Outcome(**row["outcome"])

    def outcome(self, training: Training) -> Outcome:
        """Returns the outcome of a finished training."""
        return self._known[training.key]

    def do(self, trainings: Sequence[Training]) -> None:
        """Runs trainings that the file does not have, several of the same seed at once."""
        left = [t for t in trainings if t.key not in self._known]
        left.sort(key=lambda t: (t.seed, t.group.bands))
        while left:
            if time.monotonic() > self._options.until:
                raise TimeoutError(f"The time is up, with {len(left)} trainings left.")
            together = [t for t in left if t.seed == left[0].seed][: self._options.together]
            left = left[len(together) :]
            self._run(together)

    def _run(self, together: list[Training]) -> None:
        options, begun = self._options, time.perf_counter()
        outcomes = train(
            self._data,
            [t.setting for t in together],
            [t.group.noise(options.size) for t in together],
            cohort=options.size.cohort,
            rounds=options.size.rounds,
            seed=together[0].seed,
            device=torch.device(options.device),
        )
        with self._path.open("a") as file:
            for training, outcome in zip(together, outcomes, strict=True):
                self._known[training.key] = outcome
                file.write(json.dumps({"training": json.loads(training.key), "outcome": asdict(outcome)}) + "\n")
        best = max(outcome.accuracy for outcome in outcomes)
        self._console.print(f"{len(together)} trainings, {time.perf_counter() - begun:.1f} s, best {best:.2%}")


def with_validation(data: InfiniteDataset) -> InfiniteDataset:
    """Returns the infinite version of four fifths of the training images, with the others as the test set."""
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


def drawn(private: bool, count: int) -> list[Setting]:
    """Returns settings drawn at random."""
    random = np.random.default_rng(0)
    rates = PRIVATE_RATES if private else PLAIN_RATES
    found = []
    for _ in range(count):
        optimizer = cast(Optimizer, str(random.choice(list(rates))))
        clip_norm = _log_uniform(random, *CLIP_NORMS)
        rate = _log_uniform(random, *rates[optimizer])
        schedule = cast(Schedule, str(random.choice(SCHEDULES)))
        decay, averaging = float(random.choice(DECAYS)), float(random.choice(AVERAGING))
        if private and optimizer != "adam":
            rate /= clip_norm
        norm = _rounded(clip_norm) if private else math.inf
        found.append(Setting(optimizer, _rounded(rate), schedule, norm, decay, averaging, bool(random.random() < 0.5)))
    return found


def near(leaders: Sequence[Setting], count: int) -> list[Setting]:
    """Returns settings near these: other rates and clip norms, and sometimes another choice of the rest."""
    random = np.random.default_rng(1)
    found = []
    for index in range(count):
        leader = leaders[index % len(leaders)]
        shrink = math.exp(random.uniform(-0.7, 0.7)) if math.isfinite(leader.clip_norm) else 1.0
        rate = leader.rate * math.exp(random.uniform(-0.5, 0.5)) / (1.0 if leader.optimizer == "adam" else shrink)
        changed = replace(leader, rate=_rounded(rate), clip_norm=_rounded(leader.clip_norm * shrink))
        if random.random() < 0.4:
            changed = replace(changed, schedule=cast(Schedule, str(random.choice(SCHEDULES))))
        if random.random() < 0.4:
            changed = replace(changed, averaging=float(random.choice(AVERAGING)))
        if random.random() < 0.4:
            changed = replace(changed, weight_decay=float(random.choice(DECAYS)))
        if random.random() < 0.2:
            changed = replace(changed, normalised=not changed.normalised)
        found.append(changed)
    return found


def _log_uniform(random: np.random.Generator, low: float, high: float) -> float:
    return math.exp(random.uniform(math.log(low), math.log(high)))


def _rounded(value: float) -> float:
    return float(f"{value:.3g}")


def select(groups: Sequence[Group], trainings: Trainings, tries: int) -> dict[Group, Setting]:
    """Returns the chosen setting for each group."""

    def done(wanted: dict[Group, list[Setting]], seeds: Sequence[int]) -> None:
        trainings.do([Training(g, s, seed) for g, settings in wanted.items() for s in settings for seed in seeds])

    def ranked(group: Group, settings: Sequence[Setting], seeds: Sequence[int]) -> list[Setting]:
        def score(setting: Setting) -> tuple[float, float]:
            outcomes = [trainings.outcome(Training(group, setting, seed)) for seed in seeds]
            return -fmean(o.accuracy for o in outcomes), fmean(o.loss for o in outcomes)

        return sorted(dict.fromkeys(settings), key=score)

    tried = {group: drawn(group.private, tries) for group in groups}
    done(tried, [SEARCH_SEED])
    more = {g: near(ranked(g, s, [SEARCH_SEED])[:LEADERS], tries // 2) for g, s in tried.items()}
    done(more, [SEARCH_SEED])
    finalists = {g: ranked(g, tried[g] + more[g], [SEARCH_SEED])[:FINALISTS] for g in groups}
    done(finalists, FINAL_SEEDS)
    return {group: ranked(group, finalists[group], FINAL_SEEDS)[0] for group in groups}


def size_of(options: argparse.Namespace, data: InfiniteDataset) -> Size:
    """Returns the size that the options ask for."""
    dim = sum(p.numel() for p in mlp(data.feature_dim, data.classes).parameters())
    return Size(options.cohort, options.rounds or ROUNDS[options.dataset], dim, DELTA[options.dataset])


def groups_of(options: argparse.Namespace) -> list[Group]:
    """Returns the groups that the options ask for, that without privacy first."""
    bands = min(FEW_BITS_BANDS, options.size.rounds)
    few = [Group(epsilon, bands, bits=bits) for epsilon, bits in product(options.epsilon, options.few_bits)]
    return [Group(math.inf), *few, *(Group(*each) for each in product(options.epsilon, options.bands, options.passes))]


def add_size(arguments: argparse.ArgumentParser) -> None:
    """Adds the options that this program shares with `reproduction.correlated`."""
    arguments.add_argument("--out", type=Path, required=True, help="folder of all files")
    arguments.add_argument("--dataset", choices=list(DELTA), default="infinite-mnist")
    arguments.add_argument("--device", default="cuda", help="cpu or cuda")
    arguments.add_argument("--cohort", type=int, default=10_000, help="clients per round, for one pass")
    arguments.add_argument("--rounds", type=int, help="those of the preset if not given")
    arguments.add_argument("--budget", type=float, default=math.inf, help="seconds after which nothing more is begun")


def main(arguments_given: Sequence[str] | None = None) -> None:
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add_size(arguments)
    arguments.add_argument("--epsilon", type=float, nargs="+", default=[2.0])
    arguments.add_argument("--bands", type=int, nargs="*", default=[1], help="of correlated noise; 1 is independent")
    arguments.add_argument("--passes", type=int, nargs="+", default=[1], help="over all clients, in larger cohorts")
    arguments.add_argument("--few-bits", type=float, nargs="*", default=[], help="of correlated noise in few bits")
    arguments.add_argument("--tries", type=int, default=48, help="settings drawn at random for each group")
    arguments.add_argument("--together", type=int, default=32, help="trainings at once")
    options = arguments.parse_args(arguments_given)
    options.until = time.monotonic() + options.budget
    console = Console(highlight=False)
    whole = data_set(options.dataset)
    options.size = size_of(options, whole)
    options.out.mkdir(parents=True, exist_ok=True)
    trainings = Trainings(options.out / "tries.jsonl", with_validation(whole), options, console)
    chosen = select(groups_of(options), trainings, options.tries)

    table = Table("", "setting", "held-back accuracy", title="Chosen")
    path, rows = options.out / "chosen.json", []
    for group, setting in chosen.items():
        found = [trainings.outcome(Training(group, setting, seed)).accuracy for seed in FINAL_SEEDS]
        table.add_row(str(group), str(setting), f"{fmean(found):.2%} ({min(found):.2%} to {max(found):.2%})")
        rows.append({**group.fields, "epsilon": group.epsilon if group.private else None, **asdict(setting)})
        rows[-1]["clip_norm"] = setting.clip_norm if math.isfinite(setting.clip_norm) else None
        rows[-1]["held_back_accuracy"] = found
    console.print(table)

    def names(row: dict[str, Any]) -> tuple[float | None, ...]:
        return row["epsilon"], row["bands"], row.get("passes", 1), row.get("bits", 0.0)

    before = json.loads(path.read_text()) if path.exists() else []
    rows = [row for row in before if names(row) not in set(map(names, rows))] + rows
    path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
