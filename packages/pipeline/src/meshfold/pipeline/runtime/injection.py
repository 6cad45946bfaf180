"""How a stage's code is given what was received: in the tensors that it has already."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class _Enter(torch.autograd.Function):
    """``inside`` gets the history of ``received``, whose values it has."""

    @staticmethod
    def forward(ctx: Any, inside: Tensor, received: Tensor) -> Tensor:
        ctx.mark_dirty(inside)
        return inside

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        return None, gradient


def inject(inside: Tensor, received: Tensor, grad: bool) -> Tensor:
    """Let a tensor of the model's code be what was received, in place: all who refer to it find the right values.

    It may be changed in place then, as what a block returns may be; save if it is a view, of something else that the code has.

    Args:
        inside: what a block is called with.
        received: from the stage before.
        grad: whether a gradient is wanted.

    Returns:
        The tensor whose ``.grad`` backward fills.
    """
    if not grad or inside._is_view():
        inside.data = received.detach()
        return inside.requires_grad_(grad)
    root = received.detach().requires_grad_()
    inside.data = root.detach()
    _Enter.apply(inside, root)
    return root


def same_storage(given: Tensor) -> Tensor:
    """Another tensor with the same memory, no view of it, as a block's output is none; with its history, if it has one."""
    if given.requires_grad:
        return given.view_as(given)
    made = torch.empty(0, dtype=given.dtype, device=given.device)
    made.data = given
    return made
