"""A submodule that stays whole on every rank: its input is joined, its output taken apart again.

The way out for a layer that no mode knows (a router, an odd convolution). Every rank computes the same, so parameters
stay equal without a collective of their own.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.mesh.primitives import bind_collect, bind_take
from meshfold.tensor_parallel.modes import Mode


def replicate(module: nn.Module, mesh: Mesh, mode: Mode, *, flat: bool) -> None:
    """Join the residual stream in front of a module, and split what it returns if that is as wide.

    Args:
        module: takes the residual stream ``.. h`` first; returns a tensor, or a tuple that starts with one.
        mesh: where the stream lies.
        mode: how.
        flat: the stream is ``m h`` rather than ``b s h``.
    """
    residual = mode.layout("residual")
    tokens, columns = residual["m"], residual["h"]
    for parameter in module.parameters():
        shape = tuple(parameter.shape)
        annotate(parameter, ParameterMeta(mesh=mesh, placement=Placement(shape=shape, axes=((),) * len(shape))))

    collect_rows, collect_columns = bind_collect(mesh, 0, tokens), bind_collect(mesh, -1, columns)
    take_rows, take_columns = bind_take(mesh, 0, tokens), bind_take(mesh, -1, columns)

    def join(_: nn.Module, args: tuple[Any, ...]) -> Any:
        if not args or not isinstance(args[0], Tensor) or not args[0].is_floating_point():
            return args
        return (collect_rows(collect_columns(args[0])), *args[1:])

    def split(_: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        if isinstance(output, tuple):
            return (split_one(output[0]), *output[1:])
        return split_one(output)

    def split_one(x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return take_rows(take_columns(x))

    module.register_forward_pre_hook(join)
    module.register_forward_hook(split)
