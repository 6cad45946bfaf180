"""Messages between the ranks of tokens and of experts, with gradients. The first has two halves: work between them overlaps."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.experts.fp8_rows import pack, unpack
from meshfold.experts.ways import Way
from meshfold.kernels import once_differentiable
from meshfold.mesh import Pending
from meshfold.mesh.processes import is_simulated


class Exchange:
    """Rows sent to the ranks of experts; their gradients are sent back.

    ``finish(start(x))`` is the exchange. Backward begins to send gradients at ``finish`` and waits for them at ``start``, so work
    that autograd has recorded between the two overlaps as well.
    """

    def __init__(self, way: Way, *, fp8: bool = False) -> None:
        """Args:
        way: how rows travel.
        fp8: send rows in float8 with a scale each; gradients come back in their own dtype.
        """
        self.way, self.fp8 = way, fp8
        self.forward: Pending | None = None
        self.backward: Pending | None = None

    def start(self, x: Tensor) -> Tensor:
        """Begin to send rows; the result must not be read before :meth:`finish`."""
        y: Tensor = _Start.apply(x, self)
        return y

    def finish(self, started: Tensor) -> Tensor:
        """Wait for the rows of the others, and return them."""
        y: Tensor = _Finish.apply(started, self)
        return y


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange = exchange
        exchange.forward = exchange.way.there(pack(x) if exchange.fp8 else x)
        return x.new_empty(exchange.way.arriving, 1).expand(-1, x.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        if exchange.backward is None:
            raise RuntimeError("an exchange of rows was started and its result not used: call finish")
        dx = exchange.way.returned(exchange.backward.wait())
        exchange.backward = None
        return dx, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, started: Tensor, exchange: Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, started.shape
        if exchange.forward is None:
            raise RuntimeError("an exchange of rows is finished before it was started")
        y = exchange.forward.wait()
        exchange.forward = None
        return unpack(y, started.dtype) if exchange.fp8 else y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        exchange.backward = exchange.way.back(dy)
        # The exchange provides the gradient of Start; this one only has the shape that autograd checks.
        return dy.new_empty(ctx.shape[0], 1).expand(ctx.shape), None


def send_back(rows: Tensor, way: Way, *, fp8: bool = False) -> Tensor:
    """Send rows back to the ranks whose tokens they are of; gradients go there, in float8 if asked to."""
    y: Tensor = _Back.apply(rows, way, fp8)
    return y


class _Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, way: Way, fp8: bool) -> Tensor:
        ctx.way, ctx.fp8 = way, fp8
        return way.returned(way.back(rows).wait())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        if ctx.fp8:
            return unpack(ctx.way.there(pack(dy)).wait(), dy.dtype), None, None
        return ctx.way.there(dy).wait(), None, None


def send_routing(weights: Tensor, numbers: Tensor, way: Way) -> tuple[Tensor, Tensor]:
    """Send the weights and the expert numbers of rows in one message; the gradients of the weights come back.

    Args:
        weights: [m, k].
        numbers: [m, k] whole numbers.
        way: how rows travel.
    """
    arrived, theirs = _Routing.apply(weights, numbers, way)
    return arrived, theirs


class _Routing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weights: Tensor, numbers: Tensor, way: Way) -> tuple[Tensor, Tensor]:
        ctx.way = way
        size = weights.shape[1] * weights.element_size()
        message = torch.cat([weights.contiguous().view(torch.uint8), numbers.contiguous().view(torch.uint8)], 1)
        arrived = way.there(message).wait()
        theirs = _columns(arrived, size, message.shape[1], numbers.dtype)
        if is_simulated() and not numbers.is_meta:  # others send what this rank sends; plans count no operator for it
            theirs = numbers.repeat(-(-way.arriving // max(1, numbers.shape[0])), 1)[: way.arriving]
        ctx.mark_non_differentiable(theirs)
        return _columns(arrived, 0, size, weights.dtype), theirs

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dweights: Tensor, _: Tensor) -> Any:
        return ctx.way.returned(ctx.way.back(dweights).wait()), None, None


def _columns(message: Tensor, begin: int, end: int, dtype: torch.dtype) -> Tensor:
    """Return columns of bytes as numbers. A copy: a single row counts as contiguous, however its bytes are aligned."""
    return message[:, begin:end].clone(memory_format=torch.contiguous_format).view(dtype)
