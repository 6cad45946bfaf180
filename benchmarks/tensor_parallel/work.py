"""Work of every contestant: blocks of one shape, their weights, the input, and the output of the serial blocks."""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor, nn


class Work:
    """The blocks' weights, the input, and the reference output, alike on every rank."""

    def __init__(self, args: argparse.Namespace, device: torch.device) -> None:
        from meshfold.models.attention import Rotary

        self.args, self.device = args, device
        self.dtype = getattr(torch, args.dtype)
        d = self.head_dim = args.head_dim or args.hidden // args.heads
        cos, sin = Rotary(d, 500000.0)(None, args.seq_len, device)
        self.rotary = (cos.to(self.dtype), sin.to(self.dtype))
        self.x = self.random("x", (args.batch * args.seq_len, args.hidden), 1.0)
        self.dy = self.random("dy", self.x.shape, 1.0 / math.sqrt(args.hidden))
        self.reference = self._reference()

    def random(self, name: str, shape: tuple[int, ...], std: float) -> Tensor:
        """Normal numbers that depend on the name alone."""
        generator = torch.Generator(self.device).manual_seed(sum(map(ord, name)) * 7919)
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=self.device).mul_(std).to(self.dtype)

    def weights(self, layer: int) -> dict[str, Tensor]:
        """The whole weights of one block, ``[out, in]``."""
        h, f, heads = self.args.hidden, self.args.ffn, self.args.heads * self.head_dim
        kv = self.args.kv_heads * self.head_dim
        shapes = {
            "q": (heads, h),
            "k": (kv, h),
            "v": (kv, h),
            "out": (h, heads),
            "gate": (f, h),
            "up": (f, h),
            "down": (h, f),
        }
        found = {name: self.random(f"{layer}.{name}", shape, 0.02) for name, shape in shapes.items()}
        return {**found, "norm1": torch.ones(h, dtype=self.dtype), "norm2": torch.ones(h, dtype=self.dtype)}

    def block(self, layer: int) -> nn.Module:
        """A serial block of ours."""
        from meshfold.models.config import LlamaConfig
        from meshfold.models.llama import Block

        a = self.args
        config = LlamaConfig(
            vocab_size=1,
            hidden=a.hidden,
            layers=a.layers,
            heads=a.heads,
            kv_heads=a.kv_heads,
            head_dim=a.head_dim,
            ffn=a.ffn,
            norm_eps=1e-5,
        )
        with torch.device("meta"):
            block = Block(config)
        w = self.weights(layer)
        block.norm1.weight, block.norm2.weight = nn.Parameter(w["norm1"]), nn.Parameter(w["norm2"])
        block.attn.qkv.weight = nn.Parameter(torch.cat((w["q"], w["k"], w["v"])))
        block.attn.out.weight = nn.Parameter(w["out"])
        block.mlp.gate_up.weight = nn.Parameter(torch.cat((w["gate"], w["up"])))
        block.mlp.down.weight = nn.Parameter(w["down"])
        return block

    def _reference(self) -> Tensor:
        """The output of the serial blocks, one block in memory at a time."""
        x = self.x
        with torch.no_grad():
            for layer in range(self.args.layers):
                x = self.block(layer)(x, self.args.seq_len, self.rotary)
        return x

    def error(self, found: Tensor, wanted: Tensor) -> float:
        """‖found − wanted‖ / ‖wanted‖."""
        return float((found.float() - wanted.float()).norm() / wanted.float().norm())

    def flops(self) -> float:
        """Floating point operations of forward and backward, causal attention counted as half."""
        a = self.args
        d, m = self.head_dim, a.batch * a.seq_len
        matmuls = a.hidden * (a.heads + 2 * a.kv_heads) * d + a.heads * d * a.hidden + 3 * a.hidden * a.ffn
        return float(a.layers * (6 * m * matmuls + 6 * m * a.seq_len * a.heads * d))
