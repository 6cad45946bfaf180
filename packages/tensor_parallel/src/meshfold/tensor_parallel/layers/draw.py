"""The next key of a dropout, as an operation that torch.compile leaves in its graph and runs at every call.

Which step and which call it is lives in a context variable, which cannot be traced, and would be a constant of the
graph if it could. So a compiled graph asks for it when it runs. A module's name travels as a number in a tensor: as a
string it would make every block a graph of its own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.dropout_stream import Dealt, current_dropout_stream
from meshfold.mesh.random import key_of

_NAMES: dict[int, str] = {}


def code_of(name: str) -> Tensor:
    """A number for a name, int64, on the CPU."""
    _operation()  # there before anything is traced
    code = key_of(name)
    _NAMES[code] = name
    return torch.tensor(code)


def draw(x: Tensor, code: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(seed, key, first row, first token) of the next dropout under a name: four numbers on the device of ``x``."""
    seed, key, first_row, first_token = torch.ops.meshfold.draw(x.detach(), code).unbind()
    return seed, key, first_row, first_token


def dealt_place(here: Tensor, before: Tensor, shape: list[int]) -> Tensor:
    """:func:`dealt_rows` for the current stream, as an operation of the graph."""
    found: Tensor = torch.ops.meshfold.dealt_place(here, before, shape)
    return found


def dealt_rows(here: Tensor, before: int | Tensor, shape: Sequence[int], dealt: Dealt | None) -> Tensor:
    """The rows of the global batch's ``.. h`` that some of this data coordinate's are.

    Args:
        here: numbers among this data coordinate's rows, int64.
        before: sequences of the coordinates before; their tokens where dims are flat.
        shape: what a sequence has between its own dim and the last: ``s`` for ``b s h``, nothing for ``b h``; ``0`` where
            batch and tokens are one dim, ``m h``.
        dealt: which tokens of each sequence are here; None: all.
    """
    each = math.prod(size or 1 for size in shape)
    if dealt is None or not shape or shape[-1] not in (0, dealt.local):
        return before * each + here
    whole = each // dealt.local * dealt.length if shape[-1] else 1
    return before * whole + dealt.numbers(here)


@cache
def _operation() -> Any:
    @torch.library.custom_op("meshfold::draw", mutates_args=(), tags=(torch.Tag.nondeterministic_seeded,))
    def draw_now(x: Tensor, code: Tensor) -> Tensor:
        stream = current_dropout_stream()
        numbers = [stream.seed, stream.next_key(_NAMES[int(code)]), stream.first_row, stream.first_token]
        return torch.tensor(numbers, dtype=torch.int64).to(x.device, non_blocking=True)

    @draw_now.register_fake
    def _(x: Tensor, code: Tensor) -> Tensor:
        return x.new_empty(4, dtype=torch.int64)

    @torch.library.custom_op("meshfold::dealt_place", mutates_args=())
    def place_now(here: Tensor, before: Tensor, shape: list[int]) -> Tensor:
        return dealt_rows(here, before, shape, current_dropout_stream().dealt)

    @place_now.register_fake
    def _(here: Tensor, before: Tensor, shape: list[int]) -> Tensor:
        return torch.empty_like(here)

    return draw_now
