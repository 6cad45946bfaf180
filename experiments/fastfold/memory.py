"""Memory of a rank: what autograd keeps of a block, the peak of a block in prediction, and the longest chain that fits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from experiments.fastfold.settings import BLOCKS, Phase, inputs, rank_of
from meshfold.kernels import count_kernels, use
from meshfold.mesh.model_io import saved_for_backward
from meshfold.zero_gemini.profiler import LiveBytes

SEQUENCES = 128  # of the MSA in prediction
PRODUCT_STEPS = 16  # of a triangle multiplication in prediction: the gathered operand is never whole
CARDS = {"A100, 40 GB": 39 * 2**30, "A100, 80 GB": 79 * 2**30}
MULTIPLE = 128  # lengths are looked for in steps of this


def kept(phases: Sequence[Phase], ranks: Sequence[int]) -> list[dict[str, Any]]:
    """Bytes that autograd keeps for the backward of a block, parameters left out."""
    rows = []
    for phase in phases:
        for n in ranks:
            with rank_of(n) as (block, _), saved_for_backward(list(block.parameters())) as saved:
                block(*inputs(n, phase.sequences, phase.residues))
            rows.append({"phase": phase.name, "N": n, "bytes": saved.bytes})
    return rows


def lengths(ranks: Sequence[int], published: Sequence[int]) -> list[dict[str, Any]]:
    """For each number of ranks: the peak at the published lengths, and the longest chain that fits on each card."""
    rows = []
    for n in ranks:
        peaks = {str(r): predicting(n, r) for r in published}
        fits = {name: longest(card, partial(predicting, n)) for name, card in CARDS.items()}
        rows.append({"N": n, "peak": peaks, "longest": fits})
    return rows


def predicting(ranks: int, residues: int) -> int:
    """The peak of a rank while it predicts: a block's inputs and all that it makes, and the parameters of all blocks.

    Attention with pair bias counts as a kernel, which keeps no scores.
    """
    with rank_of(ranks, product_steps=PRODUCT_STEPS) as (block, _):
        parameters = BLOCKS * sum(p.numel() * p.element_size() for p in block.parameters())
        with torch.no_grad(), use("triton"), count_kernels(_outputs_alone), LiveBytes(base_bytes=parameters) as live:
            block.eval()(*inputs(ranks, SEQUENCES, residues, trained=False))
    peak: int = live.take()[0]
    return peak


def _outputs_alone(_: Callable[..., object]) -> Callable[..., object]:
    def made(q: Tensor, *__: object) -> tuple[Tensor, Tensor]:
        batch, rows, queries, heads, _head = q.shape
        return torch.empty_like(q), q.new_empty(batch, rows, heads, queries, dtype=torch.float32)

    return made


def longest(limit: int, peak: Callable[[int], int]) -> int:
    """The longest chain, in steps of MULTIPLE, whose peak is within a limit; the peak grows about as the square of it."""
    fits, fails = 0, 0
    now = 16 * MULTIPLE
    while not fails or fails - fits > MULTIPLE:
        found = peak(now)
        if found <= limit:
            fits = max(fits, now)
        else:
            fails = min(fails or now, now)
        guess = int(now * math.sqrt(limit / found)) // MULTIPLE * MULTIPLE
        now = max(guess, fits + MULTIPLE)
        if fails:
            now = min(now, fails - MULTIPLE)
    return fits
