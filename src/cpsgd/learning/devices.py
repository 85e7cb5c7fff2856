"""The device of a run: its choice, errors about its memory, and contexts that make PyTorch repeatable."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from cpsgd._torch import torch
from cpsgd.errors import CpsgdError, ParameterError, UserFunctionError

NAMES = "cpu, cuda or auto"

# Messages of CUDA and its matrix library about a full GPU, if PyTorch does not notice it first.
_FULL = "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED"


def resolve(name: str | torch.device) -> torch.device:
    """Returns the device of this name; "auto" is a GPU if there is one, otherwise the CPU.

    Raises:
        ParameterError: There is no such device here.

    Example:
        >>> resolve("cpu")
        device(type='cpu')
        >>> resolve("tpu")
        Traceback (most recent call last):
        cpsgd.errors.ParameterError: Unknown device 'tpu'. Known are cpu, cuda or auto.
    """
    if name == "auto":
        return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ParameterError(f"Unknown device {name!r}. Known are {NAMES}.") from None
    if device.type == "cpu":
        return torch.device("cpu")
    if device.type != "cuda":
        raise ParameterError(f"Unknown device {str(name)!r}. Known are {NAMES}.")
    if not torch.cuda.is_available():
        built = "PyTorch sees no NVIDIA GPU" if torch.version.cuda else "this PyTorch was built without CUDA"
        raise ParameterError(
            f"There is no CUDA device: {built}. Use device cpu or auto, or install a driver and a CUDA PyTorch."
        )
    index = device.index or 0
    if index >= torch.cuda.device_count():
        raise ParameterError(f"There is no GPU number {index}; there are {torch.cuda.device_count()}, counted from 0.")
    return torch.device("cuda", index)


@contextmanager
def enough_memory(needed_for: str, remedy: str) -> Iterator[None]:
    """Turns PyTorch's errors about a full GPU into a `ParameterError` with a remedy.

    Args:
        needed_for: Name of the object that did not fit.
        remedy: A remedy beside the CPU, and whether the round was charged.

    Example:
        >>> with enough_memory("the model", "use a smaller one."):
        ...     raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.77 GiB.")
        Traceback (most recent call last):
        cpsgd.errors.ParameterError: The GPU has too little memory for the model. Free it, use device cpu, or use a ...
    """
    try:
        yield
    except RuntimeError as error:
        if not _is_full(error):
            raise
        raise ParameterError(
            f"The GPU has too little memory for {needed_for}. Free it, use device cpu, or {remedy}"
        ) from None


@contextmanager
def own_code(what: str, consequence: str = "Nothing was charged.", *, quoted: bool = False) -> Iterator[None]:
    """Turns errors of the caller's own model, loss, data set or callback into a `UserFunctionError`.

    The error's text is `quoted` only if it cannot hold data. Errors about memory stay as they are.
    """
    try:
        yield
    except (CpsgdError, MemoryError):
        raise
    except Exception as error:
        if _is_full(error):
            raise
        raise UserFunctionError(what, error, consequence, quoted=quoted) from error


def _is_full(error: Exception) -> bool:
    return isinstance(error, torch.cuda.OutOfMemoryError) or any(text in str(error) for text in _FULL)


def is_gpu(device: torch.device) -> bool:
    """Returns whether rounds are computed by `cpsgd.simulation.device` and not by the CPU's own kernels."""
    return device.type != "cpu"


@contextmanager
def one_thread() -> Iterator[None]:
    """Makes PyTorch use one thread: results do not depend on the machine's cores, and no thread spins meanwhile."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def fixed_draws(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds PyTorch's generators, for layers such as dropout, and restores them afterwards."""
    on_gpu = device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # Not torch.manual_seed, which also queues work for kinds of devices that nobody uses.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            torch.cuda.default_generators[device.index].manual_seed(seed)
        yield
