"""Properties of a model, found by a trial: they decide how clients are computed, and whether it may be trained."""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np

from cpsgd._torch import torch
from cpsgd.errors import ParameterError


@dataclass(frozen=True)
class ModelTraits:
    """Properties of a model, found by trying it with one example of zeros.

    Attributes:
        activations: Numbers kept per example between the forward and the backward pass.
        together: Whether many clients' gradients can be computed at once by `torch.func.vmap`. With some layers, such
            as GRU, PyTorch cannot do that; clients are then computed one after the other.
        repeats: Whether a forward pass is deterministic and leaves no trace, so that it can be recorded.
    """

    activations: int
    together: bool
    repeats: bool


def check_memory(model: torch.nn.Module, example: torch.Tensor) -> None:
    """Raises `ParameterError` if a forward pass after the first writes to a buffer or a parameter."""

    def state() -> dict[str, tuple[torch.Tensor, int]]:
        # In-place operations increase a tensor's version, even if its values stay the same.
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


def repeats(model: torch.nn.Module, example: torch.Tensor) -> bool:
    """Returns whether two forward passes agree, change no attribute of a layer and draw no random numbers.

    Call it after a first forward pass, which may set attributes.
    """

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


def count_activations(model: torch.nn.Module, example: torch.Tensor) -> int:
    """Returns the larger of the numbers that layers output and those kept for the backward pass, for one example."""
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
