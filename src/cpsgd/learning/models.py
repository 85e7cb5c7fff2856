"""Models to start from."""

from __future__ import annotations

from itertools import pairwise

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import ParameterError


def mlp(features: int, classes: int, hidden: tuple[int, ...] = (60, 60), *, seed: int | None = None) -> torch.nn.Module:
    """Fully connected layers with ReLUs between them; by default the network of the paper's experiment.

    A `seed` makes the initial weights (PyTorch's usual ones) repeatable, without touching PyTorch's global generator.

    Example:
        >>> sum(p.numel() for p in mlp(784, 10).parameters())
        51370
    """
    widths = [_validate.integer("features", features, low=1)]
    widths += [_validate.integer("hidden", width, low=1) for width in hidden]
    widths.append(_validate.integer("classes", classes, low=1))
    layers: list[torch.nn.Module] = []
    with torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(_validate.integer("seed", seed, low=0, high=2**63 - 1))
        for width, following in pairwise(widths):
            layers += [torch.nn.Linear(width, following), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


def by_name(name: str, features: int, classes: int, *, seed: int | None = None) -> torch.nn.Module:
    """A model from a short text: "linear", or "mlp" with widths, as "mlp-60-60".

    Example:
        >>> by_name("linear", 64, 10)
        Sequential(
          (0): Linear(in_features=64, out_features=10, bias=True)
        )
    """
    kind, *widths = name.split("-")
    if (kind == "linear" and not widths) or (kind == "mlp" and all(width.isdecimal() for width in widths)):
        hidden = () if kind == "linear" else tuple(int(width) for width in widths) or (60, 60)
        return mlp(features, classes, hidden, seed=seed)
    raise ParameterError(f"Unknown model {name!r}. Known are 'linear', 'mlp' and 'mlp-' with widths, as 'mlp-60-60'.")
