"""The model of every contestant: a decoder of OPT's shape, with the same first weights wherever they are made."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

WORDS = 50272
# Layers, hidden size, heads. OPT's: arXiv 2205.01068, table 1. Wide ones differ in layers alone, to place a size exactly.
SHAPES = {
    "tiny": (2, 64, 4),
    "125M": (12, 768, 12),
    "1.3B": (24, 2048, 32),
    "1.5B": (48, 1600, 25),
    "6.7B": (32, 4096, 32),
    "12B": (37, 5120, 40),
    "13B": (40, 5120, 40),
    "18B": (39, 6144, 48),
    "18.5B": (40, 6144, 48),
    "21B": (45, 6144, 48),
    "24B": (30, 8192, 64),
    "26B": (57, 6144, 48),
    "32B": (70, 6144, 48),
}


def shape_of(model: str) -> tuple[int, int, int]:
    """Return layers, hidden size and heads of a model of ``SHAPES``, or of a PaLM by its preset."""
    if model in SHAPES:
        return SHAPES[model]
    from meshfold.huggingface import palm_sizes

    sizes = palm_sizes(model)
    return sizes["layers"], sizes["hidden"], sizes["heads"]


class Recomputed(nn.Module):
    """A block whose activations are computed again in backward."""

    def __init__(self, block: nn.Module, reentrant: bool = False) -> None:
        """Args:
        block: called with the same arguments.
        reentrant: whether backward runs inside backward, as libraries that free parameters in hooks ask for.
        """
        super().__init__()
        self.block, self.reentrant = block, reentrant

    def forward(self, *args: Any, **keywords: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.block, *args, use_reentrant=self.reentrant, **keywords)


def decoder(
    layers: int, hidden: int, heads: int, seq_len: int, *, tie: bool = False, reentrant: bool = False
) -> nn.Module:
    """A decoder, each block recomputed in backward."""
    from meshfold.models import build, preset

    sizes = dict(layers=layers, hidden=hidden, heads=heads, vocab_size=WORDS, max_positions=seq_len)
    made = build(preset("gpt2", dropout=0.0, tie=tie, **sizes))
    made.blocks = nn.ModuleList(Recomputed(block, reentrant) for block in made.blocks)
    return made


def skeleton(
    layers: int, hidden: int, heads: int, seq_len: int, *, tie: bool = False, reentrant: bool = False
) -> nn.Module:
    """The same on the meta device."""
    with torch.device("meta"):
        return decoder(layers, hidden, heads, seq_len, tie=tie, reentrant=reentrant)


@torch.no_grad()
def fill(name: str, parameter: Tensor, layers: int) -> None:
    """First values of one parameter, in place: what the decoder's own initialisation would give in distribution.

    Drawn on the parameter's device, by the name alone: two contestants on one kind of device start alike.

    Args:
        name: its name in the decoder; what a library put before or between is of no matter.
        parameter: the whole of it.
        layers: of the decoder.
    """
    parts = name.split(".")
    if parameter.dim() < 2:
        parameter.fill_(1.0 if "norm" in parts[-2] and parts[-1] == "weight" else 0.0)
        return
    own = [part for part in parts if part not in ("_checkpoint_wrapped_module", "module")]
    seed = sum(place * ord(letter) for place, letter in enumerate(".".join(own), 1))
    generator = torch.Generator(parameter.device).manual_seed(seed)
    scale = 1 / math.sqrt(2 * layers) if parts[-2] in ("out", "down") else 1.0
    parameter.normal_(std=0.02 * scale, generator=generator)


def count(model: nn.Module) -> int:
    """Parameters of a model, tied ones once."""
    return sum(parameter.numel() for parameter in {id(p): p for p in model.parameters()}.values())
