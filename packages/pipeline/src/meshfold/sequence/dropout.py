"""Dropout of attention weights by their position in the whole batch, so that ranks drop the same weights as one process.

Flash kernels draw by position in a tile. Here the weight of query i for key j is element ((n · heads + h) · length + i) · length +
j of one stream on every rank, for head h of sequence n of the global batch (:func:`meshfold.kernels.dropout`). Such tiles are
computed by the reference kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from meshfold.kernels import dropout
from meshfold.mesh import LayoutError
from meshfold.sequence.sharding import SequenceSharding
from meshfold.sequence.tiling import Tile


@dataclass(frozen=True, kw_only=True)
class WeightDropout:
    """Dropout of the weights of one attention.

    Attributes:
        p: share of them that is dropped, from 0 to 1; the rest is scaled by 1 / (1 - p).
        seed, key: of the stream; integers or 0-d int64 tensors.
        first_row: number of the first sequence in the global batch.
        first_head: number of the first head in the whole model.
        heads: of the whole model.
    """

    p: float
    seed: int | Tensor
    key: int | Tensor
    heads: int
    first_row: int | Tensor = 0
    first_head: int | Tensor = 0

    def __post_init__(self) -> None:
        if not 0.0 <= self.p <= 1.0:
            raise LayoutError(f"p={self.p!r}: give the fraction of attention weights to drop, from 0 to 1")

    def of_rows(self, start: int) -> WeightDropout:
        """Return the same dropout for the sequences from ``start`` on."""
        return replace(self, first_row=self.first_row + start)

    def of_heads(self, start: int) -> WeightDropout:
        """Return the same dropout for the heads from ``start`` on."""
        return replace(self, first_head=self.first_head + start)

    def factors(self, like: Tensor, length: int, queries: Tensor, keys: Tensor) -> Tensor:
        """Return the factors of the weights, 0 or 1 / (1 - p): ``b heads i j`` in float32 (float64).

        Args:
            like: ``b s heads d``; says b, heads, dtype and device.
            length: tokens of the whole sequence.
            queries, keys: ``i`` and ``j``, positions in it, int64.
        """
        b, _, heads, _ = like.shape
        count = torch.ones(max(b, heads), dtype=torch.int64, device=like.device).cumsum(0) - 1
        rows = (count[:b] + self.first_row)[:, None] * self.heads + (count[:heads] + self.first_head)
        place = (rows[..., None] * length + queries)[..., None] * length + keys
        ones = torch.ones(place.shape, dtype=_wide(like.dtype), device=like.device)
        return dropout(ones.view(-1, 1), self.p, self.seed, self.key, place.view(-1), 0, 1).view(place.shape)


DrawDropout = Callable[[Tensor, float], WeightDropout]
"""The dropout of the next attention: of queries ``b heads s d``, and the share that the model asks for"""

DropoutFactors = Callable[[Sequence[Tile]], Tensor]
"""The factors of some tiles of one shape, concatenated along the batch: ``(tiles b) heads rows columns``"""


@dataclass(frozen=True, kw_only=True)
class RingDropout:
    """Dropout over a ring, whose ranks have the pieces of a sharding.

    Attributes:
        weights: which are dropped.
        sharding: of the sequence.
        index: this rank's place in the ring.
    """

    weights: WeightDropout
    sharding: SequenceSharding
    index: int

    def at(self, step: int, q: Tensor) -> DropoutFactors:
        """Return the factors for this rank's queries and the keys that arrive at a step."""
        queries = self._positions(self.index, q.device)
        keys = self._positions((self.index - step) % self.sharding.ring, q.device)

        def factors(tiles: Sequence[Tile]) -> Tensor:
            found = [
                self.weights.factors(q, self.sharding.length, queries[t.q : t.q + t.rows], keys[t.k : t.k + t.columns])
                for t in tiles
            ]
            return torch.cat(found)

        return factors

    def _positions(self, place: int, device: torch.device) -> Tensor:
        pieces = self.sharding.ring_pieces(place)
        return torch.cat([torch.arange(*piece, device=device) for piece in pieces])


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32
