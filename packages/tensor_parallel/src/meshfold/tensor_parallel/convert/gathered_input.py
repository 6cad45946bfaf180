"""Gathers of an input that several linear layers read: queries, keys and values; gate and up.

:class:`SharedInput` gathers once for layers that get the same tensor.

:class:`Region` is for attention that has other tokens than the stream, in 3D and where tokens are split within sequences. Its code
reads batch and length from its input. So the input is gathered before the module, and gets the batch and length of its layers'
outputs. Code that also takes its width from its input (``b, t, d = x.shape`` and ``y.reshape(b, t, d)``) gets a stand-in: as wide
as this rank's heads, with a shape and no values. Its linear layers read the gathered input. So does attention whose linear layers
are computed by tokens: no rank gathers their input.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Size, Tensor, nn

from meshfold.mesh import LayoutError
from meshfold.mesh.tracking import set_tracked_layout, tracker, untracked
from meshfold.tensor_parallel.convert.boundary import Boundary
from meshfold.tensor_parallel.convert.forward_code import parameters_of
from meshfold.tensor_parallel.convert.head_biases import BIASES, MASK
from meshfold.tensor_parallel.layers.base import BatchShape, OnMesh, StreamAdapter, to_autocast_dtype
from meshfold.tensor_parallel.layers.input_adapters import flattened, fold, unfolded
from meshfold.tensor_parallel.layers.linear import Linear
from meshfold.tensor_parallel.matmul import bind_enter_operand, lead_shape
from meshfold.tensor_parallel.plan import MatmulPlan


class Region(StreamAdapter):
    """Gather of a module's first argument, ``.. k`` of the residual layout, once for the linear layers that read it.

    An argument after it that has another stream's tokens, as an encoder's output in cross-attention, is gathered too.
    """

    _given: Tensor | None
    _whole: Tensor | None
    _calls: int

    def __init__(
        self,
        columns: list[Linear],
        rows: list[Linear],
        boundary: Boundary | None = None,
        *,
        batch: BatchShape,
        stand_in: int = 0,
        outer: MatmulPlan | None = None,
    ) -> None:
        """Args:
        columns: the layers that read it; from now on they take the gathered input.
        rows: the layers that write the module's output.
        boundary: of a stream that is flattened, if the module needs its batch and sequence dims.
        batch: of the forward that runs.
        stand_in: width of a stand-in that the module gets; 0: it gets the gathered input.
        outer: of a column layer outside the blocks, where an encoder's output comes from; None: it has the stream's layout.
        """
        first = columns[0]
        self._batch, self._row_blocks = batch, first.mesh.size(*first.mode.layout("residual")["m"])
        self.mesh, self.mode, self.folds, self.boundary = first.mesh, first.mode.name, first.folds, boundary
        self._gather_input = bind_enter_operand(first.plan, first.mesh, "x")
        self._gather_other = self._gather_input if outer is None else bind_enter_operand(outer, first.mesh, "x")
        other = first.plan if outer is None else outer
        self._widths = {linear.in_features // self.mesh.size(*other.x[other.k]) for linear in columns}
        self._stand_in, self._readers = stand_in, len(columns)
        self._shares = 1 if first.exchange is None else first.exchange.ranks
        self._forget()
        for linear in columns:
            linear.use_entered_input(self._read if stand_in else unfolded(self.folds))
        if boundary is not None:
            for linear in rows:
                linear.input_adapter = flattened

    def gather(self, x: Tensor) -> Tensor:
        """Return the input of the linear layers for a local block of the stream.

        A stream flattened at a boundary gets its batch and sequence dims back. The result has the tokens of the layers' *output*.
        If that has fewer (3D), the rest is folded into the last dim, because modules take the shape of their output from their
        input.
        """
        if self.boundary is None:
            self._check_order(x)
        whole = self._gather_input(to_autocast_dtype(x.reshape(-1, x.shape[-1])))
        if self.boundary is None:
            lead = lead_shape(x.shape[:-1], whole.shape[0] * self._shares)
        else:
            lead = self.boundary.lead
            if lead.numel() != whole.shape[0] * self._shares:
                raise LayoutError(
                    f"{whole.shape[0] * self._shares} tokens, but the last forward had {' × '.join(map(str, lead))}: recompute a "
                    f"forward before one of another shape begins"
                )
        if self._stand_in:
            made = whole.new_full((), math.nan).expand(lead[0] // self.folds, *lead[1:], self._stand_in)
            self._given, self._whole, self._calls = made, whole, 0
            return made
        whole = whole.view(*lead, whole.shape[-1])
        return fold(whole, self.folds) if self.folds > 1 else whole

    def _check_order(self, x: Tensor) -> None:
        """Refuse an input with the sequence first, because tokens are exchanged along the first dim."""
        rows = self._batch.rows // self._row_blocks
        if x.dim() == 3 and x.shape[1] == rows != x.shape[0] == self._batch.length and self._row_blocks > 1:
            raise LayoutError(
                f"attention was given {tuple(x.shape)}, the sequence first: in mode {self.mode!r} tokens are exchanged along the "
                f"first dim. Give its projections b s h, and transpose their results"
            )

    def _read(self, x: Tensor) -> tuple[Tensor, Size]:
        """Return the gathered input ``m k`` for a linear layer that is called with the stand-in."""
        whole = self._whole
        if whole is None or x is not self._given:
            raise LayoutError(
                "attention that takes its width from its input called a projection with another tensor: "
                "write -1 for the width, as in y.reshape(b, t, -1)"
            )
        self._calls += 1
        if self._calls == self._readers:
            self._forget()
        return whole, x.shape[:-1]

    def _forget(self) -> None:
        self._given = self._whole = None
        self._calls = 0

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name, x = ("", args[0]) if args else next(iter(kwargs.items()))
        with untracked():
            entered = self.gather(x)
        set_tracked_layout(entered, None)  # the module only reads its shape and passes it to the layers
        if (found := tracker()) is not None:
            found.rows.unflattened(entered, x)
        names = list(parameters_of(module))
        rest = [
            self._enter_other(module, names[i] if i < len(names) else "", args[i], x, entered)
            for i in range(1, len(args))
        ]
        kwargs = {key: self._enter_other(module, key, value, x, entered) for key, value in kwargs.items()}
        if args:
            return (entered, *rest), kwargs
        return args, {**kwargs, name: entered}

    def _enter_other(self, module: nn.Module, argument: str, value: Any, x: Tensor, entered: Tensor) -> Any:
        """Return an argument after the first as the module needs it: an encoder's output gathered, a mask for its rows."""
        if value is x or not self._is_stream(argument, value, x):
            return _for_rows(value, entered.shape[0])
        if self._stand_in:
            raise LayoutError(
                f"{type(module).__name__} was called with two inputs of shapes {tuple(x.shape)} and {tuple(value.shape)}, and in "
                f"mode {self.mode!r} its first one is replaced: leave attention='tokens' out, or where it takes its width from "
                "its input write -1, as in y.reshape(b, t, -1); or keep the module whole with the rule 'replicate'"
            )
        with untracked():
            whole = self._gather_other(to_autocast_dtype(value.reshape(-1, value.shape[-1])))
            lead = lead_shape(value.shape[:-1], whole.shape[0])
            other = whole.view(*lead, whole.shape[-1])
            other = fold(other, self.folds) if self.folds > 1 else other
        set_tracked_layout(other, None)
        if (found := tracker()) is not None:
            found.rows.unflattened(other, value)
        return other

    def _is_stream(self, argument: str, value: Any, x: Tensor) -> bool:
        """Return True for what another stream has: tokens of an encoder, which keys and values are projected from."""
        if not isinstance(value, Tensor) or not value.is_floating_point() or argument in (*BIASES, MASK, "residual"):
            return False  # the residual is the stream, which is added to the module's output (BLOOM)
        return value.dim() == (x.dim() if self.boundary is None else 3) and value.shape[-1] in self._widths


def _for_rows(value: Any, rows: int) -> Any:
    """Return a mask ``b 1 s t`` for a different number of rows; all rows are equal, since the model's adapter refuses others."""
    if isinstance(value, Tensor) and value.dim() == 4 and value.shape[0] not in (1, rows):
        return value[:1]
    return value


class SharedInput(OnMesh):
    """Gather that runs when the first layer gets a tensor; other layers that get it reuse the result.

    Its gradient is reduced once, for all of them. Nothing is kept once each layer has been called.
    """

    _seen: Tensor | None
    _whole: Tensor | None
    _version: int

    def __init__(self, columns: list[Linear]) -> None:
        """Args:
        columns: layers of one plan, children of one module.
        """
        first = columns[0]
        self.mesh = first.mesh
        self._gather, self._readers = bind_enter_operand(first.plan, first.mesh, "x"), len(columns)
        self._forget()
        for linear in columns:
            linear.use_entered_input(self._enter)

    def around(self, module: nn.Module) -> None:
        """Forget the last input before each forward of the module; the previous one may have been aborted."""
        # Not a forward hook: torch.compile would guard on its id, which differs in every block.
        module.register_forward_pre_hook(self._before)

    def _enter(self, x: Tensor) -> tuple[Tensor, Size]:
        """Gather ``.. k`` of the residual layout to ``m k``."""
        x = to_autocast_dtype(x)
        version = 0 if torch.compiler.is_compiling() else x._version  # detects changes in place
        whole = self._whole
        if whole is None or x is not self._seen or version != self._version:
            whole = self._gather(x.reshape(-1, x.shape[-1]))
            self._seen, self._version, self._whole = x, version, whole
        self._calls += 1
        if self._calls == self._readers:
            self._forget()
        return whole, x.shape[:-1]

    def _before(self, module: nn.Module, args: Any) -> None:
        self._forget()

    def _forget(self) -> None:
        self._seen = self._whole = None
        self._version = self._calls = 0
