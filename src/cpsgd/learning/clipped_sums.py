"""`ClippedSums`: the sum of a model's gradients by example, each clipped, taken along with ordinary backward passes."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from cpsgd._torch import torch
from cpsgd.errors import ParameterError
from cpsgd.learning import device_weights
from cpsgd.learning.layers import units_of
from cpsgd.learning.models import check_model, trainable
from cpsgd.learning.units import MARGIN, NORM_ROUNDING, Unit, rounding_share
from cpsgd.simulation import device_kernels as kernels


class ClippedSums:
    """Adds up the gradients of single examples, each clipped to a norm, in float64.

    While it is attached, the parameters of the model in training mode get no gradients of their own from `backward`.
    `fold` then takes what the pass left in the layers.

    Attributes:
        total: The sum so far, all trainable parameters in one row.

    Example:
        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> sums = ClippedSums(model)
        >>> model(torch.tensor([[3.0, 4.0], [0.0, 0.5]])).sum().backward()
        >>> [round(norm, 3) for norm in sums.fold(1.0, scale=1.0).tolist()]
        [5.0, 0.5]
        >>> [round(value, 3) for value in sums.total.tolist()]
        [0.599, 1.299]
    """

    def __init__(self, model: torch.nn.Module) -> None:
        """Attaches to a model.

        Raises:
            ParameterError: The model mixes examples, shares parameters between layers, or is attached already.
        """
        check_model(model)
        self._model = model
        parameters = trainable(model)
        device = next(iter(parameters.values())).device
        self.total = torch.zeros(sum(p.numel() for p in parameters.values()), dtype=torch.float64, device=device)
        views = zip(parameters.values(), torch.split(self.total, [p.numel() for p in parameters.values()]), strict=True)
        places = {id(p): view.view(p.shape) for p, view in views}
        self._units = {unit: {key: places[id(p)] for key, p in unit.parameters.items()} for unit in units_of(model)}
        if any(isinstance(unit.module.forward, _Forward) for unit in self._units):
            raise ParameterError("The model is private already: call detach() of the first, or use a new model.")
        self._compiled = kernels.compiles(device)
        # What rounding may have moved the sum by, in clip norms.
        self._rounding = 0.0
        self._hooks: list[Any] = [
            p.register_post_accumulate_grad_hook(_refuse)  # type: ignore[no-untyped-call]
            for p in parameters.values()
        ]
        for unit in self._units:
            unit.module.forward = _Forward(unit)

    def detach(self) -> None:
        """Gives the model back as it was."""
        for hook in self._hooks:
            hook.remove()
        for unit in self._units:
            if isinstance(unit.module.__dict__.get("forward"), _Forward):
                del unit.module.forward

    def forget(self) -> None:
        """Drops the sum and the gradients kept from the last pass."""
        if self._rounding:  # something was added
            self.total.zero_()
        self._rounding = 0.0
        for unit in self._units:
            if unit.count is not None:
                unit.forget()

    @torch.no_grad()
    def fold(self, clip_norm: float, *, scale: float, count: int | None = None) -> torch.Tensor:
        """Adds the examples of the last backward pass to the sum, each clipped, and returns their norms in that pass.

        An example whose gradient is not finite adds nothing, silently: to stop would tell about its data.

        Args:
            clip_norm: Norm that each gradient is scaled down to; less `MARGIN`, which rounding may take.
            scale: The loss is the examples' sum divided by this.
            count: The first examples that count; the others add nothing.

        Raises:
            ParameterError: There was no backward pass, layers saw different numbers of examples, or there are so many
                that rounding in their sum could be felt.
        """
        used = [unit for unit in self._units if unit.count is not None]
        counts = {unit.count: unit.name for unit in used}
        if len(counts) != 1:
            names = ", ".join(f"{name} {rows:,}" for rows, name in counts.items())
            what = f"Layers saw different numbers of rows ({names})" if counts else "There was no backward pass"
            raise ParameterError(
                f"{what}: call loss.backward() before each optimizer.step(), with the model in training mode and "
                "examples in the first dimension everywhere."
            )
        (rows,) = counts
        self._rounding += rounding_share(rows or 0, max(unit.positions for unit in used))
        if self._rounding > 0.5 * MARGIN:
            raise ParameterError(
                f"{rows:,} examples in one pass are too many for this model: rounding in their sum could be felt. Give "
                "a micro_batch, such as 256."
            )
        most = clip_norm * (1.0 - MARGIN) / NORM_ROUNDING
        count = rows if count is None else count
        assert count is not None
        norms = self._add(used, count, most, scale)
        for unit in used:
            unit.forget()
        return norms

    def _add(self, used: list[Unit], count: int, most: float, scale: float) -> torch.Tensor:
        """Adds the weighted gradients to the sum, and returns their norms."""
        pieces = [(piece, self._units[unit]) for unit in used for piece in unit.pieces()]
        rest = [norm for unit in used if (norm := unit.rest_norm()) is not None]
        fused = self._compiled and 0 < len(pieces) <= device_weights.MOST_PIECES
        if fused:
            found = device_weights.add_weighted(pieces, rest, self.total, count=count, most=most, scale=scale)
            norms = found[0]
            if not rest:
                return norms
            weights = found[1]
        else:
            norms = torch.linalg.vector_norm(torch.stack([*(piece.norm() for piece, _ in pieces), *rest]), dim=0)
            # A norm that is not a number has no weight; comparisons with it are false.
            weights = torch.div(most, norms).clamp_(max=scale).nan_to_num_(nan=0.0)
            weights[count:] = 0.0
        finite: torch.Tensor | None = norms < math.inf
        # To ask a GPU whether all are finite takes longer than to set nothing to zero.
        if not self.total.is_cuda and bool((norms < math.inf).all()):
            finite = None
        for piece, sums in () if fused else pieces:
            piece.add(weights, finite, sums)
        for unit in used if rest else ():
            unit.add_rest(weights, finite, self._units[unit])
        return norms

    @property
    def rows(self) -> int | None:
        """Number of examples in the last pass; None if there was none."""
        return next((unit.count for unit in self._units if unit.count is not None), None)


class _Forward:
    """Takes the place of a module's `forward`: a unit's in training, its own otherwise."""

    def __init__(self, unit: Unit) -> None:
        self._unit, self._module = unit, unit.module
        self._own: Callable[..., Any] = unit.module.forward
        self._parameters = list(unit.parameters.values())

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        if not (torch.is_grad_enabled() and self._module.training):
            return self._own(*arguments, **options)
        for parameter in self._parameters:
            parameter.grad = None  # that of the last step; none may come from this pass
        if torch.is_autocast_enabled(parameter.device.type):
            raise ParameterError("Private training computes in float32: leave out torch.autocast.")
        return self._unit.call(*arguments, **options)


def _refuse(parameter: torch.Tensor) -> None:
    """Hook that refuses a gradient which autograd computed for a parameter by itself."""
    if parameter.grad is None:
        return
    parameter.grad = None
    raise ParameterError(
        "A parameter got a gradient of its own, of a whole batch: it is used outside of its layer (weights that are "
        "tied, for instance), or the model was in eval mode. Use it in its layer only, and call model.train() first."
    )
