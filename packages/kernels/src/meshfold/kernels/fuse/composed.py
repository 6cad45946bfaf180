"""Activations that a module composes of several operations, such as Hugging Face's ``NewGELUActivation``, in one launch.

``0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x**3)))`` is eight passes over the activations forward, and as many backward.
Torch has the same function as one kernel. An activation that is already one operation stays unchanged.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from meshfold.kernels.fuse.activations import Activation, activation_of
from meshfold.kernels.fuse.replaced import ReplacedForward, candidates, runs_fused, settings_of

_NAMES = ("elu", "swish", "activation")
"""Parts of the class names of modules that are tried out."""


def fuse_composed(model: nn.Module, *, always: bool) -> list[ReplacedForward]:
    """Let every composed activation of a model run as one kernel; see :func:`meshfold.kernels.fuse.fuse`."""
    tried: dict[Any, Activation | None] = {}
    found = []
    for name, module in candidates(model):
        kind = type(module)
        if kind.__module__.startswith(("torch.", "meshfold.")) or not any(n in kind.__name__.lower() for n in _NAMES):
            continue
        if (settings := settings_of(module)) not in tried:
            tried[settings] = _composed(module)
        own = tried[settings]
        if own is not None and "forward" not in module.__dict__:
            found.append(ReplacedForward(name, module, partial(_forward, module, own, always)))
    return found


def _forward(module: nn.Module, own: Activation, always: bool, *args: Any, **kwargs: Any) -> Tensor:
    if not kwargs and len(args) == 1 and runs_fused(args[0], always):
        return own(args[0])
    result: Tensor = type(module).forward(module, *args, **kwargs)
    return result


def _composed(module: nn.Module) -> Activation | None:
    """Return the activation that a module computes in several operations; None for any other module."""
    found = activation_of(module)
    if found is None:
        return None
    x = torch.zeros(4)
    with torch.no_grad(), _Operations() as operations:
        module(x)
    return found[0] if operations.count > 1 else None


class _Operations(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))
