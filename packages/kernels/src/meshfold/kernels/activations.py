"""Gated activations fused with their products: SwiGLU and GEGLU.

    swiglu      y = silu(gate) * up,  silu(v) = v * sigmoid(v)
    weighted    y = silu(gate) * up * weight of the row
    geglu       y = gelu(gate) * up,  exact (erf) or the tanh approximation

Computed in float32 (float64 for float64), rounded once at the output. The backward recomputes from the inputs and
keeps nothing else. Sources: Shazeer, "GLU Variants Improve Transformer", 2020; Hendrycks and Gimpel, "Gaussian
Error Linear Units", 2016.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.fp8 import Fp8Tensor
from meshfold.kernels.fp8_casts import cast_rows
from meshfold.kernels.fp8_inputs import Fp8Source, offer_input
from meshfold.kernels.functions import applied, once_differentiable
from meshfold.kernels.inputs import as_rows, check_alike, compute_dtype, contiguous_like, result_of_shape

Activation = Literal["silu", "gelu", "gelu tanh"]


def swiglu(gate_up: Tensor, *, source: Fp8Source | None = None) -> Tensor:
    """silu(gate) * up of a fused projection: ``... (2 f) -> ... f``, gate in the first half, up in the second.

    The backward writes the gradient of both halves into one tensor.

    Args:
        gate_up: both, side by side.
        source: of results that fp8 products may read: once they do, the same kernel writes their operand.

    Raises:
        ValueError: if the last dim is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu takes [gate | up] side by side, so an even last dim; the shape is {list(gate_up.shape)}"
        )
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, -1)
        return gated(gate, up)
    y: Tensor = _fused(gate_up, source)
    return y


def weighted_swiglu(gate_up: Tensor, weights: Tensor, filled: Tensor | None = None) -> Tensor:
    """silu(gate) * up * weight of a fused projection: ``m (2 f), m -> m f``, in the dtype of ``gate_up``.

    The output of a linear layer without bias is then weighted too. This weights a token's experts without a pass over their
    outputs.

    Args:
        gate_up: rows of gate and up side by side.
        weights: of the rows.
        filled: [1] whole number: rows from this one on, and their gradients, need not be computed. None: all are.

    Raises:
        ValueError: if the last dim is odd, or there is not a weight for each row.
    """
    if gate_up.dim() != 2 or gate_up.shape[1] % 2 or weights.shape != gate_up.shape[:1]:
        raise ValueError(
            f"weighted_swiglu takes [gate | up] side by side and a weight for each row, [m, 2 f] and [m]; the shapes are "
            f"{list(gate_up.shape)} and {list(weights.shape)}"
        )
    if torch.compiler.is_compiling():
        gate, up = gate_up.chunk(2, 1)
        return weighted_gated(gate, up, weights)
    y: Tensor = _weighted(gate_up, weights, filled)
    return y


def swiglu2(gate: Tensor, up: Tensor, *, source: Fp8Source | None = None) -> Tensor:
    """silu(gate) * up of two tensors: ``... f, ... f -> ... f``, in the dtype of ``gate``; ``source`` as of :func:`swiglu`.

    Raises:
        ValueError: if the shapes differ.
    """
    check_alike("gate and up", gate, up)
    if torch.compiler.is_compiling():
        return gated(gate, up)
    y: Tensor = _separate(gate, up, "silu", source)
    return y


def geglu2(gate: Tensor, up: Tensor, approximate: str = "none", *, source: Fp8Source | None = None) -> Tensor:
    """gelu(gate) * up of two tensors: ``... f, ... f -> ... f``, in the dtype of ``gate``.

    Args:
        gate, up: of one shape.
        approximate: ``"none"`` for the exact GELU (erf), ``"tanh"`` for its approximation, as in Gemma; torch's names.
        source: as of :func:`swiglu`.

    Raises:
        ValueError: for another word, or if the shapes differ.
    """
    check_alike("gate and up", gate, up)
    kind: Activation = "gelu tanh" if _is_tanh(approximate) else "gelu"
    if torch.compiler.is_compiling():
        return gated(gate, up, kind)
    y: Tensor = _separate(gate, up, kind, source)
    return y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, source: Fp8Source | None) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = as_rows(gate_up).chunk(2, 1)
        ctx.gradients = dispatch.twin(gated_gradients, gate_up)
        y = _forward(gate, up, "silu", source)
        return _result(y, (*gate_up.shape[:-1], gate.shape[1]), source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        rows = as_rows(gate_up)
        gradient = contiguous_like(rows)
        ctx.gradients(as_rows(dy), *rows.chunk(2, 1), *gradient.chunk(2, 1))
        return gradient.view_as(gate_up), None


class _Weighted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor, weights: Tensor, filled: Tensor | None) -> Tensor:
        ctx.save_for_backward(gate_up, weights, filled)
        ctx.gradients = dispatch.twin(weighted_gradients, gate_up)
        gate, up = as_rows(gate_up).chunk(2, 1)
        return dispatch.twin(weighted_gated, gate_up)(gate, up, weights, filled)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate_up, weights, filled = ctx.saved_tensors
        rows = as_rows(gate_up)
        gradient = contiguous_like(rows)
        dweights = ctx.gradients(as_rows(dy), *rows.chunk(2, 1), weights, *gradient.chunk(2, 1), filled)
        return gradient, dweights.to(weights.dtype), None


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kind: Activation, source: Fp8Source | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.gradients, ctx.kind = dispatch.twin(gated_gradients, gate), kind
        y = _forward(as_rows(gate), as_rows(up), kind, source)
        return _result(y, gate.shape, source)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        rows, others = as_rows(gate), as_rows(up)
        dgate, dup = contiguous_like(rows), contiguous_like(others)
        ctx.gradients(as_rows(dy), rows, others, dgate, dup, ctx.kind)
        return dgate.view_as(gate), dup.view_as(up), None, None


def _result(y: Tensor, shape: Sequence[int], source: Fp8Source | None) -> Tensor:
    # fp8 products that were offered y see by its version whether it has changed, and a view shares that.
    return result_of_shape(y, shape) if source is None else y.reshape(shape)


def _forward(gate: Tensor, up: Tensor, kind: Activation, source: Fp8Source | None) -> Tensor:
    """Return the product of rows, and offer it to fp8 products, with its cast if they have asked for it."""
    if source is None or gate.dtype is not torch.bfloat16:
        return dispatch.twin(gated, gate)(gate, up, kind)
    if not source.writes:
        y = dispatch.twin(gated, gate)(gate, up, kind)
        offer_input(y, source)
        return y
    y, values, inverse = dispatch.twin(gated_and_cast, gate)(gate, up, kind)
    offer_input(y, source, Fp8Tensor(values=values, inverse=inverse))
    return y


def _is_tanh(approximate: str) -> bool:
    if approximate not in ("none", "tanh"):
        raise ValueError(f"approximate is {approximate!r}; it must be 'none' (exact) or 'tanh'")
    return approximate == "tanh"


_fused, _weighted, _separate = map(applied, (_Fused, _Weighted, _Separate))


# The reference in plain torch: it defines every result and the signatures of the Triton and numba versions.


def gated(gate: Tensor, up: Tensor, kind: Activation = "silu") -> Tensor:
    """``m f, m f -> m f``: activation(gate) * up in the dtype of gate; differentiable."""
    dtype = compute_dtype(gate)
    return (_activated(gate.to(dtype), kind) * up.to(dtype)).to(gate.dtype)


def gated_and_cast(gate: Tensor, up: Tensor, kind: Activation = "silu") -> tuple[Tensor, Tensor, Tensor]:
    """Return :func:`gated`, and it in e4m3 with the inverse of a scale for each row, as :func:`.fp8_casts.cast_rows` makes them."""
    y = gated(gate, up, kind)
    return y, *cast_rows(y)


def gated_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor, kind: Activation = "silu"
) -> None:
    """Write the gradients of gate and up into dgate and dup, whose rows may be part of wider ones."""
    dtype = compute_dtype(gate)
    dy, gate = dy.to(dtype), gate.to(dtype)
    dup.copy_(_activated(gate, kind).mul_(dy))
    to_activation = dy * up.to(dtype)
    if kind == "silu":
        dgate.copy_(torch.ops.aten.silu_backward(to_activation, gate))
    else:
        dgate.copy_(torch.ops.aten.gelu_backward(to_activation, gate, approximate=_mode(kind == "gelu tanh")))


def weighted_gated(gate: Tensor, up: Tensor, weights: Tensor, filled: Tensor | None = None) -> Tensor:
    """``m f, m f, m -> m f``: silu(gate) * up * weight in the dtype of gate, of all rows; differentiable."""
    dtype = compute_dtype(gate)
    return (F.silu(gate.to(dtype)) * up.to(dtype) * weights.to(dtype).unsqueeze(1)).to(gate.dtype)


def weighted_gradients(
    dy: Tensor, gate: Tensor, up: Tensor, weights: Tensor, dgate: Tensor, dup: Tensor, filled: Tensor | None = None
) -> Tensor:
    """Write the gradients of gate and up into dgate and dup, and return the weights' gradient ``m`` in float32 (float64)."""
    dtype = compute_dtype(gate)
    dy, gate, up = dy.to(dtype), gate.to(dtype), up.to(dtype)
    activated = F.silu(gate)
    dweights = (dy * activated * up).sum(1)
    dy = dy * weights.to(dtype).unsqueeze(1)
    dup.copy_(activated * dy)
    dgate.copy_(torch.ops.aten.silu_backward(dy * up, gate))
    return dweights


def _activated(gate: Tensor, kind: Activation) -> Tensor:
    return F.silu(gate) if kind == "silu" else F.gelu(gate, approximate=_mode(kind == "gelu tanh"))


def _mode(tanh: bool) -> str:
    return "tanh" if tanh else "none"
