"""The one place where the engine imports torch, so that its absence is one clear message."""

from __future__ import annotations

try:
    import torch as torch
except ImportError:
    raise ImportError("Simulating on a device needs PyTorch: pip install 'cpsgd[torch]'.") from None
