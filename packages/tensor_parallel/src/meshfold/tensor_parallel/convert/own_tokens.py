"""Modules that work on each token separately, such as a mixture whose experts are spread over ranks.

The module gets tokens that no other rank has, with all of their hidden dim; its output is returned in the stream's layout. So
nothing is computed twice. The gradient of a parameter inside is this rank's term of a sum over all ranks of the tensor axes.
The code that marks the module must say so in the parameters' metadata (``sum_axes``).
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from meshfold.mesh import LayoutError, Mesh
from meshfold.mesh.collectives import bind_collect, bind_exchange, bind_take
from meshfold.mesh.tracking import set_tracked_layout, tracked_layout, untracked
from meshfold.tensor_parallel.layers.base import BatchShape, OnMesh
from meshfold.tensor_parallel.modes import Mode

MARK = "own_tokens"
"""Attribute of a module that is one of these."""


class OwnTokens(OnMesh):
    """Hooks around a module that takes the stream first, and returns a tensor of its shape, by itself or first in a tuple.

    A rank's rows of the stream, ``m h``, are exchanged for columns over the axes that split the hidden dim, and divided over the
    axes whose ranks have the same rows. If they do not divide evenly, some ranks get fewer.
    """

    def __init__(
        self, mesh: Mesh, mode: Mode | None, batch: BatchShape | None = None, *, flattened: bool = False
    ) -> None:
        """Args:
        mode: of the stream; None: each rank already has tokens of its own.
        batch: of the forward that runs.
        flattened: the stream is ``m h`` where the module's own code was written for ``b s h``.
        """
        self.mesh, self.batch, self._flattened = mesh, batch, flattened
        self.columns: tuple[str, ...] = ()
        self.alike: tuple[str, ...] = ()
        if mode is not None:
            residual = mode.layout("residual")
            self.columns = residual["h"]
            self.alike = tuple(axis for axis in mode.axes if axis not in residual.axes)
        self._to_rows = bind_exchange(mesh, 0, -1, self.columns)
        self._to_columns = bind_exchange(mesh, -1, 0, self.columns)
        self._take, self._collect = bind_take(mesh, 0, self.alike), bind_collect(mesh, 0, self.alike)
        self._shape = torch.Size()
        self._layout: Any = None
        self._apart: list[ExitStack] = []

    def attach(self, module: nn.Module) -> None:
        """Register the hooks. Code inside is not tracked: it works on the tokens of one rank only."""
        module.register_forward_pre_hook(self.enter, with_kwargs=True)
        module.register_forward_hook(self.leave)
        module.register_forward_hook(self._end, always_call=True)

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the arguments with this rank's own tokens first, in one row: ``1 n h`` for a stream ``b s h``."""
        x: Tensor = args[0] if args else next(iter(kwargs.values()))
        if self.batch is not None and self.batch.given < self.batch.rows:
            raise LayoutError(
                f"a batch of {self.batch.given} rows was padded to {self.batch.rows} for the tensor mode, and experts would "
                f"receive padding tokens: give {self.batch.rows} rows, or another multiple that needs no padding"
            )
        self._layout = tracked_layout(x)
        self._apart.append(_apart())
        self._shape = x.shape
        mine = self._own(x.reshape(-1, x.shape[-1]))
        mine = mine.view(*(1 for _ in x.shape[int(not self._flattened) : -1]), *mine.shape)
        if args:
            return (mine, *args[1:]), kwargs
        return args, {**kwargs, next(iter(kwargs)): mine}

    def leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        """Return the output in the stream's layout."""
        first = output[0] if isinstance(output, tuple) else output
        y = self._joined(first.reshape(-1, first.shape[-1]))
        self._end(module, args, output)
        set_tracked_layout(y, self._layout)
        return (y, *output[1:]) if isinstance(output, tuple) else y

    def _end(self, module: nn.Module, args: Any, output: Any) -> None:
        while self._apart:
            self._apart.pop().close()

    @property
    def _parts(self) -> int:
        return self.mesh.size(*self.columns, *self.alike)

    def _rows(self) -> tuple[int, int]:
        """Return the padded number of rows per rank, and how many of this rank's are real."""
        rows = self._shape[:-1].numel()
        each = -(-rows // self._parts)
        first = self.mesh.index(*self.columns, *self.alike) * each
        return each, max(0, min(rows - first, each))

    def _own(self, x: Tensor) -> Tensor:
        if self._parts == 1:
            return x
        each, real = self._rows()
        x = nn.functional.pad(x, (0, 0, 0, each * self._parts - x.shape[0]))
        return self._take(self._to_rows(x))[:real]

    def _joined(self, y: Tensor) -> Tensor:
        if self._parts > 1:
            each, real = self._rows()
            y = nn.functional.pad(y, (0, 0, 0, each - real))
            y = self._to_columns(self._collect(y))[: self._shape[:-1].numel()]
        return y.reshape(self._shape)


def _apart() -> ExitStack:
    """Enter a context without tracking and without function modes, where ``torch.arange`` is torch's own."""
    entered = ExitStack()
    entered.enter_context(untracked())
    if torch._C._len_torch_function_stack():
        entered.enter_context(torch._C.DisableTorchFunction())
    return entered


def is_marked(module: nn.Module) -> bool:
    """Return True if a module is marked as working on each token separately."""
    return bool(getattr(module, MARK, False))
