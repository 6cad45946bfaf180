"""The next key of a dropout, as an operation that torch.compile leaves in its graph and runs at every call.

Which step and which call it is lives in a context variable, which cannot be traced, and would be a constant of the
graph if it could. So a compiled graph asks for it when it runs. A module's name travels as a number in a tensor: as a
string it would make every block a graph of its own.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.random import TokenShards, current_dropout_stream, key_of, next_dropout_draw

_NAMES: dict[int, str] = {}


def code_of(name: str) -> Tensor:
    """Return a number for a name, int64, on the CPU."""
    _operation()  # there before anything is traced
    code = key_of(name)
    _NAMES[code] = name
    return torch.tensor(code)


def draw(x: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Return (seed, key, first row, first token, rows) of the next dropout under a name, on the device of ``x``."""
    seed, key, first_row, first_token, rows = torch.ops.meshfold.draw(x.detach(), code).unbind()
    return seed, key, first_row, first_token, rows


def dealt_numbers(
    tokens: Tensor, size: int, dealt: TokenShards | None, *, rows: bool
) -> tuple[Tensor, int | Tensor]:
    """Return numbers among whole sequences of tokens that are numbered among this rank's shards.

    Args:
        tokens: int64, any shape.
        size: how many there are of this rank's parts.
        dealt: which tokens of each sequence those are; None: all. A graph asks for it when it runs.
        rows: they are of several sequences, one behind the other; else another number of them is no sequence's.

    Returns:
        The numbers, and how many there are in whole sequences.
    """
    if torch.compiler.is_compiling():
        found = torch.ops.meshfold.dealt_numbers(tokens, size, rows)
        return found[1:].view(tokens.shape), found[0]
    if dealt is None or (size % dealt.local if rows else size != dealt.local):
        return tokens, size
    return dealt.numbers(tokens), size // dealt.local * dealt.length


@cache
def _operation() -> Any:
    @torch.library.custom_op("meshfold::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw_now(x: Tensor, code: Tensor) -> Tensor:
        made = next_dropout_draw(_NAMES[int(code)])
        numbers = [made.seed, made.key, made.first_row, made.first_token, made.rows]
        return torch.tensor(numbers, dtype=torch.int64).to(x.device, non_blocking=True)

    @draw_now.register_fake
    def _(x: Tensor, code: Tensor) -> Tensor:
        return x.new_empty(5, dtype=torch.int64)

    @torch.library.custom_op("meshfold::dealt_numbers", mutates_args=())
    def numbers_now(tokens: Tensor, size: int, rows: bool) -> Tensor:
        found, whole = dealt_numbers(tokens, size, current_dropout_stream().token_shards, rows=rows)
        return torch.cat([torch.tensor([whole], device=tokens.device), found.flatten()])

    @numbers_now.register_fake
    def _(tokens: Tensor, size: int, rows: bool) -> Tensor:
        return tokens.new_empty(tokens.numel() + 1)

    return draw_now
