"""Gradients of models made of dense layers with ReLUs and cross-entropy, in one pass; used on a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from cpsgd._torch import torch
from cpsgd.learning import cuda
from cpsgd.learning.models import Loss, Scaled
from cpsgd.simulation.device_kernels import compiles


def dense_layers(model: torch.nn.Module, loss: Loss) -> list[torch.nn.Linear] | None:
    """Returns the linear layers of a model that has ReLUs between them and cross-entropy as its loss, else None.

    A layer `Scaled` may come first; `scaling` finds it.
    """
    if type(model) is not torch.nn.Sequential or loss is not torch.nn.functional.cross_entropy:
        return None
    modules = list(model)[scaling(model) is not None :]
    layers = [module for module in modules[::2] if type(module) is torch.nn.Linear]
    between = [module for module in modules[1::2] if type(module) is torch.nn.ReLU]
    if len(modules) % 2 == 0 or len(layers) + len(between) < len(modules) or any(m.inplace for m in between):
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    if any(p is None or not p.requires_grad for p in parameters) or len(set(map(id, parameters))) < len(parameters):
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in model.modules())
    return None if hooked else layers


def scaling(model: torch.nn.Module) -> Scaled | None:
    """Returns the layer `Scaled` that the model begins with, or None."""
    first = next(model.children(), None)
    return first if type(first) is Scaled else None


@torch.no_grad()
def write_dense_gradients(
    layers: list[torch.nn.Linear],
    features: torch.Tensor,
    labels: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """Writes each example's gradient to a row of `out`, in the order of the model's parameters.

    The gradient of a layer's weights is the outer product of the gradient of its output and its input. `layers` come
    from `dense_layers`.
    """
    widths = [layer.out_features for layer in layers]
    inputs = [features.flatten(1), *(features.new_empty(len(out), width) for width in widths[:-1])]
    backs = [features.new_empty(len(out), width) for width in widths]
    dense_factors(layers, labels, inputs, backs)
    start = 0
    for back, incoming in zip(backs, inputs, strict=True):
        width, depth = back.shape[1], incoming.shape[1]
        own = out[:, start : start + width * depth + width]
        if compiles(out.device):
            cuda.layer_gradients(back, incoming, own)
        else:
            torch.mul(back[:, :, None], incoming[:, None, :], out=own[:, :-width].view(-1, width, depth))
            own[:, -width:] = back
        start += width * depth + width


@torch.no_grad()
def dense_factors(
    layers: list[torch.nn.Linear], labels: torch.Tensor, inputs: Sequence[torch.Tensor], backs: Sequence[torch.Tensor]
) -> None:
    """Writes each layer's `inputs` and the gradients of its outputs (`backs`), one row per example.

    The first layer's inputs must be there already.
    """
    for layer, incoming, following in zip(layers[:-1], inputs, inputs[1:], strict=False):
        torch.addmm(layer.bias, incoming, layer.weight.t(), out=following).relu_()
    outputs = torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.t())
    # The gradient of cross-entropy: probabilities less 1 at the label.
    torch.softmax(outputs, dim=1, out=backs[-1])
    backs[-1].scatter_add_(1, labels[:, None], torch.full_like(outputs[:, :1], -1.0))
    for number in range(len(layers) - 1, 0, -1):
        back = backs[number] @ layers[number].weight
        torch.mul(back, inputs[number] > 0, out=backs[number - 1])
