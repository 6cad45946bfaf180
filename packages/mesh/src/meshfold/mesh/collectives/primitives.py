"""Six primitives with their adjoints: all the communication that a sharded model does between its tensors.

================ ======================= ======================= ===============================================
primitive        forward                 backward                use
================ ======================= ======================= ===============================================
``enter``        identity                all-reduce              a replicated tensor meets sharded work
``leave``        all-reduce              identity                partial sums become a replicated tensor
``gather``       all-gather              reduce-scatter          a shard is needed whole, each rank uses it differently
``take``         slice                   all-gather              a replicated tensor is used in shards
``collect``      all-gather              slice                   a shard is needed whole, every rank uses it alike
``exchange``     all-to-all              all-to-all back         the split moves from one dim to another
================ ======================= ======================= ===============================================

``axes`` are mesh axes in layout order, major first; axes of size 1 do nothing. A layer binds its primitives to their
mesh once (``bind_enter(mesh, axes)``) and calls the result on tensors, which torch.compile can trace. ``gather``,
``collect`` and ``exchange`` do both at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from meshfold.mesh.collectives import operations
from meshfold.mesh.errors import LayoutError
from meshfold.mesh.mesh import Mesh

_transforms: Callable[[], bool] = torch._C._are_functorch_transforms_active
Axes = tuple[str, ...]
Primitive = Callable[[Tensor], Tensor]


def gather_blocks(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """Gather along ``dim`` over ``axes``, the minor axis first. Not differentiable."""
    for axis in reversed(axes):
        x = operations.all_gather(x, mesh.group(axis), dim)
    return x


def scatter_sums(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """Reduce and scatter along ``dim`` over ``axes``, the major axis first. Not differentiable."""
    for axis in axes:
        x = operations.reduce_scatter(x, mesh.group(axis), dim)
    return x


def take_block(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """Return this rank's block along ``dim``: a view. Differentiable only as slicing is.

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


def exchange_blocks(x: Tensor, mesh: Mesh, split_dim: int, concat_dim: int, axes: Axes) -> Tensor:
    """Exchange blocks all-to-all over ``axes``, numbered by them, the major axis first. Not differentiable."""
    group, numbers = mesh.group(*axes), mesh.numbers(*axes)
    if numbers == tuple(range(group.size)):
        return operations.all_to_all(x, group, split_dim, concat_dim)
    # The group is in mesh order, the blocks are in the order of the axes.
    places = sorted(range(group.size), key=numbers.__getitem__)
    sent = torch.cat([x.chunk(group.size, split_dim)[number] for number in numbers], split_dim)
    arrived = operations.all_to_all(sent, group, split_dim, concat_dim).chunk(group.size, concat_dim)
    return torch.cat([arrived[place] for place in places], concat_dim)


def adjoint_pair(forward: Primitive, backward: Primitive) -> Primitive:
    """Return a differentiable function made of a linear map and its adjoint; autograd does not trace either.

    Everything else that the maps need is in their closures: torch.compile can only trace tensor arguments.
    """

    class Pair(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            y = forward(x)
            return x.view_as(x) if y is x else non_view_result(y, x)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return backward(grad)

    direct: Primitive = super(torch.autograd.Function, Pair).apply

    def apply(x: Tensor) -> Tensor:
        """Apply it without torch's preparations for ``torch.func``, which take the host some microseconds."""
        if torch.compiler.is_compiling() or _transforms():
            return Pair.apply(x)  # type: ignore[no-any-return]
        return direct(x)

    return apply


def identity(x: Tensor) -> Tensor:
    """Return the tensor itself."""
    return x


def _bind(
    mesh: Mesh,
    key: tuple[object, ...],
    axes: Axes,
    forward: Primitive,
    backward: Primitive,
    *,
    together: bool,
) -> Primitive:
    """Return the pair and make its groups now; return the identity if no other rank is involved."""
    if mesh.size(*axes) == 1:
        return identity
    for group in [axes] if together else [(axis,) for axis in axes]:
        mesh.prepare(*group)
    return mesh.once(("primitive", *key, axes), lambda: adjoint_pair(forward, backward))


def bind_enter(mesh: Mesh, axes: Axes) -> Primitive:
    """Return the identity; its backward all-reduces the gradient over ``axes``."""
    return _bind(
        mesh,
        ("enter",),
        axes,
        identity,
        lambda g: operations.all_reduce(g, mesh.group(*axes)),
        together=True,
    )


def bind_leave(mesh: Mesh, axes: Axes) -> Primitive:
    """Return an all-reduce over ``axes``; its backward is the identity."""
    return _bind(
        mesh,
        ("leave",),
        axes,
        lambda x: operations.all_reduce(x, mesh.group(*axes)),
        identity,
        together=True,
    )


def bind_gather(mesh: Mesh, dim: int, axes: Axes) -> Primitive:
    """``[.., n, ..] -> [.., g·n, ..]`` by all-gather; backward reduce-scatters."""
    return _bind(
        mesh,
        ("gather", dim),
        axes,
        lambda x: gather_blocks(x, mesh, dim, axes),
        lambda g: scatter_sums(g, mesh, dim, axes),
        together=False,
    )


def bind_take(mesh: Mesh, dim: int, axes: Axes) -> Primitive:
    """Return this rank's block of a replicated tensor; backward all-gathers the gradients of the blocks."""
    return _bind(
        mesh,
        ("take", dim),
        axes,
        lambda x: take_block(x, mesh, dim, axes).contiguous(),
        lambda g: gather_blocks(g, mesh, dim, axes),
        together=False,
    )


def bind_collect(mesh: Mesh, dim: int, axes: Axes) -> Primitive:
    """Return an all-gather for a use that is the same on every rank; its backward keeps this rank's block of the gradient."""
    return _bind(
        mesh,
        ("collect", dim),
        axes,
        lambda x: gather_blocks(x, mesh, dim, axes),
        lambda g: take_block(g, mesh, dim, axes).contiguous(),
        together=False,
    )


def bind_exchange(mesh: Mesh, split_dim: int, concat_dim: int, axes: Axes) -> Primitive:
    """Move the split over ``axes`` from ``concat_dim`` to ``split_dim`` by all-to-all; backward moves it back."""
    return _bind(
        mesh,
        ("exchange", split_dim, concat_dim),
        axes,
        lambda x: exchange_blocks(x, mesh, split_dim, concat_dim, axes),
        lambda g: exchange_blocks(g, mesh, concat_dim, split_dim, axes),
        together=True,
    )


def gather(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """Apply :func:`bind_gather` at once."""
    return bind_gather(mesh, dim, axes)(x)


def collect(x: Tensor, mesh: Mesh, dim: int, axes: Axes) -> Tensor:
    """Apply :func:`bind_collect` at once."""
    return bind_collect(mesh, dim, axes)(x)


def exchange(x: Tensor, mesh: Mesh, split_dim: int, concat_dim: int, axes: Axes) -> Tensor:
    """Apply :func:`bind_exchange` at once."""
    return bind_exchange(mesh, split_dim, concat_dim, axes)(x)


def traceable_result(y: Tensor) -> Tensor:
    """Return ``y`` for a forward to return: itself, and in a traced graph a separate tensor in y's memory.

    Torch 2.11 gives the graph of a forward every tensor on the way as a further result. If an operator returned its operand
    (``x.to(x.dtype)``, ``x.contiguous()``, ``x.add_(..)``, waiting for a collective), two of them are the same tensor. Autograd
    ties it to the last one, and the gradient of the first, which the model has, is silently zero. A forward that returns what other
    code gave it, which may have done so, returns it through here. ``detach`` and not a view: what becomes of a view in place
    autograd refuses.
    """
    return y.detach() if torch.compiler.is_compiling() else y


def non_view_result(y: Tensor, x: Tensor) -> Tensor:
    """Return :func:`traceable_result`, never a view: autograd forbids in-place changes of a view that a Function returns.

    So ``nn.ReLU(inplace=True)`` and ``y += x`` work behind a sharded layer as behind torch's own.

    Args:
        y: what the forward computed.
        x: its input; of a part of it a copy is returned, which may be changed without changing the input.
    """
    if torch.compiler.is_compiling() or not y._is_view():
        return traceable_result(y)
    if y._base is (x._base if x._is_view() else x):
        return y.clone()
    # Safe: nothing else holds the base of the view y.
    found: Tensor = torch.ops.aten._unsafe_view(y, y.shape)
    return found
