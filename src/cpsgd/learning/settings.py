"""What a training run is made of, as plain values: presets, TOML files and the command line all end here.

Nothing heavy is imported, so that settings can be read and refused before PyTorch is loaded.
"""

from __future__ import annotations

import json
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self

from cpsgd import _validate
from cpsgd.errors import ParameterError

NO_SEED = "none"
"""How files and the command line say that there is no seed."""

CHANGEABLE_ON_RESUME = frozenset({"memory_limit"})
"""Settings that say how a run is computed and not what: it may be resumed with others."""

# 16 TiB. Who gives more has most likely given bytes.
_MOST_MEMORY = 1 << 24


@dataclass(frozen=True, kw_only=True)
class Settings:
    """A run's settings. Checked where they are used: by the data set, the planner and the trainer.

    Attributes:
        preset: Name of the preset the others started from.
        dataset: Name of the data set.
        clients: Size of the population; the data set's own if None.
        model: Name of the model, as "mlp-60-60" or "linear".
        cohort: Clients in a round.
        rounds: Number of rounds.
        epsilon: ε that all rounds together may cost.
        delta: δ of the guarantee.
        bits: Bits a coordinate may take; the planner picks k, m and X.
        levels: k, with `trials` instead of a plan.
        trials: m, with `levels` instead of a plan.
        range: X, with `levels` and `trials`; the paper's choice if None.
        clip_norm: D, bound on an update's Euclidean norm.
        optimizer: The server's.
        lr: The server's learning rate.
        weight_decay: The server's: so much of each parameter is added to its gradient.
        schedule: "constant", or towards 0 after the last round: "linear", or "late", in the last three tenths.
        participation: "once", "every", "poisson" or "fixed-size".
        dropout: Probability with which a message does not arrive.
        examples: E, for the privacy of single examples, of which a client sends the sum of at most E gradients, each
            clipped to `clip_norm`; None for the privacy of whole clients.
        adjacency: "replace-one" or "zero-out"; the one the participation is accounted for if None.
        colluding: Clients of a round whose noise does not count because they may tell it.
        local_steps: Local SGD steps a client; 1 sends a gradient.
        local_lr: Learning rate of the local steps.
        seed: What the model's first weights, cohorts and noise follow from; None (in files "none") for randomness from
            the operating system, which is the default with a ledger.
        baselines: Whether the baselines are run, too.
        device: Where it is computed: cpu, cuda or auto.
        memory_limit: MiB that the clients computed together may take; 1,024, or on a GPU 4,096, if None.
        evaluate_every: The test set is looked at, and a checkpoint written, after every so many rounds.
        ledger: File of the privacy ledger that the rounds are charged to; None for none.
        population: With a ledger: whose budget pays.
    """

    preset: str
    dataset: str
    clients: int | None = None
    model: str = "mlp-60-60"
    cohort: int
    rounds: int
    epsilon: float = 2.0
    delta: float
    bits: float | None = 4.0
    levels: int | None = None
    trials: int | None = None
    range: float | None = None
    clip_norm: float = 1.0
    optimizer: str = "sgd"
    lr: float
    weight_decay: float = 0.0
    schedule: str = "constant"
    participation: str = "once"
    dropout: float = 0.0
    examples: int | None = None
    adjacency: str | None = None
    colluding: int = 0
    local_steps: int = 1
    local_lr: float | None = None
    seed: int | None = 0
    baselines: bool = True
    device: str = "cpu"
    memory_limit: int | None = None
    evaluate_every: int = 1
    ledger: str | None = None
    population: str | None = None

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """A preset ("digits" unless `values` names another) with some values changed.

        Raises:
            ParameterError: An unknown preset or setting, or a value of the wrong kind.

        Example:
            >>> Settings.of({"preset": "paper", "rounds": 250}).cohort
            10000
        """
        known = [field.name for field in fields(cls)]
        for name in values:
            if name not in known:
                raise ParameterError(f"Unknown setting {name!r}. Known are {', '.join(known)}.")
        changes: dict[str, Any] = {name: _checked(name, value) for name, value in values.items()}
        preset = changes.get("preset", "digits")
        if preset not in PRESETS:
            raise ParameterError(f"Unknown preset {preset!r}. Known are {', '.join(PRESETS)}.")
        if ("levels" in changes or "trials" in changes or "range" in changes) and "bits" not in changes:
            changes["bits"] = None
        if "dataset" in changes and "clients" not in changes:
            changes["clients"] = None  # the preset's number belongs to its own data set
        if changes.get("ledger") is not None and "seed" not in changes:
            changes["seed"] = None  # what is charged as private must not have the noise of a seed that everybody knows
        settings = cls(**{**asdict(PRESETS[preset]), **changes})
        if settings.explicit:
            if settings.bits is not None:
                raise ParameterError("Give bits, or levels and trials, not both: bits are what the planner is given.")
            if settings.levels is None or settings.trials is None:
                raise ParameterError("An explicit protocol needs both levels and trials (range is optional).")
        if settings.memory_limit is not None:
            _validate.integer("memory_limit (in MiB)", settings.memory_limit, low=1, high=_MOST_MEMORY)
        if (settings.ledger is None) != (settings.population is None):
            raise ParameterError("Give both ledger and population: a ledger may hold several budgets.")
        if settings.ledger is not None and settings.baselines:
            raise ParameterError(
                "Baselines look at the same people without a budget that would cover it; with a ledger, set baselines "
                "to false (--no-baselines)."
            )
        return settings

    @property
    def explicit(self) -> bool:
        """Whether k and m are given, instead of being planned."""
        return self.levels is not None or self.trials is not None or self.range is not None

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values, without those left open."""
        values = {**asdict(self), "seed": NO_SEED if self.seed is None else self.seed}
        return {name: value for name, value in values.items() if value is not None}


_DIGITS = Settings(
    preset="digits",
    dataset="infinite-digits",
    cohort=10_000,
    rounds=80,
    delta=1e-6,
    optimizer="momentum",
    lr=4.0,
)
_PAPER = Settings(
    preset="paper",
    dataset="infinite-mnist",
    clients=25_000_000,
    cohort=10_000,
    rounds=2_500,  # one epoch: 2,500 disjoint cohorts of 10,000 are all clients
    delta=1e-9,
    lr=6.0,
    weight_decay=1e-4,
    schedule="late",
)

PRESETS = {"digits": _DIGITS, "paper": _PAPER}
"""Runs that have a name."""

_KINDS: dict[str, type] = {
    "preset": str,
    "dataset": str,
    "clients": int,
    "model": str,
    "cohort": int,
    "rounds": int,
    "epsilon": float,
    "delta": float,
    "bits": float,
    "levels": int,
    "trials": int,
    "range": float,
    "clip_norm": float,
    "optimizer": str,
    "lr": float,
    "weight_decay": float,
    "schedule": str,
    "participation": str,
    "dropout": float,
    "examples": int,
    "adjacency": str,
    "colluding": int,
    "local_steps": int,
    "local_lr": float,
    "seed": int,
    "baselines": bool,
    "device": str,
    "memory_limit": int,
    "evaluate_every": int,
    "ledger": str,
    "population": str,
}


def _checked(name: str, value: object) -> object:
    if name == "seed" and value == NO_SEED:
        return None
    kind = _KINDS[name]
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _validate.finite(name, value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ParameterError(f"Expected {name} to be of type {kind.__name__}, got {reprlib.repr(value)}.")
    return value


def read_file(path: Path) -> dict[str, Any]:
    """The values in a TOML file, or in the JSON of a run directory.

    Raises:
        ParameterError: It is not such a file.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ParameterError(f"{path} cannot be read as {path.suffix[1:].upper() or 'TOML'}: {error}.") from None
    if not isinstance(values, dict):
        raise ParameterError(f"{path} does not hold settings.")
    return values
