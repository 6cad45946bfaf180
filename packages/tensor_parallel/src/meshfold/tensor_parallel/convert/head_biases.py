"""Biases of all heads that a model makes outside of its attention (ALiBi): attention whose heads are split gets those of its own.

A model computes them from the number of heads in its configuration, once for all blocks, and may add them to the mask. They are
small, so every rank makes all of them, and a hook in front of the attention takes the heads of its rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import bind_take, take_block
from meshfold.mesh.tracking import Dim, Tracker, block, is_whole, set_tracked_layout, size_of, tracker
from meshfold.tensor_parallel.convert.forward_code import parameters_of
from meshfold.tensor_parallel.convert.stream_layout import spanning_axes
from meshfold.tensor_parallel.layers.base import StreamAdapter
from meshfold.tensor_parallel.modes import Mode

BIASES = ("alibi", "position_bias")
"""Names that attention gives them."""
MASK = "attention_mask"
"""Name that it gives the mask, which may have them added."""


def biases_of(module: nn.Module) -> list[str]:
    """Return the biases of all heads that a module's forward takes, unless its configuration says that there are none (Falcon)."""
    config = getattr(module, "config", None)
    return [bias for bias in BIASES if bias in parameters_of(module) and getattr(config, bias, None) is not False]


def own_heads(name: str, x: Tensor, heads: int, take: Callable[[Tensor], Tensor]) -> Tensor:
    """Return what an argument has for this rank's heads.

    Args:
        name: of the argument.
        x: ``b h q k`` or ``1 h q k``, ``(b h) q k``, ``h q k`` or ``h``; as it is, if it has one bias for all heads.
        heads: of all ranks.
        take: from ``.. h ..`` with the heads second, or first and alone, to this rank's.

    Raises:
        LayoutError: for another shape.
    """
    if x.dim() == 4 and x.shape[1] in (1, heads):
        return x if x.shape[1] == 1 else take(x)
    if name == MASK:
        return x
    if x.dim() == 3 and x.shape[0] % heads == 0:
        return take(x.reshape(-1, heads, *x.shape[1:])).flatten(0, 1)
    if x.dim() == 1 and x.shape[0] == heads:
        return take(x[None]).squeeze(0)
    raise LayoutError(
        f"attention got {name} of shape {tuple(x.shape)}, in which its {heads} heads cannot be found: give it b h q k, "
        "(b h) q k or h q k, or keep all of the attention whole with a rule 'replicate'"
    )


def guesses(module: nn.Module, heads: int, tokens: tuple[int, ...]) -> Iterator[dict[str, Tensor]]:
    """Yield arguments to try an attention with, by their names: its biases in each shape, without a mask and with one."""
    biases = biases_of(module)
    rows, length = tokens[:-1] or (1,), tokens[-1]
    generator = torch.Generator().manual_seed(1)

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, 1, length, generator=generator, dtype=torch.float64)

    shapes = ((rows[0] * heads,), (rows[0], heads), (heads,)) if biases else ()
    for masked in (False, True):
        for shape in shapes:
            given = {bias: made(*shape) for bias in biases}
            given |= {MASK: made(rows[0], heads)} if masked else {}
            yield {name: x for name, x in given.items() if name in parameters_of(module)}
        if not biases:
            yield {}
            return


class HeadBiases(StreamAdapter):
    """Hook that gives an attention module the biases of this rank's heads, which are the same on every rank before it."""

    def __init__(self, mesh: Mesh, mode: Mode, heads: int, names: tuple[str, ...], order: tuple[str, ...]) -> None:
        """Args:
        heads: of all ranks.
        names: of the arguments, the mask among them.
        order: the names of all arguments of the module's forward.
        """
        self.mesh, self.heads, self.names = mesh, heads, names
        hidden = mode.layout("hidden")
        self.axes, self._splits_rows = hidden["n"], mesh.size(*hidden["m"]) > 1
        self._places = {name: order.index(name) for name in names}
        self._take = bind_take(mesh, 1, self.axes)
        self._stream: Tensor | None = None

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given, named = list(args), dict(kwargs)
        self._stream = given[0] if given else next(iter(named.values()))
        for name, place in self._places.items():
            if place < len(given):
                given[place] = self._own(name, given[place])
            elif name in named:
                named[name] = self._own(name, named[name])
        self._stream = None
        return tuple(given), named

    def _own(self, name: str, x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return own_heads(name, self._of_rows(name, x), self.heads, self._mine)

    def _of_rows(self, name: str, x: Tensor) -> Tensor:
        """Return biases ``(b h) q k`` of as many rows as attention has: in a region these are other rows than the stream's."""
        if x.dim() != 3 or x.shape[0] % self.heads or self._stream is None or not self._splits_rows:
            return x
        given, rows = x.shape[0] // self.heads, self._stream.shape[0]
        if given in (1, rows):
            return x
        found = tracker()
        with nullcontext() if found is None else found.untracked():
            by_row = x.view(given, self.heads, *x.shape[1:])
            if found is not None and not bool((by_row == by_row[:1]).all()):
                raise LayoutError(
                    f"attention got {name} of shape {tuple(x.shape)}, which differs by row, and has other rows than the stream in "
                    "this mode: use mode '1d'"
                )
            y = by_row[:1].expand(rows, *by_row.shape[1:]).flatten(0, 1)
        if rows > 1:
            set_tracked_layout(y, None)
        return y

    def _mine(self, x: Tensor) -> Tensor:
        take = self._take if x.requires_grad else self._view
        found = tracker()
        if found is None:
            return take(x)
        rows, dims = self._rows(found, x), found.dims(x)
        with found.untracked(rows=True):
            y = take(x)
        found.mark(y, (rows, block(y.shape[1], spanning_axes(self.mesh, self.axes)), *dims[2:]))
        return y

    def _rows(self, found: Tracker, x: Tensor) -> Dim:
        """Return the layout of the rows: those of the stream, where biases were made for as many rows as a rank has of it."""
        if self._stream is None or not self._splits_rows or x.shape[0] == 1:
            return found.dims(x)[0]
        stream = found.dims(self._stream)[0]
        return stream if not is_whole(stream) and size_of(stream) == x.shape[0] else found.dims(x)[0]

    def _view(self, x: Tensor) -> Tensor:
        return take_block(x, self.mesh, 1, self.axes)


def names_of(module: nn.Module) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of the arguments that have biases of heads, and of all arguments of a module's forward."""
    parameters: Mapping[str, Any] = parameters_of(module)
    biases = biases_of(module)
    return tuple(name for name in (*biases, MASK) if biases and name in parameters), tuple(parameters)
