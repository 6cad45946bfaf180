"""Products of one row with a weight in Triton, which read the weight, or its codes, at the speed of memory.

A program takes a few outputs and goes along their rows of the weight; sums are in float32. Weights and codes that consist of words
of eight bytes have a program of their own (``row_words_triton.py``). Operations before and after a product run in the same launch:
RMSNorm of the row, a second product that gates, a bias, a residual.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.one_shot import OneShotMemory
from meshfold.kernels.one_shot_packets import epoch_bytes
from meshfold.kernels.one_shot_packets_triton import begin_next, epoch_to_send
from meshfold.kernels.overlap import early
from meshfold.kernels.row_product import RowWeight
from meshfold.kernels.row_tiles import RowCall, Tile, group_of
from meshfold.kernels.row_words_triton import finish, product_words
from meshfold.kernels.weights_ahead import take_product


@triton.jit
def _of_group(weight, scale, zero, group, mask, ZERO: tl.constexpr):
    if ZERO:
        weight -= tl.load(zero + group, mask=mask, other=0).to(tl.float32)
    return weight * tl.load(scale + group, mask=mask, other=0.0)


@triton.jit
def _weights(w, wide, w_row, here, mask):
    return tl.load(w + wide * w_row + here[None, :], mask=mask, other=0.0, eviction_policy="evict_first")


@triton.jit
def _times(tile, given, scale, zero, row, inside, group, mask, GROUP: tl.constexpr, ZERO: tl.constexpr):
    """Return the products of a tile of a weight, or of codes whose scale is not one of the whole row, with a part of the row."""
    weight = tile.to(tl.float32)
    if GROUP > 1:
        weight = _of_group(weight, scale, zero, group, mask, ZERO)
    elif ZERO:
        weight -= tl.load(zero + row, mask=inside, other=0).to(tl.float32)[:, None]
    return weight * given[None, :]


@triton.jit
def _given(x, gain, here, there, NORM: tl.constexpr):
    """Return a part of the row, times the norm's gain, and its squares."""
    given = tl.load(x + here, mask=there, other=0.0).to(tl.float32)
    squares = given * given
    if NORM:
        given *= tl.load(gain + here, mask=there, other=0.0).to(tl.float32)
    return given, squares


@triton.jit(do_not_specialize=["slot"])
def _product(
    x,
    w,
    w2,
    scale,
    scale2,
    zero,
    zero2,
    bias,
    bias2,
    gain,
    add,
    y,
    n,
    k,
    w_row,
    groups,
    eps,
    addresses,
    slot,
    most,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    EPOCH_BYTES: tl.constexpr,
):
    """Multiply by a weight (GROUP 0), by codes with a scale of each row (GROUP 1), or of each group."""
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < n
    column = tl.arange(0, BK)
    wide = row.to(tl.int64)[:, None]
    acc = tl.zeros((BN, BK), tl.float32)
    acc2 = tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    if EARLY:  # the first weights are on their way while the kernel before ends; what it writes is read after that
        there = column < k
        mask = inside[:, None] & there[None, :]
        tile = _weights(w, wide, w_row, column, mask)
        tile2 = tile
        if GATED:
            tile2 = _weights(w2, wide, w_row, column, mask)
        begin_next(RANKS)
        given, squares = _given(x, gain, column, there, NORM)
        group = wide * groups + (column // GROUP if GROUP > 1 else column * 0)[None, :]
        acc = _times(tile, given, scale, zero, row, inside, group, mask, GROUP, ZERO)
        if GATED:
            acc2 = _times(tile2, given, scale2, zero2, row, inside, group, mask, GROUP, ZERO)
    epoch = 0
    if RANKS:  # loaded now, so that it is here when outputs are sent
        epoch = epoch_to_send(addresses, slot, most, RANK)
    for at in tl.range(BK if EARLY else 0, k, BK, num_stages=STAGES):
        here = at + column
        there = here < k
        given, squared = _given(x, gain, here, there, NORM)
        if NORM:
            squares += squared
        mask = inside[:, None] & there[None, :]
        group = wide * groups + (here // GROUP if GROUP > 1 else here * 0)[None, :]
        tile = _weights(w, wide, w_row, here, mask)
        acc += _times(tile, given, scale, zero, row, inside, group, mask, GROUP, ZERO)
        if GATED:
            tile2 = _weights(w2, wide, w_row, here, mask)
            acc2 += _times(tile2, given, scale2, zero2, row, inside, group, mask, GROUP, ZERO)
    total, other = tl.sum(acc, 1), tl.sum(acc2, 1)
    if GROUP == 1:
        total *= tl.load(scale + row, mask=inside, other=0.0)
        if GATED:
            other *= tl.load(scale2 + row, mask=inside, other=0.0)
    squared = tl.sum(squares, 0)
    finish(
        total,
        other,
        squared,
        bias,
        bias2,
        add,
        y,
        row,
        inside,
        n,
        k,
        eps,
        addresses,
        epoch,
        slot,
        most,
        NORM,
        GATED,
        BIAS,
        ADD,
        RANKS,
        RANK,
        EPOCH_BYTES,
        BN,
    )


@triton.jit
def _level(word, place: tl.constexpr):
    # A code of four bits becomes the last digits of a float with a fixed exponent: no conversion, which is slower.
    return ((word & (15 << (4 * place))) | 0x4B000000).to(tl.float32, bitcast=True) - 8388608.0


@triton.jit
def _one_of_eight(x, word, there, place: tl.constexpr):
    """Return elements ``8 word + place`` in float32."""
    if x.dtype.element_ty == tl.bfloat16:
        # Four of them in one load: bfloat16 is the upper half of float32.
        four = tl.load(x.to(tl.pointer_type(tl.int64)) + word * 2 + place // 4, mask=there[:, None], other=0)
        two = (four >> 32).to(tl.int32) if place % 4 > 1 else four.to(tl.int32)
        return (two & -65536 if place % 2 else two << 16).to(tl.float32, bitcast=True)
    return tl.load(x + word * 8 + place, mask=there[:, None], other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=["slot"])
def _product_int4(
    x,
    w,
    w2,
    scale,
    scale2,
    zero,
    zero2,
    bias,
    bias2,
    gain,
    add,
    y,
    n,
    k,
    w_row,
    groups,
    eps,
    addresses,
    slot,
    most,
    GROUP: tl.constexpr,
    ZERO: tl.constexpr,
    BIAS: tl.constexpr,
    NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
    RANKS: tl.constexpr,
    RANK: tl.constexpr,
    EPOCH_BYTES: tl.constexpr,
):
    """Multiply by codes of four bits, in words of eight; BK / GROUP groups at a time."""
    if EARLY:
        begin_next(RANKS)
    BG: tl.constexpr = BK // GROUP
    WORDS: tl.constexpr = GROUP // 8
    row = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = row < n
    wide = row.to(tl.int64)
    number, word = tl.arange(0, BG), tl.arange(0, WORDS)
    acc = tl.zeros((BN, BG), tl.float32)
    acc2 = tl.zeros((BN, BG), tl.float32)
    squares = tl.zeros((BG, WORDS), tl.float32)
    epoch = 0
    if RANKS:  # loaded now, so that it is here when outputs are sent
        epoch = epoch_to_send(addresses, slot, most, RANK)
    for at in tl.range(0, groups, BG, num_stages=STAGES):
        group = at + number
        there = group < groups
        column = group[:, None] * WORDS + word[None, :]
        mask = inside[:, None, None] & there[None, :, None]
        place = wide[:, None, None] * w_row + column[None, :, :]
        codes = tl.load(w + place, mask=mask, other=0, eviction_policy="evict_first")
        codes2 = codes
        if GATED:
            codes2 = tl.load(w2 + place, mask=mask, other=0, eviction_policy="evict_first")
        part = tl.zeros((BN, BG, WORDS), tl.float32)
        part2 = tl.zeros((BN, BG, WORDS), tl.float32)
        whole = tl.zeros((BG, WORDS), tl.float32)
        for i in tl.static_range(8):
            given = _one_of_eight(x, column, there, i)
            if NORM:
                squares += given * given
                given *= _one_of_eight(gain, column, there, i)
            whole += given
            given *= 1.0 / (1 << (4 * (i % 4)))  # the level of a place is that many times too large
            part += _level(codes >> 16 if i > 3 else codes, i % 4) * given[None, :, :]
            if GATED:
                part2 += _level(codes2 >> 16 if i > 3 else codes2, i % 4) * given[None, :, :]
        sums = tl.sum(whole, 1)[None, :]
        factor = wide[:, None] * groups + group[None, :]
        inner = inside[:, None] & there[None, :]
        middle = tl.full((BN, BG), 8.0, tl.float32)
        if ZERO:
            middle = tl.load(zero + factor, mask=inner, other=0).to(tl.float32)
        acc += (tl.sum(part, 2) - middle * sums) * tl.load(scale + factor, mask=inner, other=0.0)
        if GATED:
            if ZERO:
                middle = tl.load(zero2 + factor, mask=inner, other=0).to(tl.float32)
            acc2 += (tl.sum(part2, 2) - middle * sums) * tl.load(scale2 + factor, mask=inner, other=0.0)
    total, other = tl.sum(acc, 1), tl.sum(acc2, 1)
    squared = tl.sum(tl.sum(squares, 1), 0)
    finish(
        total,
        other,
        squared,
        bias,
        bias2,
        add,
        y,
        row,
        inside,
        n,
        k,
        eps,
        addresses,
        epoch,
        slot,
        most,
        NORM,
        GATED,
        BIAS,
        ADD,
        RANKS,
        RANK,
        EPOCH_BYTES,
        BN,
    )


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    scale: Tensor | None = None,
    zero: Tensor | None = None,
    *,
    gate: RowWeight | None = None,
    norm: tuple[Tensor, float] | None = None,
    add: Tensor | None = None,
    tile: Tile | None = None,
    sends: tuple[OneShotMemory, int] | None = None,
) -> Tensor:
    """Multiply one row by a weight or its codes; see :func:`meshfold.kernels.row_product.row_product`.

    Args:
        x, gate, norm, add: as there.
        weight, bias, scale, zero: the layer.
        tile: sizes of a program; None to choose.
        sends: memory of packets and a slot: the outputs are sent to all ranks, and what is returned is not filled.
    """
    n, k = weight.shape[0], x.shape[-1]
    x = x.contiguous()
    y = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    second = RowWeight(weight, bias, scale, zero)
    first = second if gate is None else gate
    four, groups, group = weight.dtype == torch.uint8, 1 if scale is None else scale.shape[1], group_of(second)
    call = RowCall(second, gate, norm)
    sizes = tile or call.tile(x.dtype)
    words = call.word_bits(x.dtype) if sizes.words else 0
    if sizes.words and not words:
        sizes = call.known_tile()
    if sends is not None and sizes.rows == 1:  # two elements of 16 bits make a packet
        sizes = sizes._replace(rows=2)
    wide = torch.int64 if words else torch.int32 if four else None
    codes = [part[0] if wide is None else part[0].view(wide) for part in (first, second)]
    gain, eps = (weight, 0.0) if norm is None else norm
    if words or four:  # elements of 16 bits are read in 8 or 16 bytes
        x, gain = _aligned(x), _aligned(gain)
    pairs = [weight if part is None else part for i in (2, 3, 1) for part in (first[i], second[i])]
    around = (gain, weight if add is None else add, y)  # what is not there is not read
    addresses = (y, 0, 0) if sends is None else (sends[0].addresses, sends[1], sends[0].rows)
    parts = dict(
        BIAS=bias is not None,
        NORM=norm is not None,
        GATED=gate is not None,
        ADD=add is not None,
        BN=sizes.rows,
        num_warps=sizes.warps,
        **early(),
        RANKS=0 if sends is None else sends[0].addresses.numel(),
        RANK=0 if sends is None else sends[0].rank,
        EPOCH_BYTES=0 if sends is None else epoch_bytes(sends[0].rows),
    )
    grid, row = (cdiv(n, sizes.rows),), codes[0].stride(0)
    take_product(*[part.weight for part in (second, gate) if part is not None])
    if words:
        launch(
            product_words,
            grid,
            x,
            *(x, *codes, *pairs, *around, n, eps, *addresses),
            WORDS=k * words // 64,
            W_ROW=row,
            GROUPS=groups,
            SHARE=group * words // 64 if group > 1 else 0,
            BITS=words,
            ZERO=zero is not None,
            BC=32 * sizes.warps,
            FITS=n % sizes.rows == 0,
            ASM=torch.version.hip is None and not knobs.runtime.interpret,
            **parts,
        )
        return y
    launch(
        _product_int4 if four else _product,
        grid,
        x,
        *(x, *codes, *pairs, *around, n, k, row, groups, eps, *addresses),
        GROUP=group,
        ZERO=zero is not None,
        BK=max(sizes.columns, group) if four else sizes.columns,
        STAGES=sizes.stages,
        **parts,
    )
    return y


def _aligned(row: Tensor) -> Tensor:
    """Return a row that begins at a multiple of 16 bytes."""
    return row.clone() if row.data_ptr() % 16 else row
