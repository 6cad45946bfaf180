"""Optimizer steps inside the backward: a gradient is released before the next ones arrive."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle


def step_in_backward(optimizer: torch.optim.Optimizer) -> list[RemovableHandle]:
    """Let an optimizer step each parameter as soon as its gradient is complete, and release the gradient then.

    So gradients of a few parameters exist at a time, instead of all. A backward is a step: there is no accumulation, no
    clipping by the norm of the whole gradient, and no call of ``step``.

    Args:
        optimizer: one that treats each parameter separately, as all in this package do.

    Returns:
        Handles; ``remove()`` on each ends it.
    """

    def step(parameter: Tensor) -> None:
        optimizer.step()
        parameter.grad = None

    return [p.register_post_accumulate_grad_hook(step) for group in optimizer.param_groups for p in group["params"]]
