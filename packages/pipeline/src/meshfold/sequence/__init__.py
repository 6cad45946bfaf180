"""Sequence parallelism: attention over sequences that are split over ranks.

>>> from meshfold.sequence import attention, shard_sequence           # doctest: +SKIP
>>> q, k, v = (shard_sequence(x, mesh) for x in (q, k, v))            # b length heads d -> b s heads d
>>> out = attention(q, k, v, mesh=mesh, mode="ring", causal=True)     # and its gradients: those of one process
"""

from __future__ import annotations

from meshfold.sequence.attention import attention
from meshfold.sequence.dropout import WeightDropout
from meshfold.sequence.loss import loss_share
from meshfold.sequence.mask import Mask
from meshfold.sequence.modes import MODES, dealing
from meshfold.sequence.parallel_model import SequenceParallel, sequence_parallel
from meshfold.sequence.ring_steps import steps, work
from meshfold.sequence.sharding import Dealing
from meshfold.sequence.tiling import Tile, tiles
from meshfold.sequence.token_shards import gather_sequence, next_tokens, positions, shard_sequence
from meshfold.sequence.traffic import traffic

__all__ = [
    "MODES",
    "Dealing",
    "Mask",
    "SequenceParallel",
    "Tile",
    "WeightDropout",
    "attention",
    "dealing",
    "gather_sequence",
    "loss_share",
    "next_tokens",
    "positions",
    "sequence_parallel",
    "shard_sequence",
    "steps",
    "tiles",
    "traffic",
    "work",
]
