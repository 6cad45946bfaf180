"""The state between generated tokens in Triton: one program records a token of all rows; others look rows of a table up."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.token_state import TokenState

_COLUMNS = 1024


@triton.jit
def _record(tokens, logprobs, ids, positions, going, step, all_tokens, all_logprobs, rows, last, B: tl.constexpr):
    row = tl.arange(0, B)
    inside = row < rows
    at = tl.load(step)
    token = tl.load(tokens + row, mask=inside, other=0)
    place = tl.load(positions + row, mask=inside, other=0) + tl.load(going + row, mask=inside, other=0)
    logprob = tl.load(logprobs + row, mask=inside, other=0.0).to(tl.float64)
    tl.store(all_tokens + at * rows + row, token, mask=inside)
    tl.store(all_logprobs + at * rows + row, logprob, mask=inside)
    tl.store(ids + row, token, mask=inside)
    tl.store(positions + row, tl.minimum(place, last), mask=inside)
    tl.debug_barrier()  # all threads have read the step
    tl.store(step, at + 1)


@triton.jit
def _rows(ids, table, y, first, count, columns, BC: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BC + tl.arange(0, BC)
    local = tl.load(ids + row) - first
    here = (local >= 0) & (local < count) & (column < columns)
    found = tl.load(table + local * columns + column, mask=here, other=0.0)
    tl.store(y + row * columns + column, found, mask=column < columns)


def launch_record(tokens: Tensor, logprobs: Tensor, state: TokenState, last: int) -> None:
    """Run the kernel; arguments as of :meth:`TokenState.record`."""
    rows = tokens.shape[0]
    given = (tokens.contiguous(), logprobs.contiguous(), *state, rows, last)
    launch(_record, (1,), tokens, *given, B=triton.next_power_of_2(rows), num_warps=1 if rows <= 64 else 4)


def launch_rows(ids: Tensor, table: Tensor, first: int) -> Tensor:
    """Run the kernel; arguments as of :func:`meshfold.kernels.table_rows`."""
    count, columns = table.shape
    y = torch.empty(ids.shape[0], columns, dtype=table.dtype, device=ids.device)
    wide = min(_COLUMNS, triton.next_power_of_2(columns))
    launch(_rows, (ids.shape[0], cdiv(columns, wide)), ids, ids, table, y, first, count, columns, BC=wide, num_warps=4)
    return y
