"""Hooks for the start and the end of a module's backward: gradients of its outputs and inputs arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten


def watch_output(output: Any, begin: Callable[[Tensor], None]) -> None:
    """Call ``begin`` with the gradient of each tensor in a module's output, before the module's backward computes with it.

    An in-place change of a view gives it another history, in which hooks on the earlier view do not run. Hooks on its base tensor
    do, so both get the hook: ``begin`` may be called twice for one tensor.
    """
    for tensor in tree_flatten(output)[0]:
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            _ = tensor.grad_fn  # makes a changed view's new history: torch 2.13's register_hook crashes on one without
            tensor.register_hook(begin)
            base = tensor._base
            if base is not None and base.requires_grad:
                base.register_hook(begin)


def watch_inputs(args: Any, kwargs: Any, say: Callable[[], None]) -> Any:
    """Return a module's arguments for a forward hook to return; ``say`` is called when backward reaches its inputs.

    None if gradients are off, or no input requires one.
    """
    if not torch.is_grad_enabled():
        return None
    leaves, spec = tree_flatten((args, kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not places:
        return None
    watched = _Watched.apply(say, *(leaves[i] for i in places))
    for i, tensor in zip(places, watched, strict=True):
        leaves[i] = tensor
    return tree_unflatten(leaves, spec)


class _Watched(torch.autograd.Function):
    """Identity that reports when the gradients of all its tensors have arrived."""

    @staticmethod
    def forward(ctx: Any, say: Callable[[], None], *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.say = say
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        ctx.say()
        return (None, *gradients)
