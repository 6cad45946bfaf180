"""The one-shot sum by packets in Triton, with residual and RMSNorm. Products can send packets too."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import cdiv, launch
from meshfold.kernels.one_shot import OneShotMemory
from meshfold.kernels.one_shot_packets import PARTS, epoch_bytes, packet_parts
from meshfold.kernels.overlap import early
from meshfold.kernels.weights_ahead import Ahead, launch_ahead
from meshfold.kernels.weights_ahead_triton import ask, asking

_EPOCHS = tl.constexpr(PARTS)


@triton.jit
def _lane(data, like, lane: tl.constexpr, LANES: tl.constexpr):
    """Return an element of each word, int32, in float32; its dtype is that of what ``like`` points to."""
    if LANES == 1:
        value = data.to(like.dtype.element_ty, bitcast=True)
    else:
        value = (data >> (16 * lane)).to(tl.int16).to(like.dtype.element_ty, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _read(like, word, inside, lane: tl.constexpr, LANES: tl.constexpr):
    """Return an element of each word of a tensor in float32; both lanes of one in 16 bits come by the same load."""
    if LANES * like.dtype.element_ty.primitive_bitwidth == 32:
        data = tl.load(like.to(tl.pointer_type(tl.int32)) + word, mask=inside, other=0)
        value = _lane(data, like, lane, LANES)
    else:
        value = tl.load(like + word * LANES + lane, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit
def _write(like, word, inside, first, second, LANES: tl.constexpr):
    """Write the elements of each word, in 32 bits at a time."""
    there = like.to(tl.pointer_type(tl.int32)) + word
    if LANES == 1:
        tl.store(there, first.to(like.dtype.element_ty).to(tl.int32, bitcast=True), mask=inside)
    else:
        low = first.to(like.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
        high = second.to(like.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) << 16
        tl.store(there, low | high, mask=inside)


@triton.jit
def begin_next(RANKS: tl.constexpr):
    """Let the kernel after a product begin early, and wait for the end of the one before.

    The sum of what the product sends to RANKS reads the stream before the product's end, so it must not begin before all that came
    before the product has ended.
    """
    if RANKS:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    else:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def epoch_to_send(addresses, slot, most, RANK: tl.constexpr):
    """Return the epoch of the packets of the first row."""
    return tl.load(tl.load(addresses + RANK).to(tl.pointer_type(tl.int32)) + slot * most * _EPOCHS) + 1


@triton.jit
def send(
    value,
    like,
    addresses,
    epoch,
    slot,
    most,
    words,
    EPOCH_BYTES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    BN: tl.constexpr,
):
    """Send a program's BN elements of the first row to all ranks, this one too, in the dtype of what ``like`` points to."""
    value = value.to(like.dtype.element_ty)
    if like.dtype.element_ty.primitive_bitwidth == 32:
        data = value.to(tl.int32, bitcast=True)
        word = tl.program_id(0) * BN + tl.arange(0, BN)
    else:
        low, high = tl.split(tl.reshape(value.to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF, (BN // 2, 2)))
        data = low | (high << 16)
        word = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
    packet = (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
    sent = ((slot * RANKS + RANK) * most).to(tl.int64) * words + word
    for rank in tl.static_range(RANKS):
        theirs = (tl.load(addresses + rank) + EPOCH_BYTES).to(tl.pointer_type(tl.int64))
        tl.store(theirs + sent, packet, mask=word < words)


@triton.jit
def _packets(
    addresses,
    x,
    stream,
    gain,
    total,
    y,
    slot,
    most,
    words,
    eps,
    tries,
    step,
    programs,
    first_ahead,
    second_ahead,
    pieces,
    EPOCH_BYTES: tl.constexpr,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    LANES: tl.constexpr,
    ADDS: tl.constexpr,
    SENT: tl.constexpr,
    SPLIT: tl.constexpr,
    BW: tl.constexpr,
    EARLY: tl.constexpr,
    AHEAD: tl.constexpr,
    THREADS: tl.constexpr,
):
    """Sum rows; ``SPLIT`` programs each of one, without the norm, or one with it (0)."""
    program = tl.program_id(0)
    if AHEAD and program >= programs:
        ask(first_ahead, second_ahead, pieces, program - programs, THREADS)
        return
    own = tl.load(addresses + RANK)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if not SENT:  # what products send comes as packets: their end is awaited below, while these are on their way
            tl.extra.cuda.gdc_wait()
    row, part = program, 0
    if SPLIT:
        row, part = program // SPLIT, program % SPLIT
    word = part * BW + tl.arange(0, BW)
    inside = word < words
    at = slot * most + row
    here = row * words + word
    epochs = own.to(tl.pointer_type(tl.int32)) + at * _EPOCHS
    epoch = tl.load(epochs + part) + 1
    data = word
    if not SENT:
        data = tl.load(x.to(tl.pointer_type(tl.int32)) + here, mask=inside, other=0)
        packet = (epoch.to(tl.int64) << 32) | (data.to(tl.int64) & 0xFFFFFFFF)
        sent = (((slot * RANKS + RANK) * most + row).to(tl.int64)) * words + word
        for rank in tl.static_range(RANKS):
            if rank != RANK:
                theirs = tl.multiple_of((tl.load(addresses + rank) + EPOCH_BYTES).to(tl.pointer_type(tl.int64)), 16)
                tl.store(theirs + sent, packet, mask=inside)
    # Loaded while packets are on their way.
    first = _read(stream, here, inside, 0, LANES)
    second = _read(stream, here, inside, LANES - 1, LANES)
    tl.debug_barrier()  # packets are sent before this rank waits
    sum1 = tl.zeros((BW,), tl.float32)
    sum2 = tl.zeros((BW,), tl.float32)
    packets = tl.multiple_of((own + EPOCH_BYTES).to(tl.pointer_type(tl.int64)), 16)
    late, tried = 1, 0
    while (late > 0) & (tried < tries):  # packets of all ranks are read at once, and again if any is not there
        sum1 = tl.zeros((BW,), tl.float32)
        sum2 = tl.zeros((BW,), tl.float32)
        wrong = tl.zeros((BW,), tl.int32)
        for rank in tl.static_range(RANKS):  # in the same order on every rank: the same bits
            if rank == RANK and not SENT:
                got = data
            else:
                come = packets + (((slot * RANKS + rank) * most + row).to(tl.int64)) * words + word
                found = tl.load(come, mask=inside, other=0, volatile=True)
                wrong |= (inside & ((found >> 32).to(tl.int32) != epoch)).to(tl.int32)
                got = found.to(tl.int32)
            sum1 += _lane(got, x, 0, LANES)
            sum2 += _lane(got, x, LANES - 1, LANES)
        late = tl.sum(wrong, 0)
        tried += step
    if EARLY and SENT:  # before anything is written where kernels before may still read
        tl.extra.cuda.gdc_wait()
    tl.debug_barrier()  # all threads have read the epoch
    if SPLIT:
        tl.store(epochs + part, epoch)
    else:
        every = tl.arange(0, _EPOCHS)
        tl.store(epochs + every, tl.zeros((_EPOCHS,), tl.int32) + epoch)
    sum1 = sum1.to(total.dtype.element_ty).to(tl.float32)
    sum2 = sum2.to(total.dtype.element_ty).to(tl.float32)
    first = (first + sum1).to(stream.dtype.element_ty).to(tl.float32)
    second = (second + sum2).to(stream.dtype.element_ty).to(tl.float32)
    if ADDS:
        _write(total, here, inside, first, second, LANES)
    else:
        _write(total, here, inside, sum1, sum2, LANES)
    if not SPLIT:
        squares = first * first
        if LANES == 2:
            squares += second * second
        scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / (words * LANES) + eps)
        first = first * scale * _read(gain, word, inside, 0, LANES)
        second = second * scale * _read(gain, word, inside, LANES - 1, LANES)
        _write(y, here, inside, first, second, LANES)


def launch_packets(
    x: Tensor | None,
    stream: Tensor,
    gain: Tensor,
    eps: float,
    memory: OneShotMemory,
    slot: int,
    *,
    adds: bool,
    norm: bool,
    tries: int,
) -> tuple[Tensor, Tensor | None]:
    """Run the kernel; arguments as of :func:`meshfold.kernels.one_shot_packets.packet_sum`."""
    sent = x is None
    total = torch.empty(stream.shape, dtype=memory.dtype, device=stream.device)
    y = torch.empty_like(total) if norm else total
    # Two elements of 16 bits are read together.
    x, stream, gain = (
        part.clone() if part.data_ptr() % 4 else part
        for part in (total if x is None else x.contiguous(), stream.contiguous(), gain.contiguous())
    )
    words = x.shape[1] * x.element_size() // 4
    split = 0 if norm else packet_parts(words)
    wide = triton.next_power_of_2(cdiv(words, split or 1))
    programs = x.shape[0] * (split or 1)
    warps = 4 if wide <= 1024 else 8 if wide <= 4096 else 16

    def run(ahead: Ahead) -> None:
        launch(
            _packets,
            (programs + ahead.programs(32 * warps),),
            x,
            memory.addresses,
            x,
            stream,
            gain,
            total,
            y,
            slot,
            memory.rows,
            words,
            eps,
            tries or 1,
            int(tries > 0),
            programs,
            *ahead,
            EPOCH_BYTES=epoch_bytes(memory.rows),
            RANK=memory.rank,
            RANKS=memory.addresses.numel(),
            LANES=4 // x.element_size(),
            ADDS=adds,
            SENT=sent,
            SPLIT=split,
            BW=wide,
            num_warps=warps,
            **early(),
            **asking(ahead, warps),
        )

    launch_ahead(run)
    return total, y if norm else None
