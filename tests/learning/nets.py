"""Small models of every kind that people train."""

from __future__ import annotations

import torch
from torch import nn


def cnn() -> nn.Module:
    """For images [1, 8, 8]."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.ReLU(), nn.GroupNorm(2, 8), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
    )


class Transformer(nn.Module):
    """For 64 shades 0..16, as tokens."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(17, 4)
        self.places = nn.Parameter(0.5 * torch.randn(64, 4))
        self.layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.out = nn.Linear(256, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.out(self.layer(self.embedding(tokens) + self.places).flatten(1))
        return hidden


class Recurrent(nn.Module):
    """For 8 rows of 8 shades."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gru = nn.GRU(8, 24, batch_first=True)
        self.out = nn.Linear(24, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(self.gru(rows)[0][:, -1])
        return found


class LowRank(nn.Module):
    """A frozen layer with a low-rank change to it (LoRA), and a last layer."""

    def __init__(self, frozen: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frozen = frozen.requires_grad_(False)
        self.down = nn.Linear(frozen.in_features, rank, bias=False)
        self.up = nn.Linear(rank, frozen.out_features, bias=False)
        nn.init.zeros_(self.up.weight)
        self.out = nn.Linear(frozen.out_features, 10)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.out(torch.relu(self.frozen(features) + self.up(self.down(features))))
        return found


def low_rank() -> nn.Module:
    torch.manual_seed(1)
    return LowRank(nn.Linear(64, 32))
