"""Eight primitives with their adjoints: all the communication that a sharded model does between its tensors.

================ ======================= ======================= ===============================================
primitive        forward                 backward                use
================ ======================= ======================= ===============================================
``enter``        identity                all-reduce              a replicated tensor meets sharded work
``leave``        all-reduce              identity                partial sums become a replicated tensor
``gather``       all-gather              reduce-scatter          a shard is needed whole, each rank uses it differently
``scatter_sum``  reduce-scatter          all-gather              partial sums become a shard
``take``         slice                   all-gather              a replicated tensor is used in shards
``collect``      all-gather              slice                   a shard is needed whole, every rank uses it alike
``exchange``     all-to-all              all-to-all back         the split moves from one dim to another
``shift``        ring send and receive   the same, backwards     blocks travel round the ring
================ ======================= ======================= ===============================================

``axes`` are mesh axes in layout order, major first; axes of size 1 do nothing.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.mesh import collectives
from meshfold.mesh.errors import LayoutError
from meshfold.mesh.mesh import Mesh

Axes = tuple[str, ...]


def gather_blocks(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """All-gather along ``dim`` over ``axes``, the minor axis first. Not differentiable."""
    for axis in reversed(axes):
        x = collectives.all_gather(x, mesh.group(axis), dim)
    return x


def scatter_sums(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """Reduce-scatter along ``dim`` over ``axes``, the major axis first. Not differentiable."""
    for axis in axes:
        x = collectives.reduce_scatter(x, mesh.group(axis), dim)
    return x


def take_block(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """This rank's block along ``dim``: a view. Not differentiable by itself beyond slicing.

    Raises:
        LayoutError: if the axes do not divide the dim.
    """
    blocks = mesh.size(*axes)
    if blocks == 1:
        return x
    if x.shape[dim] % blocks:
        raise LayoutError(
            f"dim {dim} of a tensor of shape {tuple(x.shape)} cannot be split over {', '.join(axes)}: "
            f"{blocks} does not divide {x.shape[dim]}; make it a multiple of {blocks}"
        )
    size = x.shape[dim] // blocks
    return x.narrow(dim, mesh.index(*axes) * size, size)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        ctx.mesh, ctx.axes = mesh, axes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collectives.all_reduce(grad, ctx.mesh.group(*ctx.axes)), None, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
        out = collectives.all_reduce(x, mesh.group(*axes))
        return out.view_as(out) if out is x else out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
        ctx.mesh, ctx.dim, ctx.axes = mesh, dim, axes
        return gather_blocks(x, mesh, dim, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return scatter_sums(grad, ctx.mesh, ctx.dim, ctx.axes), None, None, None


class _ScatterSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
        ctx.mesh, ctx.dim, ctx.axes = mesh, dim, axes
        return scatter_sums(x, mesh, dim, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_blocks(grad, ctx.mesh, ctx.dim, ctx.axes), None, None, None


class _Take(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
        ctx.mesh, ctx.dim, ctx.axes = mesh, dim, axes
        return take_block(x, mesh, dim, axes).contiguous()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return gather_blocks(grad, ctx.mesh, ctx.dim, ctx.axes), None, None, None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
        ctx.mesh, ctx.dim, ctx.axes = mesh, dim, axes
        return gather_blocks(x, mesh, dim, axes)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return take_block(grad, ctx.mesh, ctx.dim, ctx.axes).contiguous(), None, None, None


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, split_dim: int, concat_dim: int, axes: Axes) -> Tensor:
        ctx.mesh, ctx.split_dim, ctx.concat_dim, ctx.axes = mesh, split_dim, concat_dim, axes
        return collectives.all_to_all(x, mesh.group(*axes), split_dim, concat_dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        group = ctx.mesh.group(*ctx.axes)
        return collectives.all_to_all(grad, group, ctx.concat_dim, ctx.split_dim), None, None, None, None


class _Shift(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, mesh: Mesh, axes: Axes, steps: int) -> Tensor:
        ctx.mesh, ctx.axes, ctx.steps = mesh, axes, steps
        return collectives.shift(x, mesh.group(*axes), steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return collectives.shift(grad, ctx.mesh.group(*ctx.axes), -ctx.steps), None, None, None


def enter(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """Identity; backward all-reduces the gradient over ``axes``."""
    return x if mesh.size(*axes) == 1 else _Enter.apply(x, mesh, axes)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: Tensor, mesh: Mesh, axes: Axes) -> Tensor:
    """All-reduce over ``axes``; backward is the identity."""
    return x if mesh.size(*axes) == 1 else _Leave.apply(x, mesh, axes)  # type: ignore[no-any-return, no-untyped-call]


def gather(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """``[.., n, ..] -> [.., g·n, ..]`` by all-gather; backward reduce-scatters."""
    return x if mesh.size(*axes) == 1 else _Gather.apply(x, mesh, dim, axes)  # type: ignore[no-any-return, no-untyped-call]


def scatter_sum(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """``[.., g·n, ..] -> [.., n, ..]`` by reduce-scatter; backward all-gathers."""
    return x if mesh.size(*axes) == 1 else _ScatterSum.apply(x, mesh, dim, axes)  # type: ignore[no-any-return, no-untyped-call]


def take(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """This rank's block of a replicated tensor; backward all-gathers the gradients of the blocks."""
    return x if mesh.size(*axes) == 1 else _Take.apply(x, mesh, dim, axes)  # type: ignore[no-any-return, no-untyped-call]


def collect(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """All-gather for a use that is the same on every rank; backward keeps this rank's block of the gradient."""
    return x if mesh.size(*axes) == 1 else _Collect.apply(x, mesh, dim, axes)  # type: ignore[no-any-return, no-untyped-call]


def exchange(x: Tensor, mesh: Mesh, split_dim: int, concat_dim: int, axes: Axes) -> Tensor:
    """Move the split over ``axes`` from ``concat_dim`` to ``split_dim`` by all-to-all; backward moves it back."""
    if mesh.size(*axes) == 1:
        return x
    return _Exchange.apply(x, mesh, split_dim, concat_dim, axes)  # type: ignore[no-any-return, no-untyped-call]


def shift(x: Tensor, mesh: Mesh, axes: Axes, steps: int = 1) -> Tensor:
    """Send round the ring of ``axes`` by ``steps``; backward sends the gradient the other way."""
    return x if mesh.size(*axes) == 1 else _Shift.apply(x, mesh, axes, steps)  # type: ignore[no-any-return, no-untyped-call]
