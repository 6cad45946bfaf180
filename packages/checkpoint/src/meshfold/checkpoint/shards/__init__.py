"""Rectangles of a tensor that each rank keeps and writes."""

from __future__ import annotations

from meshfold.checkpoint.shards.rectangles import (
    Shard,
    ShardRule,
    no_shards,
    ranks_with_same_index,
    shards_of_flat_run,
    shards_of_local,
    shards_of_replicated,
)

__all__ = [
    "Shard",
    "ShardRule",
    "no_shards",
    "ranks_with_same_index",
    "shards_of_flat_run",
    "shards_of_local",
    "shards_of_replicated",
]
