"""Hooks that a user has registered on a parameter, when another takes its place."""

from __future__ import annotations

from torch import Tensor


def copy_parameter_hooks(before: Tensor, now: Tensor) -> None:
    """Register on the parameter ``now`` what was registered on the one it stands for.

    A hook then sees what this rank has of the gradient: that of its rows, in its block. Handles of the hooks before do not
    remove these.

    Args:
        before: with its ``register_hook`` and ``register_post_accumulate_grad_hook``.
        now: a leaf of autograd, without hooks yet.
    """
    for hook in (getattr(before, "_backward_hooks", None) or {}).values():
        now.register_hook(hook)
    for hook in (getattr(before, "_post_accumulate_grad_hooks", None) or {}).values():
        now.register_post_accumulate_grad_hook(hook)
