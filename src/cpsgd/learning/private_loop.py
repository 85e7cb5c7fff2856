"""`make_private`: a training loop of one's own, with the privacy of single examples.

Batches are drawn by Poisson sampling, each example's gradient is clipped, the sum of a batch gets Gaussian noise, and
the optimizer steps along sum / expected batch size (Abadi et al., "Deep Learning with Differential Privacy", CCS 2016).
Model, loss, optimizer and schedules stay the user's.

Neighbours are two data sets of which one has an example whose gradients are zero in the other (`zero-out`). The number
of examples is taken to be public. A step is a Poisson-sampled Gaussian mechanism, and steps are composed by
`cpsgd.privacy.accountant`. What the guarantee rests on: who was drawn stays secret; the loss is a mean over examples of
each one's own loss; an example's gradient depends on the example and the model alone, but for rounding that differs
with the size of the batch (docs/proofs/private-loop.md, assumption 1).
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from cpsgd import _validate
from cpsgd._numbers import rounded_up
from cpsgd._torch import torch
from cpsgd.audit.one_run import OneRunReport
from cpsgd.errors import InfeasibleError, ParameterError
from cpsgd.learning.canaries import Canaries, export_audited
from cpsgd.learning.clipped_sums import ClippedSums
from cpsgd.learning.loop_account import Schedule, epsilon_of, factors_of, least_multiplier
from cpsgd.learning.models import trainable
from cpsgd.learning.poisson_loader import MicroBatch, PoissonLoader
from cpsgd.learning.sum_noise import SumNoise
from cpsgd.learning.units import MARGIN
from cpsgd.neighbours import Adjacency, Participation
from cpsgd.promise import Claim

_VERSION = 1

CITATION = (
    "Poisson-sampled rounded Gaussian mechanisms with exact noise (docs/proofs/private-loop.md), composed by privacy "
    "loss distributions"
)
"""Where the guarantee of a private loop is proved."""


def make_private(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    data_loader: Any,
    *,
    delta: float,
    epochs: float,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    clip_norm: float | Schedule = 1.0,
    noise_schedule: Schedule | None = None,
    micro_batch: int | None = None,
    loss_reduction: Literal["mean", "sum"] = "mean",
    canaries: int = 0,
) -> Private:
    """Makes an ordinary training loop private. Iterate over the result in place of the data loader.

    From then on `loss.backward()` leaves no gradients in the model's parameters, and `optimizer.step()` puts private
    ones there before it steps. `optimizer` and `model` stay the same objects. In eval mode the model is as before.

    Args:
        model: A module of float32 parameters whose layers treat examples, their inputs' first dimension, independently.
        optimizer: Any of `torch.optim` that takes one gradient per step.
        data_loader: Of a data set with a length. Its batch size is the mean size of the batches drawn.
        delta: δ of the guarantee, which should be far below 1 / examples.
        epochs: Passes over the data that the budget is for; steps after them are refused.
        epsilon: ε that all steps may cost an example.
        noise_multiplier: In place of `epsilon`: standard deviation of the noise of a sum, in clip norms.
        clip_norm: Norm that each example's gradient is scaled down to, or a function from the step to it.
        noise_schedule: Factors of the noise by step; ε holds for all steps together.
        micro_batch: The most examples computed at a time. A batch then comes in several parts, and the optimizer steps
            after the last; calls of `step()` before it only add up.
        loss_reduction: Whether the loss is the mean or the sum of the examples'.
        canaries: Number of made-up gradients by which the trained model can be audited; about half of them are trained
            on. They disturb the training as noise does, so take far fewer than there are parameters.

    Raises:
        ParameterError: The model, the optimizer or the loader cannot be used; the message has a remedy.
        InfeasibleError: No noise keeps this ε.

    Example:
        >>> import cpsgd
        >>> from torch.utils.data import DataLoader, TensorDataset
        >>> data = TensorDataset(torch.randn(1000, 8), torch.randint(0, 3, (1000,)))
        >>> model = torch.nn.Linear(8, 3)
        >>> optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        >>> private = cpsgd.make_private(
        ...     model, optimizer, DataLoader(data, batch_size=100), epsilon=2.0, delta=1e-5, epochs=3
        ... )
        >>> for epoch in range(3):
        ...     for features, labels in private:
        ...         optimizer.zero_grad()
        ...         torch.nn.functional.cross_entropy(model(features), labels).backward()
        ...         optimizer.step()
        >>> print(private)
        ε = 1.999 at δ = 1e-05 for one example, zero-out neighbours: 30 of 30 steps, noise multiplier 1.505
    """
    if (epsilon is None) == (noise_multiplier is None):
        raise ParameterError("Give either epsilon or noise_multiplier; the other follows.")
    _validate.instance("model", model, torch.nn.Module)
    _validate.instance("optimizer", optimizer, torch.optim.Optimizer, "Make it from model.parameters().")
    delta = _validate.probability("delta", delta)
    if micro_batch is not None:
        _validate.integer("micro_batch", micro_batch, low=1)
    _validate.choice("loss_reduction", loss_reduction, ("mean", "sum"))
    processes = _processes(model)
    loader = PoissonLoader(data_loader, micro_batch=micro_batch, share=processes)
    steps = math.ceil(_validate.positive("epochs", epochs) * loader.steps - 1e-9)
    dim = sum(p.numel() for p in trainable(model).values())
    factors = factors_of(noise_schedule, steps)
    if noise_multiplier is None:
        assert epsilon is not None
        noise_multiplier = least_multiplier(_validate.positive("epsilon", epsilon), delta, factors, loader.rate, dim)
    else:
        _validate.positive("noise_multiplier", noise_multiplier)
    return Private(
        model,
        optimizer,
        loader,
        delta=delta,
        multipliers=[noise_multiplier * factor for factor in factors],
        clip_norm=clip_norm,
        mean=loss_reduction == "mean",
        processes=processes,
        canaries=_validate.integer("canaries", canaries, low=0),
    )


class Private:
    """The private batches of a training loop, its noise and its account. Made by `make_private`.

    Attributes:
        steps: Steps taken so far.
        planned: Steps that the budget is for.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        loader: PoissonLoader,
        *,
        delta: float,
        multipliers: list[float],
        clip_norm: float | Schedule,
        mean: bool,
        processes: tuple[int, int],
        canaries: int,
    ) -> None:
        """Attaches to model and optimizer; see `make_private`."""
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ParameterError("LBFGS takes several gradients per step: use another optimizer of torch.optim.")
        self._parameters = list(trainable(model).values())
        self._owned = {id(p) for p in self._parameters}
        if any(p.requires_grad for p in self._strange(optimizer)):
            raise ParameterError(
                "The optimizer has parameters that are not the model's: make it from model.parameters()."
            )
        self._clip_norm = clip_norm if callable(clip_norm) else _validate.positive("clip_norm", clip_norm)
        self._loader, self._mean, self._processes = loader, mean, processes
        self._process = os.getpid()
        self._multipliers, self.delta = multipliers, delta
        self.steps, self.planned = 0, len(multipliers)
        self._model, self._sums = model, ClippedSums(model)
        # The micro-batch that was added last, and the clip norm of the batch that it is of.
        self._taken: MicroBatch | None = None
        self._norm: float | None = None
        self.dim = self._sums.total.numel()
        self._noise = SumNoise(self.dim, self._sums.total.device) if self._first else None
        self._hook = optimizer.register_step_pre_hook(self._before_step)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            for tensor in (*self._parameters, *model.buffers()):
                torch.distributed.broadcast(tensor.data, 0)
        self._canaries = Canaries.draw(canaries, self.dim) if canaries and self._first else None

    def __len__(self) -> int:
        """Returns the number of batches in an epoch."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields an epoch's batches, in micro-batches if these were asked for.

        What is left of a batch without a step is dropped, so that no step has examples of two batches.

        Raises:
            ParameterError: The last micro-batch had a backward pass and no step.
        """
        self._forget()
        for batch in self._loader:
            yield batch
            if self._sums.rows is not None:
                self._forget()
                raise ParameterError(
                    "The last batch had a backward pass that no step took: call optimizer.step() after every "
                    "loss.backward(), also between micro-batches, and never in a closure."
                )
            part = self._loader.current
            if part is None or part.last:
                self._forget()

    def __str__(self) -> str:
        found = self.guarantee()
        spent = "nothing spent" if found is None else f"ε = {rounded_up(found.epsilon)}"
        noise = dict.fromkeys(f"{multiplier:.4g}" for multiplier in (self._multipliers[0], self._multipliers[-1]))
        return (
            f"{spent} at δ = {self.delta:g} for one example, zero-out neighbours: {self.steps:,} of {self.planned:,} "
            f"steps, noise multiplier {' to '.join(noise)}"
        )

    def guarantee(self) -> Claim | None:
        """Returns the (ε, δ) of the steps so far; None before the first."""
        return None if not self.steps else Claim(self._epsilon(self.steps), self.delta)

    @property
    def epsilon(self) -> float:
        """ε of the steps so far."""
        return 0.0 if not self.steps else self._epsilon(self.steps)

    @property
    def clip_norm(self) -> float:
        """The clip norm of the next step."""
        found = self._clip_norm
        return _validate.positive("clip_norm", found(self.steps)) if callable(found) else found

    def audit(self, *, confidence: float = 0.95) -> OneRunReport:
        """Returns a lower bound on ε from the canaries, beside the ε that is claimed so far.

        Raises:
            ParameterError: There are no canaries, in this process, or no step was taken.
        """
        if self._canaries is None or not self.steps:
            raise ParameterError("An audit needs canaries, make_private(..., canaries=1000), and a step, in process 0.")
        return self._canaries.audit(epsilon=self.epsilon, delta=self.delta, unit="example", confidence=confidence)

    def export(self, folder: Path | str) -> tuple[Path, ...]:
        """Writes the model and its card into a folder, with an audit if there are canaries; returns the paths.

        Raises:
            CheckpointError: The files could not be written.
            ParameterError: safetensors is not installed.
        """
        found = self.guarantee()
        privacy: dict[str, Any] | None = (
            None
            if found is None
            else {
                "protects": "one example",
                "epsilon": found.epsilon,
                "delta": found.delta,
                "unit": "example",
                "adjacency": str(Adjacency.ZERO_OUT),
                "participation": str(Participation.poisson(self._loader.rate)),
                "rounds": self.steps,
                "theorem": {"method": "private-loop", "citation": CITATION},
                "noise": "secret",
                "cohorts": "the draw of batches must stay secret",
            }
        )
        settings = {
            "clip_norm": None if callable(self._clip_norm) else self._clip_norm,
            "noise_multipliers": [min(self._multipliers), max(self._multipliers)],
            "batch": self._loader.expected,
            "steps": self.planned,
        }
        data = {"examples": self._loader.examples}
        return export_audited(Path(folder), self._model, privacy, self._canaries, data=data, settings=settings)

    def detach(self) -> None:
        """Gives model and optimizer back as they were. What was spent stays spent."""
        self._sums.detach()
        self._hook.remove()

    def state_dict(self) -> dict[str, Any]:
        """Returns the state for a checkpoint, beside the model's and the optimizer's: the steps taken."""
        return {
            "version": _VERSION,
            "steps": self.steps,
            "rate": self._loader.rate,
            "delta": self.delta,
            "multipliers": list(self._multipliers),
            "canaries": None if self._canaries is None else self._canaries.to_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on after the steps of a checkpoint, with its noise.

        Raises:
            ParameterError: The checkpoint is of another loop: another batch size, data set, δ or number of parameters.
        """
        same = state.get("version") == _VERSION and (state["rate"], state["delta"]) == (self._loader.rate, self.delta)
        if not same or len(state["multipliers"]) != self.planned:
            raise ParameterError(
                "The checkpoint is of a loop with another batch size, number of examples, number of epochs or δ: make "
                "it private with the same ones."
            )
        multipliers = [float(each) for each in state["multipliers"]]
        if multipliers[: self.steps] != self._multipliers[: self.steps]:
            raise ParameterError(
                "Steps were taken here with other noise than the checkpoint's: load it before the first."
            )
        self._multipliers = multipliers
        if self._first and state["canaries"] is not None:
            self._canaries = Canaries.from_dict(state["canaries"])
        self.steps = _validate.integer("steps", state["steps"], low=self.steps, high=self.planned)
        self._forget()

    def _forget(self) -> None:
        """Drops the sum for the next step."""
        self._sums.forget()
        self._norm = None

    @property
    def _first(self) -> bool:
        """Whether this process draws the noise."""
        return self._processes[0] == 0

    def _strange(self, optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
        """Yields the optimizer's parameters that are not the model's, and so get no private gradients."""
        return (p for group in optimizer.param_groups for p in group["params"] if id(p) not in self._owned)

    # ------------------------------------------------------------------ a step

    def _before_step(self, optimizer: torch.optim.Optimizer, *arguments: Any) -> None:
        """Sets gradients to the private mean before a step; without one, leaves none, so that the step does nothing."""
        if _processes(self._model) != self._processes:
            raise ParameterError(
                "torch.distributed was initialized or left after the loop was made private, so that processes do not "
                "share the examples as they add them up: call init_process_group first, then make_private."
            )
        if os.getpid() != self._process:
            raise ParameterError(
                "This process was forked after the loop was made private, so that each of them would spend the whole "
                "budget: call make_private in the process that takes the steps."
            )
        part = self._loader.current
        if part is None:
            raise ParameterError("This batch is not of the private loop: iterate over what make_private returned.")
        if part is self._taken:
            raise ParameterError(
                "This batch had its step already: ε counts on examples drawn anew for each. Take one step per batch."
            )
        if any(p.grad is not None for p in self._strange(optimizer)):
            raise ParameterError(
                "The optimizer has a parameter with a gradient that is not private: it was frozen, or not the model's, "
                "when the loop was made private. Make it private after such changes."
            )
        if self.steps >= self.planned:
            raise InfeasibleError(
                f"All {self.planned:,} steps were taken that the budget is for: make the loop private for more epochs."
            )
        if self._norm is None:
            self._norm = self.clip_norm
        rows, norm = self._sums.rows, self._norm
        if rows is not None and rows != max(1, part.count):
            raise ParameterError(
                f"The model saw {rows:,} rows, and the micro-batch has {max(1, part.count):,} examples: examples must "
                "be the first dimension of every layer's inputs, and backward() be called once per batch."
            )
        self._sums.fold(norm, scale=float(rows or 1) if self._mean else 1.0, count=part.count)
        self._taken = part
        if not part.last:
            for parameter in self._parameters:
                parameter.grad = None
            return
        unflatten: Any = torch._utils._unflatten_dense_tensors
        with torch.no_grad():  # which makes views faster
            parts = unflatten(self._release(norm), self._parameters)
        for parameter, own in zip(self._parameters, parts, strict=True):
            parameter.grad = own

    def _release(self, clip_norm: float) -> torch.Tensor:
        """Returns the noisy mean of the batch, the same in all processes; the step is counted before."""
        total = self._sums.total
        together = torch.distributed.is_available() and torch.distributed.is_initialized()
        if together:
            torch.distributed.all_reduce(total)
        multiplier = self._multipliers[self.steps]
        self.steps += 1
        others = total / self._loader.expected if self._canaries is not None else total
        if self._canaries is not None:
            self._canaries.add_to(total, clip_norm * (1.0 - MARGIN), self._loader.rate)
        if self._noise is None:
            mean = torch.empty_like(total, dtype=torch.float32)
        else:
            mean = self._noise.added(total, multiplier * clip_norm, self._loader.expected)
            if self._canaries is not None:
                self._canaries.observe(mean - others)
        if together:
            torch.distributed.broadcast(mean, 0)
        self._forget()
        return mean

    def _epsilon(self, steps: int) -> float:
        return epsilon_of(Counter(self._multipliers[:steps]), self.delta, self._loader.rate, self.dim)


def _processes(model: torch.nn.Module) -> tuple[int, int]:
    """Returns rank and number of the processes that train together."""
    if isinstance(model, torch.nn.DataParallel | torch.nn.parallel.DistributedDataParallel):
        raise ParameterError(
            f"Give the model itself, model.module, and not a {type(model).__name__}: where torch.distributed is "
            "initialized, processes share the examples and the sums are added up here."
        )
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    return 0, 1
