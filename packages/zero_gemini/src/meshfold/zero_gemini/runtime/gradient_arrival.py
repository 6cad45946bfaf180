"""Hooks for the start and the end of a module's backward: gradients of its outputs and inputs arrive."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from meshfold.mesh.model_io import tensors_in


def watch_output(output: Any, begin: Callable[[Tensor], None]) -> None:
    """Call ``begin`` with the gradient of each tensor in a module's output, before the module's backward computes with it.

    An in-place change of a view gives it another history, in which hooks on the earlier view do not run. Hooks on its base tensor
    do, so both get the hook: ``begin`` may be called twice for one tensor.
    """
    for tensor in tensors_in(output):
        if tensor.requires_grad:
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
    needing = [tensor for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    if not needing:
        return None
    return _replaced((args, kwargs), iter(_Watched.apply(say, *needing)))


def _replaced(value: Any, watched: Iterator[Tensor]) -> Any:
    """Return nested arguments with the next watched tensor in the place of each that requires a gradient."""
    kind = type(value)
    if kind is tuple or kind is list:
        return kind(_replaced(each, watched) for each in value)
    if kind is dict:
        return {name: _replaced(each, watched) for name, each in value.items()}
    if isinstance(value, Tensor):
        return next(watched) if value.requires_grad else value
    if value is None or kind in (bool, int, float, str):
        return value
    leaves, spec = tree_flatten(value)
    return value if spec.is_leaf() else tree_unflatten([_replaced(leaf, watched) for leaf in leaves], spec)


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
