"""``torch.autocast`` in a model's own forward: sharded layers compute in the dtype that torch's layers compute in there.

========================= =================================================================
layer                     under autocast
========================= =================================================================
linear, patches           input, weight and bias in autocast's dtype; float64 stays
LayerNorm, RMSNorm        in float32, returned as torch returns it on the device
vocab-parallel loss       in float32
========================= =================================================================

What they compute inside is left alone: some operations that sums are made with would be cast too.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def casts(x: Tensor) -> bool:
    """Return True if operations on a tensor are cast now."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def lowered(x: Tensor) -> Tensor:
    """Return ``x`` as a matmul takes it: in autocast's dtype, where autocast is on."""
    if not casts(x) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(x.device.type))


def left_alone(x: Tensor) -> AbstractContextManager[object]:
    """Context manager: nothing inside is cast."""
    return torch.autocast(x.device.type, enabled=False) if casts(x) else nullcontext()


def widened(x: Tensor) -> Tensor:
    """Return ``x`` as a layer norm takes it: on a GPU autocast has it compute, and return, float32."""
    return x.float() if x.is_cuda and casts(x) and x.dtype != torch.float64 else x
