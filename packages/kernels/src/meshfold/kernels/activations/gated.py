"""SwiGLU with autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.kernels import dispatch
from meshfold.kernels.activations import reference
from meshfold.kernels.activations.interface import ActivationKernels
from meshfold.kernels.rows import as_rows, check_alike

_reference: ActivationKernels = reference


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of a fused projection: ``... (2 f) -> ... f``, gate in the first half, up in the second.

    The backward writes the gradient of both halves into one tensor.

    Raises:
        ValueError: if the last dim is odd.
    """
    if gate_up.shape[-1] % 2:
        raise ValueError(
            f"swiglu takes [gate | up] side by side, so an even last dim; the shape is {list(gate_up.shape)}"
        )
    if torch.compiler.is_compiling():
        return reference.gated(*gate_up.chunk(2, -1))
    y: Tensor = _Fused.apply(gate_up)
    return y


def swiglu2(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up of two tensors: ``... f, ... f -> ... f``, in the dtype of ``gate``.

    Raises:
        ValueError: if the shapes differ.
    """
    check_alike("gate and up", gate, up)
    if torch.compiler.is_compiling():
        return reference.gated(gate, up)
    y: Tensor = _Separate.apply(gate, up)
    return y


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.kernels = dispatch.twin("activations", _reference, gate_up)
        ctx.save_for_backward(gate_up)
        gate, up = as_rows(gate_up).chunk(2, 1)
        y: Tensor = ctx.kernels.gated(gate, up)
        return y.reshape(*gate_up.shape[:-1], gate.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        rows = as_rows(gate_up)
        gradient = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        ctx.kernels.gated_gradients(as_rows(dy), *rows.chunk(2, 1), *gradient.chunk(2, 1))
        return gradient.view(gate_up.shape)


class _Separate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.kernels = dispatch.twin("activations", _reference, gate)
        ctx.save_for_backward(gate, up)
        y: Tensor = ctx.kernels.gated(as_rows(gate), as_rows(up))
        return y.reshape(gate.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        gate, up = ctx.saved_tensors
        rows, others = as_rows(gate), as_rows(up)
        dgate = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
        dup = torch.empty(others.shape, dtype=others.dtype, device=others.device)
        ctx.kernels.gated_gradients(as_rows(dy), rows, others, dgate, dup)
        return dgate.view(gate.shape), dup.view(up.shape)
