"""The exchange of rows in two halves, with gradients: work between them overlaps with the messages, in backward too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from meshfold.experts.fp8_rows import pack, unpack
from meshfold.mesh import Group, Pending, exchange_rows


class Exchange:
    """One exchange of rows over a group; gradients go the way back.

    ``finish(start(x))`` is the exchange. Backward begins to send gradients at ``finish`` and waits for them at ``start``, so work
    that autograd has recorded between the two overlaps as well.
    """

    def __init__(self, group: Group, sends: Sequence[int], receives: Sequence[int], *, fp8: bool = False) -> None:
        """Args:
        group: the ranks.
        sends: rows for each rank.
        receives: rows from each rank.
        fp8: send rows in float8 with a scale each; gradients go back in their own dtype.
        """
        self.group, self.sends, self.receives = group, sends, receives
        self.fp8 = fp8
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
        message = pack(x) if exchange.fp8 else x
        exchange.forward = exchange_rows(message, exchange.group, exchange.sends, exchange.receives)
        return x.new_empty(sum(exchange.receives), 1).expand(-1, x.shape[1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        if exchange.backward is None:
            raise RuntimeError("an exchange of rows was started and its result not used: call finish")
        dx = exchange.backward.wait()
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
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        exchange: Exchange = ctx.exchange
        exchange.backward = exchange_rows(dy, exchange.group, exchange.receives, exchange.sends)
        # The gradient of Start comes from the exchange; this one only has the shape that autograd checks.
        return dy.new_empty(ctx.shape[0], 1).expand(ctx.shape), None
