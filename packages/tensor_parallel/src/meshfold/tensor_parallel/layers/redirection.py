"""Redirections of functions that a model calls in its own code; they rest while a sharded layer runs.

A function mode of torch costs the host more than a microsecond for every operation, and for every ``x.shape`` as well. A forward of
a sharded layer has up to a hundred of them, none of which is to be redirected.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from meshfold.mesh.tracking import tracker

L = TypeVar("L")
R = TypeVar("R")


class Redirection(TorchFunctionMode):
    """Function mode for the functions that a model calls itself, not those that a sharded layer calls."""


def unredirected(forward: Callable[[L, Tensor], R]) -> Callable[[L, Tensor], R]:
    """Return a layer's forward that takes a :class:`Redirection` off while it runs, if it is the innermost function mode.

    Not while a forward is tracked, or traced by torch.compile: these see every operation, and run once. It takes one argument: what
    torch.compile makes of a function of any arguments keeps the layer in a cycle, so that its parameters wait for the collector.
    """

    @wraps(forward)
    def run(layer: L, x: Tensor) -> R:
        if torch.compiler.is_compiling():
            return forward(layer, x)
        modes = torch._C._len_torch_function_stack()
        mode = torch._C._get_function_stack_at(modes - 1) if modes else None
        if not isinstance(mode, Redirection) or tracker() is not None:
            return forward(layer, x)
        mode.__exit__(None, None, None)
        try:
            return forward(layer, x)
        finally:
            mode.__enter__()

    return run
