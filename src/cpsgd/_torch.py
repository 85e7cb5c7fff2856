"""The one place where torch is imported, so that its absence is one clear message."""

from __future__ import annotations

try:
    import torch as torch
except ImportError:
    raise ImportError("Training and simulating on a device need PyTorch: pip install 'cpsgd[torch]'") from None
