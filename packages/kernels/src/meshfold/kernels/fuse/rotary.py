"""Rotary embedding of the Hugging Face kind: a function ``(q, k, cos, sin)`` that a module's forward calls by its global name.

The forward is copied with that one name bound to the kernel, only for the modules of this model.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.kernels.fuse.replaced import (
    ReplacedForward,
    candidates,
    names_of,
    own_forward,
    runs_fused,
    with_names,
)
from meshfold.kernels.rotary import apply_rotary, turned

Forward = Callable[..., Any]


def fuse_rotary(model: nn.Module, *, always: bool) -> list[ReplacedForward]:
    """Let the rotary embedding of a model's attention run as one kernel; see :func:`meshfold.kernels.fuse.fuse`."""
    copies: dict[type, Forward | None] = {}
    found = []
    for name, module in candidates(model):
        if not own_forward(module) or type(module).__module__.startswith(("torch.", "meshfold.")):
            continue
        if type(module) not in copies:
            copies[type(module)] = _with_kernel(type(module).forward, always)
        forward = copies[type(module)]
        if forward is not None:
            found.append(ReplacedForward(name, module, types.MethodType(forward, module)))
    return found


def _with_kernel(forward: Forward, always: bool) -> Forward | None:
    """Return a forward that calls the kernel instead of its rotary function; None if it calls no known one."""
    found = {name: value for name, value in names_of(forward).items() if _is_rotary(value)}
    if len(found) != 1:
        return None
    ((name, own),) = found.items()
    return with_names(forward, {name: partial(_rotary, own, always)})


def _rotary(
    own: Forward, always: bool, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *rest: Any, **others: Any
) -> Any:
    """Rotate q ``b heads s d`` and k ``b kv_heads s d``, by the model's own function if the kernel does not fit."""
    fits = (
        not rest
        and not others
        and runs_fused(q, always)
        and cos.ndim == 3
        and cos.shape[0] in (1, q.shape[0])
        and cos.shape[1:] == q.shape[2:]
        and q.dtype == k.dtype == cos.dtype == sin.dtype
        and not cos.requires_grad
    )
    if not fits:
        return own(q, k, cos, sin, *rest, **others)
    q, k = apply_rotary(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
    return q.transpose(1, 2), k.transpose(1, 2)


_known: dict[Any, bool] = {}


@torch.no_grad()
def _is_rotary(function: Any) -> bool:
    """Return True if a function rotates queries and keys as :mod:`meshfold.kernels.rotary` does, found by trial."""
    if not isinstance(function, types.FunctionType) or "rot" not in function.__name__:
        return False
    if function in _known:
        return _known[function]
    _known[function] = False
    if list(inspect.signature(function).parameters)[:4] != ["q", "k", "cos", "sin"]:
        return False
    random = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 4, 3, 8, generator=random), torch.randn(2, 2, 3, 8, generator=random)
    angles = torch.rand(2, 3, 4, generator=random).repeat(1, 1, 2)
    cos, sin = angles.cos(), angles.sin()
    try:
        found = function(q, k, cos, sin)
    except Exception:  # has other arguments under these names
        return False
    expected = tuple(turned(x.transpose(1, 2), cos, sin).transpose(1, 2) for x in (q, k))
    _known[function] = (
        isinstance(found, tuple)
        and len(found) == 2
        and all(
            isinstance(y, Tensor) and y.shape == x.shape and torch.allclose(y, x, rtol=1e-5, atol=1e-6)
            for y, x in zip(found, expected, strict=True)
        )
    )
    return _known[function]
