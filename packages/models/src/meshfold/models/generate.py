"""Text from a trained model, token by token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.spec import argument_checks as settings
from meshfold.models.cache import keeping_keys


@torch.no_grad()
def generate(
    model: Any,
    ids: Tensor,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | int | None = None,
    eos_token_id: int | None = None,
    use_cache: bool = True,
) -> Tensor:
    """Continue sequences; every rank of a sharded model calls and gets the same tokens.

    All ranks must hand in the same ids and generators in the same state. Probabilities are formed in float64 on the
    CPU, where the draws are made, so that a device has no say in them.

    Our own GPT and Llama keep keys and values, so that a further token costs a forward of that token alone, and attention
    to those before it: in every tensor mode, in the stages of a pipeline and under ZeRO. They take 2 · layers · rows ·
    kv_heads · length · head_dim elements, room to grow aside, of which each rank has those of its layers, rows and heads;
    of a window no more than that, as length. They are let go at the end. Where a mode splits the stream by tokens, the
    batch is filled up to as many rows as there are parts, since a row has one token at a time. All tokens are computed anew:

    - where ranks share sequences (``sequence`` in ring, ulysses or a mode of one's own), where a single token is one rank's;
    - once the row is longer than ``max_positions``: its last tokens are looked at then, each in another place every time;
    - by any other model, and by ours with attention put in that is not theirs.

    The tokens are the same either way, but for two so close that rounding decides between them.

    Args:
        model: returns logits ``b s v`` in ``.logits`` (or as they are) for ids alone; a module, or a pipeline of its stages.
        ids: ``b s`` int64, at least one token each.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest alone.
        generator: a CPU generator or a seed; seed 0 by default.
        eos_token_id: a row that has drawn it goes on with nothing else; ends early when all rows have.
        use_cache: False lets no keys and values be kept, where their memory is wanted.

    Returns:
        ``b (s + max_new_tokens)`` int64 on the device of ``ids``; fewer columns if all rows have drawn ``eos_token_id``.

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
    if eos_token_id is not None:
        settings.count("eos_token_id", eos_token_id, least=0)
    if generator is None or isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator or 0)
    config: Any = getattr(model, "config", None)
    longest: int | None = getattr(config, "max_positions", getattr(config, "max_position_embeddings", None))
    last = ids.shape[1] + max_new_tokens - 1  # the longest row of which a next token is wanted
    last = last if longest is None else min(last, longest)
    ended = torch.zeros(ids.shape[0], 1, dtype=torch.bool)
    with eval_mode(model if isinstance(model, nn.Module) else model.module), ExitStack() as keeping:
        call: Callable[[Tensor], Any] = model
        if use_cache and ids.shape[1] < last:
            call = keeping.enter_context(keeping_keys(model, last))
        for _ in range(max_new_tokens):
            if ids.shape[1] > last:
                keeping.close()
                call = model
            output = call(ids if longest is None else ids[:, -longest:])
            logits = getattr(output, "logits", output)[:, -1].double().cpu()
            drawn = _draw(logits, temperature, top_k, generator)
            if eos_token_id is not None:
                drawn = drawn.masked_fill(ended, eos_token_id)
                ended = ended | (drawn == eos_token_id)
            ids = torch.cat((ids, drawn.to(ids.device)), dim=1)
            if eos_token_id is not None and bool(ended.all()):
                break
    return ids


def _draw(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """``b v -> b 1``"""
    if temperature == 0.0:
        return logits.argmax(-1, keepdim=True)
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k, -1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator)
