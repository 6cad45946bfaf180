"""GPT-2's initial weights, by in-place operations alone, so that their recording can be replayed on shards."""

from __future__ import annotations

import math

from torch import nn

STD = 0.02


def initialize(model: nn.Module, residual_projections: tuple[str, ...], layers: int) -> None:
    """Normal weights of std 0.02, zero biases; projections into the residual stream scaled by 1/√(2 layers).

    Source: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, section 2.3.

    Args:
        residual_projections: last parts of the names of those projections.
        layers: blocks, each of which adds to the stream twice.
    """
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            scale = 1 / math.sqrt(2 * layers) if name.rsplit(".", 1)[-1] in residual_projections else 1.0
            nn.init.normal_(module.weight, std=STD * scale)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
