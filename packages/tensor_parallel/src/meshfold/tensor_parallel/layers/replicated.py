"""A submodule that stays whole on every rank: its input is joined, its output taken apart again.

The way out for a layer that no mode knows (a router, an odd convolution). Every rank computes the same, so parameters
stay equal without a collective of their own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.mesh.primitives import bind_collect, bind_take
from meshfold.tensor_parallel.boundary import Boundary
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.modes import Mode


class Replicated(OnMesh):
    """Joins the residual stream in front of a module, and splits what it returns."""

    def __init__(self, mesh: Mesh, mode: Mode, hidden: int, boundary: Boundary | None = None) -> None:
        """Args:
        mesh, mode: where the stream lies and how.
        hidden: its size.
        boundary: of a stream that is flattened; the module gets its batch and sequence dims.
        """
        residual = mode.layout("residual")
        self.mesh, self.hidden, self.boundary = mesh, hidden, boundary
        tokens, columns = residual["m"], residual["h"]
        self._collect_rows, self._collect_columns = (
            bind_collect(mesh, 0, tokens),
            bind_collect(mesh, -1, columns),
        )
        self._take_rows, self._take_columns = bind_take(mesh, 0, tokens), bind_take(mesh, -1, columns)
        self._local, self._lead = hidden // mesh.size(*columns), torch.Size()

    def around(self, module: nn.Module) -> None:
        """Stand round a module that takes the stream first and returns a tensor, or a tuple that starts with one.

        What it returns is split by tokens if it has as many, and by columns if it is as wide as the stream.
        """
        for parameter in module.parameters():
            shape = tuple(parameter.shape)
            place = Placement(shape=shape, axes=((),) * len(shape))
            annotate(parameter, ParameterMeta(mesh=self.mesh, placement=place))
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self._join(args[0]), *args[1:]), kwargs
        return args, {
            name: self._join(value) if i == 0 else value for i, (name, value) in enumerate(kwargs.items())
        }

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self._split(output[0]), *output[1:])
        return self._split(output)

    def _join(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1] != self._local:
            return x
        x = self._collect_rows(self._collect_columns(x))
        if self.boundary is not None:
            x = x.view(*self.boundary.lead, x.shape[-1])
        self._lead = x.shape[:-1]
        return x

    def _split(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[:-1] != self._lead:
            return x
        if self.boundary is not None:
            x = x.reshape(-1, x.shape[-1])
        return self._take_rows(self._take_columns(x) if x.shape[-1] == self.hidden else x)
