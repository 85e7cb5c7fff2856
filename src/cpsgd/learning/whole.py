"""`Whole`: a unit for any module, with gradients of single examples by `torch.func`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning.units import Tensor, Unit

pytree = torch.utils._pytree
Rows = dict[str, Tensor]


class Whole(Unit):
    """Any module: its gradients by `torch.func`, for all examples at once or for one after the other.

    It is run a second time in the backward pass. Examples are the first dimension of every tensor that it is given or
    returns, but for the states of recurrent layers, where they are the second.
    """

    def __init__(self, name: str, module: torch.nn.Module) -> None:
        super().__init__(name, module)
        self.original: Callable[..., Any] = module.forward
        self._together = True
        self._output: Any = None
        if getattr(module, "batch_first", True) is not True:
            raise ParameterError(f"The layer {name} has batch_first=False: examples must be the first dimension.")
        self._refuse_random()

    def call(self, *arguments: Any, **options: Any) -> Any:
        """Runs the module with any arguments."""
        leaves, structure = pytree.tree_flatten((arguments, options))
        first = next(iter(self.parameters.values()))
        found = _Pass.apply(self, structure, first, *leaves)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(list(found), self._output)

    def forward(self, structure: Any, leaves: Sequence[Any]) -> Any:
        """Runs the module on the leaves of its arguments, which have this structure."""
        arguments, options = pytree.tree_unflatten(list(leaves), structure)
        found, self._output = pytree.tree_flatten(self.original(*arguments, **options))
        return tuple(found)

    def backward(
        self, structure: Any, leaves: Sequence[Any], gradient: Sequence[Any], needed: Sequence[bool]
    ) -> Sequence[Any]:
        """Returns gradients by the leaves that are `needed`, and keeps those by parameters, one row per example."""
        places = [place for place, each in enumerate(leaves) if isinstance(each, Tensor)]
        wanted = [place for place in places if needed[place]]
        backs = [place for place, each in enumerate(gradient) if isinstance(each, Tensor)]
        dims = [self._examples_in(place) for place in backs]
        parameters = {f"module.{key}": p.detach() for key, p in self.parameters.items()}
        original = _Original(self)

        def single(own: list[Tensor], back: list[Tensor]) -> tuple[Rows, Rows]:
            def output(weights: Rows, chosen: Rows) -> Tensor:
                given = list(leaves)
                for place, tensor in zip(places, own, strict=True):
                    given[place] = chosen.get(str(place), tensor)[None]
                arguments, options = pytree.tree_unflatten(given, structure)
                found = pytree.tree_leaves(torch.func.functional_call(original, weights, arguments, options))
                parts = [(found[k].squeeze(dim) * each).sum() for k, dim, each in zip(backs, dims, back, strict=True)]
                return torch.stack(parts).sum()

            chosen = {str(place): own[places.index(place)] for place in wanted}
            found: tuple[Rows, Rows] = torch.func.grad(output, argnums=(0, 1))(parameters, chosen)
            return found

        own = [leaves[place] for place in places]
        outputs = [gradient[place].movedim(dim, 0) for place, dim in zip(backs, dims, strict=True)]
        attention = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)
        with torch.enable_grad(), attention, _recurrent_layers(self.module):
            rows, by_input = self._each(single, own, outputs)
        self.add_rows({key.removeprefix("module."): row for key, row in rows.items()})
        return [by_input.get(str(place)) for place in range(len(leaves))]

    def _examples_in(self, place: int) -> int:
        """Returns which dimension of an output counts the examples."""
        return 1 if isinstance(self.module, torch.nn.RNNBase) and place > 0 else 0

    def _each(self, single: Callable[..., Any], own: list[Tensor], outputs: list[Tensor]) -> Any:
        if self._together:
            try:
                with warnings.catch_warnings():
                    warnings.filterwarnings("error", message=".*performance drop")
                    return torch.func.vmap(single)(own, outputs)
            except Exception:  # PyTorch raises many kinds of errors; one example alone may still be possible
                self._together = False
        count = len(outputs[0])
        found = [single([each[i] for each in own], [each[i] for each in outputs]) for i in range(count)]
        return tuple(
            {key: torch.stack([each[part][key] for each in found]) for key in found[0][part]} for part in (0, 1)
        )

    def _refuse_random(self) -> None:
        drawn = [
            key
            for key, module in self.module.named_modules()
            if (isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0.0)
            or (isinstance(rate := getattr(module, "dropout", 0.0), float) and rate > 0.0)
        ]
        if drawn:
            raise ParameterError(
                f"The layer {self.name} of type {type(self.module).__name__} is run twice, and its dropout "
                f"({drawn[0] or 'its own'}) would differ: set it to 0 there, and use torch.nn.Dropout after the layer."
            )


@contextmanager
def _recurrent_layers(module: torch.nn.Module) -> Iterator[None]:
    """Within the context, lets `torch.func` call recurrent layers; restores their weights afterwards.

    Outside of cuDNN, which wants weights in one piece of memory. `functional_call` leaves its own weights in the
    layers' private list.
    """
    layers = [each for each in module.modules() if isinstance(each, torch.nn.RNNBase)]
    enabled = torch._C._get_cudnn_enabled()
    try:
        if layers:
            torch._C._set_cudnn_enabled(False)
        yield
    finally:
        torch._C._set_cudnn_enabled(enabled)
        for layer in layers:
            layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]


class _Pass(torch.autograd.Function):
    """Autograd function that runs the unit on any number of inputs; see `cpsgd.learning.units`."""

    @staticmethod
    def forward(ctx: Any, unit: Whole, structure: Any, parameter: Tensor, *leaves: Any) -> Any:
        """Runs the module."""
        ctx.unit, ctx.structure = unit, structure
        ctx.save_for_backward(*(each for each in leaves if isinstance(each, Tensor)))
        ctx.others = [None if isinstance(each, Tensor) else (each,) for each in leaves]
        return unit.forward(structure, leaves)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Any) -> Any:
        """Hands inputs and the outputs' gradients to the unit."""
        saved = iter(ctx.saved_tensors)
        leaves = [next(saved) if other is None else other[0] for other in ctx.others]
        return (None, None, None, *ctx.unit.backward(ctx.structure, leaves, gradients, ctx.needs_input_grad[3:]))


class _Original(torch.nn.Module):
    """A unit's module with its original `forward`."""

    def __init__(self, unit: Whole) -> None:
        super().__init__()
        self.module = unit.module
        self._original = unit.original

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Calls the module as it was before it was made private."""
        return self._original(*arguments, **options)
