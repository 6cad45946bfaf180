"""Attention over the tiles of two blocks; tiles of one shape are computed together, as one batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from meshfold.kernels import merge_attention_
from meshfold.sequence.dropout import DropoutFactors
from meshfold.sequence.kernels import REFERENCE, Gradients, Kernel, Pairs, accumulating
from meshfold.sequence.tiling import Tile


@dataclass(slots=True)
class PartialAttention:
    """Attention over the keys seen so far: the output ``b s heads d`` and its log-sum-exp ``b heads s``, both wide."""

    shape: tuple[int, ...]
    like: Tensor
    out: Tensor | None = field(default=None, init=False)
    lse: Tensor | None = field(default=None, init=False)

    def take(self, tile: Tile, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of some rows over further keys."""
        b, s, heads, _ = self.shape
        wide = accumulating(self.like.dtype)
        if self.out is None and tile.rows == s:
            self.out, self.lse = out, lse  # stored unchanged until there is a second part to merge
            return
        if self.out is None or self.lse is None:
            self.out = torch.zeros(self.shape, dtype=wide, device=self.like.device)
            self.lse = torch.full((b, heads, s), -torch.inf, dtype=wide, device=self.like.device)
        self.out = self.out.to(wide)
        rows = slice(tile.q, tile.q + tile.rows)
        merge_attention_(self.out[:, rows], self.lse[:, :, rows], out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return the output in the dtype of the model and the log-sum-exp; zero and -inf for rows that saw nothing."""
        if self.out is None or self.lse is None:
            b, s, heads, _ = self.shape
            lse = torch.full((b, heads, s), -torch.inf, dtype=accumulating(self.like.dtype), device=self.like.device)
            return torch.zeros(self.shape, dtype=self.like.dtype, device=self.like.device), lse
        return self.out.to(self.like.dtype).contiguous(), self.lse


@dataclass(slots=True)
class PartialSum:
    """A sum of parts of a tensor ``b s heads d`` along its tokens, wide as soon as there is something to add."""

    like: Tensor
    parts: list[tuple[int, Tensor]] = field(default_factory=list, init=False)

    def add(self, start: int, part: Tensor) -> None:
        """Add tokens from ``start`` on."""
        if self.parts:
            total = self._settled()
            total[:, start : start + part.shape[1]].add_(part)
        else:
            self.parts.append((start, part))  # stored unchanged until there is a second part to add

    def whole(self) -> Tensor:
        """Return the sum, wide or in the dtype of its only part."""
        if self.parts and self.parts[0][1].shape == self.like.shape:
            return self.parts[0][1]
        return self._settled()

    def result(self) -> Tensor:
        """Return the sum in the dtype of the model."""
        return self.whole().to(self.like.dtype)

    def onto(self, total: Tensor) -> None:
        """Add it all to a wide tensor."""
        for start, part in self.parts:
            total[:, start : start + part.shape[1]].add_(part)

    def _settled(self) -> Tensor:
        wide = accumulating(self.like.dtype)
        if self.parts and self.parts[0][1].shape == self.like.shape:
            total = self.parts[0][1].to(wide)
        else:
            total = torch.zeros(self.like.shape, dtype=wide, device=self.like.device)
            self.onto(total)
        self.parts = [(0, total)]
        return total


@dataclass(frozen=True, slots=True)
class TilePairs:
    """A block of queries with a block of keys.

    Attributes:
        kernel: what computes a tile.
        q: ``b s heads d``.
        k, v: ``b t kv_heads d``.
        tiles: the visible parts of the keys.
        scale: of the scores.
        dropout_factors: which weights are dropped; only the reference kernel supports this; None: none.
    """

    kernel: Kernel
    q: Tensor
    k: Tensor
    v: Tensor
    tiles: Sequence[Tile]
    scale: float
    dropout_factors: DropoutFactors | None = None

    def forward(self) -> Iterator[tuple[Tile, Tensor, Tensor]]:
        """Yield each tile with attention over its keys and the log-sum-exp."""
        for alike in _alike(self.tiles):
            kernel, pairs = self._pairs(alike)
            out, lse = kernel.forward(pairs)
            if alike[0].shape == "upper":
                out, lse = out.flip(1), lse.flip(2)
            yield from zip(alike, out.chunk(len(alike)), lse.chunk(len(alike)), strict=True)

    def backward(self, dout: Tensor, out: Tensor, lse: Tensor) -> Iterator[tuple[Tile, Gradients]]:
        """Yield each tile with its share of dQ, dK, dV, for the output and the log-sum-exp over all keys."""
        for alike in _alike(self.tiles):
            kernel, pairs = self._pairs(alike)
            upper = alike[0].shape == "upper"
            lses = _stack([lse[:, :, t.q : t.q + t.rows] for t in alike])
            gradients = kernel.backward(pairs, _rows(dout, alike), _rows(out, alike), lses.flip(2) if upper else lses)
            if upper:
                dq, dk, dv = (gradient.flip(1) for gradient in gradients)
                gradients = (dq, dk, dv)
            parts = [gradient.chunk(len(alike)) for gradient in gradients]
            for i, tile in enumerate(alike):
                yield tile, (parts[0][i], parts[1][i], parts[2][i])

    def _pairs(self, alike: Sequence[Tile]) -> tuple[Kernel, Pairs]:
        """Return the kernel for tiles of one shape, and these tiles as a batch."""
        kept = None if self.dropout_factors is None else _factors(self.dropout_factors, alike)
        columns = _columns(self.k, alike), _columns(self.v, alike)
        pairs = Pairs(_rows(self.q, alike), *columns, alike[0].shape != "full", self.scale, kept)
        return self.kernel if kept is None else REFERENCE, pairs


def _factors(dropout_factors: DropoutFactors, tiles: Sequence[Tile]) -> Tensor:
    found = dropout_factors(tiles)
    return found.flip(2, 3) if tiles[0].shape == "upper" else found


def _alike(tiles: Sequence[Tile]) -> Iterator[list[Tile]]:
    groups: dict[tuple[str, int, int], list[Tile]] = {}
    for tile in tiles:
        groups.setdefault((tile.shape, tile.rows, tile.columns), []).append(tile)
    yield from groups.values()


def _rows(x: Tensor, tiles: Sequence[Tile]) -> Tensor:
    return _cut(x, tiles, [tile.q for tile in tiles], tiles[0].rows)


def _columns(x: Tensor, tiles: Sequence[Tile]) -> Tensor:
    return _cut(x, tiles, [tile.k for tile in tiles], tiles[0].columns)


def _cut(x: Tensor, tiles: Sequence[Tile], starts: Sequence[int], count: int) -> Tensor:
    """Stack the tiles' parts of a block along the batch. Reversed, an upper triangle is a causal mask."""
    part = _stack([x[:, start : start + count] for start in starts])
    return part.flip(1) if tiles[0].shape == "upper" else part


def _stack(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
