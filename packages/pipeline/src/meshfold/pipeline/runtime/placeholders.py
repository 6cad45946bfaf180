"""Placeholders in a rank's model for what other ranks hold or make: absent blocks, and tensors of the right shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking import set_tracked_layout, tracked_layout


class AbsentBlock(nn.Module):
    """Stands where a block of another rank was, with the plain attributes that it and the modules in it had.

    A model may look at them (``self.layers[0].self_attn.batch_first``). What stands for the modules inside is no part of the model.
    """

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        own = set(self.__dict__)
        plain = {name: value for name, value in block.__dict__.items() if name not in own}
        self.__dict__.update(plain)
        for name, child in block._modules.items():
            self.__dict__[name] = None if child is None else AbsentBlock(child)
        self.kind = type(block).__name__

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Raise: an absent block is called only through a gate that does not run it."""
        raise LayoutError(
            f"this {self.kind} belongs to a stage on another rank: run the model through its Pipeline"
        )

    def extra_repr(self) -> str:
        return f"{self.kind} of another rank"


class TensorPlaceholder:
    """The shape of a tensor that is not there, and how it lies, where that is known."""

    def __init__(self, tensor: Tensor) -> None:
        self.shape, self.dtype, self.device = tensor.shape, tensor.dtype, tensor.device
        self.tracked_layout = tracked_layout(tensor)

    def make(self, tracked: bool) -> Tensor:
        """NaN, so that a mistake shows; where it is only looked at, zeros that require a gradient."""
        if tracked and self.dtype.is_floating_point:
            made = torch.zeros(self.shape, dtype=self.dtype, device=self.device, requires_grad=True).clone()
        else:
            value = float("nan") if self.dtype.is_floating_point else 0
            made = torch.full(self.shape, value, dtype=self.dtype, device=self.device)
        set_tracked_layout(made, self.tracked_layout)
        return made


def sign(leaf: Any) -> object:
    """Return the part of an argument that decides the shape of results."""
    if isinstance(leaf, Tensor):
        return tuple(leaf.shape), leaf.dtype, leaf.device
    return leaf if isinstance(leaf, int | float | str | bool | type(None)) else type(leaf)


def signature(args: Any, kwargs: Any) -> object:
    """Return a key that decides the shapes of a forward: the shapes of its inputs, and its other arguments."""
    leaves, spec = tree_flatten((args, kwargs))
    return (*map(sign, leaves), str(spec), torch.is_grad_enabled())
