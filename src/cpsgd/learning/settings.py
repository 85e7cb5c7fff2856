"""`Settings`: all settings of `cpsgd train` as plain values, from presets, TOML files and the command line.

Nothing heavy is imported, so that settings can be read and refused before PyTorch is loaded.
"""

from __future__ import annotations

import json
import reprlib
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from difflib import get_close_matches
from enum import StrEnum
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any, Literal, Self, get_args, get_origin, get_type_hints

from cpsgd import _validate
from cpsgd.errors import ParameterError
from cpsgd.learning.option_groups import (
    AccountOptions,
    ClientOptions,
    CohortOptions,
    OptimizerName,
    OptionGroup,
    RunOptions,
    Schedule,
    ServerOptions,
)
from cpsgd.neighbours import Scheme
from cpsgd.registry import MechanismOptions, parameters_of, required

NO_SEED = "none"
"""Text for no seed in files and on the command line."""

AUTO = "auto"
"""Text for a number that is to be chosen."""

OWN = "own"
"""Name of the preset and of the data set for a user's own data."""

CHANGEABLE_ON_RESUME = frozenset({"memory_limit"})
"""Settings that do not change a run's results; it may be resumed with other values."""


@dataclass(frozen=True, kw_only=True)
class TaskOptions(OptionGroup):
    """The data and the model.

    Attributes:
        preset: Settings to start from: digits or paper; own, the default with `data`.
        dataset: The data set: digits, infinite-digits, mnist, infinite-mnist or fashion-mnist.
        data: Your own data instead: module:function, where the function returns a data set of
            cpsgd.learning.datasets, or one with a model, or with a model and a loss.
        clients: Number of clients in the population; by default all of the data set's.
        model: The model: linear, or mlp with the widths of its hidden layers, as mlp-60-60; scaled-mlp-60-60 scales
            shades first.
        passes: Number of times that each client takes part, in cohorts as large as that needs for `rounds`; auto
            chooses it, the bands of correlated noise and the bits. It takes the place of `cohort` and `participation`.
        uplink: With `passes`, the most bytes that a client may send over the whole training.
        downlink: With `passes`, the most bytes that a client may receive over the whole training.
        baselines: Run the baselines, too: without privacy, with Gaussian noise, rounded without noise, and as private
            with 4 bits if the run has fewer.
    """

    preset: str
    dataset: str
    data: str | None = None
    clients: int | None = None
    model: str = "mlp-60-60"
    passes: str | None = None
    uplink: float | None = None
    downlink: float | None = None
    baselines: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.passes is None and (self.uplink is not None or self.downlink is not None):
            raise ParameterError("uplink and downlink limit passes over the clients: give passes, a number or auto.")
        if self.passes is not None and self.passes != AUTO and not self.passes.isdecimal():
            raise ParameterError(f"Expected passes to be a number or {AUTO}, got passes={self.passes!r:.50}.")


@dataclass(frozen=True, kw_only=True)
class ProtocolOptions(MechanismOptions, OptionGroup):  # type: ignore[misc]  # made of the registry
    """The protocol: a number of bits, for which it is planned, or the mechanism's parameters.

    Attributes:
        bits: Bits per coordinate that a client may send, for which the planner picks the mechanism and its parameters.
            By default 1 for the presets, which simulate a deployment. With data of your own nothing is sent, and bits
            and correlation are chosen for accuracy.
        clip_norm: Largest Euclidean norm of an update, D; longer ones are scaled down to it; 1 by default. With
            `examples`, it is that of each example's gradient.
        correlated: Number of rounds that each draw of noise is part of, if later rounds are to cancel noise of earlier
            ones; "auto" chooses it for the optimizer and its schedule. Without `bits` the fewest bits that come near
            the best are taken.
    """

    bits: float | None = 1.0
    clip_norm: float = 1.0
    correlated: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.explicit:
            return
        given = parameters_of(self)
        if self.correlated is not None:
            raise ParameterError(
                f"correlated={self.correlated} is what the planner is given: leave it out, or the mechanism's "
                f"parameters {', '.join(given)}."
            )
        if self.bits is not None:
            raise ParameterError(
                f"Give bits, or {', '.join(given)}, not both: bits are what the planner is given, which chooses the "
                "rest."
            )
        needed = [name for name in required(self.mechanism, given) if name != "range"]
        if not given.keys() >= set(needed):
            both = "both " if len(needed) == 2 else ""
            raise ParameterError(f"An explicit protocol needs {both}{' and '.join(needed)} (range is optional).")

    @property
    def explicit(self) -> bool:
        """Whether the user gives the mechanism's parameters, so that they are not planned."""
        return bool(parameters_of(self))


# Fields are in the order of the bases, the last base first.
@dataclass(frozen=True, kw_only=True)
class Settings(RunOptions, ServerOptions, ClientOptions, ProtocolOptions, AccountOptions, CohortOptions, TaskOptions):
    """All settings of a run, flat. It is an instance of each of its groups.

    Fields that are repeated here have another default, or fewer choices, than in Python.
    """

    rounds: int = field()
    participation: Scheme = "once"
    epsilon: float = 2.0
    delta: float = 1e-6
    colluding: int = 0
    ledger: str | None = None
    witness: str | None = None
    optimizer: OptimizerName = "sgd"
    schedule: Schedule = "constant"
    seed: int | None = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.ledger is not None and self.baselines:
            raise ParameterError(
                "Baselines look at the same people without a budget that would cover it; with a ledger, set baselines "
                "to false (--no-baselines)."
            )

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Self:
        """Returns a preset ("digits" unless `values` names another) with some values changed.

        Raises:
            ParameterError: An unknown preset or setting, or a value of the wrong kind.

        Example:
            >>> Settings.of({"preset": "paper", "rounds": 250}).cohort
            10000
        """
        known = [entry.name for entry in fields(cls)]
        for name in values:
            if name not in known:
                meant = "".join(f" Did you mean {near!r}?" for near in get_close_matches(name, known, 1))
                raise ParameterError(f"Unknown setting {name!r}.{meant} Known are {', '.join(known)}.")
        changes: dict[str, Any] = {name: _checked(name, value) for name, value in values.items()}
        own = changes.get("data") is not None
        preset = _validate.choice("preset", changes.get("preset", OWN if own else "digits"), tuple(PRESETS))
        other = changes.get("dataset", OWN) != OWN or changes.get("clients") is not None
        if own != (preset == OWN) or (own and other):
            raise ParameterError(
                f"Give data of your own, or a dataset with its number of clients, not both; the preset is {OWN!r} with "
                "data, and never without."
            )
        if own and changes.get("passes") is not None:
            changes.setdefault("cohort", 1)  # what the passes need is known when the data is
        if own and "cohort" not in changes:
            raise ParameterError("Missing cohort: with data of your own, say how many clients take part per round.")
        spelled_out = {entry.name for entry in fields(MechanismOptions) if entry.name != "mechanism"}
        if spelled_out & changes.keys() and "bits" not in changes:
            changes["bits"] = None
        if (own or changes.get("correlated") is not None) and "bits" not in changes:
            # Data of one's own are trained on one machine: nothing is sent that would have to be short. And one bit
            # has no room for the noise of earlier rounds.
            changes["bits"] = None
        if changes.get("passes") is not None:
            if chosen := sorted({"cohort", "participation"} & changes.keys()):
                raise ParameterError(f"passes takes the place of {' and '.join(chosen)}: leave one of them out.")
            changes |= {"participation": "apart"}
            if changes["passes"] == AUTO and "bits" not in changes:
                changes["bits"] = None
        if "dataset" in changes and "clients" not in changes:
            changes["clients"] = None  # the preset's number belongs to its own data set
        if "seed" not in changes and (own or changes.get("ledger") is not None):
            changes["seed"] = None  # noise from a known seed protects nobody: it is for data that everybody has
        return cls(**{**PRESETS[preset], "preset": preset, **changes})

    @property
    def for_accuracy(self) -> bool:
        """Whether the protocol is chosen for accuracy alone: the data is the user's own and no limit on bits is set."""
        return self.data is not None and self.bits is None and self.correlated is None and not self.explicit

    def to_dict(self) -> dict[str, Any]:
        """Returns plain JSON values, without those that are None or replaced by `passes`."""
        values = {**asdict(self), "seed": NO_SEED if self.seed is None else self.seed}
        if self.passes is not None:
            values |= {"cohort": None, "participation": None}
        return {name: value for name, value in values.items() if value is not None}


PRESETS: dict[str, dict[str, Any]] = {
    "digits": {"dataset": "infinite-digits", "cohort": 10_000, "rounds": 80, "optimizer": "momentum", "lr": 4.0},
    "paper": {
        # One epoch: 2,500 disjoint cohorts of 10,000 are all clients.
        **{"dataset": "infinite-mnist", "clients": 25_000_000, "cohort": 10_000, "rounds": 2_500, "delta": 1e-9},
        **{"lr": 6.0, "weight_decay": 1e-4, "schedule": "late"},
    },
    OWN: {"dataset": OWN, "rounds": 50, "optimizer": "momentum", "lr": 0.1},
}
"""Named settings: the values that differ from the defaults."""

_SELECTED = {"model": "scaled-mlp-60-60", "optimizer": "adam", "averaging": 0.9}
WITHOUT_PRIVACY: dict[str, dict[str, Any]] = {
    "digits": {**_SELECTED, "lr": 0.0319, "weight_decay": 3e-4, "schedule": "linear"},
    "paper": {**_SELECTED, "lr": 0.00463, "weight_decay": 1e-4, "schedule": "late"},
}
"""Settings of a preset's run without privacy. They were selected for it alone, without clipping and with as many tries
as the private settings (`reproduction/select_settings.py`). The private run's settings would make it look worse."""

_TASK = ("dataset", "clients", "model", "cohort", "rounds", "local_steps", "examples")


def without_privacy(settings: Settings) -> Settings | None:
    """Returns the settings of the run without privacy that the private one is compared with.

    They are None if the task is not the preset's; the baseline then has the private run's settings.
    """
    preset = settings.preset
    if preset not in WITHOUT_PRIVACY:
        return None
    original = Settings.of({"preset": preset})
    if any(getattr(settings, name) != getattr(original, name) for name in _TASK):
        return None
    return replace(settings, **{"weight_decay": 0.0, "averaging": None, **WITHOUT_PRIVACY[preset]})


@cache
def _kinds() -> dict[str, Any]:
    """Returns the type of each setting, or a `Literal` of its choices."""
    hints = get_type_hints(Settings)
    return {
        name: hint if get_origin(hint) is Literal else next(k for k in (*get_args(hint), hint) if k is not NoneType)
        for name, hint in hints.items()
    }


def _checked(name: str, value: object) -> object:
    """Returns the value if it has the setting's type; otherwise raises `ParameterError`."""
    if name == "seed" and value == NO_SEED:
        return None
    if name in ("correlated", "passes") and isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    kind = _kinds()[name]
    if get_origin(kind) is Literal or issubclass(kind, StrEnum):
        return _validate.choice(name, value, get_args(kind) or list(kind))
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return _validate.finite(name, value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ParameterError(f"Expected {name} to be of type {kind.__name__}, got {reprlib.repr(value)}.")
    return value


def read_file(path: Path) -> dict[str, Any]:
    """Returns the values in a TOML file, or in the JSON of a run directory.

    Raises:
        ParameterError: The file cannot be read as such.
    """
    try:
        text = path.read_text(encoding="utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ParameterError(f"{path} cannot be read as {kind}: {error}.") from None
    if not isinstance(values, dict):
        raise ParameterError(f"{path} does not hold settings.")
    return values
