"""Submodules that stay whole on every rank: their input is gathered, their output split again.

For layers that no mode can split (a router, an unusual convolution). Every rank computes the same, so parameters
stay equal without a collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshfold.mesh import Mesh, ParameterMeta, Placement, annotate
from meshfold.mesh.collectives import bind_collect, bind_take
from meshfold.mesh.tracking import is_open, tracker, untracked
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.forward_code import parameters_of
from meshfold.tensor_parallel.convert.stream_dims import DimFinder, StreamDims
from meshfold.tensor_parallel.convert.stream_layout import (
    block_dims,
    check_stream,
    joined_rows,
    mark_gathered,
    mark_split,
    spanning_axes,
    split_rows,
)
from meshfold.tensor_parallel.layers.base import BatchShape, StreamAdapter
from meshfold.tensor_parallel.modes import Mode

MASK = "attention_mask"
"""Tensors that the model's own code makes for the rows of the stream that it sees: they are gathered like the stream."""
_OF_ROWS = (MASK, "position_ids", "position_embeddings")

_NOWHERE = StreamDims(None, None)


def takes_rows(module: nn.Module) -> bool:
    """Return True if a module takes masks or positions, which a caller may give by row."""
    return any(name in _OF_ROWS for name in parameters_of(module))


class Replicated(StreamAdapter):
    """Adapter that gathers the residual stream before a module and splits its result."""

    def __init__(
        self,
        module: nn.Module,
        mesh: Mesh,
        mode: Mode,
        hidden: int,
        batch: BatchShape,
        boundary: Boundary | None = None,
    ) -> None:
        """Args:
        module: it takes the stream first and returns a tensor, or a tuple that starts with one.
        mesh, mode: of the stream.
        hidden: its size.
        batch: of the forward that runs.
        boundary: of a stream that is flattened; the module gets its batch and sequence dims.
        """
        residual = mode.layout("residual")
        self.mesh, self.hidden, self.batch, self.boundary = mesh, hidden, batch, boundary
        self._tokens, self._axes = residual["m"], residual["h"]
        self._collect_rows = {dim: bind_collect(mesh, dim, self._tokens) for dim in (0, 1)}
        self._collect_columns = {dim: bind_collect(mesh, dim, self._axes) for dim in (1, -1)}
        self._take_rows = {dim: bind_take(mesh, dim, self._tokens) for dim in (0, 1)}
        self._take_columns = {dim: bind_take(mesh, dim, self._axes) for dim in (1, -1)}
        self._local = hidden // mesh.size(*self._axes)
        self._dims, self._joined = _NOWHERE, torch.Size()  # of the first argument, as gathered
        names = list(parameters_of(module))
        self._mask = names.index(MASK) if MASK in names else -1  # index among the arguments
        # Number and names of arguments that may come from a stream (attention's query, key, value).
        self._count = 3 if isinstance(module, nn.MultiheadAttention) else 1
        self._streams = frozenset(names[: self._count])
        self._recurrent = isinstance(module, nn.RNNBase)
        self._find = DimFinder(module, batch, hidden, mesh.size(*self._tokens), mesh.size(*self._axes)).find
        self._real = spanning_axes(mesh, self._tokens), spanning_axes(mesh, self._axes)
        self._known: dict[tuple[int, int], StreamDims | None] = {}  # by an argument's index and number of dims

    def keep_whole(self, module: nn.Module) -> None:
        """Attach to the module, and mark its parameters as whole.

        Its first argument is gathered. Further arguments from a stream (query, key, value) are gathered if they have the layout of
        the first. A mask is gathered by rows if the stream is. Its output is split by rows if it has as many in the same dim, and
        by columns if it is as wide as the stream.
        """
        for parameter in module.parameters():
            shape = tuple(parameter.shape)
            place = Placement(shape=shape, axes=((),) * len(shape))
            annotate(parameter, ParameterMeta(mesh=self.mesh, placement=place))
        self.attach(module)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        values: list[Any] = [*args, *kwargs.values()]
        if not values:
            return args, kwargs
        with untracked():
            joined = self._joined_arguments(args, kwargs, values)
        if (found := tracker()) is not None:
            changed = zip((*joined[0], *joined[1].values()), (*args, *kwargs.values()), strict=True)
            for x, before in changed:
                if x is not before and isinstance(x, Tensor):
                    found.rows.unflattened(x, before)
        return joined

    def _joined_arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any], values: list[Any]) -> tuple[Any, Any]:
        """Return the module's arguments; those that come from a stream are gathered."""
        given = list(values)
        self._dims, self._joined = _NOWHERE, torch.Size()
        values[0] = self._join(given[0])
        for place in self._others(args, kwargs):
            same = next((i for i in range(place) if given[i] is given[place]), None)
            values[place] = self._join_other(place, given[place]) if same is None else values[same]
        if self._recurrent and len(values) > 1:
            values[1] = self._map_states(values[1], self._join_state)
        if self.boundary is None and self._dims.rows == 0:
            place = len(args) + list(kwargs).index(MASK) if MASK in kwargs else self._mask
            if place > 0 and (place < len(args) or MASK in kwargs):
                values[place] = self._join_mask(values[place], given[0].shape[0])
        return tuple(values[: len(args)]), dict(zip(kwargs, values[len(args) :], strict=True))

    def _others(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
        """Return the indices of further arguments that may come from a stream."""
        named = [len(args) + i for i, name in enumerate(kwargs) if name in self._streams]
        return [place for place in (*range(1, min(len(args), self._count)), *named) if place > 0]

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        with untracked():
            split = self._split_output(output)
        if (found := tracker()) is not None:
            for x, before in zip(tree_leaves(split), tree_leaves(output), strict=True):
                if x is not before and isinstance(x, Tensor):
                    found.rows.flattened(x, before)
        return split

    def _split_output(self, output: Any) -> Any:
        if not isinstance(output, tuple):
            return self._split(output)
        rest = output[1:]
        if self._recurrent:
            rest = tuple(self._map_states(state, self._split_state) for state in rest)
        return (self._split(output[0]), *rest)

    # -- in -------------------------------------------------------------------------------------------------------------

    def _join(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.dim() < 1:
            return x
        if self.boundary is not None:
            if x.shape[-1] != self._local:
                return x
            x = self._join_flat(x, self.boundary)
            self._dims, self._joined = StreamDims(0, -1), x.shape
            return x
        self._dims = self._where(0, x, self._find)
        x = self._collect(x, self._dims)
        self._joined = x.shape
        return x

    def _join_other(self, place: int, x: Any) -> Any:
        """Gather a further argument that comes from a stream; next to a flat first argument, others may be whole already."""
        if not isinstance(x, Tensor) or not x.is_floating_point() or x.shape[-1] != self._local:
            return x
        if self.boundary is None:
            return self._collect(x, self._where(place, x, self._find))
        return self._join_flat(x, self.boundary) if x.dim() == 2 else x

    def _where(self, place: int, x: Tensor, guess: Callable[[Tensor], StreamDims]) -> StreamDims:
        """Return the split dims of an argument: as tracked in the first forward and reused later, else guessed from its shape.

        Raises:
            LayoutError: for an argument that has another layout in another call.
        """
        key, found = (place, x.dim()), tracker()
        if found is None or any(map(is_open, found.dims(x))):
            return self._known.get(key) or guess(x)
        rows, columns = block_dims(found.dims(x), *self._real)
        dims = StreamDims(rows, -1 if columns == x.dim() - 1 else columns)
        before = self._known.setdefault(key, dims)
        if before is not None and before != dims:
            self._known[key] = None  # differs between calls: go by the shape
        turned = before is not None and before.rows != rows and None not in (before.rows, rows)
        if turned or rows not in (None, 0, 1) or dims.columns not in (None, 1, -1):
            found.refuse(
                "a module that is kept whole",
                f"receives a tensor that is split in dim {rows if columns is None else columns}, but joins rows along dim 0 or 1, "
                "the same in every call: transpose it to b s h",
                x,
                axes=(*self._real[0], *self._real[1]),
            )
        return dims

    def _join_flat(self, x: Tensor, boundary: Boundary) -> Tensor:
        """Gather a flat stream: ``m h`` to ``b s h``."""
        joined = self._collect_rows[0](self._collect_columns[-1](x)).view(*boundary.lead, self.hidden)
        if (found := tracker()) is not None:
            check_stream(found, self.mesh, x, self._tokens, self._axes, "a module that is kept whole")
            found.mark(joined, joined_rows(found, self.mesh, found.dims(x), tuple(joined.shape)))
        return joined

    def _collect(self, x: Tensor, dims: StreamDims) -> Tensor:
        if (dim := dims.columns) is not None:
            x = mark_gathered(self.mesh, x, dim, self._axes, self._collect_columns[dim](x))
        if (dim := dims.rows) is not None:
            x = mark_gathered(self.mesh, x, dim, self._tokens, self._collect_rows[dim](x))
        return x

    def _join_mask(self, mask: Any, rows: int) -> Any:
        """Gather a mask's rows. Either all ranks have a mask or none; the model's adapter ensures this."""
        if not isinstance(mask, Tensor) or mask.shape[0] != rows:
            return mask
        joined = self._collect_rows[0](mask)
        return mark_gathered(self.mesh, mask, 0, self._tokens, joined, repeated=True)

    def _map_states(self, states: Any, change: Callable[[Tensor], Tensor]) -> Any:
        """Apply a function to a recurrent layer's state ``layers b h``, or to both of an LSTM's."""
        if isinstance(states, tuple):
            return tuple(change(state) for state in states)
        return change(states) if isinstance(states, Tensor) else states

    def _join_state(self, state: Tensor) -> Tensor:
        return self._collect(state, self._where(1, state, self._guess_state))

    def _guess_state(self, state: Tensor) -> StreamDims:
        rows = self.batch.rows // self.mesh.size(*self._tokens)
        columns = -1 if state.shape[-1] == self._local else None
        return StreamDims(1 if state.dim() == 3 and state.shape[1] == rows else None, columns)

    # -- out ------------------------------------------------------------------------------------------------------------

    def _split_state(self, state: Tensor) -> Tensor:
        if self._dims.rows is None and self._dims.columns is None:
            return state
        columns = -1 if state.shape[-1] == self.hidden else None
        return self._take(state, StreamDims(1 if self._dims.rows is not None and state.dim() == 3 else None, columns))

    def _split(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point() or not self._joined or not x.dim():
            return x
        if self.boundary is not None:
            if x.shape[:-1] != self._joined[:-1]:
                return x
            flat = x.reshape(-1, x.shape[-1])
            wide = x.shape[-1] == self.hidden
            mine = self._take_rows[0](self._take_columns[-1](flat) if wide else flat)
            if (found := tracker()) is not None:
                axes = self._axes if wide else ()
                found.mark(mine, split_rows(found, self.mesh, found.dims(x), mine, self._tokens, axes))
            return mine
        rows = self._dims.rows
        pooled = x.dim() == len(self._joined) - 1 and x.shape[-1] == self.hidden  # one vector per sequence
        if x.dim() != len(self._joined) and not pooled:
            return x
        if rows is not None and pooled:
            rows = 0
        if rows is not None and x.shape[rows] != self._joined[self._dims.rows or 0]:
            return x
        columns = 1 if self._dims.columns == 1 and not pooled else -1
        widths = {
            self.hidden,
            self.hidden if self._dims.columns is None else self._joined[self._dims.columns],
        }
        return self._take(x, StreamDims(rows, columns if x.shape[columns] in widths else None))

    def _take(self, x: Tensor, dims: StreamDims) -> Tensor:
        if (dim := dims.rows) is not None:
            x = mark_split(self.mesh, x, dim, self._tokens, self._take_rows[dim](x))
        if (dim := dims.columns) is not None:
            x = mark_split(self.mesh, x, dim, self._axes, self._take_columns[dim](x))
        return x


class StreamSource(Replicated):
    """Adapter of a module that makes the stream from an input that is whole on every rank: only its result is split."""

    def attach(self, first: nn.Module, last: nn.Module | None = None, *, prepend: bool = False) -> None:
        """Register the hook after the module."""
        first.register_forward_hook(self.leave)

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._joined = (output[0] if isinstance(output, tuple) else output).shape
        self._dims = StreamDims(0, -1)
        return super().leave(module, args, output)
