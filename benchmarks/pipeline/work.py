"""What every contestant of the pipeline benchmark trains: one Llama, its weights by their names, the same batch."""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, all_reduce
from meshfold.models.config import LlamaConfig
from meshfold.models.llama import Llama


class Work:
    """Shapes, weights and the batch.

    Attributes:
        mesh: the axis ``pipe`` over all ranks.
        device: of this rank.
        config: of the model; small vocabulary, so that stages weigh alike.
    """

    def __init__(self, args: argparse.Namespace, mesh: Mesh, device: torch.device) -> None:
        self.args, self.mesh, self.device = args, mesh, device
        self.dtype: torch.dtype = getattr(torch, args.dtype)
        self.config = LlamaConfig(
            vocab_size=args.vocab,
            hidden=args.hidden,
            layers=args.layers,
            heads=args.heads,
            kv_heads=args.kv_heads,
            ffn=args.ffn,
            max_positions=args.seq_len,
            rope_theta=500000.0,
        )

    def model(self) -> Llama:
        """The whole model without memory."""
        with torch.device("meta"):
            return Llama(self.config).to(self.dtype)

    def fill(self, module: nn.Module) -> None:
        """Give what is on the meta device its values: normal numbers that depend on the parameter's name alone."""
        for path, child in module.named_modules():
            for leaf, parameter in list(child._parameters.items()):
                if parameter is None or not parameter.is_meta:
                    continue
                name = f"{path}.{leaf}" if path else leaf
                child._parameters[leaf] = nn.Parameter(self._values(name, parameter.shape))

    def _values(self, name: str, shape: torch.Size) -> Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=self.dtype, device=self.device)
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        values = torch.empty(shape, dtype=self.dtype, device=self.device)
        return values.normal_(std=0.02, generator=generator)

    def batch(self, microbatches: int) -> Tensor:
        """Token ids, ``microbatches · rows s``, the same on every rank."""
        generator = torch.Generator().manual_seed(5)
        shape = (microbatches * self.args.rows, self.args.seq_len)
        return torch.randint(self.config.vocab_size, shape, generator=generator).to(self.device)

    def norms(self, named: Iterable[tuple[str, nn.Parameter]]) -> list[float]:
        """Norm of the gradient of every block, of what is before and of what is behind them: over all ranks."""
        layers = self.args.layers
        squares = torch.zeros(layers + 2, dtype=torch.float64, device=self.device)
        for name, parameter in named:
            parts = name.split(".")
            place = int(parts[1]) if parts[0] == "blocks" else layers + (parts[0] != "embed")
            if parameter.grad is not None:
                squares[place] += parameter.grad.float().square().sum().double()
        return all_reduce(squares, self.mesh.group("pipe")).sqrt().tolist()

    def flops(self, microbatches: int) -> float:
        """Floating point operations of a step, causal attention counted as half."""
        tokens = microbatches * self.args.rows * self.args.seq_len
        attention = 6 * self.args.layers * self.args.hidden * self.args.seq_len
        return float(tokens * (6 * self.config.matmul_parameters() + attention))
