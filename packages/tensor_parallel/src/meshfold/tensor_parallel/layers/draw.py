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

from meshfold.mesh.dropout_stream import current_dropout_stream
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

    return draw_now
