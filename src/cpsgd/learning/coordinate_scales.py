"""`CoordinateScales`: divides updates by the size of their coordinates, so that noise falls where gradients are large.

Noise of one size for all coordinates is wasteful where some are a hundred times larger than others. Clients divide
their updates by scales a before they are clipped, and the server multiplies the mean by a. Where coordinate j has
size s_j, the least squared error is with a_j ∝ √s_j: it is (Σ s_j)² / (d Σ s_j²) of what it was (Aumüller, Lebeda,
Nelson and Pagh, "PLAN: Variance-Aware Private Mean Estimation", 2024).

The sizes come from earlier private means. That is post-processing, which costs no privacy: an update is clipped after
the division, so that the sensitivity is the clip norm whatever the scales are, also if somebody chose them.

The mean of one coordinate is mostly noise. A layer's sizes are therefore taken as an outer product, s_jk = r_j c_k, of
one number per output and one per input, as Adafactor does (Shazeer and Stern, 2018). A bias is one more input, which is
always 1. Parameters of one dimension, such as those of a normalisation, have one size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from cpsgd._torch import torch
from cpsgd.learning.models import trainable

# The moving average of squared means keeps this share per round; in round t at most t/(t + 1).
_DECAY = 0.95
# Added to every squared size: a share of the mean squared size, and of the noise's variance in one mean. A still
# coordinate can then begin to move, and where means are mostly noise, as late in training, scales go back to 1.
_UNIFORM, _NOISE = 0.25, 0.05
_TINY = 1e-30


@dataclass(frozen=True)
class _Block:
    """A layer's part of the vector: `width` rows of `depth` weights, and as many biases after them, or none."""

    start: int
    width: int
    depth: int
    biases: bool = False

    @property
    def columns(self) -> int:
        """Number of columns of the block's matrix; a bias is one more input."""
        return self.depth + self.biases

    def matrix(self, vector: torch.Tensor) -> torch.Tensor:
        """Returns the block of a vector as a matrix [width, columns]."""
        weights, biases = self._parts(vector)
        return torch.cat([weights, biases[:, None]], dim=1) if self.biases else weights

    def write(self, matrix: torch.Tensor, vector: torch.Tensor) -> None:
        """Writes a matrix [width, columns] to the block's part of a vector."""
        weights, biases = self._parts(vector)
        weights.copy_(matrix[:, : self.depth])
        if self.biases:
            biases.copy_(matrix[:, -1])

    def _parts(self, vector: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        end = self.start + self.width * self.depth
        return vector[self.start : end].view(self.width, self.depth), vector[end : end + self.width]


def _blocks(model: torch.nn.Module) -> list[_Block]:
    """Returns the model's trainable parameters as blocks; a bias that follows its weights is in their block."""
    blocks: list[_Block] = []
    start, before = 0, ("", False)
    for name, parameter in trainable(model).items():
        layer, _, kind = name.rpartition(".")
        last = blocks[-1] if blocks else None
        if kind == "bias" and last is not None and before == (f"{layer}.weight" if layer else "weight", True):
            blocks[-1] = replace(last, biases=True)
        elif parameter.ndim > 1:
            blocks.append(_Block(start, parameter.shape[0], parameter.numel() // parameter.shape[0]))
        else:
            blocks.append(_Block(start, 1, parameter.numel()))
        start, before = start + parameter.numel(), (name, parameter.ndim > 1)
    return blocks


class CoordinateScales:
    """Scales of a model's coordinates, from the private means so far.

    Attributes:
        every: Rounds between changes of the scales.
        scales: a, one number per coordinate; all 1 until the first change.
        inverse_factors: 1 / scale of each factor of `cpsgd.simulation.products`, in their order. It is changed in
            place, since recordings of GPU launches hold it.

    Example:
        >>> scales = CoordinateScales(torch.nn.Linear(2, 2, bias=False), every=1)
        >>> scales.learn(torch.tensor([9.0, 1.0, 9.0, 1.0]), noise_norm=0.0, number=0)
        >>> [round(float(scale), 3) for scale in scales.scales]
        [1.097, 0.65, 1.097, 0.65]
    """

    def __init__(self, model: torch.nn.Module, *, every: int) -> None:
        """Begins with scales of 1; the model must be on its device."""
        self.every = every
        self._blocks = _blocks(model)
        device = next(iter(trainable(model).values())).device
        self.scales = torch.ones(sum(p.numel() for p in trainable(model).values()), device=device)
        # Moving averages of squared means less their noise, by row and by column of each block.
        self._moments = [
            (torch.zeros(block.width, device=device), torch.zeros(block.columns, device=device))
            for block in self._blocks
        ]
        self.inverse_factors = torch.ones(sum(b.width + b.depth for b in self._blocks) + 1, device=device)

    def divide(self, rows: Any) -> Any:
        """Divides clients' updates by the scales, in place, and returns them."""
        torch.as_tensor(rows).div_(self.scales)
        return rows

    def read(self, mean: torch.Tensor, noise_norm: float, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean of round `number` and its noise norm in the updates' units, and updates the scales.

        Args:
            mean: The private mean of updates that were divided by the scales.
            noise_norm: √E‖noise‖² of that mean.
            number: The round, counted from 0.
        """
        found = mean * self.scales
        spread = noise_norm * self.scales.square().mean().sqrt()
        self.learn(found, noise_norm, number)
        return found, spread

    @torch.no_grad()
    def learn(self, mean: torch.Tensor, noise_norm: float, number: int) -> None:
        """Records the mean of round `number`, in the updates' units, and changes the scales every `every` rounds."""
        share = max(1.0 - _DECAY, 1.0 / (number + 1.0))
        signal = mean.square() - self.scales.square() * (noise_norm**2 / len(mean))
        for block, (rows, columns) in zip(self._blocks, self._moments, strict=True):
            matrix = block.matrix(signal)
            rows.lerp_(matrix.mean(dim=1), share)
            columns.lerp_(matrix.mean(dim=0), share)
        if (number + 1) % self.every == 0:
            self._change(noise_norm**2 / len(mean) * self.scales.square().mean())

    def _change(self, noise: torch.Tensor) -> None:
        """Sets the scales to the roots of the sizes, such that an update of these sizes keeps its norm."""
        seen = sum(rows.clamp(min=0.0).sum() * len(columns) for rows, columns in self._moments)
        least = (_UNIFORM * seen + _TINY) / len(self.scales) + _NOISE * noise
        sizes = []
        for block, (rows, columns) in zip(self._blocks, self._moments, strict=True):
            outer = rows.clamp(min=0.0) + least
            inner = (columns.clamp(min=0.0) + least) / outer.mean()
            sizes.append((outer.sqrt(), inner.sqrt() if block.width > 1 else torch.ones_like(inner)))
        total = sum(outer.sum() * inner.sum() for outer, inner in sizes)
        squares = sum(outer.square().sum() * inner.square().sum() for outer, inner in sizes)
        parts = []
        for block, (outer, inner) in zip(self._blocks, sizes, strict=True):
            left, right = (total / squares * outer).sqrt(), inner.sqrt()
            block.write(left[:, None] * right, self.scales)
            # The factor of a bias is 1.
            parts += [right[-1] / right[: block.depth], 1.0 / (left * right[-1])]
        torch.cat([*parts, torch.ones_like(self.scales[:1])], out=self.inverse_factors)

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint."""
        return {"scales": self.scales, "factors": self.inverse_factors, "moments": self._moments}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restores the state from a checkpoint."""
        self.scales.copy_(state["scales"])
        self.inverse_factors.copy_(state["factors"])
        for owns, saved in zip(self._moments, state["moments"], strict=True):
            for own, value in zip(owns, saved, strict=True):
                own.copy_(value)
