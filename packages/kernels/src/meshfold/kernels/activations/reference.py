"""Activations in plain torch."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from meshfold.kernels.rows import compute_dtype


def gated(gate: Tensor, up: Tensor) -> Tensor:
    """Differentiable."""
    dtype = compute_dtype(gate)
    return (F.silu(gate.to(dtype)) * up.to(dtype)).to(gate.dtype)


def gated_gradients(dy: Tensor, gate: Tensor, up: Tensor, dgate: Tensor, dup: Tensor) -> None:
    dtype = compute_dtype(gate)
    dy, gate = dy.to(dtype), gate.to(dtype)
    dup.copy_(F.silu(gate).mul_(dy))
    dgate.copy_(torch.ops.aten.silu_backward(dy * up.to(dtype), gate))


def gelu(x: Tensor, bias: Tensor | None, tanh: bool) -> Tensor:
    """Differentiable."""
    return F.gelu(_biased(x, bias), approximate=_mode(tanh)).to(x.dtype)


def gelu_gradients(dy: Tensor, x: Tensor, bias: Tensor | None, tanh: bool) -> tuple[Tensor, Tensor | None]:
    biased = _biased(x, bias)
    dx = torch.ops.aten.gelu_backward(dy.to(biased.dtype), biased, approximate=_mode(tanh))
    return dx.to(x.dtype), None if bias is None else dx.sum(0)


def _biased(x: Tensor, bias: Tensor | None) -> Tensor:
    wide = x.to(compute_dtype(x))
    return wide if bias is None else wide + bias.to(wide.dtype)


def _mode(tanh: bool) -> str:
    return "tanh" if tanh else "none"
