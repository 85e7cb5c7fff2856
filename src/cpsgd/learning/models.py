"""Models to start from."""

from __future__ import annotations

from itertools import pairwise

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import ParameterError

# Mean and standard deviation of MNIST's shades, which everybody knows: nothing is computed from anybody's examples.
_SHIFT, _SCALE = 0.1307, 0.3081


class Scaled(torch.nn.Module):
    """Features less a number and over another, by default those for the shades of handwritten digits."""

    def __init__(self, shift: float = _SHIFT, scale: float = _SCALE) -> None:
        super().__init__()
        self.shift = _validate.finite("shift", shift)
        self.scale = _validate.positive("scale", scale)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """The scaled features."""
        return (features - self.shift) / self.scale

    def write(self, features: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the scaled features."""
        torch.div(features - self.shift, self.scale, out=out)

    def extra_repr(self) -> str:
        """What `repr` shows of it."""
        return f"shift={self.shift:g}, scale={self.scale:g}"


def mlp(
    features: int,
    classes: int,
    hidden: tuple[int, ...] = (60, 60),
    *,
    scaled: bool = False,
    seed: int | None = None,
) -> torch.nn.Module:
    """Fully connected layers with ReLUs between them; by default the network of the paper's experiment.

    Where `scaled`, a layer `Scaled` comes first, without parameters: clipped gradients then tell more. A `seed` makes
    the initial weights (PyTorch's usual ones) repeatable, without touching PyTorch's global generator.

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
    return torch.nn.Sequential(*[Scaled()] * scaled, *layers[:-1])


def by_name(name: str, features: int, classes: int, *, seed: int | None = None) -> torch.nn.Module:
    """A model from a short text: "linear", or "mlp" with widths, as "mlp-60-60"; "scaled-" may stand before either.

    Example:
        >>> by_name("linear", 64, 10)
        Sequential(
          (0): Linear(in_features=64, out_features=10, bias=True)
        )
    """
    kind, *widths = name.removeprefix("scaled-").split("-")
    if (kind == "linear" and not widths) or (kind == "mlp" and all(width.isdecimal() for width in widths)):
        hidden = () if kind == "linear" else tuple(int(width) for width in widths) or (60, 60)
        return mlp(features, classes, hidden, scaled=name.startswith("scaled-"), seed=seed)
    raise ParameterError(
        f"Unknown model {name!r}. Known are 'linear', 'mlp' and 'mlp-' with widths, as 'mlp-60-60', each also with "
        "'scaled-' before it."
    )
