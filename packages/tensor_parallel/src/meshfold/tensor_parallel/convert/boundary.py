"""Boundaries: a tensor that is whole on every rank becomes the split residual stream, and back.

Around a model without an embedding, or around a list of blocks if the stream outside it is whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import bind_collect, bind_take
from meshfold.mesh.tracking import tracker
from meshfold.tensor_parallel.convert.stream_layout import check_stream, joined_rows, split_rows
from meshfold.tensor_parallel.layers.base import StreamAdapter
from meshfold.tensor_parallel.modes import Mode


class Boundary(StreamAdapter):
    """Split of a whole tensor ``b s h`` into the residual stream, and its inverse.

    With ``flatten``, tokens inside are flat, ``m h``: a split by only the batch is not enough.

    Attributes:
        name: of its list of blocks; empty for a boundary of the whole model.
        inside: the first of the blocks has been called, and the last has not returned.
    """

    def __init__(self, mesh: Mesh, mode: Mode, *, flatten: bool) -> None:
        residual = mode.layout("residual")
        self.mesh, self.flatten = mesh, flatten
        self.tokens, self.columns = residual["m"], residual["h"]
        self.lead = torch.Size()
        self.name, self.inside = "", False
        self._take_rows, self._take_columns = (
            bind_take(mesh, 0, self.tokens),
            bind_take(mesh, -1, self.columns),
        )
        self._collect_rows = bind_collect(mesh, 0, self.tokens)
        self._collect_columns = bind_collect(mesh, -1, self.columns)

    def split(self, x: Tensor) -> Tensor:
        """Split ``b s h``, whole, into a local block of the residual stream; backward gathers."""
        found = tracker()
        if found is None:
            return self._split(x)
        dims = found.dims(x)
        with found.untracked():
            y = self._split(x)
        found.mark(y, split_rows(found, self.mesh, dims, y, self.tokens, self.columns))
        found.rows.flattened(y, x)
        found.flat = self.flatten and len(self.lead) > 1
        return y

    def _split(self, x: Tensor) -> Tensor:
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
        """Gather a local block of the residual stream to ``b s h``, whole; backward takes the block of the gradient."""
        found = tracker()
        if found is None:
            return self._join(x)
        check_stream(found, self.mesh, x, self.tokens, self.columns, "the end of the blocks")
        with found.untracked():
            y = self._join(x)
        found.mark(y, joined_rows(found, self.mesh, found.dims(x), tuple(y.shape)))
        found.rows.unflattened(y, x)
        found.flat = False
        return y

    def _join(self, x: Tensor) -> Tensor:
        x = self._collect_rows(self._collect_columns(x))
        return x.view(*self.lead, x.shape[-1]) if self.flatten else x

    def attach_to_blocks(self, name: str, blocks: Sequence[nn.Module], model: nn.Module) -> None:
        """Split the input of the first block, join the output of the last, and check that they are called in order.

        Args:
            name: full name of the list of blocks.
            blocks: in the order in which the model calls them; single layers among them may be called anywhere.
            model: its forward has to leave the blocks through the last one.
        """
        self.name = name
        self.attach(blocks[0], blocks[-1])
        for block in blocks[1:]:
            if next(block.children(), None) is not None:
                block.register_forward_pre_hook(self._in_between, prepend=True, with_kwargs=True)
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end)

    def _begin(self, module: nn.Module, args: Any) -> None:
        self.inside = False

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        if self.inside:
            raise LayoutError(f"{self.order()}: this forward never called the last one")

    def _in_between(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else next(iter(kwargs.values()), None)
        if isinstance(x, Tensor) and x.shape[:-1].numel() * self.mesh.size(*self.tokens) != self.lead.numel():
            raise LayoutError(
                f"{self.order()}: a {type(module).__name__} was called with {tuple(x.shape)}, which is not this rank's shard"
            )

    def order(self) -> str:
        """Return what to change if its blocks are not called one after another."""
        return (
            f"{self.name}: tokens are split over {', '.join(self.tokens)} from the first block of the list to the last, so "
            f"the model has to call all of them in the order of the list, each with what the one before returned. Put the "
            f"code between two blocks into a block, and what is called in another order into a list of its own, or use mode "
            f"'1d' (an Engine: without sequence=dict(mode='megatron'))"
        )

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self.inside = True
        if args:
            return (self.split(args[0]), *args[1:]), kwargs
        name, x = next(iter(kwargs.items()))
        return args, {**kwargs, name: self.split(x)}

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self.inside = False
        if isinstance(output, tuple):
            return (self.join(output[0]), *output[1:])
        return self.join(output)
