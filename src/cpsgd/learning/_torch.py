"""The one place that imports torch, so that its absence is one clear message."""

from __future__ import annotations

try:
    import torch as torch
except ImportError:
    raise ImportError("Training needs PyTorch, which is not installed: pip install 'cpsgd[torch]'.") from None
