"""What a model is: which parameters are trained, whether it may be trained here, and how its clients are computed."""

from __future__ import annotations

import copy
import pickle
import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpsgd._torch import torch
from cpsgd.errors import ParameterError

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""From a model's outputs and the labels to their mean loss, such as `torch.nn.functional.cross_entropy`."""

Gradient = Callable[[dict[str, torch.Tensor], torch.Tensor, torch.Tensor], dict[str, torch.Tensor]]
"""From parameters, features and labels to the gradient of the mean loss."""


def trainable(model: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters that training changes, by name; their order is that of a vector's coordinates."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def check_model(model: torch.nn.Module) -> None:
    """Raises `ParameterError` where a model cannot be trained from clients' updates."""
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
    """Raises `ParameterError` where a layer keeps or shares statistics of examples."""
    for name, module in model.named_modules():
        mixes = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        if mixes or getattr(module, "track_running_stats", False):
            raise ParameterError(
                f"The model's layer {name} normalises by statistics of several examples or keeps them, outside of any "
                "privacy guarantee; use GroupNorm or LayerNorm."
            )


@dataclass(frozen=True)
class ModelTraits:
    """What was learnt of a model from one made-up example.

    Attributes:
        activations: Numbers that are kept per example between the forward and the backward pass.
        together: Whether many clients' gradients can be computed at once, by `torch.func.vmap`. PyTorch cannot do that
            with some layers, such as GRU; their clients are computed one after the other.
        repeats: Whether a forward pass draws nothing and leaves no trace, so that it is the same every time.
    """

    activations: int
    together: bool
    repeats: bool


def gradient_of(model: torch.nn.Module, loss: Loss) -> Gradient:
    """The gradient of the loss as a function of the parameters that are trained."""

    def mean_loss(own: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss(torch.func.functional_call(model, own, (x,)), y)

    found: Gradient = torch.func.grad(mean_loss)
    return found


def rehearse(model: torch.nn.Module, loss: Loss, features: torch.Tensor, labels: torch.Tensor) -> ModelTraits:
    """Looks at a model with zeros of the shape of these examples. It and PyTorch's generators stay as they were.

    Raises whatever the model or the loss raise, and `ParameterError` where a layer keeps something of its input.
    """
    # A layer might remember its input. Layers such as dropout count as they are when clients train.
    model = copy.deepcopy(model).train()
    zero, label = torch.zeros_like(features[:1]), torch.zeros_like(labels[:1])
    on_gpu = [zero.device] if zero.device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), one_formula_for_attention():
        activations = _activations(model, zero)
        _check_memory(model, zero)
        repeats = _repeats(model, zero)
        parameters = {name: p.detach() for name, p in trainable(model).items()}
        gradient = gradient_of(model, loss)
        gradient(parameters, zero, label)
        together = True
        try:
            with warnings.catch_warnings():
                # Some layers are computed together in name only: PyTorch loops over clients, and slowly.
                warnings.filterwarnings("error", message=".*performance drop")
                each = torch.func.vmap(gradient, in_dims=(None, 0, 0), randomness="different")
                each(parameters, torch.stack([zero, zero]), torch.stack([label, label]))
        except Exception:  # PyTorch has many ways to say that it cannot; one client alone could be computed
            together = False
    return ModelTraits(activations, together, repeats)


def _check_memory(model: torch.nn.Module, example: torch.Tensor) -> None:
    """Raises `ParameterError` where a forward pass, which is not the first, writes to a buffer or a parameter."""

    def state() -> dict[str, tuple[torch.Tensor, int]]:
        # In-place operations count up a tensor's version, also where they leave its values as they are.
        return {name: (t, t._version) for name, t in (*model.named_parameters(), *model.named_buffers())}

    before = state()
    with torch.no_grad():
        model(example)
    after = state()
    for name in sorted(before.keys() | after.keys()):
        (old, then), (new, now) = before.get(name, (None, 0)), after.get(name, (None, 0))
        if old is not new or then != now:
            raise ParameterError(
                f"The model's {name} changes whenever examples pass: it would hold, and carry from client to client, "
                "what no privacy guarantee covers. Compute it from each example alone, or leave it out."
            )


def _repeats(model: torch.nn.Module, example: torch.Tensor) -> bool:
    """Whether forward passes, which are not the first, change no attribute of a layer, draw no numbers and agree."""

    def state() -> list[Any]:
        generators = [torch.get_rng_state()]
        if example.device.type == "cuda":
            generators.append(torch.cuda.get_rng_state(example.device))
        numpy = pickle.dumps(np.random.get_state())  # noqa: NPY002
        drawn = [random.getstate(), numpy, *(bytes(each.numpy()) for each in generators)]
        simple = bool, int, float, str, type(None)
        for module in model.modules():
            drawn += [(key, value) for key, value in vars(module).items() if isinstance(value, simple)]
        return drawn

    before = state()
    with torch.no_grad():
        first, second = model(example), model(example)
    alike = torch.equal(first, second) if isinstance(first, torch.Tensor) else False
    return alike and before == state()


def one_formula_for_attention() -> Any:
    """Within, attention is computed by its formula: the faster kernels cannot be computed for clients together."""
    return torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)


def _activations(model: torch.nn.Module, example: torch.Tensor) -> int:
    """Numbers that the layers put out for one example, or that are kept for its backward pass if these are more."""
    put_out, kept = 0, 0
    known = {tensor.untyped_storage().data_ptr() for tensor in (example, *model.parameters(), *model.buffers())}

    def count(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        nonlocal put_out
        for part in output if isinstance(output, tuple) else (output,):
            if isinstance(part, torch.Tensor):
                put_out += part.numel()

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal kept
        storage = tensor.untyped_storage().data_ptr()
        if storage not in known:
            known.add(storage)
            kept += -(-tensor.nbytes // 4)
        return tensor

    for module in model.modules():
        module.register_forward_hook(count)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(example)
    return max(put_out, kept)
