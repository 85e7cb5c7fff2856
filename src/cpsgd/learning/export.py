"""Export of a trained model: `model.safetensors`, and a model card in JSON with the guarantee and its theorem.

The card holds the model's SHA-256. Each file is replaced atomically, the card last. Neither holds anything that must
stay secret: no seed, no key of the cohorts, no fingerprint of the data.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cpsgd import __version__
from cpsgd._durable import write_file
from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.datasets.populations import Dataset
from cpsgd.learning.metrics import RoundMetrics, disk_errors
from cpsgd.learning.models import trainable
from cpsgd.privacy.guarantees import Guarantee

MODEL, CARD = "model.safetensors", "model-card.json"
_FORMAT = "cpsgd model card 1"
# Settings that follow from something private, or that stand elsewhere on the card.
_LEFT_OUT = ("seed", "parameters", "dataset", "population", "delta", "adjacency", "colluding")


def check() -> None:
    """Raises `ParameterError` if models cannot be written, so that this is known before a long run."""
    _saver()


def privacy_facts(guarantee: Guarantee | None, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the card's entries about privacy; None for a run without privacy."""
    if guarantee is None:
        return None
    simulated = config["seed"] is not None or config["device"] != "cpu"
    noise = "follows from a seed or a counter: a simulation, which protects nobody" if simulated else "secret"
    run = guarantee.run
    return {
        "protects": "nobody" if simulated else f"one {run.conditions.unit}",
        "epsilon": guarantee.epsilon,
        "delta": guarantee.delta,
        "unit": run.conditions.unit,
        "adjacency": str(run.adjacency),
        "participation": str(run.participation),
        "rounds": run.rounds,
        "noise_clients": run.honest,
        "colluding": run.colluding,
        "theorem": {"method": guarantee.method, "citation": guarantee.citation},
        "assumption": guarantee.assumption,
        "noise": noise,
        "cohorts": "the draw of cohorts must stay secret" if run.participation.sampled else "may be known",
    }


def write(
    folder: Path,
    model: torch.nn.Module,
    privacy: Mapping[str, Any] | None,
    **sections: Any,
) -> tuple[Path, Path]:
    """Writes the model and its card, with further sections by name, into a folder; returns their paths."""
    # Copies, because parameters that share memory are refused.
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in model.state_dict().items()}
    content: bytes = _saver()(tensors, metadata={"format": "pt"})
    card = {
        "format": _FORMAT,
        "software": {"cpsgd": __version__, "torch": str(torch.__version__)},
        "model": {
            "file": MODEL,
            "sha256": hashlib.sha256(content).hexdigest(),
            "class": type(model).__name__,
            "parameters": sum(p.numel() for p in model.parameters()),
            "trained_parameters": sum(p.numel() for p in trainable(model).values()),
        },
        "privacy": privacy,
        **sections,
    }
    with disk_errors(folder, "The run is as it was: make room, and export again."):
        folder.mkdir(parents=True, exist_ok=True)
        write_file(folder / MODEL, content)
        write_file(folder / CARD, (json.dumps(card, indent=2, ensure_ascii=False) + "\n").encode())
    return folder / MODEL, folder / CARD


def run_sections(dataset: Dataset, config: Mapping[str, Any], history: Sequence[RoundMetrics]) -> dict[str, Any]:
    """Returns the card's sections about the data, the settings and the results of a `Trainer`'s run."""
    last = history[-1] if history else None
    return {
        "data": {"name": dataset.name, "source": dataset.source, "clients": dataset.size, "classes": dataset.classes},
        "settings": {name: value for name, value in config.items() if name not in _LEFT_OUT},
        "results": last and {name: getattr(last, name) for name in ("round", "loss", "accuracy", "r_squared")},
    }


def _saver() -> Any:
    try:
        from safetensors.torch import save
    except ImportError:
        raise ParameterError("Writing a model needs safetensors: pip install safetensors.") from None
    return save
