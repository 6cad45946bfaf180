"""Text from a trained model, token by token."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.engine import settings
from meshfold.mesh import SpecError
from meshfold.mesh.evaluating import evaluating


@torch.no_grad()
def generate(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | int | None = None,
) -> Tensor:
    """Continue sequences; every rank of a sharded model calls and gets the same tokens.

    All ranks must hand in the same ids and generators in the same state. Probabilities are formed in float64 on the
    CPU, where the draws are made, so that a device has no say in them. There is no cache of keys and values: the
    cost grows with the square of the length.

    Args:
        model: returns logits ``b s v`` in ``.logits`` (or as they are) for ids alone; a module, or a pipeline of its stages.
        ids: ``b s`` int64, at least one token each.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest alone.
        generator: a CPU generator or a seed; seed 0 by default.

    Returns:
        ``b (s + max_new_tokens)`` int64 on the device of ``ids``.

    Raises:
        SpecError: for settings out of range.
    """
    if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
        raise SpecError(
            f"ids of shape {tuple(ids.shape)} and {ids.dtype}: give int64 token ids [batch, length ≥ 1]"
        )
    settings.count("max_new_tokens", max_new_tokens, least=0)
    if not temperature >= 0.0:
        raise SpecError(f"temperature={temperature!r}: a number from 0 up")
    if top_k is not None and top_k < 1:
        raise SpecError(f"top_k={top_k!r}: a whole number from 1 up")
    if generator is None or isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator or 0)
    config: Any = getattr(model, "config", None)
    longest: int | None = getattr(config, "max_positions", getattr(config, "max_position_embeddings", None))
    with evaluating(model if isinstance(model, nn.Module) else model.module):
        for _ in range(max_new_tokens):
            output = model(ids if longest is None else ids[:, -longest:])
            logits = getattr(output, "logits", output)[:, -1].double().cpu()
            ids = torch.cat((ids, _draw(logits, temperature, top_k, generator).to(ids.device)), dim=1)
    return ids


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """``b v -> b 1``"""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
