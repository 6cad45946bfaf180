"""Gathering a chunk in fp8: one byte an element for weights that only products in fp8 read.

A product reads one of two operands of a weight: y sums over k, dx over n. In recipes with a scale for each row, the two are rounded
by different scales. Forward then gathers one of them and backward the other (a recomputed forward gathers the first again), each in
one byte an element. With one scale per tensor they are the same bytes. Both are in the memory of the gathered chunk, which has two
bytes an element:

    gathered chunk   [ forward operands: size bytes | backward operands: size bytes ]

Scales belong to whole rows and columns, which shards cut anywhere. After each change of the shard, the first gather takes the amax
of its rows and columns. One all-reduce (max) over the chunk's ranks turns them into the weights' amax. The host waits for neither.
The operands thus equal a cast of the gathered weight, bit for bit. Each gather then casts this rank's shard, which it would have
copied otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Flag

import torch
from torch import Tensor

from meshfold.kernels import Fp8Operands, Fp8Shard, Fp8Weight, weight_scales
from meshfold.mesh import Group, Pending, all_reduce
from meshfold.zero_gemini.chunks.layout import ChunkSpec, ShardSlice


class Operands(Flag):
    """Operands of a chunk's weights that one use of it reads."""

    FORWARD = 1
    BACKWARD = 2
    BOTH = FORWARD | BACKWARD


class Fp8Gather:
    """The weights of one chunk, in fp8.

    Attributes:
        present: the operands that are gathered, now or after a wait.
    """

    def __init__(
        self,
        spec: ChunkSpec,
        slices: Sequence[ShardSlice],
        shapes: Sequence[torch.Size],
        weights: Sequence[Fp8Weight],
        group: Group,
        whole: Tensor,
    ) -> None:
        """Args:
        spec: positions of the weights.
        slices: the parts of them in this rank's shard.
        shapes: of the weights, ``n k`` each.
        weights: read their operands from here; all of one recipe, and none in tiles.
        group: the ranks that share the chunk.
        whole: the memory of the gathered chunk, flat, in 16 bits; its storage may come and go.
        """
        self.present = Operands(0)
        self._slices, self._group, self._weights = list(slices), group, list(weights)
        self._length = spec.shard_elems
        self._recipe = self._weights[0].recipe
        self._stale = True
        # `.data`: gathering must not count as a change of what autograd has saved.
        values = whole.view(torch.float8_e4m3fn).data
        size = spec.size_elems
        halves = values[:size], values[size:] if self._recipe.rows else values[:size]
        self._halves = dict(zip((Operands.FORWARD, Operands.BACKWARD), halves, strict=True))
        parts = {part.name: part for part in slices}
        self._shards: dict[str, Fp8Shard] = {}
        self._scales_of: dict[str, slice] = {}
        total = 0
        for slot, shape in zip(spec.slots, shapes, strict=True):
            part = parts.get(slot.name)
            start, length = (0, 0) if part is None else (part.parameter_start, part.length)
            shard = Fp8Shard(self._recipe, (shape[0], shape[1]), start, length)
            self._shards[slot.name] = shard
            self._scales_of[slot.name] = slice(total, total + shard.scales)
            total += shard.scales
        self._scale = torch.full((total,), torch.nan, device=whole.device)
        self._inverse = {one: torch.full_like(self._scale, torch.nan) for one in self._halves}
        self._operands = [
            self._operands_of(slot.name, slot.start_elems, shape)
            for slot, shape in zip(spec.slots, shapes, strict=True)
        ]

    def _operands_of(self, name: str, start: int, shape: torch.Size) -> Fp8Operands:
        """Return the operands of a weight: views of the gathered chunk and of the scales."""
        (n, k), scales = shape, self._scales_of[name]
        forward, backward = (half[start : start + shape.numel()].view(n, k).data for half in self._halves.values())
        inverse, turned = (each[scales].data for each in self._inverse.values())
        if not self._recipe.rows:
            return forward, inverse.view(()), backward.t(), inverse.view(())
        return forward, inverse[:n].view(n, 1), backward.t(), turned[n:].view(k, 1)

    def supply(self, fetch: Callable[[], None] | None) -> None:
        """Make products read these operands from now on, or cast their weights themselves again.

        ``fetch``: gathers the forward operands and waits for them; None: weights are gathered unchanged, and cast in each product.
        """
        for weight, operands in zip(self._weights, self._operands, strict=True):
            if fetch is None:
                weight.supply(None)
            else:
                weight.supply(operands, fetch)

    def show(self) -> None:
        """Record in the weights which of their operands are gathered."""
        for weight in self._weights:
            weight.present, weight.readable = bool(self.present), Operands.FORWARD in self.present

    def forget(self) -> None:
        """Record that the gathered chunk is released."""
        for one, inverse in self._inverse.items():
            if one in self.present:
                inverse.fill_(torch.nan)  # reading what is not gathered gives NaN
        self.present = Operands(0)
        self.show()

    def change(self) -> None:
        """Record that the shard has changed."""
        self._stale = True

    def missing(self, wanted: Operands) -> Operands:
        """Return which of these operands are not gathered."""
        if not self._recipe.rows and wanted:
            wanted = Operands.FORWARD  # one scale serves both
        return wanted & ~self.present

    @torch.no_grad()
    def start(self, missing: Operands, shard: Tensor, gather: Callable[[Tensor, Tensor], Pending]) -> list[Pending]:
        """Start to gather operands. All ranks of the group must call alike.

        Args:
            missing: which; none of them is gathered.
            shard: this rank's weights.
            gather: starts the all-gather of every rank's part, the second tensor, into the first.
        """
        if self._stale:
            self._measure(shard)
        found = []
        for one, half in self._halves.items():
            if one in missing:
                mine = half[self._group.index * self._length : (self._group.index + 1) * self._length]
                for part in self._slices:
                    run = slice(part.shard_start, part.shard_start + part.length)
                    scale = self._scale[self._scales_of[part.name]]
                    self._shards[part.name].cast(shard[run], scale, mine[run], columns=one is Operands.BACKWARD)
                found.append(gather(half.view(torch.uint8), mine.view(torch.uint8)))
                torch.reciprocal(self._scale, out=self._inverse[one])
        self.present |= missing
        return found

    def _measure(self, shard: Tensor) -> None:
        """Take the scales of the whole weights."""
        amax = torch.zeros_like(self._scale)
        for part in self._slices:
            run = shard[part.shard_start : part.shard_start + part.length]
            self._shards[part.name].add_amax(run, amax[self._scales_of[part.name]])
        amax = torch.where(amax.isfinite(), amax, torch.inf)  # not every reduction propagates NaN
        amax = all_reduce(amax, self._group, "max")
        for weight, (name, scales) in zip(self._weights, self._scales_of.items(), strict=True):
            n, mine = self._shards[name].shape[0], amax[scales]
            if self._recipe.rows:  # tensor axes split n and k
                amax[scales] = torch.cat([weight.over_ranks(mine[:n], ("k",)), weight.over_ranks(mine[n:], ("n",))])
            else:
                amax[scales] = weight.over_ranks(mine.view(()), ("n", "k"))
        self._scale.copy_(weight_scales(amax, self._recipe))
        self._stale = False
