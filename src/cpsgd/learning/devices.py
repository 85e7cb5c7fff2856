"""Where a run is computed."""

from __future__ import annotations

from cpsgd.errors import ParameterError
from cpsgd.learning._torch import torch

NAMES = "cpu, cuda or auto"


def resolve(name: str | torch.device) -> torch.device:
    """The device of this name; "auto" is a GPU where there is one, otherwise the CPU.

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


def has_engine(device: torch.device) -> bool:
    """Whether rounds are computed on the device itself (`cpsgd.engines.device`) and not by the CPU's own kernels."""
    return device.type != "cpu"
