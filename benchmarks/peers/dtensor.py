"""torch's own tensor parallelism: DTensor with sequence parallelism, the plan that torchtitan uses for Llama."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class PeerAttention(nn.Module):
    """Llama attention with a projection each for Q, K and V, as DTensor's plans expect."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int) -> None:
        super().__init__()
        self.d = head_dim
        self.wq = nn.Linear(hidden, heads * self.d, bias=False)
        self.wk = nn.Linear(hidden, kv_heads * self.d, bias=False)
        self.wv = nn.Linear(hidden, kv_heads * self.d, bias=False)
        self.wo = nn.Linear(heads * self.d, hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s = x.shape[:2]
        q, k, v = (w(x).view(b, s, -1, self.d) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            is_causal=True,
            enable_gqa=q.shape[2] != k.shape[2],
        )
        return self.wo(y.transpose(1, 2).reshape(b, s, -1))  # type: ignore[no-any-return]


class PeerMLP(nn.Module):
    """SwiGLU with a weight each for gate and up."""

    def __init__(self, hidden: int, ffn: int) -> None:
        super().__init__()
        self.w1, self.w3 = nn.Linear(hidden, ffn, bias=False), nn.Linear(hidden, ffn, bias=False)
        self.w2 = nn.Linear(ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # type: ignore[no-any-return]


class PeerBlock(nn.Module):
    """A Llama block."""

    def __init__(self, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, eps: float) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.attention = PeerAttention(hidden, heads, kv_heads, head_dim)
        self.feed_forward = PeerMLP(hidden, ffn)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.feed_forward(self.ffn_norm(x))  # type: ignore[no-any-return]

    def fill(self, weights: dict[str, Tensor]) -> None:
        """Take the weights that all contestants share."""
        a, f = self.attention, self.feed_forward
        targets = {
            "norm1": self.attention_norm,
            "norm2": self.ffn_norm,
            "q": a.wq,
            "k": a.wk,
            "v": a.wv,
            "out": a.wo,
            "gate": f.w1,
            "up": f.w3,
            "down": f.w2,
        }
        for name, module in targets.items():
            module.weight = nn.Parameter(weights[name].clone())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary positions, ``b s heads d``."""
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


def shard(block: PeerBlock, device_mesh: Any) -> None:
    """Column and row parallel with the residual stream split over the sequence."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    parallelize_module(
        block,
        device_mesh,
        {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
            ),
            "attention.wq": ColwiseParallel(),
            "attention.wk": ColwiseParallel(),
            "attention.wv": ColwiseParallel(),
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w3": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        },
    )
