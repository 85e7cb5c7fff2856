"""Canaries: made-up gradients in a training's own sums, by which the trained model can be audited.

A canary is as long as the clip norm, along one coordinate of the model. In a private loop a fair coin decides whether
it is one of the examples; then it is drawn for batches as they are. In a `Trainer`'s run clients of their own hold
canaries (`CanaryClients`). The released means tell, by its coordinate, whether a canary was trained on
(`cpsgd.audit.one_run`): all that ε covers is in them, and models follow from them. Canaries add nothing about anybody's
data. They disturb the training as noise does, the more of them there are.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from cpsgd import _validate
from cpsgd._durable import write_file
from cpsgd._torch import torch
from cpsgd.audit.one_run import FEWEST, OneRunReport, audit_scores
from cpsgd.codec import clip
from cpsgd.errors import DamagedFileError, ParameterError
from cpsgd.learning import estimators, export
from cpsgd.learning.estimators import Estimator
from cpsgd.neighbours import Adjacency, Scheme
from cpsgd.privacy.one_example import example_norm
from cpsgd.randomness import Keystream

FILE = "canaries.json"
"""Name of the file beside an exported model."""

_FORMAT = "cpsgd canaries 1"
_ARRAYS = {"coordinates": np.int64, "signs": np.int64, "included": np.bool_, "scores": np.float64}
_FIELDS = ("format", "sha256", *_ARRAYS, "epsilon", "delta", "unit")
_WORD = 2.0**64
# Rows of canaries' clients that are written out at a time.
_ROWS = 64


@dataclass(frozen=True)
class Canaries:
    """Canaries of one run of training.

    Attributes:
        coordinates: Coordinate of each among all trainable parameters in a row.
        signs: Direction of each, 1 or -1.
        included: Whether each was trained on.
        scores: Sum of the released means so far along each canary, minus the known contribution of others.
    """

    coordinates: NDArray[np.int64]
    signs: NDArray[np.int64]
    included: NDArray[np.bool_]
    scores: NDArray[np.float64]

    @classmethod
    def draw(cls, count: int, dim: int, *, seed: int | None = None) -> Self:
        """Draws canaries for a model of `dim` trainable parameters, from private randomness unless there is a seed.

        Raises:
            ParameterError: There are fewer parameters than canaries, or too few canaries for an audit.
        """
        if _validate.integer("canaries", count, low=FEWEST) > dim:
            raise ParameterError(f"Expected at most {dim:,} canaries, one per parameter, got {count:,}.")
        stream = Keystream(None if seed is None else hashlib.sha256(b"cpsgd canaries v1 %d" % seed).digest()[:16])
        coordinates = np.argsort(stream.take(8 * dim).view("<u8"))[:count]
        coins = stream.take(2 * count).reshape(2, count) & 1
        return cls(coordinates, 2 * coins[0].astype(np.int64) - 1, coins[1].astype(bool), np.zeros(count))

    def add_to(self, total: torch.Tensor, length: float, rate: float) -> None:
        """Draws canaries for a batch and adds them to its sum, each with this length."""
        words = Keystream().take(8 * len(self.coordinates)).view("<u8")
        drawn = self.included & (words < rate * _WORD if rate < 1.0 else True)
        values = torch.from_numpy(self.signs[drawn] * length).to(total.device)
        total.index_add_(0, torch.from_numpy(self.coordinates[drawn]).to(total.device), values)

    def observe(self, mean: torch.Tensor, some: NDArray[np.int64] | slice = slice(None)) -> None:
        """Adds a released mean, less everybody else's part, to the scores of all canaries or of some."""
        places = torch.from_numpy(self.coordinates[some]).to(mean.device)
        self.scores[some] += self.signs[some] * mean.detach()[places].double().cpu().numpy()

    def audit(self, *, epsilon: float, delta: float, unit: str, confidence: float = 0.95) -> OneRunReport:
        """Returns a lower bound on ε from the released means and the canaries, beside the claimed (ε, δ)."""
        scores = np.nan_to_num(self.scores)
        return audit_scores(scores, self.included, claimed=epsilon, delta=delta, unit=unit, confidence=confidence)

    def to_dict(self) -> dict[str, list[Any]]:
        """Returns plain JSON values."""
        return {name: getattr(self, name).tolist() for name in _ARRAYS}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Returns the canaries that `to_dict` wrote; raises `ParameterError` for any other data."""
        try:
            found = cls(**{name: np.asarray(data[name], dtype=kind) for name, kind in _ARRAYS.items()})
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ParameterError(f"These are not canaries as cpsgd writes them: {error!r:.200}.") from None
        if {getattr(found, name).shape for name in _ARRAYS} != {(found.coordinates.size,)}:
            raise ParameterError("Canaries have as many coordinates as signs, coins and scores.")
        return found


class CanaryClients:
    """The clients of a run who hold canaries and no data, numbered after all others.

    Where clients are protected, each is a canary; where single examples are, it holds as many as a client has examples.
    One that was left out is what neighbours are: the zero vector, or for replace-one neighbours the opposite one.

    Attributes:
        canaries: The canaries.
        others: Everybody else's part of the next mean, without noise, which the guarantee lets an attacker know.
    """

    others: torch.Tensor

    def __init__(
        self,
        canaries: Canaries,
        estimator: Estimator,
        first: int,
        dim: int,
        *,
        examples: int | None,
        adjacency: str | None,
    ) -> None:
        """Numbers the clients from `first` on. In a run without privacy they send zeros.

        Raises:
            ParameterError: The plan assumes a smaller distance between clients than canaries have.
        """
        protocol, length = estimators.protocol_of(estimator), estimators.clip_norm(estimator)
        if protocol is not None and protocol.distance_reason is not None:
            raise ParameterError("The plan has a replace_one_distance, and canaries are further apart: leave one out.")
        if examples is not None:
            length = example_norm(length, examples)
        # A little shorter, so that clipping leaves them as they are.
        length *= (1.0 - 2.0 * clip.MARGIN) if estimators.is_private(estimator) else 0.0
        self.canaries = canaries
        self._first, self._dim, self._each = first, dim, examples or 1
        self._lengths = (-length if adjacency == Adjacency.REPLACE_ONE else 0.0, length)

    def holds(self, clients: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Returns which of these clients hold canaries."""
        return clients >= self._first

    def rows(self, clients: NDArray[np.int64]) -> Iterator[Any]:
        """Yields the vectors of clients who hold canaries, some rows of float32 at a time."""
        for start in range(0, len(clients), _ROWS):
            some = clients[start : start + _ROWS]
            vectors = np.zeros((len(some), self._dim), dtype=np.float32)
            for vector, client in zip(vectors, some, strict=True):
                own = self._held(np.array([client]))
                canaries = self.canaries
                lengths = np.where(canaries.included[own], self._lengths[1], self._lengths[0])
                vector[canaries.coordinates[own]] = canaries.signs[own] * lengths
            yield vectors

    def observe(self, mean: torch.Tensor, clients: NDArray[np.int64], scheme: Scheme) -> None:
        """Adds the released mean of a cohort to its canaries' scores; to all where the guarantee needs a secret cohort.

        Clients of a cohort of fixed size are not drawn independently: there others' part tells about canaries, too.
        """
        part = mean if scheme == "fixed-size" else mean - self.others
        secret = scheme in ("poisson", "fixed-size")
        self.canaries.observe(part, slice(None) if secret else self._held(clients[self.holds(clients)]))

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return self.canaries.to_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self.canaries = Canaries.from_dict(state)

    def _held(self, clients: NDArray[np.int64]) -> NDArray[np.int64]:
        """Returns the numbers of the canaries that these clients hold."""
        held = ((clients - self._first)[:, None] * self._each + np.arange(self._each)).ravel()
        return held[held < len(self.canaries.coordinates)]


def export_audited(
    folder: Path, model: torch.nn.Module, privacy: Mapping[str, Any] | None, canaries: Canaries | None, **sections: Any
) -> tuple[Path, ...]:
    """Writes a model and its card; with canaries and a guarantee also an audit in the card, and the canaries."""
    if canaries is None or privacy is None:
        return export.write(folder, model, privacy, **sections)
    claim = {name: privacy[name] for name in ("epsilon", "delta", "unit")}
    written = export.write(folder, model, privacy, audit=canaries.audit(**claim).to_dict(), **sections)
    data = {"format": _FORMAT, "sha256": _digest(folder), **canaries.to_dict(), **claim}
    write_file(folder / FILE, json.dumps(data).encode())
    return *written, folder / FILE


def audit_folder(folder: Path, *, confidence: float = 0.95) -> OneRunReport:
    """Audits the model in a folder, `model.safetensors`, by the canaries beside it.

    Raises:
        ParameterError: There is no such model, or it was trained without canaries.
        DamagedFileError: The canaries are not of this model.
    """
    for name in (export.MODEL, FILE):
        if not (folder / name).is_file():
            raise ParameterError(
                f"There is no {name} in {folder}. Train with canaries: cpsgd train --canaries 1000, or "
                "make_private(..., canaries=1000) and private.export(folder)."
            )
    try:
        data = json.loads((folder / FILE).read_bytes())
        if not isinstance(data, dict) or set(data) != set(_FIELDS) or data["format"] != _FORMAT:
            raise DamagedFileError(f"{folder / FILE} does not hold canaries of this release.")
        if data["sha256"] != _digest(folder):
            raise DamagedFileError(f"The canaries of {folder / FILE} are not of the model beside it.")
        claim: dict[str, Any] = {
            "epsilon": _validate.positive("epsilon", data["epsilon"]),
            "delta": _validate.fraction("delta", data["delta"]),
            "unit": _validate.choice("unit", data["unit"], ("client", "example")),
        }
        return Canaries.from_dict(data).audit(**claim, confidence=confidence)
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        if isinstance(error, DamagedFileError):
            raise
        raise DamagedFileError(f"{folder / FILE} cannot be read: {error!r:.200}.") from None


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / export.MODEL).read_bytes()).hexdigest()
