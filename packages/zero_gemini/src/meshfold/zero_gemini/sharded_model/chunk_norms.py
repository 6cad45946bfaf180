"""This rank's contributions to gradient norms, from its shards of chunks."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from meshfold.zero_gemini.chunks.chunk import Chunk
from meshfold.zero_gemini.chunks.parameter_table import ParameterFacts
from meshfold.zero_gemini.norm import combine, power_sum


class ChunkNorms:
    """Sums of a chunk's gradient that count every element of the global model once."""

    def __init__(self, facts: Mapping[str, ParameterFacts]) -> None:
        """``facts``: about all parameters, by name."""
        self._facts = facts

    def power_sum(self, chunk: Chunk, norm_type: float, shard: Tensor) -> Tensor:
        """Return this rank's contribution to a norm, from its shard of a chunk's gradient on any device."""
        alike = self._facts[chunk.spec.names[0]].kind.holders
        if alike:
            return power_sum(shard, alike, norm_type)
        sums = []
        for part in chunk.slices:
            holders = self._facts[part.name].holders
            if isinstance(holders, Tensor):
                holders = holders[part.parameter_start : part.parameter_start + part.length]
            grad = shard[part.shard_start : part.shard_start + part.length]
            sums.append(power_sum(grad, holders, norm_type))
        return combine(sums, norm_type, shard.device)

    def square_sum(self, chunk: Chunk, shard: Tensor, squares: Tensor | None) -> Tensor:
        """Return this rank's contribution to the 2-norm; ``squares``: sums of squares, if the reduction computed them."""
        alike = self._facts[chunk.spec.names[0]].kind.holders
        return squares.sum() / alike if squares is not None and alike else self.power_sum(chunk, 2.0, shard)
