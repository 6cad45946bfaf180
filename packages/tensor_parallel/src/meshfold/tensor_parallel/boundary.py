"""A boundary: where a tensor that is whole on every rank becomes the split residual stream, and back.

Round a model that has no embedding, or round a list of blocks where the stream outside of it is whole.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.primitives import bind_collect, bind_take
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.modes import Mode


class Boundary(OnMesh):
    """Splits a whole tensor ``b s h`` into the residual stream and puts it together again.

    Inside, tokens are flattened to ``m h`` where a split by the batch alone would not do (``flatten``).
    """

    def __init__(self, mesh: Mesh, mode: Mode, *, flatten: bool) -> None:
        residual = mode.layout("residual")
        self.mesh, self.flatten = mesh, flatten
        self.tokens, self.columns = residual["m"], residual["h"]
        self.lead = torch.Size()
        self._take_rows, self._take_columns = (
            bind_take(mesh, 0, self.tokens),
            bind_take(mesh, -1, self.columns),
        )
        self._collect_rows = bind_collect(mesh, 0, self.tokens)
        self._collect_columns = bind_collect(mesh, -1, self.columns)

    def split(self, x: Tensor) -> Tensor:
        """``b s h`` whole -> local block of the residual stream; backward gathers."""
        self.lead = x.shape[:-1]
        if self.flatten:
            x = x.reshape(-1, x.shape[-1])
        blocks = self.mesh.size(*self.tokens)
        if x.shape[0] % blocks:
            what = "tokens (batch times sequence length)" if self.flatten else "rows (the batch)"
            raise LayoutError(
                f"{x.shape[0]} {what} cannot be split over {', '.join(self.tokens)} ({blocks} blocks): make them a "
                f"multiple of {blocks}"
            )
        return self._take_columns(self._take_rows(x))

    def join(self, x: Tensor) -> Tensor:
        """A local block of the residual stream -> ``b s h`` whole; backward takes the block of the gradient."""
        x = self._collect_rows(self._collect_columns(x))
        return x.view(*self.lead, x.shape[-1]) if self.flatten else x

    def around(self, first: nn.Module, last: nn.Module) -> None:
        """Split what the first module is called with, join what the last returns."""
        first.register_forward_pre_hook(self._before, with_kwargs=True)
        last.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if args:
            return (self.split(args[0]), *args[1:]), kwargs
        name, x = next(iter(kwargs.items()))
        return args, {**kwargs, name: self.split(x)}

    def _after(self, module: nn.Module, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (self.join(output[0]), *output[1:])
        return self.join(output)
