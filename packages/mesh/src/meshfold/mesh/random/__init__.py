"""Random numbers that are the same under every layout: by global element, and for each call of dropout."""

from __future__ import annotations

from meshfold.mesh.random.dropout import (
    DropoutStream,
    TokenShards,
    after_calls_elsewhere,
    checkpoint_contexts,
    current_dropout_stream,
    dropout_stream,
    next_dropout_draw,
    set_token_shards,
)
from meshfold.mesh.random.numbers import (
    fill_normal_,
    fill_truncated_normal_,
    fill_uniform_,
    key_of,
    normal,
    random_bits,
    stream_state,
    uniform,
)

__all__ = [
    "DropoutStream",
    "TokenShards",
    "after_calls_elsewhere",
    "checkpoint_contexts",
    "current_dropout_stream",
    "dropout_stream",
    "fill_normal_",
    "fill_truncated_normal_",
    "fill_uniform_",
    "key_of",
    "next_dropout_draw",
    "normal",
    "random_bits",
    "set_token_shards",
    "stream_state",
    "uniform",
]
