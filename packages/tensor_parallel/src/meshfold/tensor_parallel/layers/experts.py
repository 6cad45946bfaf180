"""A mixture of experts, each split over all tensor axes like an MLP.

The block around the experts has the whole stream, so its router chooses the same experts for the same tokens on every rank. Every
rank has a part of each expert's inner dim.
"""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor, nn

from meshfold.mesh import Mesh, Part, Placement
from meshfold.mesh.collectives import bind_enter, bind_leave
from meshfold.tensor_parallel.layers.base import StreamAdapter, shard_parameter
from meshfold.tensor_parallel.modes import Mode

UP, DOWN = "gate_up_proj", "down_proj"
"""What transformers calls the experts' weights, ``e n k`` each: gate and up in one, and down."""


def experts_of(module: nn.Module) -> str:
    """Return the name of a module's child that holds experts' weights, in tensors of three dims; empty without one."""
    for leaf, child in module.named_children():
        own = list(child.parameters(recurse=False))
        if len(own) == len(list(child.parameters())) and any(p.dim() == 3 for p in own):
            return leaf
    return ""


def inner_of(experts: nn.Module) -> int:
    """Return the inner dim of experts that can be split along it; 0 for other kinds (biases, transposed weights)."""
    own = dict(experts.named_parameters(recurse=False))
    if set(own) != {UP, DOWN} or getattr(experts, "is_transposed", False):
        return 0
    up, down = own[UP], own[DOWN]
    fits = up.dim() == down.dim() == 3 and up.shape[1] == 2 * down.shape[2] and up.shape[2] == down.shape[1]
    return int(down.shape[2]) if fits else 0


class Experts(StreamAdapter):
    """Split of a block's experts, whose input is whole on every rank: ``m k -> m k``, whole again.

    Inputs enter: their gradients are summed over the ranks. So do the weights of the chosen experts, since each rank's outputs are
    a partial sum of what they multiply. Outputs are summed.
    """

    def __init__(self, mesh: Mesh, mode: Mode) -> None:
        self.mesh, self.axes = mesh, mode.axes
        self._enter_axes, self._leave_axes = bind_enter(mesh, mode.axes), bind_leave(mesh, mode.axes)

    def why_not(self, experts: nn.Module) -> str:
        """Return why experts stay whole on every rank; empty if they can be split."""
        blocks, inner = self.mesh.size(*self.axes), inner_of(experts)
        if not inner:
            return "their weights are of another form than gate_up_proj and down_proj"
        if inner % blocks:
            return f"their inner dim of {inner} does not divide by {blocks}"
        return ""

    def split(self, experts: nn.Module) -> None:
        """Replace the weights by this rank's blocks, real or meta, and attach to the module."""
        inner = inner_of(experts)
        up, down = experts.get_parameter(UP), experts.get_parameter(DOWN)
        columns = Placement(shape=tuple(up.shape), axes=((), self.axes, ()), parts={1: (Part(inner), Part(inner))})
        rows = Placement(shape=tuple(down.shape), axes=((), (), self.axes))
        experts._parameters[UP] = shard_parameter(up, columns, self.mesh)
        experts._parameters[DOWN] = shard_parameter(down, rows, self.mesh)
        local = inner // math.prod(self.mesh.size(axis) for axis in self.axes)
        for name in ("intermediate_dim", "intermediate_size", "expert_dim"):
            if getattr(experts, name, None) == inner:
                setattr(experts, name, local)
        self.attach(experts)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return tuple(map(self._in, args)), {name: self._in(value) for name, value in kwargs.items()}

    def _in(self, value: Any) -> Any:
        return self._enter_axes(value) if isinstance(value, Tensor) and value.is_floating_point() else value

    def leave(self, module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return self._leave_axes(output)
