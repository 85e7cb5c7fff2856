"""Canaries: gradients that a private loop puts into its own sums, so that the trained model can be audited.

A canary is the gradient of an example that nobody holds: as long as the clip norm, along one coordinate of the model.
A fair coin decides whether it is one of the examples; then it is drawn for batches as they are. Its coordinate of the
trained model tells, by how far it went against the canary's sign (`cpsgd.audit.one_run`). Canaries add nothing about
anybody's data, and the noise that they are in training grows with their number.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._durable import write_file
from cpsgd._torch import torch
from cpsgd.audit.one_run import OneRunReport, audit_scores
from cpsgd.errors import DamagedFileError, ParameterError
from cpsgd.randomness import Keystream

FILE = "canaries.json"
"""Name of the file beside an exported model."""

_FORMAT = "cpsgd canaries 1"
_FIELDS = ("format", "parameters", "coordinates", "signs", "included", "initial", "epsilon", "delta")
_WORD = 2.0**64


@dataclass(frozen=True)
class Canaries:
    """Canaries of one run of training.

    Attributes:
        coordinates: Coordinate of each among all trainable parameters in a row.
        signs: Direction of each, 1 or -1.
        included: Whether each is among the examples.
        initial: The model's parameters there before training.
    """

    coordinates: NDArray[np.int64]
    signs: NDArray[np.int64]
    included: NDArray[np.bool_]
    initial: NDArray[np.float64]

    @classmethod
    def draw(cls, count: int, parameters: torch.Tensor) -> Self:
        """Draws canaries for a model whose trainable parameters are in one row.

        Raises:
            ParameterError: There are fewer parameters than canaries.
        """
        if _validate.integer("canaries", count, low=1) > len(parameters):
            raise ParameterError(f"Expected at most {len(parameters):,} canaries, one per parameter, got {count:,}.")
        stream = Keystream()
        coordinates = np.argsort(stream.take(8 * len(parameters)).view("<u8"))[:count]
        coins = stream.take(2 * count).reshape(2, count) & 1
        initial = parameters.detach().double().cpu().numpy()[coordinates]
        return cls(coordinates, 2 * coins[0].astype(np.int64) - 1, coins[1].astype(bool), initial)

    def add_to(self, total: torch.Tensor, length: float, rate: float) -> None:
        """Adds those that are drawn for a batch to its sum, each of this length."""
        words = Keystream().take(8 * len(self.coordinates)).view("<u8")
        drawn = self.included & (words < rate * _WORD if rate < 1.0 else True)
        values = torch.from_numpy(self.signs[drawn] * length).to(total.device)
        total.index_add_(0, torch.from_numpy(self.coordinates[drawn]).to(total.device), values)

    def audit(
        self, parameters: torch.Tensor, *, claimed: float, delta: float, confidence: float = 0.95
    ) -> OneRunReport:
        """Returns what the trained parameters tell about which canaries were included."""
        final = parameters.detach().double().cpu().numpy()[self.coordinates]
        moved = np.nan_to_num(self.signs * (self.initial - final))
        return audit_scores(moved, self.included, claimed=claimed, delta=delta, confidence=confidence)

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns plain JSON values."""
        return {name: getattr(self, name).tolist() for name in ("coordinates", "signs", "included", "initial")}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the canaries that `to_dict` wrote; raises `ParameterError` if it is something else."""
        try:
            found = cls(
                np.asarray(data["coordinates"], dtype=np.int64),
                np.asarray(data["signs"], dtype=np.int64),
                np.asarray(data["included"], dtype=bool),
                np.asarray(data["initial"], dtype=np.float64),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ParameterError(f"These are not canaries as cpsgd writes them: {error!r:.200}.") from None
        lengths = {each.shape for each in (found.coordinates, found.signs, found.included, found.initial)}
        if len(lengths) != 1 or found.coordinates.ndim != 1:
            raise ParameterError("Canaries have as many coordinates as signs, coins and initial values.")
        return found


def write(folder: Path, canaries: Canaries, names: list[str], *, epsilon: float, delta: float) -> Path:
    """Writes canaries beside an exported model, with the (ε, δ) claimed; returns the path.

    `names` are those of the trainable parameters, in their order.
    """
    data = {"format": _FORMAT, "parameters": names, **canaries.to_dict(), "epsilon": epsilon, "delta": delta}
    write_file(folder / FILE, json.dumps(data).encode())
    return folder / FILE


def audit_folder(folder: Path, *, confidence: float = 0.95) -> OneRunReport:
    """Audits the model in a folder, `model.safetensors`, by the canaries beside it.

    Raises:
        ParameterError: There is no such model, or it was trained without canaries.
        DamagedFileError: The canaries do not fit the model.
    """
    from cpsgd.learning.export import MODEL

    for name in (MODEL, FILE):
        if not (folder / name).is_file():
            raise ParameterError(
                f"There is no {name} in {folder}. Train with canaries, make_private(..., canaries=1000), and call "
                "private.export(folder)."
            )
    try:
        from safetensors.torch import load_file
    except ImportError:
        raise ParameterError("Reading a model needs safetensors: pip install safetensors.") from None
    tensors = load_file(folder / MODEL)
    try:
        data = json.loads((folder / FILE).read_bytes())
        if not isinstance(data, dict) or set(data) != set(_FIELDS) or data["format"] != _FORMAT:
            raise DamagedFileError(f"{folder / FILE} does not hold canaries of this release.")
        canaries = Canaries.from_dict(data)
        row = torch.cat([tensors[name].flatten().double() for name in data["parameters"]])
        inside = canaries.coordinates.size and 0 <= canaries.coordinates.min() <= canaries.coordinates.max() < len(row)
        if not inside or not np.isin(canaries.signs, (-1, 1)).all():
            raise DamagedFileError(f"The canaries of {folder / FILE} are not of the model beside it.")
        claimed = _validate.positive("epsilon", data["epsilon"])
        return canaries.audit(
            row, claimed=claimed, delta=_validate.probability("delta", data["delta"]), confidence=confidence
        )
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"{folder / FILE} cannot be read: {error!r:.200}.") from None
