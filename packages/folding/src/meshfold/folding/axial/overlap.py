"""Differentiable redistributions that run while other work computes, forward and backward.

    coming = begin(move, bias)      # the collective starts
    q, k, v = project(x)            # it runs meanwhile
    bias = coming.wait()

Autograd runs the newest nodes first. So in backward the adjoint starts where ``wait`` was, runs under the gradients of what stood
between, and is waited for where ``begin`` was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from meshfold.folding.axial.redistribute import Redistribution
from meshfold.kernels import applied, once_differentiable
from meshfold.mesh import Pending
from meshfold.mesh.collectives import non_view_result


class _Flight:
    """A move and its collectives in flight.

    Autograd's nodes hold it, and it holds no tensor of their graph. Otherwise the two would keep each other alive, with all that
    the graph saved: a repetition for a checkpoint is never run backward, so nothing else frees what it saved.
    """

    def __init__(self, move: Redistribution) -> None:
        self.move = move
        self.forward: Pending | None = None
        self.backward: Pending | None = None


class Coming:
    """A redistribution in flight; ``wait`` returns the tensor, once."""

    def __init__(self, move: Redistribution, x: Tensor) -> None:
        """Start it; see :func:`begin`."""
        self._flight = _Flight(move) if move.steps else None
        self._ticket: Tensor = x if self._flight is None else _begin(x, self._flight)

    def wait(self) -> Tensor:
        """Return the block of the target layout."""
        if self._flight is None:
            return self._ticket
        arrived: Tensor = _arrive(self._ticket, self._flight)
        return arrived


def begin(move: Redistribution, x: Tensor) -> Coming:
    """Start a redistribution of ``x`` and return at once."""
    return Coming(move, x)


def redistribute(move: Redistribution, x: Tensor) -> Tensor:
    """Redistribute and wait; differentiable. One node of autograd, where :func:`begin` and ``wait`` make one each."""
    return _move(x, move) if move.steps else x


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Redistribution) -> Tensor:
        ctx.move = move
        return non_view_result(move.start(x.contiguous()).wait(), x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.move.start_adjoint(grad.contiguous()).wait(), None


_move = applied(_Move)


class _Begin(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        flight.forward = flight.move.start(x.contiguous())
        return x.new_empty(0)  # a ticket has no values, which would be a launch

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        pending, ctx.flight.backward = ctx.flight.backward, None
        return pending.wait(), None


class _Arrive(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ticket: Tensor, flight: _Flight) -> Tensor:
        ctx.flight = flight
        pending, flight.forward = flight.forward, None
        if pending is None:
            raise RuntimeError("a tensor on its way was waited for twice")
        return non_view_result(pending.wait(), ticket)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.flight.backward = ctx.flight.move.start_adjoint(grad.contiguous())
        return grad.new_empty(0), None


_begin, _arrive = applied(_Begin), applied(_Arrive)
