"""The one-shot sum with residual and RMSNorm in Triton: a program for each row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import launch
from meshfold.kernels.one_shot import OneShotMemory
from meshfold.kernels.overlap import early
from meshfold.kernels.weights_ahead import Ahead, launch_ahead
from meshfold.kernels.weights_ahead_triton import ask, asking


@triton.jit
def _one_shot(
    addresses,
    x,
    stream,
    gain,
    total,
    y,
    slot,
    most,
    columns,
    eps,
    rows,
    first_ahead,
    second_ahead,
    pieces,
    FLAG_BYTES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    ADDS: tl.constexpr,
    BH: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):
    row = tl.program_id(0)
    if AHEAD and row >= rows:
        ask(first_ahead, second_ahead, pieces, row - rows, THREADS)
        return
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    column = tl.arange(0, BH)
    inside = column < columns
    here = row * columns + column
    at = slot * most + row
    there = at.to(tl.int64) * columns + column
    mine = tl.load(x + here, mask=inside, other=0.0)
    before = tl.load(stream + here, mask=inside, other=0.0)  # loaded now, so that it is here when the flags are
    factor = tl.load(gain + column, mask=inside, other=0.0)
    # A pointer that was loaded itself has an unknown alignment, and would be read element by element.
    own = tl.multiple_of((tl.load(addresses + RANK) + FLAG_BYTES).to(tl.pointer_type(x.dtype.element_ty)), 16)
    tl.store(own + there, mine, mask=inside)
    tl.debug_barrier()  # all threads have written before one raises flags
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = tl.load(addresses + rank).to(tl.pointer_type(tl.int32)) + at * RANKS + RANK
            tl.atomic_xchg(flag, 1, sem="release", scope="sys")
    for rank in tl.static_range(RANKS):
        if rank != RANK:
            flag = tl.load(addresses + RANK).to(tl.pointer_type(tl.int32)) + at * RANKS + rank
            while tl.atomic_cas(flag, 1, 0, sem="acquire", scope="sys") != 1:
                pass
    tl.debug_barrier()
    acc = tl.zeros((BH,), tl.float32)
    for rank in tl.static_range(RANKS):  # in the same order on every rank: the same bits
        if rank == RANK:
            acc += mine.to(tl.float32)
        else:
            theirs = tl.multiple_of(
                (tl.load(addresses + rank) + FLAG_BYTES).to(tl.pointer_type(x.dtype.element_ty)), 16
            )
            acc += tl.load(theirs + there, mask=inside, other=0.0, cache_modifier=".cg").to(tl.float32)
    rounded = acc.to(total.dtype.element_ty)
    summed = (before.to(tl.float32) + rounded.to(tl.float32)).to(stream.dtype.element_ty)
    tl.store(total + here, summed if ADDS else rounded, mask=inside)
    summed = summed.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(summed * summed, 0) / columns + eps)
    normed = summed * scale * factor.to(tl.float32)
    tl.store(y + here, normed.to(y.dtype.element_ty), mask=inside)


def launch_one_shot(
    x: Tensor, stream: Tensor, gain: Tensor, eps: float, memory: OneShotMemory, slot: int, *, adds: bool
) -> tuple[Tensor, Tensor]:
    """Run the kernel; arguments as of :func:`meshfold.kernels.one_shot.one_shot_sum`."""
    x, stream = x.contiguous(), stream.contiguous()
    total, y = torch.empty_like(x), torch.empty_like(x)
    wide = triton.next_power_of_2(x.shape[1])
    warps = 4 if wide <= 2048 else 8 if wide <= 8192 else 16

    def run(ahead: Ahead) -> None:
        launch(
            _one_shot,
            (x.shape[0] + ahead.programs(32 * warps),),
            x,
            memory.addresses,
            x,
            stream,
            gain,
            total,
            y,
            slot,
            memory.rows,
            x.shape[1],
            eps,
            x.shape[0],
            *ahead,
            FLAG_BYTES=memory.flag_bytes,
            RANK=memory.rank,
            RANKS=memory.addresses.numel(),
            ADDS=adds,
            BH=wide,
            num_warps=warps,
            **early(),
            **asking(ahead, warps),
        )

    launch_ahead(run)
    return total, y
