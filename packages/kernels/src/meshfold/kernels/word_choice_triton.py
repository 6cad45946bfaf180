"""Choice of the next token in Triton: a program for each row and some of its words, another for each row that merges them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from meshfold.kernels._triton import bits_at, cdiv, launch

_BLOCK = 2048


@triton.jit
def _words(logits, divisor, states, draws, parts, row_stride, words, first, NOISE: tl.constexpr, BLOCK: tl.constexpr):
    row, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    number = tl.arange(0, BLOCK)
    word = block * BLOCK + number
    inside = word < words
    score = tl.load(logits + row * row_stride + word, mask=inside, other=-float("inf")).to(tl.float32)
    # A division by / is approximate on a GPU.
    score = tl.div_rn(score, tl.broadcast_to(tl.load(divisor + row).to(tl.float32), score.shape))
    chosen = score
    if NOISE:
        uniform = (bits_at(tl.load(states + row), first + word) >> 1).to(tl.float32) * 1.0842021724855044e-19  # 2**-63
        uniform = tl.minimum(tl.maximum(uniform, 1.0842021724855044e-19), 0.999999940395355224609375)
        # -log1p(-uniform): what 1 - uniform has lost is in its difference from 1.
        rest = 1.0 - uniform
        lost = rest - 1.0
        exponential = tl.where(lost == 0.0, uniform, tl.log(rest) * uniform / tl.where(lost == 0.0, 1.0, lost))
        chosen = tl.where(tl.load(draws + row) != 0, score - tl.log(exponential), score)
    place = tl.argmax(chosen, 0)
    top = tl.max(score, 0)
    to = parts + (block * tl.num_programs(0) + row) * 5
    tl.store(to, tl.max(chosen, 0))
    tl.store(to + 1, (first + block * BLOCK + place).to(tl.float32))
    tl.store(to + 2, tl.max(tl.where(number == place, score, -float("inf")), 0))
    tl.store(to + 3, top)
    tl.store(to + 4, tl.sum(tl.where(score > -float("inf"), tl.exp(score - top), 0.0), 0))


@triton.jit
def _merge(parts, out, tokens, logprobs, count, CHOOSES: tl.constexpr, N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, N)
    inside = number < count
    at = parts + (number * tl.num_programs(0) + row) * 5
    value = tl.load(at, mask=inside, other=-float("inf"))
    words = tl.load(at + 1, mask=inside, other=0.0)
    scores = tl.load(at + 2, mask=inside, other=-float("inf"))
    tops = tl.load(at + 3, mask=inside, other=-float("inf"))
    totals = tl.load(at + 4, mask=inside, other=0.0)
    best = number == tl.argmax(value, 0)
    word = tl.sum(tl.where(best, words, 0.0), 0)
    score = tl.max(tl.where(best, scores, -float("inf")), 0)
    top = tl.max(tops, 0)
    total = tl.sum(tl.where(tops > -float("inf"), totals * tl.exp(tops - top), 0.0), 0)
    if CHOOSES:
        tl.store(tokens + row, word.to(tl.int64))
        tl.store(logprobs + row, score - top - tl.log(total))
    else:
        to = out + row * 5
        tl.store(to, tl.max(value, 0))
        tl.store(to + 1, word)
        tl.store(to + 2, score)
        tl.store(to + 3, top)
        tl.store(to + 4, total)


def launch_parts(logits: Tensor, divisor: Tensor, first: int, states: Tensor | None, draws: Tensor | None) -> Tensor:
    """Run the kernel over some words at a time; arguments as of ``word_parts``. Return ``n b 5``."""
    b, words = logits.shape
    parts = torch.empty(cdiv(words, _BLOCK), b, 5, dtype=torch.float32, device=logits.device)
    launch(
        _words,
        (b, parts.shape[0]),
        logits,
        logits,
        divisor,
        parts if states is None else states,  # what is not there is not read
        parts if draws is None else draws.view(torch.int8),
        parts,
        logits.stride(0),
        words,
        first,
        NOISE=states is not None,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return parts


def launch_merge(parts: Tensor) -> Tensor:
    """Merge parts ``n b 5`` into one, ``b 5``."""
    out = torch.empty(parts.shape[1:], dtype=torch.float32, device=parts.device)
    _launch(parts, out, out, out, chooses=False)
    return out


def launch_choice(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return tokens and log-probs, as ``merge_words`` does."""
    tokens = torch.empty(parts.shape[1], dtype=torch.int64, device=parts.device)
    logprobs = torch.empty(parts.shape[1], dtype=torch.float32, device=parts.device)
    _launch(parts, logprobs, tokens, logprobs, chooses=True)
    return tokens, logprobs


def _launch(parts: Tensor, out: Tensor, tokens: Tensor, logprobs: Tensor, *, chooses: bool) -> None:
    count, b, _ = parts.shape
    wide = triton.next_power_of_2(count)
    given = (parts.contiguous(), out, tokens, logprobs, count)
    launch(_merge, (b,), parts, *given, CHOOSES=chooses, N=wide, num_warps=1 if wide <= 64 else 4)
