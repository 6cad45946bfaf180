"""A submodule that stays whole on every rank: its input is joined, its output taken apart again.

The way out for a layer that no mode knows (a router, an odd convolution). Every rank computes the same, so parameters
stay equal without a collective of their own.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.mesh.primitives import bind_collect, bind_take
from meshfold.tensor_parallel.boundary import Boundary
from meshfold.tensor_parallel.layers.base import OnMesh
from meshfold.tensor_parallel.modes import Mode

MASK = "attention_mask"
"""What the model's own code makes for the rows that it sees of the stream: it is joined as the stream is."""
_OF_ROWS = (MASK, "position_ids", "position_embeddings")


def takes_rows(module: nn.Module) -> bool:
    """Whether a module takes masks or positions, which a caller may give by row."""
    return any(name in _OF_ROWS for name in inspect.signature(type(module).forward).parameters)


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
        self._mask = -1  # its place among the arguments
        self._count, self._streams = 1, frozenset[str]()  # arguments that may be of a stream, and their names

    def around(self, module: nn.Module, *, begins: bool = False, streams: int = 1) -> None:
        """Stand round a module that takes the stream first and returns a tensor, or a tuple that starts with one.

        A mask that it takes as well is joined by rows where the stream is.
        What it returns is split by tokens if it has as many, and by columns if it is as wide as the stream.

        Args:
            begins: the module takes no stream, but something that is whole on every rank, and returns the stream.
            streams: how many of its first arguments may be of a stream (query, key, value); the others are joined where they lie
                as the first does.
        """
        for parameter in module.parameters():
            shape = tuple(parameter.shape)
            place = Placement(shape=shape, axes=((),) * len(shape))
            annotate(parameter, ParameterMeta(mesh=self.mesh, placement=place))
        if begins:
            module.register_forward_hook(self._begin)
            return
        names = list(inspect.signature(type(module).forward).parameters)[1:]
        self._mask = names.index(MASK) if MASK in names else -1
        self._count, self._streams = streams, frozenset(names[:streams])
        module.register_forward_pre_hook(self._before, with_kwargs=True)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: list[Any] = [*args, *kwargs.values()]
        if not values:
            return args, kwargs
        given = list(values)
        values[0] = self._join(given[0])
        for place in self._others(args, kwargs):
            same = next((i for i in range(place) if given[i] is given[place]), None)
            values[place] = self._join_other(given[place]) if same is None else values[same]
        if self.boundary is None and values[0] is not given[0]:
            place = len(args) + list(kwargs).index(MASK) if MASK in kwargs else self._mask
            if place > 0 and (place < len(args) or MASK in kwargs):
                values[place] = self._join_mask(values[place], given[0].shape[0])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """The places of further arguments that may be of a stream."""
        named = [len(args) + i for i, name in enumerate(kwargs) if name in self._streams]
        return [place for place in (*range(1, min(len(args), self._count)), *named) if place > 0]

    def _begin(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._lead = (output[0] if isinstance(output, tuple) else output).shape[:-1]
        return self._after(module, args, output)

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

    def _join_other(self, x: Any) -> Any:
        """What is of a stream as the first argument is; of one that is flat here another may be whole, with its batch dim."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1] != self._local:
            return x
        if self.boundary is None:
            return self._collect_rows(self._collect_columns(x))
        if x.dim() != 2:
            return x
        return self._collect_rows(self._collect_columns(x)).view(*self.boundary.lead, self.hidden)

    def _join_mask(self, mask: Any, rows: int) -> Any:
        """A mask for this rank's rows, for those of all. All ranks have one, or none has: the frame sees to it."""
        return self._collect_rows(mask) if isinstance(mask, Tensor) and mask.shape[0] == rows else mask

    def _split(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[:-1] != self._lead:
            return x
        if self.boundary is not None:
            x = x.reshape(-1, x.shape[-1])
        return self._take_rows(self._take_columns(x) if x.shape[-1] == self.hidden else x)
