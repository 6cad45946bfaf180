"""Text generation, token by token, with a cache of keys and values.

Each attention layer caches its own heads and rows, for the tokens that may still be seen: all, or a window. So the cache is
sharded as attention is, in every tensor mode, pipeline stage and ZeRO stage.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import SpecError, all_reduce
from meshfold.mesh.model_io import eval_mode
from meshfold.mesh.spec import argument_checks as settings
from meshfold.mesh.tracking import uncompiled, without_tracking
from meshfold.models.attention import Attention, CausalMask
from meshfold.tensor_parallel.convert import padding_for_decoding


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

    Our own GPT and Llama keep keys and values: each further token costs a forward of one token, and attention to the tokens before
    it. This works in every tensor mode, in the stages of a pipeline and under ZeRO. They take 2 · layers · rows · kv_heads · length
    · head_dim elements, besides room to grow. Each rank has the part of its layers, rows and heads. With a window, the length is at
    most the window. They are let go at the end. If a mode splits the stream by tokens, the batch is padded to one row for each
    part, since each row has one token at a time. All tokens are recomputed:

    - where ranks share sequences (``sequence`` in ring, ulysses or a custom mode), where a single token is one rank's;
    - once the row is longer than ``max_positions``: its last tokens are looked at then, each in another place every time;
    - by any other model, and by ours with attention put in that is not theirs.

    The tokens are the same either way, but for two so close that rounding decides between them.

    Args:
        model: returns logits ``b s v`` in ``.logits`` (or directly) for ids alone; a module, or a pipeline of its stages.
        ids: ``b s`` int64, at least one token each.
        max_new_tokens: how many tokens to add.
        temperature: divides the logits; 0 takes the likeliest token.
        top_k: draw from the k likeliest alone.
        generator: a CPU generator or a seed; seed 0 by default.
        eos_token_id: a row that has drawn it repeats it; generation ends early when all rows have drawn it.
        use_cache: False: keep no keys and values, to save their memory.

    Returns:
        ``b (s + max_new_tokens)`` int64 on the device of ``ids``; fewer columns if all rows have drawn ``eos_token_id``.

    Raises:
        SpecError: for settings out of range.
    """
    if ids.dim() != 2 or ids.shape[1] == 0 or ids.is_floating_point():
        raise SpecError(f"ids of shape {tuple(ids.shape)} and {ids.dtype}: give int64 token ids [batch, length ≥ 1]")
    settings.count("max_new_tokens", max_new_tokens, least=0)
    if not temperature >= 0.0:
        raise SpecError(f"temperature={temperature!r}: give a number from 0 up")
    if top_k is not None and top_k < 1:
        raise SpecError(f"top_k={top_k!r}: give a whole number from 1 up")
    if eos_token_id is not None:
        settings.count("eos_token_id", eos_token_id, least=0)
    if generator is None or isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator or 0)
    config: Any = getattr(model, "config", None)
    longest: int | None = getattr(config, "max_positions", getattr(config, "max_position_embeddings", None))
    last = ids.shape[1] + max_new_tokens - 1  # longest row that still gets a next token
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


SPARE = 64
"""tokens for which there is room behind a prompt"""


class KeyValueCache:
    """Keys and values of one attention layer, ``b kv_heads s d`` each; local rows and heads.

    A model that runs in micro-batches calls its layers once for each, always in the same order, so each call finds its own
    tensors again.
    """

    def __init__(self, most: int) -> None:
        """Args:
        most: tokens that a later one may see, itself included.
        """
        self._most = most
        self._parts: list[_Rows] = []
        self._turn = 0

    @property
    def bytes(self) -> int:
        """Bytes that are allocated now."""
        return sum(rows.bytes for rows in self._parts)

    def rewind(self) -> None:
        """Start again at the first micro-batch. Call it before each forward of the model."""
        self._turn = 0

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keep the keys and values of new tokens, ``b s kv_heads d`` each: a whole prompt first, then one token at a time.

        Returns:
            Keys and values of all tokens that the last one may see, ``b s kv_heads d`` each, in any order; a prompt's own.

        Raises:
            SpecError: for several tokens after the first call.
        """
        if self._turn == len(self._parts):
            self._parts.append(_Rows(self._most))
        rows = self._parts[self._turn]
        self._turn += 1
        return rows.add(keys, values)


class _Rows:
    """Part of a cache that belongs to some rows of the batch.

    Token t is stored at ``t % most``: with a window, a new token overwrites the one that has just left it. A query sees the whole
    cache, and rotary positions are already in the keys, so the order does not matter.
    """

    def __init__(self, most: int) -> None:
        self._most, self._seen = most, 0
        self._kept: Tensor | None = None  # 2 b kv_heads s d

    @property
    def bytes(self) -> int:
        return 0 if self._kept is None else self._kept.nbytes

    def add(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        new, first = keys.shape[1], self._seen
        if first and new > 1:
            raise SpecError(f"{new} tokens for a cache that has {first}: after a prompt they come one at a time")
        self._seen += new
        filled, place = min(self._seen, self._most), first % self._most
        kept = self._kept = self._room(filled, keys)
        for into, tensor in zip(kept, (keys, values), strict=True):
            last = tensor.transpose(1, 2)[:, :, -self._most :]
            if new > self._most:
                last = last.roll(new % self._most, dims=2)
            into[:, :, place : place + last.shape[2]] = last
        if not first:
            return keys, values
        k, v = kept[:, :, :, :filled].transpose(2, 3)
        return k, v

    def _room(self, filled: int, like: Tensor) -> Tensor:
        """Return tensors with room for ``filled`` tokens; they double in length when full, so copies are few."""
        before = self._kept
        has = 0 if before is None else before.shape[3]
        if before is not None and filled <= has:
            return before
        b, _, kv_heads, d = like.shape
        length = min(self._most, max(2 * has, filled + SPARE))
        room = like.new_empty(2, b, kv_heads, length, d)
        if before is not None:
            room[:, :, :, :has] = before
        return room


@contextmanager
def keeping_keys(model: Any, tokens: int) -> Iterator[Callable[[Tensor], Any]]:
    """Context manager: inside, a model's attention keeps keys and values. All ranks that run the model must enter.

    Args:
        model: a module, or a pipeline of its stages.
        tokens: of the longest row to come.

    Yields:
        A callable that takes ids ``b s``, one token longer each time, and returns the output of the new tokens. If the model cannot
        keep keys (:func:`can_keep`), the model itself, which computes all tokens again.
    """
    whole = model if isinstance(model, nn.Module) else model.module
    if not _agreed(model, can_keep(whole)):
        yield model
        return
    window = attention_window(whole) or tokens
    caches, known = [], 0
    for layer in _layers(whole):
        layer.kv_cache = KeyValueCache(min(window, tokens))
        caches.append(layer.kv_cache)

    def call(ids: Tensor) -> Any:
        nonlocal known
        for cache in caches:
            cache.rewind()
        before, known = known, ids.shape[1]
        if not before:
            return model(ids)
        positions = torch.arange(before, known, device=ids.device).expand(ids.shape[0], -1)
        with without_tracking():  # sizes of 1 are ambiguous, and the prompt has run through the same code
            return model(ids[:, before:], position_ids=positions)

    try:
        with padding_for_decoding(whole), uncompiled():
            yield call
    finally:
        for layer in _layers(whole):
            layer.kv_cache = None


def can_keep(model: nn.Module) -> bool:
    """Return True if keys and values can be kept for a model, or for this rank's blocks of it.

    The model must say so (``caches_keys = True``: only :class:`Attention` mixes tokens), take positions, have that attention in
    each block, and get whole sequences, not token shards.
    """
    model = getattr(model, "_orig_mod", model)  # the module inside torch.compile's wrapper
    if not getattr(model, "caches_keys", False):
        return False
    blocks: Any = model.blocks
    here = [block for block in blocks if next(block.children(), None) is not None]  # skip blocks of other stages
    shared = any(not getattr(module, "makes_masks", True) for module in model.modules())
    takes_positions = "position_ids" in inspect.signature(model.forward).parameters
    return takes_positions and not shared and len(_layers(model)) == len(here)


def attention_layers(model: nn.Module) -> list[Attention]:
    """Return this rank's attention layers of one of our models, if only they mix tokens; an empty list for other models.

    Code that attends in a way of its own, over keys that it keeps, sets their ``attend``. See :func:`can_keep`.
    """
    model = getattr(model, "_orig_mod", model)
    return _layers(model) if can_keep(model) else []


def attention_window(model: nn.Module) -> int | None:
    """Return how many tokens a token of one of our models sees, itself included; None for all before it."""
    return min((m.window for m in model.modules() if isinstance(m, CausalMask) and m.window), default=None)


def _layers(model: nn.Module) -> list[Attention]:
    """Return the attention layers that can use a cache; a subclass with its own forward cannot."""
    return [m for m in model.modules() if isinstance(m, Attention) and type(m).forward is Attention.forward]


def _agreed(model: Any, here: bool) -> bool:
    """Return True if all stages can cache keys."""
    if isinstance(model, nn.Module):
        return here
    mine = torch.tensor(int(here), device=model.device)
    return bool(all_reduce(mine, model.mesh.group(model.axis), "min"))
