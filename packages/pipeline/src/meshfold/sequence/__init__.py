"""Sequence parallelism: attention over sequences that are split over ranks.

>>> from meshfold.sequence import attention, shard_sequence           # doctest: +SKIP
>>> q, k, v = (shard_sequence(x, mesh) for x in (q, k, v))            # b length heads d -> b s heads d
>>> out = attention(q, k, v, mesh=mesh, mode="ring", causal=True)     # and its gradients: those of one process
"""

from __future__ import annotations

import warnings
from typing import Any

from meshfold.sequence.attention import attention, traffic
from meshfold.sequence.dropout import WeightDropout
from meshfold.sequence.hugging_face import positions_from_ids
from meshfold.sequence.image_tokens import ImageTokens, check_image_tokens, find_image_model
from meshfold.sequence.joint_attention import joint_attention
from meshfold.sequence.kernels import count_attention_flops
from meshfold.sequence.parallel_model import SequenceParallel, sequence_parallel
from meshfold.sequence.sharding import MODES, SequenceSharding, sequence_mode, sequence_sharding
from meshfold.sequence.tiling import Mask, Tile, steps, tiles, work
from meshfold.sequence.token_shards import gather_sequence, loss_share, next_tokens, positions, shard_sequence
from meshfold.sequence.ulysses import kv_head_repeats

__all__ = [
    "MODES",
    "ImageTokens",
    "Mask",
    "SequenceParallel",
    "SequenceSharding",
    "Tile",
    "WeightDropout",
    "attention",
    "check_image_tokens",
    "count_attention_flops",
    "find_image_model",
    "gather_sequence",
    "joint_attention",
    "kv_head_repeats",
    "loss_share",
    "next_tokens",
    "positions",
    "positions_from_ids",
    "sequence_mode",
    "sequence_parallel",
    "sequence_sharding",
    "shard_sequence",
    "steps",
    "tiles",
    "traffic",
    "work",
]

_OLD = {"Dealing": "SequenceSharding", "dealing": "sequence_sharding"}


def __getattr__(name: str) -> Any:
    """Map old names to the present ones, with a DeprecationWarning."""
    if name not in _OLD:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"{__name__}.{name} is now {_OLD[name]}", DeprecationWarning, stacklevel=2)
    return globals()[_OLD[name]]
