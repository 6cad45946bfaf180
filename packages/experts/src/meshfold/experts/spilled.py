"""Rows of experts that backward keeps, and those beyond, which it computes again.

Where the host does not know how many rows its experts get, it has to allocate the most that they can get. Nearly always they get
about the mean. So rows are computed in parts. The first has room for a multiple of the mean, and what lies between its products
is kept for backward as always. Later parts, each as long as all before it, are empty unless the routing is very uneven. Nothing
of these is kept: their memory is free again when the forward has computed them, and backward computes them again. By then the
host knows how many rows there were, without having waited for it, and leaves out empty parts. If it does not know, backward
computes all parts. Results are exact in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from meshfold.experts.expert_rows import ExpertRows, RowSource, Run
from meshfold.kernels import add_rows_, once_differentiable, sum_rows, take_rows, take_weighted_rows
from meshfold.mesh.processes import start_reading


@dataclass(frozen=True, kw_only=True, slots=True)
class PlacedRows:
    """A part of the rows of tokens, sorted by expert.

    Attributes:
        places, pairs, ends: of :func:`meshfold.kernels.expert_places`, numbered within the part.
        counts: rows of each expert, where the host knows them.
    """

    places: Tensor
    pairs: Tensor
    ends: Tensor
    counts: Sequence[int] | None

    def part(self, first: int, size: int) -> PlacedRows:
        """Return ``size`` rows from ``first`` on; known counts are those of evenly used experts, which the first part has."""
        if first == 0:
            places, counts = torch.where(self.places < size, self.places, -1), self.counts
        else:
            places, counts = self.places - first, None if self.counts is None else [0] * len(self.counts)
            places = torch.where((places >= 0) & (places < size), places, -1)
        ends = (self.ends - first).clamp(0, size) if first else self.ends.clamp(max=size)
        return PlacedRows(places=places, pairs=self.pairs[first : first + size], ends=ends, counts=counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOfRows:
    """A run of experts on placed rows.

    Attributes:
        run: applies them.
        weighs: ``run`` is given the weights of its rows too, and gives weighted outputs.
        keeps: keep the rows of tokens for backward instead of copying them again.
    """

    run: Run
    weighs: bool
    keeps: bool

    def __call__(
        self,
        tokens: Tensor,
        weights: Tensor,
        rows: PlacedRows,
        parameters: Mapping[str, Tensor] | None = None,
        onto: Tensor | None = None,
    ) -> Tensor:
        """Return the weighted sum of each token's experts that have a row: ``[n, h], [n, k] -> [n, h]``.

        ``onto``: add it to this in place, without gradients, and return this.
        """
        of_rows = None
        if self.weighs:
            values, of_rows = take_weighted_rows(tokens, weights, rows.pairs, rows.places)
        else:
            values = take_rows(tokens, rows.pairs, rows.places)
        source = None if self.keeps else RowSource(tokens=tokens, pairs=rows.pairs, places=rows.places)
        outputs = self.run(
            ExpertRows(
                values=values,
                ends=rows.ends,
                counts=rows.counts,
                weights=of_rows,
                source=source,
                parameters=parameters,
            )
        )
        outputs, given = outputs.to(tokens.dtype), None if self.weighs else weights
        if onto is not None:
            return add_rows_(onto, outputs, rows.pairs, rows.places, given)
        return sum_rows(outputs, rows.pairs, rows.places, given)


def run_in_parts(
    run: RunOfRows, tokens: Tensor, weights: Tensor, rows: PlacedRows, kept: int, parameters: Mapping[str, Tensor]
) -> Tensor:
    """Return what ``run`` does of all rows, and keep for backward what lies between the products of some.

    Args:
        run: of the experts.
        tokens: [n, h].
        weights: [n, k].
        rows: all.
        kept: how many first rows are kept.
        parameters: of the experts, by the names that ``run`` looks for in :attr:`ExpertRows.parameters`.
    """
    filled = (lambda: 0) if rows.ends.is_meta else start_reading(rows.ends[-1:])
    y = run(tokens, weights, rows.part(0, kept))
    first, end = kept, rows.pairs.shape[0]
    while first < end:
        size = min(first, end - first)
        part = rows.part(first, size)
        spilled = _Spilled(run=run, first=first, filled=filled, names=tuple(parameters), counts=part.counts)
        y = _Again.apply(spilled, y, tokens, weights, part.places, part.pairs, part.ends, *parameters.values())
        first += size
    return y


@dataclass(frozen=True, kw_only=True, slots=True)
class _Spilled:
    """A part whose rows are computed again: the number of its first row, and what tells how many rows there are in all."""

    run: RunOfRows
    first: int
    filled: Callable[[], int | None]
    names: tuple[str, ...]
    counts: Sequence[int] | None

    def __call__(self, tensors: Sequence[Tensor], onto: Tensor | None = None) -> Tensor:
        tokens, weights, places, pairs, ends, *parameters = tensors
        rows = PlacedRows(places=places, pairs=pairs, ends=ends, counts=self.counts)
        return self.run(tokens, weights, rows, dict(zip(self.names, parameters, strict=True)), onto)


class _Again(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, spilled: _Spilled, y: Tensor, *tensors: Tensor) -> Tensor:
        ctx.spilled, ctx.cast = spilled, _autocast(y.device.type)
        ctx.save_for_backward(*tensors)
        ctx.mark_dirty(y)
        return spilled(tensors, onto=y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> Any:
        spilled: _Spilled = ctx.spilled
        needed = ctx.needs_input_grad[2:]
        filled = spilled.filled()
        if filled is not None and filled <= spilled.first:
            return None, dy, *(None for _ in needed)
        with torch.enable_grad(), ctx.cast():
            tensors = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
            y = spilled(tensors)
        found = iter(torch.autograd.grad(y, [x for x in tensors if x.requires_grad], dy))
        return None, dy, *(next(found) if need else None for need in needed)


def _autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return what makes the present autocast again, or its absence."""
    if device == "meta":
        return nullcontext
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return lambda: torch.autocast(device, dtype, enabled=enabled)
