"""Operations on logits that wait for their loss: those that are recorded, the loss itself, and those that need no values."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional as F

if TYPE_CHECKING:
    from meshfold.kernels.fuse.logits import LazyLogits


FACTS = {
    Tensor.size,
    Tensor.dim,
    Tensor.numel,
    Tensor.nelement,
    Tensor.is_floating_point,
    Tensor.is_complex,
    Tensor.__len__,
    Tensor.element_size,
    Tensor.get_device,
    Tensor.is_contiguous,
    torch.is_floating_point,
    torch.numel,
    torch.is_complex,
}
"""Functions that need no values."""
PROPERTIES = tuple(
    getattr(Tensor, name)
    for name in (
        "shape",
        "dtype",
        "device",
        "ndim",
        "requires_grad",
        "is_cuda",
        "is_meta",
        "is_cpu",
        "is_leaf",
        "layout",
        "is_sparse",
        "is_quantized",
        "is_nested",
        "itemsize",
        "nbytes",
    )
)
"""Properties that need none."""


def _cast(logits: LazyLogits, dtype: Any = None, *rest: Any, **given: Any) -> LazyLogits | None:
    """``Tensor.to`` and ``Tensor.type`` with only a dtype."""
    if rest or set(given) - {"dtype"}:
        return None
    dtype = given.get("dtype", dtype)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        return None
    return logits if dtype == logits.dtype else logits.changed("cast", dtype)


def _cast_to(dtype: torch.dtype) -> Callable[..., LazyLogits | None]:
    return lambda logits, *args, **given: None if args or given else _cast(logits, dtype)


def _view(logits: LazyLogits, *shape: Any, **given: Any) -> LazyLogits | None:
    """``Tensor.view`` and ``reshape`` that keep the last dim."""
    if given:
        return None
    sizes = shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape
    if isinstance(sizes, torch.dtype) or not sizes or len(sizes) < 2:
        return None
    words, lead = logits.shape[-1], [int(size) for size in sizes[:-1]]
    count = math.prod(logits.shape[:-1])
    if lead.count(-1) == 1 and sizes[-1] == words:
        known = math.prod(size for size in lead if size != -1)
        if not known or count % known:
            return None
        lead[lead.index(-1)] = count // known
    elif sizes[-1] not in (-1, words) or -1 in lead:
        return None
    if math.prod(lead) != count:
        return None
    return logits.of_rows(lambda rows: rows.reshape(*lead, rows.shape[-1]))


def _flatten(logits: LazyLogits, start_dim: int = 0, end_dim: int = -1) -> LazyLogits | None:
    ndim = logits.ndim
    start, end = start_dim % ndim, end_dim % ndim
    return None if end >= ndim - 1 else logits.of_rows(lambda rows: rows.flatten(start, end))


def _index(logits: LazyLogits, index: Any) -> LazyLogits | None:
    """Slices of the rows; the vocabulary stays whole."""
    entries = index if isinstance(index, tuple) else (index,)
    if not all(entry is Ellipsis or isinstance(entry, slice) for entry in entries):
        return None
    if Ellipsis in entries:
        at = entries.index(Ellipsis)
        middle = (slice(None),) * (logits.ndim - len(entries) + 1)
        entries = (*entries[:at], *middle, *entries[at + 1 :])
    if len(entries) == logits.ndim:
        last = entries[-1]
        if last not in (
            slice(None),
            slice(0, None),
            slice(None, logits.shape[-1]),
            slice(0, logits.shape[-1]),
        ):
            return None
        entries = entries[:-1]
    return logits.of_rows(lambda rows: rows[entries])


def _same(logits: LazyLogits, **given: Any) -> LazyLogits | None:
    return None if given else logits


def _times(logits: LazyLogits, other: Any) -> LazyLogits | None:
    return logits.changed("scale", float(other)) if isinstance(other, int | float) else None


def _over(logits: LazyLogits, other: Any) -> LazyLogits | None:
    return logits.changed("scale", 1.0 / other) if isinstance(other, int | float) and other else None


def _tanh(logits: LazyLogits) -> LazyLogits | None:
    return logits.changed("tanh", None) if not any(what == "tanh" for what, _ in logits.changes) else None


def _cross_entropy(
    input: LazyLogits,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor | None:
    if size_average is not None or reduce is not None or input.head.is_followed:
        return None
    if weight is not None and (label_smoothing or weight.requires_grad or weight.shape != input.shape[-1:]):
        return None  # smoothing weights every word
    if input.ndim != 2 or target.ndim != 1 or target.is_floating_point():
        return None
    if target.shape[0] != input.shape[0] or reduction not in ("mean", "sum", "none"):
        return None  # torch raises its own error
    return input.cross_entropy(
        target,
        ignore_index=ignore_index,
        reduction=reduction,  # checked
        label_smoothing=label_smoothing,
        class_weights=weight,
    )


HANDLERS: dict[Any, Callable[..., Any]] = {
    Tensor.float: _cast_to(torch.float32),
    Tensor.double: _cast_to(torch.float64),
    Tensor.half: _cast_to(torch.float16),
    Tensor.bfloat16: _cast_to(torch.bfloat16),
    Tensor.to: _cast,
    Tensor.type: _cast,
    Tensor.view: _view,
    Tensor.reshape: _view,
    torch.reshape: _view,
    Tensor.flatten: _flatten,
    torch.flatten: _flatten,
    Tensor.contiguous: _same,
    Tensor.__getitem__: _index,
    Tensor.mul: _times,
    Tensor.__mul__: _times,
    Tensor.__rmul__: _times,
    torch.mul: _times,
    Tensor.div: _over,
    Tensor.__truediv__: _over,
    torch.div: _over,
    Tensor.tanh: _tanh,
    torch.tanh: _tanh,
    F.cross_entropy: _cross_entropy,
}
"""Replacements of functions for logits that wait; each returns None where it needs their values."""
