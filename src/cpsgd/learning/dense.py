"""Gradients of single examples for fully connected networks, written where they are wanted in one pass.

The gradient of one example with respect to a layer's weights is an outer product of what flows back into the layer's
output and what came in. `torch.func` computes the same but stores it several times on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

from cpsgd._torch import torch


def layers_of(
    model: torch.nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> list[torch.nn.Linear] | None:
    """The layers of a model of linear layers with ReLUs between them and cross-entropy for a loss; None for others."""
    if type(model) is not torch.nn.Sequential or loss is not torch.nn.functional.cross_entropy:
        return None
    modules = list(model)
    layers = [module for module in modules[::2] if type(module) is torch.nn.Linear]
    between = [module for module in modules[1::2] if type(module) is torch.nn.ReLU]
    if len(modules) % 2 == 0 or len(layers) + len(between) < len(modules) or any(m.inplace for m in between):
        return None
    parameters = [p for layer in layers for p in (layer.weight, layer.bias)]
    if any(p is None or not p.requires_grad for p in parameters) or len(set(map(id, parameters))) < len(parameters):
        return None
    hooked = any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in (model, *modules))
    return None if hooked else layers


@torch.no_grad()
def write_gradients(
    layers: list[torch.nn.Linear],
    features: torch.Tensor,
    labels: torch.Tensor,
    out: torch.Tensor,
    kernels: ModuleType | None = None,
) -> None:
    """Writes each example's gradient to a row of `out`, in the order of the model's parameters.

    Args:
        layers: What `layers_of` found.
        features: One row an example.
        labels: Their classes.
        out: One row an example.
        kernels: `cpsgd.learning.fused`, where it runs.
    """
    inputs = [features.flatten(1)]
    for layer in layers[:-1]:
        inputs.append(torch.addmm(layer.bias, inputs[-1], layer.weight.t()).relu_())
    outputs = torch.addmm(layers[-1].bias, inputs[-1], layers[-1].weight.t())
    # The gradient of cross-entropy: probabilities less 1 at the label.
    back = torch.softmax(outputs, dim=1)
    back.scatter_add_(1, labels[:, None], torch.full_like(back[:, :1], -1.0))
    end = out.shape[1]
    for layer, incoming in zip(reversed(layers), reversed(inputs), strict=True):
        width, depth = layer.weight.shape
        own = out[:, end - width * depth - width : end]
        if kernels is not None:
            kernels.layer_gradients(back, incoming, own)
        else:
            torch.mul(back[:, :, None], incoming[:, None, :], out=own[:, :-width].view(-1, width, depth))
            own[:, -width:] = back
        end -= width + width * depth
        if layer is not layers[0]:
            back = (back @ layer.weight) * (incoming > 0)
