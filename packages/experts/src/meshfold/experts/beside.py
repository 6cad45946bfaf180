"""Passes over memory that run beside a product of matrices on a GPU.

A product is bound by arithmetic, a pass by memory. One after the other, each leaves the other resource idle. At the limit of a
GPU's power the products then run at a higher clock, which costs more energy for the same arithmetic.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from meshfold.kernels import on_gpu

FREE = 0
"""Multiprocessors that a product leaves to the passes beside it; 0: they run one after the other."""

P = TypeVar("P")
Q = TypeVar("Q")


def beside(product: Callable[[], P], passes: Callable[[], Q], like: Tensor) -> tuple[P, Q]:
    """Run a grouped product, and passes over memory beside it; return the results of both.

    Both may read what has been queued before, and neither may read what the other writes. Results are ready in the current stream.
    On a GPU the passes run in a stream of their own, which only this function uses: what they allocate belongs to that stream and
    may be reused by the passes of a later call, which wait for all that was queued before it. Large results are best allocated
    before.

    Args:
        product: in bfloat16 it leaves :data:`FREE` multiprocessors free.
        passes: over memory.
        like: a tensor of the product's device and dtype. Elsewhere than on a GPU, or in another dtype, the two run in turn.
    """
    if not FREE or not on_gpu(like) or like.dtype is not torch.bfloat16:
        return product(), passes()
    now, aside = torch.cuda.current_stream(like.device), _stream_of(like.device)
    aside.wait_stream(now)
    torch._C._set_sm_carveout_experimental(FREE)
    try:
        first = product()
    finally:
        torch._C._set_sm_carveout_experimental(None)
    with torch.cuda.stream(aside):
        second = passes()
    now.wait_stream(aside)
    return first, second


@functools.cache
def _stream_of(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
