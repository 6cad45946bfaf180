"""Autograd functions of kernels, which take the host less than torch's own wrappers: models call them in every layer."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Backward = Callable[..., Any]


def once_differentiable(backward: Backward) -> Backward:
    """Return a backward whose results raise when they are differentiated again.

    torch's decorator of this name lets them pass if the gradients that come in are constants, as those of ``y.sum()``: a second
    derivative by weights was silently zero. A backward without ``create_graph`` runs as it is: nothing can go wrong.
    """

    @functools.wraps(backward)
    def run(ctx: Any, *gradients: Any) -> Any:
        if not torch.is_grad_enabled():
            return backward(ctx, *gradients)
        with torch.no_grad():
            found = backward(ctx, *gradients)
        each = found if isinstance(found, tuple) else (found,)
        refused: Any = torch._C._functions.DelayedError(_TWICE, len(each))
        made = refused(*(None if one is None else one.detach().requires_grad_() for one in each))
        return made if isinstance(found, tuple) else made[0] if isinstance(made, tuple) else made

    return run


_TWICE = b"trying to differentiate twice a function that was marked with @once_differentiable"


def applied(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for a function whose forward takes the context, without torch's preparations for ``torch.func``.

    Inside a transform of ``torch.func`` it is ``function.apply``. Function modes (``torch.overrides.TorchFunctionMode``), such as
    the one that replaces attention under ``sequence``, do not see the forward's own operations: a mode takes the host some
    microseconds for each, even for a shape. Under a dispatch mode, which may follow these operations with their help, they do.
    """
    direct = super(torch.autograd.Function, function).apply  # type: ignore[misc]
    transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active

    def apply(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or transforms():  # torch 2.11 compiles no other name of it
            return function.apply(*arguments)
        if _function_modes() and not _dispatch_modes():
            with torch._C.DisableTorchFunction():
                return direct(*arguments)
        return direct(*arguments)

    return apply


def as_dtype(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return a function's result in a dtype.

    torch 2.11 compiles an autograd function whose result passed through a ``to`` without effect, or was changed in place, to one
    whose gradient is zero.
    """
    return x if x.dtype is dtype else x.to(dtype)


_function_modes: Callable[[], int] = torch._C._len_torch_function_stack
_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
