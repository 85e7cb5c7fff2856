"""Models to start from, their trainable parameters, and the check that a model can be trained on clients' updates."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

from cpsgd import _validate
from cpsgd._torch import torch
from cpsgd.errors import ParameterError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a model's outputs and the labels to their mean loss, such as `torch.nn.functional.cross_entropy`."""

# Mean and standard deviation of MNIST's shades. These are public: nothing is computed from clients' examples.
_SHIFT, _SCALE = 0.1307, 0.3081


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """Returns the parameters that training changes, by name, in the order of an update's coordinates."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_model(model: torch.nn.Module) -> None:
    """Raises `ParameterError` if a model cannot be trained on clients' updates."""
    parameters = trainable(model)
    if not parameters:
        raise ParameterError("The model has no trainable parameters: there is nothing to learn.")
    device = next(iter(parameters.values())).device
    for name, p in parameters.items():
        if p.dtype != torch.float32:
            raise ParameterError(f"Expected float32 parameters, but {name} is {p.dtype}: convert it with .float().")
        if p.device != device:
            raise ParameterError(f"Expected all parameters on {device}, but {name} is on {p.device}: use model.to().")
        if not bool(torch.isfinite(p).all()):
            raise ParameterError(f"The model's parameter {name} holds NaN or infinity; start from finite numbers.")
    check_layers(model)


def check_layers(model: torch.nn.Module) -> None:
    """Raises `ParameterError` if a layer keeps statistics of examples or mixes examples, as batch normalisation."""
    for name, module in model.named_modules():
        mixes = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if mixes or getattr(module, "track_running_stats", False):
            raise ParameterError(
                f"The model's layer {name} normalises by statistics of several examples or keeps them, outside of any "
                "privacy guarantee; use GroupNorm or LayerNorm."
            )


def without_batch_norm(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces batch normalisation by group normalisation of up to 32 groups, in place, and returns the model.

    Example:
        >>> without_batch_norm(torch.nn.BatchNorm1d(48)).num_groups
        24
    """
    if isinstance(model, torch.nn.modules.batchnorm._BatchNorm):
        channels = model.num_features
        groups = max(count for count in range(1, 33) if channels % count == 0)
        return torch.nn.GroupNorm(groups, channels, eps=model.eps, affine=model.affine)
    for name, child in model.named_children():
        setattr(model, name, without_batch_norm(child))
    return model


class Scaled(torch.nn.Module):
    """A layer (features - shift) / scale without parameters; the defaults fit the shades of handwritten digits."""

    def __init__(self, shift: float = _SHIFT, scale: float = _SCALE) -> None:
        super().__init__()
        self.shift = _validate.finite("shift", shift)
        self.scale = _validate.positive("scale", scale)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """Returns the scaled features."""
        return (features - self.shift) / self.scale

    def write(self, features: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the scaled features to `out`."""
        torch.div(features - self.shift, self.scale, out=out)

    def extra_repr(self) -> str:
        """Returns the numbers for `repr`."""
        return f"shift={self.shift:g}, scale={self.scale:g}"


def mlp(
    features: int,
    classes: int,
    hidden: tuple[int, ...] = (60, 60),
    *,
    scaled: bool = False,
    seed: int | None = None,
) -> torch.nn.Module:
    """Returns fully connected layers with ReLUs between them; the default is the network of the paper's experiment.

    Args:
        features: Numbers in an example's features.
        classes: Outputs.
        hidden: Widths of the hidden layers.
        scaled: Puts a layer `Scaled` first; clipped gradients are then more informative.
        seed: Makes the initial weights repeatable. PyTorch's global generator stays as it was.

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
    """Returns the model "linear", or "mlp" with widths, as "mlp-60-60"; "scaled-" may stand before either.

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
