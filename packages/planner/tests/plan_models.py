"""Small models for tests of plans: functions and classes that every rank can import."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshfold.models import build

SIZES: dict[str, Any] = dict(hidden=32, layers=4, heads=4, vocab_size=40, max_positions=16)


def llama() -> nn.Module:
    return build("llama-tiny", **SIZES, kv_heads=2, ffn=64)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Perceptron(nn.Module):
    """Without attention, of which other kernels keep other things."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 32)
        self.blocks = nn.ModuleList([Layer() for _ in range(6)])
        self.head = nn.Linear(32, 40)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)[:, :-1].flatten(0, 1)
        return {"loss": F.cross_entropy(logits, torch.flatten(labels[:, 1:]))}
