"""Private gradients for `DistributedDataParallel` (DDP): clipped, noisy integers instead of an all-reduce of floats.

DDP's communication hook sees *buckets* of a gradient, one at a time, and a gradient must be clipped as a whole:
clipping each of b buckets to D would let one worker move the sum by √b D. So here the hook only keeps gradients on
their worker, and the exchange is one call between the backward pass and the optimizer's step:

    loss.backward()
    private.synchronise()
    optimizer.step()

`WorkerGradients` protects all the data of a worker, `ExampleGradients` single examples. `PrivateOptimizer` wraps an
optimizer, so that only the line that makes it changes. `cpsgd.engines.allreduce` has the exchange and says who may see
what. All replicas compute the same bits, if they run the same release on the same kind of processor.
"""

# No `from __future__ import annotations`: DDP compares a hook's annotations with the classes themselves.
import numpy as np
from numpy.typing import NDArray
from torch.nn.parallel import DistributedDataParallel

from cpsgd._torch import torch
from cpsgd.engines.allreduce import PrivateMean
from cpsgd.errors import ParameterError
from cpsgd.learning.datasets.populations import Batch
from cpsgd.learning.example_sums import ExampleSums
from cpsgd.learning.gradients import ClientUpdates
from cpsgd.learning.models import Loss, check_layers, trainable


class WorkerGradients:
    """Replaces each worker's gradient by the private mean of all workers' gradients.

    It protects everything that a worker holds, which takes much noise: this is for many workers, each of them one
    party. To protect examples, use `ExampleGradients`.

    Example:
        In each of two processes, as `torchrun --standalone --nproc-per-node 2 FILE` starts them:

        >>> import torch  # doctest: +SKIP
        >>> from torch.nn.parallel import DistributedDataParallel  # doctest: +SKIP
        >>> import cpsgd  # doctest: +SKIP
        >>> from cpsgd.engines.ddp import WorkerGradients  # doctest: +SKIP
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))  # doctest: +SKIP
        >>> budget = {"epsilon": 8.0, "delta": 1e-6, "rounds": 10}  # doctest: +SKIP
        >>> best = cpsgd.plan(2, 3, **budget, colluding=1)  # doctest: +SKIP
        >>> mean = cpsgd.PrivateMean(best.protocol, **budget)  # doctest: +SKIP
        >>> private = WorkerGradients(model, mean)  # doctest: +SKIP
        >>> model(torch.ones(5, 2)).mean().backward()  # doctest: +SKIP
        >>> private.synchronise()  # doctest: +SKIP
        >>> print(f"round {mean.round} of {mean.rounds}: ε = {mean.epsilon:.1f} is spent")  # doctest: +SKIP
        round 1 of 10: ε = 2.2 is spent
    """

    def __init__(self, model: DistributedDataParallel, mean: PrivateMean) -> None:
        """Takes over the model's exchange of gradients.

        Args:
            model: The replica on this worker, on any device.
            mean: The exchange, for the privacy of workers.

        Raises:
            ParameterError: The model and the protocol do not fit, or something else of the model would be shared.
        """
        if mean.examples is not None:
            raise ParameterError("This exchange was set up for sums over examples; use ExampleGradients.")
        self.mean = mean
        self._parameters = _take_over(model, mean)

    def synchronise(self) -> None:
        """Sets every replica's `.grad` to the same private mean, in one round.

        Call it on all workers, after one or more backward passes. A parameter without a gradient counts as zero.

        Raises:
            CpsgdError: As `PrivateMean.mean` does. Then no gradient was changed.
        """
        _write(self._parameters, self.mean.mean(self._gradient))

    def _gradient(self) -> NDArray[np.float32]:
        parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
        return torch.cat([part.detach().reshape(-1).to("cpu", torch.float32) for part in parts]).numpy()


class PrivateOptimizer:
    """An optimizer whose steps follow the private mean of all workers' gradients.

    It protects everything that a worker computes its gradients from, in all steps together. At least one worker is
    taken to be curious (`colluding` of `PrivateMean`), so of n workers the noise of at most n - 1 counts. Give the
    optimizer inside to a scheduler of `torch.optim.lr_scheduler`.

    Attributes:
        optimizer: The optimizer inside.
        mean: The exchange; `mean.guarantee()` is what is proved about the steps so far.

    Example:
        In each of two processes, as `torchrun --standalone --nproc-per-node 2 FILE` starts them:

        >>> import torch  # doctest: +SKIP
        >>> from torch.nn.parallel import DistributedDataParallel  # doctest: +SKIP
        >>> import cpsgd  # doctest: +SKIP
        >>> from cpsgd.engines.ddp import PrivateOptimizer  # doctest: +SKIP
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1))  # doctest: +SKIP
        >>> budget = {"epsilon": 8.0, "delta": 1e-6, "rounds": 10}  # doctest: +SKIP
        >>> best = cpsgd.plan(2, 3, **budget, colluding=1)  # doctest: +SKIP
        >>> mean = cpsgd.PrivateMean(best.protocol, **budget)  # doctest: +SKIP
        >>> optimizer = PrivateOptimizer(torch.optim.Adam(model.parameters()), model, mean)  # doctest: +SKIP
        >>> for _ in range(10):  # doctest: +SKIP
        ...     optimizer.zero_grad()
        ...     model(torch.ones(5, 2)).mean().backward()
        ...     optimizer.step()
        >>> print(f"round {mean.round} of {mean.rounds}: ε = {mean.epsilon:.1f} is spent")  # doctest: +SKIP
        round 10 of 10: ε = 8.0 is spent
    """

    def __init__(self, optimizer: torch.optim.Optimizer, model: DistributedDataParallel, mean: PrivateMean) -> None:
        """Takes over the model's exchange of gradients.

        Args:
            optimizer: Any optimizer of the model's trainable parameters that takes one step per gradient.
            model: The replica on this worker.
            mean: The exchange, for the privacy of workers; its `rounds` are the steps that may be taken.

        Raises:
            ParameterError: They do not fit together, or something else of the model would be shared.
        """
        ours = {id(p) for p in trainable(model.module).values()}
        theirs = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
        if ours != theirs:
            raise ParameterError(
                f"The optimizer has {len(theirs)} trainable parameters and the model {len(ours)}, and they are not the "
                "same: make it with model.parameters()."
            )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ParameterError("LBFGS computes several gradients per step, and a step pays for one: use another.")
        self.optimizer = optimizer
        self.mean = mean
        self._gradients = WorkerGradients(model, mean)

    def step(self) -> None:
        """Runs one round and takes one step; call it on all workers, after the backward pass.

        Raises:
            CpsgdError: As `PrivateMean.mean` does. Then no parameter was changed.
        """
        self._gradients.synchronise()
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients by the inner optimizer's `zero_grad`."""
        self.optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, object]:
        """Returns the optimizer's state and the number of steps that are spent."""
        return {"optimizer": self.optimizer.state_dict(), "round": self.mean.round}

    def load_state_dict(self, state: dict[str, object]) -> None:
        """Continues after the steps of a state; steps that this object has taken stay spent.

        Raises:
            ParameterError: The state has more steps than the budget was checked for.
        """
        spent, optimizer = state["round"], state["optimizer"]
        if not isinstance(spent, int) or not isinstance(optimizer, dict) or not 0 <= spent <= self.mean.rounds:
            raise ParameterError(
                f"Expected a state of at most {self.mean.rounds} steps: make PrivateMean with as many."
            )
        self.optimizer.load_state_dict(optimizer)
        self.mean.round = max(self.mean.round, spent)


class ExampleGradients:
    """Sets each replica's gradient to the private mean of all workers' clipped per-example gradients.

    There is no backward pass: gradients of single examples are computed, each is clipped, and the worker's sum of them
    goes through the protocol. It protects one example, for which the noise of a few workers suffices.

    Example:
        In each of two processes, as `torchrun --standalone --nproc-per-node 2 FILE` starts them:

        >>> import torch  # doctest: +SKIP
        >>> from torch.nn.parallel import DistributedDataParallel  # doctest: +SKIP
        >>> import cpsgd  # doctest: +SKIP
        >>> from cpsgd.engines.ddp import ExampleGradients  # doctest: +SKIP
        >>> from cpsgd.planner import plan_examples  # doctest: +SKIP
        >>> torch.distributed.init_process_group("gloo")  # doctest: +SKIP
        >>> model = DistributedDataParallel(torch.nn.Linear(2, 1, bias=False))  # doctest: +SKIP
        >>> _ = torch.nn.init.zeros_(model.module.weight)  # doctest: +SKIP
        >>> budget = {"epsilon": 2.0, "delta": 1e-6, "rounds": 1}  # doctest: +SKIP
        >>> best = plan_examples(2, 2, **budget, examples=1000, colluding=1)  # doctest: +SKIP
        >>> mean = cpsgd.PrivateMean(best.protocol, **budget, examples=1000)  # doctest: +SKIP
        >>> private = ExampleGradients(model, torch.nn.functional.mse_loss, mean)  # doctest: +SKIP
        >>> private.synchronise(torch.tensor([[0.3, 0.1]] * 1000), torch.ones(1000, 1))  # doctest: +SKIP
        >>> model.module.weight.grad.round(decimals=1)  # doctest: +SKIP
        tensor([[-0.6000, -0.2000]])
    """

    def __init__(self, model: DistributedDataParallel, loss: Loss, mean: PrivateMean) -> None:
        """Takes over the model's exchange of gradients.

        Args:
            model: The replica on this worker: float32 on the CPU, with layers that treat examples independently.
            loss: The loss of a batch, a mean over its examples.
            mean: The exchange, for the privacy of examples.

        Raises:
            ParameterError: The model and the protocol do not fit.
        """
        if mean.examples is None:
            raise ParameterError("This exchange protects whole workers: give PrivateMean the most `examples` of a sum.")
        self.mean = mean
        self._examples = mean.examples
        self._parameters = _take_over(model, mean)
        self._sums = ExampleSums(ClientUpdates(model.module, loss), mean.protocol.clip_norm, mean.examples)

    def synchronise(self, features: torch.Tensor, labels: torch.Tensor) -> None:
        """Sets every replica's `.grad` to the private sum over all workers' examples, divided by n · `examples`.

        Call it on all workers. It divides by the largest possible number, since the real one may be private.

        Args:
            features: This worker's examples, at most `examples` of them.
            labels: Their labels.

        Raises:
            CpsgdError: As `PrivateMean.mean` does. Then no gradient was changed.
        """
        _write(self._parameters, self.mean.mean(lambda: self._sum(features, labels)) / np.float32(self._examples))

    def _sum(self, features: torch.Tensor, labels: torch.Tensor) -> NDArray[np.float32]:
        if len(features) > self._examples:
            raise ParameterError(f"Got {len(features)} examples; the exchange is set up for at most {self._examples}.")
        batch = Batch(features.numpy(), labels.numpy(), np.array([len(features)]))
        rows = next(self._sums.chunks(batch))
        return rows.reshape(-1)


def _take_over(model: DistributedDataParallel, mean: PrivateMean) -> list[torch.nn.Parameter]:
    """Keeps the model's gradients on their worker; returns the parameters they belong to."""
    parameters = list(trainable(model.module).values())
    dim = sum(p.numel() for p in parameters)
    if dim != mean.protocol.dim:
        raise ParameterError(f"The model has {dim} trainable parameters, the protocol {mean.protocol.dim} coordinates.")
    check_layers(model.module)
    if model.broadcast_buffers and any(True for _ in model.module.buffers()):
        raise ParameterError(
            "DDP would send the model's buffers to all workers, outside of any privacy guarantee: make it with "
            "broadcast_buffers=False."
        )
    if model.find_unused_parameters or model.static_graph:
        raise ParameterError(
            "With find_unused_parameters or static_graph DDP tells all workers which parameters this one's data used, "
            "outside of any privacy guarantee: make it without."
        )
    model.register_comm_hook(None, _stay)
    return parameters


def _stay(
    state: None,
    bucket: torch.distributed.GradBucket,  # type: ignore[name-defined]  # PyTorch's stubs forget that it is exported
) -> torch.futures.Future[torch.Tensor]:
    """A DDP communication hook that leaves gradients on their worker."""
    here: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    here.set_result(bucket.buffer())
    return here


def _write(parameters: list[torch.nn.Parameter], mean: NDArray[np.float32]) -> None:
    """Writes the mean into the parameters' gradients."""
    start = 0
    for p in parameters:
        part = torch.from_numpy(mean[start : start + p.numel()]).reshape(p.shape).to(p.device, p.dtype)
        if p.grad is None:
            p.grad = part.clone()
        else:
            p.grad.copy_(part)
        start += p.numel()
